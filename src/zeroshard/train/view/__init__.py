"""The output of a run while it trains: live on a terminal, as lines elsewhere."""

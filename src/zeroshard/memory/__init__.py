"""Where tensors live: the memory tracker, arenas for long-lived tensors, the bucket ring, and the tiers."""

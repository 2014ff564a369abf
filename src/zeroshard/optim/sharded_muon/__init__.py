"""torch's Muon with its momentum on the shards: only updates in bf16 travel, to the rank that orthogonalizes them."""

"""Checkpoints that load on any number of ranks, at any stage, precision and tensor-parallel degree."""

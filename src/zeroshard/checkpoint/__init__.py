"""Checkpoints: saved on any number of ranks, at any stage and precision, and loaded at any other."""

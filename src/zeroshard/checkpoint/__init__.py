"""Checkpoints: saved on any number of ranks, at any stage, precision and tensor degree, and loaded at any other."""

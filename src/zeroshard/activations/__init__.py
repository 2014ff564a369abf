"""Activation checkpoints: which blocks are recomputed, what is kept for that, and where (P_a, P_a+cpu, M_D)."""

"""Activation checkpointing: which blocks are recomputed, what is saved for it, and where (P_a, P_a+cpu, M_D)."""

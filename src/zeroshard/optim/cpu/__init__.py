"""Optimizer updates on the host: native kernels that read and write 16 bits in the same pass, and when they serve."""

"""Optimizer updates on the CPU: native kernels that read and write 16 bits in the same pass, and their scheduling."""

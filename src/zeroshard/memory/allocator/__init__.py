"""Keeping the CUDA caching allocator from fragmenting: segments of the right sizes, allocated at the start."""

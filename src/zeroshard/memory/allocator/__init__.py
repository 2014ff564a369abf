"""Keeps the CUDA caching allocator from fragmenting: preallocates segments of the right sizes."""

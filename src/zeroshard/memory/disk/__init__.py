"""The disk tier: tensors in a file, and their transfers to host memory and back."""

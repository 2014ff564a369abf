"""The disk tier: tensors in a file, and their transfers to and from host memory."""

"""Simulate training on any number of devices, and reproduce the ZeRO paper's results."""

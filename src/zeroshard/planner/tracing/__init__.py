"""Run a model on meta tensors and record its operations."""

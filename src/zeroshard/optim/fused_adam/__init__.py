"""Fused Adam for optimizer states on the device, in one pass over memory."""

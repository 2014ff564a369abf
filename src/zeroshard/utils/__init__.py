"""Small helpers without any knowledge of training."""

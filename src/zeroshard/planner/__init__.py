"""Knowing before running: what a model's states will take."""

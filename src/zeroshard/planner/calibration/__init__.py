"""Measure the rates of the local machine."""

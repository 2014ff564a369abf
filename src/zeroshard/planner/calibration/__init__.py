"""This machine's rates, measured."""

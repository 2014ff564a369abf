"""The suites: each measures one question and prints its tables."""

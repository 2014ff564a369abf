"""What zeroshard costs, measured beside its peers and beside what cannot be undercut: `python -m benchmarks`."""

"""What zeroshard costs, compared with its peers and with the least that is possible: `python -m benchmarks`."""

"""Plans as one HTML file, with pictures."""

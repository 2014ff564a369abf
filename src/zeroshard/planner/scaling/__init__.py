"""Plans on paper for any number of devices, and for the paper's own."""

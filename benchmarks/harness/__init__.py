"""What all suites share: trials in processes, records, workloads, and the loops that train them."""

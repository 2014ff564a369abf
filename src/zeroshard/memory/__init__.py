"""Where tensors live: the ledger that counts them, arenas for the long-lived, the ring of gradient buckets."""

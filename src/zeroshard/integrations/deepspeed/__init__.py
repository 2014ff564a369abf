"""Read a DeepSpeed configuration (``reader``), and show what its keys become (``migrate``). No torch is imported."""

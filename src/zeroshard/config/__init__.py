"""Everything a user may set: ``Config`` and ``Offload``, validated when they are made."""

"""All user options: ``Config`` and ``Offload``, validated on creation."""

"""The engine: module and autograd events (hooks) → order of collectives → the life of a unit."""

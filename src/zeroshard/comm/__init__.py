"""Collectives over the mesh, the order they run in, and the checks that all ranks do the same."""

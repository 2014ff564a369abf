"""Collectives over the mesh, their recorded order, and the checks that all ranks do the same."""

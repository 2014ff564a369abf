"""Orthogonalize matrices by Newton–Schulz iterations, as torch's Muon does: those of one shape at once on a GPU."""

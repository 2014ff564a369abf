"""Machines to plan for: devices, nodes and links, from presets or measurements."""

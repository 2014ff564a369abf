"""Updates of what rests on the device, in one pass over its memory."""

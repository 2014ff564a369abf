"""What a plan knows of devices, nodes and links, named or measured."""

"""Commands of `zeroshard`: what train/ says at the command line."""

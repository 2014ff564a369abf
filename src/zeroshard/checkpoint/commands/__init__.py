"""Commands of `zeroshard`: what checkpoint/ says at the command line."""

"""Commands of `zeroshard`: what planner/ says at the command line."""

"""The commands of `zeroshard`: one file each, with a `main(argv)` that returns the exit status."""

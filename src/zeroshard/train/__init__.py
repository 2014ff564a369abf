"""The training program, `zeroshard train`."""

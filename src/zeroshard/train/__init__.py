"""The main job, `zeroshard train`."""

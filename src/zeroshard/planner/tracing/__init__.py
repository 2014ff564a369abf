"""Running a model on meta tensors, and what is noted of it."""

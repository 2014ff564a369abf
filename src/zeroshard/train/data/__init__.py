"""From text to batches: the corpus, its tokenizer, token files, and the order in which they are read."""

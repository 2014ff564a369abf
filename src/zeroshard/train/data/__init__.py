"""From text to batches: the corpus, its tokenizer, token files, and the order they are read in."""

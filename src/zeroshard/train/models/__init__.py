"""Models to train: the reference GPT and Hugging Face's causal language models, behind one protocol."""

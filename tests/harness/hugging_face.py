"""Small Hugging Face models for several tests."""

from __future__ import annotations

from typing import Any


def llama(vocabulary: int, layers: int = 3) -> Any:
    """Return a Llama with grouped-query attention and without special tokens."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    config.bos_token_id = config.eos_token_id = None
    return transformers.LlamaForCausalLM(config)

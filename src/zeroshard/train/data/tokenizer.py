"""Byte-level BPE tokenizer of the `tokenizers` library, trained here or loaded from a tokenizer.json."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zeroshard.utils.install_hint import install_hint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"  # id 0 of the tokenizers trained here
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # in GPT-2, Llama 3, Llama 2, Gemma
_NUM_BYTE_TOKENS = 256
# texts encoded at once, over all cores; at 256 KiB each they need about 300 MB until their ids are copied
_ENCODE_BATCH_TEXTS = 16


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` ids: the end of text, the 256 bytes, then merges.

    The same texts give the same tokenizer, bit for bit, for any number of threads. Any text can be encoded and decoded
    unchanged, because bytes never seen in training have ids too. (`<|endoftext|>` in a text is encoded as the end of a
    text; ``decode(ids, skip_special_tokens=False)`` writes it back.)

    >>> tokenizer = train_tokenizer(["to be or not to be\\n"] * 9, 300)
    >>> tokenizer.encode("to be, été").tokens
    ['to', 'Ġbe', ',', 'Ġ', 'Ã', '©', 't', 'Ã', '©']
    >>> tokenizer.decode(tokenizer.encode("to be, été").ids)
    'to be, été'
    """
    minimum = _NUM_BYTE_TOKENS + 1
    if vocab_size < minimum:
        raise ValueError(f"vocabulary must be at least {minimum}, for all bytes and {END_OF_TEXT} (got {vocab_size})")
    library = _import_tokenizers()
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair seen once would make a token that is never used again
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained: Tokenizer = tokenizer
    return trained


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json, or the one in a directory, such as a model saved by `transformers`."""
    library = _import_tokenizers()
    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer {path} does not exist: pass a tokenizer.json, or a directory with one, as `save_pretrained` "
            "of a fast tokenizer writes it (nothing is downloaded)"
        )
    try:
        tokenizer: Tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"`tokenizers` cannot read {path}: {error}") from error
    tokenizer.no_truncation()  # some files limit the length to the model's context
    tokenizer.no_padding()
    return tokenizer


def tokenizer_vocab_size(tokenizer: Tokenizer) -> int:
    """Return the number of rows an embedding needs: the largest id plus one, even if some ids are unused."""
    return max(tokenizer.get_vocab().values()) + 1


def end_of_text_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of the end-of-text token, found by its common names; None if there is none."""
    ids = map(tokenizer.token_to_id, _END_OF_TEXT_NAMES)
    return next((id for id in ids if id is not None), None)


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str | None]) -> Iterator[NDArray[np.uint32]]:
    """Yield the ids of each text, and for each None the end-of-text id, if the tokenizer has one.

    Special tokens around a text are left out, because a text may arrive in several parts.

    >>> tokenizer = train_tokenizer(["to be or not to be\\n"] * 9, 300)
    >>> [len(ids) for ids in encode_texts(tokenizer, ["to be", " or not", None])]
    [2, 2, 1]
    """
    texts = iter(texts)
    end_id = end_of_text_id(tokenizer)
    end_ids = np.array([] if end_id is None else [end_id], dtype=np.uint32)
    while batch := list(itertools.islice(texts, _ENCODE_BATCH_TEXTS)):
        parts = [text for text in batch if text is not None]
        encodings = iter(tokenizer.encode_batch_fast(parts, add_special_tokens=False))
        for text in batch:
            yield end_ids if text is None else np.array(next(encodings).ids, dtype=np.uint32)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the ids of a prompt, without special tokens."""
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    return ids


def _import_tokenizers() -> Any:
    try:
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError(f"`tokenizers` is not installed ({error}): {install_hint('train')}") from error
    return tokenizers

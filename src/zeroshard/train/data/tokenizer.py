"""Byte-level BPE tokenizer of the `tokenizers` library, trained here or loaded from a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.utils.install_hint import install_hint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"  # id 0 of the tokenizers trained here
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # in GPT-2, Llama 3, Llama 2, Gemma
_MIN_VOCABULARY = 257  # all bytes, and the end of text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` ids: the end of text, the 256 bytes, then merges.

    The same texts give the same tokenizer. Any text can be encoded and decoded unchanged. (`<|endoftext|>` in a text is
    encoded as the end of a text; ``decode(ids, skip_special_tokens=False)`` writes it back.)

    >>> tokenizer = train_tokenizer(["to be or not to be\\n"] * 9, 300)
    >>> tokenizer.encode("to be, été").tokens
    ['to', 'Ġbe', ',', 'Ġ', 'Ã', '©', 't', 'Ã', '©']
    >>> tokenizer.decode(tokenizer.encode("to be, été").ids)
    'to be, été'
    """
    if vocab_size < _MIN_VOCABULARY:
        raise ValueError(
            f"vocabulary must be at least {_MIN_VOCABULARY}, for all bytes and {END_OF_TEXT} (got {vocab_size})"
        )
    library = _import_tokenizers()
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer: Tokenizer = library.Tokenizer(library.models.BPE())
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
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json, or the one in a directory, such as a model saved by `transformers`."""
    library = _import_tokenizers()
    path = Path(path)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer {path} does not exist: pass a tokenizer.json, or a directory with one, as `save_pretrained` "
            "of a fast tokenizer writes it (nothing is downloaded)"
        )
    try:
        tokenizer: Tokenizer = library.Tokenizer.from_file(str(path))
        tokenizer_vocab_size(tokenizer)
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"`tokenizers` cannot read {path} ({error}): restore it, or pass another") from error
    tokenizer.no_truncation()  # some files limit the length to the model's context
    tokenizer.no_padding()
    return tokenizer


def tokenizer_vocab_size(tokenizer: Tokenizer) -> int:
    """Return the number of rows an embedding needs: the largest id plus one, even if some ids are unused."""
    return max(tokenizer.get_vocab().values()) + 1


def end_of_text_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the id of the end-of-text token, found by its common names; an empty list if there is none."""
    ids = map(tokenizer.token_to_id, _END_OF_TEXT_NAMES)
    return [id for id in ids if id is not None][:1]


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the ids of a prompt, without special tokens."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not UTF-8 at character {error.start}: type it in UTF-8") from error
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens: pass another one")
    return ids


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"`tokenizers` is not installed ({error}): {install_hint('train')}") from error
    return tokenizers

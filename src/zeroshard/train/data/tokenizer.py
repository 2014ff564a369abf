"""The tokenizer: byte-level BPE through the `tokenizers` library, trained here or given as a tokenizer.json."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"  # id 0 of the tokenizers trained here
_END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
)  # its names: in GPT-2, in Llama 3, in Llama 2, in Gemma
_NUM_BYTE_TOKENS = 256
_ENCODE_BATCH_TEXTS = (
    16  # texts encoded at once, over all cores: of 256 KiB each they take about 300 MB until their ids are copied
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocabulary` ids: the end of text, the 256 bytes, then merges.

    The same texts give the same tokenizer, bit for bit, whatever the number of threads. Any text can be encoded and
    comes back unchanged, because bytes never seen in training have their ids too. (`<|endoftext|>` written in a text is
    taken for the end of a text, which ``decode(ids, skip_special_tokens=False)`` writes back.)

    >>> tokenizer = train_tokenizer(["to be or not to be\\n"] * 9, 300)
    >>> tokenizer.encode("to be, été").tokens
    ['to', 'Ġbe', ',', 'Ġ', 'Ã', '©', 't', 'Ã', '©']
    >>> tokenizer.decode(tokenizer.encode("to be, été").ids)
    'to be, été'
    """
    least = _NUM_BYTE_TOKENS + 1
    if vocab_size < least:
        raise ValueError(
            f"vocabulary is {vocab_size}, but must be at least {least}: {_NUM_BYTE_TOKENS} bytes and {END_OF_TEXT}"
        )
    library = _import_tokenizers()
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair seen once would make a token that is never seen again
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained: Tokenizer = tokenizer
    return trained


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json, or the one in a directory, such as a model's that `transformers` saved."""
    library = _import_tokenizers()
    given, path = Path(path), Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"the directory {given} holds no tokenizer.json: save a fast tokenizer there with `save_pretrained` of "
                "transformers, or give the file itself"
            )
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no tokenizer at {given}: give a tokenizer.json or a directory with one "
            "(a name on the Hugging Face hub is not looked up: download its tokenizer.json)"
        )
    try:
        tokenizer: Tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path} is not a tokenizer.json that the `tokenizers` library can read: {error}") from error
    tokenizer.no_truncation()  # some are saved with the model's context as a limit
    tokenizer.no_padding()
    return tokenizer


def tokenizer_vocab_size(tokenizer: Tokenizer) -> int:
    """The number of rows an embedding needs: the largest id plus one, also where ids are left out."""
    return max(tokenizer.get_vocab().values()) + 1


def end_of_text_id(tokenizer: Tokenizer) -> int | None:
    """The id that ends a text, by the names it commonly has; None where there is none of them."""
    ids = map(tokenizer.token_to_id, _END_OF_TEXT_NAMES)
    return next((id for id in ids if id is not None), None)


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str | None]) -> Iterator[NDArray[np.uint32]]:
    """Give the ids of each text in turn, and of each None the end of text, if the tokenizer has one.

    The marks that a tokenizer puts around a prompt are left out, because a text may come in pieces.

    >>> tokenizer = train_tokenizer(["to be or not to be\\n"] * 9, 300)
    >>> [len(ids) for ids in encode_texts(tokenizer, ["to be", " or not", None])]
    [2, 2, 1]
    """
    texts = iter(texts)
    end = end_of_text_id(tokenizer)
    ends = np.array([] if end is None else [end], dtype=np.uint32)
    while batch := list(itertools.islice(texts, _ENCODE_BATCH_TEXTS)):
        pieces = [text for text in batch if text is not None]
        encodings = iter(tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
        for text in batch:
            yield ends if text is None else np.array(next(encodings).ids, dtype=np.uint32)


def disable_parallelism() -> None:
    """Keep to one thread from here on, unless the user's TOKENIZERS_PARALLELISM says otherwise.

    Once the library has used its threads and the variable is unset, it prints a warning at every fork, even of a
    process that only runs another program: so this is called when the corpus is encoded, before anything forks.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _import_tokenizers() -> Any:
    try:
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError(
            f"a tokenizer needs the `tokenizers` package ({error}): run pip install 'zeroshard[train]'"
        ) from error
    return tokenizers

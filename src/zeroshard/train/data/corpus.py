"""The corpus: the bundled or the user's text as token files, for training and validation.

One rank calls :func:`encode_corpus`, which writes to a directory; then all ranks call :func:`open_corpus`:

>>> import tempfile
>>> directory = Path(tempfile.mkdtemp())
>>> encode_corpus([], directory)  # no paths: Shakespeare
>>> corpus = open_corpus(directory, holdout=0.1)
>>> tokenizer_vocab_size(corpus.tokenizer), len(corpus.train), len(corpus.validation)
(1024, 391002, 43445)

[Note: a run keeps its tokens]
Text is encoded once, when a run starts. A resumed run uses its own tokens and tokenizer, whatever has become of the
text: ids of another tokenizer would mean nothing to its weights. Other options, or another length of a token file that
is used in place, raise.
"""

from __future__ import annotations

import itertools
import lzma
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from zeroshard.utils.atomic_file import read_json, write_json

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"  # id 0 of the tokenizers trained here
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # in GPT-2, Llama 3, Llama 2, Gemma
_MIN_VOCABULARY = 257  # all bytes, and the end of text
TOKEN_FILE_SUFFIXES = (".npy", ".bin")
PART_CHARS = 2**20  # of text encoded at a time
_PARTS_AT_ONCE = 4  # over all cores; they need about 300 MB until their ids are copied
_BUNDLED = Path(__file__).parent  # NOTICE names the edition, benchmarks/bundled_text.py makes the files
_BUNDLED_VOCABULARY = 1024
_RECORD_FILE = "corpus.json"


@dataclass(frozen=True)
class Corpus:
    """The tokens of a run."""

    train: NDArray[np.integer[Any]]
    validation: NDArray[np.integer[Any]]
    """Empty without validation data."""
    tokenizer: Tokenizer | None
    """None if token files were given without one."""


def shakespeare() -> str:
    """Return eight plays, 1.04 MB of ASCII; NOTICE names the edition.

    >>> shakespeare()[:16]
    'ROMEO AND JULIET'
    """
    ids = np.frombuffer(lzma.decompress((_BUNDLED / "shakespeare.xz").read_bytes()), dtype="<u2")
    return str(load_tokenizer(_BUNDLED).decode(ids.tolist()))


def encode_corpus(
    paths: Sequence[str | Path],
    directory: Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = _BUNDLED_VOCABULARY,
    validation: Sequence[str | Path] = (),
    options: Mapping[str, Any] | None = None,
) -> None:
    """Write token files and the tokenizer to `directory`.

    `paths` and `validation` are text files, or one token file, which is used in place. Without
    paths, :func:`shakespeare` is used. Without a tokenizer, one of `vocab_size` ids is trained on the training text.
    Texts are separated by the tokenizer's end of text, if it has one. `options` are those of the run: see
    [Note: a run keeps its tokens].
    """
    train = _source_files(paths)
    held_out = _source_files(validation)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _RECORD_FILE).unlink(missing_ok=True)  # rewritten at the end: a directory with a record is complete
    if not train:
        train = [directory / "shakespeare.txt"]
        train[0].write_text(shakespeare())
        if tokenizer is None and vocab_size == _BUNDLED_VOCABULARY:
            tokenizer = _BUNDLED
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    if given is None and not is_token_file(train[0]):
        given = train_tokenizer((part for file in train for part in read_text(file)), vocab_size)
    splits = {}
    for split, files in (("train", train), ("validation", held_out)):
        if not files:
            continue
        if is_token_file(files[0]):
            name = str(files[0].resolve())
        elif given is not None:
            name = f"{split}.npy"
            dtype = "<u2" if tokenizer_vocab_size(given) <= 2**16 else "<u4"
            np.save(directory / name, np.concatenate([np.array(ids, dtype) for ids in _encode_texts(files, given)]))
        else:
            raise ValueError(
                f"--data has token ids, but {files[0]} is text: pass the tokenizer that made the ids as --tokenizer"
            )
        splits[split] = [name, len(open_tokens(directory / name))]
    if given is not None:
        given.save(str(directory / TOKENIZER_FILE))
        # After it has used its threads, `tokenizers` prints a warning at every fork unless this variable is set.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    record = {"splits": splits, "has_tokenizer": given is not None, "options": dict(options or {})}
    write_json(directory / _RECORD_FILE, record)


def open_corpus(directory: Path, *, holdout: float = 0.1, options: Mapping[str, Any] | None = None) -> Corpus:
    """Open the training and validation tokens that :func:`encode_corpus` wrote.

    Without validation texts, the last fraction `holdout` of the tokens is used for validation; 0 disables it. Raises if
    it was given other `options`: see [Note: a run keeps its tokens].
    """
    path = directory / _RECORD_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no tokens (no {_RECORD_FILE}): restore it, or start a new run")
    record = read_json(path)
    if record.keys() != {"splits", "has_tokenizer", "options"}:
        raise ValueError(f"{path} is of another version of zeroshard, or damaged: restore it, or start a new run")
    if options is not None and options != record["options"]:
        raise ValueError(
            f"the run's tokens were made with {record['options']}, not {dict(options)}: omit these options to resume "
            "with the run's own tokens, or pass another --out to start a new run"
        )
    opened: dict[str, NDArray[np.integer[Any]]] = {}
    for split, (file, length) in record["splits"].items():
        opened[split] = open_tokens(directory / file)
        if len(opened[split]) != length:
            raise ValueError(
                f"{file} has {len(opened[split])} tokens, expected {length} as when the run started: restore it, or "
                "pass another --out to start a new run"
            )
    train = opened["train"]
    boundary = len(train)
    if "validation" not in opened:
        boundary -= round(len(train) * holdout)
    validation = opened.get("validation", train[boundary:])
    return Corpus(train[:boundary], validation, load_tokenizer(directory) if record["has_tokenizer"] else None)


def open_tokens(path: Path) -> NDArray[np.integer[Any]]:
    """Map a file of token ids: a .npy, or a .bin of little-endian 16-bit numbers. It may be larger than memory."""
    ids: NDArray[Any]
    try:
        ids = np.lib.format.open_memmap(path, mode="r") if path.suffix == ".npy" else np.memmap(path, "<u2", mode="r")
    except Exception as error:  # numpy parses a header as Python: a damaged one raises many classes
        raise ValueError(f"{path} is not a complete .npy file, or .bin of 16-bit ids ({error})") from error
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "ui":
        raise ValueError(
            f"{path} has the shape {ids.shape} and the dtype {ids.dtype}, expected one dimension of uint16 or uint32"
        )
    return ids


def is_token_file(path: str | Path) -> bool:
    """Return whether a path is a file of token ids, not of text."""
    return Path(path).suffix in TOKEN_FILE_SUFFIXES


def read_text(path: Path) -> Iterator[str]:
    """Read a text file in parts of whole lines, of about `PART_CHARS` characters."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while lines := file.readlines(PART_CHARS):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 ({error.reason}): convert it, for example with iconv -f latin1 -t utf-8, or omit it"
        ) from error


def _source_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files of texts, or the one file of tokens; raise if one is missing or empty."""
    files = [Path(path) for path in paths]
    for path in files:
        if is_token_file(path) and len(files) > 1:
            raise ValueError(f"{path} is a token file and must be the only path (got {len(files)} paths)")
        if not path.is_file() or not path.stat().st_size:
            raise FileNotFoundError(f"{path} has no text: expected a file that is not empty")
    return files


def _encode_texts(files: list[Path], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the ids of parts of the texts, and the end of text after each text."""
    for file in files:
        parts = read_text(file)
        while batch := list(itertools.islice(parts, _PARTS_AT_ONCE)):
            # without special tokens around a part
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield encoding.ids
        yield end_of_text_ids(tokenizer)


# ------------------------------------------------------------------------------------------ tokenizers


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
    byte_level = pre_tokenizers.ByteLevel
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
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
    path = Path(path)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer {path} does not exist: pass a tokenizer.json, or a directory with one, as `save_pretrained` "
            "of a fast tokenizer writes it (nothing is downloaded)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
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

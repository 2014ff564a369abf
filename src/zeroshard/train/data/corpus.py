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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zeroshard.train.data.tokenizer import (
    TOKENIZER_FILE,
    end_of_text_ids,
    load_tokenizer,
    tokenizer_vocab_size,
    train_tokenizer,
)
from zeroshard.utils.atomic_file import read_json, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKEN_FILE_SUFFIXES = (".npy", ".bin")
TEXT_SUFFIXES = (".markdown", ".md", ".rst", ".tex", ".text", ".txt")  # in directories; a named file may have any
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
    tokenizer_path: Path | None


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

    `paths` and `validation` are text files and directories of them, or one token file, which is used in place. Without
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
    sources = {"train": train, "validation": held_out} if held_out else {"train": train}
    files = {split: _encode_split(split, paths, directory, given) for split, paths in sources.items()}
    if given is not None:
        given.save(str(directory / TOKENIZER_FILE))
        # After it has used its threads, `tokenizers` prints a warning at every fork unless this variable is set.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    splits = {split: [file, len(open_tokens(directory / file))] for split, file in files.items()}
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
    tokenizer_path = directory / TOKENIZER_FILE if record["has_tokenizer"] else None
    tokenizer = None if tokenizer_path is None else load_tokenizer(tokenizer_path)
    return Corpus(train[:boundary], validation, tokenizer, tokenizer_path)


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
    return Path(path).suffix in TOKEN_FILE_SUFFIXES and not Path(path).is_dir()


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
    """Return one token file, or text files: files as given, directories with all files below them, sorted by name.

    In a directory, files that are hidden, empty or without a text suffix (`*.txt`, `*.md`, …) are skipped.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if is_token_file(path) and len(paths) > 1:
            raise ValueError(f"{path} is a token file and must be the only path (got {len(paths)} paths)")
        found = [path] if path.is_file() and path.stat().st_size else []
        if path.is_dir():
            found = sorted(_walk_text_files(path))
        if not found:
            raise FileNotFoundError(
                f"{path} has no text: expected a file that is not empty, or a directory with files named "
                + ", ".join(f"*{suffix}" for suffix in TEXT_SUFFIXES)
            )
        files += found
    return files


def _walk_text_files(directory: Path) -> Iterator[Path]:
    def raise_error(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(directory, onerror=raise_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder, name) for name in names):
            is_text = path.suffix.lower() in TEXT_SUFFIXES and not path.name.startswith(".")
            if is_text and path.is_file() and path.stat().st_size:
                yield path


def _encode_split(split: str, sources: list[Path], directory: Path, tokenizer: Tokenizer | None) -> str:
    """Return the name of a split's token file in `directory`, or its absolute path; encode texts."""
    if is_token_file(sources[0]):
        return str(sources[0].resolve())
    if tokenizer is None:
        raise ValueError(
            f"--data has token ids, but {sources[0]} is text: pass the tokenizer that made the ids as --tokenizer"
        )
    dtype = "<u2" if tokenizer_vocab_size(tokenizer) <= 2**16 else "<u4"
    path = directory / f"{split}.npy"
    np.save(path, np.concatenate([np.array(ids, dtype) for ids in _encode_texts(sources, tokenizer)]))
    return path.name


def _encode_texts(files: list[Path], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the ids of parts of the texts, and the end of text after each text."""
    for file in files:
        parts = read_text(file)
        while batch := list(itertools.islice(parts, _PARTS_AT_ONCE)):
            # without special tokens around a part
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield encoding.ids
        yield end_of_text_ids(tokenizer)

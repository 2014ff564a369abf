"""The corpus: encode bundled or user text into two token files, for training and validation.

One rank calls :func:`encode_corpus`, which writes to a directory; then all ranks call :func:`open_corpus`:

>>> import tempfile
>>> directory = Path(tempfile.mkdtemp())
>>> encode_corpus([], directory, vocab_size=512)  # no paths: Shakespeare
True
>>> corpus = open_corpus(directory, holdout=0.1)
>>> corpus.vocab_size, len(corpus.train) > 4 * len(corpus.validation)
(512, True)
"""

from __future__ import annotations

import hashlib
import lzma
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.train.data.token_file import TokenFile, is_token_file, smallest_dtype, write_token_chunks
from zeroshard.train.data.tokenizer import (
    encode_texts,
    load_tokenizer,
    tokenizer_vocab_size,
    train_tokenizer,
)
from zeroshard.utils.atomic_file import read_json, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT_SUFFIXES = (".markdown", ".md", ".rst", ".tex", ".text", ".txt")  # in directories; a named file may have any
CHUNK_BYTES = 2**18  # of text encoded at a time
_FORMAT_VERSION = 1  # format of a corpus directory; another version is encoded again


@dataclass(frozen=True)
class Corpus:
    """The tokens of a run."""

    train: TokenFile
    validation: TokenFile | None
    """None without validation data."""
    tokenizer_path: Path | None
    """The tokenizer.json; None if token files were given without one."""
    vocab_size: int | None
    """Number of ids of the tokenizer."""


def shakespeare() -> str:
    """Return eight plays, 1.04 MB of ASCII; NOTICE names the edition.

    >>> shakespeare()[:16]
    'ROMEO AND JULIET'
    """
    return lzma.decompress(_read_bundled()).decode("ascii")


def encode_corpus(
    paths: Sequence[str | Path],
    directory: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 4096,
    validation: Sequence[str | Path] = (),
    dtype: str = "uint16",
) -> bool:
    """Encode texts into token files in `directory`, unless they are up to date; return whether it encoded them.

    `paths` and `validation` are text files and directories of them, or one token file, which is used in place (`dtype`
    is that of a .bin). Without paths, :func:`shakespeare` is used. Without a tokenizer, one of `vocab_size` ids is
    trained on the training text. Texts are separated by the tokenizer's end of text, if it has one.
    """
    directory = Path(directory)
    train_files, validation_files = _source_files(paths), _source_files(validation) if validation else []
    loaded_tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
    _check_sources(train_files, validation_files, loaded_tokenizer is not None, dtype)
    source = {
        "format": _FORMAT_VERSION,
        "train": [_file_fingerprint(file) for file in train_files] or hashlib.sha256(_read_bundled()).hexdigest(),
        "validation": [_file_fingerprint(file) for file in validation_files],
        "tokenizer": vocab_size
        if loaded_tokenizer is None
        else hashlib.sha256(loaded_tokenizer.to_str().encode()).hexdigest(),
        "dtype": dtype,
    }
    if _is_up_to_date(directory, source):
        return False
    record = directory / "corpus.json"
    directory.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)  # rewritten at the end: a directory with a record is complete
    try:
        result = _encode_sources(train_files, validation_files, directory, loaded_tokenizer, vocab_size)
    finally:
        # After it has used its threads, `tokenizers` prints a warning at every fork unless this variable is set.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    write_json(record, {**result, "dtype": dtype, "source": source})
    return True


def open_corpus(directory: str | Path, *, holdout: float = 0.1) -> Corpus:
    """Open the training and validation tokens that :func:`encode_corpus` wrote.

    Without validation texts, the last fraction `holdout` of the tokens is used for validation; 0 disables it.
    """
    directory = Path(directory)
    record_path = directory / "corpus.json"
    if not record_path.is_file():
        raise FileNotFoundError(f"{directory} has no encoded corpus (no corpus.json): call encode_corpus on one rank")
    record = read_json(record_path)
    train = TokenFile.open(directory / record["train"], record["dtype"])
    validation = None
    if record["validation"] is not None:
        validation = TokenFile.open(directory / record["validation"], record["dtype"])
    elif holdout:
        train, validation = train.split(holdout)
    tokenizer = None if record["vocabulary"] is None else directory / "tokenizer.json"
    return Corpus(train, validation, tokenizer, record["vocabulary"])


def text_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the text files of `paths`: files as given, directories with all files below them, sorted by name.

    In a directory, files that are hidden, empty or without a text suffix (`*.txt`, `*.md`, …) are skipped.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = sorted(_walk_text_files(path))
            if not below:
                names = ", ".join(f"*{suffix}" for suffix in TEXT_SUFFIXES)
                raise ValueError(f"directory {path} has no text files: expected files named {names}")
            files += below
        elif not path.exists():
            raise FileNotFoundError(f"text file or directory {path} does not exist")
        elif not path.stat().st_size:
            raise ValueError(f"text file {path} is empty: omit it")
        else:
            files.append(path)
    return files


def read_text(path: Path) -> Iterator[str]:
    """Read a text file in parts of about `CHUNK_BYTES` bytes, split at line ends if there are any."""
    offset, pending = 0, b""  # offset of `pending` in the file; bytes not yet yielded
    with open(path, "rb") as file:
        while len(block := file.read(CHUNK_BYTES)) == CHUNK_BYTES:
            pending += block
            split = _split_point(pending)
            if split:
                yield _decode_text(path, pending[:split], offset)
            offset, pending = offset + split, pending[split:]
    if pending + block:
        yield _decode_text(path, pending + block, offset)


def _split_point(text: bytes) -> int:
    """Return where to split a text: if possible after a single line end, which leaves the usual tokens unchanged."""
    end = len(text) - 1
    while (end := text.rfind(b"\n", 0, end)) > 0:
        if not text[end - 1 : end].isspace() and not text[end + 1 : end + 2].isspace():
            return end + 1
    last = text.rfind(b"\n") + 1
    if last:
        return last
    start = len(text) - 1  # no line end: split before the last character, which may be incomplete
    while start > 0 and text[start] & 0xC0 == 0x80:  # a byte that continues a character
        start -= 1
    return start


def _decode_text(path: Path, text: bytes, start: int) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 at byte {start + error.start} (0x{text[error.start]:02x}): convert it, for example "
            "with iconv -f latin1 -t utf-8, or omit it"
        ) from error


def _walk_text_files(directory: Path) -> Iterator[Path]:
    def raise_error(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(directory, onerror=raise_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            is_text = not name.startswith(".") and path.suffix.lower() in TEXT_SUFFIXES
            if is_text and path.is_file() and path.stat().st_size:
                yield path


def _source_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return one token file, or text files."""
    tokens = [path for path in map(Path, paths) if is_token_file(path)]
    if tokens and len(paths) > 1:
        raise ValueError(f"{tokens[0]} is a token file and must be the only path (got {len(paths)} paths)")
    return tokens or text_files(paths)


def _check_sources(train: list[Path], held_out: list[Path], tokenizer_given: bool, dtype: str) -> None:
    paths = [files[0] for files in (train, held_out) if _is_encoded(files)]
    for path in paths:
        TokenFile.open(path, dtype)  # raises if it cannot be opened
    if held_out and len(paths) == 1 and not tokenizer_given:
        raise ValueError(f"{paths[0]} has token ids, but the other data is text: pass the tokenizer that made the ids")


def _is_encoded(files: list[Path]) -> bool:
    return bool(files) and is_token_file(files[0])


def _encode_sources(
    train: list[Path], held_out: list[Path], directory: Path, tokenizer: Tokenizer | None, vocab_size: int
) -> dict[str, Any]:
    """Write the files of a corpus; return their entries for the record."""
    if tokenizer is None and _is_encoded(train):
        validation_path = str(held_out[0].resolve()) if held_out else None
        return {"train": str(train[0].resolve()), "validation": validation_path, "vocabulary": None}
    if tokenizer is None:
        tokenizer = train_tokenizer((text for text in _documents(train) if text is not None), vocab_size)
    tokenizer.save(str(directory / "tokenizer.json"))
    return {
        "train": _encode_split(train, directory / "train.npy", tokenizer),
        "validation": _encode_split(held_out, directory / "validation.npy", tokenizer) if held_out else None,
        "vocabulary": tokenizer_vocab_size(tokenizer),
    }


def _encode_split(files: list[Path], path: Path, tokenizer: Tokenizer) -> str:
    """Encode texts to `path` and return its name; for a token file, return its absolute path."""
    if _is_encoded(files):
        return str(files[0].resolve())
    write_token_chunks(
        path, encode_texts(tokenizer, _documents(files)), smallest_dtype(tokenizer_vocab_size(tokenizer) - 1)
    )
    return path.name


def _documents(files: list[Path]) -> Iterator[str | None]:
    """Yield parts of text, and None at the end of each text."""
    if not files:
        yield shakespeare()
        yield None
    for file in files:
        yield from read_text(file)
        yield None


def _is_up_to_date(directory: Path, source: dict[str, Any]) -> bool:
    """Return whether `directory` holds a corpus encoded from `source`."""
    try:
        record = read_json(directory / "corpus.json")
    except (FileNotFoundError, ValueError):
        return False
    names = [name for name in (record.get("train"), record.get("validation")) if name is not None]
    return all((directory / name).is_file() for name in names) and record.get("source") == source


def _file_fingerprint(file: Path) -> list[str | int]:
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def _read_bundled() -> bytes:
    return (resources.files("zeroshard.train.data") / "shakespeare.txt.xz").read_bytes()

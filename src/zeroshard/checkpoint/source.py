"""Source: what is loaded from: a checkpoint, or weights that others wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.contents import Contents
from zeroshard.checkpoint.foreign import ForeignReader, is_foreign, open_foreign, saved_of
from zeroshard.checkpoint.history import find_checkpoint
from zeroshard.checkpoint.index import Index, Saved, is_checkpoint
from zeroshard.checkpoint.plain import decode
from zeroshard.checkpoint.reader import Reader, TensorReader


@dataclass
class Source:
    """What is read."""

    path: Path
    tensors: dict[str, Saved]
    reader: TensorReader
    index: Index | None  # of a checkpoint; None of weights alone

    @classmethod
    def open(cls, path: Path, rename: Callable[[str], str] | None, rank: int = 0, ranks: int = 1) -> Source:
        """Open what :func:`find_source` found; refuses a checkpoint that lacks a file, or has one of another size.

        The files' own headers are compared with the index, some by each of the ``ranks`` that open it together.
        """
        if not is_checkpoint(path) and is_foreign(path):
            foreign = open_foreign(path, rename)
            return cls(path, saved_of(foreign), ForeignReader(foreign), None)
        index = Index.read(path)
        index.check_sizes(path, range(len(index.files)))
        index.check_headers(path, range(rank, len(index.files), ranks))
        return cls(path, index.tensors, Reader(path, index), index)

    def decode(self, value: Any) -> Any:
        """Plain data of a checkpoint, with the tensors in it."""
        with Contents(self.path, self.index) as contents:
            return decode(value, lambda name: contents.tensor(f"other/{name}"))


def find_source(path: Path) -> Path:
    """What a path means: weights, a checkpoint, or the latest of several."""
    return path if not is_checkpoint(path) and is_foreign(path) else find_checkpoint(path)

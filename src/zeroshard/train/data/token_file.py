"""TokenFile: token ids in a file, mapped into memory, not read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

TOKEN_FILE_SUFFIXES = (".npy", ".bin")
TOKEN_DTYPES = ("uint16", "uint32")


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The token ids of a file, or of a part of it, in their order.

    The ids stay in the file: a slice of `ids` is read when it is used, so a file may be larger than memory, and the
    ranks of one host share its pages.

    >>> train, held_out = TokenFile(np.arange(10)).split(0.2)
    >>> len(train), held_out.ids.tolist(), str(held_out)
    (8, [8, 9], 'an array (from token 8)')
    """

    ids: NDArray[np.integer[Any]] = field(repr=False)  # one dimension
    path: Path | None = None
    """Where the ids lie; None for an array that lies in memory."""
    start: int = 0
    """The place of the first of `ids` in the file."""

    def __post_init__(self) -> None:
        """Refuse what is not a line of whole numbers."""
        if self.ids.ndim != 1:
            raise ValueError(f"{self} has the shape {self.ids.shape}, but token ids have one dimension: flatten them")
        if self.ids.dtype.kind not in "ui":
            raise ValueError(
                f"{self} holds {self.ids.dtype}, but token ids are whole numbers: save them as uint16 or uint32"
            )

    @classmethod
    def open(cls, path: str | Path, dtype: str = "uint16") -> TokenFile:
        """Map a file of token ids: a .npy, or a .bin of little-endian numbers of `dtype`, uint16 or uint32.

        A .npy says itself of what dtype it is, so `dtype` is not looked at.
        """
        path = Path(path)
        if path.suffix not in TOKEN_FILE_SUFFIXES:
            raise ValueError(f"{path} is not a token file: its name ends in .npy or .bin")
        if not path.is_file():
            raise FileNotFoundError(f"there is no token file {path}")
        tokens = cls(_map_npy(path) if path.suffix == ".npy" else _map_bin(path, dtype), path)
        if not len(tokens):
            raise ValueError(f"the token file {path} is empty: it must hold at least one sequence")
        return tokens

    def __len__(self) -> int:
        """Count the ids."""
        return int(self.ids.size)

    def __str__(self) -> str:
        """Name the file, and where in it this part begins."""
        name = "an array" if self.path is None else str(self.path)
        return f"{name} (from token {self.start})" if self.start else name

    def split(self, fraction: float) -> tuple[TokenFile, TokenFile]:
        """Cut off the last `share` of the ids: what comes before it, and that share. Nothing is copied."""
        if not 0 <= fraction < 1:
            raise ValueError(f"the share to hold out is {fraction}, but must be from 0 up to below 1: give 0.1, say")
        cut = len(self) - round(len(self) * fraction)
        return (
            TokenFile(self.ids[:cut], self.path, self.start),
            TokenFile(self.ids[cut:], self.path, self.start + cut),
        )


def is_token_file(path: Path) -> bool:
    """Whether a path names a file of token ids rather than of text."""
    return path.suffix in TOKEN_FILE_SUFFIXES and not path.is_dir()


def write_tokens(path: str | Path, ids: ArrayLike) -> None:
    """Write ids as a .npy of the smallest of uint16 and uint32 that holds them.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "tokens.npy"
    >>> write_tokens(path, [1, 2, 65_536])
    >>> TokenFile.open(path).ids
    memmap([    1,     2, 65536], dtype=uint32)
    """
    array = np.asarray(ids)
    tokens = TokenFile(array if array.size else array.astype(np.uint16))  # an empty list is of floats to numpy
    write_token_chunks(path, [tokens.ids], smallest_dtype(int(tokens.ids.max(initial=0))))


def smallest_dtype(largest: int) -> str:
    """The smallest dtype of token files that holds ids up to `largest`."""
    for dtype in TOKEN_DTYPES:
        if largest <= np.iinfo(dtype).max:
            return dtype
    raise ValueError(f"the token id {largest} is larger than uint32 holds: ids end at {np.iinfo('uint32').max}")


def write_token_chunks(path: str | Path, chunks: Iterable[NDArray[np.integer[Any]]], dtype: str) -> int:
    """Write chunks of ids, one after another, as one .npy; return how many ids there were.

    The file appears under its name only when it is whole: until then it has a hidden name beside it.
    """
    path = Path(path)
    if path.suffix != ".npy":
        raise ValueError(f"token ids are written as .npy, got the name {path.name}: end it in .npy")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    count = 0
    try:
        with open(partial, "wb") as file:
            begin = _write_header(file, dtype, 0)
            for chunk in chunks:
                file.write(_check_range(chunk, dtype, count).tobytes())
                count += chunk.size
            if not count:
                raise ValueError(f"there are no token ids to write to {path}: the text is empty")
            file.seek(0)
            if _write_header(file, dtype, count) != begin:  # numpy leaves room for a longer count since 1.23
                raise RuntimeError(f"numpy {np.__version__} cannot rewrite the header of {partial}: update numpy")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _check_range(chunk: NDArray[np.integer[Any]], dtype: str, count: int) -> NDArray[np.integer[Any]]:
    bad = np.flatnonzero((chunk < 0) | (chunk > np.iinfo(dtype).max))
    if bad.size:
        raise ValueError(f"the id {chunk[bad[0]]} of token {count + bad[0]} does not fit into {dtype}")
    return chunk.astype(_little_endian(dtype))


def _write_header(file: Any, dtype: str, count: int) -> int:
    header = {"descr": _little_endian(dtype).str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    return int(file.tell())


def _map_npy(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a whole .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is not a .npy file but an archive of several: save one array with numpy.save")
    return array


def _map_bin(path: Path, dtype: str) -> NDArray[Any]:
    if dtype not in TOKEN_DTYPES:
        raise ValueError(f"the dtype of {path} is uint16 or uint32, got {dtype!r}")
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ValueError(
            f"{path} has {size} bytes, which is no whole number of {dtype} ids of {width} bytes: it is cut off, or of "
            "another dtype"
        )
    if not size:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=_little_endian(dtype), mode="r")


def _little_endian(dtype: DTypeLike) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")

"""TokenFile: a memory-mapped file of token ids."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

TOKEN_FILE_SUFFIXES = (".npy", ".bin")
TOKEN_DTYPES = ("uint16", "uint32")


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The token ids of a file, or of a contiguous part of it.

    The ids stay in the file and are read on use. So a file may be larger than memory, and the
    ranks of one host share its pages.

    >>> train, validation = TokenFile(np.arange(10)).split(0.2)
    >>> len(train), validation.ids.tolist(), str(validation)
    (8, [8, 9], 'an array (from token 8)')
    """

    ids: NDArray[np.integer[Any]] = field(repr=False)  # one dimension
    path: Path | None = None
    """The file that stores the ids; None for an array in memory."""
    start: int = 0
    """Position of the first of `ids` in the file."""

    def __post_init__(self) -> None:
        if self.ids.ndim != 1:
            raise ValueError(f"{self} must have one dimension (got the shape {self.ids.shape}): flatten it")
        if self.ids.dtype.kind not in "ui":
            raise ValueError(f"{self} must contain integers (got {self.ids.dtype}): save it as uint16 or uint32")

    @classmethod
    def open(cls, path: str | Path, dtype: str = "uint16") -> TokenFile:
        """Map a file of token ids: a .npy, or a .bin of little-endian numbers of `dtype`, uint16 or uint32.

        `dtype` is ignored for a .npy, which stores its own dtype.
        """
        path = Path(path)
        if path.suffix not in TOKEN_FILE_SUFFIXES:
            raise ValueError(f"{path} is not a token file: its name must end in .npy or .bin")
        if not path.is_file():
            raise FileNotFoundError(f"token file {path} does not exist")
        tokens = cls(_map_npy(path) if path.suffix == ".npy" else _map_bin(path, dtype), path)
        if not len(tokens):
            raise ValueError(f"token file {path} is empty")
        return tokens

    def __len__(self) -> int:
        return int(self.ids.size)

    def __str__(self) -> str:
        """Return the file name, and where in it this part begins."""
        name = "an array" if self.path is None else str(self.path)
        return f"{name} (from token {self.start})" if self.start else name

    def split(self, fraction: float) -> tuple[TokenFile, TokenFile]:
        """Split off the last `fraction` of the ids; return the first part and that one. Nothing is copied."""
        if not 0 <= fraction < 1:
            raise ValueError(f"the validation fraction must be at least 0 and below 1 (got {fraction})")
        boundary = len(self) - round(len(self) * fraction)
        return (
            TokenFile(self.ids[:boundary], self.path, self.start),
            TokenFile(self.ids[boundary:], self.path, self.start + boundary),
        )


def is_token_file(path: Path) -> bool:
    """Return whether a path is a file of token ids, not of text."""
    return path.suffix in TOKEN_FILE_SUFFIXES and not path.is_dir()


def smallest_dtype(largest: int) -> str:
    """Return the smallest token file dtype that holds ids up to `largest`.

    >>> smallest_dtype(65_535), smallest_dtype(65_536)
    ('uint16', 'uint32')
    """
    for dtype in TOKEN_DTYPES:
        if largest <= np.iinfo(dtype).max:
            return dtype
    raise ValueError(f"token id {largest} does not fit in uint32")


def write_token_chunks(path: str | Path, chunks: Iterable[NDArray[np.integer[Any]]], dtype: str) -> int:
    """Write chunks of ids, one after another, as one .npy; return the number of ids.

    The file gets its name only when it is complete; until then it has a hidden name in the same directory.
    """
    path = Path(path)
    if path.suffix != ".npy":
        raise ValueError(f"the name of a token file must end in .npy (got {path.name})")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    count = 0
    try:
        with open(partial, "wb") as file:
            data_start = _write_header(file, dtype, 0)
            for chunk in chunks:
                file.write(_check_range(chunk, dtype, count).tobytes())
                count += chunk.size
            if not count:
                raise ValueError(f"no token ids to write to {path}: the text is empty")
            file.seek(0)
            if _write_header(file, dtype, count) != data_start:  # numpy reserves space for a longer count since 1.23
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
        raise ValueError(f"the id {chunk[bad[0]]} of token {count + bad[0]} does not fit in {dtype}")
    return chunk.astype(_little_endian(dtype))


def _write_header(file: Any, dtype: str, count: int) -> int:
    header = {"descr": _little_endian(dtype).str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    return int(file.tell())


def _map_npy(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a complete .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is an archive of arrays, not a .npy file: save one array with numpy.save")
    return array


def _map_bin(path: Path, dtype: str) -> NDArray[Any]:
    if dtype not in TOKEN_DTYPES:
        raise ValueError(f"the dtype of {path} must be uint16 or uint32 (got {dtype!r})")
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ValueError(
            f"{path} has {size} bytes, which is not a multiple of the {width} bytes of {dtype}: it is truncated or "
            "has another dtype"
        )
    if not size:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=_little_endian(dtype), mode="r")


def _little_endian(dtype: DTypeLike) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")

"""Safetensors files: write tensors one by one, and read them memory-mapped."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.utils.atomic_file import is_file_name, read_json

# dtype names of the safetensors format
DTYPE_NAMES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.bool: "BOOL",
}
SAFETENSORS_INDEX_FILE = "model.safetensors.index.json"
SAFETENSORS_FILE = "model.safetensors"


@dataclass(frozen=True)
class TensorInfo:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the file in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def header_entry(self, offset: int) -> dict[str, Any]:
        """Return the tensor's entry in a file's header; ``offset`` is its first byte after the header."""
        return {
            "dtype": DTYPE_NAMES[self.dtype],
            "shape": list(self.shape),
            "data_offsets": [offset, offset + self.nbytes],
        }


FetchTensor = Callable[[str], torch.Tensor]


def write_safetensors(
    path: Path | None, entries: Sequence[TensorInfo], fetch: FetchTensor, metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file with at most one tensor in memory.

    ``fetch`` is called for each tensor in turn, largest element size first, so that all tensors are aligned. If
    ``fetch`` is a collective, all ranks must call this function; ranks that do not write pass ``path=None``. The write
    is atomic.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> write_safetensors(path, [TensorInfo("w", torch.float32, (2,))], lambda name: torch.ones(2), {})
    >>> with SafetensorsWeights(path) as weights:
    ...     weights["w"]
    tensor([1., 1.])
    """
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    if path is None:
        for entry in entries:
            fetch(entry.name)
        return
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(build_header(entries, metadata))
        for entry in entries:
            tensor = fetch(entry.name).detach().to(device="cpu", dtype=entry.dtype).contiguous()
            if tuple(tensor.shape) != entry.shape:
                raise ValueError(f"tensor {entry.name!r} has shape {tuple(tensor.shape)}, expected {entry.shape}")
            file.write(as_memoryview(tensor))
            del tensor  # free it before the next fetch
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def write_safetensors_directory(
    directory: Path | None,
    entries: Sequence[TensorInfo],
    fetch: FetchTensor,
    metadata: Mapping[str, str],
    max_shard_bytes: float = 5e9,
) -> None:
    """Write tensors in Hugging Face format: one file, or several of at most ``max_shard_bytes`` and an index."""
    files: list[list[TensorInfo]] = [[]]
    nbytes = 0
    for entry in entries:
        if files[-1] and nbytes + entry.nbytes > max_shard_bytes:
            files.append([])
            nbytes = 0
        files[-1].append(entry)
        nbytes += entry.nbytes
    if len(files) == 1:
        write_safetensors(directory and directory / SAFETENSORS_FILE, entries, fetch, metadata)
        return
    weight_map: dict[str, str] = {}
    for number, file_entries in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(directory and directory / name, file_entries, fetch, metadata)
        weight_map |= {entry.name: name for entry in file_entries}
    if directory is not None:
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": weight_map}
        (directory / SAFETENSORS_INDEX_FILE).write_text(json.dumps(index, indent=2))


def build_header(entries: Sequence[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return a file's header: the length of a JSON text, and the text, which has the offsets of each tensor."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        if entry.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"tensor {entry.name!r} has dtype {entry.dtype}, which safetensors files do not support: cast it"
            )
        if entry.name in table:
            raise ValueError(f"two tensors are named {entry.name!r}: give each tensor its own name")
        table[entry.name] = entry.header_entry(offset)
        offset += entry.nbytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def as_memoryview(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor. The tensor must outlive the result.

    >>> tensor = torch.ones(2, dtype=torch.uint8)
    >>> as_memoryview(tensor).tobytes()
    b'\\x01\\x01'
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class SafetensorsWeights(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, or of a directory with an index.

    Tensors are memory-mapped: pages are read from disk on access, so keeping all tensors takes no memory.
    """

    def __init__(self, path: Path) -> None:
        self._files: dict[Path, Any] = {}
        index_path = path / SAFETENSORS_INDEX_FILE
        if index_path.is_file():
            self._file_by_tensor = {name: path / file for name, file in _weight_map(index_path).items()}
        else:
            file = path / SAFETENSORS_FILE if path.is_dir() else path
            self._file_by_tensor = dict.fromkeys(self._open_file(file).keys(), file)

    def _open_file(self, path: Path) -> Any:
        if path not in self._files:
            try:
                from safetensors import SafetensorError, safe_open
            except ImportError as error:
                raise ImportError(
                    "reading weights requires the safetensors package: pip install safetensors"
                ) from error
            try:
                self._files[path] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{path} is missing: pass a safetensors file, or a directory with one"
                ) from error
            except SafetensorError as error:
                raise ValueError(
                    f"{path} is not a complete safetensors file ({error}): download or write it again"
                ) from error
        return self._files[path]

    def __getitem__(self, name: str) -> torch.Tensor:
        path = self._file_by_tensor[name]
        file = self._open_file(path)
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except Exception as error:  # SafetensorError, or torch's error for an unsupported dtype
            raise ValueError(f"cannot read {name!r} from {path} ({error}): download or write the file again") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_by_tensor)

    def __len__(self) -> int:
        return len(self._file_by_tensor)

    def __enter__(self) -> SafetensorsWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each tensor in an index; raise if a file is outside the index's directory."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path} has no 'weight_map' from tensors to files: download or write it again")
    for name, file in weight_map.items():
        if not is_file_name(file):
            raise ValueError(
                f"{path} maps {name!r} to {file!r}, expected the name of a file in {path.parent}: move the file there "
                "and write its name without a path"
            )
    return weight_map

"""The index of a checkpoint: a JSON file that is written last and replaced atomically.

[Note: atomic commit of a checkpoint]
Every save writes its data files under unique names and syncs them to disk. Only then does it move ``index.json`` into
place. So at any time a directory holds a checkpoint if and only if it has an index. Before the move the directory is
unchanged: it holds nothing, or an earlier checkpoint whose files were not touched. The files of an interrupted save are
removed by the next save to the same path, or, with ``keep``, to the same parent directory.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.block_files import FileRecord
from zeroshard.checkpoint.element_order import ElementOrder
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.safetensors_files import DTYPE_NAMES
from zeroshard.checkpoint.schema import DTYPE_BY_NAME, SchemaError, check_file_header, check_index
from zeroshard.utils.atomic_file import write_atomic

INDEX_FILE = "index.json"
FORMAT = "zeroshard checkpoint"
FORMAT_VERSIONS = (1, 2)  # 2 adds TP ranges: see [Note: element order of tensor-parallel tensors]
_INDEX_PREFIX = f'{{"format": "{FORMAT}", '.encode()  # every index starts with it
_CHECKSUM_SUFFIX = ', "crc32": "%08x"}'  # the last field: the checksum of the text before it


@dataclass(frozen=True)
class ShardEntry:
    """The location of a shard of a tensor."""

    start: int
    numel: int
    file_number: int  # position in the index's list of files
    byte_offset: int  # from the start of the file


@dataclass
class TensorEntry:
    """A tensor of a checkpoint and its shards."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    element_order: ElementOrder  # see [Note: flat shards]
    shards: list[ShardEntry] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Size on disk in bytes."""
        return self.numel * self.dtype.itemsize

    def check_complete(self, path: Path, fqn: str) -> None:
        """Raise if no rank has written some of the elements."""
        end = 0
        for shard in sorted(self.shards, key=lambda shard: shard.start):
            if shard.start > end:
                break
            end = max(end, shard.start + shard.numel)
        if end != self.numel:
            raise CheckpointError(
                f"{path} has no values for {fqn} from element {end} on, of {self.numel}: no rank has written them. "
                "Take an earlier checkpoint"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the JSON file."""
        entry: dict[str, Any] = {"shape": list(self.shape), "dtype": DTYPE_NAMES[self.dtype]}
        if not self.element_order.is_row_major:
            entry["order"] = self.element_order.to_json()
        return {**entry, "stretches": [[s.start, s.numel, s.file_number, s.byte_offset] for s in self.shards]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorEntry:
        """Parse the result of :meth:`to_json`."""
        shape = tuple(data["shape"])
        element_order = ElementOrder.from_json(data.get("order", list(range(len(shape)))), shape)
        return cls(
            shape, DTYPE_BY_NAME[data["dtype"]], element_order, [ShardEntry(*shard) for shard in data["stretches"]]
        )


@dataclass
class CheckpointIndex:
    """All data of a checkpoint except the values of its tensors."""

    files: list[FileRecord]
    tensors: dict[str, TensorEntry]
    """Named ``model/NAME``, ``optimizer/NAME/STATE`` and ``other/…``."""
    ranks: int
    written: str
    versions: dict[str, str]
    sharding: dict[str, Any] | None
    """Stage, precision and, if above 1, tensor-parallel degree; None for an unsharded model."""
    parameters: dict[str, bool]
    """Parameter name → whether the parameter is trained."""
    ties: dict[str, str]
    """Further names of a tied parameter → the name it is saved under."""
    config: dict[str, Any] | None
    """The config of a Hugging Face model."""
    optimizer: dict[str, Any] | None
    """Class, param groups (options and names), scalar states and fp16 loss scale; None if only weights were saved."""
    extra: Any
    """The user's data, encoded: see [Note: JSON encoding]."""
    own: list[Any]
    """Per-rank data: RNG states and the user's ``rank_extra``."""

    def tensors_of_kind(self, kind: str) -> dict[str, TensorEntry]:
        """Return the tensors of one kind, "model" or "optimizer", by name without the kind's prefix."""
        prefix = f"{kind}/"
        return {name.removeprefix(prefix): entry for name, entry in self.tensors.items() if name.startswith(prefix)}

    def write(self, directory: Path) -> None:
        """Write the index atomically; this commits the checkpoint."""
        has_tp_shards = any(tensor.element_order.tp_dim is not None for tensor in self.tensors.values())
        # the oldest version that can express it
        data: dict[str, Any] = {"format": FORMAT, "version": FORMAT_VERSIONS[has_tp_shards]}
        data |= {field_.name: getattr(self, field_.name) for field_ in fields(self)}
        data["files"] = [asdict(record) for record in self.files]
        data["tensors"] = {name: tensor.to_json() for name, tensor in self.tensors.items()}
        body = json.dumps(data)[:-1].encode()
        write_atomic(directory / INDEX_FILE, body + (_CHECKSUM_SUFFIX % zlib.crc32(body)).encode())

    @classmethod
    def read(cls, directory: Path) -> CheckpointIndex:
        """Read and validate a checkpoint's index."""
        path = directory / INDEX_FILE
        try:
            text = path.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{directory} is no checkpoint: {INDEX_FILE} cannot be read ({error.strerror}). A save that "
                "was cut off "
                "leaves none; give another path, or the directory above for its latest checkpoint"
            ) from error
        data = _parse_index(path, text)
        names = [field_.name for field_ in fields(cls)]
        missing = [name for name in names if name not in data]
        if missing:
            raise CheckpointError(f"{path} is damaged: it has no {', '.join(missing)}. Load an earlier checkpoint")
        values = {name: data[name] for name in names}
        try:
            check_index(data)
            values["files"] = [FileRecord(f["name"], f["nbytes"], tuple(f["sums"])) for f in data["files"]]
            values["tensors"] = {name: _parse_tensor_entry(name, tensor) for name, tensor in data["tensors"].items()}
        except SchemaError as error:
            raise CheckpointError(f"{path} is damaged: {error}. Load an earlier checkpoint") from error
        return cls(**values)

    def check_file_sizes(self, directory: Path, numbers: Iterable[int]) -> None:
        """Raise if one of the numbered files is missing or has the wrong size."""
        for number in numbers:
            record = self.files[number]
            file = directory / record.name
            size = file.stat().st_size if file.is_file() else -1
            if size != record.nbytes:
                problem = "is missing" if size < 0 else f"has {size} bytes, was written with {record.nbytes}: truncated"
                raise CheckpointError(f"{file} {problem}. Load an earlier checkpoint, or bring the file anew")

    def check_file_headers(self, directory: Path, numbers: Iterable[int]) -> None:
        """Raise if the header of one of the numbered files does not match the index."""
        for number in numbers:
            check_file_header(directory / self.files[number].name, self.files[number], self._tensors_by_file[number])

    @cached_property
    def _tensors_by_file(self) -> list[list[tuple[str, str, tuple[int, ...], int]]]:
        """Name, dtype, shape and offset of the tensors in each file: see [Note: a checkpoint's files]."""
        tensors_by_file: list[list[tuple[str, str, tuple[int, ...], int]]] = [[] for _ in self.files]
        for fqn, entry in self.tensors.items():
            name, numel, is_row_major = fqn.partition("/")[2], entry.numel, entry.element_order.is_row_major
            for shard in entry.shards:
                is_full = is_row_major and shard.numel == numel
                shard_name = name if is_full else f"{name}[{shard.start}:{shard.start + shard.numel}]"
                shape = entry.shape if is_full else (shard.numel,)
                tensors_by_file[shard.file_number].append(
                    (shard_name, DTYPE_NAMES[entry.dtype], shape, shard.byte_offset)
                )
        return tensors_by_file


def _parse_tensor_entry(name: str, data: Mapping[str, Any]) -> TensorEntry:
    try:
        return TensorEntry.from_json(data)
    except ValueError as error:
        raise SchemaError(f"{name} has {error}") from error


def data_file_names(directory: Path) -> set[str]:
    """Return the names of a checkpoint's data files; empty if there is no readable checkpoint."""
    try:
        return {record.name for record in CheckpointIndex.read(directory).files}
    except CheckpointError:
        return set()


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory holds a complete checkpoint: see [Note: atomic commit of a checkpoint]."""
    try:
        if not (directory / INDEX_FILE).is_file():
            return False
        with open(directory / INDEX_FILE, "rb") as file:
            return file.read(len(_INDEX_PREFIX)) == _INDEX_PREFIX
    except OSError:
        return False


def _parse_index(path: Path, text: bytes) -> dict[str, Any]:
    body, end = text[: -len(_CHECKSUM_SUFFIX % 0)], text[-len(_CHECKSUM_SUFFIX % 0) :]
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or foreign: it is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by zeroshard: its field 'format' is not {FORMAT!r}")
    if data.get("version") not in FORMAT_VERSIONS:
        raise CheckpointError(
            f"{path} has version {data.get('version')!r} of the format, this zeroshard reads "
            f"{' and '.join(map(str, FORMAT_VERSIONS))}: use the zeroshard that wrote it ({data.get('versions')})"
        )
    if end != (_CHECKSUM_SUFFIX % zlib.crc32(body)).encode():
        raise CheckpointError(f"{path} is damaged: its checksum is not that of its text")
    return data

"""Index: the one JSON file that makes files a checkpoint. It is written last, and replaced in one move.

[Note: complete or absent]
Every save writes data files under names of its own, syncs them, and only then moves ``index.json`` into its place. So
a directory holds a checkpoint exactly when it has an index, at every moment: before the move it holds what it held
before, nothing or an earlier checkpoint whose files nobody has touched. What a killed save left is removed by the next
one of the same path, or, with ``keep``, of the same directory.
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
FORMAT_VERSIONS = (1, 2)  # 2: the line of a tensor may be that of its parts, see [Note: lines of divided tensors]
_INDEX_PREFIX = f'{{"format": "{FORMAT}", '.encode()  # of every index
_CHECKSUM_SUFFIX = ', "crc32": "%08x"}'  # the last field: a checksum of the text before it


@dataclass(frozen=True)
class ShardEntry:
    """Where some elements of a tensor lie."""

    start: int
    numel: int
    file_number: int  # number in the index's list
    byte_offset: int  # bytes from the file's beginning


@dataclass
class TensorEntry:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    element_order: ElementOrder  # of its line: see [Note: one-dimensional chunks]
    shards: list[ShardEntry] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Its size on disk."""
        return self.numel * self.dtype.itemsize

    def check_complete(self, path: Path, fqn: str) -> None:
        """Raise where some elements were written by no rank."""
        at = 0
        for stretch in sorted(self.shards, key=lambda stretch: stretch.start):
            if stretch.start > at:
                break
            at = max(at, stretch.start + stretch.numel)
        if at != self.numel:
            raise CheckpointError(
                f"{path} has no values for {fqn} from element {at} on, of {self.numel}: no rank has written them. Take "
                "an earlier checkpoint"
            )

    def to_json(self) -> dict[str, Any]:
        """What stands in the file."""
        plain: dict[str, Any] = {"shape": list(self.shape), "dtype": DTYPE_NAMES[self.dtype]}
        if not self.element_order.is_row_major:
            plain["order"] = self.element_order.to_json()
        return {**plain, "stretches": [[s.start, s.numel, s.file_number, s.byte_offset] for s in self.shards]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorEntry:
        """Read what :meth:`to_json` gave."""
        shape = tuple(data["shape"])
        order = ElementOrder.from_json(data.get("order", list(range(len(shape)))), shape)
        return cls(shape, DTYPE_BY_NAME[data["dtype"]], order, [ShardEntry(*stretch) for stretch in data["stretches"]])


@dataclass
class CheckpointIndex:
    """Everything about a checkpoint but the values of its tensors."""

    files: list[FileRecord]
    tensors: dict[str, TensorEntry]
    """By ``model/NAME``, ``optimizer/NAME/STATE`` and ``other/…``."""
    ranks: int
    written: str
    versions: dict[str, str]
    sharding: dict[str, Any] | None
    """Stage, precision and, where it is above 1, tensor degree; None for a model that was not sharded."""
    parameters: dict[str, bool]
    """Names of the model's parameters, and whether each was trained."""
    ties: dict[str, str]
    """Other names of a parameter → its name here."""
    config: dict[str, Any] | None
    """A Hugging Face model's own description."""
    optimizer: dict[str, Any] | None
    """Its class, groups (options and names), counters, and fp16's loss scale; None where only weights were saved."""
    extra: Any
    """The user's data: see [Note: plain data]."""
    own: list[Any]
    """Each rank's own data: random states and what the user gave as ``rank_extra``."""

    def tensors_of_kind(self, kind: str) -> dict[str, TensorEntry]:
        """The tensors of one kind, "model" or "optimizer", without it in their names."""
        head = f"{kind}/"
        return {name.removeprefix(head): saved for name, saved in self.tensors.items() if name.startswith(head)}

    def write(self, directory: Path) -> None:
        """Put the index in its place: from that moment on the directory holds this checkpoint."""
        divided = any(saved.element_order.tp_dim is not None for saved in self.tensors.values())
        plain: dict[str, Any] = {"format": FORMAT, "version": FORMAT_VERSIONS[divided]}  # the oldest that says it all
        plain |= {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain["files"] = [asdict(record) for record in self.files]
        plain["tensors"] = {name: saved.to_json() for name, saved in self.tensors.items()}
        body = json.dumps(plain)[:-1].encode()
        write_atomic(directory / INDEX_FILE, body + (_CHECKSUM_SUFFIX % zlib.crc32(body)).encode())

    @classmethod
    def read(cls, directory: Path) -> CheckpointIndex:
        """Read and check a checkpoint's index."""
        path = directory / INDEX_FILE
        try:
            text = path.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{directory} is no checkpoint: {INDEX_FILE} cannot be read ({error.strerror}). A save that "
                "was cut off "
                "leaves none; give another path, or the directory above for its latest checkpoint"
            ) from error
        plain = _parse_index(path, text)
        names = [entry.name for entry in fields(cls)]
        missing = [name for name in names if name not in plain]
        if missing:
            raise CheckpointError(f"{path} is damaged: it has no {', '.join(missing)}. Load an earlier checkpoint")
        values = {name: plain[name] for name in names}
        try:
            check_index(plain)
            values["files"] = [FileRecord(f["name"], f["nbytes"], tuple(f["sums"])) for f in plain["files"]]
            values["tensors"] = {name: _parse_tensor_entry(name, saved) for name, saved in plain["tensors"].items()}
        except SchemaError as error:
            raise CheckpointError(f"{path} is damaged: {error}. Load an earlier checkpoint") from error
        return cls(**values)

    def check_file_sizes(self, directory: Path, numbers: Iterable[int]) -> None:
        """Refuse files, by their numbers, that are missing or have another size than they were written with."""
        for number in numbers:
            record = self.files[number]
            file = directory / record.name
            size = file.stat().st_size if file.is_file() else -1
            if size != record.nbytes:
                state = "is missing" if size < 0 else f"has {size} bytes, was written with {record.nbytes}: truncated"
                raise CheckpointError(f"{file} {state}. Load an earlier checkpoint, or bring the file anew")

    def check_file_headers(self, directory: Path, numbers: Iterable[int]) -> None:
        """Refuse files, by their numbers, whose own headers say something else of their tensors than the index."""
        for number in numbers:
            check_file_header(directory / self.files[number].name, self.files[number], self._tensors_by_file[number])

    @cached_property
    def _tensors_by_file(self) -> list[list[tuple[str, str, tuple[int, ...], int]]]:
        """Of each file, its tensors: see [Note: a checkpoint's files]."""
        placed: list[list[tuple[str, str, tuple[int, ...], int]]] = [[] for _ in self.files]
        for fqn, saved in self.tensors.items():
            name, numel, plain = fqn.partition("/")[2], saved.numel, saved.element_order.is_row_major
            for at in saved.shards:
                whole = plain and at.numel == numel
                named = name if whole else f"{name}[{at.start}:{at.start + at.numel}]"
                shape = saved.shape if whole else (at.numel,)
                placed[at.file_number].append((named, DTYPE_NAMES[saved.dtype], shape, at.byte_offset))
        return placed


def _parse_tensor_entry(name: str, data: Mapping[str, Any]) -> TensorEntry:
    try:
        return TensorEntry.from_json(data)
    except ValueError as error:
        raise SchemaError(f"{name} has {error}") from error


def data_file_names(directory: Path) -> set[str]:
    """The names of a checkpoint's data files; none where there is no checkpoint, or one that cannot be read."""
    try:
        return {record.name for record in CheckpointIndex.read(directory).files}
    except CheckpointError:
        return set()


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a whole checkpoint: see [Note: complete or absent]."""
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
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or foreign: it is not JSON ({error})") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by zeroshard: its field 'format' is not {FORMAT!r}")
    if plain.get("version") not in FORMAT_VERSIONS:
        raise CheckpointError(
            f"{path} has version {plain.get('version')!r} of the format, this zeroshard reads "
            f"{' and '.join(map(str, FORMAT_VERSIONS))}: use the zeroshard that wrote it ({plain.get('versions')})"
        )
    if end != (_CHECKSUM_SUFFIX % zlib.crc32(body)).encode():
        raise CheckpointError(f"{path} is damaged: its checksum is not that of its text")
    return plain

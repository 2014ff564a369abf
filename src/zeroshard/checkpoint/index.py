"""The index of a checkpoint: a JSON file that is written last and replaced atomically.

[Note: atomic commit of a checkpoint]
Every save writes its data files under unique names and syncs them to disk. Only then does it move ``index.json`` into
place. So at any time a directory holds a checkpoint if and only if it has an index. Before the move the directory is
unchanged: it holds nothing, or an earlier checkpoint whose files were not touched. The files of an interrupted save are
removed by the next save to the same path, or, with ``keep``, to the same parent directory.

[Note: a checkpoint's files]
Rank 3 writes ``model-00003-TOKEN.safetensors`` (parameters and buffers), ``optimizer-00003-…``, with an EMA
``ema-00003-…``, with local steps ``outer_optimizer-00003-…`` and ``replica-00003-…``, and ``other-00003-…`` (RNG
states, the user's tensors). A full tensor written by one rank has its own shape and name. A shard is named
``NAME[start:end]``, in elements of the flattened tensor. Any tool that reads safetensors can open the files. Tensors in
a file are sorted by element size, so that no element crosses a block boundary.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.block_files import DAMAGED_FILE_REMEDY, FileRecord
from zeroshard.checkpoint.flat_shards import ElementOrder, TensorSpec
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.json_codec import truncated_repr
from zeroshard.checkpoint.schema import DTYPE_BY_NAME, SchemaError, check_index, check_tensors
from zeroshard.utils.atomic_file import write_atomic
from zeroshard.utils.safetensors_files import DTYPE_NAMES, TensorInfo, build_header

INDEX_FILE = "index.json"
FORMAT = "zeroshard checkpoint"
FORMAT_VERSION = 1
MAX_INDEX_BYTES = 2**30
HEADER_METADATA = {"format": "pt"}  # of each safetensors file
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
class TensorEntry(TensorSpec):
    """A tensor of a checkpoint and its shards."""

    shards: list[ShardEntry] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the JSON file."""
        entry: dict[str, Any] = {"shape": list(self.shape), "dtype": DTYPE_NAMES[self.dtype]}
        shards = [[s.start, s.numel, s.file_number, s.byte_offset] for s in self.shards]
        return {**entry, **self.element_order.to_json(), "shards": shards}

    @classmethod
    def from_json(cls, fqn: str, data: Mapping[str, Any]) -> TensorEntry:
        """Parse the result of :meth:`to_json`; :func:`check_index` has checked all but the element order."""
        shape = tuple(data["shape"])
        try:
            element_order = ElementOrder.from_json(data, shape)
        except ValueError as error:
            raise SchemaError(f"{fqn} has {error}") from error
        shards = [ShardEntry(*shard) for shard in data["shards"]]
        return cls(shape, DTYPE_BY_NAME[data["dtype"]], element_order, shards)


@dataclass
class CheckpointIndex:
    """All data of a checkpoint except the values of its tensors.

    >>> import tempfile, torch, zeroshard
    >>> path = zeroshard.save(tempfile.mkdtemp() + "/step-7", torch.nn.Linear(2, 1), extra={"step": 7}).path
    >>> index = CheckpointIndex.read(path)
    >>> list(index.tensors_of_kind("model")), index.extra
    (['weight', 'bias'], {'step': 7})
    """

    files: list[FileRecord] = field(default_factory=list)
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Named ``model/NAME``, ``optimizer/NAME/STATE``, ``ema/NAME`` and ``other/…``; see also [Note: replicas in a
    checkpoint]."""
    written: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    sharding: dict[str, Any] | None = None
    """Stage, precision, tensor-parallel degree and, with local steps, "replicas"; None for an unsharded model."""
    requires_grad: dict[str, bool] = field(default_factory=dict)
    """Parameter name, in the model's order → whether the parameter is trained."""
    tied_names: dict[str, str] = field(default_factory=dict)
    """Further names of a tied parameter or buffer → the name it is saved under."""
    huggingface_config: dict[str, Any] | None = None
    """The config of a Hugging Face model."""
    optimizer: dict[str, Any] | None = None
    """Class, param groups (options and names), scalar states and fp16 loss scale; None if only weights were saved."""
    extra: Any = field(default_factory=dict)
    """The user's data, encoded: see [Note: JSON encoding]."""
    rank_data: list[Any] = field(default_factory=list)
    """Per-rank data: RNG states, the user's ``rank_extra`` and, of the first rank, extra states of modules."""

    @property
    def extra_states(self) -> dict[str, Any]:
        """The extra states of modules, encoded, by the module's name."""
        states: dict[str, Any] = self.rank_data[0].get("extra_states", {}) if self.rank_data else {}
        return states

    def tensors_of_kind(self, kind: str) -> dict[str, TensorEntry]:
        """Return the tensors of one kind, "model" or "optimizer", by name without the kind's prefix."""
        prefix = f"{kind}/"
        return {name.removeprefix(prefix): entry for name, entry in self.tensors.items() if name.startswith(prefix)}

    def write(self, directory: Path) -> None:
        """Write the index atomically; this commits the checkpoint."""
        data: dict[str, Any] = {"format": FORMAT, "version": FORMAT_VERSION}
        data |= {field_.name: getattr(self, field_.name) for field_ in fields(self)}
        data["files"] = [asdict(record) for record in self.files]
        data["tensors"] = {name: tensor.to_json() for name, tensor in self.tensors.items()}
        check_tensors(data["tensors"], data["files"])
        body = json.dumps(data)[:-1].encode()
        if len(body) > MAX_INDEX_BYTES:
            raise CheckpointError(
                f"the index has {len(body)} bytes, expected at most {MAX_INDEX_BYTES}: save large data in `extra` as "
                "tensors, which the index does not contain"
            )
        write_atomic(directory / INDEX_FILE, body + (_CHECKSUM_SUFFIX % zlib.crc32(body)).encode())

    @classmethod
    def read(cls, directory: Path) -> CheckpointIndex:
        """Read and validate a checkpoint's index."""
        path = directory / INDEX_FILE
        try:
            nbytes = path.stat().st_size
            text = path.read_bytes() if nbytes <= MAX_INDEX_BYTES else b""
        except OSError as error:
            raise CheckpointError(
                f"{directory} is not a checkpoint: {INDEX_FILE} cannot be read ({error.strerror}). An interrupted save "
                "leaves no index: pass another path, or the parent directory to load its latest checkpoint"
            ) from error
        if nbytes > MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{path} is damaged or not an index: it has {nbytes} bytes, expected at most {MAX_INDEX_BYTES}. Load "
                "an earlier checkpoint"
            )
        data = _parse_index(path, text)
        names = [field_.name for field_ in fields(cls)]
        missing = [name for name in names if name not in data]
        if missing:
            raise CheckpointError(
                f"{path} has no {', '.join(missing)}: it is damaged, or was written before the first release of "
                "zeroshard. Load an earlier checkpoint, or save it again with this version"
            )
        values = {name: data[name] for name in names}
        try:
            check_index(data)
            values["files"] = [FileRecord(f["name"], f["nbytes"], tuple(f["block_crc32"])) for f in data["files"]]
            values["tensors"] = {fqn: TensorEntry.from_json(fqn, tensor) for fqn, tensor in data["tensors"].items()}
        except SchemaError as error:
            raise CheckpointError(f"{path} is damaged: {error}. Load an earlier checkpoint") from error
        return cls(**values)

    def check_file_sizes(self, directory: Path, numbers: Iterable[int]) -> None:
        """Raise if one of the numbered files is missing or has the wrong size."""
        for number in numbers:
            self.files[number].check_size(directory)

    def check_file_headers(self, directory: Path, numbers: Iterable[int]) -> None:
        """Raise if the header of one of the numbered files does not describe the same tensors as the index."""
        for number in numbers:
            path = directory / self.files[number].name
            tensors = sorted(self._tensors_by_file[number], key=lambda tensor: tensor[1])
            try:
                header = build_header([info for info, _ in tensors], HEADER_METADATA)
                with open(path, "rb") as file:
                    is_valid = file.read(len(header)) == header
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}. {DAMAGED_FILE_REMEDY}") from error
            except ValueError:  # the index names two tensors of the file alike
                header, is_valid = b"", False
            end = len(header)
            for info, offset in tensors:
                is_valid = is_valid and offset == end
                end += info.nbytes
            if not is_valid:
                raise CheckpointError(
                    f"{path} is damaged, or is not the file that the index describes: the header of the file has other "
                    f"tensors than the index ({truncated_repr([info.name for info, _ in tensors], 120)}). "
                    f"{DAMAGED_FILE_REMEDY}"
                )

    @cached_property
    def _tensors_by_file(self) -> list[list[tuple[TensorInfo, int]]]:
        """The tensors in each file, and their first bytes: see [Note: a checkpoint's files]."""
        tensors_by_file: list[list[tuple[TensorInfo, int]]] = [[] for _ in self.files]
        for fqn, entry in self.tensors.items():
            for shard in entry.shards:
                info = entry.shard_info(fqn, shard.start, shard.numel)
                tensors_by_file[shard.file_number].append((info, shard.byte_offset))
        return tensors_by_file


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory holds a complete checkpoint: see [Note: atomic commit of a checkpoint].

    >>> is_checkpoint(Path("nowhere"))
    False
    """
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
        raise CheckpointError(
            f"{path} is damaged or not an index: it is not JSON ({error}). Load an earlier checkpoint"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by zeroshard: its 'format' is not {FORMAT!r}")
    if data.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {data.get('version')!r}, expected {FORMAT_VERSION}: load it with the "
            f"zeroshard version that wrote it ({data.get('versions')})"
        )
    if end != (_CHECKSUM_SUFFIX % zlib.crc32(body)).encode():
        raise CheckpointError(f"{path} is damaged: its text does not match its checksum. Load an earlier checkpoint")
    return data

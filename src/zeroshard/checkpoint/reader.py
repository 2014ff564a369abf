"""Read tensors of a checkpoint or of external weights (Hugging Face safetensors, ``torch.save`` files).

[Note: reading tensor after tensor]
A tensor written by 64 ranks has a shard in each of 64 files. The next tensor's shards follow directly, mostly in the
block where this one ended. So :class:`CheckpointReader` leaves files open, and each keeps the block that was read last;
otherwise small tensors would read and checksum the same 4 MiB again and again. At most ``MAX_OPEN_FILES`` files are
open, with 256 MiB of blocks.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.block_files import BLOCK_BYTES, BlockReader, CheckpointWorkers
from zeroshard.checkpoint.flat_shards import ElementOrder, LocalTensor, Shard
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.index import CheckpointIndex, TensorEntry, is_checkpoint
from zeroshard.checkpoint.json_codec import decode
from zeroshard.checkpoint.retention import find_checkpoint
from zeroshard.sharding import Range
from zeroshard.utils.safetensors_files import SAFETENSORS_FILE, SAFETENSORS_INDEX_FILE, SafetensorsWeights

MAX_OPEN_FILES = 64
SAMPLES = 8  # elements of an external weight that ranks compare
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass
class FileRange:
    """A byte range of a file, and the tensor that receives its elements."""

    start: int
    end: int
    dtype: torch.dtype
    target: torch.Tensor

    def copy_from_block(self, block_start: int, block: torch.Tensor) -> None:
        """Copy the part of this range that lies in a block starting at byte ``block_start``; cast dtype and device."""
        start, end = max(self.start, block_start), min(self.end, block_start + block.numel())
        itemsize = self.dtype.itemsize
        target = self.target[(start - self.start) // itemsize : (end - self.start) // itemsize]
        target.copy_(block[start - block_start : end - block_start].view(self.dtype))


def read_ranges(file: BlockReader, ranges: Iterable[FileRange], workers: CheckpointWorkers) -> None:
    """Read byte ranges of a file; read each block once."""
    ranges_by_block: dict[int, list[FileRange]] = {}
    for file_range in ranges:
        for number in range(file_range.start // BLOCK_BYTES, -(-file_range.end // BLOCK_BYTES)):
            ranges_by_block.setdefault(number, []).append(file_range)
    for block_start, block in file.iter_blocks(sorted(ranges_by_block), workers):
        for file_range in ranges_by_block[block_start // BLOCK_BYTES]:
            file_range.copy_from_block(block_start, block)


def _ranges_by_file(
    tensors: Iterable[tuple[TensorEntry, Sequence[Shard]]],
) -> list[tuple[int, list[FileRange]]]:
    """Return the numbers of the files that hold elements of the shards, and what to read from each."""
    ranges_by_file: dict[int, list[FileRange]] = {}
    for saved, shards in tensors:
        itemsize = saved.dtype.itemsize
        for wanted, tensor in shards:
            for shard in saved.shards:
                common = wanted.intersect(Range(shard.start, shard.start + shard.numel))
                if common is not None:
                    start = shard.byte_offset + (common.start - shard.start) * itemsize
                    target = tensor[common.start - wanted.start : common.end - wanted.start]
                    file_range = FileRange(start, start + common.numel * itemsize, saved.dtype, target)
                    ranges_by_file.setdefault(shard.file_number, []).append(file_range)
    return sorted(ranges_by_file.items())


@dataclass
class LoadTarget:
    """This rank's shards of a tensor, and the name of the saved tensor that is loaded into them."""

    saved_fqn: str
    local: LocalTensor


class CheckpointReader:
    """Reads tensors from a checkpoint. It needs no model and no other ranks.

    ``path`` is a checkpoint, a directory of checkpoints (the latest is read) or the output directory of
    `zeroshard train`.

    >>> import tempfile, zeroshard
    >>> model = torch.nn.Linear(2, 1)
    >>> path = zeroshard.save(tempfile.mkdtemp() + "/step-7", model).path
    >>> with CheckpointReader(path) as contents:
    ...     torch.equal(contents.read_tensor("model/weight"), model.weight)
    True
    """

    def __init__(self, path: Path, index: CheckpointIndex | None = None) -> None:
        self.path = find_checkpoint(path) if index is None else path
        self.index = index or CheckpointIndex.read(self.path)
        self._open_files: OrderedDict[int, BlockReader] = OrderedDict()  # by file number; least recently used first
        self._workers = CheckpointWorkers(2)

    def read_tensor(
        self, fqn: str, dtype: torch.dtype | None = None, buffer: torch.Tensor | None = None
    ) -> torch.Tensor:  # full shape, contiguous
        """Read a tensor, for example ``model/NAME``, and verify its blocks.

        Elements are cast while they are read if ``dtype`` is not the saved one. The tensor is a view of ``buffer``
        (uint8), if given; only a tensor that was not saved in row-major order is a new allocation.
        """
        saved = self.index.tensors[fqn]
        dtype = dtype or saved.dtype
        if buffer is None:  # check sizes before allocating
            self.index.check_file_sizes(self.path, {shard.file_number for shard in saved.shards})
            buffer = torch.empty(saved.numel * dtype.itemsize, dtype=torch.uint8, device="cpu")
        flat = buffer[: saved.numel * dtype.itemsize].view(dtype)
        for number, ranges in _ranges_by_file([(saved, [(Range(0, saved.numel), flat)])]):
            read_ranges(self._open_file(number), ranges, self._workers)
        return saved.element_order.unflatten(flat, saved.shape).contiguous()

    def load(self, targets: Iterable[LoadTarget]) -> None:
        """Read saved values into local shards, whatever shards they were saved as.

        Tensors that must be reordered are read one by one, to limit memory; then all others, file by file.
        """
        in_order: list[tuple[TensorEntry, Sequence[Shard]]] = []
        for target in targets:
            saved = self.index.tensors[target.saved_fqn]
            if saved.element_order == target.local.element_order:
                in_order.append((saved, target.local.shards))
            elif target.local.shards:
                target.local.copy_from(self.read_tensor(target.saved_fqn))
        for number, ranges in _ranges_by_file(in_order):
            record = self.index.files[number]
            with BlockReader(self.path / record.name, record) as file:
                read_ranges(file, ranges, self._workers)

    def _open_file(self, number: int) -> BlockReader:
        """Return the open file, or open it: see [Note: reading tensor after tensor]."""
        if number not in self._open_files:
            if len(self._open_files) == MAX_OPEN_FILES:
                self._open_files.popitem(last=False)[1].__exit__()
            record = self.index.files[number]
            self._open_files[number] = BlockReader(self.path / record.name, record)
            self.index.check_file_headers(self.path, [number])
        self._open_files.move_to_end(number)
        return self._open_files[number]

    def verify(self) -> Iterator[str]:
        """Read all files and yield an error message for each damaged one."""
        for number, record in enumerate(self.index.files):
            try:
                with BlockReader(self.path / record.name, record) as file:
                    for _ in file.iter_blocks(range(len(record.block_crc32)), self._workers):
                        pass
                self.index.check_file_headers(self.path, [number])
            except CheckpointError as error:
                yield str(error)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        while self._open_files:
            self._open_files.popitem()[1].__exit__()


@dataclass
class LoadSource:
    """A checkpoint or external weights, open for reading."""

    path: Path
    index: CheckpointIndex  # of external weights: only tensors
    weights: Mapping[str, torch.Tensor] | None = None  # external weights

    @classmethod
    def open(cls, path: Path, rename: Callable[[str], str] | None, rank: int, world_size: int) -> LoadSource:
        """Open a path returned by :func:`find_source`; raise if a file is missing or has the wrong size.

        Also compare the files' headers with the index; each of the ``world_size`` ranks checks some of them.
        """
        if _is_external_weights(path):
            return cls._from_weights(path, _open_external_weights(path), rename)
        index = CheckpointIndex.read(path)
        index.check_file_sizes(path, range(len(index.files)))
        index.check_file_headers(path, range(rank, len(index.files), world_size))
        return cls(path, index)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, torch.Tensor], rename: Callable[[str], str] | None) -> LoadSource:
        """Use a state dict in memory as external weights."""
        path = Path("the state dict")
        _check_dense(path, state_dict)
        return cls._from_weights(path, state_dict, rename)

    @classmethod
    def _from_weights(
        cls, path: Path, weights: Mapping[str, torch.Tensor], rename: Callable[[str], str] | None
    ) -> LoadSource:
        renamed = {rename(name) if rename is not None else name: tensor for name, tensor in weights.items()}
        if len(renamed) != len(weights):
            raise CheckpointError(
                f"rename maps several tensors of {path} to the same name: return a unique name for each"
            )
        tensors = {}
        for name, tensor in renamed.items():
            row_major = ElementOrder(tuple(range(tensor.dim())))
            tensors[f"model/{name}"] = TensorEntry(tuple(tensor.shape), tensor.dtype, row_major)
        return cls(path, CheckpointIndex(tensors=tensors), renamed)

    def decode(self, value: Any) -> Any:
        """Decode JSON-encoded data of a checkpoint, and read the tensors in it."""
        with CheckpointReader(self.path, self.index) as reader:
            return decode(value, lambda name: reader.read_tensor(f"other/{name}"))

    def weight_digests(self) -> dict[str, bytes]:
        """Return a digest of the shape, the dtype and some elements of each external weight."""
        digests = {}
        for name, tensor in (self.weights or {}).items():
            text = repr((tensor.dtype, tuple(tensor.shape), _sample(tensor)))
            digests[name] = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return digests

    def read(self, fqn: str) -> torch.Tensor:
        """Read a small tensor of a checkpoint."""
        with CheckpointReader(self.path, self.index) as reader:
            return reader.read_tensor(fqn)

    def load(self, targets: Iterable[LoadTarget]) -> None:
        """Read the values of the targets. Each rank accesses only its local elements."""
        if self.weights is None:
            with CheckpointReader(self.path, self.index) as reader:
                reader.load(targets)
            return
        for target in targets:
            target.local.copy_from(self.weights[target.saved_fqn.removeprefix("model/")])


def _sample(tensor: torch.Tensor) -> list[Any]:
    """Return ``SAMPLES`` elements from the first to the last one, without a copy of the others.

    >>> _sample(torch.arange(15).view(5, 3).T)
    [0, 6, 12, 4, 10, 2, 8, 14]
    """
    if tensor.numel() == 0:
        return []
    positions = torch.arange(SAMPLES, device="cpu") * (tensor.numel() - 1) // (SAMPLES - 1)
    samples: list[Any] = tensor[torch.unravel_index(positions, tensor.shape)].tolist()
    return samples


def find_source(path: Path) -> Path:
    """Resolve a path to external weights, a checkpoint, or the latest checkpoint in a directory."""
    return path if _is_external_weights(path) else find_checkpoint(path)


def _is_external_weights(path: Path) -> bool:
    if is_checkpoint(path):
        return False
    if path.is_dir():
        return (path / SAFETENSORS_INDEX_FILE).is_file() or (path / SAFETENSORS_FILE).is_file()
    return path.suffix in (".safetensors", *PICKLE_SUFFIXES)


def _open_external_weights(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the weights by name. Tensors are memory-mapped: pages are read on access."""
    try:
        is_pickled = path.suffix in PICKLE_SUFFIXES and path.is_file()
        return _open_pickled(path) if is_pickled else dict(SafetensorsWeights(path))
    except (ValueError, FileNotFoundError) as error:
        raise CheckpointError(str(error)) from error


def _open_pickled(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read, expected a file by torch.save that contains only tensors: {first_line}"
        ) from error
    if not isinstance(loaded, Mapping) or not loaded or not all(isinstance(v, torch.Tensor) for v in loaded.values()):
        kind = f"a dict of {sorted(map(str, loaded))[:8]}" if isinstance(loaded, Mapping) else type(loaded).__name__
        raise CheckpointError(
            f"{path} contains {kind}, expected a state dict of tensors by name: save only the state dict, "
            "torch.save(model.state_dict(), path)"
        )
    _check_dense(path, loaded)
    return loaded


def _check_dense(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path}: {name} is a {type(tensor).__name__}, expected a tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
            raise CheckpointError(f"{path}: {name} is {kind}, expected a dense tensor with values: save it as one")

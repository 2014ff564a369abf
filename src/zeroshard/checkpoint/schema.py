"""Validation of a checkpoint's index. Every field is checked when the index is opened, before it is used.

[Note: an index is not trusted]
A checksum shows that an index is unchanged, not that it makes sense. So every name, number and range is checked here,
in one place. A file is given by its base name and is in the checkpoint's directory. The shards of a tensor cover each
element exactly once, lie inside their files and do not overlap. JSON-encoded data is what :func:`encode` writes. A
valid index can be read without further checks, and reading it takes no more memory than the size of its files. Each
file's header must then describe the same tensors as the index (:func:`check_file_header`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.block_files import BLOCK_BYTES, FileRecord
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.json_codec import decode, truncated_repr
from zeroshard.checkpoint.rng_state import RNG_STATE_SPECS
from zeroshard.checkpoint.safetensors_files import DTYPE_NAMES
from zeroshard.utils.atomic_file import is_file_name

TENSOR_KINDS = ("model", "optimizer", "other")
MAX_ELEMENTS = 2**62
MAX_DIMS = 64
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class SchemaError(ValueError):
    """A field of an index is invalid."""


def check_entry(condition: bool, entry: str, expected: str, got: Any) -> None:
    """Raise :class:`SchemaError` if ``condition`` is false.

    >>> check_entry(False, "ranks", "a number from 1 up", "x")
    Traceback (most recent call last):
        ...
    zeroshard.checkpoint.schema.SchemaError: ranks is 'x', expected a number from 1 up
    """
    if not condition:
        raise SchemaError(f"{entry} is {truncated_repr(got)}, expected {expected}")


def is_count(value: Any) -> bool:
    """Return whether a value is an integer from 0 to ``MAX_ELEMENTS``."""
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


def check_index(plain: Mapping[str, Any]) -> None:
    """Raise if any field of an index is invalid; ``plain`` must contain all fields."""
    check_files(plain["files"])
    check_tensors(plain["tensors"], plain["files"])
    check_entry(is_count(plain["ranks"]) and plain["ranks"] > 0, "ranks", "a number from 1 up", plain["ranks"])
    check_entry(isinstance(plain["written"], str), "written", "a time", plain["written"])
    _check_mapping(plain["versions"], "versions", str, "texts")
    _check_mapping(plain["parameters"], "parameters", bool, "true or false")
    _check_mapping(plain["ties"], "ties", str, "names")
    _check_sharding(plain["sharding"])
    _check_config(plain["config"])
    check_entry(isinstance(plain["own"], list), "own", "a list with the data of each rank", plain["own"])
    check_entry(len(plain["own"]) == plain["ranks"], "own", f"data of {plain['ranks']} ranks", plain["own"])
    tensors = plain["tensors"]
    if plain["optimizer"] is not None:
        _check_optimizer(plain["optimizer"], tensors)
    check_entry(isinstance(_decode_on_meta(plain["extra"], "extra", tensors), dict), "extra", "a dict", plain["extra"])
    for rank, rank_data in enumerate(plain["own"]):
        entry = f"own[{rank}]"
        check_entry(
            isinstance(rank_data, dict) and {"random", "extra"} <= rank_data.keys(),
            entry,
            "random states and extra data",
            rank_data,
        )
        _decode_on_meta(rank_data["extra"], f"{entry}.extra", tensors)
        _check_rng_states(_decode_on_meta(rank_data["random"], f"{entry}.random", tensors), f"{entry}.random")


def check_files(files: Any) -> None:
    """Raise if a file is outside the directory or its size does not match the number of checksums."""
    check_entry(isinstance(files, list), "files", "a list", files)
    seen: set[str] = set()
    for number, file in enumerate(files):
        entry = f"files[{number}]"
        check_entry(
            isinstance(file, dict) and {"name", "nbytes", "sums"} <= file.keys(), entry, "name, nbytes, sums", file
        )
        name, nbytes, sums = file["name"], file["nbytes"], file["sums"]
        check_entry(is_file_name(name), f"{entry}.name", "the name of a file in the checkpoint's directory", name)
        check_entry(name not in seen, f"{entry}.name", "a name that no other file has", name)
        seen.add(name)
        check_entry(is_count(nbytes), f"{entry}.nbytes", "a number of bytes", nbytes)
        is_valid = isinstance(sums, list) and all(is_count(checksum) and checksum < 2**32 for checksum in sums)
        check_entry(is_valid, f"{entry}.sums", "a list of CRC-32 sums", sums)
        block_count = -(-nbytes // BLOCK_BYTES)
        check_entry(
            len(sums) == block_count,
            f"{entry}.sums",
            f"{block_count} sums, of {nbytes} bytes in blocks of {BLOCK_BYTES}",
            sums,
        )


def check_tensors(tensors: Any, files: Sequence[Mapping[str, Any]]) -> None:
    """Raise if the shards of a tensor are incomplete, lie outside their files or overlap."""
    check_entry(isinstance(tensors, dict), "tensors", "a table by name", tensors)
    used_ranges: list[list[tuple[int, int, str]]] = [[] for _ in files]  # of each file: first byte, end, tensor name
    for name, saved in tensors.items():
        entry = f"tensors[{name!r}]"
        kind, _, base_name = name.partition("/")
        check_entry(
            kind in TENSOR_KINDS and bool(base_name),
            entry,
            f"a name that begins with {', '.join(TENSOR_KINDS)} and /",
            name,
        )
        required = {"shape", "dtype", "stretches"}
        check_entry(isinstance(saved, dict) and required <= saved.keys(), entry, "shape, dtype and stretches", saved)
        dtype = saved["dtype"]
        is_known = isinstance(dtype, str) and dtype in DTYPE_BY_NAME
        check_entry(is_known, f"{entry}.dtype", f"one of {', '.join(DTYPE_BY_NAME)}", dtype)
        numel = _checked_numel(saved["shape"], f"{entry}.shape")
        _check_shards(name, saved["stretches"], numel, DTYPE_BY_NAME[dtype].itemsize, files, used_ranges)
    for file, ranges in zip(files, used_ranges, strict=True):
        end, owner = 0, ""
        for start, stop, name in sorted(ranges):
            if start < end:
                raise SchemaError(f"{name} and {owner} overlap at byte {start} of {file['name']}")
            end, owner = stop, name


def _checked_numel(shape: Any, entry: str) -> int:
    is_valid = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(is_count(size) for size in shape)
    check_entry(is_valid, entry, "a list of sizes from 0 up", shape)
    check_entry(
        math.prod(size or 1 for size in shape) <= MAX_ELEMENTS, entry, f"at most {MAX_ELEMENTS} elements", shape
    )
    return math.prod(shape)


def _check_shards(
    name: str,
    shards: Any,
    numel: int,
    itemsize: int,
    files: Sequence[Mapping[str, Any]],
    used_ranges: list[list[tuple[int, int, str]]],
) -> None:
    entry = f"tensors[{name!r}].stretches"
    check_entry(isinstance(shards, list), entry, "a list", shards)
    for shard in shards:
        is_valid = isinstance(shard, list) and len(shard) == 4 and all(is_count(number) for number in shard)
        check_entry(is_valid, entry, "a list of [start, numel, file, offset], whole numbers from 0 up", shard)
    position = 0
    for start, count, file, offset in sorted(shards):
        if start < position:
            raise SchemaError(f"{name} has element {start} twice, in overlapping stretches")
        if start > position:
            break
        check_entry(count > 0, entry, "stretches of at least one element", [start, count, file, offset])
        check_entry(file < len(files), entry, f"a number of one of {len(files)} files", file)
        end, size = offset + count * itemsize, files[file]["nbytes"]
        if end > size or start + count > numel:
            raise SchemaError(
                f"{name} has elements {start} to {start + count}, of {numel}, at bytes {offset} to {end} of "
                f"{files[file]['name']}, which has {size}"
            )
        check_entry(offset % itemsize == 0, entry, f"an offset that is a multiple of {itemsize} bytes", offset)
        used_ranges[file].append((offset, end, name))
        position = start + count
    if position != numel:
        raise SchemaError(
            f"it has no values for {name} from element {position} on, of {numel}: no rank has written them"
        )


def _check_mapping(value: Any, entry: str, kind: type, described: str) -> None:
    is_valid = isinstance(value, dict) and all(type(item) is kind for item in value.values())
    check_entry(is_valid, entry, f"{described} by name", value)


def _check_sharding(sharding: Any) -> None:
    is_valid = sharding is None or (
        isinstance(sharding, dict)
        and type(sharding.get("stage")) is int
        and isinstance(sharding.get("precision"), str | None)
        and is_count(sharding.get("tensor", 1))
    )
    check_entry(is_valid, "sharding", "null, or stage, precision and tensor degree", sharding)


def _check_config(config: Any) -> None:
    check_entry(config is None or isinstance(config, dict), "config", "null, or a model's description", config)
    names = (config or {}).get("architectures")
    is_valid = names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))
    check_entry(is_valid, "config.architectures", "a list of names", names)


def _check_optimizer(optimizer: Any, tensors: Mapping[str, Any]) -> None:
    fields = {"class", "groups", "loss_scale", "counters"}
    check_entry(
        isinstance(optimizer, dict) and fields <= optimizer.keys(), "optimizer", ", ".join(sorted(fields)), optimizer
    )
    check_entry(isinstance(optimizer["class"], str), "optimizer.class", "a name", optimizer["class"])
    check_entry(isinstance(optimizer["groups"], list), "optimizer.groups", "a list", optimizer["groups"])
    seen: set[str] = set()
    for number, group in enumerate(optimizer["groups"]):
        entry = f"optimizer.groups[{number}]"
        check_entry(isinstance(group, dict) and {"names", "options"} <= group.keys(), entry, "names and options", group)
        names = group["names"]
        is_valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
        check_entry(is_valid, f"{entry}.names", "a list of parameters' names", names)
        for name in names:
            check_entry(name not in seen, f"{entry}.names", "each parameter in one group, once", name)
            seen.add(name)
        options = _decode_on_meta(group["options"], f"{entry}.options", tensors)
        check_entry(isinstance(options, dict), f"{entry}.options", "options by name", group["options"])
    scale = optimizer["loss_scale"]
    is_valid = scale is None or (
        isinstance(scale, list)
        and len(scale) == 2
        and all(type(number) in (int, float) and math.isfinite(number) for number in scale)
        and scale[0] > 0
        and scale[1] >= 0
    )
    check_entry(
        is_valid, "optimizer.loss_scale", "null, or a scale above 0 and a number of steps without overflow", scale
    )
    check_entry(isinstance(optimizer["counters"], dict), "optimizer.counters", "a table by name", optimizer["counters"])
    for name, scalars in optimizer["counters"].items():
        entry = f"optimizer.counters[{name!r}]"
        check_entry(isinstance(_decode_on_meta(scalars, entry, tensors), dict), entry, "a table of counters", scalars)


def _check_rng_states(states: Any, entry: str) -> None:
    check_entry(
        isinstance(states, dict) and {"python", "torch"} <= states.keys(), entry, "python's and torch's", states
    )
    for name, (dtype, length) in RNG_STATE_SPECS.items():
        state = states.get(name)
        is_valid = isinstance(state, torch.Tensor) and state.dtype == dtype and state.dim() == 1
        is_valid = is_valid and (length is None or state.numel() == length)
        check_entry(name not in states or is_valid, f"{entry}.{name}", f"a line of {length or 'some'} {dtype}", state)


def _decode_on_meta(value: Any, entry: str, tensors: Mapping[str, Any]) -> Any:
    """Decode data with its tensors on the meta device; raise on anything :func:`encode` does not write."""

    def fetch(name: str) -> torch.Tensor:
        saved = tensors.get(f"other/{name}")
        check_entry(saved is not None, entry, "a tensor that is in the index", name)
        return torch.empty(saved["shape"], dtype=DTYPE_BY_NAME[saved["dtype"]], device="meta")  # type: ignore[index]

    try:
        return decode(value, fetch, entry)
    except SchemaError:
        raise
    except RecursionError as error:
        raise SchemaError(f"{entry} is nested too deeply") from error
    except ValueError as error:
        raise SchemaError(str(error)) from error


# --------------------------------------------------------------------------------------------- file headers


def check_file_header(path: Path, record: FileRecord, wanted: Sequence[tuple[str, str, Sequence[int], int]]) -> None:
    """Raise if a file's header does not describe the same tensors as the index.

    ``wanted`` has the name, dtype, shape and first byte of each tensor in the file.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 8 + length <= min(record.nbytes, MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise CheckpointError(f"{path}, a file of the checkpoint, cannot be read: {error.strerror}") from error
    remedy = "Load an earlier checkpoint, or copy this file again from where it came"
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header is not that of a safetensors file. {remedy}") from error
    entries = table if isinstance(table, dict) else {}
    for name, dtype, shape, offset in wanted:
        start = offset - 8 - length
        data_offsets = [start, start + math.prod(shape) * DTYPE_BY_NAME[dtype].itemsize]
        expected = {"dtype": dtype, "shape": list(shape), "data_offsets": data_offsets}
        if entries.get(name) != expected:
            raise CheckpointError(
                f"{path} is damaged, or is not the file that the index describes: the index has {name} as "
                f"{json.dumps(expected)}, the file's own header as {truncated_repr(entries.get(name), 120)}. {remedy}"
            )
    unknown = entries.keys() - {"__metadata__"} - {name for name, *_ in wanted}
    if unknown:
        raise CheckpointError(
            f"{path} is damaged, or is not the file that the index describes: it holds "
            f"{truncated_repr(min(unknown))}, which "
            f"the index does not have there. {remedy}"
        )

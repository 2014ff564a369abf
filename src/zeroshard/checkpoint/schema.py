"""Validation of a checkpoint's index. Every field is checked when the index is opened, before it is used.

[Note: an index is not trusted]
A checksum shows that an index is unchanged, not that it makes sense. So every name, number and range is checked here,
in one place. A file is given by its base name and is in the checkpoint's directory. The shards of a tensor cover each
element exactly once, lie inside their files and do not overlap. JSON-encoded data is what :func:`encode` writes. A
valid index can be read without further checks, and reading it takes no more memory than the size of its files. Each
file's header must then describe the same tensors as the index (:meth:`CheckpointIndex.check_file_headers`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.checkpoint.block_files import BLOCK_BYTES
from zeroshard.checkpoint.json_codec import decode, truncated_repr
from zeroshard.utils.atomic_file import is_file_name
from zeroshard.utils.safetensors_files import DTYPE_NAMES

TENSOR_KINDS = ("model", "optimizer", "ema", "outer_optimizer", "replica", "other")
MAX_ELEMENTS = 2**62
MAX_DIMS = 64
DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_ByteRange = tuple[int, int, str]  # first byte, end, tensor name


class SchemaError(ValueError):
    """A field of an index is invalid."""


def check_index(index: Mapping[str, Any]) -> None:
    """Raise if any field of an index is invalid; ``index`` must contain all fields."""
    _check_files(index["files"])
    check_tensors(index["tensors"], index["files"])
    rank_data, tensors = index["rank_data"], index["tensors"]
    _check(isinstance(index["written"], str), "written", "a time", index["written"])
    _check_dict_of(index["versions"], "versions", str)
    _check_dict_of(index["requires_grad"], "requires_grad", bool)
    _check_dict_of(index["tied_names"], "tied_names", str)
    _check_sharding(index["sharding"])
    _check_config(index["huggingface_config"])
    if index["optimizer"] is not None:
        _check_optimizer(index["optimizer"], tensors)
    _check(isinstance(_decode_on_meta(index["extra"], "extra", tensors), dict), "extra", "a dict", index["extra"])
    is_valid = isinstance(rank_data, list) and len(rank_data) > 0
    _check(is_valid, "rank_data", "a list of each rank's data", rank_data)
    for rank, data in enumerate(rank_data):
        entry = f"rank_data[{rank}]"
        _check_keys(data, entry, "rng_states", "rank_extra")
        _decode_on_meta(data["rank_extra"], f"{entry}.rank_extra", tensors)
        modules = _decode_on_meta(data.get("extra_states", {}), f"{entry}.extra_states", tensors)
        _check(isinstance(modules, dict), f"{entry}.extra_states", "a dict", data.get("extra_states"))
        _check_keys(data["rng_states"], f"{entry}.rng_states", "python", "torch")
        _decode_on_meta(data["rng_states"], f"{entry}.rng_states", tensors)


def _check(condition: bool, entry: str, expected: str, got: Any) -> None:
    """Raise :class:`SchemaError` if ``condition`` is false.

    >>> _check(False, "written", "a time", 3)
    Traceback (most recent call last):
        ...
    zeroshard.checkpoint.schema.SchemaError: written is 3, expected a time
    """
    if not condition:
        raise SchemaError(f"{entry} is {truncated_repr(got)}, expected {expected}")


def _check_keys(value: Any, entry: str, *keys: str) -> None:
    _check(isinstance(value, dict) and set(keys) <= value.keys(), entry, f"an object with {', '.join(keys)}", value)


def _check_dict_of(value: Any, entry: str, kind: type) -> None:
    is_valid = isinstance(value, dict) and all(type(item) is kind for item in value.values())
    _check(is_valid, entry, f"an object with {kind.__name__} values", value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _check_files(files: Any) -> None:
    """Raise if a file is outside the directory or its size does not match the number of checksums."""
    _check(isinstance(files, list), "files", "a list", files)
    seen: set[str] = set()
    for number, file in enumerate(files):
        entry = f"files[{number}]"
        _check_keys(file, entry, "name", "nbytes", "block_crc32")
        name, nbytes, sums = file["name"], file["nbytes"], file["block_crc32"]
        _check(is_file_name(name), f"{entry}.name", "the name of a file in the checkpoint's directory", name)
        _check(name not in seen, f"{entry}.name", "a name that no other file has", name)
        seen.add(name)
        _check(_is_count(nbytes), f"{entry}.nbytes", "a number of bytes", nbytes)
        is_valid = isinstance(sums, list) and all(_is_count(checksum) and checksum < 2**32 for checksum in sums)
        is_valid = is_valid and len(sums) == -(-nbytes // BLOCK_BYTES)
        expected = f"a list of CRC-32 sums, one for each block of {BLOCK_BYTES} bytes of {nbytes}"
        _check(is_valid, f"{entry}.block_crc32", expected, sums)


def check_tensors(tensors: Any, files: Sequence[Mapping[str, Any]]) -> None:
    """Raise if the shards of a tensor are incomplete, lie outside their files or overlap."""
    _check(isinstance(tensors, dict), "tensors", "an object", tensors)
    used_ranges: list[list[_ByteRange]] = [[] for _ in files]  # of each file
    for name, saved in tensors.items():
        entry = f"tensors[{name!r}]"
        kind, _, base_name = name.partition("/")
        is_valid = kind in TENSOR_KINDS and bool(base_name)
        _check(is_valid, entry, f"a name that begins with {', '.join(TENSOR_KINDS)} and /", name)
        _check_keys(saved, entry, "shape", "dtype", "shards")
        shape, dtype = saved["shape"], saved["dtype"]
        is_valid = isinstance(dtype, str) and dtype in DTYPE_BY_NAME
        _check(is_valid, f"{entry}.dtype", f"one of {', '.join(DTYPE_BY_NAME)}", dtype)
        is_valid = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(_is_count(size) for size in shape)
        _check(is_valid, f"{entry}.shape", "a list of sizes of at least 0", shape)
        is_valid = math.prod(size or 1 for size in shape) <= MAX_ELEMENTS
        _check(is_valid, f"{entry}.shape", f"at most {MAX_ELEMENTS} elements", shape)
        _check_shards(name, saved, files, used_ranges)
    for file, ranges in zip(files, used_ranges, strict=True):
        end, owner = 0, ""
        for start, stop, name in sorted(ranges):
            if start < end:
                raise SchemaError(f"{name} and {owner} overlap at byte {start} of {file['name']}")
            end, owner = stop, name


def _check_shards(
    name: str, saved: Mapping[str, Any], files: Sequence[Mapping[str, Any]], used_ranges: list[list[_ByteRange]]
) -> None:
    """Check one tensor's shards and add their bytes to ``used_ranges``."""
    entry, shards = f"tensors[{name!r}].shards", saved["shards"]
    numel, itemsize = math.prod(saved["shape"]), DTYPE_BY_NAME[saved["dtype"]].itemsize
    _check(isinstance(shards, list), entry, "a list", shards)
    for shard in shards:
        is_valid = isinstance(shard, list) and len(shard) == 4 and all(_is_count(number) for number in shard)
        _check(is_valid, entry, "a list of [start, numel, file, offset], integers of at least 0", shard)
    position = 0
    for start, count, file, offset in sorted(shards):
        if start < position:
            raise SchemaError(f"{name} has element {start} twice, in overlapping shards")
        if start > position:
            break
        _check(count > 0, entry, "shards of at least one element", [start, count, file, offset])
        _check(file < len(files), entry, f"the number of one of {len(files)} files", file)
        end, size = offset + count * itemsize, files[file]["nbytes"]
        if end > size or start + count > numel:
            raise SchemaError(
                f"{name} has elements {start} to {start + count} of {numel} at bytes {offset} to {end} of "
                f"{files[file]['name']}, which has {size} bytes"
            )
        _check(offset % itemsize == 0, entry, f"an offset that is a multiple of {itemsize} bytes", offset)
        used_ranges[file].append((offset, end, name))
        position = start + count
    if position != numel:
        raise SchemaError(f"{name} has no values from element {position} of {numel} on: no rank has written them")


def _check_sharding(sharding: Any) -> None:
    is_valid = sharding is None or (
        isinstance(sharding, dict)
        and type(sharding.get("stage")) is int
        and isinstance(sharding.get("precision"), str | None)
        and _is_count(sharding.get("tensor_parallel_degree"))
    )
    _check(is_valid, "sharding", "null, or stage, precision and tensor degree", sharding)
    replicas = sharding.get("replicas") if sharding is not None else None
    if replicas is not None:
        _check_keys(replicas, "sharding.replicas", "count", "steps_since_average")
        count, steps = replicas["count"], replicas["steps_since_average"]
        is_valid = _is_count(count) and count > 0 and isinstance(steps, list) and all(map(_is_count, steps))
        _check(is_valid, "sharding.replicas", "a number of replicas, and a list of numbers of steps", replicas)


def _check_config(config: Any) -> None:
    _check(config is None or isinstance(config, dict), "huggingface_config", "null, or the config of a model", config)
    names = (config or {}).get("architectures")
    _check(names is None or _is_list_of_names(names), "huggingface_config.architectures", "a list of names", names)


def _check_optimizer(optimizer: Any, tensors: Mapping[str, Any]) -> None:
    _check_keys(optimizer, "optimizer", "param_groups", "loss_scale", "scalars")
    _check(isinstance(optimizer["param_groups"], list), "optimizer.param_groups", "a list", optimizer["param_groups"])
    seen: set[str] = set()
    for number, group in enumerate(optimizer["param_groups"]):
        entry = f"optimizer.param_groups[{number}]"
        _check_keys(group, entry, "class", "param_names", "options")
        names = group["param_names"]
        _check(_is_list_of_names(names), f"{entry}.param_names", "a list of parameter names", names)
        _check(isinstance(group["class"], str), f"{entry}.class", "a name", group["class"])
        for name in names:
            _check(name not in seen, f"{entry}.param_names", "each parameter in one group, once", name)
            seen.add(name)
        options = _decode_on_meta(group["options"], f"{entry}.options", tensors)
        _check(isinstance(options, dict), f"{entry}.options", "an object", group["options"])
    scale = optimizer["loss_scale"]
    is_valid = scale is None or (
        isinstance(scale, dict)
        and scale.keys() == {"scale", "growth_tracker"}
        and all(type(number) in (int, float) and 0 <= number < math.inf for number in scale.values())
        and scale["scale"] > 0
    )
    _check(is_valid, "optimizer.loss_scale", "null, or a scale above 0 and a growth_tracker of at least 0", scale)
    _check(isinstance(optimizer["scalars"], dict), "optimizer.scalars", "an object", optimizer["scalars"])
    for name, scalars in optimizer["scalars"].items():
        entry = f"optimizer.scalars[{name!r}]"
        _check(isinstance(_decode_on_meta(scalars, entry, tensors), dict), entry, "an object", scalars)


def _decode_on_meta(value: Any, entry: str, tensors: Mapping[str, Any]) -> Any:
    """Decode data with its tensors on the meta device; raise on anything :func:`encode` does not write."""

    def fetch(name: str) -> torch.Tensor:
        saved = tensors.get(f"other/{name}")
        _check(saved is not None, entry, "a tensor that is in the index", name)
        return torch.empty(saved["shape"], dtype=DTYPE_BY_NAME[saved["dtype"]], device="meta")  # type: ignore[index]

    try:
        return decode(value, fetch, entry)
    except SchemaError:
        raise
    except RecursionError as error:
        raise SchemaError(f"{entry} is nested too deeply") from error
    except ValueError as error:
        raise SchemaError(str(error)) from error

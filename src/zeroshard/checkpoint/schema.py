"""Schema: what an index has to be. Every field is checked when the index is opened, before anything uses it.

[Note: an index is not trusted]
A checksum says that an index is what somebody wrote, not that it makes sense. So every name, number and range is
checked here, in one place: a file is named by its name alone and lies in the checkpoint's directory; the stretches of a
tensor are all of it, each element once, lie inside their files and share no byte with another; plain data is what
:func:`encode` writes. What passes can be read without another check, and takes no more memory than its files have
bytes. A file's own header then has to say the same of its tensors as the index (:func:`check_file_header`).
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
MAX_HEADER_BYTES = 100_000_000  # bytes, as safetensors has it
DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class SchemaError(ValueError):
    """A field of an index that is not what it has to be."""


def check_entry(condition: bool, entry: str, expected: str, got: Any) -> None:
    """Refuse an entry that is not as expected.

    >>> check_entry(False, "ranks", "a number from 1 up", "x")
    Traceback (most recent call last):
        ...
    zeroshard.checkpoint.schema.SchemaError: ranks is 'x', expected a number from 1 up
    """
    if not condition:
        raise SchemaError(f"{entry} is {truncated_repr(got)}, expected {expected}")


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0 up that torch can count with."""
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


def check_index(plain: Mapping[str, Any]) -> None:
    """Refuse an index in which any field is not what it has to be; ``plain`` has all fields."""
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
    for rank, own in enumerate(plain["own"]):
        entry = f"own[{rank}]"
        check_entry(
            isinstance(own, dict) and {"random", "extra"} <= own.keys(), entry, "random states and extra data", own
        )
        _decode_on_meta(own["extra"], f"{entry}.extra", tensors)
        _check_rng_states(_decode_on_meta(own["random"], f"{entry}.random", tensors), f"{entry}.random")


def check_files(files: Any) -> None:
    """Refuse files whose names lead elsewhere, and sizes that their checksums do not fit."""
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
        right = isinstance(sums, list) and all(is_count(one) and one < 2**32 for one in sums)
        check_entry(right, f"{entry}.sums", "a list of CRC-32 sums", sums)
        blocks = -(-nbytes // BLOCK_BYTES)
        check_entry(
            len(sums) == blocks, f"{entry}.sums", f"{blocks} sums, of {nbytes} bytes in blocks of {BLOCK_BYTES}", sums
        )


def check_tensors(tensors: Any, files: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tensors whose stretches are not all of them, lie outside their files or share bytes with others."""
    check_entry(isinstance(tensors, dict), "tensors", "a table by name", tensors)
    taken: list[list[tuple[int, int, str]]] = [[] for _ in files]  # first byte, end and owner
    for name, saved in tensors.items():
        entry = f"tensors[{name!r}]"
        kind, _, rest = name.partition("/")
        check_entry(
            kind in TENSOR_KINDS and bool(rest), entry, f"a name that begins with {', '.join(TENSOR_KINDS)} and /", name
        )
        wanted = {"shape", "dtype", "stretches"}
        check_entry(isinstance(saved, dict) and wanted <= saved.keys(), entry, "shape, dtype and stretches", saved)
        dtype = saved["dtype"]
        known = isinstance(dtype, str) and dtype in DTYPE_BY_NAME
        check_entry(known, f"{entry}.dtype", f"one of {', '.join(DTYPE_BY_NAME)}", dtype)
        numel = _checked_numel(saved["shape"], f"{entry}.shape")
        _check_shards(name, saved["stretches"], numel, DTYPE_BY_NAME[dtype].itemsize, files, taken)
    for file, ranges in zip(files, taken, strict=True):
        end, owner = 0, ""
        for start, stop, name in sorted(ranges):
            if start < end:
                raise SchemaError(f"{name} and {owner} overlap at byte {start} of {file['name']}")
            end, owner = stop, name


def _checked_numel(shape: Any, entry: str) -> int:
    right = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(is_count(size) for size in shape)
    check_entry(right, entry, "a list of sizes from 0 up", shape)
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
    for stretch in shards:
        right = isinstance(stretch, list) and len(stretch) == 4 and all(is_count(number) for number in stretch)
        check_entry(right, entry, "a list of [start, numel, file, offset], whole numbers from 0 up", stretch)
    at = 0
    for start, count, file, offset in sorted(shards):
        if start < at:
            raise SchemaError(f"{name} has element {start} twice, in overlapping stretches")
        if start > at:
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
        at = start + count
    if at != numel:
        raise SchemaError(f"it has no values for {name} from element {at} on, of {numel}: no rank has written them")


def _check_mapping(value: Any, entry: str, kind: type, described: str) -> None:
    right = isinstance(value, dict) and all(type(item) is kind for item in value.values())
    check_entry(right, entry, f"{described} by name", value)


def _check_sharding(sharding: Any) -> None:
    right = sharding is None or (
        isinstance(sharding, dict)
        and type(sharding.get("stage")) is int
        and isinstance(sharding.get("precision"), str | None)
        and is_count(sharding.get("tensor", 1))
    )
    check_entry(right, "sharding", "null, or stage, precision and tensor degree", sharding)


def _check_config(config: Any) -> None:
    check_entry(config is None or isinstance(config, dict), "config", "null, or a model's description", config)
    names = (config or {}).get("architectures")
    right = names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))
    check_entry(right, "config.architectures", "a list of names", names)


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
        right = isinstance(names, list) and all(isinstance(name, str) for name in names)
        check_entry(right, f"{entry}.names", "a list of parameters' names", names)
        for name in names:
            check_entry(name not in seen, f"{entry}.names", "each parameter in one group, once", name)
            seen.add(name)
        options = _decode_on_meta(group["options"], f"{entry}.options", tensors)
        check_entry(isinstance(options, dict), f"{entry}.options", "options by name", group["options"])
    scale = optimizer["loss_scale"]
    right = scale is None or (
        isinstance(scale, list)
        and len(scale) == 2
        and all(type(number) in (int, float) and math.isfinite(number) for number in scale)
        and scale[0] > 0
        and scale[1] >= 0
    )
    check_entry(right, "optimizer.loss_scale", "null, or a scale above 0 and a number of steps without overflow", scale)
    check_entry(isinstance(optimizer["counters"], dict), "optimizer.counters", "a table by name", optimizer["counters"])
    for name, counted in optimizer["counters"].items():
        entry = f"optimizer.counters[{name!r}]"
        check_entry(isinstance(_decode_on_meta(counted, entry, tensors), dict), entry, "a table of counters", counted)


def _check_rng_states(states: Any, entry: str) -> None:
    check_entry(
        isinstance(states, dict) and {"python", "torch"} <= states.keys(), entry, "python's and torch's", states
    )
    for name, (dtype, length) in RNG_STATE_SPECS.items():
        state = states.get(name)
        right = isinstance(state, torch.Tensor) and state.dtype == dtype and state.dim() == 1
        right = right and (length is None or state.numel() == length)
        check_entry(name not in states or right, f"{entry}.{name}", f"a line of {length or 'some'} {dtype}", state)


def _decode_on_meta(value: Any, entry: str, tensors: Mapping[str, Any]) -> Any:
    """Plain data with its tensors on the meta device; refuses what :func:`encode` does not write."""

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


# --------------------------------------------------------------------------------------------- a file's own header


def check_file_header(path: Path, record: FileRecord, wanted: Sequence[tuple[str, str, Sequence[int], int]]) -> None:
    """Refuse a file whose own header says something else of its tensors than the index.

    ``wanted`` has each tensor's name in the file, its dtype, its shape there and its first byte.
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
        place = [start, start + math.prod(shape) * DTYPE_BY_NAME[dtype].itemsize]
        expected = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
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

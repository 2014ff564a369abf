"""Table: where strips lie, as addresses on the device, so that one launch updates all of them.

    rows     | gradient, master, momentum, variance, copy, elements, run, first block |  one for each strip
    blocks   | row 0, row 0, row 0, row 1, row 2, row 2 … |                              one for each program

It keeps no tensor alive: whoever uses it has to know that the strips still lie there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakValueDictionary

import torch

from zeroshard.optim.fused_adam.kernel_inputs import SliceTensors

ROW_FIELDS = 8  # numbers of a row
VECTOR_NUMEL = 4  # elements of one load


@dataclass(frozen=True)
class LaunchSpec:
    """What strips of one launch have in common."""

    grad_dtype: torch.dtype
    compute_dtype: torch.dtype | None
    is_aligned: bool  # whether all of them begin and end at whole vectors


@dataclass(frozen=True)
class LaunchTable:
    """Strips of one launch."""

    spec: LaunchSpec
    rows: torch.Tensor  # int64 [strips, ROW]
    program_rows: torch.Tensor  # int32 [programs]: shared by tables that differ in addresses alone


def make_tables(slice_tensors: Iterable[SliceTensors], block_numel: int, device: torch.device) -> list[LaunchTable]:
    """Note strips down, for programs of ``block`` elements each.

    >>> line = torch.zeros(8)
    >>> strips = [SliceTensors(0, *(line[half] for _ in range(4)), None) for half in (slice(0, 4), slice(4, 8))]
    >>> (table,) = make_tables(strips, 2, torch.device("cpu"))
    >>> table.rows[:, 5:].tolist(), table.program_rows.tolist()
    ([[8, 0, 0]], [0, 0, 0, 0])
    """
    found: dict[LaunchSpec, list[list[int]]] = {}
    for copied, row in _merge_adjacent(slice_tensors):
        found.setdefault(
            LaunchSpec(copied.gradient.dtype, _dtype(copied.compute_param), _is_aligned(copied, row)), []
        ).append(row)
    return [_make_table(way, rows, block_numel, device) for way, rows in found.items()]


def _merge_adjacent(slice_tensors: Iterable[SliceTensors]) -> list[tuple[SliceTensors, list[int]]]:
    """Rows of the strips, neighbours in one, each with one of its strips."""
    rows: list[tuple[SliceTensors, list[int]]] = []
    for strip in slice_tensors:
        row = [*_addresses(strip), strip.master.numel(), strip.slice_index]
        if rows and _is_adjacent(*rows[-1], strip, row):
            rows[-1][1][5] += row[5]
        elif row[5]:
            rows.append((strip, row))
    return rows


def _addresses(slice_tensors: SliceTensors) -> list[int]:
    tensors = (slice_tensors.gradient, slice_tensors.master, slice_tensors.exp_avg, slice_tensors.exp_avg_sq)
    return [
        *(tensor.data_ptr() for tensor in tensors),
        0 if slice_tensors.compute_param is None else slice_tensors.compute_param.data_ptr(),
    ]


def _element_bytes(slice_tensors: SliceTensors) -> list[int]:
    """Bytes of an element at each address."""
    return [
        slice_tensors.gradient.element_size(),
        4,
        4,
        4,
        0 if slice_tensors.compute_param is None else slice_tensors.compute_param.element_size(),
    ]


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _is_adjacent(before: SliceTensors, row: Sequence[int], after: SliceTensors, other: Sequence[int]) -> bool:
    alike = (before.gradient.dtype, _dtype(before.compute_param), row[6]) == (
        after.gradient.dtype,
        _dtype(after.compute_param),
        other[6],
    )
    return alike and all(row[i] + row[5] * size == other[i] for i, size in enumerate(_element_bytes(before)))


def _is_aligned(slice_tensors: SliceTensors, row: Sequence[int]) -> bool:
    whole = all(row[i] % (VECTOR_NUMEL * size) == 0 for i, size in enumerate(_element_bytes(slice_tensors)) if size)
    return whole and row[5] % VECTOR_NUMEL == 0


def _make_table(spec: LaunchSpec, rows: list[list[int]], block_numel: int, device: torch.device) -> LaunchTable:
    counts = tuple(-(-row[5] // block_numel) for row in rows)
    firsts = accumulate(counts, initial=0)
    noted = torch.tensor([[*row, first] for row, first in zip(rows, firsts, strict=False)], dtype=torch.int64)
    return LaunchTable(spec, _copy_to_device(noted, device), _program_rows(counts, device))


_program_rows_cache: WeakValueDictionary[tuple[tuple[int, ...], torch.device], torch.Tensor] = WeakValueDictionary()


def _program_rows(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The row of each program. To make it takes all processors for a moment, so a table takes what another has."""
    found = _program_rows_cache.get((counts, device))
    if found is None:
        rows = torch.arange(len(counts), dtype=torch.int32)
        found = _program_rows_cache[counts, device] = _copy_to_device(
            torch.repeat_interleave(rows, torch.tensor(counts)), device
        )
    return found


def _copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor to the device without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

"""LaunchTable: device addresses of many slices' tensors, so that one kernel launch updates all of them.

    rows          | gradient, master, exp_avg, exp_avg_sq, compute_param, numel, slice, first program |  one per range
    program_rows  | row 0, row 0, row 0, row 1, row 2, row 2 … |                                         one per program

A table keeps no tensor alive: the caller must ensure that the addresses are still valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

ROW_FIELDS = 8  # int64 values per row
VECTOR_NUMEL = 4  # elements per vector load


class SliceTensors(NamedTuple):
    """Elements of a slice that are contiguous in every tensor: all tensors are 1-D and have the same length.

    They are in the order of a row of the table.
    """

    slice_index: int  # of the slice, which has its own step count
    gradient: torch.Tensor  # reduced, in its own dtype
    master: torch.Tensor  # fp32
    exp_avg: torch.Tensor  # fp32
    exp_avg_sq: torch.Tensor  # fp32
    compute_param: torch.Tensor | None  # in 16 bits; None: only the master weight is kept


@dataclass(frozen=True)
class LaunchSpec:
    """What all rows of one launch have in common."""

    grad_dtype: torch.dtype
    compute_dtype: torch.dtype | None
    is_aligned: bool  # whether all ranges begin and end at vector boundaries


@dataclass(frozen=True)
class LaunchTable:
    """Rows of one launch."""

    spec: LaunchSpec
    rows: torch.Tensor  # int64 [rows, ROW_FIELDS]
    program_rows: torch.Tensor  # int32 [programs]: shared by tables that differ only in addresses


def make_tables(slice_tensors: Iterable[SliceTensors], block_numel: int, device: torch.device) -> list[LaunchTable]:
    """Return launch tables for the tensors; each program updates ``block_numel`` elements.

    >>> flat = torch.zeros(8)
    >>> tensors = [SliceTensors(0, *(flat[half] for _ in range(4)), None) for half in (slice(0, 4), slice(4, 8))]
    >>> (table,) = make_tables(tensors, 2, torch.device("cpu"))
    >>> table.rows[:, 5:].tolist(), table.program_rows.tolist()
    ([[8, 0, 0]], [0, 0, 0, 0])
    """
    rows_by_spec: dict[LaunchSpec, list[list[int]]] = {}
    for tensors, row in _merge_adjacent(slice_tensors):
        rows_by_spec.setdefault(
            LaunchSpec(tensors.gradient.dtype, _dtype(tensors.compute_param), _is_aligned(tensors, row)), []
        ).append(row)
    return [_make_table(spec, rows, block_numel, device) for spec, rows in rows_by_spec.items()]


def _merge_adjacent(slice_tensors: Iterable[SliceTensors]) -> list[tuple[SliceTensors, list[int]]]:
    """Return one row per contiguous range, each with the first SliceTensors in it."""
    rows: list[tuple[SliceTensors, list[int]]] = []
    for tensors in slice_tensors:
        row = [*_addresses(tensors), tensors.master.numel(), tensors.slice_index]
        if rows and _is_adjacent(*rows[-1], tensors, row):
            rows[-1][1][5] += row[5]
        elif row[5]:
            rows.append((tensors, row))
    return rows


def _addresses(slice_tensors: SliceTensors) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in slice_tensors[1:]]


def _element_bytes(slice_tensors: SliceTensors) -> list[int]:
    return [0 if tensor is None else tensor.element_size() for tensor in slice_tensors[1:]]


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _is_adjacent(before: SliceTensors, row: Sequence[int], after: SliceTensors, other: Sequence[int]) -> bool:
    is_same_kind = (before.gradient.dtype, _dtype(before.compute_param), row[6]) == (
        after.gradient.dtype,
        _dtype(after.compute_param),
        other[6],
    )
    return is_same_kind and all(row[i] + row[5] * size == other[i] for i, size in enumerate(_element_bytes(before)))


def _is_aligned(slice_tensors: SliceTensors, row: Sequence[int]) -> bool:
    starts_aligned = all(
        row[i] % (VECTOR_NUMEL * size) == 0 for i, size in enumerate(_element_bytes(slice_tensors)) if size
    )
    return starts_aligned and row[5] % VECTOR_NUMEL == 0


def _make_table(spec: LaunchSpec, rows: list[list[int]], block_numel: int, device: torch.device) -> LaunchTable:
    counts = tuple(-(-row[5] // block_numel) for row in rows)
    first_programs = accumulate(counts, initial=0)
    table_rows = torch.tensor(
        [[*row, first] for row, first in zip(rows, first_programs, strict=False)], dtype=torch.int64, device="cpu"
    )
    return LaunchTable(spec, _copy_to_device(table_rows, device), _program_rows(counts, device))


_program_rows_cache: WeakValueDictionary[tuple[tuple[int, ...], torch.device], torch.Tensor] = WeakValueDictionary()


def _program_rows(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the row of each program. Cached, because building it briefly occupies all CPU cores."""
    program_rows = _program_rows_cache.get((counts, device))
    if program_rows is None:
        rows = torch.arange(len(counts), dtype=torch.int32, device="cpu")
        program_rows = _program_rows_cache[counts, device] = _copy_to_device(
            torch.repeat_interleave(rows, torch.tensor(counts, device="cpu")), device
        )
    return program_rows


def _copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device without waiting for the device."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

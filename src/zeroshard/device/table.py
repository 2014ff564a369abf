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

from zeroshard.device.strip import Strip

ROW = 8  # numbers of a row
VECTOR = 4  # elements of one load


@dataclass(frozen=True)
class Way:
    """What strips of one launch have in common."""

    gradient: torch.dtype
    copy: torch.dtype | None
    even: bool  # whether all of them begin and end at whole vectors


@dataclass(frozen=True)
class Table:
    """Strips of one launch."""

    way: Way
    rows: torch.Tensor  # int64 [strips, ROW]
    blocks: torch.Tensor  # int32 [programs]: shared by tables that differ in addresses alone


def tables_of(strips: Iterable[Strip], block: int, device: torch.device) -> list[Table]:
    """Note strips down, for programs of ``block`` elements each.

    >>> line = torch.zeros(8)
    >>> strips = [Strip(0, *(line[half] for _ in range(4)), None) for half in (slice(0, 4), slice(4, 8))]
    >>> (table,) = tables_of(strips, 2, torch.device("cpu"))
    >>> table.rows[:, 5:].tolist(), table.blocks.tolist()
    ([[8, 0, 0]], [0, 0, 0, 0])
    """
    found: dict[Way, list[list[int]]] = {}
    for copied, row in _joined(strips):
        found.setdefault(Way(copied.gradient.dtype, _dtype(copied.copy), _even(copied, row)), []).append(row)
    return [_table(way, rows, block, device) for way, rows in found.items()]


def _joined(strips: Iterable[Strip]) -> list[tuple[Strip, list[int]]]:
    """Rows of the strips, neighbours in one, each with one of its strips."""
    rows: list[tuple[Strip, list[int]]] = []
    for strip in strips:
        row = [*_addresses(strip), strip.master.numel(), strip.run]
        if rows and _adjoin(*rows[-1], strip, row):
            rows[-1][1][5] += row[5]
        elif row[5]:
            rows.append((strip, row))
    return rows


def _addresses(strip: Strip) -> list[int]:
    tensors = (strip.gradient, strip.master, strip.exp_avg, strip.exp_avg_sq)
    return [*(tensor.data_ptr() for tensor in tensors), 0 if strip.copy is None else strip.copy.data_ptr()]


def _sizes(strip: Strip) -> list[int]:
    """Bytes of an element at each address."""
    return [strip.gradient.element_size(), 4, 4, 4, 0 if strip.copy is None else strip.copy.element_size()]


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _adjoin(before: Strip, row: Sequence[int], after: Strip, other: Sequence[int]) -> bool:
    alike = (before.gradient.dtype, _dtype(before.copy), row[6]) == (after.gradient.dtype, _dtype(after.copy), other[6])
    return alike and all(row[i] + row[5] * size == other[i] for i, size in enumerate(_sizes(before)))


def _even(strip: Strip, row: Sequence[int]) -> bool:
    whole = all(row[i] % (VECTOR * size) == 0 for i, size in enumerate(_sizes(strip)) if size)
    return whole and row[5] % VECTOR == 0


def _table(way: Way, rows: list[list[int]], block: int, device: torch.device) -> Table:
    counts = tuple(-(-row[5] // block) for row in rows)
    firsts = accumulate(counts, initial=0)
    noted = torch.tensor([[*row, first] for row, first in zip(rows, firsts, strict=False)], dtype=torch.int64)
    return Table(way, _sent(noted, device), _blocks(counts, device))


_made: WeakValueDictionary[tuple[tuple[int, ...], torch.device], torch.Tensor] = WeakValueDictionary()


def _blocks(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The row of each program. To make it takes all processors for a moment, so a table takes what another has."""
    found = _made.get((counts, device))
    if found is None:
        rows = torch.arange(len(counts), dtype=torch.int32)
        found = _made[counts, device] = _sent(torch.repeat_interleave(rows, torch.tensor(counts)), device)
    return found


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor to the device without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

"""Where each state of a flat parameter is, on every axis, and when gradients get there: a stage is a row of a table."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace


class Placement(enum.Enum):
    """What one rank of an axis has of a state."""

    REPLICATE = enum.auto()  # all of it, like every other rank
    SHARD = enum.auto()  # its part
    PARTIAL = enum.auto()  # a summand: the sum over the ranks is the state

    __hash__ = object.__hash__  # Enum's own is written in Python, and placements are keys


Placements = tuple[Placement, ...]  # one for each axis, the outermost first


class Reduced(enum.Enum):
    """In which backwards of a step a gradient leaves PARTIAL."""

    LAST_BACKWARD = enum.auto()  # or when somebody needs it
    EVERY_BACKWARD = enum.auto()


@dataclass(frozen=True)
class Row:
    """The placements of one axis between steps."""

    parameters: Placement
    gradients: Placement  # once they are reduced
    states: Placement  # of the optimizer, and of master weights
    reduced: Reduced


_R = Placement.REPLICATE
_S = Placement.SHARD

STAGES = {
    0: Row(_R, _R, _R, Reduced.LAST_BACKWARD),
    1: Row(_R, _S, _S, Reduced.LAST_BACKWARD),
    2: Row(_R, _S, _S, Reduced.EVERY_BACKWARD),
    3: Row(_S, _S, _S, Reduced.EVERY_BACKWARD),
}

# The row of an outer axis (usually between nodes), from the row of the inner one.
OUTER: dict[str, Callable[[Row], Row]] = {
    "hybrid": lambda row: Row(_R, _R, _R, row.reduced),
    "full": lambda row: row,
    "hierarchical": lambda row: replace(row, parameters=_R),
    "hierarchical-gradients": lambda row: replace(row, parameters=_R, reduced=Reduced.LAST_BACKWARD),
    "inner-gradients": lambda row: replace(row, reduced=Reduced.LAST_BACKWARD),
}


def rows_of(stage: int, partition: str, axis_count: int) -> tuple[Row, ...]:
    """Return the row of each axis, the outermost first.

    >>> [row.states.name for row in rows_of(1, "hybrid", axis_count=2)]
    ['REPLICATE', 'SHARD']
    """
    inner = STAGES[stage]
    outer = OUTER[partition](inner)
    return (outer,) * (axis_count - 1) + (inner,)

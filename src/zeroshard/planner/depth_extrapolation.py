"""Extrapolate the trace of a deep model from two shallow ones that differ by one block.

[Note: extrapolating in depth]
Equal blocks do the same work. So two shallow models determine a model with n equal blocks: the events of a middle
block, which only the deeper of the two has, are repeated. The first and the last block stay unchanged; they may differ
because of what comes before and after them. Every assumption that can be checked is checked: without its middle block,
the deeper trace must equal the shallow one, event by event and byte by byte; otherwise :class:`NonUniformBlocksError`
is raised. Tracing takes 0.1 seconds per block, so a model of two hundred layers takes as long as one of three.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zeroshard.optim import max_slice_numel
from zeroshard.planner.state_sizes import StateSizes
from zeroshard.planner.tracing.trace import EngineEvent, Op, Trace
from zeroshard.planner.tracing.trace_model import meta_memo


def find_block_stack(model: nn.Module) -> nn.ModuleList | None:
    """Return the model's largest list of blocks, or None if there is none or its blocks differ.

    >>> import torch
    >>> from zeroshard.models import GPT, GPTConfig
    >>> with torch.device("meta"):
    ...     model = GPT(GPTConfig(layers=4, heads=2, width=64))
    >>> find_block_stack(model) is model.blocks
    True
    >>> find_block_stack(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)])) is None
    True
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    if not lists:
        return None
    stack = max(lists, key=lambda blocks: sum(parameter.numel() for parameter in blocks.parameters()))
    signatures = {_block_signature(block) for block in stack}
    return stack if len(signatures) == 1 else None


def _block_signature(block: nn.Module) -> tuple[Any, ...]:
    """Return a key that is the same for blocks of the same structure."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    modules = tuple(type(module) for module in block.modules())
    return modules, tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors)


def truncate_model(model: nn.Module, blocks: int) -> nn.Module:
    """Return a copy on the meta device with only the first ``blocks`` of its block stack.

    >>> import torch
    >>> from zeroshard.models import GPT, GPTConfig
    >>> with torch.device("meta"):
    ...     model = GPT(GPTConfig(layers=4, heads=2, width=64))
    >>> len(truncate_model(model, 2).blocks), len(model.blocks)
    (2, 4)
    """
    stack = find_block_stack(model)
    if stack is None or len(stack) < blocks:
        raise ValueError(f"{type(model).__name__} has no list of at least {blocks} equal blocks")
    memo = meta_memo(model)
    truncated = copy.copy(stack)
    truncated._modules = {str(index): block for index, block in enumerate(stack) if index < blocks}
    memo[id(stack)] = copy.deepcopy(truncated, memo)
    return copy.deepcopy(model, memo)


class NonUniformBlocksError(ValueError):
    """Two models do not differ by exactly one block that equals its neighbors."""


@dataclass(frozen=True)
class _MiddleBlock:
    """The position of a middle block's units in the deeper of two models."""

    first_unit: int
    num_units: int  # per block
    unit_names: tuple[str, ...]  # of all units of the deeper model

    @classmethod
    def find(cls, shallow: Sequence[str], deeper: Sequence[str]) -> _MiddleBlock:
        """Find the middle block by comparing unit names."""
        count = len(deeper) - len(shallow)
        same = next(
            (i for i, pair in enumerate(zip(shallow, deeper, strict=False)) if pair[0] != pair[1]), len(shallow)
        )
        if count < 1 or same < 2 * count or tuple(deeper[same + count :]) != tuple(shallow[same:]):
            raise NonUniformBlocksError(
                f"units {list(deeper)} must be {list(shallow)} with one more block between equal blocks"
            )
        return cls(same - count, count, tuple(deeper))

    @property
    def units(self) -> range:
        """The indices of its units."""
        return range(self.first_unit, self.first_unit + self.num_units)

    def extended_names(self, extra: int) -> tuple[str, ...]:
        """Return the unit names of a model with ``extra`` more blocks than the deeper one."""
        inserted = [self._extrapolated_name(unit, count) for count in range(2, extra + 2) for unit in self.units]
        end = self.units.stop + self.num_units
        return (*self.unit_names[:end], *inserted, *self.unit_names[end:])

    def _extrapolated_name(self, unit: int, count: int) -> str:
        """Return the name of the unit that is ``count`` blocks after ``unit``: a number in it grows."""
        name, next_name = self.unit_names[unit], self.unit_names[unit + self.num_units]
        pairs = list(zip(name.split("."), next_name.split("."), strict=False))
        is_numbered = all(a == b or (a.isdecimal() and b.isdecimal()) for a, b in pairs)
        if not is_numbered or name.count(".") != next_name.count("."):
            raise NonUniformBlocksError(f"units must differ only in their numbers, got {name!r} and {next_name!r}")
        return ".".join(a if a == b else str(int(a) + count * (int(b) - int(a))) for a, b in pairs)


def extrapolate_trace(shallow: Trace, deeper: Trace, extra: int) -> Trace:
    """Return the trace of a model with ``extra`` more blocks than ``deeper``, which has one more than ``shallow``.

    See [Note: extrapolating in depth].

    >>> import torch
    >>> from zeroshard.models import GPT, GPTConfig
    >>> from zeroshard.planner.tracing.trace_model import trace_model
    >>> with torch.device("meta"):
    ...     models = [GPT(GPTConfig(layers=n, heads=2, width=64, vocab_size=256, context=32)) for n in (2, 3, 5)]
    >>> two, three, five = (trace_model(model, micro_batch=2) for model in models)
    >>> extrapolate_trace(two, three, 2) == five
    True
    """
    middle = _MiddleBlock.find(shallow.unit_names, deeper.unit_names)
    names = middle.extended_names(extra)
    if _insert_blocks(deeper, middle, -1, shallow.unit_names) != shallow.events:
        raise NonUniformBlocksError("the middle block has other operations than the others: trace the full model")
    count = len(deeper.kept_input_bytes) - len(shallow.kept_input_bytes)
    if deeper.kept_input_bytes[count:] != shallow.kept_input_bytes or deeper.input_bytes != shallow.input_bytes:
        raise NonUniformBlocksError("the middle block keeps other inputs than the others: trace the full model")
    return replace(
        deeper,
        events=_insert_blocks(deeper, middle, extra, names),
        unit_names=names,
        kept_input_bytes=deeper.kept_input_bytes[:count] * (extra + 1) + shallow.kept_input_bytes,
        buffer_bytes=deeper.buffer_bytes + extra * (deeper.buffer_bytes - shallow.buffer_bytes),
    )


def _insert_blocks(
    deeper: Trace, middle: _MiddleBlock, extra: int, names: Sequence[str]
) -> tuple[Op | EngineEvent, ...]:
    """Return the events with ``extra`` more middle blocks (-1: one fewer). ``names`` are the resulting unit names."""
    unit_indices = {name: index for index, name in enumerate(middle.unit_names)}

    def shift(events: Sequence[Op | EngineEvent], blocks: int, first_unit: int = 0) -> list[Op | EngineEvent]:
        """Return the events with the units from ``first_unit`` on shifted by a number of blocks."""
        shifted = list(events)
        for index, event in enumerate(events if blocks else ()):
            unit = event.unit if isinstance(event, EngineEvent) else unit_indices.get(event.module_name, -1)
            if unit >= first_unit:
                unit += blocks * middle.num_units
                shifted[index] = (
                    replace(event, unit=unit)
                    if isinstance(event, EngineEvent)
                    else replace(event, module_name=names[unit])
                )
        return shifted

    found: list[Op | EngineEvent] = []
    half = next(i for i, e in enumerate(deeper.events) if isinstance(e, EngineEvent) and e.kind == "end forward")
    for events, is_backward in ((deeper.events[:half], False), (deeper.events[half:], True)):
        begin, end = _middle_block_range(events, middle)
        before, after = events[:begin], events[end:]
        copies = [shift(events[begin:end], count) for count in range(extra + 1)]
        if is_backward:  # goes from the last block to the first
            parts = [shift(before, extra, middle.units.stop), *reversed(copies), after]
        else:
            parts = [before, *copies, shift(after, extra, middle.units.stop)]
        found += [event for part in parts for event in part]
    return tuple(found)


def _middle_block_range(events: Sequence[Op | EngineEvent], middle: _MiddleBlock) -> tuple[int, int]:
    """Return the event range from the unshard of the middle block to the unshard of another block."""
    unshards = [(i, e.unit) for i, e in enumerate(events) if isinstance(e, EngineEvent) and e.kind == "unshard"]
    begin = next((i for i, unit in unshards if unit in middle.units), None)
    if begin is None:
        raise NonUniformBlocksError("the middle block is never unsharded: trace the full model")
    return begin, next((i for i, unit in unshards if i > begin and unit not in middle.units), len(events))


def extrapolate_state_sizes(shallow: StateSizes, deeper: StateSizes, extra: int, bucket_size: int) -> StateSizes:
    """Extrapolate the state sizes likewise. States must be on the device: offloaded sizes are not linear in depth."""
    if shallow.offloaded or deeper.offloaded:
        raise NonUniformBlocksError(
            "offloaded states are divided over all blocks together: compute the sizes of the full model"
        )
    middle = _MiddleBlock.find([unit.name for unit in shallow.units], [unit.name for unit in deeper.units])
    begin, end = middle.units.start, middle.units.stop
    remaining = [
        replace(u, name=s.name) for u, s in zip(deeper.units[:begin] + deeper.units[end:], shallow.units, strict=True)
    ]
    buffers = [(sizes.ring_bytes, sizes.shard_buffer_bytes) for sizes in (shallow, deeper)]
    if remaining != shallow.units or buffers[0] != buffers[1]:
        raise NonUniformBlocksError("the middle block has other state sizes than the others: use the full model")
    units = deeper.units[:begin] + deeper.units[begin:end] * (extra + 1) + deeper.units[end:]
    units = [replace(unit, name=name) for unit, name in zip(units, middle.extended_names(extra), strict=True)]
    states = {kind: nbytes + extra * (nbytes - shallow.states[kind]) for kind, nbytes in deeper.states.items()}
    # the update buffer has 4 bytes per element of this rank's shards, up to the largest slice
    old_numel, numel = (
        min(sum(unit.trained_numel for unit in group), max_slice_numel(bucket_size)) for group in (deeper.units, units)
    )
    step_buffer_bytes = deeper.step_buffer_bytes // max(old_numel, 1) * numel
    return replace(deeper, units=units, states=states, step_buffer_bytes=step_buffer_bytes)

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
from zeroshard.planner.state_sizes import StateSizes, UnitSizes
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

    def __contains__(self, unit: int) -> bool:
        return self.first_unit <= unit < self.first_unit + self.num_units

    def extended_names(self, extra: int) -> tuple[str, ...]:
        """Return the unit names of a model with ``extra`` more blocks than the deeper one."""
        inserted = [self.extrapolated_name(unit, count) for count in range(2, extra + 2) for unit in self._unit_indices]
        end = self.first_unit + 2 * self.num_units
        return (*self.unit_names[:end], *inserted, *self.unit_names[end:])

    def extrapolated_name(self, unit: int, count: int) -> str:
        """Return the name of the unit that is ``count`` blocks after ``unit`` of the middle block."""
        parts, next_parts = (self.unit_names[unit + shift].split(".") for shift in (0, self.num_units))
        if len(parts) != len(next_parts):
            pair = self.unit_names[unit], self.unit_names[unit + self.num_units]
            raise NonUniformBlocksError(f"units {pair[0]!r} and {pair[1]!r} are numbered differently")
        pairs = zip(parts, next_parts, strict=True)
        return ".".join(a if a == b else _extrapolate_number(a, b, count) for a, b in pairs)

    @property
    def _unit_indices(self) -> range:
        return range(self.first_unit, self.first_unit + self.num_units)


def _extrapolate_number(part: str, next_part: str, count: int) -> str:
    if not (part.isdecimal() and next_part.isdecimal()):
        raise NonUniformBlocksError(f"blocks must be numbered, got {part!r} and then {next_part!r}")
    return str(int(part) + count * (int(next_part) - int(part)))


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
    names, half = middle.extended_names(extra), _backward_start(deeper)
    forward, backward = deeper.events[:half], deeper.events[half:]
    without_middle = (
        *_insert_blocks(forward, middle, -1, shallow.unit_names),
        *_insert_blocks(backward, middle, -1, shallow.unit_names, True),
    )
    recomputed_per_block = deeper.num_recomputed_blocks - shallow.num_recomputed_blocks
    if (
        without_middle != shallow.events
        or recomputed_per_block not in (0, 1)
        or deeper.input_bytes != shallow.input_bytes
    ):
        raise NonUniformBlocksError("the middle block has other operations than the others: trace the full model")
    return replace(
        deeper,
        events=(*_insert_blocks(forward, middle, extra, names), *_insert_blocks(backward, middle, extra, names, True)),
        unit_names=names,
        kept_input_bytes=_extrapolate_kept_inputs(shallow.kept_input_bytes, deeper.kept_input_bytes, extra),
        num_recomputed_blocks=deeper.num_recomputed_blocks + extra * recomputed_per_block,
        buffer_bytes=deeper.buffer_bytes + extra * (deeper.buffer_bytes - shallow.buffer_bytes),
    )


def _backward_start(trace: Trace) -> int:
    """Return the index of the event where backward begins."""
    return next(i for i, e in enumerate(trace.events) if isinstance(e, EngineEvent) and e.kind == "end forward")


def _insert_blocks(
    events: Sequence[Op | EngineEvent], middle: _MiddleBlock, extra: int, names: Sequence[str], backward: bool = False
) -> list[Op | EngineEvent]:
    """Return the events of a pass with ``extra`` more middle blocks (-1: one fewer).

    ``names`` are the unit names of the resulting model.
    """
    begin, end = _middle_block_range(events, middle)
    before, block, after = events[:begin], events[begin:end], events[end:]
    copies = [[_shift_event(event, index * middle.num_units, names) for event in block] for index in range(extra + 1)]
    if backward:  # goes from the last block to the first
        before = [_shift_if_after(event, middle, extra, names) for event in before]
        copies.reverse()
    else:
        after = [_shift_if_after(event, middle, extra, names) for event in after]
    return [*before, *(event for copy in copies for event in copy), *after]


def _middle_block_range(events: Sequence[Op | EngineEvent], middle: _MiddleBlock) -> tuple[int, int]:
    """Return the event range from the unshard of the middle block to the unshard of another block."""
    unshards = [(i, e.unit) for i, e in enumerate(events) if isinstance(e, EngineEvent) and e.kind == "bring"]
    begin = next((i for i, unit in unshards if unit in middle), None)
    if begin is None:
        raise NonUniformBlocksError("the middle block is never unsharded: trace the full model")
    return begin, next((i for i, unit in unshards if i > begin and unit not in middle), len(events))


def _shift_if_after(
    event: Op | EngineEvent, middle: _MiddleBlock, blocks: int, names: Sequence[str]
) -> Op | EngineEvent:
    """Shift an event if its unit follows the middle block, where ``blocks`` blocks are inserted."""
    unit = event.unit if isinstance(event, EngineEvent) else _unit_index(event, middle)
    if unit < middle.first_unit + middle.num_units:
        return event  # of an earlier or middle unit, or of no unit
    return _shift_event(event, blocks * middle.num_units, names, unit)


def _shift_event(
    event: Op | EngineEvent, offset: int, names: Sequence[str], unit: int | None = None
) -> Op | EngineEvent:
    """Return the same event for the unit ``offset`` positions later."""
    if offset == 0:
        return event
    if isinstance(event, EngineEvent):
        return EngineEvent(event.kind, event.unit + offset, event.nbytes) if event.unit >= 0 else event
    if unit is None:
        unit = names.index(event.module_name) if event.module_name in names else -1
    if unit < 0:
        return event
    return replace(event, module_name=names[unit + offset])


def _unit_index(op: Op, middle: _MiddleBlock) -> int:
    return middle.unit_names.index(op.module_name) if op.module_name in middle.unit_names else -1


def _extrapolate_kept_inputs(shallow: tuple[float, ...], deeper: tuple[float, ...], extra: int) -> tuple[float, ...]:
    """Return the kept input bytes of each block with ``extra`` more blocks."""
    count = len(deeper) - len(shallow)
    if deeper[count:] != shallow:
        raise NonUniformBlocksError("the middle block keeps other inputs than the others: trace the full model")
    return deeper[:count] * (extra + 1) + shallow


def extrapolate_state_sizes(shallow: StateSizes, deeper: StateSizes, extra: int, bucket_size: int) -> StateSizes:
    """Extrapolate the state sizes likewise. States must be on the device: offloaded sizes are not linear in depth."""
    if shallow.offloaded or deeper.offloaded:
        raise NonUniformBlocksError(
            "offloaded states are divided over all blocks together: compute the sizes of the full model"
        )
    middle = _MiddleBlock.find([unit.name for unit in shallow.units], [unit.name for unit in deeper.units])
    begin, end = middle.first_unit, middle.first_unit + middle.num_units
    remaining = [
        replace(u, name=s.name) for u, s in zip(deeper.units[:begin] + deeper.units[end:], shallow.units, strict=True)
    ]
    buffers = [(sizes.ring_bytes, sizes.shard_buffer_bytes) for sizes in (shallow, deeper)]
    if remaining != shallow.units or buffers[0] != buffers[1]:
        raise NonUniformBlocksError("the middle block has other state sizes than the others: use the full model")
    block = deeper.units[begin:end]
    copies = [replace(unit) for _ in range(extra + 1) for unit in block]
    units = deeper.units[:begin] + copies + deeper.units[end:]
    units = [replace(unit, name=name) for unit, name in zip(units, middle.extended_names(extra), strict=True)]
    states = {kind: nbytes + extra * (nbytes - shallow.states[kind]) for kind, nbytes in deeper.states.items()}
    return replace(deeper, units=units, states=states, step_buffer_bytes=_step_buffer_bytes(deeper, units, bucket_size))


def _step_buffer_bytes(deeper: StateSizes, units: Sequence[UnitSizes], bucket_size: int) -> int:
    """Return the bytes of the update buffer: 4 per element of this rank's shards, up to the largest slice."""
    max_numel = min(sum(unit.trained_numel for unit in deeper.units), max_slice_numel(bucket_size))
    return (
        deeper.step_buffer_bytes
        // max(max_numel, 1)
        * min(sum(unit.trained_numel for unit in units), max_slice_numel(bucket_size))
    )

"""Flat: parameters in one buffer, with the placements of their values and optimizer states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.core.axis import Axis, Steps, broadcast, finish
from zeroshard.core.layout import Layout
from zeroshard.core.placement import Placement, Placements, Reduced, Row
from zeroshard.memory.pool import Pool

ALIGN_ELEMENTS = 64  # every parameter begins on a boundary for vector loads and matrix kernels


def round_up(value: int, multiple: int) -> int:
    """Round ``value`` up to a multiple."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class FlatSpec:
    """How a flat is placed and computed."""

    axes: tuple[Axis, ...]
    rows: tuple[Row, ...]  # of these axes
    dtype: torch.dtype  # in forward and backward, and of gradients
    master_dtype: torch.dtype  # of what the optimizer updates
    divisor: int  # how many ranks have other batches: a gradient is their mean


class Flat:
    """Parameters of one unit with one dtype and trainability, on the same axes.

    ``full``    all values, in the compute dtype; the parameters are views of it. If parameters are sharded, its storage
                is resized: views that autograd has saved stay valid, since the storage object stays the same.
    ``master``  this rank's part, in the dtype that the optimizer updates. It may be memory of ``full``.
    ``values``  what this rank keeps of the parameters: ``full``, the master, or a copy of it with another placement.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], spec: FlatSpec) -> None:
        self.names = list(named)
        self.parameters = list(named.values())
        first = self.parameters[0]
        self.is_trainable = first.requires_grad
        self.dtype = spec.dtype
        self.master_dtype = spec.master_dtype if self.is_trainable else spec.dtype
        self.divisor = spec.divisor
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.original_dtypes = [parameter.dtype for parameter in self.parameters]
        self._strides = [_dense_stride(parameter) for parameter in self.parameters]
        self.ranges: list[slice] = []
        end = 0
        for parameter in self.parameters:
            self.ranges.append(slice(end, end + parameter.numel()))
            end = round_up(end + parameter.numel(), ALIGN_ELEMENTS)
        ranks = math.prod(axis.size for axis in spec.axes)
        self.layout = Layout(spec.axes, round_up(end, ALIGN_ELEMENTS * ranks))
        usual = [torch.empty(shape, device="meta").stride() for shape in self.shapes]
        self.is_contiguous = usual == self._strides
        self.is_single = len(self.parameters) == 1 and self.ranges[0].stop == self.layout.numel
        self.param_placements: Placements = tuple(row.parameters for row in spec.rows)
        self.grad_placements: Placements = tuple(row.gradients for row in spec.rows)
        self.held_placements: Placements = tuple(_held(row) for row in spec.rows)
        self.state_placements = tuple(row.states for row in spec.rows) if self.is_trainable else self.param_placements
        self.reduces_every_backward = self.held_placements != self.layout.partial
        has_master_copy = self.master_dtype != self.dtype
        self.is_sharded = Placement.SHARD in self.param_placements and (ranks > 1 or has_master_copy)
        self.state_span = self.layout.span(self.state_placements)
        self.grad_span = self.layout.span(self.grad_placements)
        self.grad_numel = self.grad_span.stop - self.grad_span.start
        self._param_span = self.layout.span(self.param_placements)
        self.is_averaged = _can_average(spec)

    def _gap_ranges(self) -> list[slice]:
        """Return the elements between each parameter and the next one."""
        starts = [own.start for own in self.ranges[1:]]
        return [slice(own.stop, next) for own, next in zip(self.ranges, [*starts, self.layout.numel], strict=True)]

    # -- one door between a parameter and its range -----------------------------------------------------------------

    def shaped(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """Return a parameter's view of a buffer with all elements of the flat."""
        start = buffer.storage_offset() + self.ranges[index].start
        return buffer.as_strided(self.shapes[index], self._strides[index], start)

    def elements(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return the elements of a tensor with a parameter's shape, in the order of the flat."""
        if tensor.stride() != self._strides[index]:
            ordered = torch.empty_strided(
                self.shapes[index], self._strides[index], dtype=tensor.dtype, device=tensor.device
            )
            tensor = ordered.copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def part(self, span: slice, index: int) -> slice:
        """Return where a parameter's elements are in a buffer with the elements ``span`` of the flat."""
        own = self.ranges[index]
        start = min(max(own.start, span.start), span.stop)
        stop = min(max(own.stop, start), span.stop)
        return slice(start - span.start, stop - span.start)

    def part_of(self, tensor: torch.Tensor, span: slice, index: int) -> torch.Tensor:
        """Return the elements of a parameter's tensor that are in ``span``."""
        part = self.part(span, index)
        offset = span.start - self.ranges[index].start
        return self.elements(tensor, index)[part.start + offset : part.stop + offset]

    # -- values -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def allocate(self, full: torch.Tensor, pool: Pool) -> None:
        """Take over the first rank's values of the parameters, and make these views of ``full``.

        ``pool``: where memory is allocated that is never freed.
        """
        self.full = full
        exact = torch.zeros(self.layout.numel, dtype=self.master_dtype, device=full.device)
        for index, parameter in enumerate(self.parameters):
            self.shaped(exact, index).copy_(parameter.detach())
        broadcast(exact, self.layout.axes)
        full.copy_(exact)
        self.views = [self.shaped(full, index) for index in range(len(self.parameters))]
        with pool:
            zeros = full.new_zeros(max(gap.stop - gap.start for gap in self._gap_ranges()))
        self.gaps = [[zeros[: gap.stop - gap.start]] if gap.stop > gap.start else [] for gap in self._gap_ranges()]
        if self.has_own_master:
            with pool:
                self.master = exact[self.state_span].clone()
        else:
            self.master = self.full[self.state_span]
        if not self.is_sharded:
            self.values = self.full
        elif self.param_placements == self.state_placements:
            self.values = self.master
        else:
            with pool:
                self.values = full[self._param_span].clone()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
        origin = 0 if self.values is self.full else self._param_span.start
        if self.values is not self.master:
            self.kept_master = self.values[self.state_span.start - origin : self.state_span.stop - origin]
        self._origin = origin

    @property
    def has_own_master(self) -> bool:
        """Whether the master is not memory of ``full``."""
        return self.is_sharded or self.dtype != self.master_dtype

    @property
    def kept_sizes(self) -> list[int]:
        """Bytes of what :meth:`allocate` keeps on any mesh: full values, and the master."""
        return [
            0 if self.is_sharded else self.layout.numel * self.dtype.itemsize,
            (self.state_span.stop - self.state_span.start) * self.master_dtype.itemsize if self.has_own_master else 0,
        ]

    @property
    def copies_master(self) -> bool:
        """Whether this rank keeps values of its part of the parameters besides the master."""
        return self.values is not self.master and self.has_own_master

    def all_gather(self) -> Steps:
        """Collect all values. A master is cast into the all-gather's own input."""
        return self.layout.redistribute(self.full, self.param_placements, self.layout.replicated, part=self.values)

    def refresh(self) -> Steps:
        """Bring what this rank keeps of the parameters up to date with its part of the masters."""
        return self.layout.redistribute(self.values, self.state_placements, self.param_placements, origin=self._origin)

    def gather(self, part: torch.Tensor, placements: Placements) -> torch.Tensor:
        """Return all elements of a state that is placed like this: a collective."""
        buffer = torch.zeros(self.layout.numel, dtype=part.dtype, device=part.device)
        finish(self.layout.redistribute(buffer, placements, self.layout.replicated, part=part))
        return buffer

    def gather_one(self, part: torch.Tensor, index: int) -> torch.Tensor:
        """Return all elements of a parameter's master, or state, from this rank's part: a collective."""
        state = torch.zeros(self.state_span.stop - self.state_span.start, dtype=part.dtype, device=part.device)
        state[self.part(self.state_span, index)] = part
        return self.shaped(self.gather(state, self.state_placements), index).clone()

    def adopt(self, values: torch.Tensor) -> None:
        """Take over full values, the same on all ranks; an element equal to the master, cast, keeps the master."""
        self.adopt_part(values[self.state_span])
        if self.values is not self.master:
            kept = self.values
            kept.copy_(values if kept is self.full else values[self._param_span])

    def adopt_part(self, values: torch.Tensor, part: slice = slice(None)) -> bool:
        """Take over this rank's part of such values, or ``part`` of that; return whether there was a new one."""
        master = self.master[part]
        is_new = ~torch.isclose(values, master.to(values.dtype), rtol=0, atol=0, equal_nan=True)
        master.copy_(torch.where(is_new, values.to(self.master_dtype), master))
        return bool(is_new.any())

    def adopt_one(self, values: torch.Tensor, index: int) -> None:
        """Take over one parameter's full values, the same on all ranks, where parameters are sharded."""
        self.adopt_part(self.part_of(values, self.state_span, index), self.part(self.state_span, index))
        if self.values is not self.master:
            self.values[self.part(self._param_span, index)] = self.part_of(values, self._param_span, index)


def _held(row: Row) -> Placement:
    """Return where a gradient is between the backwards of a step."""
    return row.gradients if row.reduced is Reduced.EVERY_BACKWARD else Placement.PARTIAL


def _can_average(spec: FlatSpec) -> bool:
    """Return whether NCCL averages gradients while it reduces: no kernel has to divide.

    Not if that is less exact (16 bits, and the number of ranks is no power of two), or underflows (fp16).
    """
    is_power_of_two = spec.divisor & (spec.divisor - 1) == 0
    is_exact = spec.dtype is torch.float32 or (spec.dtype is torch.bfloat16 and is_power_of_two)
    is_mean = spec.divisor == math.prod(axis.size for axis in spec.axes)
    return is_exact and is_mean and all(axis.backend == "nccl" for axis in spec.axes if axis.size > 1)


def _dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return a parameter's strides, or those of a contiguous copy if it has gaps or overlaps."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()

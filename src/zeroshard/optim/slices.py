"""Optimizer slices: what the user's optimizer sees as its parameters.

[Note: optimizer slices]
The user's optimizer keeps its class, groups and hyper-parameters. The parameters in its groups are replaced by
*optimizer slices*: contiguous ranges of the shards (with 16-bit precision, of the fp32 master weights) whose parameters
are in the same group. The shards of all units are contiguous in one arena, and their gradients in a few ([Note: freeing
gradients between steps]). So with one group, a step is one fused kernel over a few tensors, for any number of
parameters. This is correct for every optimizer that updates each element from that element alone.

No slice is longer than a bucket, so buffers of constant size are enough for a model of any size: see
[Note: stepping in batches]. Each offloaded tier segment has its own slices.

A parameter without a gradient on any rank must be skipped, as in torch: no weight decay, no momentum, no step count.
The slice that holds it is then split permanently into one slice per parameter, together with its states.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.engine import Engine, FlatGrad, FlatParam, Gradients, GradScale
from zeroshard.memory import TierSegment
from zeroshard.sharding import ALIGN_ELEMENTS, Range


@dataclass
class FlatRange:
    """A range of one FlatParam's shard."""

    flat: FlatParam
    span: Range  # in the shard

    def view(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a view of the range in a tensor with the layout of the shard."""
        return shard[self.span.start : self.span.end]

    def param_ranges(self) -> Iterator[tuple[int, Range, Range]]:
        """Yield (parameter index, range in the parameter, range in the shard) for each parameter in the range."""
        ranges = self.flat.owned_ranges  # by their offset, without gaps except padding
        first = max(bisect_right(ranges, self.span.start, key=attrgetter("offset")) - 1, 0)
        for param_range in islice(ranges, first, None):
            if param_range.offset >= self.span.end:
                return
            span = self.span.intersect(Range(param_range.offset, param_range.offset + param_range.elements.numel))
            if span is not None:
                yield param_range.param_index, span.shift(param_range.elements.start - param_range.offset), span


class GuardedSliceParameter(nn.Parameter):
    """The parameter of a slice in the user's optimizer, outside of zeroshard's own step.

    A slice has a gradient only during the step. At any other time a reader would get None: the user's optimizer, if
    its step() is called directly, would silently do nothing. So access raises instead.
    """

    @property
    def grad(self: Any) -> torch.Tensor | None:
        guard: SliceGuard | None = self.__dict__.get("_zeroshard_guard")
        if guard is not None:
            guard.check_access()
        gradient: torch.Tensor | None = self._grad
        return gradient

    @grad.setter
    def grad(self: Any, value: torch.Tensor | None) -> None:
        guard: SliceGuard | None = self.__dict__.get("_zeroshard_guard")
        if guard is not None:
            guard.check_access()
        self._grad = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class SliceGuard:
    """Prevent the slices of one optimizer from being stepped outside of zeroshard."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._is_stepping = False

    def guard(self, parameters: Iterable[Any]) -> None:
        """Guard these parameters of the inner optimizer from now on."""
        for parameter in parameters:
            parameter._zeroshard_guard = self
            parameter.__class__ = GuardedSliceParameter

    def check_access(self) -> None:
        """Raise if there are gradients that the reader would not see."""
        engine = self._engine()
        if self._is_stepping or engine is None:
            return
        if (
            engine.gradients.has_grads
            or engine.gradients.has_manual_grads
            or engine.state_guard.frozen_params_with_grads()
        ):
            raise RuntimeError(
                "this is the optimizer that was passed to zeroshard.shard(), and it no longer has the model's "
                "gradients: call step(), zero_grad() and gradient clipping on the optimizer that shard() returned "
                "(model, optimizer = zeroshard.shard(model, optimizer))"
            )

    @contextlib.contextmanager
    def allow_step(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Allow the optimizer to step these slices; clear their gradients on exit."""
        self._is_stepping = True
        try:
            with as_plain_parameters(parameters):
                yield
        finally:
            self._is_stepping = False


@contextlib.contextmanager
def as_plain_parameters(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Turn slices into plain parameters for one step; clear their gradients on exit."""
    guarded: list[Any] = [parameter for parameter in parameters if type(parameter) is GuardedSliceParameter]
    for parameter in guarded:
        parameter.__class__ = nn.Parameter
    try:
        yield
    finally:  # also after an error: the next step must not see these gradients
        for parameter in parameters:
            parameter.grad = None
        for parameter in guarded:
            parameter.__class__ = GuardedSliceParameter


class OptimizerSlice:
    """A contiguous range of shards, one parameter of the inner optimizer: see [Note: optimizer slices]."""

    def __init__(
        self,
        flat_ranges: list[FlatRange],
        tensor: torch.Tensor,
        empty_param_index: int | None = None,
        tier_segment: TierSegment | None = None,
    ) -> None:
        self.flat_ranges = flat_ranges
        self.tier_segment = tier_segment  # the segment that contains it, if offloaded
        self.param_group: dict[str, Any] = {}  # its group in the inner optimizer
        # index of a parameter without elements: it has states but no range in a shard
        self.empty_param_index = empty_param_index
        self.parameter = nn.Parameter(tensor)  # [numel], in the dtype of the master weights or the parameters

    def grad_views(self, gradients: dict[FlatParam, FlatGrad]) -> list[torch.Tensor]:
        """Return views of the reduced gradient, in its own dtype; a single view if the shards are adjacent."""
        shards = [(flat_range, gradients[flat_range.flat].shard) for flat_range in self.flat_ranges]
        views = [flat_range.view(shard) for flat_range, shard in shards if shard is not None]
        if len(views) > 1 and all(is_adjacent(a, b) for a, b in pairwise(views)):
            return [views[0].as_strided(self.parameter.shape, (1,))]
        return views

    def param_ranges(self) -> Iterator[tuple[FlatParam, int, Range, int]]:
        """Yield (flat, parameter index, range in the parameter, offset in the slice)."""
        offset = 0
        for flat_range in self.flat_ranges:
            for parameter, within, span in flat_range.param_ranges():
                yield flat_range.flat, parameter, within, offset + span.start - flat_range.span.start
            offset += flat_range.span.numel
        if self.empty_param_index is not None:
            yield self.flat_ranges[0].flat, self.empty_param_index, Range(0, 0), 0

    def split_per_param(self, state: dict[str, Any]) -> list[tuple[OptimizerSlice, dict[str, Any]]]:
        """Split into one slice per parameter, each with its part of the state."""
        if self.empty_param_index is not None:
            return [(self, state)]
        split, offset = [], 0
        for flat_range in self.flat_ranges:
            for _, _, span in flat_range.param_ranges():
                start = offset + span.start - flat_range.span.start
                within = slice(start, start + span.numel)
                param_state = {}
                for key, value in state.items():
                    if is_elementwise(key, value, self.parameter.shape):
                        param_state[key] = value[within]
                    else:
                        param_state[key] = value.clone() if isinstance(value, torch.Tensor) else value
                param_slice = OptimizerSlice(
                    [FlatRange(flat_range.flat, span)], self.parameter.data[within], tier_segment=self.tier_segment
                )
                split.append((param_slice, param_state))
            offset += flat_range.span.numel
        return split


def defer_clip(gradients: Gradients, slices: list[OptimizerSlice], grad_scale: GradScale) -> None:
    """Record that an update has clipped values that it read, and not the stored gradients of these slices."""
    if grad_scale.clip_coef is not None:
        views = [view for slice_ in slices for view in slice_.grad_views(gradients.flat_grads)]
        gradients.scaling.defer(views, grad_scale.clip_coef)


def is_elementwise(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether a state has one value per element of a parameter of ``shape``, like a momentum and unlike a step count.

    For a 0-dim parameter the shapes are equal, so the key ``step`` identifies the step count. Subclasses may store
    something else than one value per element: quantized states, for example. A DTensor does not.
    """
    if not isinstance(value, torch.Tensor) or value.shape != shape or (value.dim() == 0 and key == "step"):
        return False
    return isinstance(value, DTensor) or not is_traceable_wrapper_subclass(value)


def is_scalar_state(value: Any) -> bool:
    """Whether a state that is not elementwise applies to every shard of a parameter: one number, or several.

    >>> is_scalar_state(torch.tensor(3.0)), is_scalar_state((0.9, 0.99)), is_scalar_state(torch.ones(38))
    (True, True, False)
    """
    if isinstance(value, torch.Tensor):
        return type(value) in (torch.Tensor, nn.Parameter) and value.numel() == 1
    if isinstance(value, (list, tuple)):
        return all(not isinstance(entry, torch.Tensor) and is_scalar_state(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def max_slice_numel(bucket_size: int) -> int:
    """Return the maximum elements of a slice for ``bucket_size``.

    It is a multiple of the vector size, because fused CPU kernels round the elements after the last full vector
    differently.

    >>> max_slice_numel(1000), max_slice_numel(1)
    (960, 64)
    """
    return max(bucket_size // ALIGN_ELEMENTS, 1) * ALIGN_ELEMENTS


def make_slices(
    flats: list[FlatParam], names: set[str], max_numel: int | None, grad_segments: Mapping[FlatParam, object]
) -> list[OptimizerSlice]:
    """Return slices over this rank's shards of the named parameters, each of at most ``max_numel`` elements.

    Flats whose gradients are in different ``grad_segments`` have different slices.
    """
    slices = []
    for flat_ranges, tensor, segment in _contiguous_ranges(flats, names, grad_segments):
        for start in range(0, tensor.numel(), max_numel or tensor.numel()):
            within = Range(start, min(start + (max_numel or tensor.numel()), tensor.numel()))
            slice_ranges = _intersect_ranges(flat_ranges, within)
            slices.append(OptimizerSlice(slice_ranges, tensor[within.slice], tier_segment=segment))
    for flat in flats:
        for index, name in enumerate(flat.names):
            if name in names and flat.layout.numels[index] == 0:
                dtype = flat.dtype if flat.master is None else flat.master.dtype
                empty = torch.empty(0, dtype=dtype, device=flat.device)
                slices.append(OptimizerSlice([FlatRange(flat, Range(0, 0))], empty, empty_param_index=index))
    return [slice_ for slice_ in slices if next(slice_.param_ranges(), None) is not None]  # drop slices of padding only


def _contiguous_ranges(
    flats: list[FlatParam], names: set[str], grad_segments: Mapping[FlatParam, object]
) -> Iterator[tuple[list[FlatRange], torch.Tensor, TierSegment | None]]:
    """Yield (ranges of shards that are adjacent in memory, tensor over them, offloaded segment or None)."""
    ranges: list[FlatRange] = []
    tensor, segment = torch.empty(0, device="cpu"), None
    for flat in flats:
        for span, values, values_segment in _group_spans(flat, names):
            if (
                ranges
                and segment is values_segment
                and grad_segments.get(ranges[-1].flat) == grad_segments.get(flat)
                and is_adjacent(tensor, values)
            ):
                tensor = tensor.as_strided((tensor.numel() + values.numel(),), (1,))
                if ranges[-1].flat is flat and ranges[-1].span.end == span.start:
                    span = Range(ranges.pop().span.start, span.end)
                ranges.append(FlatRange(flat, span))
                continue
            if ranges:
                yield ranges, tensor, segment
            ranges, tensor, segment = [FlatRange(flat, span)], values, values_segment
    if ranges:
        yield ranges, tensor, segment


def _group_spans(flat: FlatParam, names: set[str]) -> Iterator[tuple[Range, torch.Tensor, TierSegment | None]]:
    """Yield (range in the shard, tensor to update, offloaded segment or None) for the named parameters of a flat."""
    indices = {index for index, name in enumerate(flat.names) if name in names}
    has_all = len(indices) == len(flat.names)
    for bucket_index, shard_range in enumerate(flat.shard_ranges) if indices else ():
        spans = (
            [shard_range]
            if has_all
            else [span for index, _, span in FlatRange(flat, shard_range).param_ranges() if index in indices]
        )
        for span in spans:
            if flat.master is None:
                yield span, flat.local_shards[bucket_index][span.shift(-shard_range.start).slice], None
                continue
            for segment, common in flat.master.segments_in(span):
                values = segment.tensor[common.shift(-segment.span.start).slice]
                yield common, values, segment if segment.is_offloaded else None


def is_adjacent(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether ``right`` directly follows ``left`` in the same allocation."""
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return same and left.storage_offset() + left.numel() == right.storage_offset()


def _intersect_ranges(flat_ranges: list[FlatRange], span: Range) -> list[FlatRange]:
    """Return the parts of the ranges that are inside ``span`` of their concatenation."""
    found, offset = [], 0
    for flat_range in flat_ranges:
        shift = offset - flat_range.span.start
        common = flat_range.span.shift(shift).intersect(span)
        if common is not None:
            found.append(FlatRange(flat_range.flat, common.shift(-shift)))
        offset += flat_range.span.numel
    return found

"""Runs: what the user's optimizer sees as its parameters.

[Note: runs]
The user's optimizer keeps its class, groups and hyper-parameters; in its groups the parameters are replaced by *runs*:
stretches of the shards (of the fp32 master copy under 16-bit precision) whose parameters share a group. Shards of all
units lie side by side in one arena, and their gradients in a few ([Note: gradients that come and go]), so that with one
group a step is one fused kernel over a few tensors, however many parameters the model has. That is right for every
optimizer whose update of an element looks at that element alone.

No run is longer than a bucket, so that a model of any size can be updated through buffers of one size: see
[Note: the update in batches]. A stretch that rests outside the device is a run of its own.

A parameter that got no gradient on any rank must be skipped, as torch does: no weight decay, no momentum, no step
count. The run that holds it is then cut, for good, into one run per parameter, its states with it.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroshard.engine.flat_grad import FlatGrad
from zeroshard.engine.flat_param import FlatParam
from zeroshard.memory.tiered_tensor import TierSegment
from zeroshard.sharding.layout import ALIGN_ELEMENTS, Range

if TYPE_CHECKING:
    from zeroshard.engine.engine import Engine


@dataclass
class FlatRange:
    """A stretch of one flat's shard."""

    flat: FlatParam
    span: Range  # in the shard

    def view(self, shard: torch.Tensor) -> torch.Tensor:
        """View the stretch in a tensor laid out like the shard."""
        return shard[self.span.start : self.span.end]

    def param_ranges(self) -> Iterator[tuple[int, Range, Range]]:
        """Yield (parameter, its elements, where they lie in the shard) for each parameter in the stretch."""
        for piece in self.flat.owned_ranges:
            span = self.span.intersect(Range(piece.offset, piece.offset + piece.elements.numel))
            if span is not None:
                yield piece.param_index, span.shift(piece.elements.start - piece.offset), span


class GuardedSliceParameter(nn.Parameter):
    """What the optimizer that was given to shard() has for a parameter, while zeroshard is not stepping it.

    A run's gradient is set for the step alone. Whoever reads it at another time, as the step() of that optimizer does
    when it is called directly, would find None, and do nothing without a word.
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
        """Pickle as the plain parameter it stands for."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class SliceGuard:
    """Keeps the runs of one optimizer from being stepped by anybody else."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._is_stepping = False

    def guard_slices(self, slices: list[OptimizerSlice]) -> None:
        """Guard these runs from now on."""
        for run in slices:
            parameter: Any = run.parameter
            parameter._zeroshard_guard = self
            parameter.__class__ = GuardedSliceParameter

    def check_access(self) -> None:
        """Raise where there are gradients that the reader would not see."""
        engine = self._engine()
        if self._is_stepping or engine is None:
            return
        if (
            engine.gradients.has_grads
            or engine.gradients.has_manual_grads
            or engine.state_guard.frozen_params_with_grads()
        ):
            raise RuntimeError(
                "this is the optimizer that was given to zeroshard.shard(), and its parameters are zeroshard's now: "
                "call step(), zero_grad() and whatever clips or scales gradients on the optimizer that shard() "
                "returned (model, optimizer = zeroshard.shard(model, optimizer))"
            )

    @contextlib.contextmanager
    def allow_step(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Let the optimizer step these runs; their gradients are gone afterwards."""
        self._is_stepping = True
        try:
            with as_plain_parameters(parameters):
                yield
        finally:
            self._is_stepping = False


@contextlib.contextmanager
def as_plain_parameters(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Make runs plain parameters, as optimizers know them, for one step; their gradients are gone afterwards."""
    guarded: list[Any] = [parameter for parameter in parameters if type(parameter) is GuardedSliceParameter]
    for parameter in guarded:
        parameter.__class__ = nn.Parameter
    try:
        yield
    finally:  # after an error, too: another step must not find them
        for parameter in parameters:
            parameter.grad = None
        for parameter in guarded:
            parameter.__class__ = GuardedSliceParameter


class OptimizerSlice:
    """One parameter of the inner optimizer: see [Note: runs]."""

    def __init__(
        self,
        flat_ranges: list[FlatRange],
        tensor: torch.Tensor,
        empty_param_index: int | None = None,
        tier_segment: TierSegment | None = None,
    ) -> None:
        self.flat_ranges = flat_ranges
        self.tier_segment = tier_segment  # that it lies in, where that rests outside the device
        self.param_group: dict[str, Any] = {}  # of the inner optimizer, that it belongs to
        self.empty_param_index = (
            empty_param_index  # index of a parameter without elements: it has states, too, and no place in any shard
        )
        self.parameter = nn.Parameter(tensor)  # [numel], the master's or the parameters' own dtype

    def grad_views(self, gradients: dict[FlatParam, FlatGrad]) -> list[torch.Tensor]:
        """The reduced gradient where it lies, in its own dtype: one view where the shards are neighbours."""
        shards = [(part, gradients[part.flat].shard) for part in self.flat_ranges]
        views = [part.view(shard) for part, shard in shards if shard is not None]
        if len(views) > 1 and all(_is_adjacent(a, b) for a, b in pairwise(views)):
            return [views[0].as_strided(self.parameter.shape, (1,))]
        return views

    def param_ranges(self) -> Iterator[tuple[FlatParam, int, Range, int]]:
        """Yield (flat, parameter, its elements, where they begin in the run)."""
        offset = 0
        for part in self.flat_ranges:
            for parameter, within, span in part.param_ranges():
                yield part.flat, parameter, within, offset + span.start - part.span.start
            offset += part.span.numel
        if self.empty_param_index is not None:
            yield self.flat_ranges[0].flat, self.empty_param_index, Range(0, 0), 0

    def split_per_param(self, state: dict[str, Any]) -> list[tuple[OptimizerSlice, dict[str, Any]]]:
        """Cut the run into one per parameter, each with its part of the state."""
        if self.empty_param_index is not None:
            return [(self, state)]
        cut, offset = [], 0
        for part in self.flat_ranges:
            for _, _, span in part.param_ranges():
                start = offset + span.start - part.span.start
                stretch = slice(start, start + span.numel)
                small = {}
                for key, value in state.items():
                    if is_elementwise(key, value, self.parameter.shape):
                        small[key] = value[stretch]
                    else:
                        small[key] = value.clone() if isinstance(value, torch.Tensor) else value
                run = OptimizerSlice(
                    [FlatRange(part.flat, span)], self.parameter.data[stretch], tier_segment=self.tier_segment
                )
                cut.append((run, small))
            offset += part.span.numel
        return cut


def is_elementwise(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether a state has a value for each element of a parameter of ``shape``, as a momentum has, or is a counter.

    Of a parameter without dimensions both look alike; there torch's name for its counter decides.
    """
    return isinstance(value, torch.Tensor) and value.shape == shape and (value.dim() > 0 or key != "step")


def is_scalar_state(value: Any) -> bool:
    """Whether a state that is not elementwise says the same of every part of a parameter: a number, or several.

    >>> is_scalar_state(torch.tensor(3.0)), is_scalar_state((0.9, 0.99)), is_scalar_state(torch.ones(38))
    (True, True, False)
    """
    if isinstance(value, torch.Tensor):
        return type(value) in (torch.Tensor, nn.Parameter) and value.numel() == 1
    if isinstance(value, (list, tuple)):
        return all(not isinstance(entry, torch.Tensor) and is_scalar_state(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def max_slice_numel(bucket_size: int) -> int:
    """Elements that a run has at most, for a given ``bucket_size``.

    Cuts fall between vectors, because the fused kernels of a CPU round what is left at the end in another way.

    >>> max_slice_numel(1000), max_slice_numel(1)
    (960, 64)
    """
    return max(bucket_size // ALIGN_ELEMENTS, 1) * ALIGN_ELEMENTS


def make_slices(
    flats: list[FlatParam], names: set[str], max_numel: int | None, grad_segments: Mapping[FlatParam, object]
) -> list[OptimizerSlice]:
    """Make runs over this rank's part of the named parameters, each of at most ``most`` elements.

    Flats whose gradients lie in different ``pieces`` have different runs.
    """
    joined: list[tuple[list[FlatRange], list[torch.Tensor], TierSegment | None]] = []
    for flat in flats:
        for span, tensor, far in _group_spans(flat, names):
            last = joined[-1] if joined else None
            if (
                last is not None
                and last[2] is far
                and grad_segments.get(last[0][-1].flat) == grad_segments.get(flat)
                and _is_adjacent(last[1][-1], tensor)
            ):
                last[0].append(FlatRange(flat, span))
                last[1].append(tensor)
            else:
                joined.append(([FlatRange(flat, span)], [tensor], far))
    runs = []
    for parts, tensors, far in joined:
        numel = sum(tensor.numel() for tensor in tensors)
        line, merged = tensors[0].as_strided((numel,), (1,)), _merge_adjacent(parts)
        for start in range(0, numel, max_numel or numel):
            part = Range(start, min(start + (max_numel or numel), numel))
            runs.append(OptimizerSlice(_intersect_ranges(merged, part), line[part.start : part.end], tier_segment=far))
    for flat in flats:
        for index, name in enumerate(flat.names):
            if name in names and flat.layout.numels[index] == 0:
                dtype = flat.dtype if flat.master is None else flat.master.dtype
                empty = torch.empty(0, dtype=dtype, device=flat.device)
                runs.append(OptimizerSlice([FlatRange(flat, Range(0, 0))], empty, empty_param_index=index))
    return [run for run in runs if next(run.param_ranges(), None) is not None]  # not those of alignment alone


def _group_spans(flat: FlatParam, names: set[str]) -> Iterator[tuple[Range, torch.Tensor, TierSegment | None]]:
    """Yield what the named parameters have of a flat's shard: where, what to update, and the far stretch if any."""
    members = {index for index, name in enumerate(flat.names) if name in names}
    whole = len(members) == len(flat.names)
    for number, home in enumerate(flat.shard_ranges) if members else ():
        wanted = (
            [home] if whole else [span for index, _, span in FlatRange(flat, home).param_ranges() if index in members]
        )
        for span in wanted:
            if flat.master is None:
                yield span, flat.local_shards[number][span.start - home.start : span.end - home.start], None
                continue
            for stretch, common in flat.master.segments_in(span):
                values = stretch.tensor[common.start - stretch.span.start : common.end - stretch.span.start]
                yield common, values, stretch if stretch.is_offloaded else None


def state_bytes_per_element(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the states that an optimizer keeps for an element in fp32, found by a step on a parameter of its own.

    >>> state_bytes_per_element(torch.optim.AdamW([nn.Parameter(torch.ones(1))]))
    8
    >>> state_bytes_per_element(torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9))
    4
    """
    if optimizer is None or not optimizer.param_groups:
        return 0
    shape = torch.Size([2])
    is_torchs = type(optimizer).__module__.startswith("torch.optim")  # draws no random numbers
    try:
        with nullcontext() if is_torchs else torch.random.fork_rng(devices=[]):
            state = state_after_first_step(optimizer, optimizer.param_groups[0], shape)
    except Exception:  # not one of torch's, and not made for this: taken to be like Adam
        return 8
    return sum(4 for key, value in state.items() if is_elementwise(key, value, shape))


def state_after_first_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: torch.Size
) -> dict[str, Any]:
    """The state that an optimizer keeps of a parameter after its first step with a group's options.

    A copy of the optimizer steps a parameter of its own; raises what that raises.

    >>> list(state_after_first_step(torch.optim.Adam([nn.Parameter(torch.ones(1))]), {"lr": 1e-3}, torch.Size([2])))
    Traceback (most recent call last):
        ...
    KeyError: 'betas'
    """
    trial = nn.Parameter(torch.zeros(shape))
    trial.grad = torch.zeros(shape)
    twin: Any = copy.copy(optimizer)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.param_groups = [{**group, "params": [trial], "capturable": False, "fused": None}]
    twin.state = defaultdict(dict)
    type(optimizer).step(twin)
    return dict(twin.state[trial])


def _is_adjacent(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two stretches are neighbours in one allocation."""
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return same and left.storage_offset() + left.numel() == right.storage_offset()


def _intersect_ranges(flat_ranges: list[FlatRange], span: Range) -> list[FlatRange]:
    """What of the parts lies in a stretch of them all, laid end to end."""
    found, offset = [], 0
    for part in flat_ranges:
        to_run = offset - part.span.start
        common = part.span.shift(to_run).intersect(span)
        if common is not None:
            found.append(FlatRange(part.flat, common.shift(-to_run)))
        offset += part.span.numel
    return found


def _merge_adjacent(flat_ranges: list[FlatRange]) -> list[FlatRange]:
    """Join neighbouring stretches of one flat."""
    merged: list[FlatRange] = []
    for part in flat_ranges:
        last = merged[-1] if merged else None
        if last is not None and last.flat is part.flat and last.span.end == part.span.start:
            merged[-1] = FlatRange(part.flat, Range(last.span.start, part.span.end))
        else:
            merged.append(part)
    return merged

"""Find out by experiment on what an optimizer can run: flat slices, or whole parameters.

[Note: testing that an optimizer is elementwise]
zeroshard steps an optimizer on flat slices that split matrices and join parameters ([Note: optimizer slices]). This is
correct only if the update of each element depends on that element alone. If it depends on its parameter alone, an owner
steps the whole parameter ([Note: whole parameters]). The class name does not tell: a subclass of AdamW may clip per
tensor, a rule may read ``p.ndim``, a group may keep a sum over all parameters. So unless the class is one of torch's
own, copies of the optimizer step the same values with the same gradients:

    on full tensors     | (6, 4) | (5,) | () | (2, 3, 2, 2) | (4, 6) | (1,) | …
    as slices of ranks  | rank 0: one slice   | rank 1: one slice             …     and other splits
    whole, of two ranks | (6, 4) |      | () |              | (4, 6) |      | …     and other selections

After each step the values must match, at the end also the states, and the numbers stored in groups and in the optimizer
itself. A group whose slices match is elementwise; else it needs whole parameters if these match; else the optimizer is
rejected, since it reads several parameters at once, or their order. At last all groups are stepped together, each as it
was found, since one group may read another. ``_Trial`` says what is stepped, ``_TrialRun`` steps one copy, and the
``_compare_…`` functions compare two runs.

What the trials must detect, and how:

- trust ratios, clipping by norm: gradients from 1e-8 to 1e6, tensors of different scales, zeros, in fp64, where
  elementwise results match to 1e-12 of the change of an element;
- rules on dimensions or sizes: 0 to 4 dimensions and those of the model, a second trial with large tensors in the
  model's own dtype, and a matrix as large as the largest of the model, up to 1040 x 1040;
- rules that join tensors of one shape, or of one number of dimensions: two of each, which two ranks have;
- warmups and work on every n-th step: after some steps the step counters are set close to 10,000, then to 1,000,000;
- sums over all parameters (Prodigy, D-Adaptation): gradients that keep their direction; all numbers are compared;
- a rank that has no elements of a group: an empty group;
- attributes and names of parameters: whole parameters have them, slices do not;
- parameters without a gradient: some of the tensors have none in one step.

An optimizer that cannot be tested is rejected: if it raises on the copies, needs a closure, draws random numbers,
communicates, holds parameters outside its groups, has hooks or a replaced ``step``, keeps states that are not those of
a parameter, or stores what cannot be copied. The user's optimizer is only read, and no global random state changes. The
copies run on the CPU (on the GPU only if that does not decide), without torch.compile.
"""

from __future__ import annotations

import itertools
import math
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from zeroshard.optim.muon import MuonWithAdamW
from zeroshard.optim.optimizer_copy import (
    SHARED_TYPES,
    ElementwiseUndecidedError,
    OptimizerCopier,
    OptimizerRefusedError,
    SideEffectGuard,
    check_can_copy,
    check_holds_no_parameters,
)
from zeroshard.optim.slices import is_elementwise, is_scalar_state
from zeroshard.optim.step import ELEMENTWISE_OPTIMIZERS, WHOLE_PARAM_OPTIMIZERS

# These need more than a gradient: a closure, or gradients in a sparse layout.
UNSUPPORTED_OPTIMIZERS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it evaluates the loss itself, and searches along all parameters at once",
    torch.optim.SparseAdam: "it needs sparse gradients, and zeroshard's gradients are dense",
}

_eager_lock = threading.Lock()  # torch's stance is global, and ranks may be threads

JUMPS_TO_STEP = (9_998, 999_998)  # new values of step counters: after warmups, and just before multiples of periods
UNUSED_PERIOD = 3  # every third tensor has no gradient in one step
MAX_TRIED_DIM = 1040  # of a square matrix: takes half a second


class ElementwiseMismatchError(Exception):
    """An optimizer gives different numbers on slices than on full parameters; the message says which."""


def find_whole_param_groups(
    optimizer: torch.optim.Optimizer,
    elementwise: bool | None,
    dtype: torch.dtype | None,
    groups: list[dict[str, Any]] | None = None,
) -> list[bool]:
    """Return for each group whether its rule needs whole parameters; raise if it needs several at once.

    See [Note: testing that an optimizer is elementwise]. ``elementwise``: what the user asserts, so that nothing is
    tested; False: it needs whole parameters. One that holds parameters is rejected even then. ``dtype`` is the dtype of
    the update; None: that of each parameter. ``groups``: test these, of an optimizer that was tested before:
    a group that is added, or all with new options.

    >>> parameters = [nn.Parameter(torch.ones(2, 2))]
    >>> find_whole_param_groups(torch.optim.Adam(parameters), None, None)
    [False]
    >>> find_whole_param_groups(torch.optim.Adafactor(parameters), None, None)
    [True]
    """
    for known, reason in UNSUPPORTED_OPTIMIZERS.items():
        if isinstance(optimizer, known):
            raise ValueError(
                f"torch.optim.{known.__name__} cannot run on shards: {reason}. Use another optimizer (AdamW, Muon, …)"
            )
    is_first, groups = groups is None, optimizer.param_groups if groups is None else groups
    if elementwise and type(optimizer) in WHOLE_PARAM_OPTIMIZERS:
        elementwise = None  # known to need whole parameters; the assertion is meant for another of several optimizers
    if elementwise is not None:
        if is_first and type(optimizer) not in (*ELEMENTWISE_OPTIMIZERS, *WHOLE_PARAM_OPTIMIZERS):
            try:
                check_holds_no_parameters(optimizer)
            except OptimizerRefusedError as why:
                raise ValueError(f"{type(optimizer).__qualname__} cannot run on shards: {why}") from None
        return [not elementwise] * len(groups)
    if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
        return [False] * len(groups)
    if type(optimizer) is MuonWithAdamW:
        return [group["rule"] == "muon" for group in groups]
    if type(optimizer) in WHOLE_PARAM_OPTIMIZERS:
        return [True] * len(groups)
    kind = type(optimizer).__qualname__
    try:
        if is_first:
            check_can_copy(optimizer)
        with _eager_lock, torch.compiler.set_stance("force_eager"):
            return _classify(optimizer, groups, dtype)
    except ElementwiseMismatchError as difference:
        raise ValueError(
            f"{kind} reads more than one parameter at a time, or their order, so it cannot run on shards: a trial on "
            f"some of several small tensors gave different numbers than on all of them ({difference}). Use another "
            "optimizer (AdamW, Muon, …), or pass elementwise=False to shard() if this difference is intended"
        ) from None
    except OptimizerRefusedError as why:
        raise ValueError(f"{kind} cannot run on shards, as a trial on small tensors has shown: {why}") from None
    except ElementwiseUndecidedError as why:
        raise ValueError(
            f"{kind} may read more than one parameter at a time, and then it cannot run on shards: a trial on small "
            f"tensors did not decide it, because {why}. If it updates each element from that element's own value, "
            "gradient and states, pass elementwise=True to shard(); if each parameter from that parameter's own, "
            "elementwise=False"
        ) from why.__cause__


class RuleChecker:
    """Notices what changes the rule of a group on slices after ``shard()``: an option, or attributes of parameters.

    Then the group is tried again, and rejected if it needs whole parameters now. Each combination is tried once.
    Numbers count only as zero or not, learning rates not at all: schedulers change them. What the optimizer itself
    changes in a step is not tried.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, groups: list[Any]) -> None:
        """``groups``: each a mapping with the model's parameters, and whether it ``needs_whole``; may grow."""
        self._optimizer, self._dtype, self._groups = optimizer, dtype, groups
        self._last = self._rules()
        self._tried = [self._last]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, elementwise: bool | None, *others: Any) -> RuleChecker | None:
        """Return None if the rule is known to stay the same, or if the user asserts what it is."""
        is_fixed = type(optimizer) in (*ELEMENTWISE_OPTIMIZERS, torch.optim.Adafactor, torch.optim.Muon)
        return None if is_fixed or elementwise is not None else cls(optimizer, *others)

    def check(self) -> None:
        """Raise if a group on slices needs whole parameters now. All ranks call it before a step."""
        rules = self._rules()
        if rules == self._last:
            return
        self._last = [*self._last, *rules[len(self._last) :]]  # add_param_group() has tried the new groups
        if rules != self._last and rules not in self._tried:
            self._try(rules)
            self._tried.append(rules)
        self._last = rules

    def _try(self, rules: list[dict[Any, Any]]) -> None:
        changes = [
            f"parameters of group {number} have the attributes {sorted(now[key] - before[key])} now"
            if key is None
            else f"{key!r} of group {number} is {_short_repr(self._groups[number].get(key))} now"
            for number, (before, now) in enumerate(zip(self._last, rules, strict=True))
            for key in before | now
            if before.get(key) != now.get(key)
        ]
        what = f"the rule of {type(self._optimizer).__qualname__} has changed after shard(): {'; '.join(changes)}"
        try:
            groups = [dict(group) for group in self._groups]
            needs_whole = find_whole_param_groups(self._optimizer, None, self._dtype, groups)
        except ValueError as error:
            raise RuntimeError(f"{what}. {error}") from error
        if any(now and not group.needs_whole for now, group in zip(needs_whole, self._groups, strict=True)):
            raise RuntimeError(
                f"{what}. With this it reads whole parameters, which slices do not have: set it before shard(), or "
                "pass elementwise=False to shard()"
            )

    def accept(self) -> None:
        """Accept what the optimizer itself has changed in its options."""
        self._last = self._rules()

    def _rules(self) -> list[dict[Any, Any]]:
        """Return what decides over the rule of each group: options by name, and names of attributes under None."""
        rules = []
        for group in self._groups:
            options: dict[Any, Any] = {}
            for key, value in group.items():
                if value is None or isinstance(value, (bool, str, torch.dtype)):
                    options[key] = value
                elif key not in ("params", "param_names") and "lr" not in key:
                    options[key] = bool(value != 0) if isinstance(value, (int, float)) else type(value)
            if not group.needs_whole:
                names = set().union(*map(vars, group["params"]))
                options[None] = {name for name in names if not name.startswith("_zeroshard")}
            rules.append(options)
        return rules


def _classify(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], dtype: torch.dtype | None) -> list[bool]:
    """Return for each group whether it needs whole parameters."""
    distinct = _distinct_groups(groups)
    try:
        _run_trials(optimizer, list(distinct.values()), [False] * len(distinct), dtype)
        return [False] * len(groups)
    except (ElementwiseMismatchError, ElementwiseUndecidedError) as first:
        needs_whole = {key: _needs_whole(optimizer, group, dtype) for key, group in distinct.items()}
        if True not in needs_whole.values():  # each group alone is elementwise, and together they are not
            raise first
    if len(distinct) > 1:  # they may read each other
        _run_trials(optimizer, list(distinct.values()), list(needs_whole.values()), dtype)
    return [needs_whole.get(_group_key(group), False) for group in groups]


def _needs_whole(optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype | None) -> bool:
    """Return whether one group needs whole parameters."""
    try:
        _run_trials(optimizer, [group], [False], dtype)
    except (ElementwiseMismatchError, ElementwiseUndecidedError):
        _run_trials(optimizer, [group], [True], dtype)
        return True
    return False


# ------------------------------------------------------------------------------------------------------------ trials


class _Span(NamedTuple):
    """The elements of a group that a tensor of a trial has, and its shape."""

    start: int
    end: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _TrialSpec:
    """Which tensors are stepped, how often, and how they are split into slices."""

    shapes: tuple[tuple[int, ...], ...]
    grad_scales: tuple[float, ...]  # of the gradients, one per step; see _Trial.gradients
    grad_scales_after_jump: tuple[float, ...]
    splits: tuple[tuple[int, ...], ...]  # for each rank, where its slices begin and where the last one ends
    tolerance: float  # relative to the change of an element
    tries_unused: bool = False  # also with slices of tensors that have no gradient in a step

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def tensors(self) -> list[_Span]:
        """The full tensors."""
        ends = [0, *itertools.accumulate(self.sizes)]
        return [
            _Span(start, end, shape) for (start, end), shape in zip(itertools.pairwise(ends), self.shapes, strict=True)
        ]

    def with_dims(self, dims: set[int]) -> _TrialSpec:
        """Add two tensors for each number of dimensions that none has yet."""
        missing = sorted(dims - {len(shape) for shape in self.shapes})
        added = replace(self, shapes=(*self.shapes, *((2,) * dim for dim in missing for _ in range(2))))
        ends = {self.numel: added.numel}
        return replace(added, splits=tuple(tuple(ends.get(at, at) for at in split) for split in self.splits))


_SMALL_TRIAL = _TrialSpec(  # each number of dimensions twice in one shape: a rule may join tensors of a shape
    shapes=(
        *((6, 4), (5,), (), (2, 3, 2, 2), (4, 6), (1,), (3, 8)),
        *((6, 4), (5,), (), (2, 3, 2, 2), (2, 2, 3), (2, 2, 3)),
    ),
    grad_scales=(1, 1, 1, 0.01, 1, 100, 1, 0, -1, 1, 1e-8, 1e4, 1e-3, 1, 1),
    grad_scales_after_jump=(1, 1, 30, -1, 1e6, 1),
    splits=((0, 181), (0, 37), (37, 181), (0, 10, 61), (), (61, 62, 181)),  # of one rank, of two, of three
    tolerance=1e-5,
    tries_unused=True,
)
_LARGE_TRIAL = _TrialSpec(  # above the sizes at which matrices are factored (128 x 128) or states quantized (4096)
    shapes=((144, 128), (1040, 8), (16, 16, 3, 3), (4608,)),
    grad_scales=(1, 0.1, 10),
    grad_scales_after_jump=(1, -3),
    splits=((0, 20_011), (20_011, 33_664)),
    tolerance=2e-3,
)
_LARGE_WHOLE_TRIAL = _TrialSpec(  # the same without long dimensions: some rules factorize a square matrix for each
    shapes=((144, 128), (160,), (16, 4, 3, 3), (132, 160)),
    grad_scales=(1, 0.1, 10),
    grad_scales_after_jump=(1, -3),
    splits=((0, 20_011), (20_011, 40_288), (), (0, 40_288)),
    tolerance=2e-3,
)


def _huge_trials(parameters: Iterable[torch.Tensor]) -> list[_TrialSpec]:
    """Return a trial of a matrix like the largest, up to a limit; none if it is not larger than in other trials."""
    dims = [min(p.shape) for p in parameters if p.dim() > 1]
    dim = min(max(dims, default=0), MAX_TRIED_DIM)
    if dim <= max(min(shape) for shape in _LARGE_TRIAL.shapes if len(shape) > 1):
        return []
    numel, split = dim * (dim + 16), dim * dim - 5
    return [_TrialSpec(((dim + 16, dim),), (1,), (), ((0, split), (split, numel)), _LARGE_TRIAL.tolerance)]


def _run_trials(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], is_whole: list[bool], dtype: torch.dtype | None
) -> None:
    """Raise unless slices of some groups, and a part of the whole parameters of the others, give the same numbers."""
    if not groups:
        return
    parameters = [p for group in groups for p in group["params"]]
    devices = list(dict.fromkeys([torch.device("cpu"), *(p.device for p in parameters if p.device.type == "cuda")]))
    trial = partial(_Trial, optimizer, groups, is_whole)
    wide_dtypes = (torch.float64, torch.float32)
    small = _SMALL_TRIAL.with_dims({p.dim() for p in parameters})
    _run_first_decisive([trial(small, wide, device) for device in devices for wide in wide_dtypes])
    specs = [_LARGE_WHOLE_TRIAL] if any(is_whole) else [_LARGE_TRIAL, *_huge_trials(parameters)]
    for model_dtype in {dtype} if dtype is not None else {p.dtype for p in parameters}:
        for spec in specs:
            _run_first_decisive([trial(spec, model_dtype, device) for device in devices])


def _run_first_decisive(trials: Iterable[_Trial]) -> None:
    """Run trials until one decides: an optimizer may not support fp64, or the CPU."""
    reasons = []
    for trial in trials:
        try:
            return trial.run()
        except ElementwiseUndecidedError as error:
            reasons.append(error)
    raise reasons[0]


@dataclass
class _Trial:
    """A comparison of one optimizer on full tensors and on those that one rank would have."""

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    is_whole: list[bool]  # for each group, whether ranks have some of the full tensors, not slices of all
    spec: _TrialSpec
    dtype: torch.dtype
    device: torch.device

    @property
    def has_whole(self) -> bool:
        return any(self.is_whole)

    def run(self) -> None:
        full = self._run_full()
        full.check_storable()
        if full.reads and not self.has_whole:
            raise ElementwiseMismatchError(f"it reads {full.reads[0]!r} of parameters, and slices have none")
        for number in range(4 if self.has_whole else len(self.spec.splits)):
            self._compare_part(full, self._spans_of_rank(number))
        if not self.has_whole and self.spec.tries_unused:
            self._compare_unused(full.is_seeded)

    def _compare_unused(self, is_seeded: bool) -> None:
        """Compare runs in which some tensors have no gradient in a step: all those of one rank, none of another.

        The slices have one tensor each: see [Note: optimizer slices].
        """
        full = _TrialRun(self, self.full_spans(), is_seeded, is_full=True)
        try:
            full.run(jump=False, has_unused=True)
        except ElementwiseUndecidedError:
            raise
        except Exception:  # so it does without zeroshard
            return
        for first in range(2):
            tensors = [spans[first::UNUSED_PERIOD] for spans in self.full_spans()]
            self._compare_part(full, [[_Span(s.start, s.end, (s.end - s.start,)) for s in spans] for spans in tensors])

    def _compare_part(self, full: _TrialRun, spans: list[list[_Span]]) -> None:
        """Run on the tensors of a rank, and compare."""
        part = _TrialRun(self, spans, full.is_seeded)
        try:
            part.run(full.has_jumped, full.has_unused)
        except (ElementwiseUndecidedError, ElementwiseMismatchError):
            raise
        except Exception as error:
            count = sum(map(len, spans))
            what = f"{count} of {len(self.spec.shapes)} tensors" if self.has_whole else "flat slices"
            what = f"on {what if count else 'a group without parameters'} it raises {type(error).__name__}: {error}"
            raise ElementwiseMismatchError(what) from error
        self._compare_values(full, part)
        _compare_states(full, part, self.spec.tolerance)
        _compare_stored(full.stored, part.stored)

    def full_spans(self) -> list[list[_Span]]:
        """Return the full tensors of each group: a rule may accept only the dimensions that a whole group has."""
        found = []
        for group, is_whole in zip(self.groups, self.is_whole, strict=True):
            dims = {p.dim() for p in group["params"]}
            spans = [span for span in self.spec.tensors if len(span.shape) in dims] if is_whole else []
            found.append(spans or self.spec.tensors)
        return found

    def _spans_of_rank(self, number: int) -> list[list[_Span]]:
        """Return what a rank has of each group: some whole tensors, or none, or slices."""
        found = []
        for index, (tensors, is_whole) in enumerate(zip(self.full_spans(), self.is_whole, strict=True)):
            splits = self.spec.splits[number % len(self.spec.splits)]
            slices = [_Span(start, end, (end - start,)) for start, end in itertools.pairwise(splits)]
            some = (tensors[::2], tensors[1::2], tensors[-1:], [])[(number + index) % 4]
            found.append(some if is_whole else slices)
        return found

    def _compare_values(self, full: _TrialRun, part: _TrialRun) -> None:
        """Compare the values that a rank has, after each step."""
        wide_dtype = torch.promote_types(self.dtype, torch.float32)
        actual, expected = torch.stack(part.values).to(wide_dtype), torch.stack(full.values).to(wide_dtype)
        initial = torch.stack(self.initial_values).to(wide_dtype)
        change = (expected - initial).abs().cummax(0).values
        rounding = 32 * torch.finfo(self.dtype).eps * torch.maximum(expected, initial).abs()
        error = (actual - expected).abs()
        is_equal = (error <= self.spec.tolerance * change + rounding) | (expected == actual) | ~part.is_covered
        if bool(is_equal.all()):
            return
        step, group, position = torch.nonzero(~is_equal)[0].tolist()
        shape = next(span.shape for span in self.spec.tensors if position < span.end)
        of = f" of group {group}" if len(self.groups) > 1 else ""
        moves = [f"{(values - initial)[step, group, position].item():.6g}" for values in (actual, expected)]
        where = ("without some others", "with all") if self.is_whole[group] else ("in a slice", "in the full tensor")
        raise ElementwiseMismatchError(
            f"after step {step + 1} an element of a tensor of shape {shape}{of} has moved by {moves[0]} {where[0]}, "
            f"and by {moves[1]} {where[1]}"
        )

    def _run_full(self) -> _TrialRun:
        """Step full parameters, starting from states like the existing ones, or from none if that fails.

        Existing states of whole parameters may have any shape, so the trial has none.
        """
        can_seed = any(self.optimizer.state.values()) and not self.has_whole
        for is_seeded in (True, False) if can_seed else (False,):
            for jump, has_unused in itertools.product((True, False), (True, False) if self.has_whole else (False,)):
                full = _TrialRun(self, self.full_spans(), is_seeded, is_full=True)
                try:
                    full.run(jump, has_unused)
                except (ElementwiseUndecidedError, ElementwiseMismatchError):
                    raise
                except Exception as error:
                    failed = error
                else:
                    full.check_values()
                    return full
        raise ElementwiseUndecidedError(f"step() raises {type(failed).__name__}: {failed}") from failed

    @cached_property
    def gradients(self) -> list[list[torch.Tensor]]:
        """The gradients of all elements for each group and step.

        Tensors and rows have different scales, and some elements are zero. Most gradients keep their direction, as in
        a model that learns; a negative scale reverses it.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        gradients = []
        for number in range(len(self.groups)):
            base = self._random(generator, (1.0, 0.2, 5.0, 0.03), number)
            for part in torch.split(base, self.spec.sizes):
                part[::7] *= 10
            group_gradients = []
            for step, scale in enumerate((*self.spec.grad_scales, *self.spec.grad_scales_after_jump)):
                noise = base.roll(3 * step + 1)
                gradient = (0.8 * base + 0.2 * noise) * scale * (0.01 if self.dtype == torch.float16 else 1.0)
                if step % 4 == 3:
                    gradient[step % 5 :: 3] = 0
                group_gradients.append(gradient.to(self.device, self.dtype))
            gradients.append(group_gradients)
        return gradients

    @cached_property
    def initial_values(self) -> list[torch.Tensor]:
        """The initial values of all elements for each group."""
        generator, scales = torch.Generator("cpu").manual_seed(1), (1.0, 0.0, 0.5, 0.02, 8.0)
        values = [self._random(generator, scales, 5 - number) for number in range(len(self.groups))]
        return [value.to(self.device, self.dtype) for value in values]

    def _random(self, generator: torch.Generator, scales: tuple[float, ...], shift: int) -> torch.Tensor:
        """Return random elements whose scale differs from tensor to tensor."""
        values = torch.randn(self.spec.numel, generator=generator, dtype=torch.float64, device="cpu")
        for index, part in enumerate(torch.split(values, self.spec.sizes)):
            part *= scales[(index + shift) % len(scales)]
        return values

    def lr(self, options: Mapping[str, Any]) -> Any:
        """Return the learning rate of a group: not 0, even if a warmup begins at 0, and larger if all are small.

        Otherwise rounding would hide small updates.
        """
        group_lr, min_lr = options["lr"], 0.0 if self.dtype == torch.float64 else 1e-2
        fallbacks: list[Any] = [options.get("initial_lr"), self.optimizer.defaults.get("lr"), 1e-3]
        positive = (float(value) for value in fallbacks if _is_number(value) and float(value) > 0)
        lr = float(group_lr) or next(positive)
        max_lr = max((float(g["lr"]) for g in self.groups if _is_number(g.get("lr"))), default=0.0)
        if max_lr < min_lr:
            lr *= min_lr / (max_lr or lr)
        return torch.full_like(group_lr, lr) if isinstance(group_lr, torch.Tensor) else lr


# ---------------------------------------------------------------------------------------------- a copy of an optimizer


class _TrialParameter(nn.Parameter):
    """A parameter of a trial: has the attributes of one of the user's parameters, and records which are read."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that the user has set."""
        found: _UserAttributes | None = self.__dict__.get("_user_attributes")
        if found is None or name not in found.all_names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found.reads.append(name)
        if name not in found.values:
            raise AttributeError(name)
        return found.values[name]


class _UserAttributes(NamedTuple):
    """The attributes that the user has set on one parameter."""

    values: dict[str, Any]
    all_names: Collection[str]  # of the attributes of any parameter
    reads: list[str]  # shared by all parameters of a trial


class _ParamNames(list[str]):
    """The names of a group's parameters; records that they are read."""

    reads: list[str]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        self.reads.append("param_names")
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """Return a name, or several."""
        self.reads.append("param_names")
        return super().__getitem__(index)


class _TrialRun:
    """A copy of the user's optimizer with its own parameters, and their values after each step."""

    def __init__(self, trial: _Trial, spans: list[list[_Span]], is_seeded: bool, is_full: bool = False) -> None:
        """``spans``: the tensors of each group."""
        self.trial, self.spans, self.is_seeded, self._is_full = trial, spans, is_seeded, is_full
        self.has_jumped = self.has_unused = False
        self._counters: set[Any] | None = None  # keys of the numbers that count steps
        self.values: list[torch.Tensor] = []  # [groups, elements] after each step; NaN: in no tensor
        self.parameters: list[list[nn.Parameter]] = []
        self.reads: list[str] = []  # attributes of parameters
        self._copier = OptimizerCopier(trial.optimizer, trial.device)
        self.inner = self._copier.clone
        for number, (group, values) in enumerate(zip(trial.groups, trial.initial_values, strict=True)):
            parameters: list[nn.Parameter] = [
                _TrialParameter(values[start:end].reshape(shape).clone()) for start, end, shape in spans[number]
            ]
            self.parameters.append(parameters)
            options = self._copier.copy_options(group, number)
            if _is_number(options.get("lr")):
                options["lr"] = trial.lr(options)
            if is_full or trial.is_whole[number]:
                self._set_attributes(parameters, group["params"], spans[number])
            if "param_names" in group:
                options["param_names"] = self._choose_names(group, spans[number])
            self.inner.param_groups.append({**options, "params": parameters})
            if is_seeded:
                self._seed_states(group, parameters, spans[number])

    @cached_property
    def is_covered(self) -> torch.Tensor:
        """Which elements it has, as [groups, elements]."""
        covered = torch.zeros(len(self.spans), self.trial.spec.numel, dtype=torch.bool, device=self.trial.device)
        for number, spans in enumerate(self.spans):
            for start, end, _ in spans:
                covered[number, start:end] = True
        return covered

    def _set_attributes(self, parameters: list[nn.Parameter], originals: list[Any], spans: list[_Span]) -> None:
        """Give the tensors the attributes that the user has set on parameters of as many dimensions; slices have none.

        A tensor has the same ones in all runs.
        """
        found = [(p.dim(), {k: v for k, v in vars(p).items() if not k.startswith("_zeroshard")}) for p in originals]
        all_names = {name for _, attributes in found for name in attributes}
        if not all_names:
            return
        for parameter, span in zip(parameters, spans, strict=True):
            same_dims = [attributes for dims, attributes in found if dims == len(span.shape)]
            distinct = list(
                {repr(attributes): attributes for attributes in same_dims or [a for _, a in found]}.values()
            )
            values = distinct[self._index_in_dims(span) % len(distinct)]
            parameter.__dict__["_user_attributes"] = _UserAttributes(values, all_names, self.reads)

    def _choose_names(self, group: Mapping[str, Any], spans: list[_Span]) -> _ParamNames:
        """Return a name for each tensor, of a parameter of as many dimensions; the same one in all runs."""
        named, chosen = list(zip(group["params"], group["param_names"], strict=True)), _ParamNames()
        for span in spans:
            names = [name for p, name in named if p.dim() == len(span.shape)] or [name for _, name in named]
            is_full = span in self.trial.spec.tensors
            chosen.append(names[self._index_in_dims(span) % len(names)] if is_full else names[0])
        chosen.reads = self.reads
        return chosen

    def _index_in_dims(self, span: _Span) -> int:
        """Return the index of a full tensor among those of as many dimensions."""
        return [tensor for tensor in self.trial.spec.tensors if len(tensor.shape) == len(span.shape)].index(span)

    def _seed_states(self, group: Mapping[str, Any], parameters: list[nn.Parameter], spans: list[_Span]) -> None:
        """Create states like those of the optimizer: its constructor may have made states that a step needs."""
        original, numel = self.trial.optimizer.state, self.trial.spec.numel
        example: Any = next((p for p in group["params"] if original.get(p)), None)
        for key, value in original[example].items() if example is not None else ():
            if is_elementwise(key, value, example.shape):
                sample = value.detach().flatten()[:numel].to(self.trial.device)
                if not sample.numel():
                    continue
                flattened = sample.repeat(-(-numel // sample.numel()))[:numel]
                dtype = parameters[0].dtype if parameters and value.is_floating_point() else value.dtype
                for parameter, (start, end, _) in zip(parameters, spans, strict=True):
                    part = flattened[start:end].to(dtype).reshape(parameter.shape)
                    self.inner.state[parameter][key] = part.clone()
            elif is_scalar_state(value):
                for parameter in parameters:
                    where = f"the state {key!r} of a parameter"
                    self.inner.state[parameter][key] = self._copier.copy(value, where)
            else:
                raise ElementwiseMismatchError(
                    f"the state {key!r} of a parameter of shape {tuple(example.shape)} is {_short_repr(value)}"
                )

    def run(self, jump: bool, has_unused: bool) -> None:
        """Step with each gradient; if ``jump``, advance the step counters in between.

        If ``has_unused``, some tensors have no gradient in one of the steps.
        """
        device, spec = self.trial.device, self.trial.spec
        gradients = self.trial.gradients  # made here: the guard rejects random numbers
        default_device = device if torch.get_default_device() != device else nullcontext()
        self.has_unused = has_unused
        # The guard takes as long as all else. What a rank has is part of what it has seen in the run on full tensors.
        guard = SideEffectGuard() if self._is_full else nullcontext()  # type: ignore[no-untyped-call]
        with torch.no_grad(), default_device, guard:
            if callable(getattr(self.inner, "train", None)):
                self.inner.train()
            before: dict[Any, float] = {}
            for step in range(len(spec.grad_scales) + len(spec.grad_scales_after_jump)):
                if step == len(spec.grad_scales) - 2:
                    before = {key: value for key, value, _ in self._stored_numbers()}
                if jump and step >= len(spec.grad_scales) and (step - len(spec.grad_scales)) % 3 == 0:
                    self._advance_counters(before, JUMPS_TO_STEP[(step - len(spec.grad_scales)) // 3])
                self._set_gradients([values[step] for values in gradients], has_unused and step == 2)
                type(self.inner).step(self.inner)
                self._record_values()
            if callable(getattr(self.inner, "eval", None)):  # schedule-free optimizers swap parameter values here
                self.inner.eval()
                self._record_values()
                self.inner.train()
                self._record_values()

    def _set_gradients(self, gradients: list[torch.Tensor], has_unused: bool) -> None:
        unused_starts = {span.start for span in self.trial.spec.tensors[1::UNUSED_PERIOD]}
        for number, (parameters, spans) in enumerate(zip(self.parameters, self.spans, strict=True)):
            can_be_unused = has_unused and (self.trial.is_whole[number] or not self.trial.has_whole)
            for parameter, span in zip(parameters, spans, strict=True):
                gradient = gradients[number][span.start : span.end].reshape(span.shape).clone()
                is_unused = can_be_unused and span.start in unused_starts
                parameter.grad = None if is_unused else gradient

    def check_values(self) -> None:
        """Raise if the values cannot be compared."""
        first, last = torch.stack(self.trial.initial_values)[self.is_covered], self.values[-1][self.is_covered]
        if not bool(last.isfinite().all()):
            raise ElementwiseUndecidedError("its values became infinite or NaN")
        if len(self.values) > 1 and torch.equal(first, last):  # a warmup may begin with a learning rate of 0
            raise ElementwiseUndecidedError("its steps changed nothing")

    def check_storable(self) -> None:
        """Raise if the optimizer keeps states that a checkpoint would not contain."""
        own_ids = {id(p) for parameters in self.parameters for p in parameters}
        for key in self.inner.state:
            if id(key) not in own_ids:
                raise OptimizerRefusedError(
                    f"it keeps a state under {_short_repr(key)}, which is not one of its parameters: a checkpoint "
                    "would not contain it, and ranks may have different ones. Keep it in the states of a parameter"
                )
        for parameter in (p for parameters in self.parameters for p in parameters if self.trial.has_whole):
            own_memory = parameter.untyped_storage().data_ptr()
            for key, value in self.inner.state.get(parameter, {}).items():
                if any(own_memory == t.untyped_storage().data_ptr() for t in tree_leaves(value) if _is_plain(t)):
                    raise OptimizerRefusedError(
                        f"its state {key!r} shares the memory of its parameter, and an owner has the values of a "
                        "parameter only in a step: clone it in the optimizer"
                    )
        if type(self.inner).state_dict is not torch.optim.Optimizer.state_dict:
            more = sorted(map(str, self.inner.state_dict().keys() - {"state", "param_groups"}))
            if more:
                raise OptimizerRefusedError(
                    f"its state_dict() also has {', '.join(map(repr, more))}, which a checkpoint would not contain. "
                    "Keep it in the groups or in the states of parameters"
                )

    def _record_values(self) -> None:
        spec, trial = self.trial.spec, self.trial
        recorded = torch.full((len(self.spans), spec.numel), math.nan, dtype=trial.dtype, device=trial.device)
        flattened = [p.detach().flatten() for parameters in self.parameters for p in parameters]
        recorded[self.is_covered] = torch.cat(flattened) if flattened else recorded.new_zeros(0)
        self.values.append(recorded)

    def _stored_numbers(self) -> Iterable[tuple[Any, float, Callable[[Any], Any]]]:
        """Yield every number that the optimizer stores: its key, its value, and a function that sets it."""
        states = [self.inner.state[p] for group in self.parameters for p in group if p in self.inner.state]
        stores: list[Any] = [*self.inner.param_groups, *(s for s in states if isinstance(s, dict)), vars(self.inner)]
        for store_index, store in enumerate(stores):
            for key, value in list(store.items()):
                if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
                    yield (store_index, key), value.item(), value.fill_
                elif _is_number(value):
                    yield (store_index, key), value, partial(store.__setitem__, key)

    def _advance_counters(self, before: dict[Any, float], to_step: int) -> None:
        """Set every number that counts steps to ``to_step``; ``before``: the numbers two steps before the first jump.

        A number counts steps if it has grown by 2 since then.
        """
        numbers = list(self._stored_numbers())
        if self._counters is None:
            self._counters = {key for key, value, _ in numbers if key in before and value - before[key] == 2}
        for key, value, set_value in numbers:
            if key in self._counters and value < to_step:
                set_value(type(value)(to_step))
                self.has_jumped = True

    @property
    def stored(self) -> dict[str, Any]:
        """What the optimizer stores in its groups and in its own attributes, by description."""
        groups = self.inner.param_groups
        found: dict[str, Any] = {}
        for number, group in enumerate(groups):
            of = "" if len(groups) == 1 else f" of group {number}"
            found |= {
                f"the group's number {key + of!r}": value
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
        for key, value in vars(self.inner).items():
            is_function = isinstance(value, (types.MethodType, types.FunctionType, partial))
            is_torchs = key in ("param_groups", "state", "defaults") or key.startswith("_optimizer_")
            if not is_function and not is_torchs:
                found[f"its attribute {key!r}"] = value
        return found


def _distinct_groups(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the groups that differ by more than learning rate and weight decay, by their key.

    Each has the parameters of all groups with this key.
    """
    distinct: dict[str, dict[str, Any]] = {}
    for group in groups:
        if group["params"]:
            lists = {key: list(group[key]) for key in ("params", "param_names") if key in group}
            same = distinct.setdefault(_group_key(group), {**group, **{key: [] for key in lists}})
            same.update({key: [*same[key], *values] for key, values in lists.items()})
    return distinct


def _group_key(group: Mapping[str, Any]) -> str:
    """Return a text that is the same for groups that differ only in learning rate and weight decay."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    for key, value in options.items():
        if (key in ("lr", "initial_lr", "weight_decay") or "lr_scale" in key) and _is_number(value):
            options[key] = bool(value > 0)
    return repr(sorted(options.items(), key=lambda item: str(item[0])))


# --------------------------------------------------------------------------------------------------------- comparisons


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_close(left: Any, right: Any) -> bool:
    """Return whether two values that an optimizer stores are equal up to rounding."""
    if _is_number(left) and _is_number(right):
        left_number, right_number = float(left), float(right)
        return (
            left_number == right_number
            or (math.isnan(left_number) and math.isnan(right_number))
            or math.isclose(left_number, right_number, rel_tol=1e-6)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor) and is_traceable_wrapper_subclass(left):  # a quantized state, for example
        (names, context), (_, other_context) = left.__tensor_flatten__(), right.__tensor_flatten__()
        pairs = [(getattr(left, name), getattr(right, name)) for name in names]
        return bool(context == other_context) and all(_is_close(*pair) for pair in pairs)
    if isinstance(left, torch.Tensor):
        return left.shape == right.shape and torch.allclose(left.double(), right.double(), 1e-5, equal_nan=True)
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(_is_close, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_is_close(left[key], right[key]) for key in left)
    if isinstance(left, (SHARED_TYPES, set, frozenset)):
        return bool(left == right)
    return not hasattr(left, "__dict__") or _is_close(vars(left), vars(right))


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter, _TrialParameter)


def _compare_stored(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    for what in expected | actual:
        if not _is_close(expected.get(what), actual.get(what)):
            raise ElementwiseMismatchError(
                f"{what} is {_short_repr(actual.get(what))} on the tensors of one rank, "
                f"{_short_repr(expected.get(what))} on all"
            )


def _compare_states(full: _TrialRun, part: _TrialRun, tolerance: float) -> None:
    rows = zip(full.parameters, full.spans, part.parameters, part.spans, part.trial.is_whole, strict=True)
    for parameters, spans, part_params, part_spans, is_whole in rows:
        for part_param, part_span in zip(part_params, part_spans, strict=True):
            part_state = dict(part.inner.state.get(part_param, {}))
            if is_whole:
                state = dict(full.inner.state.get(parameters[spans.index(part_span)], {}))
                if not _is_close(state, part_state):
                    what = f"a tensor of shape {part_span.shape}"
                    raise ElementwiseMismatchError(f"{what} has other states if some others are missing")
                continue
            for parameter, span in zip(parameters, spans, strict=True):
                start, end = max(part_span.start, span.start), min(part_span.end, span.end)
                if start < end:
                    state = dict(full.inner.state.get(parameter, {}))
                    expected = _StatePart(parameter, state, slice(start - span.start, end - span.start))
                    within = slice(start - part_span.start, end - part_span.start)
                    _compare_state(expected, _StatePart(part_param, part_state, within), tolerance)


class _StatePart(NamedTuple):
    """The states of some elements of a parameter, which may be a slice."""

    parameter: nn.Parameter
    state: Mapping[str, Any]
    span: slice


def _compare_state(full: _StatePart, sliced: _StatePart, tolerance: float) -> None:
    """Compare the states of the same elements in a full parameter and in a slice."""
    full_param, slice_param = full.parameter, sliced.parameter
    for key in full.state.keys() | sliced.state.keys():
        what = f"the state {key!r} of a tensor of shape {tuple(full_param.shape)}"
        if key not in full.state or key not in sliced.state:
            where = "on slices" if key in sliced.state else "on full tensors"
            raise ElementwiseMismatchError(f"{what} exists only {where}")
        left, right = full.state[key], sliced.state[key]
        of_slice = f"that of a slice of shape {tuple(slice_param.shape)} {_short_repr(right)}"
        if is_elementwise(key, right, slice_param.shape) and type(right) in (torch.Tensor, nn.Parameter):
            if not isinstance(left, torch.Tensor) or left.numel() not in (full_param.numel(), 1):
                raise ElementwiseMismatchError(f"{what} is {_short_repr(left)}, {of_slice}")
            expected = left.flatten().expand(full_param.numel())[full.span].double()
            actual = right[sliced.span].double()
            scale = left.double().abs().max() if left.numel() else 0.0
            differs = (expected - actual).abs() > tolerance * expected.abs() + 1e-12 * scale
            if bool((differs & ~(expected.isnan() & actual.isnan())).any()):
                raise ElementwiseMismatchError(f"{what} has different values in a slice")
            continue
        is_valid_on_full = is_scalar_state(left) or is_elementwise(key, left, full_param.shape)
        if not (is_scalar_state(right) and is_valid_on_full and _is_close(left, right)):
            raise ElementwiseMismatchError(f"{what} is {_short_repr(left)}, {of_slice}")


def _short_repr(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return f"{value.item():.6g}"
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else " ".join(repr(value).split())[:60]

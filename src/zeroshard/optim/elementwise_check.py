"""Find out by experiment whether an optimizer can run on flat shards.

[Note: testing that an optimizer is elementwise]
zeroshard steps an optimizer on flat slices that split matrices and join parameters ([Note: optimizer slices]). This is
correct only if the update of each element depends on that element alone. The class name does not tell: a subclass of
AdamW may clip per tensor, a rule may read ``p.ndim``, a group may keep a sum over all parameters. So unless the class
is one of torch's own elementwise optimizers, copies of the optimizer step the same values with the same gradients:

    on full tensors     | (6, 4) | (5,) | () | (2, 3, 2, 2) | (4, 6) | (1,) | (3, 8) |
    as slices of ranks  | rank 0: one slice   | rank 1: one slice                    |     and other splits

After each step the values must match, at the end also the states, and the numbers stored in groups and in the optimizer
itself. ``_Trial`` says what is stepped, ``_Run`` steps one copy, and the ``_compare_…`` functions compare two runs.

What the trials must detect, and how:

- trust ratios, clipping by norm: gradients from 1e-8 to 1e6, tensors of different scales, zeros, in fp64, where
  elementwise results match to 1e-12 of the change of an element;
- rules on dimensions or sizes: 0 to 4 dimensions, and a second trial with large tensors in the model's own dtype;
- warmups and work on every n-th step: after some steps the step counters are set close to 10,000;
- sums over all parameters (Prodigy, D-Adaptation): gradients that keep their direction; all numbers are compared;
- a rank that has no elements of a group: an empty group.

An optimizer that cannot be tested is rejected: if it raises on the copies, needs a closure, draws random numbers,
communicates, holds parameters outside its groups, has hooks or a replaced ``step``, or stores what cannot be copied.
The user's optimizer is only read, and no global random state changes. The copies run on the CPU (on the GPU only if
that does not decide), eagerly: a dispatch mode is active, in which torch.compile does not compile.
"""

from __future__ import annotations

import itertools
import math
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroshard.optim.optimizer_copy import (
    SHARED_TYPES,
    ElementwiseUndecidedError,
    OptimizerCopier,
    SideEffectGuard,
    check_can_copy,
)
from zeroshard.optim.slices import is_elementwise, is_scalar_state
from zeroshard.optim.step import ELEMENTWISE_OPTIMIZERS

# These need more than a gradient: a closure, or gradients in a sparse layout.
UNSUPPORTED_OPTIMIZERS = {
    "LBFGS": "it evaluates the loss itself, and searches along all parameters at once",
    "SparseAdam": "it needs sparse gradients, and zeroshard's gradients are dense",
}
WHOLE_PARAM_OPTIMIZERS = ("Adafactor", "Muon")  # of torch: known to update each parameter from that parameter alone

JUMP_TO_STEP = 9_998  # new value of step counters: after warmups, and just before a multiple of many periods


class ElementwiseMismatchError(Exception):
    """An optimizer gives different numbers on slices than on full parameters; the message says which."""


def find_whole_param_groups(
    optimizer: torch.optim.Optimizer,
    elementwise: bool | None,
    dtype: torch.dtype | None,
    new_group: dict[str, Any] | None = None,
) -> list[bool]:
    """Return for each group whether its rule needs whole parameters; raise if it needs several at once.

    See [Note: testing that an optimizer is elementwise]. ``elementwise``: what the user asserts, so that nothing is
    tested; False: it needs whole parameters. ``dtype`` is the dtype of the update; None: that of each parameter.
    ``new_group``: test only this group, which is added to an optimizer that was tested before.

    >>> parameters = [nn.Parameter(torch.ones(2, 2))]
    >>> find_whole_param_groups(torch.optim.Adam(parameters), None, None)
    [False]
    >>> find_whole_param_groups(torch.optim.Adafactor(parameters), None, None)
    [True]
    """
    for name, why in UNSUPPORTED_OPTIMIZERS.items():
        if hasattr(torch.optim, name) and isinstance(optimizer, getattr(torch.optim, name)):
            raise ValueError(f"torch.optim.{name} cannot run on shards: {why}. Use another optimizer (AdamW, Muon, …)")
    groups = optimizer.param_groups if new_group is None else [{**optimizer.defaults, **new_group}]
    if elementwise is not None:
        return [not elementwise] * len(groups)
    if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
        return [False] * len(groups)
    if type(optimizer) in [getattr(torch.optim, name, None) for name in WHOLE_PARAM_OPTIMIZERS]:
        return [True] * len(groups)
    kind = type(optimizer).__qualname__
    try:
        if new_group is None:
            check_can_copy(optimizer)
        return _classify(optimizer, groups, dtype)
    except ElementwiseMismatchError as difference:
        raise ValueError(
            f"{kind} reads more than one parameter at a time, so it cannot run on shards: a trial on some of several "
            f"small tensors gave different numbers than on all of them ({difference}). Use another optimizer (AdamW, "
            "Muon, …), or pass elementwise=True to shard() if this difference is intended"
        ) from None
    except ElementwiseUndecidedError as why:
        raise ValueError(
            f"{kind} may read more than one parameter at a time, and then it cannot run on shards: a trial on small "
            f"tensors did not decide it, because {why}. If it updates each element from that element's own value, "
            "gradient and states, pass elementwise=True to shard(); if each parameter from that parameter's own, "
            "elementwise=False"
        ) from why.__cause__


def _classify(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], dtype: torch.dtype | None) -> list[bool]:
    """Return for each group whether it needs whole parameters."""
    distinct = _distinct_groups(groups)
    try:
        _run_trials(optimizer, list(distinct.values()), dtype)
        return [False] * len(groups)
    except (ElementwiseMismatchError, ElementwiseUndecidedError) as first:
        needs_whole = {key: _needs_whole(optimizer, group, dtype) for key, group in distinct.items()}
        if True not in needs_whole.values():  # each group alone is elementwise, and together they are not
            raise first
    return [needs_whole.get(_group_key(group), False) for group in groups]


def _needs_whole(optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype | None) -> bool:
    """Return whether one group needs whole parameters."""
    try:
        _run_trials(optimizer, [group], dtype)
    except (ElementwiseMismatchError, ElementwiseUndecidedError):
        _run_whole_trials(optimizer, group, dtype)
        return True
    return False


# ------------------------------------------------------------------------------------------------------------ trials


@dataclass(frozen=True)
class _TrialSpec:
    """Which tensors are stepped, how often, and how they are split into slices."""

    shapes: tuple[tuple[int, ...], ...]
    grad_scales: tuple[float, ...]  # of the gradients, one per step; see _Trial.gradients
    grad_scales_after_jump: tuple[float, ...]
    splits: tuple[tuple[int, ...], ...]  # for each rank, where its slices begin and where the last one ends
    tolerance: float  # relative to the change of an element

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def with_dims(self, dims: Collection[int]) -> _TrialSpec:
        """Return a trial of whole tensors with these numbers of dimensions; of all if there are none."""
        shapes = tuple(shape for shape in self.shapes if len(shape) in dims) or self.shapes
        return replace(self, shapes=shapes, splits=())


_SMALL_TRIAL = _TrialSpec(
    shapes=((6, 4), (5,), (), (2, 3, 2, 2), (4, 6), (1,), (3, 8)),
    grad_scales=(1, 1, 1, 0.01, 1, 100, 1, 0, -1, 1, 1e-8, 1e4, 1e-3, 1, 1),
    grad_scales_after_jump=(1, 1, 30, -1, 1e6, 1),
    splits=((0, 103), (0, 37), (37, 103), (0, 10, 61), (), (61, 62, 103)),  # of one rank, of two, of three
    tolerance=1e-5,
)
_LARGE_TRIAL = _TrialSpec(  # above the sizes at which matrices are factored (128 x 128) or states quantized (4096)
    shapes=((144, 128), (1040, 8), (16, 16, 3, 3), (4608,)),
    grad_scales=(1, 0.1, 10),
    grad_scales_after_jump=(1, -3),
    splits=((0, 20_011), (20_011, 33_664)),
    tolerance=2e-3,
)
_HUGE_TRIAL = _TrialSpec(  # if the model has larger matrices than _LARGE_TRIAL
    shapes=((1040, 256),),
    grad_scales=(1,),
    grad_scales_after_jump=(),
    splits=((0, 250_003), (250_003, 266_240)),
    tolerance=2e-3,
)


def _run_trials(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], dtype: torch.dtype | None) -> None:
    """Raise ``ElementwiseMismatchError`` or ``ElementwiseUndecidedError`` unless slices give the same numbers."""
    if not groups:
        return
    parameters = [p for group in groups for p in group["params"]]
    cuda_devices = [p.device for p in groups[0]["params"] if p.device.type == "cuda"]
    devices = list(dict.fromkeys([torch.device("cpu"), *cuda_devices]))
    trial = partial(_Trial, optimizer, groups)
    wide_dtypes = (torch.float64, torch.float32)
    _run_first_decisive([trial(_SMALL_TRIAL, wide, device) for device in devices for wide in wide_dtypes])
    for model_dtype in {dtype} if dtype is not None else {p.dtype for p in parameters}:
        _run_first_decisive([trial(_LARGE_TRIAL, model_dtype, device) for device in devices])
        if any(p.dim() > 1 and p.numel() > _LARGE_TRIAL.numel for p in parameters):
            _run_first_decisive([trial(_HUGE_TRIAL, model_dtype, device) for device in devices])


def _run_whole_trials(optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Raise unless a group gives the same numbers for some of its parameters as for all.

    A rule may accept only tensors of the dimensions that the group has, so the trial has no others.
    """
    parameters = group["params"]
    dims = {p.dim() for p in parameters}
    devices = list(dict.fromkeys([torch.device("cpu"), *(p.device for p in parameters if p.device.type == "cuda")]))
    for spec, dtypes in (
        (_SMALL_TRIAL, (torch.float64, torch.float32)),
        (_LARGE_TRIAL, (dtype or parameters[0].dtype,)),
    ):
        restricted = spec.with_dims(dims)
        trials = [_Trial(optimizer, [group], restricted, wide, device) for device in devices for wide in dtypes]
        _run_first_decisive(trials, is_whole=True)


def _run_first_decisive(trials: Iterable[_Trial], is_whole: bool = False) -> None:
    """Run trials until one decides: an optimizer may not support fp64, or the CPU."""
    reasons = []
    for trial in trials:
        try:
            return trial.run_whole() if is_whole else trial.run()
        except ElementwiseUndecidedError as error:
            reasons.append(error)
    raise reasons[0]


@dataclass
class _Trial:
    """A comparison of one optimizer on full tensors and on slices."""

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    spec: _TrialSpec
    dtype: torch.dtype
    device: torch.device

    def run(self) -> None:
        full = self._run_full()
        for splits in self.spec.splits:
            try:
                sliced = _Run(self, splits, full.is_seeded)
                sliced.run(jump=full.has_jumped)
            except (ElementwiseUndecidedError, ElementwiseMismatchError):
                raise
            except Exception as error:
                where = "without parameters" if not splits else "of flat slices"
                what = f"on a group {where} it raises {type(error).__name__}: {error}"
                raise ElementwiseMismatchError(what) from error
            if splits:
                self._compare_values(full, sliced, splits[0], splits[-1])
            _compare_states(full, sliced, self.spec.tolerance)
            _compare_stored(full.stored, sliced.stored)

    def run_whole(self) -> None:
        """Compare some of the parameters, or none, with all. Existing states may have any shape, so it has none."""
        full = self._run_full(may_seed=False)
        count = len(self.spec.shapes)
        for subset in (tuple(range(0, count, 2)), tuple(range(1, count, 2)), (count - 1,), ()):
            part = _Run(self, None, full.is_seeded, subset)
            try:
                part.run(jump=full.has_jumped)
            except (ElementwiseUndecidedError, ElementwiseMismatchError):
                raise
            except Exception as error:
                what = f"on {len(subset)} of {count} parameters it raises {type(error).__name__}: {error}"
                raise ElementwiseMismatchError(what) from error
            self._compare_subset(full, part, subset)
            _compare_stored(full.stored, part.stored)

    def _compare_subset(self, full: _Run, part: _Run, subset: tuple[int, ...]) -> None:
        """Compare the values after each step, and the states at the end, of the parameters in a subset."""
        offset = 0
        for position, index in enumerate(subset):
            start, end = full.spans[index]
            shape = self.spec.shapes[index]
            for step, (expected, actual) in enumerate(zip(full.values, part.values, strict=True)):
                if not _is_close(expected[start:end], actual[offset : offset + end - start]):
                    raise ElementwiseMismatchError(
                        f"after step {step + 1} a tensor of shape {shape} has other values if some others are missing"
                    )
            offset += end - start
            states = [
                dict(run.inner.state.get(run.parameters[0][i], {})) for run, i in ((full, index), (part, position))
            ]
            if not _is_close(*states):
                raise ElementwiseMismatchError(f"a tensor of shape {shape} has other states if some others are missing")

    def _compare_values(self, full: _Run, sliced: _Run, start: int, end: int) -> None:
        """Compare the values after each step: ``sliced`` has the elements from ``start`` to ``end`` of each group."""
        wide_dtype = torch.promote_types(self.dtype, torch.float32)
        steps, groups = len(full.values), len(self.groups)
        actual = torch.stack(sliced.values).to(wide_dtype).view(steps, groups, end - start)
        expected = torch.stack(full.values).to(wide_dtype).view(steps, groups, self.spec.numel)[:, :, start:end]
        initial = torch.stack(self.initial_values).to(wide_dtype)[:, start:end]
        change = (expected - initial).abs().cummax(0).values
        rounding = 32 * torch.finfo(self.dtype).eps * torch.maximum(expected, initial).abs()
        error = (actual - expected).abs()
        is_equal = (error <= self.spec.tolerance * change + rounding) | (expected == actual)
        if bool(is_equal.all()):
            return
        step, group, position = torch.nonzero(~is_equal)[0].tolist()
        index = next(i for i, (_, span_end) in enumerate(full.spans) if start + position < span_end)
        of = f" of group {group}" if groups > 1 else ""
        raise ElementwiseMismatchError(
            f"after step {step + 1} an element of a tensor of shape {self.spec.shapes[index]}{of} has moved by "
            f"{(actual - initial)[step, group, position].item():.6g} in a slice, and by "
            f"{(expected - initial)[step, group, position].item():.6g} in the full tensor"
        )

    def _run_full(self, may_seed: bool = True) -> _Run:
        """Step full parameters, starting from states like the existing ones, or from none if that fails."""
        for is_seeded in (True, False) if may_seed and any(self.optimizer.state.values()) else (False,):
            for jump in (True, False):
                full = _Run(self, None, is_seeded)
                try:
                    full.run(jump)
                except (ElementwiseUndecidedError, ElementwiseMismatchError):
                    raise
                except Exception as error:
                    failed = error
                    if not full.has_jumped:
                        break
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


class _Run:
    """A copy of the user's optimizer with its own parameters, and their values after each step."""

    def __init__(
        self,
        trial: _Trial,
        splits: tuple[int, ...] | None,
        is_seeded: bool,
        subset: tuple[int, ...] | None = None,
    ) -> None:
        """``splits``: where slices begin and end; None: full tensors, all or a ``subset``."""
        self._trial, self.is_seeded, self.has_jumped = trial, is_seeded, False
        self.values: list[torch.Tensor] = []  # of all groups, after each step
        self.parameters: list[list[nn.Parameter]] = []
        ends = [0, *itertools.accumulate(trial.spec.sizes)] if splits is None else splits
        self.spans = list(itertools.pairwise(ends))
        all_shapes: list[tuple[int, ...]] = [(end - start,) for start, end in self.spans]
        if splits is None:
            all_shapes = list(trial.spec.shapes)
        if subset is not None:
            self.spans = [self.spans[index] for index in subset]
            all_shapes = [all_shapes[index] for index in subset]
        self._copier = OptimizerCopier(trial.optimizer, trial.device)
        self.inner = self._copier.clone
        for number, (group, values) in enumerate(zip(trial.groups, trial.initial_values, strict=True)):
            parameters = [
                nn.Parameter(values[start:end].reshape(shape).clone())
                for (start, end), shape in zip(self.spans, all_shapes, strict=True)
            ]
            self.parameters.append(parameters)
            options = self._copier.copy_options(group, number)
            if _is_number(options.get("lr")):
                options["lr"] = trial.lr(options)
            if splits is None:
                _copy_attributes(parameters, group["params"])
            if isinstance(group.get("param_names"), list):
                names, count = group["param_names"], len(trial.spec.shapes)
                options["param_names"] = [names[i * len(names) // count] for i in range(count)]
            self.inner.param_groups.append({**options, "params": parameters})
            if is_seeded:
                self._seed_states(group, parameters)

    def _seed_states(self, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> None:
        """Create states like those of the optimizer: its constructor may have made states that a step needs."""
        original, numel = self._trial.optimizer.state, self._trial.spec.numel
        example: Any = next((p for p in group["params"] if original.get(p)), None)
        for key, value in original[example].items() if example is not None else ():
            if is_elementwise(key, value, example.shape):
                sample = value.detach().flatten()[:numel].to(self._trial.device)
                if not sample.numel():
                    continue
                flattened = sample.repeat(-(-numel // sample.numel()))[:numel]
                dtype = parameters[0].dtype if parameters and value.is_floating_point() else value.dtype
                for parameter, (start, end) in zip(parameters, self.spans, strict=True):
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

    def run(self, jump: bool) -> None:
        """Step with each gradient; if ``jump``, advance the step counters in between."""
        device, spec = self._trial.device, self._trial.spec
        gradients = self._trial.gradients  # made here: the guard rejects random numbers
        default_device = device if torch.get_default_device() != device else nullcontext()
        with torch.no_grad(), default_device, SideEffectGuard():  # type: ignore[no-untyped-call]
            if callable(getattr(self.inner, "train", None)):
                self.inner.train()
            before: dict[Any, float] = {}
            for step in range(len(spec.grad_scales) + len(spec.grad_scales_after_jump)):
                if step == len(spec.grad_scales) - 2:
                    before = {key: value for key, value, _ in self._stored_numbers()}
                if step == len(spec.grad_scales) and jump:
                    self._advance_counters(before)
                for parameters, group_gradients in zip(self.parameters, gradients, strict=True):
                    for parameter, (start, end) in zip(parameters, self.spans, strict=True):
                        parameter.grad = group_gradients[step][start:end].reshape(parameter.shape).clone()
                type(self.inner).step(self.inner)
                self._record_values()
            if callable(getattr(self.inner, "eval", None)):  # schedule-free optimizers swap parameter values here
                self.inner.eval()
                self._record_values()
                self.inner.train()
                self._record_values()

    def check_values(self) -> None:
        """Raise if the values cannot be compared."""
        first, last = torch.cat(self._trial.initial_values), self.values[-1]
        if not bool(last.isfinite().all()):
            raise ElementwiseUndecidedError("its values became infinite or NaN")
        if len(self.values) > 1 and torch.equal(first, last):  # a warmup may begin with a learning rate of 0
            raise ElementwiseUndecidedError("its steps changed nothing")

    def _record_values(self) -> None:
        flattened = [p.detach().flatten() for parameters in self.parameters for p in parameters]
        self.values.append(torch.cat(flattened) if flattened else torch.zeros(0))

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

    def _advance_counters(self, before: dict[Any, float]) -> None:
        """Set every number that counts steps to ``JUMP_TO_STEP``."""
        for key, value, set_value in list(self._stored_numbers()):
            if key in before and value - before[key] == 2 and value < JUMP_TO_STEP:
                set_value(type(value)(JUMP_TO_STEP))
                self.has_jumped = True

    @property
    def stored(self) -> dict[str, Any]:
        """What the optimizer stores in its groups and in its own attributes, by description."""
        groups = self.inner.param_groups
        found: dict[str, Any] = {}
        for number, group in enumerate(groups):
            of = "" if len(groups) == 1 else f" of group {number}"
            found |= {f"the group's number {key + of!r}": value for key, value in group.items() if key != "params"}
        for key, value in vars(self.inner).items():
            is_function = isinstance(value, (types.MethodType, types.FunctionType, partial))
            is_torchs = key in ("param_groups", "state", "defaults") or key.startswith("_optimizer_")
            if not is_function and not is_torchs:
                found[f"its attribute {key!r}"] = value
        return found


def _copy_attributes(parameters: list[nn.Parameter], originals: list[Any]) -> None:
    """Copy the attributes that the user has set on parameters: a rule may depend on them. Slices have none."""
    user_attributes = ({key: value for key, value in vars(p).items() if key != "_zeroshard"} for p in originals)
    by_keys = {tuple(sorted(attributes)): attributes for attributes in user_attributes if attributes}
    for parameter, attributes in zip(parameters, by_keys.values(), strict=False):
        parameter.__dict__.update(attributes)


def _distinct_groups(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the groups that differ by more than learning rate and weight decay, by their key."""
    distinct: dict[str, dict[str, Any]] = {}
    for group in groups:
        if group["params"]:
            distinct.setdefault(_group_key(group), group)
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
    if isinstance(left, torch.Tensor):
        return left.shape == right.shape and torch.allclose(left.double(), right.double(), 1e-5, equal_nan=True)
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(_is_close, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_is_close(left[key], right[key]) for key in left)
    if isinstance(left, (SHARED_TYPES, set, frozenset)):
        return bool(left == right)
    return not hasattr(left, "__dict__") or _is_close(vars(left), vars(right))


def _compare_stored(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    for what in expected | actual:
        if not _is_close(expected.get(what), actual.get(what)):
            raise ElementwiseMismatchError(
                f"{what} is {_short_repr(actual.get(what))} on a slice, "
                f"{_short_repr(expected.get(what))} on full tensors"
            )


def _compare_states(full: _Run, sliced: _Run, tolerance: float) -> None:
    for copy in (full, sliced):
        own_ids = {id(p) for parameters in copy.parameters for p in parameters}
        for key in copy.inner.state:
            if id(key) not in own_ids:
                raise ElementwiseUndecidedError(
                    f"it keeps a state under {_short_repr(key)}, which is not one of its parameters"
                )
    for parameters, slices in zip(full.parameters, sliced.parameters, strict=True):
        for slice_param, (slice_start, slice_end) in zip(slices, sliced.spans, strict=True):
            slice_state = dict(sliced.inner.state.get(slice_param, {}))
            for parameter, (param_start, param_end) in zip(parameters, full.spans, strict=True):
                start, end = max(slice_start, param_start), min(slice_end, param_end)
                if start < end:
                    state = dict(full.inner.state.get(parameter, {}))
                    expected = _StatePart(parameter, state, slice(start - param_start, end - param_start))
                    actual = _StatePart(slice_param, slice_state, slice(start - slice_start, end - slice_start))
                    _compare_state(expected, actual, tolerance)


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

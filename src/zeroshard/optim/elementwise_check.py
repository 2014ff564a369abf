"""Test on small tensors whether an optimizer can run on flat shards.

[Note: testing that an optimizer is elementwise]
zeroshard steps an optimizer on flat slices that split matrices and join parameters ([Note: optimizer slices]). This is
correct only if the update of each element depends on that element alone. The class name does not tell: a subclass of
AdamW may clip per tensor, a rule may read ``p.ndim``, a group may keep a sum over all parameters. So unless the class
is one of torch's own elementwise optimizers, small copies of the optimizer step the same values and gradients, once as
full parameters and several times as slices, split as they are over ranks. Values, states, and the numbers stored in
groups and in the optimizer itself must match.

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

import argparse
import enum
import inspect
import itertools
import logging
import math
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.optim.slices import is_elementwise, is_scalar_state
from zeroshard.optim.step import ELEMENTWISE_OPTIMIZERS, is_scheduler_step

# These read full rows, full matrices or all parameters at once, so their result on a shard would differ.
UNSUPPORTED_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")

JUMP_TO_STEP = 9_998  # new value of step counters: after warmups, and just before a multiple of many periods
MAX_COPIED_ELEMENTS = 4096  # largest tensor (elements) or container (entries) that is copied


class ElementwiseUndecidedError(Exception):
    """The trials cannot decide whether an optimizer is elementwise; the message says why."""


class ElementwiseMismatchError(Exception):
    """An optimizer gives different numbers on slices than on full parameters; the message says which."""


def check_elementwise(optimizer: torch.optim.Optimizer, elementwise: bool | None, dtype: torch.dtype | None) -> None:
    """Raise unless the optimizer can run on flat shards: see [Note: testing that an optimizer is elementwise].

    ``elementwise=True``: the user asserts it, so nothing is tested. ``dtype`` is the dtype of the update; None: that of
    each parameter.

    >>> check_elementwise(torch.optim.Adam([nn.Parameter(torch.ones(2))]), None, None)
    """
    for name in UNSUPPORTED_OPTIMIZERS:
        if hasattr(torch.optim, name) and isinstance(optimizer, getattr(torch.optim, name)):
            raise ValueError(
                f"torch.optim.{name} reads more than one element at a time, so it cannot run on shards: use an "
                "elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, …)"
            )
    if type(optimizer) not in ELEMENTWISE_OPTIMIZERS and not elementwise:
        _compare_or_raise(optimizer, partial(_compare, optimizer, dtype))


def check_elementwise_group(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], elementwise: bool | None, dtype: torch.dtype | None
) -> None:
    """Raise unless one more group of model parameters can run on flat shards."""
    if type(optimizer) not in ELEMENTWISE_OPTIMIZERS and not elementwise:
        _compare_or_raise(optimizer, partial(_compare_groups, optimizer, [{**optimizer.defaults, **group}], dtype))


def _compare_or_raise(optimizer: torch.optim.Optimizer, compare: Callable[[], None]) -> None:
    """Run a comparison and turn what it raises into an error for the user."""
    kind = type(optimizer).__qualname__
    try:
        compare()
    except ElementwiseMismatchError as difference:
        raise ValueError(
            f"{kind} reads more than one element at a time, so it cannot run on shards: a trial on flat slices of "
            f"small tensors gave different numbers than on full tensors ({difference}). Use an elementwise optimizer "
            "(SGD, Adam, AdamW, Lion, …), or pass elementwise=True to shard() if this difference is intended"
        ) from None
    except ElementwiseUndecidedError as why:
        raise ValueError(
            f"{kind} may read more than one element at a time, and then it cannot run on shards: a trial on small "
            f"tensors did not decide it, because {why}. If it updates each element from that element's own value, "
            "gradient and states, pass elementwise=True to shard(); otherwise use an elementwise optimizer (SGD, Adam, "
            "AdamW, …)"
        ) from why.__cause__


# ------------------------------------------------------------------------------------------------------------ trials


@dataclass(frozen=True)
class _TrialSpec:
    """Which tensors are stepped, how often, and how they are split into slices."""

    shapes: tuple[tuple[int, ...], ...]
    grad_scales: tuple[float, ...]  # of the gradients, one per step; see _make_gradients
    grad_scales_after_jump: tuple[float, ...]
    rank_splits: tuple[tuple[tuple[int, ...], ...], ...]
    """Splits over ranks: for each rank, where its slices begin and where the last one ends."""
    tolerance: float  # relative to the change of an element

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


_SMALL_TRIAL = _TrialSpec(
    shapes=((6, 4), (5,), (), (2, 3, 2, 2), (4, 6), (1,), (3, 8)),
    grad_scales=(1, 1, 1, 0.01, 1, 100, 1, 0, -1, 1, 1e-8, 1e4, 1e-3, 1, 1),
    grad_scales_after_jump=(1, 1, 30, -1, 1e6, 1),
    rank_splits=(((0, 103),), ((0, 37), (37, 103)), ((0, 10, 61), (), (61, 62, 103))),
    tolerance=1e-5,
)
_LARGE_TRIAL = _TrialSpec(  # above the sizes at which matrices are factored (128 x 128) or states quantized (4096)
    shapes=((144, 128), (1040, 8), (16, 16, 3, 3), (4608,)),
    grad_scales=(1, 0.1, 10),
    grad_scales_after_jump=(1, -3),
    rank_splits=(((0, 20_011), (20_011, 33_664)),),
    tolerance=2e-3,
)
_HUGE_TRIAL = _TrialSpec(  # if the model has larger matrices than _LARGE_TRIAL
    shapes=((1040, 256),),
    grad_scales=(1,),
    grad_scales_after_jump=(),
    rank_splits=(((0, 250_003), (250_003, 266_240)),),
    tolerance=2e-3,
)


def _compare(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    """Raise ``ElementwiseMismatchError`` or ``ElementwiseUndecidedError`` unless slices give the same numbers."""
    _check_can_run_trial(optimizer)
    groups = _distinct_groups(optimizer.param_groups)
    if groups:
        _compare_groups(optimizer, groups, dtype)


def _compare_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], dtype: torch.dtype | None) -> None:
    cpu = torch.device("cpu")
    devices = list(dict.fromkeys([cpu, *(p.device for p in groups[0]["params"] if p.device.type == "cuda")]))
    run_trial = partial(_run_trial, optimizer, groups)
    _run_first_decisive(
        [
            partial(run_trial, _SMALL_TRIAL, wide_dtype, device)
            for device in devices
            for wide_dtype in (torch.float64, torch.float32)
        ]
    )
    for model_dtype in {dtype} if dtype is not None else {p.dtype for group in groups for p in group["params"]}:
        _run_first_decisive([partial(run_trial, _LARGE_TRIAL, model_dtype, device) for device in devices])
        if any(p.dim() > 1 and p.numel() > _LARGE_TRIAL.numel for group in groups for p in group["params"]):
            _run_first_decisive([partial(run_trial, _HUGE_TRIAL, model_dtype, device) for device in devices])


def _run_first_decisive(trials: Iterable[Callable[[], None]]) -> None:
    """Run trials until one decides: an optimizer may not support fp64, or the CPU."""
    reasons = []
    for trial in trials:
        try:
            return trial()
        except ElementwiseUndecidedError as error:
            reasons.append(error)
    raise reasons[0]


def _run_trial(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    trial: _TrialSpec,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run and compare one trial. If rounding would hide small updates, all learning rates are increased."""
    min_lr = 0.0 if dtype == torch.float64 else 1e-2
    make_copy = partial(_OptimizerCopy, optimizer, groups, trial, dtype, device, min_lr)
    gradients = _make_gradients(trial, len(groups), dtype, device)
    full = _run_whole(make_copy, gradients, any(optimizer.state.values()))
    for ranks in trial.rank_splits:
        for splits in ranks:
            try:
                sliced = make_copy(splits, full.is_seeded)
                sliced.run(gradients, jump=full.has_jumped)
            except (ElementwiseUndecidedError, ElementwiseMismatchError):
                raise
            except Exception as error:
                where = "without parameters" if not splits else "of flat slices"
                raise ElementwiseMismatchError(
                    f"on a group {where} it raises {type(error).__name__}: {error}"
                ) from error
            _compare_values(full, sliced, splits)
            _compare_states(full, sliced)
            for title, expected, actual in (
                ("the group's number {}", full.options, sliced.options),
                ("its attribute {}", full.attributes, sliced.attributes),
            ):
                for key in expected | actual:
                    if not _is_close(expected.get(key), actual.get(key)):
                        what = title.format(repr(key))
                        raise ElementwiseMismatchError(
                            f"{what} is {_short_repr(actual.get(key))} on a slice, "
                            f"{_short_repr(expected.get(key))} on full tensors"
                        )


def _run_whole(
    make: Callable[..., _OptimizerCopy], gradients: list[list[torch.Tensor]], has_states: bool
) -> _OptimizerCopy:
    """Step full parameters, starting from states like the existing ones, or from none if that fails."""
    for is_seeded in (True, False) if has_states else (False,):
        for jump in (True, False):
            full = make(None, is_seeded)
            try:
                full.run(gradients, jump)
            except (ElementwiseUndecidedError, ElementwiseMismatchError):
                raise
            except Exception as error:
                failed = error
                if not full.has_jumped:
                    break
            else:
                return full.validated()
    raise ElementwiseUndecidedError(f"step() raises {type(failed).__name__}: {failed}") from failed


def _make_gradients(
    trial: _TrialSpec, groups: int, dtype: torch.dtype, device: torch.device
) -> list[list[torch.Tensor]]:
    """Return the gradients of all elements for each group and step.

    Tensors and rows have different scales, and some elements are zero. Most gradients keep their direction, as in a
    model that learns; a negative scale reverses it.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    gradients = []
    for group in range(groups):
        base = torch.randn(trial.numel, generator=generator, dtype=torch.float64, device="cpu")
        sizes = [math.prod(shape) for shape in trial.shapes]
        for index, part in enumerate(torch.split(base, sizes)):
            part *= (1.0, 0.2, 5.0, 0.03)[(index + group) % 4]
            part[::7] *= 10
        group_gradients = []
        for step, scale in enumerate((*trial.grad_scales, *trial.grad_scales_after_jump)):
            noise = base.roll(3 * step + 1)
            gradient = (0.8 * base + 0.2 * noise) * scale * (0.01 if dtype == torch.float16 else 1.0)
            if step % 4 == 3:
                gradient[step % 5 :: 3] = 0
            group_gradients.append(gradient.to(device, dtype))
        gradients.append(group_gradients)
    return gradients


def _make_values(trial: _TrialSpec, groups: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(1)
    values = []
    for group in range(groups):
        flattened = torch.randn(trial.numel, generator=generator, dtype=torch.float64, device="cpu")
        for index, part in enumerate(torch.split(flattened, [math.prod(shape) for shape in trial.shapes])):
            part *= (1.0, 0.0, 0.5, 0.02, 8.0)[(index + 5 - group) % 5]
        values.append(flattened.to(device, dtype))
    return values


# ---------------------------------------------------------------------------------------------- a copy of an optimizer


class _OptimizerCopy:
    """A copy of the user's optimizer with its own parameters, and their values after each step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        trial: _TrialSpec,
        dtype: torch.dtype,
        device: torch.device,
        min_lr: float,
        splits: tuple[int, ...] | None,
        is_seeded: bool,
    ) -> None:
        self.trial, self.is_seeded, self.has_jumped, self._device = trial, is_seeded, False, device
        self.values: list[torch.Tensor] = []  # of all groups, after each step
        self.initial_values: list[torch.Tensor] = []
        self.parameters: list[list[nn.Parameter]] = []
        self.spans = _spans(trial, splits)
        self.inner = inner = copy_optimizer(optimizer, device)
        max_lr = max((float(g["lr"]) for g in groups if _is_number(g.get("lr"))), default=0.0)
        for number, (group, flattened) in enumerate(
            zip(groups, _make_values(trial, len(groups), dtype, device), strict=True)
        ):
            shapes = trial.shapes if splits is None else [(end - start,) for start, end in self.spans]
            parameters = [
                nn.Parameter(flattened[start:end].reshape(shape).clone())
                for (start, end), shape in zip(self.spans, shapes, strict=True)
            ]
            self.initial_values += [p.detach().flatten().clone() for p in parameters]
            self.parameters.append(parameters)
            options = _copy_group(optimizer, group, number, device)
            if _is_number(options.get("lr")):
                options["lr"] = _trial_lr(options, optimizer.defaults, max_lr, min_lr)
            if splits is None:
                _copy_attributes(parameters, group["params"])
            if isinstance(group.get("param_names"), list):
                names = group["param_names"]
                options["param_names"] = [names[i * len(names) // len(trial.shapes)] for i in range(len(trial.shapes))]
            inner.param_groups.append({**options, "params": parameters})
            if is_seeded:
                _seed_states(optimizer, group, parameters, self.spans, trial, device, inner.state)

    def run(self, gradients: list[list[torch.Tensor]], jump: bool) -> None:
        """Step with each gradient; if ``jump``, advance the step counters in between."""
        is_other_device = torch.get_default_device() != self._device
        with torch.no_grad(), self._device if is_other_device else nullcontext(), _SideEffectGuard():  # type: ignore[no-untyped-call]
            self._run(gradients, jump)

    def _run(self, gradients: list[list[torch.Tensor]], jump: bool) -> None:
        steps, steps_after_jump = len(self.trial.grad_scales), len(self.trial.grad_scales_after_jump)
        if callable(getattr(self.inner, "train", None)):
            self.inner.train()
        before: dict[Any, float] = {}
        for step in range(steps + steps_after_jump):
            if step == steps - 2:
                before = {key: value for key, value, _ in self._stored_numbers()}
            if step == steps and jump:
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

    def validated(self) -> _OptimizerCopy:
        """Return itself; raise if its values cannot be compared."""
        first, last = torch.cat(self.initial_values), self.values[-1]
        if not bool(last.isfinite().all()):
            raise ElementwiseUndecidedError("its values became infinite or NaN")
        if len(self.values) > 1 and torch.equal(first, last):  # a warmup may begin with a learning rate of 0
            raise ElementwiseUndecidedError("its steps changed nothing")
        return self

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
    def options(self) -> dict[str, Any]:
        """The groups' entries without the parameters; keys include the group number if there are several groups."""
        groups = self.inner.param_groups
        return {
            key if len(groups) == 1 else f"{key} of group {number}": value
            for number, group in enumerate(groups)
            for key, value in group.items()
            if key != "params"
        }

    @property
    def attributes(self) -> dict[str, Any]:
        """The optimizer's own attributes that can be compared."""
        return {
            key: value
            for key, value in vars(self.inner).items()
            if key not in ("param_groups", "state", "defaults")
            and not key.startswith("_optimizer_")
            and not isinstance(value, (types.MethodType, types.FunctionType, partial))
        }


def copy_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> Any:
    """Return a copy without groups and states; it shares nothing with the original that a step may change."""
    params_by_id = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    clone: Any = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key not in ("param_groups", "state", "step", "train", "eval") and not key.startswith("_optimizer_"):
            clone.__dict__[key] = _copy_value(value, f"its attribute {key!r}", params_by_id, device, optimizer, clone)
    for key in vars(optimizer):
        if key.startswith("_optimizer_"):
            clone.__dict__[key] = OrderedDict()
    clone.param_groups = []
    clone.state = defaultdict(dict)
    return clone


def _copy_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], number: int, device: torch.device
) -> dict[str, Any]:
    known = {id(p): p for g in optimizer.param_groups for p in g["params"]}
    options = {
        key: _copy_value(value, f"{key!r} of its group {number}", known, device, optimizer, None)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    return {**options, **{key: value for key, value in (("fused", None), ("capturable", False)) if key in options}}


_SHARED_TYPES = (
    *(type(None), bool, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, logging.Logger),
)


def _copy_value(
    value: Any, where: str, known: Mapping[int, Any], device: torch.device, optimizer: Any, twin: Any
) -> Any:
    """Return a copy of a value that a step may read or change."""
    copy_nested = partial(_copy_value, where=where, known=known, device=device, optimizer=optimizer, twin=twin)
    if isinstance(value, int) and not isinstance(value, bool):
        if value in known:
            raise ElementwiseUndecidedError(
                f"{where} holds the id() of a parameter, and on shards the parameters are other tensors"
            )
        return value
    if isinstance(value, _SHARED_TYPES):
        return value
    if isinstance(value, torch.Tensor):
        if id(value) in known or isinstance(value, nn.Parameter):
            raise ElementwiseUndecidedError(f"{where} holds parameters, and on shards it would still use these")
        if value.numel() > MAX_COPIED_ELEMENTS:
            raise ElementwiseUndecidedError(f"{where} holds a tensor of {value.numel()} elements")
        return value.detach().to(device, copy=True)
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)) and len(value) > MAX_COPIED_ELEMENTS:
        raise ElementwiseUndecidedError(f"{where} holds {len(value)} entries")
    if isinstance(value, dict):
        copied = {copy_nested(key): copy_nested(entry) for key, entry in value.items()}
        return defaultdict(value.default_factory, copied) if isinstance(value, defaultdict) else type(value)(copied)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copy_nested, value))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return type(value)(map(copy_nested, value))
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            copy_nested(cell.cell_contents)
        return value
    if isinstance(value, partial):
        return partial(
            copy_nested(value.func),
            *map(copy_nested, value.args),
            **{k: copy_nested(v) for k, v in value.keywords.items()},
        )
    if isinstance(value, types.MethodType):
        if value.__self__ is optimizer and twin is not None:
            return types.MethodType(value.__func__, twin)
        if isinstance(value.__self__, type):
            return value
    is_plain = is_dataclass(value) or type(value) in (types.SimpleNamespace, argparse.Namespace)
    if is_plain and hasattr(value, "__dict__"):
        clone = object.__new__(type(value))
        clone.__dict__.update({key: copy_nested(entry) for key, entry in vars(value).items()})
        return clone
    raise ElementwiseUndecidedError(f"{where} holds a {type(value).__name__}, which cannot be copied for a trial")


def _trial_lr(options: Mapping[str, Any], defaults: Mapping[str, Any], max_lr: float, min_lr: float) -> Any:
    """Return a trial's learning rate: the group's own; not 0, even if a warmup begins at 0; larger if all are small."""
    group_lr = options["lr"]
    fallbacks: list[Any] = [options.get("initial_lr"), defaults.get("lr"), 1e-3]
    lr = float(group_lr) or next(
        float(fallback) for fallback in fallbacks if _is_number(fallback) and float(fallback) > 0
    )
    if max_lr < min_lr:
        lr *= min_lr / (max_lr or lr)
    return torch.full_like(group_lr, lr) if isinstance(group_lr, torch.Tensor) else lr


def _copy_attributes(parameters: list[nn.Parameter], originals: list[Any]) -> None:
    """Copy the attributes that the user has set on parameters: a rule may depend on them. Slices have none."""
    user_attributes = ({key: value for key, value in vars(p).items() if key != "_zeroshard"} for p in originals)
    by_keys = {tuple(sorted(attributes)): attributes for attributes in user_attributes if attributes}
    for parameter, attributes in zip(parameters, by_keys.values(), strict=False):
        parameter.__dict__.update(attributes)


def _seed_states(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameters: list[nn.Parameter],
    spans: list[tuple[int, int]],
    trial: _TrialSpec,
    device: torch.device,
    states: dict[Any, Any],
) -> None:
    """Create states like those of the optimizer: its constructor may have made states that a step needs."""
    known = {id(p): p for g in optimizer.param_groups for p in g["params"]}
    example: Any = next((p for p in group["params"] if optimizer.state.get(p)), None)
    for key, value in optimizer.state[example].items() if example is not None else ():
        where = f"the state {key!r} of a parameter"
        if is_elementwise(key, value, example.shape):
            sample = value.detach().flatten()[: trial.numel].to(device)
            if not sample.numel():
                continue
            flattened = sample.repeat(-(-trial.numel // sample.numel()))[: trial.numel]
            dtype = parameters[0].dtype if parameters and value.is_floating_point() else value.dtype
            for parameter, (start, end) in zip(parameters, spans, strict=True):
                states[parameter][key] = flattened[start:end].to(dtype).reshape(parameter.shape).clone()
        elif is_scalar_state(value):
            for parameter in parameters:
                states[parameter][key] = _copy_value(value, where, known, device, optimizer, None)
        else:
            raise ElementwiseMismatchError(
                f"the state {key!r} of a parameter of shape {tuple(example.shape)} is {_short_repr(value)}"
            )


def _spans(trial: _TrialSpec, splits: tuple[int, ...] | None) -> list[tuple[int, int]]:
    if splits is not None:
        return list(itertools.pairwise(splits))
    spans, start = [], 0
    for shape in trial.shapes:
        spans.append((start, start + math.prod(shape)))
        start = spans[-1][1]
    return spans


def _distinct_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups that differ by more than learning rate and weight decay."""
    distinct: dict[Any, dict[str, Any]] = {}
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for key, value in options.items():
            if (key in ("lr", "initial_lr", "weight_decay") or "lr_scale" in key) and _is_number(value):
                options[key] = bool(value > 0)
        if group["params"]:
            distinct.setdefault(repr(sorted(options.items(), key=lambda item: str(item[0]))), group)
    return list(distinct.values())


def _check_can_run_trial(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer does something that a trial cannot show or must not run."""
    if "step" in vars(optimizer) and not is_scheduler_step(optimizer):
        raise ElementwiseUndecidedError("its step() was replaced by another one")
    hooks = [value for key, value in vars(optimizer).items() if key.startswith("_optimizer_step_") and value]
    if hooks:
        raise ElementwiseUndecidedError("there are hooks on its step, which a trial must not run")
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        raise ElementwiseUndecidedError("there are hooks on every optimizer's step, which a trial must not run")
    for key in optimizer.state:
        if not isinstance(key, torch.Tensor):
            raise ElementwiseUndecidedError(
                f"it keeps a state under {key!r}, which is not a parameter: a checkpoint would not contain it"
            )
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = [
        p.name for p in arguments if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if required:
        raise ElementwiseUndecidedError(
            f"its step() needs {', '.join(map(repr, required))}, and zeroshard calls step() without arguments"
        )


class _SideEffectGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise if a trial draws random numbers or communicates, before either has an effect."""

    def __enter__(self) -> Any:
        self._numpy_random = sys.modules.get("numpy.random")
        self._rng_states_before = self._rng_states()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        states = self._rng_states()
        if states != self._rng_states_before:
            random.setstate(self._rng_states_before[0])
            if self._numpy_random is not None:
                self._numpy_random.set_state(self._rng_states_before[1])
            raise ElementwiseUndecidedError("its step() draws random numbers")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ElementwiseUndecidedError("its step() draws random numbers")
        if "c10d" in func.namespace:
            raise ElementwiseUndecidedError("its step() communicates between ranks")
        return func(*args, **(kwargs or {}))

    def _rng_states(self) -> Any:
        if self._numpy_random is None:
            return random.getstate(), None
        name, keys, *rest = self._numpy_random.get_state()
        return random.getstate(), (name, keys.tolist(), *rest)


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
    if isinstance(left, (_SHARED_TYPES, set, frozenset)):
        return bool(left == right)
    return not hasattr(left, "__dict__") or _is_close(vars(left), vars(right))


def _compare_values(whole: _OptimizerCopy, pieces: _OptimizerCopy, splits: tuple[int, ...]) -> None:
    if not splits:
        return
    steps, groups = len(whole.values), len(whole.parameters)
    start, end = splits[0], splits[-1]
    wide_dtype = torch.promote_types(whole.initial_values[0].dtype, torch.float32)
    actual = torch.stack(pieces.values).to(wide_dtype).view(steps, groups, end - start)
    expected = torch.stack(whole.values).to(wide_dtype).view(steps, groups, whole.trial.numel)[:, :, start:end]
    initial = torch.cat(whole.initial_values).to(wide_dtype).view(groups, -1)[:, start:end]
    change = (expected - initial).abs().cummax(0).values
    rounding = 32 * torch.finfo(whole.initial_values[0].dtype).eps * torch.maximum(expected, initial).abs()
    error = (actual - expected).abs()
    is_equal = (error <= whole.trial.tolerance * change + rounding) | (expected == actual)
    if bool(is_equal.all()):
        return
    step, group, position = torch.nonzero(~is_equal)[0].tolist()
    index = next(i for i, (_, span_end) in enumerate(whole.spans) if start + position < span_end)
    of = f" of group {group}" if groups > 1 else ""
    raise ElementwiseMismatchError(
        f"after step {step + 1} an element of a tensor of shape {whole.trial.shapes[index]}{of} has moved by "
        f"{(actual - initial)[step, group, position].item():.6g} in a slice, and by "
        f"{(expected - initial)[step, group, position].item():.6g} in the full tensor"
    )


def _compare_states(whole: _OptimizerCopy, pieces: _OptimizerCopy) -> None:
    for copy in (whole, pieces):
        own_ids = {id(p) for parameters in copy.parameters for p in parameters}
        for key in copy.inner.state:
            if id(key) not in own_ids:
                raise ElementwiseUndecidedError(
                    f"it keeps a state under {_short_repr(key)}, which is not one of its parameters"
                )
    for parameters, slices in zip(whole.parameters, pieces.parameters, strict=True):
        for slice_param, (slice_start, slice_end) in zip(slices, pieces.spans, strict=True):
            state = dict(pieces.inner.state.get(slice_param, {}))
            for parameter, (param_start, param_end) in zip(parameters, whole.spans, strict=True):
                overlap_start, overlap_end = max(slice_start, param_start), min(slice_end, param_end)
                if overlap_start < overlap_end:
                    _compare_state(
                        dict(whole.inner.state.get(parameter, {})),
                        parameter,
                        slice(overlap_start - param_start, overlap_end - param_start),
                        state,
                        slice_param,
                        slice(overlap_start - slice_start, overlap_end - slice_start),
                        whole.trial.tolerance,
                    )


def _compare_state(
    mine: dict[str, Any],
    parameter: nn.Parameter,
    at: slice,
    theirs: dict[str, Any],
    piece: nn.Parameter,
    within: slice,
    tolerance: float,
) -> None:
    of = f"of a tensor of shape {tuple(parameter.shape)}"
    for key in mine.keys() | theirs.keys():
        what = f"the state {key!r} {of}"
        if key not in mine or key not in theirs:
            raise ElementwiseMismatchError(f"{what} exists only {'on slices' if key in theirs else 'on full tensors'}")
        left, right = mine[key], theirs[key]
        if is_elementwise(key, right, piece.shape) and type(right) in (torch.Tensor, nn.Parameter):
            if not isinstance(left, torch.Tensor) or left.numel() not in (parameter.numel(), 1):
                raise ElementwiseMismatchError(
                    f"{what} is {_short_repr(left)}, that of a slice of shape {tuple(piece.shape)} {_short_repr(right)}"
                )
            expected, actual = left.flatten().expand(parameter.numel())[at].double(), right[within].double()
            scale = left.double().abs().max() if left.numel() else 0.0
            differs = (expected - actual).abs() > tolerance * expected.abs() + 1e-12 * scale
            if bool((differs & ~(expected.isnan() & actual.isnan())).any()):
                raise ElementwiseMismatchError(f"{what} has different values in a slice")
        elif not is_scalar_state(right) or (
            not is_scalar_state(left) and not is_elementwise(key, left, parameter.shape)
        ):
            raise ElementwiseMismatchError(
                f"{what} is {_short_repr(left)}, that of a slice of shape {tuple(piece.shape)} {_short_repr(right)}"
            )
        elif not _is_close(left, right):
            raise ElementwiseMismatchError(f"{what} is {_short_repr(left)}, that of a slice {_short_repr(right)}")


def _short_repr(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return f"{value.item():.6g}"
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else " ".join(repr(value).split())[:60]

"""Classify the groups of an optimizer by trials: elementwise, or needs whole parameters."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from zeroshard.optim.elementwise_check.comparison import compare_runs
from zeroshard.optim.elementwise_check.trial import (
    LARGE_TRIAL,
    LARGE_WHOLE_TRIAL,
    SMALL_TRIAL,
    ElementwiseMismatchError,
    Span,
    Trial,
    huge_trials,
    is_number,
)
from zeroshard.optim.elementwise_check.trial_run import UNUSED_PERIOD, TrialRun
from zeroshard.optim.muon import MuonWithAdamW
from zeroshard.optim.optimizer_copy import (
    ElementwiseUndecidedError,
    OptimizerRefusedError,
    check_can_copy,
    check_holds_no_parameters,
)
from zeroshard.optim.step import ELEMENTWISE_OPTIMIZERS, WHOLE_PARAM_OPTIMIZERS

# These need more than a gradient: a closure, or gradients in a sparse layout.
UNSUPPORTED_OPTIMIZERS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it evaluates the loss itself, and searches along all parameters at once",
    torch.optim.SparseAdam: "it needs sparse gradients, and zeroshard's gradients are dense",
}

_eager_lock = threading.Lock()  # torch's stance is global, and ranks may be threads


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

    >>> parameters = [torch.nn.Parameter(torch.ones(2, 2))]
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
    for group in groups if type(optimizer) in (torch.optim.Muon, MuonWithAdamW) else ():
        shape = next((p.shape for p in group["params"] if p.dim() != 2), None)
        if shape is not None and group.get("rule", "muon") == "muon":
            raise ValueError(
                f"Muon updates matrices, and a parameter of the group has the shape {tuple(shape)}: give it to another "
                "optimizer, or to a group of AdamW in MuonWithAdamW"
            )
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
        if (key in ("lr", "initial_lr", "weight_decay") or "lr_scale" in key) and is_number(value):
            options[key] = bool(value > 0)
    return repr(sorted(options.items(), key=lambda item: str(item[0])))


def _run_trials(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], is_whole: list[bool], dtype: torch.dtype | None
) -> None:
    """Raise unless slices of some groups, and a part of the whole parameters of the others, give the same numbers."""
    if not groups:
        return
    parameters = [p for group in groups for p in group["params"]]
    devices = list(dict.fromkeys([torch.device("cpu"), *(p.device for p in parameters if p.device.type == "cuda")]))
    trial = partial(Trial, optimizer, groups, is_whole)
    wide_dtypes = (torch.float64, torch.float32)
    small = SMALL_TRIAL.with_dims({p.dim() for p in parameters})
    _run_first_decisive([trial(small, wide, device) for device in devices for wide in wide_dtypes])
    specs = [LARGE_WHOLE_TRIAL] if any(is_whole) else [LARGE_TRIAL, *huge_trials(parameters)]
    for model_dtype in {dtype} if dtype is not None else {p.dtype for p in parameters}:
        for spec in specs:
            _run_first_decisive([trial(spec, model_dtype, device) for device in devices])


def _run_first_decisive(trials: Iterable[Trial]) -> None:
    """Run trials until one decides: an optimizer may not support fp64, or the CPU."""
    reasons = []
    for trial in trials:
        try:
            return _run_trial(trial)
        except ElementwiseUndecidedError as error:
            reasons.append(error)
    raise reasons[0]


def _run_trial(trial: Trial) -> None:
    """Raise unless what any rank would have gives the same numbers as the full tensors."""
    full = _run_full(trial)
    full.check_storable()
    if full.reads and not trial.has_whole:
        raise ElementwiseMismatchError(f"it reads {full.reads[0]!r} of parameters, and slices have none")
    for number in range(4 if trial.has_whole else len(trial.spec.splits)):
        _compare_part(full, trial.spans_of_rank(number))
    if not trial.has_whole and trial.spec.tries_unused:
        _compare_unused(trial, full.is_seeded)


def _run_full(trial: Trial) -> TrialRun:
    """Step full parameters, starting from states like the existing ones, or from none if that fails.

    Existing states of whole parameters may have any shape, so the trial has none.
    """
    can_seed = any(trial.optimizer.state.values()) and not trial.has_whole
    for is_seeded in (True, False) if can_seed else (False,):
        for jump, has_unused in itertools.product((True, False), (True, False) if trial.has_whole else (False,)):
            full = TrialRun(trial, trial.full_spans(), is_seeded, is_full=True)
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


def _compare_unused(trial: Trial, is_seeded: bool) -> None:
    """Compare runs in which some tensors have no gradient in a step: all those of one rank, none of another.

    The slices have one tensor each: see [Note: optimizer slices].
    """
    full = TrialRun(trial, trial.full_spans(), is_seeded, is_full=True)
    try:
        full.run(jump=False, has_unused=True)
    except ElementwiseUndecidedError:
        raise
    except Exception:  # so it does without zeroshard
        return
    for first in range(2):
        tensors = [spans[first::UNUSED_PERIOD] for spans in trial.full_spans()]
        _compare_part(full, [[Span(s.start, s.end, (s.end - s.start,)) for s in spans] for spans in tensors])


def _compare_part(full: TrialRun, spans: list[list[Span]]) -> None:
    """Run on the tensors of a rank, and compare."""
    trial = full.trial
    part = TrialRun(trial, spans, full.is_seeded)
    try:
        part.run(full.has_jumped, full.has_unused)
    except (ElementwiseUndecidedError, ElementwiseMismatchError):
        raise
    except Exception as error:
        count = sum(map(len, spans))
        what = f"{count} of {len(trial.spec.shapes)} tensors" if trial.has_whole else "flat slices"
        what = f"on {what if count else 'a group without parameters'} it raises {type(error).__name__}: {error}"
        raise ElementwiseMismatchError(what) from error
    compare_runs(full, part)

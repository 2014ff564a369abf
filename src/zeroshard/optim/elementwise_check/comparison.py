"""Compare two runs of a trial: on full tensors, and on what one rank would have of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.optim.elementwise_check.trial import ElementwiseMismatchError, is_number, short_repr
from zeroshard.optim.elementwise_check.trial_run import TrialRun
from zeroshard.optim.optimizer_copy import SHARED_TYPES
from zeroshard.optim.slices import is_elementwise, is_scalar_state


def compare_runs(full: TrialRun, part: TrialRun) -> None:
    """Raise unless values, states and stored numbers of a rank are those of the full tensors."""
    _compare_values(full, part)
    _compare_states(full, part)
    _compare_stored(full.stored, part.stored)


def _compare_values(full: TrialRun, part: TrialRun) -> None:
    """Compare the values that a rank has, after each step."""
    trial = full.trial
    wide_dtype = torch.promote_types(trial.dtype, torch.float32)
    actual, expected = torch.stack(part.values).to(wide_dtype), torch.stack(full.values).to(wide_dtype)
    initial = torch.stack(trial.initial_values).to(wide_dtype)
    change = (expected - initial).abs().cummax(0).values
    rounding = 32 * torch.finfo(trial.dtype).eps * torch.maximum(expected, initial).abs()
    error = (actual - expected).abs()
    is_equal = (error <= trial.spec.tolerance * change + rounding) | (expected == actual) | ~part.is_covered
    if bool(is_equal.all()):
        return
    step, group, position = torch.nonzero(~is_equal)[0].tolist()
    shape = next(span.shape for span in trial.spec.tensors if position < span.end)
    of = f" of group {group}" if len(trial.groups) > 1 else ""
    moves = [f"{(values - initial)[step, group, position].item():.6g}" for values in (actual, expected)]
    where = ("without some others", "with all") if trial.is_whole[group] else ("in a slice", "in the full tensor")
    raise ElementwiseMismatchError(
        f"after step {step + 1} an element of a tensor of shape {shape}{of} has moved by {moves[0]} {where[0]}, "
        f"and by {moves[1]} {where[1]}"
    )


def _compare_stored(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    for what in expected | actual:
        if not _is_close(expected.get(what), actual.get(what)):
            raise ElementwiseMismatchError(
                f"{what} is {short_repr(actual.get(what))} on the tensors of one rank, "
                f"{short_repr(expected.get(what))} on all"
            )


def _compare_states(full: TrialRun, part: TrialRun) -> None:
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
                    _compare_state(expected, _StatePart(part_param, part_state, within), full.trial.spec.tolerance)


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
        of_slice = f"that of a slice of shape {tuple(slice_param.shape)} {short_repr(right)}"
        if is_elementwise(key, right, slice_param.shape) and type(right) in (torch.Tensor, nn.Parameter):
            if not isinstance(left, torch.Tensor) or left.numel() not in (full_param.numel(), 1):
                raise ElementwiseMismatchError(f"{what} is {short_repr(left)}, {of_slice}")
            expected = left.flatten().expand(full_param.numel())[full.span].double()
            actual = right[sliced.span].double()
            scale = left.double().abs().max() if left.numel() else 0.0
            differs = (expected - actual).abs() > tolerance * expected.abs() + 1e-12 * scale
            if bool((differs & ~(expected.isnan() & actual.isnan())).any()):
                raise ElementwiseMismatchError(f"{what} has different values in a slice")
            continue
        is_valid_on_full = is_scalar_state(left) or is_elementwise(key, left, full_param.shape)
        if not (is_scalar_state(right) and is_valid_on_full and _is_close(left, right)):
            raise ElementwiseMismatchError(f"{what} is {short_repr(left)}, {of_slice}")


def _is_close(left: Any, right: Any) -> bool:
    """Return whether two values that an optimizer stores are equal up to rounding."""
    if is_number(left) and is_number(right):
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

"""Checks that an optimizer can continue with the loaded options, scalar states and dtypes.

To find out which states an optimizer has, a copy of it runs one step on a small parameter with the saved options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.json_codec import truncated_repr
from zeroshard.checkpoint.train_state import IMPLEMENTATION_OPTIONS
from zeroshard.optim import is_elementwise, state_after_first_step

_REMEDY = "Load an earlier checkpoint, or load(path, model) for the weights alone"


def can_load_as(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a dtype can be loaded as another: float as any float, integer if its range fits.

    >>> can_load_as(torch.float64, torch.bfloat16), can_load_as(torch.int32, torch.int64)
    (True, True)
    >>> can_load_as(torch.int32, torch.float32)
    False
    """
    if saved == wanted:
        return True
    if saved.is_floating_point or wanted.is_floating_point:
        return saved.is_floating_point and wanted.is_floating_point
    if torch.bool in (saved, wanted) or saved.is_complex or wanted.is_complex:
        return False
    return torch.iinfo(wanted).min <= torch.iinfo(saved).min and torch.iinfo(saved).max <= torch.iinfo(wanted).max


def check_options(where: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise if a saved option has another type than the current one, or lr is missing or not finite."""
    for key, value in current.items():
        if key not in saved and key == "lr":
            raise CheckpointError(f"{where} has no lr, expected {_describe_type(value)}. {_REMEDY}")
        if key not in saved or key in IMPLEMENTATION_OPTIONS or value is None or saved[key] is None:
            continue
        if _describe_type(saved[key]) != _describe_type(value):
            raise CheckpointError(
                f"{where} has {key} {truncated_repr(saved[key])}, which is {_describe_type(saved[key])}; "
                f"expected {_describe_type(value)}, as the "
                f"optimizer has ({truncated_repr(value)}). {_REMEDY}"
            )
        if key == "lr" and not math.isfinite(float(saved[key])):
            raise CheckpointError(f"{where} has lr {truncated_repr(saved[key])}, expected a finite number. {_REMEDY}")


def check_scalars(where: str, scalars: Mapping[str, Any], states: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Raise if a scalar state has the name or shape of an elementwise state, or ``step`` is not a valid number."""
    for key, value in scalars.items():
        if key in states or is_elementwise(key, value, torch.Size(shape)):
            raise CheckpointError(f"{where} has {key} both as a counter and as a state of each element. {_REMEDY}")
        if key == "step" and not (_describe_type(value) == _NUMBER and 0 <= float(value) < math.inf):
            raise CheckpointError(f"{where} has step {truncated_repr(value)}, expected a number from 0 up. {_REMEDY}")


class OptimizerProbe:
    """Finds the states of an optimizer by running one step on a small copy."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_torch_optimizer = type(optimizer).__module__.startswith("torch.optim")
        self._probed_states: dict[tuple[str, torch.Size], dict[str, Any] | None] = {}

    def check_state(
        self, where: str, options: Mapping[str, Any], shape: tuple[int, ...], state: Mapping[str, Any]
    ) -> None:
        """Raise if a state the optimizer needs is missing or unfit. ``state`` maps elementwise states to dtypes."""
        small_shape = torch.Size([min(size, 2) for size in shape])
        probed = self._probe(where, options, small_shape)
        for key, value in (probed or {}).items():
            # other optimizers may create states later, or in another form
            if not self._is_torch_optimizer and key != "step":
                continue
            if key not in state:
                raise CheckpointError(
                    f"{where} has the optimizer states {', '.join(state)} and no {key}, without which "
                    f"{type(self._optimizer).__name__} cannot go on. {_REMEDY}"
                )
            is_elementwise_state, saved = is_elementwise(key, value, small_shape), state[key]
            if is_elementwise_state != isinstance(saved, torch.dtype) or (
                is_elementwise_state and not can_load_as(saved, value.dtype)
            ):
                raise CheckpointError(
                    f"{where} has the optimizer state {key} as {truncated_repr(saved)}, expected "
                    f"{f'{value.dtype} for each element' if is_elementwise_state else _describe_type(value)}. {_REMEDY}"
                )

    def _probe(self, where: str, options: Mapping[str, Any], shape: torch.Size) -> dict[str, Any] | None:
        """Return the state after one step with these options, cached; None if the optimizer cannot be probed."""
        key = repr(sorted(options.items(), key=lambda item: item[0])), shape
        if key not in self._probed_states:
            self._probed_states[key] = self._state_after_step(where, options, shape)
        return self._probed_states[key]

    def _state_after_step(self, where: str, options: Mapping[str, Any], shape: torch.Size) -> dict[str, Any] | None:
        current = self._optimizer.param_groups[0]
        probe_options = dict(current)
        for key, value in options.items():
            is_number = (
                isinstance(value, torch.Tensor)
                and value.numel() == 1
                and not isinstance(current.get(key), torch.Tensor)
            )
            probe_options[key] = value.item() if is_number else value
        with torch.random.fork_rng(devices=[]):
            try:
                state_after_first_step(self._optimizer, current, shape)
            except Exception:
                return None
            try:
                return state_after_first_step(self._optimizer, probe_options, shape)
            except Exception as error:
                raise CheckpointError(
                    f"{where} has options with which {type(self._optimizer).__name__} cannot step: "
                    f"{type(error).__name__}: {error}. {_REMEDY}"
                ) from error


_NUMBER = "a number"


def _describe_type(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return _NUMBER
    if isinstance(value, torch.Tensor):
        return _NUMBER if value.numel() == 1 and not value.is_complex() else "a tensor of several numbers"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} of: {', '.join('anything' if item is None else _describe_type(item) for item in value)}"
    if isinstance(value, str):
        return "a text"
    return "a table" if isinstance(value, dict) else type(value).__name__

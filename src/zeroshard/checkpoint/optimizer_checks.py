"""Checks that an optimizer can continue with the loaded options, scalar states and dtypes.

To find out which states an optimizer has, a copy of it runs one step on a small parameter with the saved options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.json_codec import truncated_repr
from zeroshard.checkpoint.train_state import IMPLEMENTATION_OPTIONS
from zeroshard.optim import is_elementwise, state_after_first_step

_REMEDY = "Load an earlier checkpoint, or use load(path, model) to load only the weights"
_NUMBER = "a number"


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
                f"{where} has {key} {truncated_repr(saved[key])} ({_describe_type(saved[key])}), expected "
                f"{_describe_type(value)} as in the optimizer ({truncated_repr(value)}). {_REMEDY}"
            )
        if key == "lr" and not math.isfinite(float(saved[key])):
            raise CheckpointError(f"{where} has lr {truncated_repr(saved[key])}, expected a finite number. {_REMEDY}")


def check_scalars(where: str, scalars: Mapping[str, Any], states: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Raise if a scalar state has the name or shape of an elementwise state, or ``step`` is not a valid number."""
    for key, value in scalars.items():
        if key in states or is_elementwise(key, value, torch.Size(shape)):
            raise CheckpointError(f"{where} has {key} both as a scalar and as an elementwise state. {_REMEDY}")
        if key == "step" and not (_describe_type(value) == _NUMBER and 0 <= float(value) < math.inf):
            raise CheckpointError(
                f"{where} has step {truncated_repr(value)}, expected a number of at least 0. {_REMEDY}"
            )


class OptimizerProbe:
    """Finds the states of an optimizer by running one step on a small copy."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_torch_optimizer = type(optimizer).__module__.startswith("torch.optim")
        self._probed_states: dict[tuple[str, torch.Size], dict[str, Any]] = {}

    def check_state(
        self, where: str, options: Mapping[str, Any], shape: tuple[int, ...], state: Mapping[str, Any]
    ) -> None:
        """Raise if a state the optimizer needs is missing or unfit. ``state`` maps elementwise states to dtypes."""
        small_shape = torch.Size([min(size, 2) for size in shape])
        cache_key = repr(sorted(options.items(), key=lambda item: item[0])), small_shape
        if cache_key not in self._probed_states:
            self._probed_states[cache_key] = self._probe(where, options, small_shape)
        for key, value in self._probed_states[cache_key].items():
            # other optimizers may create states later, or in another form
            if not self._is_torch_optimizer and key != "step":
                continue
            if key not in state:
                raise CheckpointError(
                    f"{where} has the optimizer states {', '.join(state)} but no {key}, which "
                    f"{type(self._optimizer).__name__} needs. {_REMEDY}"
                )
            needs_elementwise, saved = is_elementwise(key, value, small_shape), state[key]
            is_valid = isinstance(saved, torch.dtype) == needs_elementwise
            if not is_valid or (needs_elementwise and not can_load_as(saved, value.dtype)):
                expected = f"elementwise {value.dtype}" if needs_elementwise else _describe_type(value)
                raise CheckpointError(
                    f"{where} has the optimizer state {key} as {truncated_repr(saved)}, expected {expected}. {_REMEDY}"
                )

    def _probe(self, where: str, options: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
        """Return the state after one step with these options; empty if the optimizer cannot be probed."""
        current = self._optimizer.param_groups[0]
        probe_options = dict(current)
        for key, value in options.items():
            is_number = isinstance(value, torch.Tensor) and value.numel() == 1
            keep_tensor = isinstance(current.get(key), torch.Tensor)
            probe_options[key] = value.item() if is_number and not keep_tensor else value
        with torch.random.fork_rng(devices=[]):
            try:
                state_after_first_step(self._optimizer, current, shape)
            except Exception:
                return {}
            try:
                return state_after_first_step(self._optimizer, probe_options, shape)
            except Exception as error:
                raise CheckpointError(
                    f"{where} has options that {type(self._optimizer).__name__} cannot step with: "
                    f"{type(error).__name__}: {error}. {_REMEDY}"
                ) from error


def _describe_type(value: Any) -> str:
    if isinstance(value, bool):
        return "a bool"
    if isinstance(value, (int, float)):
        return _NUMBER
    if isinstance(value, torch.Tensor):
        return _NUMBER if value.numel() == 1 and not value.is_complex() else "a tensor of several numbers"
    if isinstance(value, (list, tuple)):
        items = ("anything" if item is None else _describe_type(item) for item in value)
        return f"{len(value)} values: {', '.join(items)}"
    if isinstance(value, str):
        return "a string"
    return "a dict" if isinstance(value, dict) else type(value).__name__

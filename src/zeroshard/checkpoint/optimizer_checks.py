"""Optimizer states that are loaded: whether options, counters and dtypes are such that the optimizer can go on.

What an optimizer keeps of a parameter is found by trying: a copy of it steps a small parameter with the saved options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.json_codec import truncated_repr
from zeroshard.checkpoint.train_state import IMPLEMENTATION_OPTIONS
from zeroshard.optim.slices import is_elementwise, state_after_first_step

_REMEDY = "Load an earlier checkpoint, or load(path, model) for the weights alone"


def can_load_as(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of one dtype may be loaded as another: any float as a float, integers where none can be cut off.

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
    """Raise where an option is of another kind than the optimizer's own, or a learning rate is none."""
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
    """Raise where counters of a parameter are named or shaped like its states, or a step count is no number."""
    for key, value in scalars.items():
        if key in states or is_elementwise(key, value, torch.Size(shape)):
            raise CheckpointError(f"{where} has {key} both as a counter and as a state of each element. {_REMEDY}")
        if key == "step" and not (_describe_type(value) == _NUMBER and 0 <= float(value) < math.inf):
            raise CheckpointError(f"{where} has step {truncated_repr(value)}, expected a number from 0 up. {_REMEDY}")


class OptimizerProbe:
    """What an optimizer keeps of parameters, by trying."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_torch_optimizer = type(optimizer).__module__.startswith("torch.optim")
        self._probed_states: dict[tuple[str, torch.Size], dict[str, Any] | None] = {}

    def check_state(
        self, where: str, options: Mapping[str, Any], shape: tuple[int, ...], state: Mapping[str, Any]
    ) -> None:
        """Raise where a parameter's state, with a dtype for what each element has, lacks what the optimizer needs."""
        small = torch.Size([min(size, 2) for size in shape])
        tried = self._probe(where, options, small)
        for key, value in (tried or {}).items():
            if (
                not self._is_torch_optimizer and key != "step"
            ):  # others may make some of their states later, or in another form
                continue
            if key not in state:
                raise CheckpointError(
                    f"{where} has the optimizer states {', '.join(state)} and no {key}, without which "
                    f"{type(self._optimizer).__name__} cannot go on. {_REMEDY}"
                )
            each, saved = is_elementwise(key, value, small), state[key]
            if each != isinstance(saved, torch.dtype) or (each and not can_load_as(saved, value.dtype)):
                raise CheckpointError(
                    f"{where} has the optimizer state {key} as {truncated_repr(saved)}, expected "
                    f"{f'{value.dtype} for each element' if each else _describe_type(value)}. {_REMEDY}"
                )

    def _probe(self, where: str, options: Mapping[str, Any], shape: torch.Size) -> dict[str, Any] | None:
        """The state after a step with these options; None where the optimizer cannot be tried this way."""
        tried = repr(sorted(options.items(), key=lambda item: item[0])), shape
        if tried not in self._probed_states:
            self._probed_states[tried] = self._state_after_step(where, options, shape)
        return self._probed_states[tried]

    def _state_after_step(self, where: str, options: Mapping[str, Any], shape: torch.Size) -> dict[str, Any] | None:
        own = self._optimizer.param_groups[0]
        chosen = dict(own)
        for key, value in options.items():
            number = (
                isinstance(value, torch.Tensor) and value.numel() == 1 and not isinstance(own.get(key), torch.Tensor)
            )
            chosen[key] = value.item() if number else value
        with torch.random.fork_rng(devices=[]):
            try:
                state_after_first_step(self._optimizer, own, shape)
            except Exception:
                return None
            try:
                return state_after_first_step(self._optimizer, chosen, shape)
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

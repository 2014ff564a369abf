"""Optimizer states that are loaded: whether options, counters and dtypes are such that the optimizer can go on.

What an optimizer keeps of a parameter is found by trying: a copy of it steps a small parameter with the saved options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.plain import shown
from zeroshard.checkpoint.states import IMPLEMENTATION
from zeroshard.runs import is_elementwise, state_after_a_step

_REMEDY = "Load an earlier checkpoint, or load(path, model) for the weights alone"


def fits(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of one dtype may be loaded as another: any float as a float, integers where none can be cut off.

    >>> fits(torch.float64, torch.bfloat16), fits(torch.int32, torch.float32), fits(torch.int32, torch.int64)
    (True, False, True)
    """
    if saved == wanted:
        return True
    if saved.is_floating_point or wanted.is_floating_point:
        return saved.is_floating_point and wanted.is_floating_point
    if torch.bool in (saved, wanted) or saved.is_complex or wanted.is_complex:
        return False
    return torch.iinfo(wanted).min <= torch.iinfo(saved).min and torch.iinfo(saved).max <= torch.iinfo(wanted).max


def refuse_options(where: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise where an option is of another kind than the optimizer's own, or a learning rate is none."""
    for key, value in own.items():
        if key not in saved and key == "lr":
            raise CheckpointError(f"{where} has no lr, expected {_kind(value)}. {_REMEDY}")
        if key not in saved or key in IMPLEMENTATION or value is None or saved[key] is None:
            continue
        if _kind(saved[key]) != _kind(value):
            raise CheckpointError(
                f"{where} has {key} {shown(saved[key])}, which is {_kind(saved[key])}; expected {_kind(value)}, as the "
                f"optimizer has ({shown(value)}). {_REMEDY}"
            )
        if key == "lr" and not math.isfinite(float(saved[key])):
            raise CheckpointError(f"{where} has lr {shown(saved[key])}, expected a finite number. {_REMEDY}")


def refuse_counters(where: str, counters: Mapping[str, Any], states: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Raise where counters of a parameter are named or shaped like its states, or a step count is no number."""
    for key, value in counters.items():
        if key in states or is_elementwise(key, value, torch.Size(shape)):
            raise CheckpointError(f"{where} has {key} both as a counter and as a state of each element. {_REMEDY}")
        if key == "step" and not (_kind(value) == _NUMBER and 0 <= float(value) < math.inf):
            raise CheckpointError(f"{where} has step {shown(value)}, expected a number from 0 up. {_REMEDY}")


class Trials:
    """What an optimizer keeps of parameters, by trying."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known = type(optimizer).__module__.startswith("torch.optim")
        self._tried: dict[tuple[str, torch.Size], dict[str, Any] | None] = {}

    def refuse_incomplete(
        self, where: str, options: Mapping[str, Any], shape: tuple[int, ...], state: Mapping[str, Any]
    ) -> None:
        """Raise where a parameter's state, with a dtype for what each element has, lacks what the optimizer needs."""
        small = torch.Size([min(size, 2) for size in shape])
        tried = self._try(where, options, small)
        for key, value in (tried or {}).items():
            if not self._known and key != "step":  # others may make some of their states later, or in another form
                continue
            if key not in state:
                raise CheckpointError(
                    f"{where} has the optimizer states {', '.join(state)} and no {key}, without which "
                    f"{type(self._optimizer).__name__} cannot go on. {_REMEDY}"
                )
            each, saved = is_elementwise(key, value, small), state[key]
            if each != isinstance(saved, torch.dtype) or (each and not fits(saved, value.dtype)):
                raise CheckpointError(
                    f"{where} has the optimizer state {key} as {shown(saved)}, expected "
                    f"{f'{value.dtype} for each element' if each else _kind(value)}. {_REMEDY}"
                )

    def _try(self, where: str, options: Mapping[str, Any], shape: torch.Size) -> dict[str, Any] | None:
        """The state after a step with these options; None where the optimizer cannot be tried this way."""
        tried = repr(sorted(options.items(), key=lambda item: item[0])), shape
        if tried not in self._tried:
            self._tried[tried] = self._step(where, options, shape)
        return self._tried[tried]

    def _step(self, where: str, options: Mapping[str, Any], shape: torch.Size) -> dict[str, Any] | None:
        own = self._optimizer.param_groups[0]
        chosen = dict(own)
        for key, value in options.items():
            number = (
                isinstance(value, torch.Tensor) and value.numel() == 1 and not isinstance(own.get(key), torch.Tensor)
            )
            chosen[key] = value.item() if number else value
        with torch.random.fork_rng(devices=[]):
            try:
                state_after_a_step(self._optimizer, own, shape)
            except Exception:
                return None
            try:
                return state_after_a_step(self._optimizer, chosen, shape)
            except Exception as error:
                raise CheckpointError(
                    f"{where} has options with which {type(self._optimizer).__name__} cannot step: "
                    f"{type(error).__name__}: {error}. {_REMEDY}"
                ) from error


_NUMBER = "a number"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return _NUMBER
    if isinstance(value, torch.Tensor):
        return _NUMBER if value.numel() == 1 and not value.is_complex() else "a tensor of several numbers"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} of: {', '.join('anything' if item is None else _kind(item) for item in value)}"
    if isinstance(value, str):
        return "a text"
    return "a table" if isinstance(value, dict) else type(value).__name__

"""The RNG states of Python, NumPy and torch, as tensors."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch

# dtype and length of each state; None if the length is not fixed
RNG_STATE_SPECS = {
    "python": (torch.int64, 627),
    "torch": (torch.uint8, None),
    "numpy": (torch.int64, 627),
    "cuda": (torch.uint8, None),
}


def get_rng_states() -> dict[str, torch.Tensor]:
    """Return the RNG states of Python, NumPy (if imported), torch and CUDA (if initialized) on this rank.

    >>> states = get_rng_states()
    >>> drawn = random.random(), torch.rand(1)
    >>> set_rng_states(states)
    >>> (random.random(), torch.rand(1)) == drawn
    True
    """
    _, words, gauss = random.getstate()
    states = {
        "python": torch.tensor([*words, *_encode_optional_float(gauss)], dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, words, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        numbers = [*map(int, words), int(position), *_encode_optional_float(float(cached) if has_gauss else None)]
        states["numpy"] = torch.tensor(numbers, dtype=torch.int64)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: dict[str, torch.Tensor]) -> None:
    """Restore the RNG states."""
    random.setstate(_python_state(states["python"]))
    torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(_numpy_state(states["numpy"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def check_rng_states(states: dict[str, torch.Tensor]) -> None:
    """Raise if a state is invalid; test it on temporary generators, not on those in use.

    >>> check_rng_states(get_rng_states() | {"torch": torch.zeros(3, dtype=torch.uint8)})
    Traceback (most recent call last):
        ...
    ValueError: the RNG state of torch is invalid: ...
    """
    setters: dict[str, Callable[[torch.Tensor], object]] = {
        "python": lambda state: random.Random().setstate(_python_state(state)),
        "torch": lambda state: torch.Generator().set_state(state),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        setters["numpy"] = lambda state: numpy.random.RandomState().set_state(_numpy_state(state))
    if torch.cuda.is_available():
        setters["cuda"] = lambda state: torch.Generator("cuda").set_state(state)
    for name, set_state in setters.items():
        if name in states:
            try:
                set_state(states[name])
            except (ValueError, TypeError, RuntimeError, OverflowError, struct.error) as error:
                raise ValueError(f"the RNG state of {name} is invalid: {error}") from error


def _python_state(state: torch.Tensor) -> tuple[int, tuple[int, ...], float | None]:
    words = state.tolist()
    return 3, tuple(words[:625]), _decode_optional_float(words[625:])


def _numpy_state(state: torch.Tensor) -> tuple[Any, ...]:
    words = state.tolist()
    gauss = _decode_optional_float(words[625:])
    keys = sys.modules["numpy"].array(words[:624], dtype="uint32")
    return "MT19937", keys, words[624], int(gauss is not None), gauss or 0.0


def _encode_optional_float(number: Any) -> tuple[int, int]:
    """Return a float or None as two integers: whether there is a value, and its bits."""
    return (0, 0) if number is None else (1, struct.unpack("<q", struct.pack("<d", number))[0])


def _decode_optional_float(pair: list[int]) -> float | None:
    return struct.unpack("<d", struct.pack("<q", pair[1]))[0] if pair[0] else None

"""The RNG states of Python, NumPy and torch, as tensors."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch


def get_rng_states() -> dict[str, torch.Tensor]:
    """Return the RNG states of Python, NumPy (if imported), torch and CUDA (if initialized) on this rank.

    >>> states = get_rng_states()
    >>> drawn = random.random(), torch.rand(1)
    >>> set_rng_states(states)
    >>> (random.random(), torch.rand(1)) == drawn
    True
    """
    _, words, gauss = random.getstate()
    states = {"python": _to_tensor(words, gauss), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
        states["numpy"] = _to_tensor([*keys, position], gauss if has_gauss else None)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: dict[str, torch.Tensor], is_trial: bool = False) -> None:
    """Restore the RNG states; raise ValueError if one is invalid. A trial sets only temporary generators.

    >>> set_rng_states({"torch": torch.zeros(3, dtype=torch.uint8)}, is_trial=True)
    Traceback (most recent call last):
        ...
    ValueError: the RNG state of torch is invalid: ...
    """
    numpy: Any = sys.modules.get("numpy")

    def set_python(state: torch.Tensor) -> None:
        words, gauss = _from_tensor(state)
        (random.Random() if is_trial else random).setstate((3, tuple(words), gauss))

    def set_numpy(state: torch.Tensor) -> None:
        words, gauss = _from_tensor(state)
        keys = numpy.array(words[:-1], dtype="uint32")
        generator = numpy.random.RandomState() if is_trial else numpy.random
        generator.set_state(("MT19937", keys, words[-1], int(gauss is not None), gauss or 0.0))

    setters: dict[str, Callable[[torch.Tensor], object]] = {
        "python": set_python,
        "torch": torch.Generator().set_state if is_trial else torch.set_rng_state,
    }
    if numpy is not None:
        setters["numpy"] = set_numpy
    if torch.cuda.is_available():
        setters["cuda"] = torch.Generator("cuda").set_state if is_trial else torch.cuda.set_rng_state
    for name, set_state in setters.items():
        try:
            if name in states:
                set_state(states[name])
        except (ValueError, TypeError, RuntimeError, OverflowError, struct.error) as error:
            raise ValueError(f"the RNG state of {name} is invalid: {error}") from error


def _to_tensor(words: Iterable[int], gauss: float | None) -> torch.Tensor:
    """Return a state of the Mersenne twister: its words, whether it has a cached normal number, and that one's bits."""
    bits = 0 if gauss is None else struct.unpack("<q", struct.pack("<d", gauss))[0]
    return torch.tensor([*map(int, words), int(gauss is not None), bits], dtype=torch.int64, device="cpu")


def _from_tensor(state: torch.Tensor) -> tuple[list[int], float | None]:
    *words, has_gauss, bits = state.tolist()
    return words, struct.unpack("<d", struct.pack("<q", bits))[0] if has_gauss else None

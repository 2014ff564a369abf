"""Surroundings: what the run of a block depends on beside its inputs, to be had again in its second run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AutocastState:
    """Whether, and to what, operations on a kind of device cast by themselves."""

    device_type: str
    is_enabled: bool
    dtype: torch.dtype
    is_cache_enabled: bool

    @classmethod
    def capture(cls, device_type: str) -> AutocastState:
        """What holds at this moment."""
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return cls(device_type, enabled, dtype, torch.is_autocast_cache_enabled())

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Have it hold inside."""
        return torch.amp.autocast(self.device_type, self.dtype, self.is_enabled, self.is_cache_enabled)


class RngAndAutocast:
    """What a run depends on beside its inputs: random states, and automatic casts."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        devices = dict.fromkeys(tensor.device for tensor in inputs if tensor.is_cuda)
        self._generators = [torch.default_generator, *(_cuda_generator(device) for device in devices)]
        self._autocast_states = [
            AutocastState.capture(kind) for kind in ("cpu", *dict.fromkeys(device.type for device in devices))
        ]
        self._rng_states = [generator.get_state() for generator in self._generators]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have inside what there was."""
        with contextlib.ExitStack() as stack:
            for cast in self._autocast_states:
                if cast.is_enabled or torch.is_autocast_enabled(cast.device_type):
                    stack.enter_context(cast.context())
            present = [generator.get_state() for generator in self._generators]
            for generator, state, now in zip(self._generators, self._rng_states, present, strict=True):
                if not torch.equal(state, now):
                    generator.set_state(state)
            try:
                yield
            finally:
                for generator, state in zip(self._generators, present, strict=True):
                    generator.set_state(state)


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]

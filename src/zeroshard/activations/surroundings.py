"""Surroundings: what the run of a block depends on beside its inputs, to be had again in its second run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """Whether, and to what, operations on a kind of device cast by themselves."""

    kind: str
    enabled: bool
    dtype: torch.dtype
    caches: bool

    @classmethod
    def now(cls, kind: str) -> Autocast:
        """What holds at this moment."""
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(kind, enabled, dtype, torch.is_autocast_cache_enabled())

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Have it hold inside."""
        return torch.amp.autocast(self.kind, self.dtype, self.enabled, self.caches)


class Surroundings:
    """What a run depends on beside its inputs: random states, and automatic casts."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        devices = dict.fromkeys(tensor.device for tensor in given if tensor.is_cuda)
        self._generators = [torch.default_generator, *(_generator(device) for device in devices)]
        self._casts = [Autocast.now(kind) for kind in ("cpu", *dict.fromkeys(device.type for device in devices))]
        self._states = [generator.get_state() for generator in self._generators]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have inside what there was."""
        with contextlib.ExitStack() as stack:
            for cast in self._casts:
                if cast.enabled or torch.is_autocast_enabled(cast.kind):
                    stack.enter_context(cast.entered())
            present = [generator.get_state() for generator in self._generators]
            for generator, state, now in zip(self._generators, self._states, present, strict=True):
                if not torch.equal(state, now):
                    generator.set_state(state)
            try:
                yield
            finally:
                for generator, state in zip(self._generators, present, strict=True):
                    generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]

"""Profile: what one rank held, moment by moment, and how long it waited for communication."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass
class Profile:
    """What ran inside ``with zeroshard.profile(model) as profile:``.

    >>> profile = Profile(held={"parameters": 8})
    >>> profile.record_bytes("gathered", 4)
    >>> profile.moments[-1].held
    {'parameters': 8, 'gathered': 4}
    """

    held: dict[str, int] = field(default_factory=dict)
    """Bytes by kind of state, at the last moment noted."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    moments: list[ProfileMoment] = field(default_factory=list)
    """Every change of what is held, in order."""
    phases: list[tuple[str, float]] = field(default_factory=list)
    """What :meth:`phase` was told, with the second it began at."""
    seconds: float = 0.0
    """How long it took: on a GPU, until the device was done."""
    waited: float = 0.0
    """Seconds of it that computation waited for communication."""
    start_time: float = field(default_factory=time.perf_counter)

    def phase(self, name: str) -> None:
        """Say what begins now: "forward", "backward", …"""
        self.phases.append((name, time.perf_counter() - self.start_time))

    def record_bytes(self, kind: str, nbytes: int) -> None:
        """Take down that ``nbytes`` of one kind of state are held now."""
        self.held[kind] = nbytes
        allocated = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None
        self.moments.append(ProfileMoment(time.perf_counter() - self.start_time, dict(self.held), allocated))


@dataclass(frozen=True)
class ProfileMoment:
    """What was held from one moment on."""

    seconds: float
    """Since the profile began, on the host's clock."""
    held: dict[str, int]
    """Bytes by kind of state, as in :class:`zeroshard.Report`."""
    allocated: int | None
    """On a GPU, bytes of all tensors alive, the model's activations among them."""

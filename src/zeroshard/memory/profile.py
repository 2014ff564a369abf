"""Profile: bytes held by one rank over time, and how long it waited for communication."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass
class Profile:
    """What happened inside ``with zeroshard.profile(model) as profile:``.

    >>> profile = Profile(held={"parameters": 8})
    >>> profile.record_bytes("gathered", 4)
    >>> profile.moments[-1].held
    {'parameters': 8, 'gathered': 4}
    """

    held: dict[str, int] = field(default_factory=dict)
    """Bytes by kind of state, as last recorded."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    moments: list[ProfileMoment] = field(default_factory=list)
    """Every change of the bytes held, in order."""
    phases: list[tuple[str, float]] = field(default_factory=list)
    """Names passed to :meth:`phase`, each with its start in seconds."""
    seconds: float = 0.0
    """Total time; on a GPU, until the device has finished."""
    waited: float = 0.0
    """Seconds in which computation waited for communication."""
    start_time: float = field(default_factory=time.perf_counter)

    def phase(self, name: str) -> None:
        """Mark the start of a phase: "forward", "backward", …"""
        self.phases.append((name, time.perf_counter() - self.start_time))

    def record_bytes(self, kind: str, nbytes: int) -> None:
        """Record that ``nbytes`` of one kind of state are held now."""
        self.held[kind] = nbytes
        allocated = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else None
        self.moments.append(ProfileMoment(time.perf_counter() - self.start_time, dict(self.held), allocated))


@dataclass(frozen=True)
class ProfileMoment:
    """Bytes held from one point in time on."""

    seconds: float
    """Seconds since the profile started, on the host clock."""
    held: dict[str, int]
    """Bytes by kind of state, as in :class:`zeroshard.Report`."""
    allocated: int | None
    """On a GPU, bytes of all live tensors, including the model's activations."""

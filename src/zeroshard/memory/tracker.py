"""MemoryTracker: bytes that this library holds, by kind of state and tier, now and at peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MODEL_STATE_KINDS = ("parameters", "gradients", "master weights", "optimizer states")


@dataclass
class NowAndPeak:
    """Bytes held now, and the peak."""

    now: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Add ``nbytes``, which may be negative."""
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now


@dataclass
class MemoryTracker:
    """Track what the library allocates and frees. The code that allocates or frees reports it here.

    >>> tracker = MemoryTracker()
    >>> tracker.add("parameters", 100)
    >>> tracker.add("parameters", -60)
    >>> tracker.by_kind["parameters", "device"]
    NowAndPeak(now=40, peak=100)
    """

    by_kind: dict[tuple[str, str], NowAndPeak] = field(default_factory=dict)  # (kind of state, tier)
    total: NowAndPeak = field(default_factory=NowAndPeak)  # on the device
    on_change: Callable[[str, int], None] | None = None  # called on every device change: (kind of state, its bytes now)

    def add(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Track ``nbytes`` as allocated, or as freed if negative."""
        held = self.get(kind, tier)
        held.add(nbytes)
        if tier != "device":
            return
        self.total.add(nbytes)
        if self.on_change is not None and nbytes:
            self.on_change(kind, held.now)

    def record_transient(self, kind: str, nbytes: int) -> None:
        """Track an allocation that is freed immediately: it only affects the peak."""
        self.add(kind, nbytes)
        self.add(kind, -nbytes)

    def set(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Set the bytes of a kind whose total is measured."""
        self.add(kind, nbytes - self.get(kind, tier).now, tier)

    def get(self, kind: str, tier: str = "device") -> NowAndPeak:
        """Return what is held of a kind of state in a tier."""
        held = self.by_kind.get((kind, tier))
        if held is None:
            held = self.by_kind.setdefault((kind, tier), NowAndPeak())  # another thread may have added it
        return held

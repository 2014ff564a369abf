"""Ledger: the bytes this library holds, by kind of state and tier, now and at peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MODEL_STATE_KINDS = ("parameters", "gradients", "master weights", "optimizer states")  # kinds of model states


@dataclass
class NowAndPeak:
    """How much is held now, and the most that was held at once."""

    now: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more (or fewer)."""
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now


@dataclass
class MemoryTracker:
    """Counts what the library allocates and frees, at the places where it does.

    >>> ledger = MemoryTracker()
    >>> ledger.add("parameters", 100)
    >>> ledger.add("parameters", -60)
    >>> ledger.by_kind["parameters", "device"]
    NowAndPeak(now=40, peak=100)
    """

    by_kind: dict[tuple[str, str], NowAndPeak] = field(default_factory=dict)  # (kind of state, tier)
    total: NowAndPeak = field(default_factory=NowAndPeak)  # on the device
    on_change: Callable[[str, int], None] | None = None  # told of every change there: (kind of state, its bytes now)

    def add(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Count ``nbytes`` allocated, or freed when negative."""
        held = self.get(kind, tier)
        held.add(nbytes)
        if tier != "device":
            return
        self.total.add(nbytes)
        if self.on_change is not None and nbytes:
            self.on_change(kind, held.now)

    def record_transient(self, kind: str, nbytes: int) -> None:
        """Count what goes at once: it shows at the peak alone."""
        self.add(kind, nbytes)
        self.add(kind, -nbytes)

    def set(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Count a kind that is measured as a whole."""
        self.add(kind, nbytes - self.get(kind, tier).now, tier)

    def get(self, kind: str, tier: str = "device") -> NowAndPeak:
        """What is held of a kind of state in a tier."""
        held = self.by_kind.get((kind, tier))
        if held is None:
            held = self.by_kind.setdefault((kind, tier), NowAndPeak())  # another thread may have come first
        return held

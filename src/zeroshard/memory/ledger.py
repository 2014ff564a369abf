"""Ledger: the bytes this library holds, by kind of state and tier, now and at peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

STATES = ("parameters", "gradients", "master weights", "optimizer states")  # kinds of model states


@dataclass
class Bytes:
    """How much is held now, and the most that was held at once."""

    now: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more (or fewer)."""
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now


@dataclass
class Ledger:
    """Counts what the library allocates and frees, at the places where it does.

    >>> ledger = Ledger()
    >>> ledger.add("parameters", 100)
    >>> ledger.add("parameters", -60)
    >>> ledger.kinds["parameters", "device"]
    Bytes(now=40, peak=100)
    """

    kinds: dict[tuple[str, str], Bytes] = field(default_factory=dict)  # (kind of state, tier)
    total: Bytes = field(default_factory=Bytes)  # on the device
    watch: Callable[[str, int], None] | None = None  # told of every change there: (kind of state, its bytes now)

    def add(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Count ``nbytes`` allocated, or freed when negative."""
        held = self.of(kind, tier)
        held.add(nbytes)
        if tier != "device":
            return
        self.total.add(nbytes)
        if self.watch is not None and nbytes:
            self.watch(kind, held.now)

    def pass_through(self, kind: str, nbytes: int) -> None:
        """Count what goes at once: it shows at the peak alone."""
        self.add(kind, nbytes)
        self.add(kind, -nbytes)

    def set(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Count a kind that is measured as a whole."""
        self.add(kind, nbytes - self.of(kind, tier).now, tier)

    def of(self, kind: str, tier: str = "device") -> Bytes:
        """What is held of a kind of state in a tier."""
        held = self.kinds.get((kind, tier))
        if held is None:
            held = self.kinds.setdefault((kind, tier), Bytes())  # another thread may have come first
        return held

"""Pins: units that stay in memory for a backward that no hook may announce, by the forward that used them.

A forward's pins go with the backward that comes to it, and with no other one: several forwards may wait for theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from zeroshard.engine.frames import Trace
from zeroshard.engine.unit import Unit


class Pins:
    """The units that are to stay, and for which forwards."""

    def __init__(self) -> None:
        self._held: dict[weakref.ref[Trace], list[Unit]] = {}  # weak: the graph owns a trace
        self._lent: dict[weakref.ref[Trace], list[Unit]] = {}
        self._orphans: set[Unit] = set()  # of forwards whose hooks are gone, though perhaps not all of their graphs

    def __contains__(self, unit: Unit) -> bool:
        """Whether some forward holds it."""
        return unit in self._orphans or any(unit in units for units in self._held.values())

    def has(self, trace: Trace, unit: Unit) -> bool:
        """Whether this forward holds it."""
        return unit in self._held.get(weakref.ref(trace), ())

    def lend(self, trace: Trace, units: Iterable[Unit]) -> None:
        """A forward has returned parameters of these units, or what has their memory."""
        self._lent[weakref.ref(trace)] = list(units)

    def lent(self, unit: Unit) -> bool:
        """Whether a forward whose backward is still to come has given out its parameters."""
        return any(unit in units for units in self._lent.values())

    def add(self, trace: Trace, units: Iterable[Unit]) -> None:
        """Hold these units for a forward, too."""
        trace.pins += [unit for unit in dict.fromkeys(units) if unit not in trace.pins]
        if trace.pins:
            self._held[weakref.ref(trace)] = trace.pins

    def drop(self, trace: Trace) -> None:
        """Nothing is held for this forward any more."""
        self._held.pop(weakref.ref(trace), None)
        self._lent.pop(weakref.ref(trace), None)

    def renew(self, trace: Trace) -> list[Unit]:
        """A backward has come to a forward. Where an earlier one has had its pins: the units to be brought again."""
        if not trace.pins or weakref.ref(trace) in self._held:
            return []
        self.add(trace, ())
        return trace.pins

    def close(self, traces: Iterable[Trace], kept: Iterable[Unit]) -> None:
        """A backward through these forwards is over. ``kept``: used by the graph that it has made itself."""
        kept = list(kept)
        self._orphans.clear()
        self._lent = {reference: units for reference, units in self._lent.items() if reference() is not None}
        for trace in traces:
            self.drop(trace)
            if kept:  # whose backward comes to these forwards again
                self.add(trace, kept)

    def disown(self) -> None:
        """Make one of those that were held for forwards whose hooks are gone: there may be any number of them."""
        for reference in [reference for reference in self._held if reference() is None]:
            self._orphans.update(self._held.pop(reference))

    def clear(self) -> None:
        """Hold nothing."""
        self._held.clear()
        self._lent.clear()
        self._orphans.clear()

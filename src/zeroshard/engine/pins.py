"""Pins: units that stay in memory for a backward that no hook may announce, by the forward that used them.

A forward's pins go with the backward that comes to it, and with no other one: several forwards may wait for theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from zeroshard.engine.frames import ForwardRecord
from zeroshard.engine.unit import Unit


class RetainedUnits:
    """The units that are to stay, and for which forwards."""

    def __init__(self) -> None:
        self._units_by_record: dict[weakref.ref[ForwardRecord], list[Unit]] = {}  # weak: the graph owns a trace
        self._returned_views: dict[weakref.ref[ForwardRecord], list[Unit]] = {}
        self._orphans: set[Unit] = set()  # of forwards whose hooks are gone, though perhaps not all of their graphs

    def __contains__(self, unit: Unit) -> bool:
        """Whether some forward holds it."""
        return unit in self._orphans or any(unit in units for units in self._units_by_record.values())

    def is_retained_for(self, record: ForwardRecord, unit: Unit) -> bool:
        """Whether this forward holds it."""
        return unit in self._units_by_record.get(weakref.ref(record), ())

    def record_returned_views(self, record: ForwardRecord, units: Iterable[Unit]) -> None:
        """A forward has returned parameters of these units, or what has their memory."""
        self._returned_views[weakref.ref(record)] = list(units)

    def has_returned_views(self, unit: Unit) -> bool:
        """Whether a forward whose backward is still to come has given out its parameters."""
        return any(unit in units for units in self._returned_views.values())

    def retain(self, record: ForwardRecord, units: Iterable[Unit]) -> None:
        """Hold these units for a forward, too."""
        record.retained_units += [unit for unit in dict.fromkeys(units) if unit not in record.retained_units]
        if record.retained_units:
            self._units_by_record[weakref.ref(record)] = record.retained_units

    def release(self, record: ForwardRecord) -> None:
        """Nothing is held for this forward any more."""
        self._units_by_record.pop(weakref.ref(record), None)
        self._returned_views.pop(weakref.ref(record), None)

    def restore(self, record: ForwardRecord) -> list[Unit]:
        """A backward has come to a forward. Where an earlier one has had its pins: the units to be brought again."""
        if not record.retained_units or weakref.ref(record) in self._units_by_record:
            return []
        self.retain(record, ())
        return record.retained_units

    def finish(self, records: Iterable[ForwardRecord], held_by_grad_graph: Iterable[Unit]) -> None:
        """A backward through these forwards is over. ``kept``: used by the graph that it has made itself."""
        held_by_grad_graph = list(held_by_grad_graph)
        self._orphans.clear()
        self._returned_views = {
            reference: units for reference, units in self._returned_views.items() if reference() is not None
        }
        for trace in records:
            self.release(trace)
            if held_by_grad_graph:  # whose backward comes to these forwards again
                self.retain(trace, held_by_grad_graph)

    def adopt_orphans(self) -> None:
        """Make one of those that were held for forwards whose hooks are gone: there may be any number of them."""
        for reference in [reference for reference in self._units_by_record if reference() is None]:
            self._orphans.update(self._units_by_record.pop(reference))

    def clear(self) -> None:
        """Hold nothing."""
        self._units_by_record.clear()
        self._returned_views.clear()
        self._orphans.clear()

"""Observer: sees what an engine does. The mechanism calls each event once, and knows nothing else of checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EVENTS = (
    "on_unsharded on_reshard on_used_outside on_forward_begin on_backward_begin on_foreign_gradients on_backward_end "
    "on_step on_masters_used on_values_changed"
).split()


class Observer:
    """Sees what an engine does. An error that it raises is the user's."""

    def on_unsharded(self, unit: Any) -> None:
        """The values of a unit have arrived."""

    def on_reshard(self, unit: Any) -> None:
        """The values of a unit are about to be freed."""

    def on_used_outside(self, unit: Any) -> None:
        """Code outside a unit's modules uses its values, which are in memory."""

    def on_forward_begin(self, engine: Any) -> None:
        """The outermost module is about to be called."""

    def on_backward_begin(self, engine: Any) -> None:
        """A backward has reached the model."""

    def on_foreign_gradients(self, found: Any) -> None:
        """Other ranks have gradients that this one has not: a gradient, and for each parameter whether that is so."""

    def on_backward_end(self, engine: Any) -> None:
        """A backward has ended."""

    def on_step(self, engine: Any) -> None:
        """The optimizer is about to read gradients and change masters."""

    def on_masters_used(self, engine: Any) -> None:
        """Somebody else is about to read or change masters."""

    def on_values_changed(self, engine: Any) -> None:
        """The optimizer, or gathered(), has changed the parameters."""


class Observers:
    """Several observers as one. Each is only called for the events that it has a method for."""

    def __init__(self, members: list[Observer]) -> None:
        self._calls: dict[str, list[Callable[[Any], None]]] = {event: [] for event in EVENTS}
        for member in members:
            self.add(member)

    def add(self, member: Observer) -> None:
        """Add an observer."""
        for event, calls in self._calls.items():
            if event in vars(type(member)):
                calls.append(getattr(member, event))

    def __getattr__(self, event: str) -> Callable[[Any], None]:
        calls = self._calls[event]

        def notify(subject: Any) -> None:
            for call in calls:
                call(subject)

        setattr(self, event, notify)
        return notify

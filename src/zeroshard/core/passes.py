"""Passes: which units a forward and its backward need, and until when. No tensors.

Autograd runs the nodes of a graph in the reverse of their creation order. Each start and end of a module call in a
forward gets a number, its tick. When the gradient of a call's output arrives, every node that was created after the end
of that call has run: a unit whose calls all started later is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from zeroshard.core.unit import Unit


@dataclass(eq=False)
class Call:
    """One forward of a hooked module."""

    module: nn.Module
    units: list[Unit]
    start: int
    end: int = -1
    is_hooked: bool = False  # its outputs tell when backward reaches it


@dataclass(eq=False)
class ForwardPass:
    """The module calls of one forward. The graph owns it, through the hooks."""

    calls: list[Call] = field(default_factory=list)  # in the order of their end


class BackwardPass:
    """How far one backward has come over the calls of its forwards."""

    def __init__(self) -> None:
        self.first_use: dict[Unit, int] = {}  # the tick at which a forward used it first
        self.open: set[Unit] = set()  # visited, and not done
        self.forwards: list[ForwardPass] = []  # visited
        self._pending: list[Call] = []  # hooked calls that are not visited; the next one is last
        self._visited: set[Call] = set()

    def expect(self, forward: ForwardPass) -> None:
        """Note a forward that this backward may go through: autograd does not say so before it does."""
        for call in forward.calls:
            for unit in call.units:
                self.first_use[unit] = min(call.start, self.first_use.get(unit, call.start))

    def add(self, forward: ForwardPass) -> None:
        """Add a forward that this backward goes through."""
        if forward in self.forwards:
            return
        self.forwards.append(forward)
        self.expect(forward)
        self._pending += [call for call in forward.calls if call.is_hooked]
        self._pending.sort(key=lambda call: call.end)

    def calls_until(self, call: Call) -> list[Call]:
        """Return the calls to visit when a gradient arrives at one, so that all ranks visit the same ones."""
        found = []
        while self._pending and self._pending[-1].end > call.end:
            found.append(self._pending.pop())
        found.append(call)
        found = [each for each in found if each not in self._visited]
        self._visited.update(found)
        return found

    def unhooked_call(self, module: nn.Module) -> Call | None:
        """Return the call that a checkpoint recomputes, if no gradient shows that backward has reached it."""
        calls = [call for forward in self.forwards for call in forward.calls if call.module is module]
        calls = [call for call in calls if not call.is_hooked and call not in self._visited]
        return max(calls, key=lambda call: call.end, default=None)

    def done_before(self, call: Call) -> list[Unit]:
        """Return the units that are done when backward reaches a call."""
        done = [unit for unit in self.open if self.first_use.get(unit, -1) > call.end]
        self.open.difference_update(done)
        return sorted(done, key=lambda unit: -self.first_use[unit])

"""States: what a model holds from one step to the next, and who may read or change it when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from zeroshard.comm import Communicator
from zeroshard.engine.flat import Flat
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.order import Order
from zeroshard.engine.parameter import Card
from zeroshard.engine.unit import Unit
from zeroshard.precision import LossScale


class Updates(Protocol):
    """Updates of states that rest outside the device, on a thread of their own."""

    def foresee(self, backwards: int) -> None:
        """A backward begins, the how-many-eth since the last step."""

    def doubt(self) -> None:
        """Somebody may change the gradients: what was computed from them ahead of the step does not count."""

    def wait(self) -> None:
        """Return when no update is under way; raise what went wrong."""


class States:
    """Parameters, gradients and optimizer states of one model, as they are found outside forward and backward.

    A step returns while updates on the host, and gathers of their results, may be under way: :meth:`finish_updates`
    waits for them. Whoever changes parameters or optimizer states also waits for those that still read them
    (:meth:`settle`), and whoever may change anything that an update is made from says so (:meth:`doubt`).
    """

    def __init__(self, units: list[Unit], gradients: Gradients, comm: Communicator, order: Order) -> None:
        self._units, self._gradients, self._comm, self._order = units, gradients, comm, order
        self.resident = [unit for unit in units if not unit.partitioned]
        self.spoilt: dict[str, str] = {}  # states that are of no use → why
        self.readers: list[Callable[[], None]] = []  # what is to be waited for before the states change
        # the optimizer's, and weak: what is updated outside the device, and which states rest on it
        self.updates: Callable[[], Updates | None] = lambda: None
        self.on_device: Callable[[], Callable[[], list[torch.Tensor]] | None] = lambda: None
        self.check_tiers: Callable[[], None] = lambda: None  # raises where states cannot be read where they rest
        self.away: object | None = None  # where all states are, while they are out
        self.loss_scale: LossScale | None = None  # fp16's, set by the optimizer
        self._frozen = [flat for unit in units for flat in unit.flats if not flat.trainable]
        self._resting = False  # whether resident parameters show their reduced gradients

    # -- whether they may be used -------------------------------------------------------------------------------

    def refuse_away(self) -> None:
        """Raise while the states are out."""
        if self.away is not None:
            raise RuntimeError(
                "the model's states are in host memory since zeroshard.offload_states(): call "
                "zeroshard.reload_states(model) first"
            )

    def refuse_spoilt(self, *parts: str) -> None:
        """Raise where states are of no use: of "weights", "optimizer"."""
        for part in parts:
            if part in self.spoilt:
                raise RuntimeError(self.spoilt[part])

    def refuse_thawed(self) -> None:
        """A parameter that was frozen at shard() has no place for a gradient: none may be computed unnoticed."""
        with torch._C.DisableTorchFunctionSubclass():
            thawed = [name for flat in self._frozen for name, p in flat.named_parameters if p.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{thawed[0]!r} was frozen when shard() was called and requires a gradient now: call "
                "zeroshard.unshard(), set requires_grad, and shard again"
            )

    # -- what is under way --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for whoever still reads the states, before they change."""
        readers, self.readers = self.readers, []
        for reader in readers:
            reader()

    def doubt(self) -> None:
        """The gradients are no longer what an update ahead of the step may have been made from."""
        updates = self.updates()
        if updates is not None:
            updates.doubt()

    def finish_updates(self) -> None:
        """Wait for the updates and gathers that a step has started; raise where the states cannot be read."""
        self.refuse_away()
        updates = self.updates()
        if updates is not None:
            updates.wait()
        self.check_tiers()
        for unit in self.resident:
            self.complete(unit)
            unit.wait()

    def complete(self, unit: Unit) -> None:
        """Collect the new values of a resident unit that was updated outside the device.

        All ranks collect in one order: those before it come first, though this rank may have no use for them.
        """
        if self._comm.shard.size == 1 and unit.expected:
            unit.gather()
        while unit.expected:
            first = next(other for other in self._in_order() if other.expected)
            self._order.check(first.gather_event)
            first.gather()

    def complete_rest(self) -> None:
        """Collect what this forward had no use for, since that of another rank may have had."""
        for unit in self._in_order() if self._comm.shard.size > 1 else ():
            self.complete(unit)
            unit.wait()

    def _in_order(self) -> list[Unit]:
        """The resident units, as all ranks agree that forward comes to them."""
        queue = self._gradients.queue
        return self.resident if queue is None or not self.resident else queue[::-1]

    # -- new values ---------------------------------------------------------------------------------------------

    def copy_masters(self, flats: Iterable[Flat], near: bool = False) -> None:
        """Copy the masters' values, or those on the device, into this rank's part of the parameters in computation."""
        pairs = [flat.update_from_master(near) for flat in flats]
        places = [place for owned, _ in pairs for place in owned]
        if places:
            torch._foreach_copy_(places, [source for _, master in pairs for source in master], non_blocking=True)

    def refresh_parameters(self) -> None:
        """Bring every rank's updated part to all, where parameters are not partitioned. Does not wait for the end.

        What is updated outside the device is brought when it is wanted: the next forward waits unit by unit.
        """
        for unit in self.resident:
            if unit.trainable and any(flat.rest.far for flat in unit.flats):
                unit.expect()
            elif unit.trainable and self._comm.shard.size > 1:
                self._order.check(unit.gather_event)
                unit.gather()

    def adopt(self) -> None:
        """Bring the parameters in computation into line with shards and masters that somebody has written into."""
        self._order.begin("take in new values")
        self.finish_updates()
        self.doubt()
        self.copy_masters(flat for unit in self._units for flat in unit.flats)
        for unit in self.resident if self._comm.shard.size > 1 else ():
            self._order.check(unit.gather_event)
            unit.gather(frozen=True)
        self.finish_updates()

    def absorb_resident(self) -> None:
        """Take values written into resident parameters, the same on all ranks, into shards and master copies."""
        self.settle()
        self.finish_updates()
        self.doubt()
        for unit in self.resident:
            unit.absorb(None)

    # -- gradients, as parameters show them ---------------------------------------------------------------------

    def rest(self) -> None:
        """Show resident parameters' reduced gradients; in forward and backward they are as autograd knows them."""
        if self._gradients.exist:
            for unit in self.resident:
                unit.rest()
            self._resting = True

    def wake(self) -> None:
        """Undo :meth:`rest`."""
        if self._resting:
            for unit in self.resident:
                unit.wake()
            self._resting = False

    def resting_gradient(self, card: Card) -> torch.Tensor | None:
        """What ``parameter.grad`` gives between backward and the next forward."""
        self.refuse_away()
        flat = card.flat()
        gradient = self._gradients.of_flat.get(flat) if flat is not None else None
        if flat is None or gradient is None or not any(gradient.used):
            return None
        if self._comm.shard.size > 1:
            raise RuntimeError(
                f"the gradient of {card.name!r} is partitioned over the ranks: use optimizer.clip_grad_norm_(…) to "
                "clip, optimizer.zero_grad() to clear, zeroshard.full_gradient(model, name) to read it"
            )
        if self.loss_scale is not None:
            raise RuntimeError(
                f"the gradient of {card.name!r} carries fp16's loss scale: use optimizer.clip_grad_norm_(…) to clip, "
                "optimizer.zero_grad() to clear, zeroshard.full_gradient(model, name) to read it"
            )
        self._order.begin("read the gradients")
        self._gradients.reduce_rest()
        self._gradients.apply_coefficient()
        if not gradient.used[card.index] or gradient.shard is None or not gradient.has_shard:
            return None
        self.doubt()  # whoever has it may write into it
        flat.arrive()  # an update of its values may still read it
        gradient.forget_norms()
        gradient.settle()
        self._gradients.memory.shown = True
        part, divided = flat.view(gradient.shard, card.index), flat.divided[card.index]
        return part if divided is None else divided.wrap(part)

    def clear_gradient(self, card: Card) -> None:
        """Forget the gradient of one parameter."""
        flat = card.flat()
        gradient = self._gradients.of_flat.get(flat) if flat is not None else None
        if flat is not None and gradient is not None:
            if self._gradients.memory.held:
                self.refuse_away()
            self.doubt()
            flat.arrive()  # an update of its values may still read it
            gradient.clear(card.index)
            if not any(gradient.used):
                self._gradients.forget_cleared()

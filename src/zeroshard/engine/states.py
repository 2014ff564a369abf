"""States: what a model holds from one step to the next, and who may read or change it when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from zeroshard.comm import Communicator
from zeroshard.engine.flat import Flat
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.order import Order
from zeroshard.engine.parameter import (
    Card,
    autograd_gradient,
    card_of,
    pointers_of,
    take_autograd_gradients,
    versions_of,
)
from zeroshard.engine.sharded_gradient import ShardedGradient, Source
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

    def frozen_with_gradients(self) -> list[str]:
        """The names of parameters that were frozen at shard() and that somebody has given a gradient since."""
        with torch._C.DisableTorchFunctionSubclass():
            return [name for flat in self._frozen for name, p in flat.named_parameters if p._grad is not None]

    def refuse_gathered(self, call: str) -> None:
        """Raise inside gathered(): the values that the parameters show there are not those that would change."""
        if any(unit.copied for unit in self._units):
            raise RuntimeError(
                f"{call} inside `with zeroshard.gathered()`: it would change the states, and the parameters inside are "
                "copies of what they were. Leave the block first"
            )

    def refuse_edited(self) -> None:
        """Raise where a parameter was edited inside gathered(), since what is about to be read has no part of that."""
        cards = [card_of(parameter) for unit in self._units if unit.copied for parameter in unit.edited()]
        if cards and cards[0] is not None:
            raise RuntimeError(
                f"{cards[0].name!r} was edited inside `with zeroshard.gathered()`, and the states do not have it yet: "
                "leave the block first (with write_rank=… the edit counts, without it is undone)"
            )

    # -- edits by the user ------------------------------------------------------------------------------------------

    def take_in_edits(self) -> None:
        """Copy the user's edits of resident parameters to their masters; refuse parameters that were moved elsewhere.

        [Note: edits of parameters]
        Where there is no master, a resident parameter is itself what the optimizer updates, and an edit in place (an
        initialisation, ``clamp_``, an EMA copied in) needs nothing. A master has to be told: autograd counts each
        change in place, so a count that has grown since the last look says which. It does not count changes through
        ``parameter.data`` (``p.data.clamp_(…)``): whoever was given that is taken to have made one. As in data
        parallelism, all ranks are expected to make the same edit. ``parameter.data = …`` is another matter: the
        parameter no longer lies in the flat, and neither the optimizer nor a gather would ever see it again, so that
        is refused.
        """
        edited: list[Unit] = []
        for unit in self.resident:
            if unit.copied:
                continue
            changed = unit.has_masters and unit.may_be_edited()
            for flat in unit.flats:
                if flat.known_pointers is None:
                    flat.known_pointers = [view.data_ptr() for view in flat.views]
                if pointers_of(flat.parameters, flat.has_divided) != flat.known_pointers:
                    self._refuse_moved(flat, flat.known_pointers)
                changed = changed or (flat.master is not None and versions_of(flat.parameters) != flat.known_versions)
            if changed:
                edited.append(unit)
        if edited:
            self.settle()
            self.doubt()
            if (updates := self.updates()) is not None:
                updates.wait()  # else what it is about to write would go over them
            self.check_tiers()
            for unit in edited:
                self.complete(unit)
                unit.wait()
        for unit in edited:
            unit.absorb(None)
            self.note_versions(unit)

    def _refuse_moved(self, flat: Flat, known: list[int]) -> None:
        now = pointers_of(flat.parameters, flat.has_divided)
        name = next(name for name, old, new in zip(flat.names, known, now, strict=True) if old != new)
        raise RuntimeError(
            f"the data of {name!r} was replaced after zeroshard.shard() (by `parameter.data = …`, "
            "vector_to_parameters, model.to(…) or the like), so the optimizer no longer updates what the model uses. "
            "Change values in place (`parameter.copy_(…)` under torch.no_grad()) or inside "
            "`with zeroshard.gathered(model, write_rank=0):`; change dtype, device or memory format before shard()"
        )

    def note_versions(self, unit: Unit) -> None:
        """Count what is in a resident unit's parameters now as known to their masters."""
        for flat in unit.flats if not unit.partitioned else ():
            if flat.master is not None:
                flat.known_versions = versions_of(flat.parameters)

    def values_changed(self, parameters: Iterable[nn.Parameter]) -> None:
        """The parameters have new values: a backward over a graph made of the old ones raises, as with plain torch."""
        torch.autograd.graph.increment_version(list(parameters))
        for unit in self._units:
            unit.accept_edits()
            self.note_versions(unit)

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
        self._end_updates()
        self.take_in_edits()

    def _end_updates(self) -> None:
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
        self.values_changed(parameter for unit in self._units for parameter in unit.parameters)
        self._end_updates()  # without edits: what was written counts, not what the parameters were before
        self.doubt()
        self.copy_masters(flat for unit in self._units for flat in unit.flats)
        for unit in self.resident if self._comm.shard.size > 1 else ():
            self._order.check(unit.gather_event)
            unit.gather(frozen=True)
        self._end_updates()
        for unit in self.resident:
            self.note_versions(unit)

    def absorb_resident(self) -> None:
        """Take values written into resident parameters, the same on all ranks, into shards and master copies."""
        self.settle()
        self.finish_updates()
        self.doubt()
        for unit in self.resident:
            if not unit.copied:  # else gathered() says whether it counts
                unit.absorb(None)
                self.note_versions(unit)

    # -- gradients, as parameters show them ---------------------------------------------------------------------

    def rest(self, live: Iterable[Unit] = ()) -> None:
        """Have resident parameters show their reduced gradients, and note who is given ``data``: see unit.py.

        So do those of partitioned units whose values are in memory, ``live``. In forward and backward they are as
        autograd knows them.
        """
        held = self._gradients.held
        for unit in (*self.resident, *live):
            if held or unit.has_masters:
                unit.rest()
                self._resting = True

    def wake(self, live: Iterable[Unit] = ()) -> None:
        """Undo :meth:`rest`."""
        if self._resting:
            for unit in (*self.resident, *live):
                unit.wake()
            self._resting = False

    def resting_gradient(self, card: Card) -> torch.Tensor | None:
        """What ``parameter.grad`` gives between backward and the next forward."""
        flat = card.flat()
        gradient = self._gradients.of_flat.get(flat) if flat is not None else None
        if flat is None:
            return None
        if gradient is None or not self._gradients.held:
            return autograd_gradient(flat.parameters[card.index])  # what somebody has put there
        self.refuse_away()
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"the gradient of {card.name!r} is read inside a backward, which has not reduced it yet: read "
                "parameter.grad when backward() has returned"
            )
        self._order.begin("read the gradients")
        self._gradients.agree()
        if not gradient.used[card.index] or gradient.shard is None or not gradient.has_shard:
            return None
        is_whole = self._comm.shard.size == 1 and self._comm.tensor.size == 1
        if not is_whole or self.loss_scale is not None or self._gradients.inverse is not None:
            cleared = self._gradients.cleared
            return ShardedGradient(
                Source(self, self._gradients, self._comm, self._order, gradient, card.index, cleared)
            )
        self._gradients.apply_coefficient()
        self.doubt()  # whoever has it may write into it
        flat.arrive()  # an update of its values may still read it
        gradient.forget_norms()
        gradient.settle()
        self._gradients.memory.shown = True
        return flat.view(gradient.shard, card.index)

    def clear_gradient(self, card: Card) -> None:
        """Forget the gradient of one parameter."""
        flat = card.flat()
        gradient = self._gradients.of_flat.get(flat) if flat is not None else None
        if flat is not None and gradient is None:  # frozen
            take_autograd_gradients([flat.parameters[card.index]])
        if flat is not None and gradient is not None:
            if self._gradients.memory.held:
                self.refuse_away()
            self.doubt()
            self._gradients.changed(gradient)
            gradient.clear(card.index)
            if not any(gradient.used):
                self._gradients.forget_cleared()

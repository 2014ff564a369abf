"""States: what a model holds from one step to the next, and who may read or change it when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from zeroshard.comm.collective_order import CollectiveOrder
from zeroshard.comm.collectives import Communicator
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.parameter import (
    ParamInfo,
    data_ptrs,
    get_autograd_grad,
    param_info,
    param_versions,
    pop_autograd_grads,
)
from zeroshard.engine.sharded_gradient import ParamGradHandle, ShardedGradient
from zeroshard.engine.unit import Unit
from zeroshard.sharding.precision import LossScale


class BackwardListener(Protocol):
    """Updates of states that rest outside the device, on a thread of their own."""

    def on_backward_begin(self, backward_count: int) -> None:
        """A backward begins, the how-many-eth since the last step."""

    def invalidate(self) -> None:
        """Somebody may change the gradients: what was computed from them ahead of the step does not count."""

    def wait(self) -> None:
        """Return when no update is under way; raise what went wrong."""


class StateGuard:
    """Parameters, gradients and optimizer states of one model, as they are found outside forward and backward.

    A step returns while updates on the host, and gathers of their results, may be under way: :meth:`wait_updates`
    waits for them. Whoever changes parameters or optimizer states also waits for those that still read them
    (:meth:`settle`), and whoever may change anything that an update is made from says so (:meth:`doubt`).
    """

    def __init__(self, units: list[Unit], gradients: Gradients, comm: Communicator, order: CollectiveOrder) -> None:
        self._units, self._gradients, self._comm, self._order = units, gradients, comm, order
        self.replicated_units = [unit for unit in units if not unit.is_partitioned]
        self.invalid_states: dict[str, str] = {}  # states that are of no use → why
        self.pending_reads: list[Callable[[], None]] = []  # what is to be waited for before the states change
        # the optimizer's, and weak: what is updated outside the device, and which states rest on it
        self.backward_listener: Callable[[], BackwardListener | None] = lambda: None
        self.device_states: Callable[[], Callable[[], list[torch.Tensor]] | None] = lambda: None
        self.check_tiers: Callable[[], None] = lambda: None  # raises where states cannot be read where they rest
        self.offloaded_states: object | None = None  # where all states are, while they are out
        self.loss_scale: LossScale | None = None  # fp16's, set by the optimizer
        self._frozen_flats = [flat for unit in units for flat in unit.flats if not flat.is_trainable]
        self._has_exposed_grads = False  # whether resident parameters show their reduced gradients

    # -- whether they may be used -------------------------------------------------------------------------------

    def check_states_reloaded(self) -> None:
        """Raise while the states are out."""
        if self.offloaded_states is not None:
            raise RuntimeError(
                "the model's states are in host memory since zeroshard.offload_states(): call "
                "zeroshard.reload_states(model) first"
            )

    def check_valid(self, *parts: str) -> None:
        """Raise where states are of no use: of "weights", "optimizer"."""
        for part in parts:
            if part in self.invalid_states:
                raise RuntimeError(self.invalid_states[part])

    def check_frozen(self) -> None:
        """A parameter that was frozen at shard() has no place for a gradient: none may be computed unnoticed."""
        with torch._C.DisableTorchFunctionSubclass():
            thawed = [name for flat in self._frozen_flats for name, p in flat.named_parameters if p.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{thawed[0]!r} was frozen when shard() was called and requires a gradient now: call "
                "zeroshard.unshard(), set requires_grad, and shard again"
            )

    def frozen_params_with_grads(self) -> list[str]:
        """The names of parameters that were frozen at shard() and that somebody has given a gradient since."""
        with torch._C.DisableTorchFunctionSubclass():
            return [name for flat in self._frozen_flats for name, p in flat.named_parameters if p._grad is not None]

    def check_not_gathered(self, call: str) -> None:
        """Raise inside gathered(): the values that the parameters show there are not those that would change."""
        if any(unit.has_gathered_copy for unit in self._units):
            raise RuntimeError(
                f"{call} inside `with zeroshard.gathered()`: it would change the states, and the parameters inside are "
                "copies of what they were. Leave the block first"
            )

    def check_no_pending_edits(self) -> None:
        """Raise where a parameter was edited inside gathered(), since what is about to be read has no part of that."""
        cards = [
            param_info(parameter)
            for unit in self._units
            if unit.has_gathered_copy
            for parameter in unit.edited_params()
        ]
        if cards and cards[0] is not None:
            raise RuntimeError(
                f"{cards[0].name!r} was edited inside `with zeroshard.gathered()`, and the states do not have it yet: "
                "leave the block first (with write_rank=… the edit counts, without it is undone)"
            )

    # -- edits by the user ------------------------------------------------------------------------------------------

    def sync_user_edits(self) -> None:
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
        for unit in self.replicated_units:
            if unit.has_gathered_copy:
                continue
            changed = unit.needs_master_sync and unit.may_be_edited()
            for flat in unit.flats:
                if flat.known_data_ptrs is None:
                    flat.known_data_ptrs = [view.data_ptr() for view in flat.views]
                if data_ptrs(flat.parameters, flat.has_dtensors) != flat.known_data_ptrs:
                    self._raise_data_replaced(flat, flat.known_data_ptrs)
                changed = changed or (
                    flat.master is not None and param_versions(flat.parameters) != flat.known_versions
                )
            if changed:
                edited.append(unit)
        if edited:
            self.wait_readers()
            self.invalidate_speculation()
            if (updates := self.backward_listener()) is not None:
                updates.wait()  # else what it is about to write would go over them
            self.check_tiers()
            for unit in edited:
                self.gather_updated_unit(unit)
                unit.wait_for_unshard()
        for unit in edited:
            unit.write_back(None)
            self.record_versions(unit)

    def _raise_data_replaced(self, flat: FlatParam, known: list[int]) -> None:
        now = data_ptrs(flat.parameters, flat.has_dtensors)
        name = next(name for name, old, new in zip(flat.names, known, now, strict=True) if old != new)
        raise RuntimeError(
            f"the data of {name!r} was replaced after zeroshard.shard() (by `parameter.data = …`, "
            "vector_to_parameters, model.to(…) or the like), so the optimizer no longer updates what the model uses. "
            "Change values in place (`parameter.copy_(…)` under torch.no_grad()) or inside "
            "`with zeroshard.gathered(model, write_rank=0):`; change dtype, device or memory format before shard()"
        )

    def record_versions(self, unit: Unit) -> None:
        """Count what is in a resident unit's parameters now as known to their masters."""
        for flat in unit.flats if not unit.is_partitioned else ():
            if flat.master is not None:
                flat.known_versions = param_versions(flat.parameters)

    def on_values_changed(self, parameters: Iterable[nn.Parameter]) -> None:
        """The parameters have new values: a backward over a graph made of the old ones raises, as with plain torch."""
        torch.autograd.graph.increment_version(list(parameters))
        for unit in self._units:
            unit.accept_edits()
            self.record_versions(unit)

    # -- what is under way --------------------------------------------------------------------------------------

    def wait_readers(self) -> None:
        """Wait for whoever still reads the states, before they change."""
        readers, self.pending_reads = self.pending_reads, []
        for reader in readers:
            reader()

    def invalidate_speculation(self) -> None:
        """The gradients are no longer what an update ahead of the step may have been made from."""
        updates = self.backward_listener()
        if updates is not None:
            updates.invalidate()

    def wait_updates(self) -> None:
        """Wait for the updates and gathers that a step has started; raise where the states cannot be read."""
        self._wait_updates()
        self.sync_user_edits()

    def _wait_updates(self) -> None:
        self.check_states_reloaded()
        updates = self.backward_listener()
        if updates is not None:
            updates.wait()
        self.check_tiers()
        for unit in self.replicated_units:
            self.gather_updated_unit(unit)
            unit.wait_for_unshard()

    def gather_updated_unit(self, unit: Unit) -> None:
        """Collect the new values of a resident unit that was updated outside the device.

        All ranks collect in one order: those before it come first, though this rank may have no use for them.
        """
        if self._comm.shard_axis.size == 1 and unit.is_stale:
            unit.start_unshard()
        while unit.is_stale:
            first = next(other for other in self._gather_order() if other.is_stale)
            self._order.check(first.all_gather_label)
            first.start_unshard()

    def gather_updated_units(self) -> None:
        """Collect what this forward had no use for, since that of another rank may have had."""
        for unit in self._gather_order() if self._comm.shard_axis.size > 1 else ():
            self.gather_updated_unit(unit)
            unit.wait_for_unshard()

    def _gather_order(self) -> list[Unit]:
        """The resident units, as all ranks agree that forward comes to them."""
        queue = self._gradients.reduce_queue
        return self.replicated_units if queue is None or not self.replicated_units else queue[::-1]

    # -- new values ---------------------------------------------------------------------------------------------

    def copy_masters(self, flats: Iterable[FlatParam], device_only: bool = False) -> None:
        """Copy the masters' values, or those on the device, into this rank's part of the parameters in computation."""
        pairs = [flat.master_copy_lists(device_only) for flat in flats]
        places = [place for owned, _ in pairs for place in owned]
        if places:
            torch._foreach_copy_(places, [source for _, master in pairs for source in master], non_blocking=True)

    def start_param_refresh(self) -> None:
        """Bring every rank's updated part to all, where parameters are not partitioned. Does not wait for the end.

        What is updated outside the device is brought when it is wanted: the next forward waits unit by unit.
        """
        for unit in self.replicated_units:
            if unit.is_trainable and any(flat.tier_placement.has_offloaded_optimizer for flat in unit.flats):
                unit.mark_stale()
            elif unit.is_trainable and self._comm.shard_axis.size > 1:
                self._order.check(unit.all_gather_label)
                unit.start_unshard()

    def sync_from_masters(self) -> None:
        """Bring the parameters in computation into line with shards and masters that somebody has written into."""
        self._order.begin_pass("take in new values")
        self.on_values_changed(parameter for unit in self._units for parameter in unit.parameters)
        self._wait_updates()  # without edits: what was written counts, not what the parameters were before
        self.invalidate_speculation()
        self.copy_masters(flat for unit in self._units for flat in unit.flats)
        for unit in self.replicated_units if self._comm.shard_axis.size > 1 else ():
            self._order.check(unit.all_gather_label)
            unit.start_unshard(include_frozen=True)
        self._wait_updates()
        for unit in self.replicated_units:
            self.record_versions(unit)

    def write_back_params(self) -> None:
        """Take values written into resident parameters, the same on all ranks, into shards and master copies."""
        self.wait_readers()
        self.wait_updates()
        self.invalidate_speculation()
        for unit in self.replicated_units:
            if not unit.has_gathered_copy:  # else gathered() says whether it counts
                unit.write_back(None)
                self.record_versions(unit)

    # -- gradients, as parameters show them ---------------------------------------------------------------------

    def expose_reduced_grads(self, unsharded: Iterable[Unit] = ()) -> None:
        """Have resident parameters show their reduced gradients, and note who is given ``data``: see unit.py.

        So do those of partitioned units whose values are in memory, ``live``. In forward and backward they are as
        autograd knows them.
        """
        held = self._gradients.has_grads
        for unit in (*self.replicated_units, *unsharded):
            if held or unit.needs_master_sync:
                unit.expose_reduced_grads()
                self._has_exposed_grads = True

    def hide_reduced_grads(self, unsharded: Iterable[Unit] = ()) -> None:
        """Undo :meth:`rest`."""
        if self._has_exposed_grads:
            for unit in (*self.replicated_units, *unsharded):
                unit.hide_reduced_grads()
            self._has_exposed_grads = False

    def reduced_grad(self, info: ParamInfo) -> torch.Tensor | None:
        """What ``parameter.grad`` gives between backward and the next forward."""
        flat = info.flat()
        gradient = self._gradients.flat_grads.get(flat) if flat is not None else None
        if flat is None:
            return None
        if gradient is None or not self._gradients.has_grads:
            return get_autograd_grad(flat.parameters[info.index])  # what somebody has put there
        self.check_states_reloaded()
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"the gradient of {info.name!r} is read inside a backward, which has not reduced it yet: read "
                "parameter.grad when backward() has returned"
            )
        self._order.begin_pass("read the gradients")
        self._gradients.sync_used_params()
        if not gradient.is_param_used[info.index] or gradient.shard is None or not gradient.has_shard:
            return None
        is_whole = self._comm.shard_axis.size == 1 and self._comm.tensor_axis.size == 1
        if not is_whole or self.loss_scale is not None or self._gradients.inverse_scale is not None:
            cleared = self._gradients.clear_count
            return ShardedGradient(
                ParamGradHandle(self, self._gradients, self._comm, self._order, gradient, info.index, cleared)
            )
        self._gradients.apply_clip_coef()
        self.invalidate_speculation()  # whoever has it may write into it
        flat.wait_for_update()  # an update of its values may still read it
        gradient.clear_norms()
        gradient.wait_copy()
        self._gradients.memory.is_exposed = True
        return flat.view(gradient.shard, info.index)

    def clear_grad(self, info: ParamInfo) -> None:
        """Forget the gradient of one parameter."""
        flat = info.flat()
        gradient = self._gradients.flat_grads.get(flat) if flat is not None else None
        if flat is not None and gradient is None:  # frozen
            pop_autograd_grads([flat.parameters[info.index]])
        if flat is not None and gradient is not None:
            if self._gradients.memory.has_grads:
                self.check_states_reloaded()
            self.invalidate_speculation()
            self._gradients.prepare_write(gradient)
            gradient.clear_param(info.index)
            if not any(gradient.is_param_used):
                self._gradients.clear_if_empty()

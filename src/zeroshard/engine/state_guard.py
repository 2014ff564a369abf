"""StateGuard: the states a model keeps from one step to the next, and when they may be read or changed."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from zeroshard.engine.context import ShardContext
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.param_data import pop_autograd_grads, zero_autograd_grads
from zeroshard.engine.parameter import param_info
from zeroshard.engine.unit import Unit, UnitState
from zeroshard.engine.unit_values import edited_params, write_back
from zeroshard.utils.profiling import label

AVERAGED_ERROR = (
    "inside `with ema.swapped():`, where the model has the averages of its parameters in place of their values: leave "
    "the block first"
)


class ReplicaSteps(dict[int, int]):
    """The steps of each optimizer, by number, since replicas that train alone were averaged: ``Config.local_steps``."""

    @property
    def are_replicas_equal(self) -> bool:
        return not any(self.values())

    def check_equal(self, call: str) -> None:
        """Raise if replicas differ: ``call`` would take the values of one and drop those of the others."""
        if not self.are_replicas_equal:
            raise RuntimeError(
                f"{call}: the replicas have trained {max(self.values())} steps alone since their last average "
                "(local_steps), and each has its own values: call zeroshard.average_replicas(model) first"
            )

    def warn_if_different(self, call: str) -> None:
        """Warn if replicas differ: ``call`` gives each rank the values of its own replica."""
        if not self.are_replicas_equal:
            warnings.warn(
                f"{call} between two averages of the replicas (local_steps): it gives the values of this rank's "
                "replica, and others have their own. Call zeroshard.average_replicas(model) first for those of all",
                stacklevel=4,
            )


class StateGuard:
    """Guards the parameters, gradients and optimizer states of one model outside forward and backward.

    A step returns while CPU updates, and all-gathers of their results, may be pending. So an access between steps
    begins with :meth:`prepare_read` or :meth:`prepare_write`, and a write to the master weights ends with
    :meth:`sync_from_masters`. Changing only gradients takes less: :meth:`invalidate_speculation`. ``gathered()`` waits
    for updates when its block begins, and for readers when it writes.
    """

    def __init__(self, context: ShardContext, units: list[Unit], gradients: Gradients) -> None:
        self._units, self._gradients, self._comm, self._order = units, gradients, context.comm, context.order
        self.replicated_units = [unit for unit in units if not unit.is_partitioned]
        self.invalid_states: dict[str, str] = {}  # states that are invalid → error text
        self.pending_reads: list[Callable[[], None]] = []  # waits, to be called before the states change
        self.check_tiers = context.tiers.check_disk  # raises if offloaded states cannot be read
        self.offloaded_states: object | None = None  # set while offload_states() holds all states
        self.has_loss_scale = False  # set by the optimizer with fp16
        self.averages: weakref.WeakSet[Any] = weakref.WeakSet()  # every EMA of the model
        self.has_averages = False  # whether the parameters are an EMA's averages: inside EMA.swapped()
        self.frozen_flats = [flat for unit in units for flat in unit.flats if not flat.spec.is_trainable]
        self._tracks_changed_values = any(flat.spec.tracks_changed_values for unit in units for flat in unit.flats)
        self._has_exposed_grads = False  # whether replicated parameters expose their reduced gradients
        self.replica_steps = ReplicaSteps()

    # -- whether they may be used -------------------------------------------------------------------------------

    @property
    def has_valid_states(self) -> bool:
        """Whether the states are valid, and where the model uses them."""
        return not self.invalid_states and self.offloaded_states is None

    def check_before_forward(self) -> None:
        """Raise if a forward would compute with other values than the user expects; take over the user's edits."""
        self.check_valid(*self.invalid_states)
        self.check_states_reloaded()
        if torch.is_grad_enabled():  # an evaluation may use other values for a while, which masters would round
            _check_frozen(self.frozen_flats)  # PEFT's set_adapter() sets requires_grad also for an inference
            self.sync_user_edits()

    def detect_forward_edits(self) -> None:
        """Check whether a forward has changed replicated parameters through ``parameter.data``."""
        for unit in self.replicated_units:
            if unit.state is UnitState.UNSHARDED:
                unit.replicated_edits.check_forward()

    def check_states_reloaded(self) -> None:
        """Raise while the states are offloaded by offload_states()."""
        if self.offloaded_states is not None:
            raise RuntimeError(
                "the model's states are in host memory since zeroshard.offload_states(): call "
                "zeroshard.reload_states(model) first"
            )

    def check_valid(self, *parts: str) -> None:
        """Raise if one of the given states ("weights", "optimizer") is invalid."""
        for part in parts:
            if part in self.invalid_states:
                raise RuntimeError(self.invalid_states[part])

    def frozen_params_with_grads(self) -> list[str]:
        """Return the names of parameters that were frozen at shard() and have got a gradient since."""
        with torch._C.DisableTorchFunctionSubclass():
            return [name for flat in self.frozen_flats for name, p in flat.named_parameters if p._grad is not None]

    def clear_frozen_grads(self, names: Collection[str], set_to_none: bool) -> None:
        """Clear gradients that the user has set on the named parameters, of those that were frozen at shard()."""
        named = [p for flat in self.frozen_flats for name, p in flat.named_parameters if name in names]
        pop_autograd_grads(named) if set_to_none else zero_autograd_grads(named)

    def check_not_averaged(self, call: str) -> None:
        """Raise inside EMA.swapped(): ``call`` would change the averages instead of the model."""
        if self.has_averages:
            raise RuntimeError(f"{call} {AVERAGED_ERROR}")

    def check_not_gathered(self, call: str) -> None:
        """Raise inside gathered(): the parameters there are copies, so ``call`` would not change them."""
        self.check_not_averaged(call)
        if any(unit.has_gathered_copy for unit in self._units):
            raise RuntimeError(
                f"{call} inside `with zeroshard.gathered()`: it would change the states, and the parameters inside are "
                "copies of what they were. Leave the block first"
            )

    def check_no_pending_edits(self) -> None:
        """Raise if a parameter was edited inside gathered(): the states about to be read do not have the edit yet."""
        infos = [
            param_info(parameter) for unit in self._units if unit.has_gathered_copy for parameter in edited_params(unit)
        ]
        if infos and infos[0] is not None:
            raise RuntimeError(
                f"{infos[0].name!r} was edited inside `with zeroshard.gathered()`, and the states do not have it yet: "
                "leave the block first (with write_rank=… the edit counts, without it is undone)"
            )

    # -- edits by the user ------------------------------------------------------------------------------------------

    def sync_user_edits(self) -> None:
        """Copy the user's edits of replicated parameters to their masters: see [Note: edits of parameters]."""
        edited = [
            unit
            for unit in self.replicated_units
            if not unit.has_gathered_copy and unit.replicated_edits.is_edited(unit.state is UnitState.UNSHARDED)
        ]
        if edited:
            self.wait_readers()
            self.invalidate_speculation()
            self._gradients.reducer.listeners.wait()  # else a pending update would overwrite the edits
            self.check_tiers()
            for unit in edited:
                self.gather_updated_unit(unit)
                unit.wait_for_unshard()
        for unit in edited:
            write_back(unit, self._comm, None)
            unit.replicated_edits.record_versions()

    def on_values_changed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Increment the version of changed parameters: backward over an older graph then raises, as in plain torch."""
        torch.autograd.graph.increment_version(list(parameters))
        for unit in self._units:
            if unit.is_partitioned:
                unit.accept_edits()
            else:
                unit.replicated_edits.record_versions()

    # -- access between steps -----------------------------------------------------------------------------------

    def prepare_read(self, what: str, part: str) -> None:
        """Prepare to read one part of the states, "weights" or "optimizer". All ranks call it together."""
        if part == "weights":
            self.check_no_pending_edits()
        self._order.begin_pass(f"to {what}")
        self.wait_updates()
        self.check_valid(part)

    def prepare_write(self) -> None:
        """Prepare to change the states: nobody else reads or writes them until the next forward or step."""
        self.wait_readers()
        self.invalidate_speculation()  # first: a speculative update reads gradients
        self.wait_updates()

    def wait_readers(self) -> None:
        """Wait for pending readers of the states, before these change."""
        waits, self.pending_reads = self.pending_reads, []
        for wait in waits:
            wait()

    def invalidate_speculation(self) -> None:
        """Invalidate speculative updates, because the gradients they were computed from may change."""
        if self._gradients.reducer.listeners:
            self._gradients.reducer.listeners.invalidate()

    def apply_clip(self) -> None:
        """Apply a clip of all gradients that no step has applied yet, because a part of them is about to change."""
        if self._gradients.scaling.scale.clip_coef is not None:
            self.invalidate_speculation()
            self._gradients.scaling.apply()

    def wait_updates(self) -> None:
        """Wait for the updates and all-gathers that a step has started; raise if the states cannot be read."""
        self._wait_updates()
        self.sync_user_edits()

    def _wait_updates(self) -> None:
        self.check_states_reloaded()
        self._gradients.reducer.listeners.wait()
        self.check_tiers()
        for unit in self.replicated_units:
            self.gather_updated_unit(unit)
            unit.wait_for_unshard()

    def gather_updated_unit(self, unit: Unit) -> None:
        """All-gather the new values of a replicated unit whose states are updated on the host.

        All ranks use the same order, so stale units earlier in that order are gathered first, even if this rank does
        not need them.
        """
        if self._comm.shard_axis.size == 1 and unit.state is UnitState.STALE:
            unit.start_unshard()
        while unit.state is UnitState.STALE:
            first = next(other for other in self._gather_order() if other.state is UnitState.STALE)
            self._order.check(first.all_gather_label)
            first.start_unshard()

    def gather_updated_units(self) -> None:
        """All-gather the units that this forward did not need, because another rank's forward may have."""
        for unit in self._gather_order() if self._comm.shard_axis.size > 1 else ():
            self.gather_updated_unit(unit)
            unit.wait_for_unshard()

    def _gather_order(self) -> list[Unit]:
        """Return the replicated units in the forward order that all ranks have confirmed."""
        queue = self._gradients.reduce_queue
        return queue.order[::-1] if queue.is_agreed and self.replicated_units else self.replicated_units

    def copy_masters(self, flats: Iterable[FlatParam], device_only: bool = False) -> None:
        """Copy the masters (``device_only``: those on the device) into this rank's shard of the compute parameters."""
        pairs = [flat.master_copy_lists(device_only) for flat in flats]
        targets = [target for shards, _ in pairs for target in shards]
        if targets:
            with label("copy master weights"):
                torch._foreach_copy_(targets, [source for _, values in pairs for source in values], non_blocking=True)

    def begin_update(self, units: Iterable[Unit], flats: Iterable[FlatParam]) -> None:
        """Wait for all-gathers of these units that read what is about to change: the values of ``flats``."""
        for flat in flats if self._tracks_changed_values else ():  # not all of a unit: it may have several optimizers
            flat.mark_values_changed()  # here, because they have changed also if the update raises
        for unit in units:
            if unit.state is UnitState.UNSHARDING and not unit.is_partitioned:
                unit.wait_for_unshard()

    def start_param_refresh(self, units: Iterable[Unit]) -> None:
        """Start the all-gather of every rank's updated shard of these units, if it is not left to the next forward."""
        for unit in (unit for unit in units if not unit.is_partitioned):
            if unit.is_trainable and any(flat.spec.tier_placement.has_offloaded_optimizer for flat in unit.flats):
                unit.mark_stale()
            elif unit.is_trainable and self._comm.shard_axis.size > 1:
                self._order.check(unit.all_gather_label)
                unit.start_unshard()

    def sync_from_masters(self) -> None:
        """Update the compute parameters from shards and masters that were written."""
        self._order.begin_pass("take in new values")
        self.on_values_changed(parameter for unit in self._units for parameter in unit.parameters)
        self._wait_updates()  # without sync_user_edits(): the written values win over the parameters'
        self.invalidate_speculation()
        self.copy_masters(flat for unit in self._units for flat in unit.flats)
        for unit in self._units:
            unit.mark_values_changed()
            if self._comm.shard_axis.size > 1 and not unit.is_partitioned:
                self._order.check(unit.all_gather_label)
                unit.start_unshard(include_frozen=True)
        self._wait_updates()
        for unit in self.replicated_units:
            unit.replicated_edits.accept_values()

    def write_back_params(self) -> None:
        """Write values of replicated parameters, the same on all ranks, back to shards and masters."""
        self.prepare_write()
        for unit in self.replicated_units:
            if not unit.has_gathered_copy:  # else gathered() decides about the edit
                write_back(unit, self._comm, None)
                unit.replicated_edits.record_versions()

    # -- gradients, as parameters expose them -------------------------------------------------------------------

    def expose_reduced_grads(self, unsharded: Iterable[Unit] = ()) -> None:
        """Make replicated parameters expose their reduced gradients, and record reads of ``data``: see unit.py.

        The same for the partitioned units in ``unsharded``. During forward and backward, parameters have autograd's
        gradients.
        """
        units = (*self.replicated_units, *unsharded)
        has_grads = bool(units) and self._gradients.has_grads
        for unit in units:
            if has_grads or unit.detects_edits:
                unit.expose_reduced_grads()
                self._has_exposed_grads = True

    def hide_reduced_grads(self, unsharded: Iterable[Unit] = ()) -> None:
        """Undo :meth:`expose_reduced_grads`."""
        if self._has_exposed_grads:
            for unit in (*self.replicated_units, *unsharded):
                unit.hide_reduced_grads()
            self._has_exposed_grads = False


def _check_frozen(flats: list[FlatParam]) -> None:
    """Raise if a parameter that was frozen at shard() requires a gradient now: there is no memory for it."""
    with torch._C.DisableTorchFunctionSubclass():
        unfrozen = [name for flat in flats for name, p in flat.named_parameters if p.requires_grad]
    if unfrozen:
        raise RuntimeError(
            f"{unfrozen[0]!r} was frozen when shard() was called and requires a gradient now: call "
            "zeroshard.unwrap(), set requires_grad, and shard again"
        )

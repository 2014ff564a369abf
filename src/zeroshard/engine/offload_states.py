"""Move all states of a model to host memory for a while, and reload them, byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroshard.engine.engine import Engine
from zeroshard.memory import STATE_KINDS


class OffloadedStates:
    """Host copies of the states on the device. Their storages are emptied, and filled again by :meth:`reload`.

    Tensors keep viewing the same storages, so references to them stay valid.
    """

    def __init__(self, engine: Engine, optimizer_states: Callable[[], list[torch.Tensor]]) -> None:
        self._engine, self._tiers = engine, engine.context.tiers
        self._host_copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        _check_resizable(_device_tensors(engine) + optimizer_states())  # before anything changes
        engine.state_guard.prepare_write()
        engine.gradients.wait_reductions()
        engine.release_retained()
        tensors = _device_tensors(engine) + optimizer_states()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.untyped_storage().size()}
        try:
            for storage in storages.values():
                host_copy = self._tiers.alloc_temp(storage.nbytes())
                self._host_copies.append((storage, host_copy))
                host_copy.copy_(_as_bytes(storage), non_blocking=True)
        except BaseException:
            self._free_host_copies()
            raise
        self._synchronize()
        for storage in storages.values():
            storage.resize_(0)
        kinds = {
            kind: engine.context.tracker.by_kind.get((kind, "device")) for kind in (*STATE_KINDS, "error feedback")
        }
        self._tracked_bytes = {kind: usage.now for kind, usage in kinds.items() if usage is not None}
        for kind, nbytes in self._tracked_bytes.items():
            engine.context.tracker.add(kind, -nbytes)
        for unit in engine.state_guard.replicated_units:
            unit.release_to_host()
        engine.context.pool.reset()

    def reload(self) -> None:
        """Copy all states back to the device, and free the host copies."""
        self._engine.context.pool.reserve(host_copy.nbytes for _, host_copy in self._host_copies)
        with self._engine.context.pool:
            for storage, host_copy in self._host_copies:
                storage.resize_(host_copy.nbytes)
                _as_bytes(storage).copy_(host_copy, non_blocking=True)
        self._synchronize()
        self._free_host_copies()
        for kind, nbytes in self._tracked_bytes.items():
            self._engine.context.tracker.add(kind, nbytes)
        for unit in self._engine.state_guard.replicated_units:
            unit.restore_from_host()

    def _free_host_copies(self) -> None:
        for _, host_copy in self._host_copies:
            self._tiers.free_temp(host_copy)
        self._host_copies = []

    def _synchronize(self) -> None:
        if self._engine.comm.device.type == "cuda":
            torch.cuda.synchronize(self._engine.comm.device)


def _device_tensors(engine: Engine) -> list[torch.Tensor]:
    """Return the tensors on the device that hold parameters, masters, gradients, their residuals, and averages."""
    flats = [flat for unit in engine.units for flat in unit.flats]
    tensors = [flat.full for flat in flats if not flat.is_partitioned]
    tensors += [flat.shard for flat in flats if flat.shard is not None and not flat.spec.has_offloaded_params]
    tensors += [flat.inner.tensor for flat in flats if flat.inner is not None]
    for flat in flats:
        tensors += [
            segment.tensor
            for segment in (flat.master.segments if flat.master is not None else ())
            if not segment.is_offloaded
        ]
    for gradient in engine.gradients.flat_grads.values():
        on_device = [gradient.local_sum, gradient.inner_sum, gradient.carried_over]
        on_device += [] if gradient.is_offloaded else [gradient.shard]
        tensors += [tensor for tensor in on_device if tensor is not None]
    tensors += engine.gradients.reducer.residuals()
    return tensors + [tensor for ema in engine.state_guard.averages for tensor in ema.device_tensors()]


def _check_resizable(tensors: list[torch.Tensor]) -> None:
    """Raise if a storage cannot be emptied, because something outside this process or torch holds its memory."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        is_shared = storage.device.type == "cpu" and storage.is_shared()
        if is_shared or not storage.resizable():
            who = "is shared with other processes" if is_shared else "is held by an array of NumPy or another library"
            raise RuntimeError(
                f"the states cannot be moved: the memory of {tensor.numel()} elements of them {who}. Share or convert "
                "a copy instead, such as parameter.detach().clone(), and shard the model again"
            )


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a uint8 view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

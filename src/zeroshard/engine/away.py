"""Away: all states of a model in host memory for a while, and back where they were, byte for byte."""

from __future__ import annotations

import torch

from zeroshard.engine.engine import Engine
from zeroshard.memory.ledger import STATES
from zeroshard.memory.tiers import Tiers


class Away:
    """The states that rested on a device. Their storages are emptied, and filled again by :meth:`back`.

    Tensors that view a storage go on doing so: nobody who holds one has to be told.
    """

    def __init__(self, engine: Engine, tiers: Tiers) -> None:
        self._engine, self._tiers = engine, tiers
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        _refuse_fixed(_on_device(engine))  # before anything changes
        engine.states.settle()
        engine.states.doubt()  # first: what is made ahead of the step reads gradients that are about to go
        engine.states.finish_updates()
        engine.gradients.end_reductions()
        engine.drop_pins()
        tensors = _on_device(engine)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.untyped_storage().size()}
        try:
            for storage in storages.values():
                kept = tiers.borrow(storage.nbytes())
                self._kept.append((storage, kept))
                kept.copy_(_line(storage), non_blocking=True)
        except BaseException:
            self._give_back()
            raise
        self._synchronise()
        for storage in storages.values():
            storage.resize_(0)
        kinds = {kind: engine.ledger.kinds.get((kind, "device")) for kind in STATES}
        self._counted = {kind: held.now for kind, held in kinds.items() if held is not None}
        for kind, nbytes in self._counted.items():
            engine.ledger.add(kind, -nbytes)
        for unit in engine.states.resident:
            unit.leave()
        engine.pool.renew()

    def back(self) -> None:
        """Bring everything back."""
        self._engine.pool.make_room(kept.nbytes for _, kept in self._kept)
        with self._engine.pool:
            for storage, kept in self._kept:
                storage.resize_(kept.nbytes)
                _line(storage).copy_(kept, non_blocking=True)
        self._synchronise()
        self._give_back()
        for kind, nbytes in self._counted.items():
            self._engine.ledger.add(kind, nbytes)
        for unit in self._engine.states.resident:
            unit.come_back()

    def _give_back(self) -> None:
        for _, kept in self._kept:
            self._tiers.give_back(kept)
        self._kept = []

    def _synchronise(self) -> None:
        if self._engine.comm.device.type == "cuda":
            torch.cuda.synchronize(self._engine.comm.device)


def _on_device(engine: Engine) -> list[torch.Tensor]:
    """Every tensor of a model's states that rests on the device."""
    flats = [flat for unit in engine.units for flat in unit.flats]
    tensors = [flat.full for flat in flats if not flat.partitioned]
    tensors += [flat.shard for flat in flats if flat.shard is not None and not flat.far]
    for flat in flats:
        tensors += [s.tensor for s in (flat.master.stretches if flat.master is not None else ()) if not s.far]
    for gradient in engine.gradients.of_flat.values():
        near = [gradient.local, gradient.carried, None if gradient.far else gradient.shard]
        tensors += [tensor for tensor in near if tensor is not None]
    states = engine.states.on_device()
    return tensors + (states() if states is not None else [])


def _refuse_fixed(tensors: list[torch.Tensor]) -> None:
    """Raise where a storage cannot be emptied, because others outside torch hold its memory."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        is_shared = storage.device.type == "cpu" and storage.is_shared()
        if is_shared or not storage.resizable():
            who = "is shared with other processes" if is_shared else "is held by an array of NumPy or another library"
            raise RuntimeError(
                f"the states cannot be moved: the memory of {tensor.numel()} elements of them {who}. Share or convert "
                "a copy instead, such as parameter.detach().clone(), and shard the model again"
            )


def _line(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

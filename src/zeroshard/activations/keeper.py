"""Keeper: what one model's blocks need to run again, by device, and which calls of them came last."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.activations.store import Store
from zeroshard.comm import Axis, Communicator
from zeroshard.engine.parameter import card_of
from zeroshard.memory.ledger import Ledger

if TYPE_CHECKING:
    from zeroshard.activations.call import Call, Part


class Keeper:
    """Keeps the inputs of one model's blocks, whether the model is plain, sharded, or plain again."""

    def __init__(self, partition: bool | DeviceMesh | None, offload: bool) -> None:
        self._partition = partition
        self._mesh_axis = Axis.of(partition.get_group(0)) if isinstance(partition, DeviceMesh) else None
        self._offload = offload
        self._stores: dict[torch.device, Store] = {}
        self.ledger: Ledger | None = None  # of the sharded model
        self._known: Any = WeakIdKeyDictionary()  # tensor → (its version, what is kept of it, weakly)
        self._parameters: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Parameter]] = weakref.WeakKeyDictionary()
        self.last: weakref.ref[Call] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Keeper:
        """A copied model keeps inputs of its own, over the same ranks."""
        return Keeper(self._partition, self._offload)

    def __reduce__(self) -> Any:
        """What was chosen, without what is kept."""
        if isinstance(self._partition, DeviceMesh):
            raise TypeError(
                "a model whose activations are partitioned over a DeviceMesh cannot be pickled: undo it first with "
                "zeroshard.checkpoint_activations(model, ())"
            )
        return Keeper, (self._partition, self._offload)

    def look_up(self, block: nn.Module) -> tuple[Communicator | None, Axis]:
        """How a block's model communicates now, and the axis its inputs are divided over."""
        parameter = self._first_of(block)
        card = card_of(parameter) if parameter is not None else None
        engine = card.engine if card is not None else None
        ledger = engine.ledger if engine is not None else None
        if ledger is not self.ledger:
            self.ledger = ledger
            for store in self._stores.values():
                store.charge(ledger)
        comm = engine.comm if engine is not None else None
        return comm, self._axis(comm)

    def _first_of(self, block: nn.Module) -> nn.Parameter | None:
        """Any parameter of a block: looking for one takes longer than all else here."""
        known = self._parameters.get(block)
        parameter = known() if known is not None else None
        if parameter is None:
            parameter = next(block.parameters(), None)
            if parameter is not None:
                self._parameters[block] = weakref.ref(parameter)
        return parameter

    def _axis(self, comm: Communicator | None) -> Axis:
        if self._mesh_axis is not None:
            return self._mesh_axis
        if self._partition is True and (comm is None or comm.tensor.size == 1):
            raise RuntimeError(
                "checkpoint_activations(partition=True) divides activations over the model's tensor axis, and this "
                "model has none: shard it with a mesh whose last axis is named 'tensor', or give the DeviceMesh"
            )
        return Axis(None, 1, 0) if self._partition is False or comm is None else comm.tensor

    def store(self, device: torch.device) -> Store:
        """Where the activations of a device are kept."""
        if device not in self._stores:
            self._stores[device] = Store(device, self._offload)
            self._stores[device].charge(self.ledger)
        return self._stores[device]

    def find(self, tensor: torch.Tensor) -> Part | None:
        """What is kept of this very tensor already, for another block."""
        version, part = self._known.get(tensor, (-1, None))
        return part() if part is not None and version == tensor._version else None

    def remember(self, tensor: torch.Tensor, part: Part) -> None:
        """Have :meth:`find` find it, as long as somebody needs it."""
        self._known[tensor] = (tensor._version, weakref.ref(part))

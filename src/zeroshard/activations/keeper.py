"""Keeper: what one model's blocks need to run again, by device, and which calls of them came last."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.activations.store import ActivationStore
from zeroshard.comm import Communicator, MeshAxis
from zeroshard.engine.parameter import param_info
from zeroshard.memory.ledger import MemoryTracker

if TYPE_CHECKING:
    from zeroshard.activations.call import BlockCall, SavedInput


class RecomputeContext:
    """Keeps the inputs of one model's blocks, whether the model is plain, sharded, or plain again."""

    def __init__(self, partition: bool | DeviceMesh | None, offload: bool) -> None:
        self._partition = partition
        self._mesh_axis = MeshAxis.from_group(partition.get_group(0)) if isinstance(partition, DeviceMesh) else None
        self._offload = offload
        self._stores: dict[torch.device, ActivationStore] = {}
        self.tracker: MemoryTracker | None = None  # of the sharded model
        self._saved_by_tensor: Any = WeakIdKeyDictionary()  # tensor → (its version, what is kept of it, weakly)
        self._param_by_block: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Parameter]] = (
            weakref.WeakKeyDictionary()
        )
        self.last_call: weakref.ref[BlockCall] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RecomputeContext:
        """A copied model keeps inputs of its own, over the same ranks."""
        return RecomputeContext(self._partition, self._offload)

    def __reduce__(self) -> Any:
        """What was chosen, without what is kept."""
        if isinstance(self._partition, DeviceMesh):
            raise TypeError(
                "a model whose activations are partitioned over a DeviceMesh cannot be pickled: undo it first with "
                "zeroshard.checkpoint_activations(model, ())"
            )
        return RecomputeContext, (self._partition, self._offload)

    def find_comm_and_axis(self, block: nn.Module) -> tuple[Communicator | None, MeshAxis]:
        """How a block's model communicates now, and the axis its inputs are divided over."""
        parameter = self._first_param(block)
        card = param_info(parameter) if parameter is not None else None
        engine = card.engine if card is not None else None
        ledger = engine.tracker if engine is not None else None
        if ledger is not self.tracker:
            self.tracker = ledger
            for store in self._stores.values():
                store.set_tracker(ledger)
        comm = engine.comm if engine is not None else None
        return comm, self._partition_axis(comm)

    def _first_param(self, block: nn.Module) -> nn.Parameter | None:
        """Any parameter of a block: looking for one takes longer than all else here."""
        known = self._param_by_block.get(block)
        parameter = known() if known is not None else None
        if parameter is None:
            parameter = next(block.parameters(), None)
            if parameter is not None:
                self._param_by_block[block] = weakref.ref(parameter)
        return parameter

    def _partition_axis(self, comm: Communicator | None) -> MeshAxis:
        if self._mesh_axis is not None:
            return self._mesh_axis
        if self._partition is True and (comm is None or comm.tensor_axis.size == 1):
            raise RuntimeError(
                "checkpoint_activations(partition=True) divides activations over the model's tensor axis, and this "
                "model has none: shard it with a mesh whose last axis is named 'tensor', or give the DeviceMesh"
            )
        return MeshAxis(None, 1, 0) if self._partition is False or comm is None else comm.tensor_axis

    def store_for(self, device: torch.device) -> ActivationStore:
        """Where the activations of a device are kept."""
        if device not in self._stores:
            self._stores[device] = ActivationStore(device, self._offload)
            self._stores[device].set_tracker(self.tracker)
        return self._stores[device]

    def find_saved(self, tensor: torch.Tensor) -> SavedInput | None:
        """What is kept of this very tensor already, for another block."""
        version, part = self._saved_by_tensor.get(tensor, (-1, None))
        return part() if part is not None and version == tensor._version else None

    def record_saved(self, tensor: torch.Tensor, saved_input: SavedInput) -> None:
        """Have :meth:`find` find it, as long as somebody needs it."""
        self._saved_by_tensor[tensor] = (tensor._version, weakref.ref(saved_input))

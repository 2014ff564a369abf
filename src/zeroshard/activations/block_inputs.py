"""Call: one run of a checkpointed block, and the inputs that are kept to run it again.

[Note: P_a]
Along a tensor axis all ranks give a block the same inputs, so each of N ranks keeps one part of ``ceil(elements / N)``,
and an all-gather makes the whole just before the block runs again::

    input           | a b c d e f g |           7 elements, as they lie in memory
    3 ranks keep    | a b c | d e f | g · · |   the last part is filled up
    an all-gather   | a b c d e f g · · |       the block is given a view of the first 7

What no earlier block has made stays by reference: tensors without a gradient (masks, rotary tables, token ids) and
leaves. All blocks share those, and their owner has them anyway. A tensor that goes into several blocks (an encoder's
output) is kept once.

Backward is given a copy, never the kept bytes themselves: those are written again in the next forward, while somebody
may still hold the copy (a graph made by ``create_graph=True``, a hook that collects activations).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.activations.replica_check import check_replicated
from zeroshard.activations.store import ActivationStore, SavedActivation
from zeroshard.activations.tensor_layout import TensorLayout
from zeroshard.comm.collectives import Communicator, MeshAxis, all_gather_sync
from zeroshard.engine.parameter import param_info
from zeroshard.memory.tracker import MemoryTracker


@dataclass(frozen=True, eq=False)
class InputReference:
    """An input that stays where it is."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, eq=False)
class SavedInput:
    """What this rank keeps of an input."""

    store: ActivationStore
    saved: SavedActivation
    layout: TensorLayout
    axis: MeshAxis
    dtensor_spec: DTensorSpec | None  # of a DTensor
    full_copy: torch.Tensor | None = None  # the input itself, where all of it stays on the device


@dataclass(frozen=True)
class DTensorSpec:
    """How a DTensor lies on its mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> DTensorSpec | None:
        """Describe a DTensor; None for any other tensor."""
        if not isinstance(tensor, DTensor):
            return None
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def to_dtensor(self, local: torch.Tensor) -> DTensor:
        """The DTensor of which this rank has ``local``."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class BlockCall:
    """One run of a block: packs its inputs in forward, unpacks them in backward."""

    def __init__(self, name: str, context: RecomputeContext, block: nn.Module) -> None:
        self._name = name
        self._context = context
        self._comm, self.axis = context.find_comm_and_axis(block)
        self._saved_inputs: list[SavedInput] = []
        self._previous_call, context.last_call = context.last_call, weakref.ref(self)

    def check_inputs_replicated(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Refuse inputs that are not the same on all ranks of the axis; tell whether there were any to compare."""
        if self.axis.size == 1:
            return True
        divided = [tensor for tensor in inputs if not _is_kept_by_reference(tensor)]
        for tensor in divided:
            if isinstance(tensor, DTensor) and not _is_replicated(tensor, self.axis):
                raise ValueError(
                    f"an input of block {self._name!r} is a DTensor with placements {tensor.placements}: the ranks it "
                    "would be divided over have different parts of it. checkpoint_activations(partition=…) needs "
                    "Replicate() there; otherwise give partition=False"
                )
        with torch.no_grad():
            check_replicated(self._name, [_local_tensor(tensor) for tensor in divided], self.axis)
        return bool(divided)

    def pack(self, tensor: torch.Tensor) -> InputReference | SavedInput:
        """Keep an input."""
        if _is_kept_by_reference(tensor):
            return InputReference(tensor, _version_counter(tensor))
        part = self._context.find_saved(tensor)
        if part is None or part.axis != self.axis:
            part = self._save(tensor)
            self._context.record_saved(tensor, part)
        self._saved_inputs.append(part)
        return part

    def unpack(self, packed: InputReference | SavedInput) -> torch.Tensor:
        """Give an input back."""
        if isinstance(packed, InputReference):
            if packed.version != _version_counter(packed.tensor):
                raise RuntimeError(f"{_modified_input_message(self._name)} before backward came to the block.")
            return packed.tensor
        if packed.full_copy is not None:
            return packed.full_copy.clone()
        near = list(self._needed_on_device())
        packed.store.evict_except(part.saved for part in near)
        for part in near:
            part.store.prefetch(part.saved)
        return self._gather_full(packed)

    def input_versions(self, inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """What :meth:`check_inputs_unchanged` compares with: the inputs that are copied, before the block runs."""
        return [(tensor, _version_counter(tensor)) for tensor in inputs if not _is_kept_by_reference(tensor)]

    def check_inputs_unchanged(self, versions: list[tuple[torch.Tensor, int]]) -> None:
        """Refuse a block that has written into its inputs."""
        if any(_version_counter(tensor) != version for tensor, version in versions):
            raise RuntimeError(f"{_modified_input_message(self._name)} by the block itself.")

    def _needed_on_device(self) -> Iterator[SavedInput]:
        """What should be on the device: see [Note: near and far]."""
        before = self._previous_call() if self._previous_call is not None else None
        yield from self._saved_inputs
        yield from before._saved_inputs if before is not None else ()

    @torch.no_grad()
    def _save(self, tensor: torch.Tensor) -> SavedInput:
        local = _local_tensor(tensor).resolve_conj().resolve_neg()
        form, store = TensorLayout.from_tensor(local), self._context.store_for(local.device)
        if self.axis.size == 1 and local is tensor and form.is_dense and not store.is_offloaded:
            kept = store.save_full(local)  # few operations: most blocks are kept so
            return SavedInput(store, kept, form, self.axis, None, kept.full_copy)
        length = -(-form.unexpanded_numel // self.axis.size)
        values = form.flatten(local)[length * self.axis.rank : length * (self.axis.rank + 1)]
        store.evict_except(part.saved for part in self._needed_on_device())
        kept = store.save(values, length * local.itemsize)
        return SavedInput(store, kept, form, self.axis, DTensorSpec.from_tensor(tensor))

    @torch.no_grad()
    def _gather_full(self, saved_input: SavedInput) -> torch.Tensor:
        mine, form, axis = saved_input.store.load(saved_input.saved), saved_input.layout, saved_input.axis
        whole = mine.new_empty(axis.size * mine.numel())
        if axis.size == 1:
            whole.copy_(mine)
        elif self._comm is not None:
            self._comm.all_gather_activation(whole, mine, axis, f"gather the input of block {self._name!r}").wait()
        else:
            all_gather_sync(whole, mine, axis)
        local = form.unflatten(whole.view(form.dtype)[: form.unexpanded_numel])
        return local if saved_input.dtensor_spec is None else saved_input.dtensor_spec.to_dtensor(local)


def _is_kept_by_reference(tensor: torch.Tensor) -> bool:
    """Whether an input is kept by reference: see [Note: P_a]. So are kinds of tensors that have no plain memory."""
    plain = type(tensor) in (torch.Tensor, DTensor, AsyncCollectiveTensor) and tensor.layout is torch.strided
    return tensor.grad_fn is None or not plain or tensor.is_meta or tensor.numel() == 0


def _version_counter(tensor: torch.Tensor) -> int:
    """How often it was changed in place. Parameters change under the engine's hands, and are no activations."""
    return 0 if tensor.is_inference() or isinstance(tensor, nn.Parameter) else tensor._version


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _is_replicated(tensor: DTensor, axis: MeshAxis) -> bool:
    ranks = dist.get_process_group_ranks(axis.group)
    return all(
        placement.is_replicate() or dist.get_process_group_ranks(tensor.device_mesh.get_group(dim)) != ranks
        for dim, placement in enumerate(tensor.placements)
    )


def _modified_input_message(name: str) -> str:
    return (
        f"an input of block {name!r} cannot be used to run the block again, since it was changed in place: write "
        "`x = x + y` instead of `x += y`, or leave the block out of checkpoint_activations(). It was changed"
    )


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

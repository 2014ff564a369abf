"""BlockCall: one call of a checkpointed block, and the inputs saved to recompute it.

[Note: P_a]
All ranks of a tensor axis pass the same inputs to a block. So each of N ranks saves one partition of
``ceil(elements / N)`` elements, and an all-gather restores the full input just before the block is recomputed::

    input           | a b c d e f g |           7 elements, in storage order
    3 ranks save    | a b c | d e f | g · · |   the last partition is padded
    all-gather      | a b c d e f g · · |       the block gets a view of the first 7

Inputs that no earlier block produced are kept by reference: leaves and tensors without a gradient (masks, rotary
tables, token ids). All blocks share them, and their owner keeps them alive anyway. A tensor that is an input of several
blocks (an encoder's output) is saved once.

Backward gets a copy, never the saved bytes: the next forward overwrites those, while the user may still hold the copy
(a graph made by ``create_graph=True``, a hook that collects activations).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.activations.store import ActivationStore, SavedActivation
from zeroshard.activations.tensor_layout import HASH_MULTIPLIER, TensorLayout, checksum
from zeroshard.comm import Communicator, MeshAxis, all_gather_sync
from zeroshard.engine import engine_of
from zeroshard.memory import MemoryTracker


@dataclass(frozen=True, eq=False)
class InputReference:
    """An input that is kept by reference."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, eq=False)
class SavedInput:
    """This rank's saved part of an input."""

    store: ActivationStore
    saved: SavedActivation
    layout: TensorLayout
    axis: MeshAxis
    to_dtensor: Callable[[torch.Tensor], DTensor] | None  # None unless the input is a DTensor


class BlockCall:
    """One call of a block: packs its inputs in forward, unpacks them in backward."""

    def __init__(self, name: str, context: RecomputeContext, block: nn.Module) -> None:
        self._name = name
        self._context = context
        self._comm, self.axis = context.find_comm_and_axis(block)
        self._saved_inputs: list[SavedInput] = []
        self._previous_call, context.last_call = context.last_call, weakref.ref(self)

    def check_inputs_replicated(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Raise if inputs differ between the ranks of the axis; return whether there were any to compare."""
        if self.axis.size == 1:
            return True
        partitioned = [tensor for tensor in inputs if not _is_kept_by_reference(tensor)]
        for tensor in partitioned:
            if isinstance(tensor, DTensor) and not _is_replicated(tensor, self.axis):
                raise ValueError(
                    f"an input of block {self._name!r} is a DTensor with placements {tensor.placements}, so it is not "
                    "replicated over the ranks of partition=…: use Replicate() there, or pass partition=False"
                )
        with torch.no_grad():
            _check_replicated(self._name, [_local_tensor(tensor) for tensor in partitioned], self.axis)
        return bool(partitioned)

    def pack(self, tensor: torch.Tensor) -> InputReference | SavedInput:
        """Save an input, or keep it by reference."""
        if _is_kept_by_reference(tensor):
            return InputReference(tensor, _version_counter(tensor))
        saved_input = self._context.find_saved(tensor)
        if saved_input is None or saved_input.axis != self.axis:
            saved_input = self._save(tensor)
            self._context.record_saved(tensor, saved_input)
        self._saved_inputs.append(saved_input)
        return saved_input

    def unpack(self, packed: InputReference | SavedInput) -> torch.Tensor:
        """Return the full input that :meth:`pack` saved."""
        if isinstance(packed, InputReference):
            if packed.version != _version_counter(packed.tensor):
                raise RuntimeError(f"{_modified_input_message(self._name)} before the backward of the block.")
            return packed.tensor
        if packed.saved.full_copy is not None:
            return packed.saved.full_copy.clone()
        needed = list(self._needed_on_device())
        packed.store.evict_except(saved_input.saved for saved_input in needed)
        for saved_input in needed:
            saved_input.store.prefetch(saved_input.saved)
        return self._gather_full(packed)

    def input_versions(self, inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """Return the copied inputs and their versions before the block runs, for :meth:`check_inputs_unchanged`."""
        return [(tensor, _version_counter(tensor)) for tensor in inputs if not _is_kept_by_reference(tensor)]

    def check_inputs_unchanged(self, versions: list[tuple[torch.Tensor, int]]) -> None:
        """Raise if the block has modified its inputs in place."""
        if any(_version_counter(tensor) != version for tensor, version in versions):
            raise RuntimeError(f"{_modified_input_message(self._name)} by the block itself.")

    def _needed_on_device(self) -> Iterator[SavedInput]:
        """Yield the saved inputs that should be on the device: see [Note: activations on device and host]."""
        previous = self._previous_call() if self._previous_call is not None else None
        yield from self._saved_inputs
        yield from previous._saved_inputs if previous is not None else ()

    @torch.no_grad()
    def _save(self, tensor: torch.Tensor) -> SavedInput:
        local = _local_tensor(tensor).resolve_conj().resolve_neg()
        layout, store = TensorLayout.from_tensor(local), self._context.store_for(local.device)
        if self.axis.size == 1 and local is tensor and layout.is_dense and not store.is_offloaded:
            return SavedInput(store, store.save_full(local), layout, self.axis, None)  # the inputs of most blocks
        length = -(-layout.unexpanded_numel // self.axis.size)
        values = layout.flatten(local)[length * self.axis.rank : length * (self.axis.rank + 1)]
        store.evict_except(saved_input.saved for saved_input in self._needed_on_device())
        saved = store.save(values, length * local.itemsize)
        return SavedInput(store, saved, layout, self.axis, _dtensor_factory(tensor))

    @torch.no_grad()
    def _gather_full(self, saved_input: SavedInput) -> torch.Tensor:
        partition, layout, axis = saved_input.store.load(saved_input.saved), saved_input.layout, saved_input.axis
        full = partition.new_empty(axis.size * partition.numel())
        if axis.size == 1:
            full.copy_(partition)
        elif self._comm is not None:
            self._comm.all_gather(full, partition, f"gather the input of block {self._name!r}", axis).wait()
        else:
            all_gather_sync(full, partition, axis)
        local = layout.unflatten(full.view(layout.dtype)[: layout.unexpanded_numel])
        return local if saved_input.to_dtensor is None else saved_input.to_dtensor(local)


def _is_kept_by_reference(tensor: torch.Tensor) -> bool:
    """Return whether an input is kept by reference: see [Note: P_a]. So are tensors without plain strided memory."""
    plain = type(tensor) in (torch.Tensor, DTensor, AsyncCollectiveTensor) and tensor.layout is torch.strided
    return tensor.grad_fn is None or not plain or tensor.is_meta or tensor.numel() == 0


def _version_counter(tensor: torch.Tensor) -> int:
    """Return the version counter; 0 for parameters, which are not activations and which the engine modifies."""
    return 0 if tensor.is_inference() or isinstance(tensor, nn.Parameter) else tensor._version


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _dtensor_factory(tensor: torch.Tensor) -> Callable[[torch.Tensor], DTensor] | None:
    """Return a function that makes a DTensor like ``tensor`` from its local tensor; None if it is not a DTensor."""
    if not isinstance(tensor, DTensor):
        return None
    return partial(
        DTensor.from_local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _is_replicated(tensor: DTensor, axis: MeshAxis) -> bool:
    ranks = dist.get_process_group_ranks(axis.group)
    return all(
        placement.is_replicate() or dist.get_process_group_ranks(tensor.device_mesh.get_group(dim)) != ranks
        for dim, placement in enumerate(tensor.placements)
    )


def _check_replicated(name: str, inputs: Sequence[torch.Tensor], axis: MeshAxis) -> None:
    """Raise the same error on all ranks of the axis if a block's inputs differ between them."""
    device = inputs[0].device if inputs else torch.device("cpu")
    if not inputs or "fake" in dist.get_backend_config(axis.group):  # no other rank would answer
        return
    description = repr([(tuple(t.shape), t.stride(), t.dtype) for t in inputs])
    digest = int.from_bytes(hashlib.sha256(description.encode()).digest()[:8], "big", signed=True)
    values = torch.zeros(2, dtype=torch.int64, device=device)
    for tensor in inputs:
        values = values * HASH_MULTIPLIER + checksum(tensor)
    local = torch.cat([torch.tensor([digest], device=device), values])
    table = local.new_empty(axis.size, 3)
    all_gather_sync(table.view(-1), local, axis)
    first, *others = table.tolist()
    differing = [rank for rank, row in enumerate(others, start=1) if row != first]
    if differing:
        kind = "shape" if any(others[rank - 1][0] != first[0] for rank in differing) else "value"
        raise ValueError(
            f"the input of block {name!r} cannot be partitioned over {axis.size} ranks: it must be equal on all of "
            f"them, but on ranks {differing} of the axis its {kind} differs from rank 0. Pass partition= an axis whose "
            "ranks compute on the same data (a tensor axis without sequence parallelism), or partition=False"
        )


def _modified_input_message(name: str) -> str:
    return (
        f"an input of block {name!r} was modified in place, so the block cannot be recomputed from it: write "
        "`x = x + y` instead of `x += y`, or leave the block out of checkpoint_activations(). It was modified"
    )


class RecomputeContext:
    """Options and stores for the saved inputs of one model's blocks, whether the model is plain or sharded."""

    def __init__(self, partition: bool | DeviceMesh | None, offload: bool) -> None:
        self.partition = partition
        self._mesh_axis = MeshAxis.from_group(partition.get_group(0)) if isinstance(partition, DeviceMesh) else None
        self.has_offload = offload
        self._stores: dict[torch.device, ActivationStore] = {}
        self.tracker: MemoryTracker | None = None  # tracker of the sharded model
        self._saved_by_tensor: Any = WeakIdKeyDictionary()  # tensor → (version, weak SavedInput)
        self._param_by_block: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Parameter]] = (
            weakref.WeakKeyDictionary()
        )
        self.last_call: weakref.ref[BlockCall] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RecomputeContext:
        """Return a new context with the same options: a copied model saves its own inputs."""
        return RecomputeContext(self.partition, self.has_offload)

    def __reduce__(self) -> Any:
        """Pickle the options without the saved inputs."""
        if isinstance(self.partition, DeviceMesh):
            raise TypeError(
                "a model whose activations are partitioned over a DeviceMesh cannot be pickled: undo checkpointing "
                "first with zeroshard.checkpoint_activations(model, ())"
            )
        return RecomputeContext, (self.partition, self.has_offload)

    def find_comm_and_axis(self, block: nn.Module) -> tuple[Communicator | None, MeshAxis]:
        """Return the communicator of the block's model, and the axis over which the inputs are partitioned."""
        parameter = self._first_param(block)
        engine = engine_of(parameter) if parameter is not None else None
        tracker = engine.context.tracker if engine is not None else None
        if tracker is not self.tracker:
            self.tracker = tracker
            for store in self._stores.values():
                store.set_tracker(tracker)
        comm = engine.comm if engine is not None else None
        return comm, self._partition_axis(comm)

    def _first_param(self, block: nn.Module) -> nn.Parameter | None:
        """Return any parameter of a block. Cached, because the search would dominate the cost of a call."""
        param_ref = self._param_by_block.get(block)
        parameter = param_ref() if param_ref is not None else None
        if parameter is None:
            parameter = next(block.parameters(), None)
            if parameter is not None:
                self._param_by_block[block] = weakref.ref(parameter)
        return parameter

    def _partition_axis(self, comm: Communicator | None) -> MeshAxis:
        if self._mesh_axis is not None:
            return self._mesh_axis
        if self.partition is True and (comm is None or comm.tensor_axis.size == 1):
            raise RuntimeError(
                "checkpoint_activations(partition=True) partitions activations over the tensor axis, but this model "
                "has none: shard it with a mesh whose last axis is named 'tensor', or pass partition a DeviceMesh"
            )
        return MeshAxis(None, 1, 0) if self.partition is False or comm is None else comm.tensor_axis

    def store_for(self, device: torch.device) -> ActivationStore:
        if device not in self._stores:
            self._stores[device] = ActivationStore(device, self.has_offload)
            self._stores[device].set_tracker(self.tracker)
        return self._stores[device]

    def find_saved(self, tensor: torch.Tensor) -> SavedInput | None:
        """Return what another block has already saved of the same tensor."""
        version, saved_ref = self._saved_by_tensor.get(tensor, (-1, None))
        return saved_ref() if saved_ref is not None and version == tensor._version else None

    def record_saved(self, tensor: torch.Tensor, saved_input: SavedInput) -> None:
        """Let :meth:`find_saved` return ``saved_input`` as long as it is alive."""
        self._saved_by_tensor[tensor] = (tensor._version, weakref.ref(saved_input))

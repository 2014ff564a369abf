"""Buffers: running statistics and the like, which every rank holds whole and rank 0 decides, as under DDP."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from zeroshard.comm.collective_order import CollectiveOrder
from zeroshard.comm.collectives import Communicator

MAX_PACKED_ELEMENTS = (
    2**20
)  # elements of a broadcast, beyond which one more costs less than a longer one and its copies


class BufferBroadcaster:
    """Copies rank 0's buffers to all ranks before a forward, when they may have changed since the last time.

    They may have after a forward in training mode (batch norm changes its statistics without a trace in the version
    counter), or when the user has changed or replaced one. So generating or evaluating costs nothing.

    Small ones travel together, packed into at most ``bucket_size`` elements; a larger one travels where it lies.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        order: CollectiveOrder,
        enabled: bool,
        bucket_size: int = MAX_PACKED_ELEMENTS,
    ) -> None:
        self._comm = comm
        self._order = order
        self._max_packed_elements = min(bucket_size, MAX_PACKED_ELEMENTS)
        modules = [m for m in model.modules() if any(b is not None for b in m._buffers.values())]
        self._modules = [weakref.ref(module) for module in modules] if enabled and comm.data_parallel_size > 1 else []
        self._synced_versions: list[tuple[int, int]] = []  # (id, version) of each buffer after the last copy
        self._has_trained_since_sync = True  # whether a forward in training mode came after it

    def sync_buffers(self) -> None:
        """Broadcast all buffers if one may have changed."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if not modules:
            return
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        if self._has_trained_since_sync or self._synced_versions != self._ids_and_versions(buffers):
            self._broadcast(buffers)
            self._synced_versions = self._ids_and_versions(buffers)
        self._has_trained_since_sync = any(module.training for module in modules)

    @staticmethod
    def _ids_and_versions(buffers: list[torch.Tensor]) -> list[tuple[int, int]]:
        return [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in buffers]

    @torch.no_grad()
    def _broadcast(self, buffers: list[torch.Tensor]) -> None:
        what = "broadcast buffers"
        self._order.check(what)
        for pack in self._pack_groups(buffers):
            first = pack[0]
            if len(pack) == 1 and first.is_contiguous() and not first.is_inference():
                # .data: a graph of an earlier forward may hold the statistics, though in training it does not read them
                self._comm.broadcast(first.data, 0, what)
                continue
            packed = torch.cat([buffer.reshape(-1) for buffer in pack])
            self._comm.broadcast(packed, 0, what)
            for buffer, part in zip(pack, torch.split(packed, [b.numel() for b in pack]), strict=True):
                buffer.data.copy_(part.view_as(buffer))

    def _pack_groups(self, buffers: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Group buffers of one dtype into packs that fit, on every rank alike; a larger one is a pack of its own."""
        packs: list[list[torch.Tensor]] = []
        filling: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
        for buffer in buffers:
            pack, taken = filling.get(buffer.dtype, ([], 0))
            if not pack or taken + buffer.numel() > self._max_packed_elements:
                pack, taken = [], 0
                packs.append(pack)
            pack.append(buffer)
            filling[buffer.dtype] = pack, taken + buffer.numel()
        return packs

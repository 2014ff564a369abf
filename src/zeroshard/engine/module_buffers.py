"""Broadcast module buffers, such as running statistics, from rank 0 to all ranks, as DDP does."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from zeroshard.comm import MeshAxis
from zeroshard.engine.context import ShardContext

# of one broadcast; beyond that, another broadcast costs less than the copies of a longer one
MAX_PACKED_ELEMENTS = 2**20


class BufferBroadcaster:
    """Copies rank 0's buffers to all ranks before a forward, if they may have changed since the last copy.

    Of replicas that train alone (``Config.local_steps``), each has the buffers of its own first rank until an average
    copies those of the first replica.

    They may have changed after a forward in training mode (batch norm changes its statistics without incrementing the
    version counter), or if the user has changed or replaced one. So generation and evaluation cost nothing.

    Small buffers are packed together, at most ``bucket_size`` elements per broadcast; larger ones are sent in place.
    """

    def __init__(self, model: nn.Module, context: ShardContext) -> None:
        self._comm, self._order = context.comm, context.order
        self._max_packed_elements = min(context.config.bucket_size, MAX_PACKED_ELEMENTS)
        modules = [m for m in model.modules() if any(b is not None for b in m._buffers.values())]
        is_needed = (
            context.config.broadcast_buffers and self._comm.data_parallel_size * self._comm.average_axis.size > 1
        )
        self._modules = [weakref.ref(module) for module in modules] if is_needed else []
        self._synced_versions: list[tuple[int, int]] = []  # (id, version) of each buffer after the last broadcast
        self._has_trained_since_sync = True  # whether a forward in training mode followed it

    @property
    def has_buffers(self) -> bool:
        """Whether there is anything to broadcast."""
        return bool(self._modules)

    def sync_buffers(self) -> None:
        """Broadcast all buffers if one may have changed."""
        modules = self._living_modules()
        if not modules or not self._comm.data_axes:
            return
        buffers = _buffers_of(modules)
        if self._has_trained_since_sync or self._synced_versions != self._ids_and_versions(buffers):
            self._broadcast(buffers, self._comm.data_axes, "broadcast buffers")
            self._synced_versions = self._ids_and_versions(buffers)
        self._has_trained_since_sync = any(module.training for module in modules)

    def copy_from_first_replica(self) -> None:
        """Copy the buffers of the first of the replicas that train alone to the others."""
        buffers = _buffers_of(self._living_modules())
        if buffers and self._comm.average_axis.size > 1:
            self._broadcast(buffers, [self._comm.average_axis], "copy the first replica's buffers")
            self._has_trained_since_sync = True

    def _living_modules(self) -> list[nn.Module]:
        return [module for reference in self._modules if (module := reference()) is not None]

    @staticmethod
    def _ids_and_versions(buffers: list[torch.Tensor]) -> list[tuple[int, int]]:
        return [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in buffers]

    @torch.no_grad()
    def _broadcast(self, buffers: list[torch.Tensor], axes: list[MeshAxis], what: str) -> None:
        self._order.check(what)
        for group in self._pack_groups(buffers):
            first = group[0]
            if len(group) == 1 and first.is_contiguous() and not first.is_inference():
                # .data: an earlier graph may have saved the statistics, although training does not read them
                self._broadcast_over(axes, first.data, what)
                continue
            packed = torch.cat([buffer.reshape(-1) for buffer in group])
            self._broadcast_over(axes, packed, what)
            for buffer, values in zip(group, torch.split(packed, [b.numel() for b in group]), strict=True):
                buffer.data.copy_(values.view_as(buffer))

    def _broadcast_over(self, axes: list[MeshAxis], tensor: torch.Tensor, what: str) -> None:
        for axis in axes:
            self._comm.broadcast_over_axis(axis, tensor, what)

    def _pack_groups(self, buffers: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Group buffers by dtype up to the size limit, the same on all ranks; a larger buffer is its own group."""
        groups: list[list[torch.Tensor]] = []
        open_groups: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
        for buffer in buffers:
            group, numel = open_groups.get(buffer.dtype, ([], 0))
            if not group or numel + buffer.numel() > self._max_packed_elements:
                group, numel = [], 0
                groups.append(group)
            group.append(buffer)
            open_groups[buffer.dtype] = group, numel + buffer.numel()
        return groups


def _buffers_of(modules: list[nn.Module]) -> list[torch.Tensor]:
    return [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]

"""BufferBroadcaster: module buffers, such as running statistics, are those of the first rank, as with DDP."""

from __future__ import annotations

import torch
from torch import nn

from zeroshard.core.axis import Axis, broadcast
from zeroshard.core.order import Kind, Order


class BufferBroadcaster:
    """Copies the first rank's buffers to all ranks before a forward, if they may have changed.

    They may have after a forward in training mode, or if the user has changed or replaced one.
    """

    def __init__(self, model: nn.Module, axes: tuple[Axis, ...], order: Order) -> None:
        self._model = model
        self._axes = axes
        self._order = order
        self._modules = [module for module in model.modules() if any(b is not None for b in module._buffers.values())]
        self._synced: list[tuple[int, int]] = []  # (id, version) of each buffer after the last broadcast
        self._has_trained = True  # since then

    @torch.no_grad()
    def sync(self) -> None:
        """Broadcast all buffers if one may have changed."""
        if not self._modules or all(axis.size == 1 for axis in self._axes):
            return
        buffers = [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]
        if self._has_trained or self._synced != _ids_and_versions(buffers):
            self._order.record(Kind.BUFFERS)
            by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for buffer in buffers:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
            for group in by_dtype.values():
                packed = torch.cat([buffer.reshape(-1) for buffer in group])
                broadcast(packed, self._axes)
                for buffer, values in zip(
                    group, torch.split(packed, [buffer.numel() for buffer in group]), strict=True
                ):
                    buffer.data.copy_(values.view_as(buffer))  # data: an earlier graph may have saved the statistics
            self._synced = _ids_and_versions(buffers)
        self._has_trained = any(module.training for module in self._modules)


def _ids_and_versions(buffers: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in buffers]

"""Buffers: running statistics and the like, which every rank holds whole and rank 0 decides, as under DDP."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from zeroshard.comm import Communicator
from zeroshard.engine.order import Order


class Buffers:
    """Copies rank 0's buffers to all ranks before a forward, when they may have changed since the last time.

    They may have after a forward in training mode (batch norm changes its statistics without a trace in the version
    counter), or when the user has changed or replaced one. So generating or evaluating costs nothing.
    """

    def __init__(self, model: nn.Module, comm: Communicator, order: Order, enabled: bool) -> None:
        self._comm = comm
        self._order = order
        modules = [m for m in model.modules() if any(b is not None for b in m._buffers.values())]
        self._modules = [weakref.ref(module) for module in modules] if enabled and comm.ranks > 1 else []
        self._seen: list[tuple[int, int]] = []  # (id, version) of each buffer after the last copy
        self._trained = True  # whether a forward in training mode came after it

    def synchronise(self) -> None:
        """Broadcast all buffers if one may have changed."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if not modules:
            return
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        if self._trained or self._seen != self._state(buffers):
            self._broadcast(buffers)
            self._seen = self._state(buffers)
        self._trained = any(module.training for module in modules)

    @staticmethod
    def _state(buffers: list[torch.Tensor]) -> list[tuple[int, int]]:
        return [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in buffers]

    @torch.no_grad()
    def _broadcast(self, buffers: list[torch.Tensor]) -> None:
        what = "broadcast buffers"
        self._order.check(what)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in buffers:
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for group in by_dtype.values():
            packed = torch.cat([buffer.reshape(-1) for buffer in group])
            self._comm.broadcast(packed, 0, what)
            for buffer, part in zip(group, torch.split(packed, [b.numel() for b in group]), strict=True):
                # .data: a graph of an earlier forward may hold the statistics, though in training it does not read them
                buffer.data.copy_(part.view_as(buffer))

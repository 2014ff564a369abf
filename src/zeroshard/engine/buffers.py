"""Buffers: running statistics and the like, which every rank holds whole and rank 0 decides, as under DDP."""

from __future__ import annotations

import torch

from zeroshard.comm import Communicator
from zeroshard.engine.order import Order


class Buffers:
    """Copies rank 0's buffers to all ranks when they have changed since the last time."""

    def __init__(self, buffers: dict[str, torch.Tensor], comm: Communicator, order: Order, enabled: bool) -> None:
        self._buffers = buffers
        self._comm = comm
        self._order = order
        self._enabled = enabled and comm.ranks > 1
        self._versions = dict.fromkeys(buffers, -1)  # differs from any: the first call copies all

    def synchronise(self) -> None:
        """Broadcast what has changed in place. Constant buffers cost nothing after the first time."""
        if not self._enabled:
            return
        changed = [name for name, buffer in self._buffers.items() if buffer._version != self._versions[name]]
        if not changed:
            return
        what = "broadcast buffers " + ", ".join(changed)
        self._order.check(what)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for name in changed:
            by_dtype.setdefault(self._buffers[name].dtype, []).append(self._buffers[name])
        with torch.no_grad():
            for buffers in by_dtype.values():
                packed = torch.cat([buffer.reshape(-1) for buffer in buffers])
                self._comm.broadcast(packed, 0, what)
                for buffer, part in zip(buffers, torch.split(packed, [b.numel() for b in buffers]), strict=True):
                    buffer.copy_(part.view_as(buffer))
        for name in changed:
            self._versions[name] = self._buffers[name]._version

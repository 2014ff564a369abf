"""Axis: the ranks of one dimension of the mesh, and the collectives between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import sum_in_order
from zeroshard.comm.consistency import POLL_INTERVAL, ConsistencyChecker

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SUM = {False: dist.ReduceOp.SUM, True: dist.ReduceOp.AVG}  # of gradients: whether they are averaged
REDUCES_IN_PLACE = ("nccl", "fake")  # backends whose reduce-scatter may write to its own part of the input

Steps = Iterator[None]  # of a transfer: each yield is where a collective is under way


@dataclass(frozen=True, eq=False)
class Axis:
    """Ranks that exchange states. The innermost axis of a mesh has the fastest links.

    All but all-gathers run in a process group that nothing else uses, neither the user nor another model: a rank that
    does not use a unit reduces it later than the others, and in a group that others use, too, ranks would start
    collectives in different orders.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None
    own_group: dist.ProcessGroup | None
    backend: str  # "nccl", "gloo", …
    checker: ConsistencyChecker

    def start_all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Any:
        """Start to collect the parts of all ranks, in rank order. ``part`` may lie in ``output``."""
        return _all_gather(output, part, group=self.group, async_op=True)

    def start_reduce_scatter(
        self, output: torch.Tensor, summand: torch.Tensor, is_averaged: bool
    ) -> tuple[Any, Callable[[], object] | None]:
        """Start to add up all ranks' summands, and to keep this rank's part. ``output`` may lie in ``summand``.

        Return the collective, and what to call after it. Over gloo it is an all-to-all, and then a sum in rank order:
        gloo's own moves twice the bytes.
        """
        if self.backend == "gloo":
            received = torch.empty_like(summand)
            work = dist.all_to_all_single(received, summand, group=self.own_group, async_op=True)
            return work, partial(sum_in_order, output, received.view(self.size, -1))
        is_apart = output.untyped_storage().data_ptr() != summand.untyped_storage().data_ptr()
        if is_apart or self.backend in REDUCES_IN_PLACE:
            return _reduce_scatter(output, summand, _SUM[is_averaged], self.own_group, async_op=True), None
        result = torch.empty_like(output)
        work = _reduce_scatter(result, summand, _SUM[is_averaged], self.own_group, async_op=True)
        return work, partial(output.copy_, result)

    def start_all_reduce(self, tensor: torch.Tensor, is_averaged: bool) -> Any:
        """Start to add up a gradient over the ranks, in place."""
        return dist.all_reduce(tensor, _SUM[is_averaged], self.own_group, async_op=True)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a small tensor over the ranks, in place."""
        if self.size > 1:
            self.wait(dist.all_reduce(tensor, op, self.own_group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Give all ranks the tensor of one of them."""
        if self.size > 1 and tensor.numel():
            self.wait(dist.broadcast(tensor, group=self.own_group, group_src=source, async_op=True))

    def wait(self, work: Any) -> None:
        """Wait for a collective. Where that blocks the host, raise if another rank will never join it."""
        if self.backend != "gloo":
            work.wait()
            return
        start = time.monotonic()
        try:
            work.wait(POLL_INTERVAL)
        except RuntimeError:  # under way, or failed
            self.checker.wait_for_work(work, self.checker.position()[1], start)  # type: ignore[index]


def all_reduce(
    tensor: torch.Tensor, axes: tuple[Axis, ...], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce a small tensor over all ranks of some axes, in place, and return it."""
    for axis in axes:
        axis.all_reduce(tensor, op)
    return tensor


def broadcast(tensor: torch.Tensor, axes: tuple[Axis, ...], source: int = 0) -> None:
    """Give all ranks of some axes the tensor of one of them; ``source`` counts the innermost axis first."""
    for axis in reversed(axes):
        axis.broadcast(tensor, source % axis.size)
        source //= axis.size


finish: Callable[[Steps], None] = deque[None](maxlen=0).extend  # runs a transfer to its end

"""Norms of gradients of which each rank has a part."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from zeroshard.core.axis import Axis, all_reduce


def norms_over_ranks(
    parts: list[torch.Tensor], order: float, axes: tuple[Axis, ...], device: torch.device, is_total: bool = False
) -> torch.Tensor:
    """Return the norm of each tensor, or of all, together with those that the other ranks have for it: a collective.

    The result is in fp32, or in fp64 if any tensor is. It is the same in each run, and no host waits for it.
    """
    dtype = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    held = [part for part in parts if part.numel()]
    found = iter(torch._foreach_norm(held, order, dtype=dtype) if held else ())
    zero = torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack([next(found) if part.numel() else zero for part in parts] or [zero])
    if math.isinf(order):
        norms.nan_to_num_(nan=math.inf, posinf=math.inf)
        return all_reduce(norms.amax().view(1) if is_total else norms, axes, dist.ReduceOp.MAX)
    powers = norms**order
    return all_reduce(powers.sum().view(1) if is_total else powers, axes) ** (1 / order)

"""Norms of gradients of which each rank has a part."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from zeroshard.core.axis import Axis, all_reduce


def norms_over_ranks(
    parts: list[list[torch.Tensor]], order: float, axes: tuple[Axis, ...], device: torch.device
) -> torch.Tensor:
    """Return the norm of each list of tensors, together with those that the other ranks have for it: a collective.

    The result is in fp32, or in fp64 if any tensor is.
    """
    parts = [[part for part in one if part.numel()] for one in parts]
    flat_parts = [part for one in parts for part in one]
    dtype = torch.float64 if any(part.dtype is torch.float64 for part in flat_parts) else torch.float32
    local = torch._foreach_norm(flat_parts, order, dtype=dtype) if flat_parts else []
    powers = torch.zeros(len(parts), dtype=dtype, device=device)
    if local:
        values = torch.stack(list(local))
        owners = torch.tensor([number for number, one in enumerate(parts) for _ in one], device=device)
        if math.isinf(order):
            powers.scatter_reduce_(0, owners, values.nan_to_num(nan=math.inf, posinf=math.inf), "amax")
        else:
            powers.index_add_(0, owners, values**order)
    all_reduce(powers, axes, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM)
    return powers if math.isinf(order) else powers ** (1 / order)

"""Check that an input is replicated: it can be partitioned over an axis only if all ranks have the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from zeroshard.activations.tensor_layout import TensorLayout
from zeroshard.comm import MeshAxis, all_gather_sync, group_backend

_INT_DTYPE_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes per element; int64 for more
_HASH_MULTIPLIER = 0x1E3779B97F4A7C15  # odd: its multiples spread widely modulo 2**64


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return two integers on the tensor's device that change with any bit, also in NaNs, and with the element order.

    >>> nan = torch.tensor([float("nan"), 1.0])
    >>> torch.equal(checksum(nan), checksum(nan.clone())), torch.equal(checksum(nan), checksum(nan.flip(0)))
    (True, False)
    """
    layout = TensorLayout.from_tensor(tensor)
    flat = layout.flatten(tensor)
    width = layout.unexpanded_shape[-1] if layout.unexpanded_shape else 1
    words = max(1, flat.itemsize // 8)  # 64-bit integers per element: two for complex128
    bits = flat.contiguous().view(_INT_DTYPE_BY_ITEMSIZE.get(flat.itemsize, torch.int64)).view(-1, width * words)
    sums = [bits.sum(dim, dtype=torch.int64) for dim in (0, 1)]  # of columns and rows: avoids a 64-bit copy
    numbers = [torch.arange(1, len(flat) + 1, device=flat.device) * _HASH_MULTIPLIER for flat in sums]
    return torch.stack([(flat * number).sum() for flat, number in zip(sums, numbers, strict=True)])


def check_replicated(name: str, inputs: Sequence[torch.Tensor], axis: MeshAxis) -> None:
    """Raise the same error on all ranks of the axis if a block's inputs differ between them."""
    device = inputs[0].device if inputs else torch.device("cpu")
    if not inputs or group_backend(axis.group, device) == "fake":  # no other rank would answer
        return
    description = repr([(tuple(t.shape), t.stride(), t.dtype) for t in inputs])
    digest = int.from_bytes(hashlib.sha256(description.encode()).digest()[:8], "big", signed=True)
    values = torch.zeros(2, dtype=torch.int64, device=device)
    for tensor in inputs:
        values = values * _HASH_MULTIPLIER + checksum(tensor)
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

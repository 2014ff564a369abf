"""Replicas: an input can be divided over an axis only where all its ranks have the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from zeroshard.activations.tensor_layout import TensorLayout
from zeroshard.comm.collectives import MeshAxis, all_gather_sync, group_backend

_INT_DTYPE_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes an element; int64 for more
_HASH_MULTIPLIER = 0x1E3779B97F4A7C15  # odd: multiples of it are far apart, modulo 2**64


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Two numbers, on the tensor's device, that change with any bit of it, also among NaNs, and with any exchange.

    >>> nan = torch.tensor([float("nan"), 1.0])
    >>> torch.equal(checksum(nan), checksum(nan.clone())), torch.equal(checksum(nan), checksum(nan.flip(0)))
    (True, False)
    """
    form = TensorLayout.from_tensor(tensor)
    line = form.flatten(tensor)
    width = form.unexpanded_shape[-1] if form.unexpanded_shape else 1
    words = max(1, line.itemsize // 8)  # 64-bit integers an element: two of complex128
    bits = line.contiguous().view(_INT_DTYPE_BY_ITEMSIZE.get(line.itemsize, torch.int64)).view(-1, width * words)
    sums = [bits.sum(dim, dtype=torch.int64) for dim in (0, 1)]  # of columns, of rows: no copy in 64 bits is made
    numbers = [torch.arange(1, len(line) + 1, device=line.device) * _HASH_MULTIPLIER for line in sums]
    return torch.stack([(line * number).sum() for line, number in zip(sums, numbers, strict=True)])


def check_replicated(name: str, inputs: Sequence[torch.Tensor], axis: MeshAxis) -> None:
    """Raise the same error on all ranks of an axis where a block's inputs are not the same on all of them."""
    device = inputs[0].device if inputs else torch.device("cpu")
    if not inputs or group_backend(axis.group, device) == "fake":  # nobody answers there
        return
    described = repr([(tuple(t.shape), t.stride(), t.dtype) for t in inputs])
    digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:8], "big", signed=True)
    values = torch.zeros(2, dtype=torch.int64, device=device)
    for tensor in inputs:
        values = values * _HASH_MULTIPLIER + checksum(tensor)
    mine = torch.cat([torch.tensor([digest], device=device), values])
    table = mine.new_empty(axis.size, 3)
    all_gather_sync(table.view(-1), mine, axis)
    first, *others = table.tolist()
    differ = [rank for rank, row in enumerate(others, start=1) if row != first]
    if differ:
        what = "shape" if any(others[rank - 1][0] != first[0] for rank in differ) else "value"
        raise ValueError(
            f"the input of block {name!r} would be divided over {axis.size} ranks, but is not the same on all of them: "
            f"ranks {differ} of the axis have another {what} than its rank 0. Give partition= an axis whose ranks "
            "compute on the same data (a tensor axis without sequence parallelism), or partition=False"
        )

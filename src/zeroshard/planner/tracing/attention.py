"""Attention on meta tensors, by the kernel that a device would take.

On the meta device PyTorch computes attention step by step and so makes its whole matrix of weights, which no GPU does:
there one of the fused kernels runs. They exist as operations of their own, with shapes for meta tensors and a
backward, so they are called instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

MAX_HEAD_DIM = 256  # elements of a head that the fused kernels take


class FusedAttentionMode(TorchFunctionMode):
    """Has ``F.scaled_dot_product_attention`` of meta tensors do what it does on a device of a kind: "cuda" or "cpu".

    >>> query = torch.empty(1, 2, 1024, 64, device="meta", dtype=torch.bfloat16)
    >>> with FusedAttentionMode("cuda"):
    ...     F.scaled_dot_product_attention(query, query, query).shape
    torch.Size([1, 2, 1024, 64])
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._device_kind = kind

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let everything else pass."""
        if func is F.scaled_dot_product_attention:
            result = _fused_attention(self._device_kind, *args, **(kwargs or {}))
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


def _fused_attention(
    kind: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """The result of the first kernel that takes these tensors, in PyTorch's own order; None: none does.

    Keys of fewer heads (``enable_gqa``) are read by several heads of the queries: no kernel copies them.
    """
    if not (query.is_meta and query.dim() == 4 and _can_fuse(query, key, value)):
        return None
    aten: Any = torch.ops.aten
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:  # as PyTorch does: once at its own size
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if kind == "cpu":
        if dropout_p or not query.is_floating_point() or (mask is not None and mask.requires_grad):
            return None
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )
    elif query.dtype in (torch.float16, torch.bfloat16) and mask is None:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif query.shape[1] == key.shape[1] and query.shape[-1] % (8 if query.itemsize == 2 else 4) == 0:
        bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
    else:
        return None
    result: torch.Tensor = found[0]
    return result


def _can_fuse(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return key.dim() == value.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1] <= MAX_HEAD_DIM

"""Attention on meta tensors, by the kernel that a device would take.

On the meta device PyTorch computes attention step by step and so makes its whole matrix of weights, which no GPU does:
there one of the fused kernels runs. They exist as operations of their own, with shapes for meta tensors and a
backward, so they are called instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

WIDEST_HEAD = 256  # elements of a head that the fused kernels take


@contextmanager
def fused_attention(kind: str) -> Iterator[None]:
    """Have ``F.scaled_dot_product_attention`` of meta tensors do what it does on a device of a kind: "cuda" or "cpu".

    >>> query = torch.empty(1, 2, 1024, 64, device="meta", dtype=torch.bfloat16)
    >>> with fused_attention("cuda"):
    ...     F.scaled_dot_product_attention(query, query, query).shape
    torch.Size([1, 2, 1024, 64])
    """
    plain = F.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        result = None
        if query.is_meta and query.dim() == 4 and _alike(query, key, value):
            result = _fused(kind, query, key, value, attn_mask, dropout_p, is_causal, scale)
        if result is None:
            options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            result = plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return result

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def _alike(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return key.dim() == value.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1] <= WIDEST_HEAD


def _fused(
    kind: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor | None:
    """The result of the first kernel that takes these tensors, in PyTorch's own order; None: none does."""
    aten: Any = torch.ops.aten
    if kind == "cpu":
        if dropout or not query.is_floating_point():
            return None
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, causal, attn_mask=mask, scale=scale
        )
    elif query.dtype in (torch.float16, torch.bfloat16) and mask is None:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)
    elif query.shape[1] == key.shape[1] and query.shape[-1] % (8 if query.itemsize == 2 else 4) == 0:
        bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2]).to(query.dtype)
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout, causal, scale=scale
        )
    else:
        return None
    result: torch.Tensor = found[0]
    return result

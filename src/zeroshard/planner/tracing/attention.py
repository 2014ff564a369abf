"""Run attention on meta tensors with the kernel that a device would use.

On the meta device, PyTorch computes attention step by step and allocates the full attention matrix. A GPU runs a fused
kernel instead. The fused kernels are separate operations that support meta tensors and backward, so they are called
directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

MAX_HEAD_DIM = 256  # largest head that the fused kernels support


class FusedAttentionMode(TorchFunctionMode):
    """Make ``F.scaled_dot_product_attention`` of meta tensors use the kernels of a device kind: "cuda" or "cpu".

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
        """Replace attention; call all other functions unchanged."""
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
    """Return the result of the first kernel that supports these tensors, in PyTorch's order; None if none does.

    With fewer key heads than query heads (``enable_gqa``), several query heads read the same keys: no kernel copies
    them.
    """
    if not (query.is_meta and query.dim() == 4 and _can_fuse(query, key, value)):
        return None
    aten: Any = torch.ops.aten
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:  # as PyTorch does: once, not expanded
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if kind == "cpu":
        if dropout_p or not query.is_floating_point() or (mask is not None and mask.requires_grad):
            return None
        outputs = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )
    elif query.dtype in (torch.float16, torch.bfloat16) and mask is None:
        outputs = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif query.shape[1] == key.shape[1] and query.shape[-1] % (8 if query.itemsize == 2 else 4) == 0:
        bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        outputs = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
    else:
        return None
    result: torch.Tensor = outputs[0]
    return result


def _can_fuse(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return key.dim() == value.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1] <= MAX_HEAD_DIM

"""The cost of one operation: FLOPs, memory traffic and temporary memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from zeroshard.planner.tracing.trace import OpKind

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
FLOAT8_PRODUCTS = (torch.ops.aten._scaled_mm.default,)  # their results are bf16

_ATTENTION_INFIX = "_attention"
_LOOKUP_OPS = ("embedding", "index", "index_select", "gather", "take_along_dim")  # read what they return, not the table
_EMPTY_OPS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors among arguments or results."""
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes touched by reading a whole tensor: an expanded one has less memory than elements."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def op_name(func: Any) -> str:
    """Return the name of an operation, without namespace and overload."""
    return str(func._schema.name).partition("::")[2]


def op_kind(func: Any, has_new_storage: bool) -> OpKind:
    """Return what limits an operation. ``has_new_storage``: whether it has allocated memory."""
    name = op_name(func)
    if name in _EMPTY_OPS or not (has_new_storage or func._schema.is_mutable):
        return "nothing"
    if name.startswith("_") and _ATTENTION_INFIX in name:
        return "attention"
    if func._overloadpacket not in flop_registry:
        return "plain"
    return "convolution" if "conv" in name else "matmul"


def op_flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the multiplications and additions of matmuls, convolutions and attention; 0 for all others."""
    name = op_name(func)
    if name.startswith("_") and _ATTENTION_INFIX in name:
        return _attention_flops(func, args, kwargs)
    count = flop_registry.get(func._overloadpacket)
    return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0


def _attention_flops(func: Any, args: Any, kwargs: Any) -> float:
    """Count two matmuls in forward, five in backward; causal attention skips the masked half.

    Heads count with the padded width that the kernel computes, see :func:`_padded_head_dim`: it determines the time.
    """
    arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    query, key = arguments["query"], arguments["key"]
    matmuls = (5 if "backward" in op_name(func) else 2) * (0.5 if arguments.get("is_causal") else 1.0)
    batch, heads, length, width = (int(size) for size in query.shape)
    return matmuls * 2.0 * batch * heads * length * int(key.shape[2]) * _padded_head_dim(width)


def _padded_head_dim(width: int) -> int:
    """Return the head width that a fused kernel computes with: 32, 64, 96, …"""
    return -(-width // 32) * 32


def op_moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the bytes read and written, each tensor once."""
    name, results = op_name(func), sum(touched_bytes(tensor) for tensor in iter_tensors(result))
    if name in _LOOKUP_OPS:
        return 2.0 * results
    return float(results + sum(touched_bytes(tensor) for tensor in iter_tensors((args, kwargs))))


def op_scratch_bytes(func: Any, args: Any, result: Any) -> float:
    """Return the temporary memory of a kernel in bytes, where significant: taken from the kernels' sources."""
    name = op_name(func)
    if name == "_scaled_dot_product_flash_attention_backward":
        query, key = args[1], args[2]
        batch, heads, length, width = (int(size) for size in query.shape)
        rounded = -(-length // 128) * 128
        scratch = 4.0 * batch * heads * rounded * (_padded_head_dim(width) + 1)  # dq in fp32, and one value per row
        if key.shape[1] != heads:  # gradients of keys and values, for each query head
            scratch += 2.0 * batch * heads * int(key.shape[2]) * width * int(query.itemsize)
        return scratch
    if name == "_scaled_dot_product_efficient_attention_backward":
        numel = int(args[1].numel())
        dq_bytes = 4.0 if args[1].itemsize == 2 else 0.0  # dq is accumulated in fp32
        return dq_bytes * numel + 4.0 * numel / int(args[1].shape[-1])
    if name == "embedding_dense_backward":
        return 4.0 * 8 * int(args[1].numel())  # sorted indices, twice
    return 0.0

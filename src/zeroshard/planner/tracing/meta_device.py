"""What the meta device lacks: the values that a model reads, fast repetitions, and fused attention kernels.

[Note: known values]
Models read the values of a few tensors: do these positions form one sequence or several, is anything masked? The
values of such tensors follow from how they were created (``arange``, comparisons, sums), not from parameters or data.
So small tensors from factory functions, and integers and booleans that the model gets as inputs or buffers, are also
computed on the CPU, and a read of a value returns the real one. Anything that depends on parameters has no value: a
model that branches on it cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from zeroshard.planner.tracing.op_cost import iter_tensors, op_name

MAX_KNOWN_NUMEL = 2**22  # larger tensors are not computed
FACTORY_OPS = ("arange", "ones", "zeros", "full", "eye", "scalar_tensor", "tril_indices", "triu_indices")
MAX_HEAD_DIM = 256  # largest head that the fused attention kernels support


class KnownValues:
    """The meta tensors whose values are known: [Note: known values]."""

    def __init__(self) -> None:
        self._values: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()

    def set(self, meta_tensor: torch.Tensor, real_tensor: torch.Tensor) -> None:
        """Record the values of a meta tensor if it is small, and integer or boolean."""
        is_integral = not (real_tensor.is_floating_point() or real_tensor.is_complex())
        if is_integral and real_tensor.numel() <= MAX_KNOWN_NUMEL and not real_tensor.is_meta:
            # a clone, because in-place operations write into it
            self._values[meta_tensor] = real_tensor.detach().cpu().clone()

    def item(self, tensor: torch.Tensor) -> Any:
        """Return the value of a one-element tensor; None if unknown."""
        value = self._values.get(tensor)
        return None if value is None else value.item()

    def propagate(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the values of an operation's results if all its inputs are known."""
        outputs = [tensor for tensor in iter_tensors(result) if tensor.is_meta]
        inputs = [tensor for tensor in iter_tensors((args, kwargs)) if tensor.is_meta]
        if any(tensor not in self._values for tensor in inputs) or any(
            tensor.numel() > MAX_KNOWN_NUMEL for tensor in outputs
        ):
            if func._schema.is_mutable:
                self._invalidate(func, args, kwargs)
            return
        if not outputs or not (inputs or op_name(func) in FACTORY_OPS):
            return
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: self._values.get(tensor, tensor), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        for meta_tensor, real in zip(outputs, iter_tensors(func(*args, **kwargs)), strict=False):
            self._values[meta_tensor] = real

    def _invalidate(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of the tensors that an operation has written to, and of all their views."""
        arguments = [*args, *(kwargs or {}).values()]
        written = [
            value
            for argument, value in zip(func._schema.arguments, arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        storages = {tensor.untyped_storage()._cdata for tensor in iter_tensors(written)}
        for tensor in list(self._values):
            if tensor.untyped_storage()._cdata in storages:
                del self._values[tensor]


class RepeatedOps:
    """Runs operations, but of those that differ only in their tensors' addresses one.

    torch finds the shapes of some results, e.g. of a layer norm, by milliseconds of Python, and a model repeats its
    blocks. Views are always run: they share the memory of their argument.

    >>> ops, x, aten = RepeatedOps(), torch.empty(2, 3, device="meta"), torch.ops.aten
    >>> one, other = [ops.run(aten.native_layer_norm.default, (x, [3], None, None, 0.1), {}) for _ in range(2)]
    >>> [tensor.shape for tensor in one] == [tensor.shape for tensor in other] and one[0] is not other[0]
    True
    >>> ops.run(aten.sum.dim_IntList, (x, [0], True), {}).shape == ops.run(aten.sum.dim_IntList, (x, [0], 0), {}).shape
    False
    >>> one, other = [ops.run(aten._unsafe_view.default, (x, [3, 2]), {}) for _ in range(2)]
    >>> one.untyped_storage()._cdata == other.untyped_storage()._cdata == x.untyped_storage()._cdata
    True
    """

    def __init__(self) -> None:
        self._makers: dict[Any, Any] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an operation's result; for arguments as before, new tensors like those it returned before."""
        key = func, _layout(args), _layout(tuple(kwargs.items()))
        if key in self._makers:
            return tree_map_only(partial, lambda make: make(), self._makers[key])
        result = func(*args, **kwargs)
        if _are_new_and_dense(list(iter_tensors(result)), list(iter_tensors((args, kwargs)))):
            self._makers[key] = tree_map_only(torch.Tensor, _maker, result)
        return result


def _layout(value: Any) -> Any:
    """Return what a result's layout may depend on."""
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_layout, value))
    return type(value), value  # 1 equals True


def _maker(tensor: torch.Tensor) -> partial[torch.Tensor]:
    return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _are_new_and_dense(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    """Return whether there are results and each is a plain meta tensor that fills a storage of its own."""
    storages = {tensor.untyped_storage()._cdata for tensor in (*results, *inputs)}
    is_new = len(storages) == len(results) + len({tensor.untyped_storage()._cdata for tensor in inputs})
    return bool(results) and is_new and all(map(_fills_its_storage, results))


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.is_meta
    return is_plain and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


class FusedAttentionMode(TorchFunctionMode):
    """Make ``F.scaled_dot_product_attention`` of meta tensors use the kernels of a device kind: "cuda" or "cpu".

    On the meta device, PyTorch computes attention step by step and allocates the full attention matrix. The fused
    kernels of a device are separate operations that support meta tensors and backward, so they are called directly.

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
    if not (query.is_meta and query.dim() == key.dim() == value.dim() == 4):
        return None
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] <= MAX_HEAD_DIM:
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

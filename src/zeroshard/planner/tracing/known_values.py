"""Values: what is known of the contents of tensors that have none.

[Note: known values]
Models look at a few of their tensors: are these positions one sequence or several, is nothing masked? What such tensors
hold follows from how they were made (``arange``, comparisons, sums), not from parameters or data. So small tensors that
a model makes from nothing, and integers and booleans that it was given (as inputs, as buffers), are computed on the
side, and whoever asks for one of their values is told. Whatever depends on parameters has no value: a model that
decides by it cannot be traced.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from zeroshard.planner.tracing.op_cost import iter_tensors, op_name

MAX_KNOWN_NUMEL = 2**22  # elements of a tensor that is computed on the side
FACTORY_OPS = ("arange", "ones", "zeros", "full", "eye", "scalar_tensor", "tril_indices", "triu_indices")


class KnownValues:
    """The tensors whose values are known."""

    def __init__(self) -> None:
        self._values: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()

    def set(self, meta_tensor: torch.Tensor, real_tensor: torch.Tensor) -> None:
        """Take note of what a tensor on the meta device holds, where it is worth it."""
        if real_tensor.numel() <= MAX_KNOWN_NUMEL and not (
            real_tensor.is_meta or real_tensor.is_floating_point() or real_tensor.is_complex()
        ):
            self._values[meta_tensor] = real_tensor.detach().cpu().clone()  # operations in place will write into it

    def item(self, tensor: torch.Tensor) -> Any:
        """The one value of a tensor; None where it is not known."""
        known = self._values.get(tensor)
        return None if known is None else known.item()

    def propagate(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute on the side what an operation has made, where all it was given is known."""
        made = [tensor for tensor in iter_tensors(result) if tensor.is_meta]
        given = [tensor for tensor in iter_tensors((args, kwargs)) if tensor.is_meta]
        if any(tensor not in self._values for tensor in given) or any(
            tensor.numel() > MAX_KNOWN_NUMEL for tensor in made
        ):
            if func._schema.is_mutable:
                self._invalidate(func, args, kwargs)
            return
        if not made or not (given or op_name(func) in FACTORY_OPS):
            return
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: self._values.get(tensor, tensor), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        for bare, real in zip(made, iter_tensors(func(*args, **kwargs)), strict=False):
            self._values[bare] = real

    def _invalidate(self, func: Any, args: Any, kwargs: Any) -> None:
        """What an operation has written into, and every view of it, is not known any more."""
        given = [*args, *(kwargs or {}).values()]
        written = [
            value
            for argument, value in zip(func._schema.arguments, given, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        storages = {tensor.untyped_storage()._cdata for tensor in iter_tensors(written)}
        for tensor in list(self._values):
            if tensor.untyped_storage()._cdata in storages:
                del self._values[tensor]

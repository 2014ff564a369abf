"""Track the values of meta tensors where they can be known.

[Note: known values]
Models read the values of a few tensors: do these positions form one sequence or several, is anything masked? The
values of such tensors follow from how they were created (``arange``, comparisons, sums), not from parameters or data.
So small tensors from factory functions, and integers and booleans that the model gets as inputs or buffers, are also
computed on the CPU, and a read of a value returns the real one. Anything that depends on parameters has no value: a
model that branches on it cannot be traced.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from zeroshard.planner.tracing.op_cost import iter_tensors, op_name

MAX_KNOWN_NUMEL = 2**22  # larger tensors are not computed
FACTORY_OPS = ("arange", "ones", "zeros", "full", "eye", "scalar_tensor", "tril_indices", "triu_indices")


class KnownValues:
    """The meta tensors whose values are known."""

    def __init__(self) -> None:
        self._values: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()

    def set(self, meta_tensor: torch.Tensor, real_tensor: torch.Tensor) -> None:
        """Record the values of a meta tensor if it is small, and integer or boolean."""
        if real_tensor.numel() <= MAX_KNOWN_NUMEL and not (
            real_tensor.is_meta or real_tensor.is_floating_point() or real_tensor.is_complex()
        ):
            self._values[meta_tensor] = (
                real_tensor.detach().cpu().clone()
            )  # a clone, because in-place operations write into it

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

"""GuardedParameter: a parameter whose values are not in memory, or not there yet. Only its class changes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zeroshard.core.handle import GradientHandle

ATTRIBUTES = (
    "shape dtype device layout requires_grad is_leaf grad_fn grad _grad ndim itemsize nbytes is_cuda is_cpu is_meta "
    "is_sparse is_quantized is_nested output_nr _version _backward_hooks retains_grad grad_dtype"
).split()
METHODS = (
    "size dim ndimension numel nelement element_size is_floating_point is_complex is_signed get_device requires_grad_ "
    "register_hook register_post_accumulate_grad_hook __len__ __hash__ stride is_contiguous"
).split()
NEEDS_NO_VALUES = {getattr(torch.Tensor, name).__get__ for name in ATTRIBUTES}
NEEDS_NO_VALUES |= {getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad", "_grad", "grad_dtype")}
NEEDS_NO_VALUES |= {getattr(torch.Tensor, name) for name in METHODS}
NEEDS_NO_VALUES |= {torch.is_floating_point, torch.is_complex, torch.numel, torch._has_compatible_shallow_copy_type}
NEEDS_NO_VALUES |= {torch.autograd.grad, torch.autograd.backward}
CONVERSIONS = {getattr(torch.Tensor, name) for name in "to cpu cuda float double half bfloat16".split()}
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]


class ParameterOwner(Protocol):
    """The engine of a parameter's model."""

    def collect_gradient(self, parameter: nn.Parameter) -> None:
        """Take over a gradient that the user has assigned, before it is read."""

    def use_outside(self, parameter: nn.Parameter) -> None:
        """Have the values of a parameter in memory, or raise."""

    def write_outside(self, parameter: nn.Parameter, values: torch.Tensor) -> bool:
        """Replace the values of a parameter without having them, or return False."""

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter."""


class GuardedParameter(nn.Parameter):
    """Answers what needs no values. Any other use first asks the engine for them."""

    _zeroshard_core: ParameterOwner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in CONVERSIONS:  # as in model.to(device), which then assigns the data
            with torch._C.DisableTorchFunctionSubclass():
                probe = torch.empty([2] * args[0].dim(), dtype=args[0].dtype, device=args[0].device)
                if func(probe, *args[1:], **kwargs) is probe:
                    return args[0]
        if func == SET_DATA and args[1] is args[0]:
            return None
        is_write = func is torch.Tensor.copy_ and isinstance(args[0], cls) and not torch.is_grad_enabled()
        if is_write and args[0]._zeroshard_core.write_outside(args[0], args[1]):
            return args[0]
        if func not in NEEDS_NO_VALUES:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, GuardedParameter):
                    leaf._zeroshard_core.use_outside(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if func == GET_GRAD and not isinstance(found, GradientHandle | None):
                args[0]._zeroshard_core.collect_gradient(args[0])
                found = args[0].grad
            return found

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GuardedParameter({self._zeroshard_core.name_of(self)!r}, shape={tuple(self.shape)})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with the same values, where they may be gathered."""
        self._zeroshard_core.use_outside(self)
        return nn.Parameter(self.detach().clone(), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise: this rank does not have the values."""
        raise RuntimeError(
            f"{self._zeroshard_core.name_of(self)!r} is sharded, and this rank has a part of it: pickle "
            "zeroshard.state_dict(model) instead"
        )

"""Read and write the values, gradients and version counters of parameters, whatever class they have at the moment.

[Note: many parameters]
A unit may have hundreds of parameters, and work that is done for each of them several times a step is most of the
host's work. So there are no calls per parameter: loops over parameters only read and write attributes, lists of views
are made once, and torch gets whole lists. What remains in a step of stage 3, in µs per parameter on a small CPU
machine: two writes of ``data`` 1.9, reading ``grad`` and checking for it three times 2.1, copying it 1.3, four changes
of class 0.6. In stages 0 to 2, a check of its address and its version counter, once a forward and once a step, adds 0.1
each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from zeroshard.tensor_parallel import TPParam

GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # each read makes a new object: compare with ==


def local_data(parameter: nn.Parameter) -> torch.Tensor:
    """Return the parameter's values, or the local tensor of a DTensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else GET_DATA(parameter)  # not recorded


def set_data(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set the values of a parameter, or the local tensor of a DTensor."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = values
    else:
        parameter.data = values


def set_data_and_dtype(parameter: nn.Parameter, values: torch.Tensor, tp_param: TPParam | None) -> None:
    """Set a parameter's values, perhaps of another dtype; the dtype of a DTensor changes with them."""
    if tp_param is not None:
        parameter.data = tp_param.to_dtensor(values)
    set_data(parameter, values)


def param_versions(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return autograd's version counter of each parameter: how often it was changed in place."""
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter._version for parameter in parameters]


def data_ptrs(parameters: Sequence[nn.Parameter], has_dtensors: bool) -> list[int]:
    """Return the address of each parameter's values. ``has_dtensors``: some of them may be DTensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(torch.Tensor.data_ptr, map(local_data, parameters) if has_dtensors else parameters))


# ``_grad`` is ``grad`` as autograd stores it, even where the parameter's class overrides ``grad``.


def has_autograd_grads(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether autograd has stored a gradient in any of the parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        return True in [parameter._grad is not None for parameter in parameters]


def pop_autograd_grads(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """Remove and return the gradients that autograd has stored, as dense tensors: see [Note: many parameters]."""
    with torch._C.DisableTorchFunctionSubclass():
        gradients: list[torch.Tensor | None] = [parameter._grad for parameter in parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return gradients
        for parameter in parameters:
            parameter._grad = None
        is_plain = set(map(type, present)) == {torch.Tensor}
        if not is_plain or {gradient.layout for gradient in present} != {torch.strided}:
            pairs = zip(gradients, parameters, strict=True)
            return [
                None if gradient is None else _local_dense_grad(gradient, parameter) for gradient, parameter in pairs
            ]
    return gradients


def get_autograd_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that is stored in the parameter itself."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = parameter._grad
        return gradient


def zero_autograd_grads(parameters: Sequence[nn.Parameter]) -> None:
    """Zero the gradients stored in the parameters themselves: the user may have set them."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for parameter in parameters:
            if parameter._grad is not None:
                parameter._grad.zero_()


def _local_dense_grad(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if isinstance(gradient, DTensor):
        gradient = _local_grad(gradient, parameter)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


@torch.no_grad()
def _local_grad(gradient: DTensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's TP shard of a gradient, placed like the parameter: this sums over the tensor axis."""
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

"""Float8 layers: the class of a linear layer while it computes in float8."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zeroshard.float8.linear import Float8Weight, float8_linear

WEIGHT_ATTRIBUTE = "_zeroshard_float8_weight"  # of a layer whose weight is gathered in float8
MIN_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


def check_float8_device(device: torch.device) -> None:
    """Raise if a device cannot multiply float8 matrices. A CPU computes the same in fp32."""
    if device.type == "cpu":
        return
    hint = 'use precision="bf16"'
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "an AMD GPU" if device.type == "cuda" else f"a device of type {device.type!r}"
        raise ValueError(f'precision="fp8" needs an NVIDIA GPU, or a CPU to try it, got {kind}: {hint}')
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        needed, got = (".".join(map(str, version)) for version in (MIN_CAPABILITY, capability))
        raise ValueError(
            f'precision="fp8" needs a GPU of compute capability {needed} or higher (Ada, Hopper, Blackwell), got '
            f"{torch.cuda.get_device_name(device)} with {got}: {hint}"
        )


class _Float8Mixin:
    """A linear layer that computes in float8. Its original class is the second base."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:  # nn.Linear's own name
        weight, gathered = self.weight, vars(self).get(WEIGHT_ATTRIBUTE)
        # another weight in its place: torch.func.functional_call(), a parametrization
        is_own = gathered is not None and weight is gathered.parameter
        return float8_linear(input, weight, self.bias, gathered if is_own else None)


@functools.cache
def _float8_class(original: type) -> type:
    """Return a subclass of a linear layer's class that computes in float8, with the same name."""
    namespace = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (_Float8Mixin, original), namespace)


class Float8LayerHandle:
    """Makes a layer compute in float8; :meth:`remove` restores its class."""

    def __init__(self, layer: nn.Module, weight: Float8Weight | None) -> None:
        self._layer = weakref.ref(layer)  # weak: the layer may be the model
        self._original: Any = type(layer)
        layer.__class__ = _float8_class(self._original)  # type: ignore[arg-type]
        if weight is not None:
            weight.parameter = layer.weight
            vars(layer)[WEIGHT_ATTRIBUTE] = weight

    def remove(self) -> None:
        """Restore the original class."""
        layer = self._layer()
        if layer is not None:
            layer.__class__ = self._original
            vars(layer).pop(WEIGHT_ATTRIBUTE, None)


def install_float8_layers(
    model: nn.Module, names: Iterable[str], weights: Mapping[str, Float8Weight]
) -> list[Float8LayerHandle]:
    """Make linear layers compute in float8, as torch's parametrizations do: the object gets a derived class.

    ``weights``: those that are gathered in float8, by the name of their layer.
    """
    return [Float8LayerHandle(model.get_submodule(name), weights.get(name)) for name in names]

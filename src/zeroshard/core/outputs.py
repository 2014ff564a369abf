"""Tensors in what a module returns, or keeps as an attribute."""

from __future__ import annotations

from collections.abc import Collection, Sized

import torch
from torch import nn

from zeroshard.utils.tree import tensors_in

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_SCANNED_TYPES = (torch.Tensor, list, tuple, dict)
MAX_CONTAINER_ITEMS = 64  # losses of layers are few; a longer container is something else


def tensors_with_graph(output: object) -> list[torch.Tensor]:
    """Return the tensors of an output through which a backward may go."""
    found = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
    return [tensor for tensor in found if tensor.grad_fn is not None]


class Attributes:
    """Finds tensors with a graph that a module, or one inside it, stores as attributes.

    A loss may depend on nothing else: a router's penalty. Then no gradient arrives at the module's outputs.
    """

    def __init__(self, module: nn.Module, hooked: Collection[nn.Module]) -> None:
        """``hooked``: modules whose own attributes are looked at when these end."""
        self._found: list[tuple[dict[str, object], frozenset[str]]] = []  # attributes, and those that every module has
        self._add(module, hooked)

    def _add(self, module: nn.Module, hooked: Collection[nn.Module]) -> None:
        if not type(module).__module__.startswith("torch.nn."):  # torch's own store none
            self._found.append((vars(module), _MODULE_ATTRIBUTES))
        for child in module.children():
            if child not in hooked:
                self._add(child, hooked)

    def tensors(self) -> list[torch.Tensor]:
        """Return them."""
        found = []
        for attributes, usual in self._found:
            for name in attributes.keys() - usual:
                value = attributes[name]
                if type(value) in _SCANNED_TYPES:
                    found += tensors_with_graph(value) if _is_short(value) else []
        return found


def _is_short(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, Sized) and len(value) <= MAX_CONTAINER_ITEMS)

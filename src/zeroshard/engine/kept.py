"""Keeper: a module that may keep tensors of its graph, where a loss finds them: see [Note: kept inside]."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zeroshard.engine.frames import is_reached

_OWN = frozenset(vars(nn.Module()))
_KEEPING = {torch.Tensor, list, tuple, dict}
FEW = 64  # items of a container that is looked into: losses of some layers, not a vocabulary


class Keeper:
    """A module that may keep tensors of its graph as attributes, or in containers: see [Note: kept inside]."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        # torch's own modules keep none, unless somebody has given them another attribute
        of_torch = type(module).__module__.startswith("torch.nn.")
        self._others = _OWN.union(vars(module)) if of_torch else _OWN
        self._names: frozenset[str] = frozenset()  # of the attributes that may keep something, when there were …
        self._count = -1  # … so many attributes in all

    def kept(self) -> list[torch.Tensor]:
        """The tensors it keeps now, and no hook tells of yet."""
        module = self._module()
        attributes = vars(module) if module is not None else {}
        if len(attributes) != self._count or not attributes.keys() >= self._names:
            self._names, self._count = frozenset(attributes) - self._others, len(attributes)
        found = [name for name in self._names if type(attributes[name]) in _KEEPING] if self._names else []
        if not found:
            return []
        tensors = [tensor for name in found for tensor in _kept_in(attributes[name])]
        return [tensor for tensor in tensors if tensor.grad_fn is not None and not is_reached(tensor)]


def _kept_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries of few items."""
    kind = type(value)
    if kind is torch.Tensor:
        yield value
    elif kind in _KEEPING and depth and len(value) <= FEW:
        for item in value.values() if kind is dict else value:
            yield from _kept_in(item, depth - 1)


def keepers(module: nn.Module, homes: set[nn.Module]) -> list[Keeper]:
    """A module and those below it, without those that are hooked themselves."""
    found = [Keeper(module)]
    for child in module.children():
        found += keepers(child, homes) if child not in homes else []
    return found

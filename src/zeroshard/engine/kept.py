"""Keeper: a module that may keep tensors of its graph, where a loss finds them: see [Note: kept inside]."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zeroshard.engine.frames import has_pre_backward_hook

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_SCANNED_TYPES = {torch.Tensor, list, tuple, dict}
MAX_CONTAINER_ITEMS = 64  # items of a container that is looked into: losses of some layers, not a vocabulary


class GraphTensorScanner:
    """A module that may keep tensors of its graph as attributes, or in containers: see [Note: kept inside]."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        # torch's own modules keep none, unless somebody has given them another attribute
        of_torch = type(module).__module__.startswith("torch.nn.")
        self._ignored_names = _MODULE_ATTRIBUTES.union(vars(module)) if of_torch else _MODULE_ATTRIBUTES
        self._candidate_names: frozenset[str] = (
            frozenset()
        )  # of the attributes that may keep something, when there were …
        self._attribute_count = -1  # … so many attributes in all

    def find(self) -> list[torch.Tensor]:
        """The tensors it keeps now, and no hook tells of yet."""
        module = self._module()
        attributes = vars(module) if module is not None else {}
        if len(attributes) != self._attribute_count or not attributes.keys() >= self._candidate_names:
            self._candidate_names, self._attribute_count = frozenset(attributes) - self._ignored_names, len(attributes)
        found = (
            [name for name in self._candidate_names if type(attributes[name]) in _SCANNED_TYPES]
            if self._candidate_names
            else []
        )
        if not found:
            return []
        tensors = [tensor for name in found for tensor in _tensors_in_containers(attributes[name])]
        return [tensor for tensor in tensors if tensor.grad_fn is not None and not has_pre_backward_hook(tensor)]


def _tensors_in_containers(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries of few items."""
    kind = type(value)
    if kind is torch.Tensor:
        yield value
    elif kind in _SCANNED_TYPES and depth and len(value) <= MAX_CONTAINER_ITEMS:
        for item in value.values() if kind is dict else value:
            yield from _tensors_in_containers(item, depth - 1)


def scanners_for(module: nn.Module, hooked_modules: set[nn.Module]) -> list[GraphTensorScanner]:
    """A module and those below it, without those that are hooked themselves."""
    found = [GraphTensorScanner(module)]
    for child in module.children():
        found += scanners_for(child, hooked_modules) if child not in hooked_modules else []
    return found

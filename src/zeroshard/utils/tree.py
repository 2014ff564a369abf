"""Tensors in nested containers and objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn


def tree_map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``change`` to every tensor in nested containers and dataclasses; return ``value`` itself if none changes.

    >>> tree_map_tensors({"a": [torch.ones(1)], "b": 2}, lambda t: t + 1)
    {'a': [tensor([2.])], 'b': 2}
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):  # also Hugging Face's ModelOutput, which is both a dict and a dataclass
        changed = {key: tree_map_tensors(item, change) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, (list, tuple)):
        items = [tree_map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = {f.name: tree_map_tensors(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        if all(new[key] is getattr(value, key) for key in new):
            return value
        return dataclasses.replace(value, **new)
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested containers."""
    return tree_map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def tensors_in(value: Any, depth: int = 4) -> list[torch.Tensor]:
    """Find the tensors in nested containers, dataclasses and plain objects.

    >>> [t.item() for t in tensors_in({"a": (torch.ones(()), None), "b": [torch.zeros(())]})]
    [1.0, 0.0]
    """
    found: list[torch.Tensor] = []
    _collect_tensors(value, depth, found)
    return found


def _collect_tensors(value: Any, depth: int, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif depth and value is not None and not isinstance(value, (int, float, str, bytes, type, nn.Module)):
        for item in _contained_values(value):
            _collect_tensors(item, depth - 1, found)


def _contained_values(value: Any) -> Iterable[Any]:
    """Return the values in a container or the attributes of an object."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return (vars(value),) if hasattr(value, "__dict__") else ()

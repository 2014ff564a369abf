"""Extra states: what modules return from ``get_extra_state()``, as ``state_dict()`` of torch contains it.

The first rank's are saved, with its own data in the index: programs that do not know them can read such a checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.json_codec import encode


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have an extra state and can take it back, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and type(module).set_extra_state is not nn.Module.set_extra_state
    }


def state_names(modules: Mapping[str, Any]) -> list[str]:
    """Return the names that these modules' extra states have in a ``state_dict()``.

    >>> state_names({"": None, "blocks.0": None})
    ['_extra_state', 'blocks.0._extra_state']
    """
    return [f"{name}._extra_state".removeprefix(".") for name in modules]


def encode_extra_states(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Encode the extra states of all modules, and add their tensors to ``tensors``; warn of those that cannot be."""
    encoded: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name, module in modules_with_extra_state(model).items():
        own_tensors: dict[str, torch.Tensor] = {}
        try:
            encoded[name] = encode(module.get_extra_state(), own_tensors, f"modules.{name}")
        except TypeError as error:
            problems[name] = str(error)
        else:
            tensors |= own_tensors
    if problems:
        name, problem = next(iter(problems.items()))
        warnings.warn(
            f"the extra states (get_extra_state()) of {len(problems)} modules are not in the checkpoint, for example "
            f"that of {name!r} ({type(model.get_submodule(name)).__name__}): {problem}",
            stacklevel=2,
        )
    return encoded


def load_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Give the modules their saved extra states."""
    modules = modules_with_extra_state(model)
    for name, state in states.items():
        if name in modules:
            modules[name].set_extra_state(state)

"""Changes of the model after shard() that cannot count any more."""

from __future__ import annotations

import operator
from typing import Any

import torch

from zeroshard.core.checks.observers import Observer


class ChangedModel(Observer):
    """Parameters that were unfrozen, replaced, added or moved."""

    def __init__(self) -> None:
        self._owners: list[dict[str, Any]] = []  # where modules have parameters
        self._keys: list[str] = []
        self._values: list[Any] = []

    def on_values_changed(self, engine: Any) -> None:
        """Record the model when it is new."""
        if not self._owners:
            for module in engine.model.modules():
                for key, value in module._parameters.items():
                    self._owners.append(module._parameters)
                    self._keys.append(key)
                    self._values.append(value)

    def on_forward_begin(self, engine: Any) -> None:
        now = map(dict.get, self._owners, self._keys)
        is_same = list(map(operator.is_, now, self._values))
        if not all(is_same):
            number = is_same.index(False)
            _refuse_replaced(engine, self._keys[number], self._values[number])

    def on_step(self, engine: Any) -> None:
        self.on_forward_begin(engine)
        with torch._C.DisableTorchFunctionSubclass():
            for flat in engine.flats:
                for index, parameter in enumerate(() if flat.is_trainable else flat.parameters):
                    if parameter.requires_grad:
                        _refuse_unfrozen(flat.names[index])
                for index, parameter in enumerate(() if flat.is_sharded else flat.parameters):
                    if parameter.data_ptr() != flat.views[index].data_ptr():
                        _refuse_moved(flat.names[index])


def _refuse_replaced(engine: Any, key: str, value: Any) -> None:
    name = engine.name_of(value) if value is not None else key
    raise RuntimeError(
        f"the parameter {name!r} was added, replaced or removed after shard(): change the model before shard(), and "
        "values inside gathered(model, write_rank=0)"
    )


def _refuse_unfrozen(name: str) -> None:
    raise RuntimeError(
        f"{name!r} was frozen when shard() was called, and requires a gradient now: there are no optimizer states for "
        "it. Set requires_grad before shard()"
    )


def _refuse_moved(name: str) -> None:
    raise RuntimeError(
        f"the data of {name!r} was replaced after shard(): write into the parameter instead, as in "
        "parameter.copy_(values)"
    )

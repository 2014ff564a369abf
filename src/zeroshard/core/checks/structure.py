"""Changes of the model after shard() that cannot count any more."""

from __future__ import annotations

import operator
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn

from zeroshard.core.checks.observers import Observer


class ChangedModel(Observer):
    """Parameters that were frozen, unfrozen, replaced, added, moved or shared with other processes."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []  # where modules have parameters and modules
        self._values: list[Any] = []  # of them
        self._replicated: list[nn.Parameter] = []  # whose memory never changes
        self._views: list[torch.Tensor] = []  # what they have to be

    def on_values_changed(self, engine: Any) -> None:
        """Record the model when it is new."""
        if not self._entries:
            for module in engine.model.modules():
                self._entries += [module._parameters, module._modules]
            self._values = list(chain.from_iterable(map(dict.values, self._entries)))
            for flat in engine.flats:
                for parameter, name in zip(flat.parameters, flat.names, strict=True):
                    parameter.share_memory_ = partial(_refuse_sharing, name)
            replicated = [flat for flat in engine.flats if not flat.is_sharded]
            self._replicated = list(chain.from_iterable(flat.parameters for flat in replicated))
            self._views = list(chain.from_iterable(flat.views for flat in replicated))

    def on_forward_begin(self, engine: Any) -> None:
        now = list(chain.from_iterable(map(dict.values, self._entries)))
        if len(now) != len(self._values) or not all(map(operator.is_, now, self._values)):
            for name, parameter in engine.model.named_parameters(remove_duplicate=False):
                if id(parameter) not in engine.place and isinstance(parameter, nn.Parameter):
                    _refuse_replaced(name)  # functional_call() uses tensors
        with torch._C.DisableTorchFunctionSubclass():
            is_same = list(map(torch.Tensor.is_set_to, self._replicated, self._views))
        if not all(is_same) and not engine.gathered_count:
            refuse_moved(engine.name_of(self._replicated[is_same.index(False)]))

    on_masters_used = on_forward_begin

    def on_foreign_gradients(self, found: Any) -> None:
        gradient, is_foreign = found
        flat = gradient.flat
        for parameter, name, foreign in zip(flat.parameters, flat.names, is_foreign, strict=True):
            if foreign and not parameter.requires_grad:
                raise RuntimeError(
                    f"{name!r} is frozen on this rank, and another rank has a gradient of it: set requires_grad "
                    "alike on all ranks"
                )

    def on_step(self, engine: Any) -> None:
        self.on_forward_begin(engine)
        with torch._C.DisableTorchFunctionSubclass():
            for flat in engine.flats:
                for index, parameter in enumerate(() if flat.is_trainable else flat.parameters):
                    if parameter.requires_grad or parameter._grad is not None:
                        _refuse_unfrozen(flat.names[index])


def _refuse_replaced(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name!r} is another nn.Parameter than the one that was sharded, so nobody would train it: change the model "
        "before shard(), and values inside gathered(model, write_rank=0)"
    )


def _refuse_unfrozen(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name!r} was frozen when shard() was called, and requires or has a gradient now: there are no optimizer "
        "states for it. Set requires_grad before shard()"
    )


def refuse_moved(name: str) -> NoReturn:
    """Raise for a parameter with other memory than shard() has given it."""
    raise RuntimeError(
        f"the data of {name!r} was replaced after zeroshard.shard(): write into the parameter instead, as in "
        "parameter.copy_(values), and change dtype, device, shape and memory format before shard()"
    )


def _refuse_sharing(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name!r} is sharded: its memory cannot be shared with other processes. Share the model before shard(), or "
        "zeroshard.state_dict(model)"
    )

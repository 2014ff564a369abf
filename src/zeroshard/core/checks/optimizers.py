"""What users might do wrong with optimizers, in shard() and with their groups."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.optim.optimizer_copy import OptimizerRefusedError, check_holds_no_parameters, is_scheduler_step
from zeroshard.optim.routing import check_empty_groups

# They update each element from its own gradient and states, so they can update slices.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)
NEEDS_MORE = frozenset(getattr(torch.optim, name) for name in "Adafactor LBFGS Muon SparseAdam".split())
UPDATE_METHODS = ("step", "_init_group")  # an elementwise class that overrides one may not be elementwise any more
REPLACED_METHODS = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict", "train", "eval")


def check_optimizers(model: nn.Module, optimizers: Sequence[Any], elementwise: bool | None) -> None:
    """Raise before anything is changed for optimizers that cannot be sharded."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, int] = {}
    for number, each in enumerate(optimizers):
        kind = type(each).__name__
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizer is a torch.optim.Optimizer, a list of them or None, got {kind}")
        _check_class(type(each), elementwise)
        if not is_known(type(each)):
            try:
                check_holds_no_parameters(each)
            except OptimizerRefusedError as why:
                raise ValueError(f"{kind} cannot run on shards: {why}") from None
        if "step" in vars(each) and not is_scheduler_step(each):
            raise ValueError(
                f"step() of this {kind} was replaced by another function, which would get one rank's slices: put what "
                "it does into register_step_pre_hook() or register_step_post_hook()"
            )
        check_empty_groups(each.param_groups)
        for position, group in enumerate(each.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"group {position} of optimizer {number} has a parameter of shape {tuple(parameter.shape)} "
                        "that is not in the model: make the optimizer from model.parameters() before shard()"
                    )
                other = owners.setdefault(id(parameter), number)
                if other != number:
                    raise ValueError(
                        f"{names[id(parameter)]!r} is in optimizer {other} ({type(optimizers[other]).__name__}) and in "
                        f"optimizer {number} ({kind}): give each parameter to one optimizer"
                    )


def _check_class(kind: type[Optimizer], elementwise: bool | None) -> None:
    """Raise if a class is not known, and not declared, to update each element by itself."""
    if elementwise is False or not NEEDS_MORE.isdisjoint(kind.__mro__):
        raise NotImplementedError(
            f"{kind.__name__} updates parameters as a whole, which the new core does not support yet"
        )
    if not elementwise and not is_known(kind):
        raise ValueError(
            f"{kind.__name__} is not known to update each element from its own value, gradient and states alone: if "
            "it does, pass elementwise=True to shard()"
        )


def is_known(kind: type[Optimizer]) -> bool:
    """Return whether a class updates as one of torch's elementwise ones: it is that, or overrides nothing of it."""
    base: Any = next((base for base in kind.__mro__ if base in ELEMENTWISE), None)
    return base is not None and all(
        inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(base, name)) for name in UPDATE_METHODS
    )


def replace_methods(given: Optimizer) -> dict[str, Any]:
    """Let the optimizer that shard() was given raise. Its groups and hooks stay, for schedulers that have it.

    Return what it has had in its own dictionary.
    """
    before = dict(vars(given))

    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(
            "this is the optimizer that was passed to zeroshard.shard(), and it no longer has the model's gradients "
            "and states: use the one that shard() returned (model, optimizer = zeroshard.shard(model, optimizer))"
        )

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else schedulers warn that step() was replaced
    given._opt_called = True  # type: ignore[attr-defined]  # else they warn that it was not called
    for name in REPLACED_METHODS:
        if hasattr(given, name):
            setattr(given, name, refuse)
    return before


def names_to_add(parameters: list[Any], engine: Any) -> list[str]:
    """Return the names of parameters for a new group; raise if they cannot be in one."""
    found = []
    for each in parameters:
        parameter = each[1] if isinstance(each, tuple) else each
        flat, index = engine.place.get(id(parameter), (None, 0))
        if flat is None or not flat.is_trainable:
            raise ValueError("add_param_group() takes trainable parameters of the sharded model only")
        for number, groups in enumerate(engine.groups):
            if any(id(parameter) in ids for _, ids in groups):
                raise ValueError(f"{flat.names[index]!r} is already in a parameter group of optimizer {number}")
        found.append(flat.names[index])
    return found

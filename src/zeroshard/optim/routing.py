"""Routing: which parameters are updated on flat slices, and which as a whole, by which rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zeroshard.engine import Engine
from zeroshard.memory import OwnedParam, Routing
from zeroshard.optim.optimizer_copy import OptimizerCopier, SideEffectGuard
from zeroshard.optim.param_groups import ParamGroups

# Options in which the groups of one rule usually differ, and labels of groups.
PER_GROUP_OPTIONS = (
    "params",
    "param_names",
    "name",
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "lr_scale",
    "weight_decay",
)


def find_routing(engine: Engine, groups: ParamGroups) -> Routing:
    """Return how the parameters of all groups are updated."""
    numels = {name: flat.layout.numels[i] for flat in engine.gradients.flat_grads for i, name in enumerate(flat.names)}
    group_of = {name: group for group in groups.as_named() for name in group["params"]}
    known: dict[Any, int | None] = {}  # bytes of states by group, shape and dtype
    whole: dict[str, OwnedParam] = {}
    for param in groups.whole.params:
        group, shape = group_of[param.name], param.parameter.shape
        key = id(group), shape, param.dtype
        if key not in known:
            update = measure_update(groups.inner, group, shape, param.dtype)
            known[key] = None if update is None else update.state_bytes
        whole[param.name] = OwnedParam(param.owner, shape.numel(), known[key])
    matrices = groups.muon.owned_matrices() if groups.muon is not None else {}
    flat = {name: numels[name] for name in group_of if name in numels and name not in whole | matrices}
    return Routing(engine.comm.shard_axis.size, flat, whole, matrices)


class MeasuredUpdate(NamedTuple):
    """What the update of one parameter stores and computes."""

    state_bytes: int  # after its first step
    flops: int  # of its matmuls


def measure_update(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype
) -> MeasuredUpdate | None:
    """Measure the first step of a parameter, with a copy of the optimizer on the meta device.

    None if that fails: Adafactor reads values, and the meta device has none.

    >>> weight = nn.Parameter(torch.ones(2, 2))
    >>> muon, adafactor = torch.optim.Muon([weight]), torch.optim.Adafactor([weight])
    >>> [measure_update(o, o.param_groups[0], torch.Size([3, 4]), torch.float32) for o in (muon, adafactor)]
    [MeasuredUpdate(state_bytes=48, flops=990), None]
    """
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    counter = MatmulFlopsMode()
    try:
        copier = OptimizerCopier(optimizer, parameter.device)
        copier.clone.param_groups.append({**copier.copy_options(group, 0), "params": [parameter]})
        with torch.no_grad(), counter, SideEffectGuard():  # type: ignore[no-untyped-call]
            type(optimizer).step(copier.clone)
    except Exception:  # any code of the user: it may need values, or draw random numbers
        return None
    leaves = tree_leaves(copier.clone.state[parameter])
    state_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    return MeasuredUpdate(state_bytes, counter.flops)


class MatmulFlopsMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of matmuls on this thread; torch's own counter hooks the modules of all threads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def check_empty_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a group has no parameters and no other group has its rule.

    [Note: groups without parameters]
    torch accepts a group without parameters, and a split by weight decay often leaves one: a model without biases has
    no vectors. That is harmless, since the other groups follow the same rule. But an empty group with options that no
    other group has means that a filter matched nothing, for example that of the matrices for Muon: all parameters
    would be updated by another rule, and nothing would show it.

    >>> check_empty_groups([{"params": [1], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}])
    >>> check_empty_groups([{"params": [1], "use_muon": False}, {"params": [], "use_muon": True}])
    Traceback (most recent call last):
        ...
    ValueError: parameter group 1 has no parameters, and no other group has its options (use_muon=True): ...
    """
    rules = [{key: value for key, value in group.items() if key not in PER_GROUP_OPTIONS} for group in groups]
    used = [repr(rule) for rule, group in zip(rules, groups, strict=True) if len(group["params"])]
    for number, (rule, group) in enumerate(zip(rules, groups, strict=True)):
        if not len(group["params"]) and repr(rule) not in used:
            common = [key for key in rule if all(repr(other.get(key)) == repr(rule[key]) for other in rules)]
            options = ", ".join(f"{key}={value!r}" for key, value in rule.items() if key not in common)
            what = f"and no other group has its options ({options})" if options else "nor has any other group"
            raise ValueError(
                f"parameter group {number} has no parameters, {what}: did the filter that selects them match nothing? "
                "Correct the filter, or omit the group"
            )

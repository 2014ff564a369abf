"""Copy an optimizer, so that a trial can step the copy without side effects on the user's."""

from __future__ import annotations

import enum
import inspect
import logging
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.optim.param_overrides import is_manager, make_empty_manager
from zeroshard.optim.slices import is_elementwise

MAX_COPIED_ELEMENTS = 4096  # largest tensor (elements) or container (entries) that is copied
_HEAP_TYPE = 1 << 9  # flag of classes that are made by a class statement
RANDOM_ERROR = (
    "its step() draws random numbers. A rank would draw for its own part of the parameters only, so its draws would "
    "not be those of the unsharded run. Turn the randomness off in the optimizer, or use another one (AdamW, Muon, …)"
)
SHARED_TYPES = (  # values that a copy shares with the original
    *(type(None), bool, float, complex, str, bytes, type, types.ModuleType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, logging.Logger),
)


class ElementwiseUndecidedError(Exception):
    """A trial cannot decide whether an optimizer is elementwise; the message says why."""


class OptimizerRefusedError(ElementwiseUndecidedError):
    """A trial shows that an optimizer cannot run on shards, elementwise or not; the message says why."""


class OptimizerCopier:
    """Copies an optimizer to a device, without its groups and states; the copy shares nothing that a step may change.

    ``only_checks``: share what cannot be copied, to find out only whether it holds parameters.

    >>> copier = OptimizerCopier(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5), torch.device("cpu"))
    >>> copier.clone.defaults["lr"], copier.clone.param_groups
    (0.5, [])
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, only_checks: bool = False) -> None:
        self._optimizer, self._device, self._only_checks = optimizer, device, only_checks
        self._objects: dict[int, Any] = {}  # copies of objects, by id; None: being copied
        self._param_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.clone: Any = object.__new__(type(optimizer))
        for key, value in vars(optimizer).items():
            if key.startswith("_optimizer_"):
                self.clone.__dict__[key] = OrderedDict()
            elif key not in ("param_groups", "state", "step", "train", "eval"):
                self.clone.__dict__[key] = self.copy(value, f"its attribute {key!r}")
        self.clone.param_groups = []
        self.clone.state = defaultdict(dict)

    def copy_options(self, group: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return a copy of a group's options, for a step on the CPU or a GPU without CUDA graphs."""
        options = {
            key: self.copy(value, f"{key!r} of its group {number}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        return {**options, **{key: value for key, value in (("fused", None), ("capturable", False)) if key in options}}

    def copy(self, value: Any, where: str) -> Any:
        """Return a copy of a value that a step may read or change; ``where`` names it in errors."""
        copy_nested = partial(self.copy, where=where)
        if isinstance(value, int) and not isinstance(value, bool):
            if value in self._param_ids:
                raise OptimizerRefusedError(
                    f"{where} holds the id() of a parameter, and on shards the parameters are other tensors. Put those "
                    "that it treats differently into groups of their own, or set an attribute on them that it reads"
                )
            return value
        if isinstance(value, SHARED_TYPES):
            return value
        if isinstance(value, torch.Tensor):
            if id(value) in self._param_ids or isinstance(value, nn.Parameter):
                raise OptimizerRefusedError(
                    f"{where} holds parameters, and on shards it would still use these. Read them from param_groups"
                )
            if value.numel() > MAX_COPIED_ELEMENTS:
                return self._share(value, f"{where} holds a tensor of {value.numel()} elements")
            return value.detach().to(self._device, copy=True)
        if isinstance(value, (list, tuple, set, frozenset, deque, dict)) and len(value) > MAX_COPIED_ELEMENTS:
            self._share(value, f"{where} holds {len(value)} entries")
        if isinstance(value, dict):
            copied = {copy_nested(key): copy_nested(entry) for key, entry in value.items()}
            return defaultdict(value.default_factory, copied) if isinstance(value, defaultdict) else type(value)(copied)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(copy_nested, value))
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return type(value)(map(copy_nested, value))
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                copy_nested(cell.cell_contents)
            return value
        if isinstance(value, partial):
            keywords = {key: copy_nested(entry) for key, entry in value.keywords.items()}
            return partial(copy_nested(value.func), *map(copy_nested, value.args), **keywords)
        if isinstance(value, types.MethodType):
            if value.__self__ is self._optimizer:
                return types.MethodType(value.__func__, self.clone)
            if isinstance(value.__self__, type):
                return value
        if isinstance(value, (torch.Generator, random.Random)):
            return self._share(value, f"{where} holds a generator: {RANDOM_ERROR}", OptimizerRefusedError)
        if isinstance(value, (torch.optim.Optimizer, nn.Module)):
            groups = [{"params": value.parameters()}] if isinstance(value, nn.Module) else value.param_groups
            if self._only_checks and self._param_ids.isdisjoint(id(p) for group in groups for p in group["params"]):
                return value
            raise OptimizerRefusedError(
                f"{where} holds a {type(value).__name__}, whose parameters it would still use on shards. If it wraps "
                "an optimizer, pass that one to shard()"
            )
        if is_manager(value):
            return make_empty_manager(value)  # the sharded optimizer has another one, too
        if _is_plain_object(value):
            clone = self._objects.setdefault(id(value), None)
            if clone is None:
                clone = object.__new__(type(value))
                clone.__dict__.update({key: copy_nested(entry) for key, entry in vars(value).items()})
                self._objects[id(value)] = clone
            return clone
        return self._share(value, f"{where} holds a {type(value).__name__}, which cannot be copied for a trial")

    def _share(self, value: Any, why: str, error: type[Exception] = ElementwiseUndecidedError) -> Any:
        """Return a value that is not copied, if nothing is stepped; else raise the reason."""
        if self._only_checks:
            return value
        raise error(why)


def _is_plain_object(value: Any) -> bool:
    """Return whether an object is all in its ``__dict__``: nothing of a C extension."""
    if not hasattr(value, "__dict__"):
        return False
    classes = type(value).__mro__[:-1]
    is_python = all(kind.__flags__ & _HEAP_TYPE and not vars(kind).get("__slots__") for kind in classes)
    has_own_copy = any(vars(kind).keys() & {"__reduce__", "__reduce_ex__", "__getstate__"} for kind in classes)
    return (is_python and not has_own_copy) or type(value) is types.SimpleNamespace


def is_scheduler_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the ``step`` in an optimizer's ``__dict__`` is an LR scheduler's wrapper, which only counts."""
    step: Any = vars(optimizer).get("step")
    return hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step


def check_holds_no_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise if attributes or options of groups hold parameters, or their ids."""
    copier = OptimizerCopier(optimizer, torch.device("cpu"), only_checks=True)
    for number, group in enumerate(optimizer.param_groups):
        copier.copy_options(group, number)


def check_can_copy(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer does something that a trial cannot show or must not run."""
    hooks = [value for key, value in vars(optimizer).items() if key.startswith("_optimizer_step_") and value]
    if hooks:
        raise ElementwiseUndecidedError("there are hooks on its step, which a trial must not run")
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        raise ElementwiseUndecidedError("there are hooks on every optimizer's step, which a trial must not run")
    for key in optimizer.state:
        if not isinstance(key, torch.Tensor):
            raise ElementwiseUndecidedError(
                f"it keeps a state under {key!r}, which is not a parameter: a checkpoint would not contain it"
            )
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = [
        p.name for p in arguments if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if required:
        raise ElementwiseUndecidedError(
            f"its step() needs {', '.join(map(repr, required))}, and zeroshard calls step() without arguments"
        )


class SideEffectGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise if a trial draws random numbers or communicates, before either has an effect."""

    def __enter__(self) -> Any:
        self._numpy_random = sys.modules.get("numpy.random")
        self._rng_states_before = self._rng_states()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        states = self._rng_states()
        if states != self._rng_states_before:
            random.setstate(self._rng_states_before[0])
            if self._numpy_random is not None:
                self._numpy_random.set_state(self._rng_states_before[1])
            raise OptimizerRefusedError(RANDOM_ERROR)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise OptimizerRefusedError(RANDOM_ERROR)
        if "c10d" in func.namespace:
            raise OptimizerRefusedError(
                "its step() communicates between ranks, as if each had full parameters. Use its variant for one device"
            )
        return func(*args, **(kwargs or {}))

    def _rng_states(self) -> Any:
        if self._numpy_random is None:
            return random.getstate(), None
        name, keys, *rest = self._numpy_random.get_state()
        return random.getstate(), (name, keys.tolist(), *rest)


def state_bytes_per_element(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the state bytes per fp32 element of an optimizer, measured by a step on a small parameter.

    >>> state_bytes_per_element(torch.optim.AdamW([nn.Parameter(torch.ones(1))]))
    8
    >>> state_bytes_per_element(torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9))
    4
    """
    if optimizer is None or not optimizer.param_groups:
        return 0
    shape = torch.Size([2])
    is_torchs = type(optimizer).__module__.startswith("torch.optim")  # these draw no random numbers
    try:
        with nullcontext() if is_torchs else torch.random.fork_rng(devices=[]):
            state = state_after_first_step(optimizer, optimizer.param_groups[0], shape)
    except Exception:  # a custom optimizer that cannot step alone: assume two fp32 states, like Adam
        return 8
    return sum(4 for key, value in state.items() if is_elementwise(key, value, shape))


def state_after_first_step(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return the state of a parameter of ``shape`` after one step with a group's hyper-parameters.

    A copy of the optimizer steps a new parameter. Its exceptions are not caught.

    >>> list(state_after_first_step(torch.optim.Adam([nn.Parameter(torch.ones(1))]), {"lr": 1e-3}, torch.Size([2])))
    Traceback (most recent call last):
        ...
    KeyError: 'betas'
    """
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    copier = OptimizerCopier(optimizer, parameter.device)
    copier.clone.param_groups = [{**copier.copy_options(group, 0), "params": [parameter]}]
    type(optimizer).step(copier.clone)
    return dict(copier.clone.state[parameter])


def state_dtypes(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dims: int, dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return the dtypes of the states that an optimizer gives to a parameter of ``dtype``, by key, as far as known.

    >>> adam = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    >>> state_dtypes(adam, adam.param_groups[0], 1, torch.bfloat16)
    {'step': torch.float32, 'exp_avg': torch.bfloat16, 'exp_avg_sq': torch.bfloat16}
    """
    try:
        with torch.no_grad(), SideEffectGuard():  # type: ignore[no-untyped-call]
            state = state_after_first_step(optimizer, group, torch.Size([2] * dims), dtype)
    except Exception:  # any code of the user: it may need other shapes, or draw random numbers
        return {}
    return {key: value.dtype for key, value in state.items() if isinstance(value, torch.Tensor)}


def number_states(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> set[str]:
    """Return the states that are one number for all elements of a parameter, by key, as far as known.

    >>> nadam = torch.optim.NAdam([nn.Parameter(torch.ones(1))])
    >>> sorted(number_states(nadam, nadam.param_groups[0]))
    ['mu_product', 'step']
    """
    shape = torch.Size([1])
    try:
        with torch.no_grad(), SideEffectGuard():  # type: ignore[no-untyped-call]
            state = state_after_first_step(optimizer, group, shape)
    except Exception:  # as in state_dtypes()
        return set()
    return {key for key, value in state.items() if not is_elementwise(key, value, shape)}


def _placeholder(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter that takes no memory."""
    return nn.Parameter(torch.zeros((), dtype=dtype, device="cpu").expand(shape))


def read_state_dict(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    shapes: list[list[torch.Size]],
    dtypes: list[list[torch.dtype]],
) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """Return the groups of a state dict, and its states by id, in the form in which the optimizer stores them.

    A class may have its own ``load_state_dict``, because its ``state_dict()`` has another form: bitsandbytes nests
    quantized states. By ``__setstate__``, torch's own complete the options and convert the step counts of earlier
    versions. ``shapes`` of the parameters and ``dtypes`` of their updates, by group. Raise if options are missing then.

    >>> sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    >>> adam = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    >>> in_groups = [[torch.Size([2])]], [[torch.float32]]
    >>> groups, states = read_state_dict(sgd, sgd.state_dict(), *in_groups)
    >>> groups[0]["lr"], states
    (0.1, {})
    >>> read_state_dict(sgd, adam.state_dict(), *in_groups)
    Traceback (most recent call last):
        ...
    ValueError: the state dict is not of SGD: its group 0 has no 'dampening', 'momentum'. Load one of the same class
    """
    groups: list[dict[str, Any]] = state_dict["param_groups"]
    states: dict[Any, dict[str, Any]] = state_dict["state"]
    kind = type(optimizer)
    has_own_load = kind.load_state_dict is not torch.optim.Optimizer.load_state_dict
    if has_own_load or kind.__setstate__ is not torch.optim.Optimizer.__setstate__:
        clone = OptimizerCopier(optimizer, torch.device("cpu")).clone
        by_group = [list(map(_placeholder, *group)) for group in zip(shapes, dtypes, strict=True)]
        ids = [param_id for group in groups for param_id in group["params"]]
        parameters = [p for group in by_group for p in group]
        if has_own_load:
            clone.param_groups = [{"params": group} for group in by_group]
            clone.load_state_dict({"state": states, "param_groups": groups})
        else:
            pairs = zip(parameters, ids, strict=True)
            found = defaultdict(dict, {p: dict(states[param_id]) for p, param_id in pairs if param_id in states})
            listed = [{**group, "params": params} for group, params in zip(groups, by_group, strict=True)]
            clone.__setstate__({"state": found, "param_groups": listed})
        groups = clone.param_groups
        states = {param_id: clone.state[p] for param_id, p in zip(ids, parameters, strict=True) if p in clone.state}
    for number, group in enumerate(groups):
        # torch adds "differentiable" to the defaults of an optimizer that was loaded, and not to its groups
        missing = sorted(key for key in optimizer.defaults if key not in group and key != "differentiable")
        if missing:
            raise ValueError(
                f"the state dict is not of {kind.__name__}: its group {number} has no "
                f"{', '.join(map(repr, missing))}. Load one of the same class"
            )
    return groups, states

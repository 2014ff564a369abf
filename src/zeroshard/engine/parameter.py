"""Parameter classes: how a parameter behaves while its values are not usable as they are.

[Note: guarded parameters]
Access to a tensor whose storage was resized to zero crashes the interpreter. So while a parameter's values are not in
memory, its ``__class__`` is ``GuardedParameter``. The object stays the same, so every reference to it (in an optimizer,
a tied module, a user's variable) stays valid. It answers what needs no values. Any other access first asks the unit to
unshard the values (their all-gather may be under way, or a running forward may use the parameter outside its module),
and raises an error with the parameter's name and the remedy if the unit cannot. Swapping ``__class__`` both ways costs
0.3 µs.

A few C++ functions (``torch.tensor``, ``torch.vmap``, DLPack) do not check the class. So between passes ``data`` also
points at a single NaN, expanded to the parameter's shape: these functions read NaN instead of freed memory.

[Note: tensor-parallel parameters]
A tensor-parallel parameter is a DTensor. ZeRO partitions this rank's TP shard of it, its ``_local_tensor``: this points
at the flat's memory, as ``data`` of a plain parameter does. The DTensor around it does not change, nor does what
autograd knows about the parameter. While it is guarded, its class is ``GuardedDTensor`` instead of ``DTensor``: Python
swaps only classes with the same layout.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.param_data import GET_DATA

PICKLE_ERROR = (
    "a sharded model, its parameters and its optimizer cannot be pickled, by torch.save or otherwise: this rank holds "
    "a part of them. Use zeroshard.save(path, model, optimizer), or torch.save a state_dict() taken inside "
    "`with zeroshard.gathered(model):`"
)


class ParamUnit(Protocol):
    """The unit of a parameter, as the parameter uses it."""

    @property
    def gathered_block(self) -> GatheredBlock | None:
        """The open ``gathered()`` block that the unit is in."""

    def record_data_alias(self, values: torch.Tensor) -> None:
        """Remember that the user has ``parameter.data``, and may write to it."""


class ParamOwner(Protocol):
    """The engine of a parameter's model, as the parameter uses it."""

    param_grads: Any  # a ParamGrads: ``parameter.grad`` between backward and the next forward

    def acquire_for_op(self, unit: Any) -> bool:
        """Unshard a unit for an operation; return whether that is possible now."""

    def release_after_op(self, unit: Any, result: object) -> None:
        """Release a unit after an operation, whose result may be a view."""


def _no_owner() -> None:
    """Return the owner of a parameter whose engine does not exist yet."""


class ParamInfo:
    """Name, unit and flat of a managed parameter. All references are weak: parameter → info → unit would be a cycle."""

    def __init__(self, name: str, unit: ParamUnit, flat: FlatParam, index: int) -> None:
        self.name = name
        self.index = index  # in the flat
        self.unit = weakref.ref(unit)
        self.flat = weakref.ref(flat)
        self.owner: Callable[[], ParamOwner | None] = _no_owner  # the engine
        self.allows_new_optimizer = False  # one may be made now, and is given to shard() before its first step

    def __reduce__(self) -> NoReturn:
        """Raise: see :data:`PICKLE_ERROR`."""
        raise RuntimeError(f"{self.name!r} is sharded: {PICKLE_ERROR}")

    def acquire_for_op(self) -> bool:
        """Unshard the values for an operation; return whether that is possible now."""
        unit, owner, flat = self.unit(), self.owner(), self.flat()
        if unit is None or owner is None or flat is None or not owner.acquire_for_op(unit):
            return False
        if flat.spec.is_gathered_in_float8 and unit.gathered_block is None:
            owner.release_after_op(unit, None)
            raise RuntimeError(
                f"the values of {self.name!r} are gathered in float8, for its layer alone, but other code uses them: "
                'with precision="fp8", name the layer in keep_bf16 of zeroshard.shard()'
            )
        return True

    def release_after_op(self, result: object) -> None:
        """Release the values after an operation, whose result may be a view. Call it after each acquire_for_op()."""
        unit, owner = self.unit(), self.owner()
        if unit is not None and owner is not None:
            owner.release_after_op(unit, result)


def param_info(parameter: torch.Tensor) -> ParamInfo | None:
    """Return the ParamInfo of a managed parameter, None for any other tensor."""
    return parameter.__dict__.get("_zeroshard")


def _check_not_new_optimizer(parameter: Any, frame: FrameType | None) -> None:
    """Raise if the access to a parameter comes from an optimizer that was created after shard()."""
    for _ in range(3):  # a method of the optimizer, or a function that it calls
        if frame is None:
            return
        code = frame.f_code
        owner = frame.f_locals.get("self") if "self" in code.co_varnames[:1] else None
        if type(owner).__name__ == "ShardedOptimizer":
            return  # its step() runs the user's closure
        if isinstance(owner, torch.optim.Optimizer):
            parameters = [other for group in owner.param_groups for other in group["params"]]
            if code.co_name == "add_param_group" or any(other is parameter for other in parameters):
                info, kind = param_info(parameter), type(owner).__name__
                if info is not None and info.allows_new_optimizer and code.co_name == "add_param_group":
                    return
                raise RuntimeError(
                    f"{kind} was given {info.name if info is not None else 'a parameter'!r} of a sharded model. An "
                    "optimizer that is made after shard() cannot update it, since the ranks hold shards: make it "
                    f"first and give it to shard(), as in `model, optimizer = zeroshard.shard(model, "
                    f"{kind}(model.parameters(), …))`, and step the one that shard() returns"
                )
        frame = frame.f_back


class _ReducedGradMixin:
    """A parameter between backward and the next forward: plain values, but ``grad`` is the reduced gradient.

    Its gradient is stored elsewhere, so the plain attribute would be None, and ``torch.nn.utils.clip_grad_norm_`` would
    silently find nothing to clip. ``grad`` returns the reduced gradient if this rank has all of it, and raises if not.
    """

    __slots__ = ()  # in all classes here: swapped classes must have the same layout

    def __reduce_ex__(self: Any, protocol: Any) -> NoReturn:
        """Raise: see :data:`PICKLE_ERROR`."""
        info = param_info(self)
        raise RuntimeError(f"{info.name!r} is sharded: {PICKLE_ERROR}" if info is not None else PICKLE_ERROR)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the values into a new parameter that does not belong to a sharded model."""
        if id(self) not in memo:
            values, kind = self.detach().clone(), type(self).__bases__[-1]
            is_dtensor = isinstance(self, DTensor)
            make = nn.Parameter if is_dtensor else functools.partial(torch.Tensor._make_subclass, kind)
            memo[id(self)] = make(values, self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy

    @property
    def grad(self: Any) -> torch.Tensor | None:
        info = param_info(self)
        _check_not_new_optimizer(self, sys._getframe(1))
        owner = info.owner() if info is not None else None
        return owner.param_grads.get(info) if owner is not None else None

    @grad.setter
    def grad(self: Any, value: torch.Tensor | None) -> None:
        info = param_info(self)
        owner = info.owner() if info is not None else None
        if owner is not None:
            owner.param_grads.set(info, value)


# Functions that need no values: the tensor's metadata is enough.
_METADATA_FUNCTIONS = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape dtype device layout requires_grad is_leaf grad_fn names ndim itemsize nbytes is_cuda is_cpu is_meta "
        "is_sparse is_quantized is_nested output_nr _version _backward_hooks retains_grad grad_dtype"
    ).split()
    if hasattr(getattr(torch.Tensor, name, None), "__get__")
} | {
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_signed,
    torch.Tensor.get_device,
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}


_IS_LEAF = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]  # what a new optimizer reads first
_LAYOUT_METHODS = {torch.Tensor.stride, torch.Tensor.is_contiguous}  # of the unsharded values: see ``_meta_like``


class _GuardedMixin(_ReducedGradMixin):
    """A parameter whose next access is intercepted: see [Note: guarded parameters]."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_LEAF:
            _check_not_new_optimizer(args[0], sys._getframe(1))
        if func in _LAYOUT_METHODS:
            args = (_meta_like(args[0]), *args[1:])
        elif func not in _METADATA_FUNCTIONS:
            return _call_unsharded(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def set_(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise: torch's own method does not call __torch_function__."""
        raise RuntimeError(_access_error(self, torch.Tensor.set_))


class GatheredBlock:
    """One ``with gathered():`` block of a unit."""

    def __init__(self) -> None:
        self.is_open = True
        # version counters and addresses of each flat's parameters at entry
        self.snapshot: list[tuple[list[int], list[int]]] = []


class _GatheredMixin(_ReducedGradMixin):
    """A partitioned parameter inside ``gathered()``: its full values are in memory that belongs to the block.

    Autograd saves the parameter itself, not its memory, so a backward after the block would read other values. So the
    results of operations on it are hooked, and such a backward raises. A module's forward does not need this: its
    parameters are plain during the call, and its backward unshards the unit.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func not in _METADATA_FUNCTIONS and torch.is_grad_enabled():
                for parameter in _instances(_GatheredMixin, args, kwargs or {}):
                    _forbid_backward_after_block(parameter, result)
        return result


def _forbid_backward_after_block(parameter: Any, result: Any) -> None:
    """Make a backward through ``result`` raise after the end of the parameter's ``gathered()`` block."""
    info = param_info(parameter)
    unit = info.unit() if info is not None else None
    if info is None or unit is None or unit.gathered_block is None:
        return
    name, block = info.name, unit.gathered_block

    def check(gradient: torch.Tensor) -> None:
        if not block.is_open:
            raise RuntimeError(
                f"this backward needs the values of {name!r}, which an operation used inside `with "
                "zeroshard.gathered()` and which are partitioned again: call backward() inside the block, or use the "
                "parameter in the model's forward"
            )

    for tensor in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None and not is_functorch_wrapped(tensor):
            tensor.register_hook(check)  # type: ignore[no-untyped-call]


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a ``torch.func`` level, whose backward runs inside the transform's call."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class _DataAliasMixin(_ReducedGradMixin):
    """Exposes the reduced gradient and records reads of ``data``: autograd does not count changes made through it."""

    __slots__ = ()

    @property
    def data(self: Any) -> torch.Tensor:
        return _record_data_alias(self, GET_DATA(self))

    @data.setter
    def data(self: Any, values: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]


def _record_data_alias(parameter: Any, values: torch.Tensor) -> torch.Tensor:
    info = param_info(parameter)
    unit = info.unit() if info is not None else None
    if unit is not None:
        unit.record_data_alias(values)
    return values


class ReducedGradParameter(_DataAliasMixin, nn.Parameter):
    """A parameter between backward and the next forward."""


class GatheredParameter(_GatheredMixin, nn.Parameter):
    """A partitioned parameter inside ``gathered()``."""


class GuardedParameter(_GuardedMixin, nn.Parameter):
    """A parameter whose next access is intercepted."""


class ReducedGradDTensor(_DataAliasMixin, DTensor):
    """A tensor-parallel parameter between backward and the next forward: see [Note: tensor-parallel parameters]."""

    __slots__ = ()


class GatheredDTensor(_GatheredMixin, DTensor):
    """A tensor-parallel parameter inside ``gathered()``."""

    __slots__ = ()


class GuardedDTensor(_GuardedMixin, DTensor):
    """A tensor-parallel parameter whose next access is intercepted."""

    __slots__ = ()

    # DTensor's own methods do not call __torch_function__

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a description without values."""
        return _describe(self)

    def to_local(self, **options: Any) -> torch.Tensor:
        """Return this rank's TP shard, if the unit can be unsharded now."""
        return _call_unsharded(DTensor.to_local, (self,), options)  # type: ignore[no-any-return]

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """Return the full parameter, if the unit can be unsharded now."""
        return _call_unsharded(DTensor.full_tensor, (self,), options)  # type: ignore[no-any-return]

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """Return the parameter with other placements, if the unit can be unsharded now."""
        return _call_unsharded(DTensor.redistribute, (self, *args), options)  # type: ignore[no-any-return]


def _call_unsharded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with all its guarded parameters unsharded; they stay so until it has run."""
    infos: list[ParamInfo] = []
    result: Any = None
    try:
        for parameter in _instances(_GuardedMixin, args, kwargs):
            info = param_info(parameter)
            if info is None or not info.acquire_for_op():
                if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
                    return _describe(parameter)
                raise RuntimeError(_access_error(parameter, func))
            infos.append(info)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _record_data_alias(args[0], result) if func == GET_DATA else result
    finally:  # also if it raised: the caller may catch the error and continue
        with torch._C.DisableTorchFunctionSubclass():
            for info in infos:
                info.release_after_op(result)


def is_guarded(parameter: nn.Parameter) -> bool:
    """Return whether the next access to a parameter is intercepted."""
    return isinstance(parameter, _GuardedMixin)


def _meta_like(parameter: Any) -> torch.Tensor:
    """Return a meta tensor with the shape and strides of the unsharded parameter."""
    info = param_info(parameter)
    flat = info.flat() if info is not None else None
    with torch._C.DisableTorchFunctionSubclass():
        if info is None or flat is None:
            return torch.empty_like(parameter, device="meta")
        if flat.tp_shards[info.index] is not None:  # a DTensor: its own strides are right
            return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        return torch.empty_strided(parameter.shape, flat.strides[info.index], dtype=parameter.dtype, device="meta")


def _instances(kind: type, *values: Any) -> list[Any]:
    """Return the instances of a class in the arguments of a call."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _instances(kind, *value)
        elif isinstance(value, dict):
            found += _instances(kind, *value.values())
    return found


def _describe(parameter: Any) -> str:
    info = param_info(parameter)
    name = info.name if info is not None else "?"
    return f"Parameter {name!r} (partitioned, {tuple(parameter.shape)}, {parameter.dtype}, {parameter.device})"


def _access_error(parameter: Any, func: Callable[..., Any]) -> str:
    info = param_info(parameter)
    name = info.name if info is not None else "a parameter"
    action = getattr(func, "__name__", str(func)).strip("_")
    flat = info.flat() if info is not None else None
    is_single_shard = flat is not None and flat.layout.shard_count == 1
    where = "there in forward and backward alone" if is_single_shard else "partitioned over the ranks"
    return (
        f"the values of {name!r} are {where}, so {action!r} cannot use them here. Use them on all ranks inside "
        "`with zeroshard.gathered(model):` (for state_dict() too), or name a writing rank to change them: "
        "`with zeroshard.gathered(model, write_rank=0):`. To train, call the model or one of its modules as "
        "model(x), not model.forward(x), so that its hooks gather the parameters; to call another method, register it: "
        'zeroshard.register_forward_method(model, "name")'
    )

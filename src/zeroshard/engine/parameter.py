"""What a parameter is when its values are not there to be used.

[Note: absent parameters]
Touching a tensor whose storage was resized to zero crashes the interpreter. So while a parameter's values are not in
place, its ``__class__`` is ``GuardedParameter``: the same object, which whoever holds it (an optimizer, a tied module,
a user's variable) goes on holding. It answers what needs no values. Anything else first asks its unit to bring the
values (they may be on their way, or a forward may be running that uses the parameter outside its own module) and
raises, with the parameter's name and the remedy, when the unit cannot. Swapping ``__class__`` both ways costs 0.3 µs.

A few C++ functions (``torch.tensor``, ``torch.vmap``, DLPack) never ask the class. So at rest, between passes, ``data``
is also pointed at a single NaN stretched over the shape: they read NaN, not memory that is gone.

[Note: many parameters]
A unit may have hundreds of parameters, and whatever is done for each of them several times a step is most of what the
host does. So nothing is called for each: loops over parameters read and write attributes alone, lists of views are made
once, and torch is given whole lists. What is left in a step of stage 3, in µs a parameter on a small CPU machine: two
writes of ``data`` 1.9, taking ``grad`` and looking for it three times 2.1, copying it 1.3, four changes of class 0.6.
In stages 0 to 2 a look at where it lies and how often it was changed, once a forward and once a step, adds 0.1 each.

[Note: divided parameters]
A parameter that is divided along a tensor axis is a DTensor. What ZeRO partitions is the part this rank has of it, its
``_local_tensor``: that is pointed at the flat's memory, as ``data`` of a plain parameter is, while the DTensor around
it, and with it what autograd knows of the parameter, stays. A class of its own (``GuardedDTensor``) takes the place of
``DTensor``, because Python swaps only classes of one layout.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from zeroshard.engine.engine import Engine
    from zeroshard.engine.flat_param import FlatParam
    from zeroshard.engine.unit import Unit

PICKLE_ERROR = (
    "a sharded model, its parameters and its optimizer cannot be pickled, by torch.save or otherwise: this rank holds "
    "a part of them. Use zeroshard.save(path, model, optimizer), or torch.save a state_dict() taken inside "
    "`with zeroshard.gathered(model):`"
)


class ParamInfo:
    """What a managed parameter knows about itself. It keeps nothing alive: parameter → card → unit would be a cycle."""

    def __init__(self, name: str, unit: Unit, flat: FlatParam, index: int) -> None:
        self.name = name
        self.index = index  # in the flat
        self.unit = weakref.ref(unit)
        self.flat = weakref.ref(flat)

    @property
    def engine(self) -> Engine | None:
        """The engine of the parameter's model."""
        unit = self.unit()
        return unit.engine() if unit is not None else None

    def __reduce__(self) -> NoReturn:
        """Refuse: see :data:`PICKLE_ERROR`."""
        raise RuntimeError(f"{self.name!r} is sharded: {PICKLE_ERROR}")

    def acquire_for_op(self) -> bool:
        """Bring the values if that may be done now."""
        unit, engine = self.unit(), self.engine
        return unit is not None and engine is not None and engine.acquire_for_op(unit)

    def release_after_op(self, result: object) -> None:
        """Say what came of the values that were brought: it may be a view of them. To be said after every fetch."""
        unit, engine = self.unit(), self.engine
        if unit is not None and engine is not None:
            engine.release_after_op(unit, result)


def param_info(parameter: torch.Tensor) -> ParamInfo | None:
    """Return the card of a managed parameter, None for any other tensor."""
    return parameter.__dict__.get("_zeroshard")


# ``_grad`` is ``grad`` as autograd keeps it, whatever the parameter's class makes of that attribute.


def has_autograd_grads(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether autograd has put a gradient into any of the parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        return True in [parameter._grad is not None for parameter in parameters]


def pop_autograd_grads(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """Take, densely, the gradients autograd has put into the parameters: see [Note: many parameters]."""
    with torch._C.DisableTorchFunctionSubclass():
        taken: list[torch.Tensor | None] = [parameter._grad for parameter in parameters]
        present = [gradient for gradient in taken if gradient is not None]
        if not present:
            return taken
        for parameter in parameters:
            parameter._grad = None
        plain = set(map(type, present)) == {torch.Tensor}
        if not plain or {gradient.layout for gradient in present} != {torch.strided}:
            pairs = zip(taken, parameters, strict=True)
            return [
                None if gradient is None else _local_dense_grad(gradient, parameter) for gradient, parameter in pairs
            ]
    return taken


def get_autograd_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient that is in the parameter itself."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = parameter._grad
        return gradient


def zero_autograd_grads(parameters: Sequence[nn.Parameter]) -> None:
    """Make the gradients that are in the parameters themselves zero: somebody may have put them there."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for parameter in parameters:
            if parameter._grad is not None:
                parameter._grad.zero_()


def _local_dense_grad(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if isinstance(gradient, DTensor):
        gradient = _local_grad(gradient, parameter)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


@torch.no_grad()
def _local_grad(gradient: DTensor, parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient, divided as the parameter is: sums over the tensor axis are made here."""
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def set_data(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Make ``values`` the parameter's, or of a DTensor this rank's part."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = values
    else:
        parameter.data = values


def set_data_all(parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor], has_dtensors: bool) -> None:
    """Do so for many. ``divided``: there may be DTensors among them."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter, value in zip(parameters, values, strict=True):
            if has_dtensors:
                set_data(parameter, value)
            else:
                parameter.data = value


def param_versions(parameters: Sequence[nn.Parameter]) -> list[int]:
    """How often each parameter has been changed in place, as autograd counts it."""
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter._version for parameter in parameters]


def data_ptrs(parameters: Sequence[nn.Parameter], has_dtensors: bool) -> list[int]:
    """Where each parameter's values lie. ``divided``: there may be DTensors among them."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(torch.Tensor.data_ptr, map(local_data, parameters) if has_dtensors else parameters))


_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # of each read another object: compare with ==


def local_data(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter's values, or of a DTensor this rank's part."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else _GET_DATA(parameter)  # not noted


def _check_not_new_optimizer(parameter: Any, frame: FrameType | None) -> None:
    """Raise where what asks for something of a parameter is an optimizer that was made over it after shard()."""
    for _ in range(3):  # a method of its own, or a function that this has called
        if frame is None:
            return
        code = frame.f_code
        owner = frame.f_locals.get("self") if "self" in code.co_varnames[:1] else None
        if isinstance(owner, torch.optim.Optimizer):
            held = [one for group in owner.param_groups for one in group["params"]]
            if code.co_name == "add_param_group" or any(one is parameter for one in held):
                card, kind = param_info(parameter), type(owner).__name__
                raise RuntimeError(
                    f"{kind} was given {card.name if card is not None else 'a parameter'!r} of a sharded model. An "
                    "optimizer that is made after shard() cannot update it, since the ranks hold shards: make it "
                    f"first and give it to shard(), as in `model, optimizer = zeroshard.shard(model, "
                    f"{kind}(model.parameters(), …))`, and step the one that shard() returns"
                )
        frame = frame.f_back


class _ReducedGradMixin:
    """A parameter between backward and the next forward: values as usual, but ``grad`` is the reduced gradient.

    Its gradient is kept elsewhere, so the plain attribute would be None, and ``torch.nn.utils.clip_grad_norm_`` would
    silently find nothing to clip. ``grad`` is the reduced gradient where this rank holds all of it, else an error.
    """

    __slots__ = ()  # as all classes here: swapped classes must have one layout

    def __reduce_ex__(self: Any, protocol: Any) -> NoReturn:
        """Refuse: see :data:`PICKLE_ERROR`."""
        card = param_info(self)
        raise RuntimeError(f"{card.name!r} is sharded: {PICKLE_ERROR}" if card is not None else PICKLE_ERROR)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the values into a parameter of its own, which no sharded model knows."""
        if id(self) not in memo:
            values, kind = self.detach().clone(), type(self).__bases__[-1]
            divided = isinstance(self, DTensor)
            make = nn.Parameter if divided else functools.partial(torch.Tensor._make_subclass, kind)
            memo[id(self)] = make(values, self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    @property
    def grad(self: Any) -> torch.Tensor | None:
        card = param_info(self)
        _check_not_new_optimizer(self, sys._getframe(1))
        engine = card.engine if card is not None else None
        return engine.state_guard.reduced_grad(card) if engine is not None and card is not None else None

    @grad.setter
    def grad(self: Any, value: torch.Tensor | None) -> None:
        card = param_info(self)
        engine = card.engine if card is not None else None
        if engine is None or card is None:
            return
        if value is not None:
            raise RuntimeError(
                f"the gradient of {card.name!r} is kept by zeroshard and cannot be replaced; None clears it"
            )
        engine.state_guard.clear_grad(card)


# What needs no values: answered by the tensor's own metadata.
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


_IS_LEAF = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]  # the first that a new optimizer asks for
_LAYOUT_METHODS = {torch.Tensor.stride, torch.Tensor.is_contiguous}  # answered as of the values, see ``_meta_like``


class _GuardedMixin(_ReducedGradMixin):
    """A parameter whose values are not in place: see [Note: absent parameters]."""

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
        """Refuse: torch's own does not ask the class."""
        raise RuntimeError(_access_error(self, torch.Tensor.set_))


class GatheredBlock:
    """One ``with gathered():`` block, as the parameters of a unit know it."""

    def __init__(self) -> None:
        self.is_open = True


class _GatheredMixin(_ReducedGradMixin):
    """A partitioned parameter inside ``gathered()``: its full values lie in memory of the block's own.

    Autograd saves the parameter itself, not its memory, so a backward after the block would find other values there.
    What an operation computes from it is therefore hooked, and such a backward raises. A module's forward needs none of
    this: its parameters are plain meanwhile, and its backward brings the unit.
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
    """Have a backward through ``result`` raise once the parameter's ``gathered()`` block is over."""
    card = param_info(parameter)
    unit = card.unit() if card is not None else None
    if card is None or unit is None or unit.gathered_block is None:
        return
    name, block = card.name, unit.gathered_block

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
    """Whether a tensor belongs to a level of ``torch.func``, whose graph is gone back through inside the call."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class _DataAliasMixin(_ReducedGradMixin):
    """The same, and ``data`` is noted: autograd counts no change that is made through it."""

    __slots__ = ()

    @property
    def data(self: Any) -> torch.Tensor:
        return _record_data_alias(self, _GET_DATA(self))

    @data.setter
    def data(self: Any, values: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]


def _record_data_alias(parameter: Any, values: torch.Tensor) -> torch.Tensor:
    card = param_info(parameter)
    unit = card.unit() if card is not None else None
    if unit is not None:
        unit.record_data_alias(values)
    return values


class ReducedGradParameter(_DataAliasMixin, nn.Parameter):
    """A parameter between backward and the next forward."""


class GatheredParameter(_GatheredMixin, nn.Parameter):
    """A partitioned parameter inside ``gathered()``."""


class GuardedParameter(_GuardedMixin, nn.Parameter):
    """A parameter whose values are not in place."""


class ReducedGradDTensor(_DataAliasMixin, DTensor):
    """The first of the two for a divided parameter: see [Note: divided parameters]."""

    __slots__ = ()


class GatheredDTensor(_GatheredMixin, DTensor):
    """The same inside ``gathered()``."""

    __slots__ = ()


class GuardedDTensor(_GuardedMixin, DTensor):
    """The second of the two for a divided parameter."""

    __slots__ = ()

    # methods of DTensor's own, which do not ask __torch_function__

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe it."""
        return _describe(self)

    def to_local(self, **options: Any) -> torch.Tensor:
        """This rank's part, where it may be brought now."""
        return _call_unsharded(DTensor.to_local, (self,), options)  # type: ignore[no-any-return]

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """The whole parameter, where this rank's part may be brought now."""
        return _call_unsharded(DTensor.full_tensor, (self,), options)  # type: ignore[no-any-return]

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """The parameter divided otherwise, where this rank's part may be brought now."""
        return _call_unsharded(DTensor.redistribute, (self, *args), options)  # type: ignore[no-any-return]


def _call_unsharded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with the values of all absent parameters it is given, which stay until it has run."""
    cards: list[ParamInfo] = []
    result: Any = None
    try:
        for parameter in _instances(_GuardedMixin, args, kwargs):
            card = param_info(parameter)
            if card is None or not card.acquire_for_op():
                if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
                    return _describe(parameter)
                raise RuntimeError(_access_error(parameter, func))
            cards.append(card)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _record_data_alias(args[0], result) if func == _GET_DATA else result
    finally:  # also where it raised: whoever catches that may go on
        with torch._C.DisableTorchFunctionSubclass():
            for card in cards:
                card.release_after_op(result)


def is_guarded(parameter: nn.Parameter) -> bool:
    """Whether a parameter's values are not in place."""
    return isinstance(parameter, _GuardedMixin)


class ParamClasses:
    """The classes that a parameter changes between, looked up once: it changes them several times a step."""

    def __init__(self, parameter: nn.Parameter, original: type[nn.Parameter]) -> None:
        divided = isinstance(parameter, DTensor)
        self.parameter: Any = parameter
        self.original = original
        self.guarded: type = GuardedDTensor if divided else _subclass_for(GuardedParameter, original, parameter)
        self.reduced_grad: type = (
            ReducedGradDTensor if divided else _subclass_for(ReducedGradParameter, original, parameter)
        )
        self.gathered: type = GatheredDTensor if divided else _subclass_for(GatheredParameter, original, parameter)


@functools.cache
def _subclass(kind: type, original: type) -> type:
    return type(original)(f"{kind.__name__}[{original.__name__}]", (kind, original), {"__slots__": ()})


def _subclass_for(kind: type, original: type, parameter: nn.Parameter) -> type:
    """One of these classes for a user's own class of parameter: instances stay instances of that, too."""
    if original is nn.Parameter or issubclass(nn.Parameter, original):
        return kind
    try:
        derived = _subclass(kind, original)
        parameter.__class__ = derived  # Python swaps only classes of one layout
        parameter.__class__ = original
    except TypeError:
        return kind
    return derived


def _meta_like(parameter: Any) -> torch.Tensor:
    """A tensor without memory, laid out as the parameter's values are when they are there."""
    card = param_info(parameter)
    flat = card.flat() if card is not None else None
    with torch._C.DisableTorchFunctionSubclass():
        if card is None or flat is None:
            return torch.empty_like(parameter, device="meta")
        if flat.tp_shards[card.index] is not None:  # a DTensor: it knows
            return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        return torch.empty_strided(parameter.shape, flat.strides[card.index], dtype=parameter.dtype, device="meta")


def _instances(kind: type, *values: Any) -> list[Any]:
    """The parameters of a class among the arguments of a call."""
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
    card = param_info(parameter)
    name = card.name if card is not None else "?"
    return f"Parameter {name!r} (partitioned, {tuple(parameter.shape)}, {parameter.dtype}, {parameter.device})"


def _access_error(parameter: Any, func: Callable[..., Any]) -> str:
    card = param_info(parameter)
    name = card.name if card is not None else "a parameter"
    action = getattr(func, "__name__", str(func)).strip("_")
    flat = card.flat() if card is not None else None
    alone = flat is not None and flat.layout.shard_count == 1
    where = "there in forward and backward alone" if alone else "partitioned over the ranks"
    return (
        f"the values of {name!r} are {where}, so {action!r} cannot use them here. Use them on all ranks inside "
        "`with zeroshard.gathered(model):` (for state_dict() too), or name a writing rank to change them: "
        "`with zeroshard.gathered(model, write_rank=0):`. To train, call the model or one of its modules as "
        "model(x), not model.forward(x) or another method, so that its hooks gather the parameters"
    )

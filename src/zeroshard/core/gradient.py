"""Gradient: the gradient of one flat, from autograd's tensors to this rank's part of the mean over the ranks."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from zeroshard.core.flat import Flat
from zeroshard.core.handle import GradientHandle, is_in_backward
from zeroshard.core.loss_scale import RUNNING, inverse_scale

_GET_GRAD = operator.attrgetter("_grad")
_IS_THERE = partial(operator.is_not, None)
_new_handle: Any = torch.Tensor._make_wrapper_subclass
_UNHELD = next(map(sys.getrefcount, [object()]))  # what this returns for an object that only a list holds


class Gradient:
    """The gradient of a flat.

    Two things can exist at the same time, and what is true of a parameter is kept by parameter:

    ``local``    this rank's summands, PARTIAL on every axis: autograd's tensors, or their sums over backwards.
    ``reduced``  what earlier backwards have reduced, with ``placements``: this rank's part of the mean (the placements
                 that the flat's table says), or, between the backwards of a step, a sum over some axes only.

    ``parameter.grad`` is a :class:`GradientHandle` while there is a gradient. :meth:`collect` is the only reader of it:
    a handle is known, None clears the gradient, and any other tensor is a summand that replaces it.
    """

    def __init__(self, flat: Flat) -> None:
        count = len(flat.parameters)
        self.flat = flat
        self.local: list[torch.Tensor | None] = [None] * count
        self._is_borrowed = [False] * count  # of ``local``: other gradients, or the user, may have the same tensor
        self.reduced: torch.Tensor | None = None
        self.placements = flat.grad_placements  # of ``reduced``
        # Who reads ``reduced`` next multiplies it: by a clip, and by the inverse of the loss scale. Summands have the
        # scale of the last backward.
        self.factor: torch.Tensor | None = None
        self.summand_factor: torch.Tensor | None = None
        self.has_grad = [False] * count  # of those in ``reduced``: on any rank
        self._handles: list[GradientHandle | None] = [None] * count  # in ``parameter.grad``
        self._spare = list(self._handles)  # earlier ones that nobody else has: making one takes longer than reducing it
        self.memory: torch.Tensor | None = None  # for ``reduced``
        self._full: torch.Tensor | None = None  # all of ``reduced``, and the user may write into it
        self._stale: tuple[torch.Tensor, torch.Tensor] | None = None  # an earlier one that has views, and a copy of it
        self._reference: weakref.ref[Any] = weakref.ref(self)
        self._handle_options = [
            {"size": view.shape, "strides": view.stride(), "dtype": view.dtype, "device": view.device}
            for view in flat.views
        ]
        # set by the engine
        self.reduce_pending: Callable[[], None] = _no_engine  # reduces all that is pending in the model: a collective
        self.before_gather: Callable[[], None] = _no_engine
        self.norms: Callable[[list[GradientHandle], float], list[torch.Tensor]] = _no_engine  # a collective

    @property
    def is_pending(self) -> bool:
        """Whether something of it still has to be reduced."""
        if self.reduced is None:
            return any(map(_IS_THERE, self._handles))
        return any(map(_IS_THERE, self.local)) or self.placements != self.flat.grad_placements

    # -- from and to ``parameter.grad`` -----------------------------------------------------------------------------

    def collect(self, is_exact: bool = False) -> None:
        """Take over what autograd or the user has put into ``parameter.grad``, and leave handles there.

        ``is_exact``: it is not of a scaled loss.
        """
        parameters = self.flat.parameters
        with torch._C.DisableTorchFunctionSubclass():
            found = list(map(_GET_GRAD, parameters))
            if not any(map(_IS_THERE, found)):
                self.clear()
                return
            if self._full is not None or self._stale is not None:
                self.settle()
            if all(map(operator.is_, found, self._handles)):
                return
            for index, value in enumerate(found):
                handle = self._handles[index]
                if value is handle:
                    continue
                if isinstance(value, GradientHandle):
                    if handle is None or value.original is not handle:
                        _refuse_handle(self.flat.names[index])
                    parameters[index]._grad = handle
                    continue
                if handle is not None:
                    self._forget(index)
                if value is not None:
                    has_graph = value.requires_grad
                    summand = _dense(value) if has_graph or value.layout is not torch.strided else value
                    if is_exact and self.summand_factor is not None:
                        summand = summand / self.summand_factor
                    self.local[index] = summand
                    self._is_borrowed[index] = False
                    self._expose(index, has_graph)

    def expose(self, is_present: list[bool]) -> None:
        """Leave handles in ``parameter.grad`` of parameters that have a gradient on any rank."""
        if not all(map(_IS_THERE, self._handles)):
            with torch._C.DisableTorchFunctionSubclass():
                for index, has_grad in enumerate(is_present):
                    if has_grad and self._handles[index] is None:
                        late = self.flat.parameters[index]._grad
                        self.local[index] = None if late is None else _dense(late)
                        self._expose(index)

    def _expose(self, index: int, has_graph: bool = False) -> None:
        handle = self._spare[index]
        if handle is None:
            handle = _new_handle(GradientHandle, **self._handle_options[index])
            handle.owner_reference = self._reference
            handle.number = index
        self._spare[index] = None
        handle.has_graph = has_graph
        self._handles[index] = handle
        self.flat.parameters[index]._grad = handle

    def _forget(self, index: int) -> None:
        """Forget a parameter's gradient."""
        if self.has_grad[index] and self.reduced is not None:
            self.has_grad[index] = False
            self.reduced[self.flat.part(self.flat.layout.span(self.placements), index)] = 0
        self.local[index] = None
        self._handles[index] = None

    def add_local(self, index: int, summand: torch.Tensor) -> None:
        """Add a summand of this rank."""
        if not is_in_backward():
            summand = summand if self.summand_factor is None else summand / self.summand_factor
        elif (RUNNING or self.summand_factor is not None) and self.summand_factor is not inverse_scale():
            self.set_summand_factor(inverse_scale(), arrived=index)
        now = self.local[index]
        if now is None:
            self.local[index] = _dense(summand)
            self._is_borrowed[index] = True
        elif self._is_borrowed[index]:
            self.local[index] = now + summand
            self._is_borrowed[index] = False
        else:
            now.add_(summand)

    def clear(self) -> None:
        """Forget the gradient."""
        if self.reduced is None and not any(map(_IS_THERE, self._handles)):
            return
        count = len(self.local)
        holders = map(sys.getrefcount, self._handles)
        pairs = zip(holders, self._handles, strict=True)
        self._spare = [handle if number == _UNHELD else None for number, handle in pairs]
        self.memory = None
        self.reduced = None
        self.factor = None
        self.summand_factor = None
        self._full = None
        self._stale = None
        self.local = [None] * count
        self.has_grad = [False] * count
        self._handles = [None] * count

    # -- reductions -------------------------------------------------------------------------------------------------

    def presence(self) -> list[bool]:
        """Return which parameters have a summand."""
        return list(map(_IS_THERE, self.local))

    # -- what the user sees and changes -----------------------------------------------------------------------------

    @property
    def has_whole(self) -> bool:
        """Whether the whole gradient is in memory, for views of it."""
        return self._full is not None

    def part(self, handle: GradientHandle) -> torch.Tensor:
        """Return this rank's part of a parameter's gradient, to be changed in place."""
        self._need_reduced(handle)
        self.settle()
        self.set_factor(None)
        assert self.reduced is not None
        return self.reduced[self.flat.part(self.flat.grad_span, handle.number)]

    def whole(self, handle: GradientHandle) -> torch.Tensor:
        """Return a parameter's gradient: a collective. Writes into it, or into views of it, count until it settles."""
        self._need_reduced(handle)
        if self._full is None:
            self.before_gather()
            self.set_factor(None)
            assert self.reduced is not None
            self._full = self.flat.gather(self.reduced, self.flat.grad_placements)
        return self.flat.shaped(self._full, handle.number)

    def write(self, handle: GradientHandle, values: torch.Tensor) -> None:
        """Replace a parameter's gradient by full values, which may be :meth:`whole` itself."""
        self.whole(handle).copy_(values)

    def settle(self) -> None:
        """Take over what the user has written into the whole gradient, and free it.

        Views of it that the user still has are stale: raise if they were written since.
        """
        if self._stale is not None and not _has_same_bits(*self._stale):
            raise RuntimeError(
                f"a view of a gradient of {self.flat.names[0]!r} or its neighbours was changed after other gradients "
                "were read, clipped or stepped, so the change would be lost: take the view when you write to it"
            )
        if self._full is not None and self.reduced is not None:
            self.reduced.copy_(self._full[self.flat.grad_span])
            self._stale = (self._full, self._full.clone()) if _is_viewed(self._full) else self._stale
        self._full = None

    def set_factor(self, factor: torch.Tensor | None) -> None:
        """Multiply ``reduced`` so that what is left to its next reader is ``factor``; None: nothing."""
        if self.reduced is not None and self.factor is not factor:
            self.reduced.mul_(_quotient(self.factor, factor))
        self.factor = factor

    def set_summand_factor(self, factor: torch.Tensor | None, arrived: int | None = None) -> None:
        """In a backward whose loss may be scaled: bring earlier summands to the same scale.

        ``arrived``: the parameter of which autograd has just put a gradient of this backward into ``parameter.grad``.
        """
        with torch._C.DisableTorchFunctionSubclass():
            parameter = None if arrived is None else self.flat.parameters[arrived]
            kept = None if parameter is None else parameter._grad
            if parameter is not None and not isinstance(kept, GradientHandle):
                parameter._grad = None
            self.collect(is_exact=True)
            if self.summand_factor is not factor:
                coefficient = _quotient(self.summand_factor, factor)
                self.local = [None if summand is None else summand * coefficient for summand in self.local]
                self.summand_factor = factor
            if parameter is not None:
                parameter._grad = kept
                self.collect()

    def _need_reduced(self, handle: GradientHandle) -> None:
        if handle is not self._handles[handle.number]:
            raise RuntimeError(
                f"this is the gradient of {self.flat.names[handle.number]!r} before it was cleared or replaced: clone "
                "a gradient that is needed later"
            )
        if self.is_pending or self.reduced is None:
            self.reduce_pending()


def _dense(summand: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor without a graph."""
    summand = summand.detach() if summand.requires_grad else summand
    return summand if summand.layout is torch.strided else summand.to_dense()


def _quotient(factor: torch.Tensor | None, other: torch.Tensor | None) -> Any:
    """Return one factor divided by another, where None is 1."""
    if other is None:
        return factor
    return 1 / other if factor is None else factor / other


def _has_same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals itself."""
    return torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


def _refuse_handle(name: str) -> NoReturn:
    raise RuntimeError(
        f"the gradient of {name!r} was replaced by another parameter's, or by one that was cleared: assign a clone"
    )


def _no_engine(*args: Any) -> Any:
    """Do nothing: the engine does not exist yet."""


def _is_viewed(tensor: torch.Tensor) -> bool:
    """Return whether another tensor shares a tensor's memory."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > _UNVIEWED)


_UNVIEWED = 2  # of its storage: the tensor, and the object that asks

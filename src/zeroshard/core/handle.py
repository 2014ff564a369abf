"""GradientHandle: what ``parameter.grad`` is between a backward and zero_grad()."""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

# These work on this rank's part if all other operands are numbers.
ELEMENTWISE = frozenset(
    "mul_ div_ zero_ fill_ neg_ abs_ clamp_ clamp_min_ clamp_max_ nan_to_num_ _foreach_mul_ _foreach_div_ "
    "_foreach_zero_ _foreach_neg_ _foreach_abs_ _foreach_clamp_min_ _foreach_clamp_max_".split()
)


class HandleOwner(Protocol):
    """The gradient that a handle belongs to."""

    flat: Any

    @property
    def has_whole(self) -> bool:
        """Whether the whole gradient is in memory, for views of it."""

    def part(self, handle: GradientHandle) -> torch.Tensor:
        """Return this rank's part, to be changed in place."""

    def whole(self, handle: GradientHandle) -> torch.Tensor:
        """Return all of it: a collective."""

    def write(self, handle: GradientHandle, values: torch.Tensor) -> None:
        """Replace it by full values."""

    def add_local(self, index: int, summand: torch.Tensor) -> None:
        """Add a summand of this rank."""

    def norms(self, handles: list[GradientHandle], order: float) -> list[torch.Tensor]:
        """Return the norms of gradients of the model: a collective."""


def is_in_backward() -> bool:
    """Return whether autograd runs on this thread."""
    return torch._C._current_graph_task_id() != -1


class GradientHandle(torch.Tensor):
    """A gradient of which this rank has a part, as a tensor.

    Elementwise operations with numbers run on this rank's part, and norms add up those of the parts. All others get the
    whole gradient, on all ranks, and what they write is written back. What autograd adds in a backward is a summand of
    this rank.
    """

    # weak: a parameter owns its gradient, and the garbage collector does not see that
    owner_reference: weakref.ref[HandleOwner]
    number: int  # of the parameter in its flat
    alias_of: GradientHandle | None = None  # as detach() makes it
    has_graph = False  # a backward with create_graph has made it; the graph is not kept

    @property
    def owner(self) -> HandleOwner:
        """The gradient of the flat."""
        owner = self.owner_reference()
        if owner is None:
            raise RuntimeError("the model of this gradient does not exist any more")
        return owner

    @property
    def original(self) -> GradientHandle:
        """The object in ``parameter.grad``."""
        return self if self.alias_of is None else self.alias_of

    @property
    def data(self) -> GradientHandle:
        """The same gradient: what is written to it counts."""
        return self.alias()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.copy_(values)

    def alias(self) -> GradientHandle:
        """Return another object for the same gradient."""
        like = self.owner.flat.views[self.number]
        found = torch.Tensor._make_wrapper_subclass(
            GradientHandle, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        found.owner_reference = self.owner_reference
        found.number = self.number
        found.alias_of = self.original
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        name = self.owner.flat.names[self.number]
        return f"GradientHandle({name!r}, shape={tuple(self.shape)}): parameter.grad.clone() has the values"

    def tolist(self) -> Any:
        """Return the whole gradient as numbers."""
        return self.clone().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy of the whole gradient as an array."""
        return self.clone().numpy(force=force)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole gradient, as a plain tensor."""
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return the whole gradient, as a plain tensor."""
        return self.clone()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "detach":
            return args[0].alias()
        if name in ("add", "add_") and (is_in_backward() or _is_summand(name, *args)):
            return _accumulate(name, *args, **kwargs)
        if func.namespace == "c10d":
            raise RuntimeError(
                f"{name} got {args}: this gradient is the mean over the ranks already, and a collective would reduce "
                "it again. Leave the call out, or clone the gradient"
            )
        leaves = tree_leaves((args, kwargs))
        handles = [leaf for leaf in leaves if isinstance(leaf, cls)]
        if torch.is_grad_enabled() and not func._schema.is_mutable and any(handle.has_graph for handle in handles):
            raise RuntimeError(
                f"{name} got a gradient of a backward with create_graph=True, of which parameter.grad does not keep "
                "the graph: use torch.autograd.grad(), or read the gradient under torch.no_grad()"
            )
        order = _norm_order(name, args, kwargs)
        if order is not None and len(handles) == len(tree_leaves(args[0])):
            norms = handles[0].owner.norms([handle.original for handle in handles], order)
            return norms if name == "_foreach_norm" else norms[0]
        has_whole = any(handle.owner.has_whole for handle in handles)
        changes_handles = all(isinstance(leaf, cls) for leaf in tree_leaves(args[0]))
        has_numbers = all(_is_number(leaf) for leaf in tree_leaves((args[1:], kwargs)))
        if name in ELEMENTWISE and changes_handles and has_numbers and not has_whole:
            func(*tree_map(_part_of, args), **kwargs)
            return args[0] if func._schema.returns else None
        wholes = {}
        is_copied = func._schema.is_mutable and len({id(handle.owner) for handle in handles}) > 1
        for handle in handles:
            found = handle.owner.whole(handle.original)  # frees those of other flats
            wholes[id(handle)] = found.clone() if is_copied else found

        def whole(leaf: Any) -> Any:
            return wholes.get(id(leaf), leaf)

        result = func(*tree_map(whole, args), **tree_map(whole, kwargs))
        if not func._schema.is_mutable:
            return result
        for handle in handles:
            handle.owner.write(handle.original, wholes[id(handle)])
        return args[0] if func._schema.returns and isinstance(args[0], cls) else result


def _accumulate(name: str, handle: GradientHandle, summand: torch.Tensor, alpha: float = 1) -> GradientHandle:
    """Add what autograd has computed."""
    if name == "add":
        raise RuntimeError(
            "a backward with create_graph=True cannot add to the gradient of "
            f"{handle.owner.flat.names[handle.number]!r}, which is the mean over the ranks already: call zero_grad() "
            "before it, or use torch.autograd.grad()"
        )
    handle.owner.add_local(handle.number, summand if alpha == 1 and is_in_backward() else summand * alpha)
    return handle


def _is_summand(name: str, handle: Any, other: Any, *_: Any) -> bool:
    """Return whether a loop adds a tensor to a gradient: ranks may have other ones, as in a backward."""
    is_like = isinstance(other, torch.Tensor) and not isinstance(other, GradientHandle) and other.shape == handle.shape
    return name == "add_" and is_like and other.dtype == handle.dtype


def _norm_order(name: str, args: Any, kwargs: Any) -> float | None:
    """Return the order of a norm of whole tensors; None if the call is something else."""
    if name not in ("linalg_vector_norm", "_foreach_norm") or len(args) > 2 or not kwargs.keys() <= {"ord"}:
        return None
    order = float(args[1] if len(args) == 2 else kwargs.get("ord", 2))
    return order if order > 0 and not math.isnan(order) else None


def _is_number(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or (leaf.dim() == 0 and not isinstance(leaf, GradientHandle))


def _part_of(leaf: Any) -> Any:
    return leaf.owner.part(leaf.original) if isinstance(leaf, GradientHandle) else leaf

"""ShardedGradient: what ``parameter.grad`` is where no rank has all of it, or where it carries a loss scale.

[Note: sharded gradients]
Utilities made for plain models go through ``parameter.grad``: they take norms, multiply, clamp, look for values that
are not finite, or set to zero. A ShardedGradient has the shape of the whole gradient and means all of it, while each
rank has its part, in the dtype it was reduced in, perhaps in host memory, perhaps times the loss scale. Three kinds of
operations are known:

- A norm: each rank's part, and one all-reduce for the norms of all parameters at once (``parameter_norms``).
- An elementwise change in place: each rank changes its part, with its part of the other operands.
- Anything that only reads: the whole gradient is put together first, as ``full_gradient`` does.

Anything else raises. Whatever communicates is called by all ranks together, as ``backward()`` is, and goes through the
recorded order, so that a rank which does not is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from zeroshard.comm import Communicator
from zeroshard.engine.flat_gradient import FlatGradient, norms_of
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.order import Order

if TYPE_CHECKING:
    from zeroshard.engine.states import States

# They change each element by itself: of the operands, each rank needs what lies at its elements.
ELEMENTWISE = set(
    "abs_ add_ addcdiv_ addcmul_ clamp_ clamp_max_ clamp_min_ clip_ copy_ div_ fill_ floor_divide_ lerp_ masked_fill_ "
    "mul_ nan_to_num_ neg_ pow_ reciprocal_ round_ sign_ sgn_ sqrt_ square_ sub_ tanh_ trunc_ zero_".split()
)
LINEAR = {"mul_", "div_", "neg_", "zero_"}  # by a number: the same for a scaled gradient


@dataclass(frozen=True)
class Source:
    """Where the gradient of one parameter is, and what has to be told to whom."""

    states: States
    gradients: Gradients
    comm: Communicator
    order: Order
    gradient: FlatGradient
    index: int
    cleared: int  # when it was read

    @property
    def name(self) -> str:
        """The parameter's."""
        return self.gradient.flat.names[self.index]

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradient as it is meant: fp16's, without its loss scale, needs the range of fp32."""
        unscaled = self.states.loss_scale is not None or self.gradients.inverse is not None
        return torch.float32 if unscaled and self.gradient.dtype == torch.float16 else self.gradient.dtype

    def settle(self, what: str) -> None:
        """Have the reduced gradient complete, on all ranks."""
        self.states.refuse_away()
        if self.cleared != self.gradients.cleared or not self.gradient.used[self.index]:
            raise RuntimeError(
                f"this is a gradient of {self.name!r} that was cleared since: read parameter.grad again after the next "
                "backward(), or keep parameter.grad.clone()"
            )
        self.order.begin(what)
        self.gradients.agree()

    def norm(self, norm_type: float) -> torch.Tensor:
        """The norm of the whole gradient."""
        self.settle("read the gradients' norms")
        offset = 0
        for gradient in self.gradients.of_flat.values():
            if gradient is self.gradient:
                break
            offset += len(gradient.used)
        found = self.gradients.parameter_norms(norm_type)[offset + self.index]
        return found if self.gradient.dtype == torch.float64 else found.float()

    def full(self) -> torch.Tensor:
        """The whole gradient, put together."""
        from zeroshard.engine.whole import assembled_gradient  # late: it knows the engine, which knows this

        self.settle("read a gradient")
        self.order.check(f"read the gradient of {self.name!r}")
        return assembled_gradient(self.comm, self.gradients, self.gradient, self.index).to(self.dtype)

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Which elements this rank has, in the flat's order, and where they lie. They may be written into."""
        self.settle("change the gradients")
        self.gradients.apply_coefficient()
        self.states.doubt()
        self.gradients.changed(self.gradient)
        return ((within.slice, part) for within, part in self.gradient.parts_of(self.index))

    def operand(self, value: Any) -> Any:
        """Lay an operand out as the flat does; numbers stay as they are."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        flat = self.gradient.flat
        whole = value.expand(flat.wholes[self.index])
        share = flat.shares[self.index]
        return flat.line(whole if share is None else share.take(whole), self.index)

    def change(self, name: str, func: Callable[..., Any], operands: Sequence[Any], options: dict[str, Any]) -> None:
        """Apply an elementwise operation in place."""
        lines = [self.operand(value) for value in operands]
        inverse = self.gradients.inverse
        plain = all(not isinstance(line, torch.Tensor) or line.dim() == 0 for line in lines)
        direct = inverse is None or (name in LINEAR and plain)
        for within, part in self.parts():
            found = [_at(line, within, part.device) for line in lines]
            if direct or inverse is None:
                func(part, *found, **options)
                continue
            here = inverse.to(part.device)
            unscaled = part.float() * here
            func(unscaled, *found, **options)
            part.copy_(unscaled / here)


def _at(line: Any, within: slice, device: torch.device) -> Any:
    if not isinstance(line, torch.Tensor):
        return line
    return line.to(device) if line.dim() == 0 else line[within].to(device)


class ShardedGradient(torch.Tensor):
    """The whole gradient of a parameter, of which this rank has a part: see [Note: sharded gradients]."""

    source: Source

    @staticmethod
    def __new__(cls, source: Source) -> ShardedGradient:
        """Make one of the whole gradient's shape."""
        shape = source.gradient.flat.wholes[source.index]
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=source.dtype, device=source.gradient.flat.device
        )
        made.source = source
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what is known for gradients in parts; read the whole otherwise."""
        options, name = kwargs or {}, func._schema.name.partition("::")[2]
        first: Any = args[0] if args else None
        if isinstance(first, ShardedGradient):
            if name in ("detach", "alias"):
                return ShardedGradient(first.source)
            if name == "detach_":
                return first
            if name == "linalg_vector_norm" and all(not given for given in (*args[2:4], options.get("dim"))):
                return _as_asked(first.source.norm(float(args[1] if len(args) > 1 else 2.0)), options)
            if name in ELEMENTWISE:
                first.source.change(name, func, *_whole((args[1:], options)))
                return first
        lists = isinstance(first, (list, tuple)) and any(isinstance(one, ShardedGradient) for one in first)
        if lists and name == "_foreach_norm":
            norm_type = float(args[1] if len(args) > 1 else 2.0)
            return [_norm(one, norm_type, options) for one in first]
        if lists and name == "_amp_foreach_non_finite_check_and_unscale_":
            _unscale(*args)
            return None
        if lists and name.startswith("_foreach_") and name.removeprefix("_foreach_") in ELEMENTWISE:
            change = getattr(torch.Tensor, name.removeprefix("_foreach_"))
            for number, one in enumerate(first):
                own = [value[number] if isinstance(value, (list, tuple)) else value for value in args[1:]]
                change(one, *own, **options)
            return None
        if (lists or isinstance(first, ShardedGradient)) and func._schema.is_mutable:
            one = first if isinstance(first, ShardedGradient) else next(g for g in first if isinstance(g, cls))
            raise RuntimeError(
                f"the gradient of {one.source.name!r} is partitioned over the ranks, and {name!r} cannot be done to it "
                "in parts. Read it with zeroshard.full_gradient(model, name), change it element by element (mul_, "
                "add_, clamp_, copy_, …), clip with optimizer.clip_grad_norm_(…), clear with optimizer.zero_grad()"
            )
        args, options = _whole((args, options))
        return func(*args, **options)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe it, without communication."""
        where = f"{tuple(self.shape)}, {self.dtype}, {self.device}"
        return f"ShardedGradient of {self.source.name!r} ({where}; zeroshard.full_gradient(model, name) reads it)"

    def numpy(self, *, force: bool = False) -> Any:
        """The whole gradient, which all ranks read together."""
        return self.source.full().numpy(force=force)

    def tolist(self) -> Any:
        """The whole gradient, which all ranks read together."""
        return self.source.full().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """The whole gradient, which all ranks read together."""
        return self.source.full()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole gradient, which all ranks read together."""
        return self.source.full().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _whole(values: Any) -> Any:
    """The same values, with whole gradients in place of those in parts."""
    return pytree.tree_map_only(ShardedGradient, lambda gradient: gradient.source.full(), values)


def _norm(gradient: torch.Tensor, norm_type: float, options: dict[str, Any]) -> torch.Tensor:
    if isinstance(gradient, ShardedGradient):
        return _as_asked(gradient.source.norm(norm_type), options)
    found: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type, **options)
    return found


def _as_asked(norm: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    dtype = options.get("dtype")
    return norm if dtype is None else norm.to(dtype)


def _unscale(gradients: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiply by the inverse of ``torch.amp.GradScaler``'s scale, and note values that are not finite on any rank."""
    sharded = [gradient for gradient in gradients if isinstance(gradient, ShardedGradient)]
    rest = [gradient for gradient in gradients if not isinstance(gradient, ShardedGradient)]
    if rest:
        torch._amp_foreach_non_finite_check_and_unscale_(rest, found, inverse)
    by_model: dict[Gradients, list[Source]] = {}
    for gradient in sharded:
        by_model.setdefault(gradient.source.gradients, []).append(gradient.source)
    for model, sources in by_model.items():
        first = sources[0]
        parts = [part for source in sources for _, part in source.parts() if part.numel()]
        overflow = torch.zeros((), device=first.comm.device)
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for part in parts:
            alike.setdefault((part.device, part.dtype), []).append(part)
        for some in alike.values():  # the norm of what holds a NaN is NaN, which is not less than anything
            norms = torch.stack(norms_of(some, math.inf)).to(overflow.device)
            overflow = torch.maximum(overflow, torch.logical_not((norms < math.inf).all()).float())
        what = "look for overflow"
        first.order.check(what)
        first.comm.all_reduce_everywhere(overflow, what, dist.ReduceOp.MAX)
        found.copy_(torch.maximum(found, overflow.to(found.device)))
        every = sum(sum(gradient.used) for gradient in model.of_flat.values())
        factor = inverse.to(first.comm.device)
        if len({(source.gradient, source.index) for source in sources}) == every:
            model.coefficient = factor.clone()  # at the step, in fp32: in 16 bits small ones would be lost
        else:
            model.multiply(parts, factor)

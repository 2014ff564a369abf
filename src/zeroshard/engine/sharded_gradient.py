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

from zeroshard.comm.collective_order import CollectiveOrder
from zeroshard.comm.collectives import Communicator
from zeroshard.engine.flat_grad import FlatGrad, compute_norms
from zeroshard.engine.gradients import Gradients

if TYPE_CHECKING:
    from zeroshard.engine.state_guard import StateGuard

# They change each element by itself: of the operands, each rank needs what lies at its elements.
ELEMENTWISE_OPS = set(
    "abs_ add_ addcdiv_ addcmul_ clamp_ clamp_max_ clamp_min_ clip_ copy_ div_ fill_ floor_divide_ lerp_ masked_fill_ "
    "mul_ nan_to_num_ neg_ pow_ reciprocal_ round_ sign_ sgn_ sqrt_ square_ sub_ tanh_ trunc_ zero_".split()
)
LINEAR_OPS = {"mul_", "div_", "neg_", "zero_"}  # by a number: the same for a scaled gradient


@dataclass(frozen=True)
class ParamGradHandle:
    """Where the gradient of one parameter is, and what has to be told to whom."""

    state_guard: StateGuard
    gradients: Gradients
    comm: Communicator
    order: CollectiveOrder
    flat_grad: FlatGrad
    index: int
    clear_count: int  # when it was read

    @property
    def name(self) -> str:
        """The parameter's."""
        return self.flat_grad.flat.names[self.index]

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradient as it is meant: fp16's, without its loss scale, needs the range of fp32."""
        unscaled = self.state_guard.loss_scale is not None or self.gradients.inverse_scale is not None
        return torch.float32 if unscaled and self.flat_grad.dtype == torch.float16 else self.flat_grad.dtype

    def finish_reduction(self, what: str) -> None:
        """Have the reduced gradient complete, on all ranks."""
        self.state_guard.check_states_reloaded()
        if self.clear_count != self.gradients.clear_count or not self.flat_grad.is_param_used[self.index]:
            raise RuntimeError(
                f"this is a gradient of {self.name!r} that was cleared since: read parameter.grad again after the next "
                "backward(), or keep parameter.grad.clone()"
            )
        self.order.begin_pass(what)
        self.gradients.sync_used_params()

    def norm(self, norm_type: float) -> torch.Tensor:
        """The norm of the whole gradient."""
        self.finish_reduction("read the gradients' norms")
        offset = 0
        for gradient in self.gradients.flat_grads.values():
            if gradient is self.flat_grad:
                break
            offset += len(gradient.is_param_used)
        found = self.gradients.parameter_norms(norm_type)[offset + self.index]
        return found if self.flat_grad.dtype == torch.float64 else found.float()

    def full(self) -> torch.Tensor:
        """The whole gradient, put together."""
        from zeroshard.engine.full_tensors import assemble_full_grad  # late: it knows the engine, which knows this

        self.finish_reduction("read a gradient")
        self.order.check(f"read the gradient of {self.name!r}")
        return assemble_full_grad(self.comm, self.gradients, self.flat_grad, self.index).to(self.dtype)

    def writable_shards(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Which elements this rank has, in the flat's order, and where they lie. They may be written into."""
        self.finish_reduction("change the gradients")
        self.gradients.apply_clip_coef()
        self.state_guard.invalidate_speculation()
        self.gradients.prepare_write(self.flat_grad)
        return ((within.slice, part) for within, part in self.flat_grad.param_shards(self.index))

    def flatten_operand(self, value: Any) -> Any:
        """Lay an operand out as the flat does; numbers stay as they are."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        flat = self.flat_grad.flat
        whole = value.expand(flat.full_shapes[self.index])
        share = flat.tp_shards[self.index]
        return flat.flatten(whole if share is None else share.slice(whole), self.index)

    def apply_elementwise(
        self, name: str, func: Callable[..., Any], operands: Sequence[Any], options: dict[str, Any]
    ) -> None:
        """Apply an elementwise operation in place."""
        lines = [self.flatten_operand(value) for value in operands]
        inverse = self.gradients.inverse_scale
        plain = all(not isinstance(line, torch.Tensor) or line.dim() == 0 for line in lines)
        direct = inverse is None or (name in LINEAR_OPS and plain)
        for within, part in self.writable_shards():
            found = [_slice_operand(line, within, part.device) for line in lines]
            if direct or inverse is None:
                func(part, *found, **options)
                continue
            here = inverse.to(part.device)
            unscaled = part.float() * here
            func(unscaled, *found, **options)
            part.copy_(unscaled / here)


def _slice_operand(operand: Any, within: slice, device: torch.device) -> Any:
    if not isinstance(operand, torch.Tensor):
        return operand
    return operand.to(device) if operand.dim() == 0 else operand[within].to(device)


class ShardedGradient(torch.Tensor):
    """The whole gradient of a parameter, of which this rank has a part: see [Note: sharded gradients]."""

    handle: ParamGradHandle

    @staticmethod
    def __new__(cls, source: ParamGradHandle) -> ShardedGradient:
        """Make one of the whole gradient's shape."""
        shape = source.flat_grad.flat.full_shapes[source.index]
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=source.dtype, device=source.flat_grad.flat.device
        )
        made.handle = source
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
                return ShardedGradient(first.handle)
            if name == "detach_":
                return first
            if name == "linalg_vector_norm" and all(not given for given in (*args[2:4], options.get("dim"))):
                return _cast_norm(first.handle.norm(float(args[1] if len(args) > 1 else 2.0)), options)
            if name in ELEMENTWISE_OPS:
                first.handle.apply_elementwise(name, func, *_gather_sharded_grads((args[1:], options)))
                return first
        lists = isinstance(first, (list, tuple)) and any(isinstance(one, ShardedGradient) for one in first)
        if lists and name == "_foreach_norm":
            norm_type = float(args[1] if len(args) > 1 else 2.0)
            return [_norm(one, norm_type, options) for one in first]
        if lists and name == "_amp_foreach_non_finite_check_and_unscale_":
            _unscale(*args)
            return None
        if lists and name.startswith("_foreach_") and name.removeprefix("_foreach_") in ELEMENTWISE_OPS:
            change = getattr(torch.Tensor, name.removeprefix("_foreach_"))
            for number, one in enumerate(first):
                own = [value[number] if isinstance(value, (list, tuple)) else value for value in args[1:]]
                change(one, *own, **options)
            return None
        if (lists or isinstance(first, ShardedGradient)) and func._schema.is_mutable:
            one = first if isinstance(first, ShardedGradient) else next(g for g in first if isinstance(g, cls))
            raise RuntimeError(
                f"the gradient of {one.handle.name!r} is partitioned over the ranks, and {name!r} cannot be done to it "
                "in parts. Read it with zeroshard.full_gradient(model, name), change it element by element (mul_, "
                "add_, clamp_, copy_, …), clip with optimizer.clip_grad_norm_(…), clear with optimizer.zero_grad()"
            )
        args, options = _gather_sharded_grads((args, options))
        return func(*args, **options)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe it, without communication."""
        where = f"{tuple(self.shape)}, {self.dtype}, {self.device}"
        return f"ShardedGradient of {self.handle.name!r} ({where}; zeroshard.full_gradient(model, name) reads it)"

    def numpy(self, *, force: bool = False) -> Any:
        """The whole gradient, which all ranks read together."""
        return self.handle.full().numpy(force=force)

    def tolist(self) -> Any:
        """The whole gradient, which all ranks read together."""
        return self.handle.full().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """The whole gradient, which all ranks read together."""
        return self.handle.full()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole gradient, which all ranks read together."""
        return self.handle.full().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _gather_sharded_grads(values: Any) -> Any:
    """The same values, with whole gradients in place of those in parts."""
    return pytree.tree_map_only(ShardedGradient, lambda gradient: gradient.handle.full(), values)


def _norm(gradient: torch.Tensor, norm_type: float, options: dict[str, Any]) -> torch.Tensor:
    if isinstance(gradient, ShardedGradient):
        return _cast_norm(gradient.handle.norm(norm_type), options)
    found: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type, **options)
    return found


def _cast_norm(norm: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    dtype = options.get("dtype")
    return norm if dtype is None else norm.to(dtype)


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply by the inverse of ``torch.amp.GradScaler``'s scale, and note values that are not finite on any rank."""
    sharded = [gradient for gradient in gradients if isinstance(gradient, ShardedGradient)]
    rest = [gradient for gradient in gradients if not isinstance(gradient, ShardedGradient)]
    if rest:
        torch._amp_foreach_non_finite_check_and_unscale_(rest, found_inf, inverse_scale)
    by_model: dict[Gradients, list[ParamGradHandle]] = {}
    for gradient in sharded:
        by_model.setdefault(gradient.handle.gradients, []).append(gradient.handle)
    for model, sources in by_model.items():
        first = sources[0]
        parts = [part for source in sources for _, part in source.writable_shards() if part.numel()]
        overflow = torch.zeros((), device=first.comm.device)
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for part in parts:
            alike.setdefault((part.device, part.dtype), []).append(part)
        for some in alike.values():  # the norm of what holds a NaN is NaN, which is not less than anything
            norms = torch.stack(compute_norms(some, math.inf)).to(overflow.device)
            overflow = torch.maximum(overflow, torch.logical_not((norms < math.inf).all()).float())
        what = "look for overflow"
        first.order.check(what)
        first.comm.all_reduce_over_mesh(overflow, what, dist.ReduceOp.MAX)
        found_inf.copy_(torch.maximum(found_inf, overflow.to(found_inf.device)))
        every = sum(sum(gradient.is_param_used) for gradient in model.flat_grads.values())
        factor = inverse_scale.to(first.comm.device)
        if len({(source.flat_grad, source.index) for source in sources}) == every:
            model.clip_coef = factor.clone()  # at the step, in fp32: in 16 bits small ones would be lost
        else:
            model.scale_shards(parts, factor)

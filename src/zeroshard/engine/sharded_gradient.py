"""ShardedGradient: ``parameter.grad`` if no rank has the full gradient, if replicas train alone, or with a loss scale.

[Note: sharded gradients]
Utilities for plain models use ``parameter.grad``: they compute norms, multiply, clamp, check for inf/NaN, or set it to
zero. A ShardedGradient has the shape of the full gradient and stands for it, while each rank has only its shard, in the
reduce dtype, perhaps in host memory, perhaps multiplied by the loss scale. It supports three kinds of operations:

- A norm: each rank's shard, and one all-reduce for the norms of all parameters together (``parameter_norms``).
- An elementwise in-place change: each rank changes its shard, with the matching elements of the other operands.
- Anything that only reads: the full gradient is assembled first, as by ``full_gradient``. A view of it is a
  ``GradientPart``: it can only be read, because it views a copy.

Anything else raises before it changes anything. All ranks must call an operation that communicates, as they call
``backward()``. It goes through the recorded order of collectives, so that the error names a rank that does not call it.

``parameter.grad = tensor`` copies: no memory is shared with the tensor, so another parameter's gradient is refused.
What was read as ``parameter.grad`` is in ``FlatGrad.exposed`` until its parameter is cleared or gets another gradient.
Then a ShardedGradient becomes invalid, and a tensor that views the shard gets memory of its own, as in a plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from zeroshard.comm import Communicator
from zeroshard.engine.context import ShardContext
from zeroshard.engine.flat_grad import FlatGrad, compute_norms, give_away
from zeroshard.engine.gradients import Gradients
from zeroshard.engine.param_data import get_autograd_grad, pop_autograd_grads
from zeroshard.engine.parameter import ParamInfo
from zeroshard.engine.state_guard import StateGuard
from zeroshard.engine.unit_values import assemble_full_tensor

# They change each element on its own: a rank needs only its own elements of the operands.
ELEMENTWISE_OPS = set(
    "abs_ add_ addcdiv_ addcmul_ clamp_ clamp_max_ clamp_min_ clip_ copy_ div_ fill_ floor_divide_ lerp_ masked_fill_ "
    "mul_ nan_to_num_ neg_ pow_ reciprocal_ round_ sign_ sgn_ sqrt_ square_ sub_ tanh_ trunc_ zero_".split()
)
LINEAR_OPS = {"mul_", "div_", "neg_", "zero_"}  # with a scalar operand, they commute with the loss scale


class ParamGrads:
    """The gradients of one model as ``parameter.grad``, between backward and the next forward."""

    def __init__(self, context: ShardContext, gradients: Gradients, state_guard: StateGuard) -> None:
        self.comm, self.order = context.comm, context.order
        self.gradients, self.state_guard = gradients, state_guard

    def get(self, info: ParamInfo) -> torch.Tensor | None:
        """Return the value of ``parameter.grad``."""
        flat, gradients = info.flat(), self.gradients
        if flat is None:
            return None
        gradient, local = gradients.flat_grads.get(flat), get_autograd_grad(flat.parameters[info.index])
        if gradient is None or (local is None and not gradients.has_grads):
            return local
        self.state_guard.check_states_reloaded()
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"the gradient of {info.name!r} is read inside a backward, which has not reduced it yet: read "
                "parameter.grad when backward() has returned"
            )
        self.order.begin_pass("read the gradients")
        if local is not None:  # of a backward that no hook has seen, or set by the user
            gradients.reduce_pending()
        gradients.sync_used_params()
        if not gradient.is_param_used[info.index] or gradient.shard is None or not gradient.has_shard:
            return None
        comm = self.comm
        # replicas that train alone: a GradScaler must learn of an overflow on any of them
        if comm.shard_axis.size * comm.tensor_axis.size * comm.average_axis.size > 1 or self.is_scaled:
            handle = ParamGradHandle(self, gradient, info.index)
            gradient.exposed[handle] = info.index
            return ShardedGradient(handle)
        gradients.scaling.apply()
        self.state_guard.invalidate_speculation()  # the user may write into the result
        gradients.prepare_write(gradient)
        gradients.memory.is_exposed = True
        view = flat.view(gradient.shard, info.index).detach()  # not a view for autograd: it can be detached in place
        gradient.exposed[view] = info.index
        return view

    def set(self, info: ParamInfo, value: torch.Tensor | None) -> None:
        """Clear the gradient of one parameter, or replace it by the full gradient that all ranks pass."""
        flat = info.flat()
        if flat is None or value is None:
            self.clear(info)
            return
        gradient, flat_grads = self.get(info), self.gradients.flat_grads
        exposed, is_whole = getattr(flat_grads.get(flat), "exposed", {}), type(value) is ShardedGradient
        if isinstance(value, ShardedGradient):
            is_shared = is_whole or value.handle.name != info.name
            is_own = is_whole and exposed.get(value.handle) == info.index
        else:
            shards = chain.from_iterable(map(attrgetter("bucket_shards"), flat_grads.values()))
            is_shared = any(map(partial(torch._C._is_alias_of, value), shards))  # type: ignore[attr-defined]
            is_own = is_shared and gradient is not None and gradient.is_set_to(value)
        if is_own:
            return
        if is_shared:
            raise RuntimeError(
                f"the gradient of {info.name!r} was set to another parameter's, to one that was cleared, or to a view "
                "of one: they would share memory, which zeroshard cannot do. Assign a copy (tensor.clone())"
            )
        give_away(exposed, info.index)
        gradient = self.get(info)
        if gradient is not None:
            write_full_grad(info.name, gradient, value)
        else:  # reduced like autograd's, when it is needed
            self.gradients.add_unhooked_scaled_grads()
            with torch._C.DisableTorchFunctionSubclass():
                flat.parameters[info.index]._grad = value

    def clear(self, info: ParamInfo) -> None:
        """Clear the gradient of one parameter."""
        flat, gradients = info.flat(), self.gradients
        if flat is None:
            return
        gradient = gradients.flat_grads.get(flat)
        if gradient is None:  # frozen
            pop_autograd_grads([flat.parameters[info.index]])
            return
        if gradients.memory.has_grads:
            self.state_guard.check_states_reloaded()
        self.state_guard.invalidate_speculation()
        gradients.prepare_write(gradient)
        if gradient.has_shard or gradient.inner_sum is not None:  # even if unused on this rank: not on another
            gradients.reduce_queue.record_clear(info.name)
        gradient.clear_param(info.index)
        if not any(gradient.is_param_used):
            gradients.clear_if_empty()

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients carry a loss scale."""
        return self.state_guard.has_loss_scale or self.gradients.scaling.scale.inv_scale is not None


@dataclass(frozen=True)
class ParamGradHandle:
    """Locates the gradient of one parameter, and waits for and invalidates what depends on it."""

    param_grads: ParamGrads
    flat_grad: FlatGrad
    index: int

    @property
    def gradients(self) -> Gradients:
        """Return all gradients of the model."""
        return self.param_grads.gradients

    @property
    def name(self) -> str:
        """Return the parameter's name."""
        return self.flat_grad.flat.names[self.index]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the unscaled gradient: for fp16, fp32, whose range it needs without the loss scale."""
        is_scaled_half = self.param_grads.is_scaled and self.flat_grad.dtype == torch.float16
        return torch.float32 if is_scaled_half else self.flat_grad.dtype

    def finish_reduction(self, what: str) -> None:
        """Reduce pending gradients on all ranks; raise if this gradient was cleared."""
        self.param_grads.state_guard.check_states_reloaded()
        if self not in self.flat_grad.exposed:
            raise RuntimeError(
                f"this gradient of {self.name!r} was cleared or replaced after parameter.grad was read: read it "
                "again, or keep parameter.grad.clone()"
            )
        self.param_grads.order.begin_pass(what)
        self.gradients.sync_used_params()

    def norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm of the full gradient."""
        self.finish_reduction("read the gradients' norms")
        offset = 0
        for gradient in self.gradients.flat_grads.values():
            if gradient is self.flat_grad:
                break
            offset += len(gradient.is_param_used)
        norm = self.gradients.scaling.parameter_norms(norm_type)[offset + self.index]
        return norm if self.flat_grad.dtype == torch.float64 else norm.float()

    def full(self) -> torch.Tensor:
        """Return the assembled full gradient."""
        self.finish_reduction("read a gradient")
        self.param_grads.order.check(f"read the gradient of {self.name!r}")
        return assemble_full_grad(self.param_grads.comm, self.gradients, self.flat_grad, self.index).to(self.dtype)

    def writable_shards(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Return (elements in the flat's order, values) of this rank's shard; the caller may write the values."""
        self.finish_reduction("change the gradients")
        self.gradients.scaling.has_edits = True
        self.gradients.scaling.apply()
        self.param_grads.state_guard.invalidate_speculation()
        self.gradients.prepare_write(self.flat_grad)
        return ((elements.slice, values) for elements, values in self.flat_grad.param_shards(self.index))

    def flatten_operand(self, value: Any) -> Any:
        """Flatten an operand in the flat's element order; return scalars unchanged."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        flat = self.flat_grad.flat
        full = value.expand(flat.full_shapes[self.index])
        tp_shard = flat.tp_shards[self.index]
        return flat.flatten(full if tp_shard is None else tp_shard.slice(full), self.index)

    def apply_elementwise(
        self, name: str, func: Callable[..., Any], operands: Sequence[Any], options: dict[str, Any]
    ) -> None:
        """Apply an elementwise operation to this rank's shard, in place, without the loss scale."""
        flat_operands = [self.flatten_operand(value) for value in operands]
        inverse_scale = self.gradients.scaling.scale.inv_scale
        works_on_scaled = name in LINEAR_OPS and all(
            not isinstance(operand, torch.Tensor) or operand.dim() == 0 for operand in flat_operands
        )
        for elements, shard in self.writable_shards():
            shard_operands = [_slice_operand(operand, elements, shard.device) for operand in flat_operands]
            if works_on_scaled or inverse_scale is None:
                func(shard, *shard_operands, **options)
                continue
            factor = inverse_scale.to(shard.device)
            unscaled = shard.float() * factor
            func(unscaled, *shard_operands, **options)
            shard.copy_(unscaled / factor)


def _slice_operand(operand: Any, within: slice, device: torch.device) -> Any:
    if not isinstance(operand, torch.Tensor):
        return operand
    return operand.to(device) if operand.dim() == 0 else operand[within].to(device)


class ShardedGradient(torch.Tensor):
    """The full gradient of a parameter; this rank has only a shard: see [Note: sharded gradients]."""

    handle: ParamGradHandle

    @staticmethod
    def __new__(cls, source: ParamGradHandle) -> ShardedGradient:
        """Create a wrapper with the full gradient's shape."""
        shape = source.flat_grad.flat.full_shapes[source.index]
        wrapper: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=source.dtype, device=source.flat_grad.flat.device
        )
        torch._C._set_throw_on_mutable_data_ptr(wrapper)  # it has no memory: to_dlpack() would end the process
        wrapper.handle = source
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run norms and elementwise changes on shards; assemble the full gradient for operations that only read."""
        options, name = kwargs or {}, func._schema.name.partition("::")[2]
        first: Any = next(iter(args), None)
        if type(first) is ShardedGradient:
            if name in ("detach", "detach_", "alias"):
                return ShardedGradient(first.handle)
            if name == "linalg_vector_norm" and all(not dim for dim in (*args[2:4], options.get("dim"))):
                norm = first.handle.norm(float(args[1] if len(args) > 1 else 2.0))
                return norm.to(options.get("dtype"))
            if name in ELEMENTWISE_OPS:
                first.handle.apply_elementwise(name, func, *_gather_sharded_grads((args[1:], options)))
                return first
        single = name.removeprefix("_foreach_")
        if isinstance(first, (list, tuple)) and any(type(grad) is ShardedGradient for grad in first):
            if name == "_foreach_norm":
                return [torch.linalg.vector_norm(grad, *args[1:2], **options) for grad in first]
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                _unscale(*args)
                return None
            if single in ELEMENTWISE_OPS:
                for index, grad in enumerate(first):
                    operands = [value[index] if isinstance(value, (list, tuple)) else value for value in args[1:]]
                    if len(operands) > 2:  # addcmul_, addcdiv_: a factor after two tensors
                        options["value"] = operands.pop()
                    getattr(grad, single)(*operands, **options)
                return None
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if func.namespace == "c10d" or getattr(argument.alias_info, "is_write", False)
        ]
        pytree.tree_map_only(ShardedGradient, partial(_refuse, name=name), [written, options])  # such as ``out``
        args, options = _gather_sharded_grads((args, options))
        result = func(*args, **options)
        is_view = func.is_view or "unsafe" in name  # such as unsafe_split: a view that autograd does not track
        return pytree.tree_map(partial(GradientPart, first.handle.name), result) if is_view else result

    @property
    def data(self) -> torch.Tensor:
        """Return the same gradient."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        write_full_grad(self.handle.name, self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the gradient, without communication."""
        where = f"{tuple(self.shape)}, {self.dtype}, {self.device}"
        return f"ShardedGradient of {self.handle.name!r} ({where}; zeroshard.full_gradient(model, name) reads it)"

    def numpy(self, *, force: bool = False) -> Any:
        """Return the full gradient, read-only; all ranks call it together."""
        array = self.handle.full().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the full gradient; all ranks call it together."""
        return self.handle.full().tolist()

    __copy__ = torch.Tensor.detach  # as copies of a tensor share its memory

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return the full gradient; all ranks call it together."""
        return self.handle.full()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the full gradient; all ranks call it together."""
        return self.handle.full().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class GradientPart(ShardedGradient):
    """A view of the assembled gradient of a parameter. A write to it would be lost, so it raises."""

    @staticmethod
    def __new__(cls, name: str, values: torch.Tensor) -> GradientPart:
        """Return ``values``, which know the parameter's ``name``."""
        part = torch.Tensor._make_subclass(cls, values)
        part.handle = SimpleNamespace(name=name, full=lambda: values)  # type: ignore[assignment]
        return part


def _refuse(gradient: ShardedGradient, name: str, *args: Any, **options: Any) -> NoReturn:
    """Raise: ``name`` would write to a copy, or use memory that is not there."""
    raise RuntimeError(
        f"the gradient of {gradient.handle.name!r} is partitioned over the ranks and averaged already, and {name!r} "
        "does not work on shards or on a part of it. Read it with zeroshard.full_gradient(model, name), change it "
        "element by element (mul_, add_, clamp_, copy_, …), replace it (parameter.grad = tensor), clip with "
        "optimizer.clip_grad_norm_(…), clear with optimizer.zero_grad()"
    )


for _name in ("apply_", "map_", "map2_", "share_memory_", "data_ptr", "untyped_storage", "__dlpack__"):
    setattr(ShardedGradient, _name, partialmethod(_refuse, _name))  # torch's own do not ask the class


def write_full_grad(name: str, gradient: torch.Tensor, value: torch.Tensor) -> None:
    """Write a full gradient, which all ranks pass, to the value of ``parameter.grad``."""
    shape = getattr(value, "shape", value)
    if shape != gradient.shape:
        raise ValueError(f"the gradient of {name!r} is a tensor of shape {tuple(gradient.shape)}, got {shape}")
    with torch.no_grad():
        gradient.copy_(value)


def _gather_sharded_grads(values: Any) -> Any:
    """Replace each ShardedGradient in nested ``values`` by the full gradient."""
    return pytree.tree_map_only(ShardedGradient, lambda gradient: gradient.handle.full(), values)


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply by the inverse of ``torch.amp.GradScaler``'s scale, and set ``found_inf`` for inf/NaN on any rank."""
    plain: list[torch.Tensor] = []
    by_model: dict[ParamGrads, list[ParamGradHandle]] = {}
    for gradient in gradients:
        if type(gradient) is ShardedGradient:
            by_model.setdefault(gradient.handle.param_grads, []).append(gradient.handle)
        else:
            plain.append(gradient)
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inverse_scale)
    for param_grads, handles in by_model.items():
        comm, model = param_grads.comm, param_grads.gradients
        if any(flat.spec.has_error_feedback for flat in model.flat_grads):
            raise ValueError(
                "error_feedback=True with torch.amp.GradScaler: when its scale changes, what is left of the last "
                "gradient still has the old scale, and is added to gradients of the new one. Leave out one of them: "
                'precision="bf16" needs no scale'
            )
        shards = [shard for handle in handles for _, shard in handle.writable_shards() if shard.numel()]
        overflow = torch.zeros((), device=comm.device)
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for shard in shards:
            groups.setdefault((shard.device, shard.dtype), []).append(shard)
        for group in groups.values():  # a tensor with a NaN has the norm NaN, and NaN < inf is False
            norms = torch.stack(compute_norms(group, math.inf)).to(overflow.device)
            overflow = torch.maximum(overflow, torch.logical_not((norms < math.inf).all()).float())
        what = "look for overflow"
        param_grads.order.check(what)
        comm.all_reduce_over_mesh(overflow, what, dist.ReduceOp.MAX)
        if comm.average_axis.size > 1:  # replicas that train alone skip together: they count the same steps
            comm.all_reduce(overflow, comm.average_axis, what, dist.ReduceOp.MAX).wait()
        found_inf.copy_(torch.maximum(found_inf, overflow.to(found_inf.device)))
        used_count = sum(sum(gradient.is_param_used) for gradient in model.flat_grads.values())
        factor = inverse_scale.to(comm.device)
        if len({(handle.flat_grad, handle.index) for handle in handles}) == used_count:
            model.scaling.clip(factor.clone())
        else:
            model.scaling.multiply(shards, factor)


def assemble_full_grad(comm: Communicator, gradients: Gradients, gradient: FlatGrad, index: int) -> torch.Tensor:
    """Return the full reduced gradient of one parameter, clipped, and without a loss scale."""
    flat = gradient.flat
    gradient.wait_copy()
    flat_values = torch.zeros(flat.layout.numels[index], dtype=gradient.dtype, device=flat.device)
    for elements, values in gradient.param_shards(index):
        flat_values[elements.slice] = values
    if gradients.scaling.scale.inv_scale is not None:
        flat_values = flat_values.float()
    for factor in gradients.scaling.scale.factors:
        flat_values *= factor
    return assemble_full_tensor(comm, flat_values, flat, index)

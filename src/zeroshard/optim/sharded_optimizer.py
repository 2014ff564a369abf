"""ShardedOptimizer: the user's torch optimizer on this rank's shards: see [Note: optimizer slices] in slices.py."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zeroshard.config.offload import TIERS
from zeroshard.engine import (
    PICKLE_ERROR,
    Engine,
    FlatGrad,
    FlatParam,
    assemble_full_tensor,
    find_parameter,
    param_info,
    param_versions,
    raise_on_join,
)
from zeroshard.memory import TierAllocator, TieredTensor, TierSegment
from zeroshard.optim.cpu.updates import CpuUpdates
from zeroshard.optim.elementwise_check import check_elementwise_group
from zeroshard.optim.param_groups import HyperparamChecker, ParamGroupView
from zeroshard.optim.slices import OptimizerSlice, is_elementwise, is_scalar_state, make_slices
from zeroshard.optim.step import OptimizerStep
from zeroshard.sharding import LossScale, Range


@dataclass
class _FrozenParamStates:
    """The states of a frozen parameter in a group. No optimizer slice holds them."""

    elementwise: dict[str, torch.Tensor]  # this rank's elements, packed contiguously
    scalars: dict[str, Any]


class ShardedOptimizer(torch.optim.Optimizer):
    """Step the inner optimizer on shards, then refresh the parameters. Returned by :func:`zeroshard.shard`.

    It shares groups, hyper-parameters and states with the inner optimizer, so a scheduler works on either.

    >>> import zeroshard
    >>> model = torch.nn.Linear(2, 2)
    >>> model, optimizer = zeroshard.shard(model, torch.optim.Adam(model.parameters(), lr=0.1))
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    >>> isinstance(optimizer, torch.optim.Optimizer), type(optimizer.inner).__name__
    (True, 'Adam')
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        engine: Engine,
        names: dict[int, str],
        loss_scale: LossScale | None,
        tiers: TierAllocator,
    ) -> None:
        self.inner = inner
        self._engine = engine
        self._loss_scale = engine.state_guard.loss_scale = loss_scale
        self._cpu_updates = CpuUpdates(inner, engine, tiers) if tiers.offload is not None else None
        self._step_runner = OptimizerStep(inner, engine, loss_scale, self._cpu_updates)
        self._flats = list(engine.gradients.flat_grads)
        self._has_compared_tp_grads = False  # done once, in the first step
        self._optimized_params: list[torch.nn.Parameter] | None = None  # cached parameters of all groups
        self._is_every_param_used = True  # whether every parameter had a gradient on some rank in this step
        self._used_flags_cache: tuple[tuple[bool, ...], torch.Tensor] | None = None
        self._hyperparam_checker = HyperparamChecker(engine.comm.device)  # compares them across ranks
        self._ungrouped_params_cache: list[tuple[FlatGrad, int]] | None = None  # see ``_ungrouped_params``
        self._frozen_states: dict[str, _FrozenParamStates] = {}  # states of frozen parameters, by name
        names_by_group = [[names[id(parameter)] for parameter in group["params"]] for group in inner.param_groups]
        states = {names[id(p)]: _gather_dtensors(state) for p, state in inner.state.items() if id(p) in names}
        super().__init__([torch.zeros(0)], {})
        self.param_groups = [
            self._make_group(group, names) for group, names in zip(inner.param_groups, names_by_group, strict=True)
        ]
        self.state, self.defaults = inner.state, inner.defaults
        self.group_param_names = names_by_group  # per group, in the order the user gave them
        self._slices: list[list[OptimizerSlice]] = [[] for _ in names_by_group]
        self.state.clear()
        for index, group in enumerate(names_by_group):
            self._set_slices(index, self._make_slices(group))
        self._load_states(states)
        self._mode_methods = self._redirect_train_eval()
        engine.state_guard.device_states = weakref.WeakMethod(self._states_on_device)
        if self._cpu_updates is not None:
            engine.state_guard.backward_listener = weakref.ref(self._cpu_updates)
            engine.gradients.on_shard_ready = weakref.WeakMethod(self._cpu_updates.on_shard_ready)
            engine.gradients.needs_overflow_check = loss_scale is not None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise on pickling and copying: a copy would share shards and collectives with the original."""
        raise RuntimeError(f"{PICKLE_ERROR}. To copy the optimizer's states, use copy.deepcopy(optimizer.state_dict())")

    def join_hook(self, **options: object) -> NoReturn:
        """Raise: torch's Join is not supported."""
        raise_on_join()

    # -- public API ---------------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Return ``train()`` or ``eval()`` if the inner optimizer has them, as schedule-free optimizers do.

            They change parameters, so all ranks must call them together. Forward then uses the new values.
            """
            if name in self.__dict__.get("_mode_methods", ()):
                return partial(self._switch_mode, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def _redirect_train_eval(self) -> dict[str, Callable[[], Any]]:
        """Redirect the inner optimizer's ``train()`` and ``eval()`` to this object; return the original methods."""
        methods = ((name, getattr(self.inner, name, None)) for name in ("train", "eval"))
        callables = {name: method for name, method in methods if callable(method)}
        for name in callables:
            self.inner.__dict__[name] = partial(_switch_mode_from_inner, weakref.ref(self), name)
        return callables

    def restore_train_eval(self) -> None:
        """Restore the inner optimizer's own ``train()`` and ``eval()``."""
        for name in self._mode_methods:
            self.inner.__dict__.pop(name, None)

    def _switch_mode(self, name: str) -> Any:
        engine = self._engine
        if engine.is_running:
            raise RuntimeError(f"optimizer.{name}() was called in a forward or backward: call it between steps")
        engine.order.begin_pass(f"optimizer.{name}()")
        engine.state_guard.check_valid("weights", "optimizer")
        engine.state_guard.wait_readers()
        engine.state_guard.wait_updates()
        with torch.no_grad():
            result = self._mode_methods[name]()
        engine.state_guard.sync_from_masters()
        engine.release_retained()
        return result

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the fp16 loss scale; with other precisions return it unchanged."""
        if self._loss_scale is None:
            return loss
        scaled = self._loss_scale.apply(loss)
        if scaled.requires_grad:
            gradients = self._engine.gradients
            scaled.register_hook(partial(gradients.on_scaled_backward, self._loss_scale.inverse_scale))  # type: ignore[no-untyped-call]
        return scaled

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """Return the current fp16 loss scale, on the device; None with other precisions."""
        return None if self._loss_scale is None else self._loss_scale.scale

    def loss_scale_state(self) -> list[float] | None:
        """Return the fp16 loss scale and the steps since the last overflow, for :meth:`load_loss_scale`."""
        return None if self._loss_scale is None else self._loss_scale.state()

    def load_loss_scale(self, state: list[float]) -> None:
        """Load the result of :meth:`loss_scale_state`; a no-op with other precisions."""
        if self._loss_scale is not None:
            self._loss_scale.load(state)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before clipping.

        All ranks must call it together. The result stays on the device, so there is no host sync.
        """
        if norm_type not in (2, math.inf):
            raise ValueError(f"norm_type is 2 or inf, got {norm_type!r}")
        self._engine.state_guard.check_states_reloaded()
        gradients = self._engine.gradients
        self._engine.order.begin_pass("clip" + self._scaled_suffix)
        self._engine.reduce_pending()
        norm = self._grouped_norm(norm_type) if self._ungrouped_params() else self._global_norm(norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: not clipped")
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if self._ungrouped_params():  # parameters in no group are not clipped
            shards = [shard for gradient, index in self._grouped_params() for _, shard in gradient.param_shards(index)]
            self._engine.state_guard.invalidate_speculation()
            for gradient in gradients.flat_grads.values():
                gradients.prepare_write(gradient)
            gradients.scale_shards(shards, coefficient)
            return norm
        earlier = gradients.clip_coef
        gradients.clip_coef = coefficient if earlier is None else earlier * coefficient
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]. All ranks must call it together.

        >>> import zeroshard
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.tensor([[3.0, -0.5]])).sum().backward()
        >>> optimizer.clip_grad_value_(1.0)
        >>> zeroshard.full_gradient(model, "weight")
        tensor([[ 1.0000, -0.5000]])
        """
        self._engine.state_guard.check_states_reloaded()
        gradients = self._engine.gradients
        self._engine.order.begin_pass("clip" + self._scaled_suffix)
        self._engine.reduce_pending()
        gradients.apply_clip_coef()
        self._engine.state_guard.invalidate_speculation()
        for gradient in gradients.flat_grads.values():
            gradients.prepare_write(gradient)
        shards = [shard for gradient, index in self._grouped_params() for _, shard in gradient.param_shards(index)]
        limit = torch.tensor(float(clip_value), device=self._engine.comm.device)
        limit = limit if gradients.inverse_scale is None else limit / gradients.inverse_scale
        for shard in shards if self._ungrouped_params() else gradients.shards():
            bound = limit.to(shard.device, shard.dtype)
            torch.clamp(shard, -bound, bound, out=shard)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish pending reductions, update this rank's shards, and start to refresh the parameters on all ranks."""
        loss = None
        self._engine.state_guard.check_states_reloaded()
        self._engine.state_guard.check_not_gathered("optimizer.step()")
        if closure is not None:
            self._check_frozen_grads()
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._engine.order.begin_pass(f"step after {self._engine.backward_count} backwards{self._scaled_suffix}")
            for group in self.param_groups:
                group.check_unchanged()  # type: ignore[attr-defined]
            self._check_frozen_grads()
            backwards, self._engine.backward_count = self._engine.backward_count, 0
            self._engine.reduce_pending()
            self._check_tp_replicated_grads()
            self._sync_unused_params()
            self._engine.state_guard.wait_readers()
            self._engine.state_guard.sync_user_edits()
            self._engine.release_retained()
            changed = self._step_runner.run(
                [slice_ for slice_ in self._all_slices() if self._has_grad(slice_)], backwards
            )
            if changed is not None:
                self._engine.state_guard.copy_masters(changed, device_only=True)
                self._engine.state_guard.on_values_changed(self._params_with_grad())
                self._engine.state_guard.start_param_refresh()
            self._engine.gradients.clip_coef = None
        self._track_state_bytes()
        self._engine.comm.counters.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the groups' parameters, or set them to zero."""
        if self._engine.gradients.memory.has_grads:
            self._engine.state_guard.check_states_reloaded()
        self._engine.state_guard.invalidate_speculation()
        if not set_to_none:
            self._engine.state_guard.wait_updates()
        if self._ungrouped_params():
            self._clear_grouped_grads(set_to_none)
        else:
            self._engine.gradients.clear(set_to_none)

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the sharded model that are in no group yet."""
        if not hasattr(self, "_slices"):  # called by torch's constructor
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        param_names = [entry[0] for entry in params if isinstance(entry, tuple)]  # from named_parameters()
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        grouped = {name for group in self.group_param_names for name in group}
        names = []
        for parameter in params:
            info = param_info(parameter)
            if info is None or info.flat() not in self._flats:
                raise ValueError("add_param_group takes trainable parameters of the sharded model itself")
            if info.name in grouped:
                raise ValueError(f"{info.name!r} is in a parameter group already")
            names.append(info.name)
        self._engine.state_guard.check_not_gathered("add_param_group()")
        config = self._engine.config
        dtype = None if config.precision is None else torch.float32
        check_elementwise_group(self.inner, {**param_group, "params": params}, config.elementwise, dtype)
        self._engine.state_guard.wait_readers()
        self._engine.state_guard.wait_updates()
        self._allocate_masters(set(names))
        placeholder = torch.zeros(0, requires_grad=True)  # the inner optimizer checks the group and adds defaults
        self.inner.add_param_group({**param_group, "params": [("", placeholder) if param_names else placeholder]})
        if param_names:
            self.inner.param_groups[-1]["param_names"] = param_names
        self.group_param_names.append(names)
        self.param_groups.append(self._make_group(self.inner.param_groups[-1], names))
        self._ungrouped_params_cache = None
        self._slices.append([])
        self._set_slices(len(self.group_param_names) - 1, self._make_slices(names))

    def _make_slices(self, names: list[str]) -> list[OptimizerSlice]:
        return make_slices(
            self._flats, set(names), self._step_runner.max_slice_numel, self._engine.gradients.memory.segments
        )

    def state_bytes(self, tier: str | None = None) -> int:
        """Return the bytes of this rank's optimizer states, in all tiers or in one, without the master weights."""
        tensors = [
            value
            for slice_ in self._all_slices()
            if tier is None or tier == ("device" if slice_.tier_segment is None else slice_.tier_segment.tier)
            for value in list(self.state.get(slice_.parameter, {}).values())  # a pending update may add to it
            if isinstance(value, torch.Tensor)
        ]
        return sum(
            tensor.nbytes for tensor in (*tensors, *(self._frozen_state_tensors() if tier in (None, "device") else ()))
        )

    def _states_on_device(self) -> list[torch.Tensor]:
        states = [self.state.get(slice_.parameter, {}) for slice_ in self._all_slices() if slice_.tier_segment is None]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        tensors += self._frozen_state_tensors()
        return [tensor for tensor in tensors if tensor.device == self._engine.comm.device]

    def _track_state_bytes(self) -> None:
        for tier in TIERS if self._cpu_updates is not None else TIERS[:1]:
            self._engine.tracker.set("optimizer states", self.state_bytes(tier), tier)

    # -- one step -----------------------------------------------------------------------------------------------

    def _global_norm(self, norm_type: float) -> torch.Tensor:
        comm, infinite = self._engine.comm, norm_type == math.inf
        found = self._engine.gradients.shard_norms(norm_type)
        norms = torch.stack(found) if found else torch.zeros(1, device=comm.device)
        total = norms.max().nan_to_num(nan=math.inf, posinf=math.inf) if infinite else norms.square().sum()
        op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
        for axis in (comm.shard_axis, comm.tensor_axis):  # ranks along the other axes have the same gradients
            if axis.size > 1:
                what = "sum the gradients' norm"
                self._engine.order.check(what)
                comm.all_reduce(total, axis, what, op).wait()
        norm = total if infinite else total.sqrt()
        for factor in (self._engine.gradients.clip_coef, self._engine.gradients.inverse_scale):
            norm = norm if factor is None else norm * factor
        return norm

    @property
    def _scaled_suffix(self) -> str:
        """Return a suffix for pass names: ranks with and without a loss scale must not reduce together."""
        return "" if self._engine.gradients.inverse_scale is None else " of scaled losses"

    # -- parameters in groups and in no group -------------------------------------------------------------------

    def _make_group(self, inner: dict[str, Any], names: list[str]) -> ParamGroupView:
        flats = [flat for unit in self._engine.units for flat in unit.flats]
        parameters = {name: parameter for flat in flats for name, parameter in flat.named_parameters}
        return ParamGroupView(inner, [parameters[name] for name in names])

    def _ungrouped_params(self) -> list[tuple[FlatGrad, int]]:
        """Return the trainable parameters in no group: this optimizer does not touch their gradients."""
        if self._ungrouped_params_cache is None:
            own = {name for group in self.group_param_names for name in group}
            self._ungrouped_params_cache = [
                place for place in self._trainable_params() if place[0].flat.names[place[1]] not in own
            ]
        return self._ungrouped_params_cache

    def _grouped_params(self) -> list[tuple[FlatGrad, int]]:
        own = {name for group in self.group_param_names for name in group}
        return [place for place in self._trainable_params() if place[0].flat.names[place[1]] in own]

    def _trainable_params(self) -> list[tuple[FlatGrad, int]]:
        gradients = self._engine.gradients.flat_grads.values()
        return [(gradient, index) for gradient in gradients for index in range(len(gradient.is_param_used))]

    def _grouped_norm(self, norm_type: float) -> torch.Tensor:
        own = {name for group in self.group_param_names for name in group}
        wanted = [gradient.flat.names[index] in own for gradient, index in self._trainable_params()]
        norms = self._engine.gradients.parameter_norms(norm_type)
        norm: torch.Tensor = torch.linalg.vector_norm(
            norms[torch.tensor(wanted, device=norms.device)], norm_type
        ).float()
        return norm

    def _clear_grouped_grads(self, set_to_none: bool) -> None:
        gradients = self._engine.gradients
        gradients.wait_reductions()
        gradients.apply_clip_coef()
        for gradient, index in self._grouped_params():
            gradients.prepare_write(gradient)
            gradient.clear_param(index) if set_to_none else gradient.zero_param(index)
        if set_to_none:
            gradients.clear_if_empty()

    def _check_tp_replicated_grads(self) -> None:
        """Raise in the first step if the gradient of a plain parameter differs between ranks of the tensor axis.

        If such a parameter is used between tensor-parallel layers (e.g. a norm of the heads), each rank has only its
        part of the sum.
        """
        comm = self._engine.comm
        if self._has_compared_tp_grads or comm.tensor_axis.size == 1:
            return
        self._has_compared_tp_grads = True
        names, squares = self._engine.gradients.tp_replicated_square_sums()
        what = "compare gradients over the tensor axis"
        self._engine.order.check(what)
        if comm.shard_axis.size > 1:
            comm.all_reduce(squares, comm.shard_axis, what).wait()
        largest, negated_smallest = squares.clone(), -squares
        for tensor in (largest, negated_smallest):
            comm.all_reduce(tensor, comm.tensor_axis, what, dist.ReduceOp.MAX).wait()
        is_different = largest + negated_smallest > 0.1 * largest  # a different summation order changes much less,
        is_different &= largest > 1e-6 * largest.sum()  # except in gradients that are only rounding errors
        found = is_different.any().float()
        comm.all_reduce_over_mesh(found, what, dist.ReduceOp.MAX)
        if bool(found):
            bad = [name for name, differs in zip(names, is_different.tolist(), strict=True) if differs] or [
                "a parameter"
            ]
            raise RuntimeError(
                f"the gradient of {bad[0]!r} is not the same on all ranks of the tensor axis: it is used between "
                "divided layers, where each rank has a part of the sum. Give its module a style in tensor_plan, so "
                "that it becomes a DTensor, or leave those layers undivided"
            )

    def _params_with_grad(self) -> list[torch.nn.Parameter]:
        """Return the parameters in groups that have a gradient."""
        if self._optimized_params is None:
            names = {name for group in self.group_param_names for name in group}
            self._optimized_params = [p for flat in self._flats for name, p in flat.named_parameters if name in names]
        if self._is_every_param_used:
            return self._optimized_params
        gradients = self._engine.gradients.flat_grads
        used = {
            id(p) for f, g in gradients.items() for p, flag in zip(f.parameters, g.is_param_used, strict=True) if flag
        }
        return [parameter for parameter in self._optimized_params if id(parameter) in used]

    def _check_frozen_grads(self) -> None:
        """Raise if a grouped parameter that was frozen at shard() has a gradient.

        torch would update it; here it has no shard.
        """
        given = self._engine.state_guard.frozen_params_with_grads()
        if given:
            names = {name for group in self.group_param_names for name in group}
            given = [name for name in given if name in names]
        if given:
            raise RuntimeError(
                f"{given[0]!r} was frozen when shard() was called, and was given a gradient since: clear it "
                "(parameter.grad = None), or call zeroshard.unwrap(), set requires_grad, and shard again"
            )

    # -- unused parameters --------------------------------------------------------------------------------------

    def _sync_unused_params(self) -> None:
        """Find the parameters that have no gradient on any rank; split slices that mix used and unused parameters.

        All ranks join the all-reduce, but only a rank that misses a gradient reads the result: for the others every
        parameter is used. So if all parameters are used, there is no host sync.
        """
        comm, gradients = self._engine.comm, self._engine.gradients.flat_grads
        flags = tuple(flag for gradient in gradients.values() for flag in gradient.is_param_used)
        if comm.data_axes and comm.consistency.is_distributed:
            if self._used_flags_cache is None or self._used_flags_cache[0] != flags:
                self._used_flags_cache = (flags, torch.tensor(flags, dtype=torch.uint8, device=comm.device))
            merged = torch.cat(
                [self._used_flags_cache[1], self._hyperparam_checker.local_digest(self.inner.param_groups)]
            )
            what = "agree on unused parameters"
            self._engine.order.check(what)
            comm.all_reduce_over_mesh(merged, what, dist.ReduceOp.MAX)
            self._hyperparam_checker.compare(merged[len(flags) :], comm.consistency.rank)
            if not all(flags):
                flags = tuple(bool(flag) for flag in comm.read_to_host(merged[: len(flags)], what))
                self._engine.gradients.set_used_params(flags)
        self._is_every_param_used = all(flags)
        if self._is_every_param_used:
            return
        for index, slices in enumerate(self._slices):  # per group: so every stage splits and rounds the same way
            if len({used for slice_ in slices for used in self._used_flags_of(slice_)}) > 1:
                if self._cpu_updates is not None:
                    self._cpu_updates.wait()  # the previous step's update may still write to the slice
                self._set_slices(
                    index, [param_slice for slice_ in slices for param_slice in self._split_per_param(slice_)]
                )

    def _used_flags_of(self, optimizer_slice: OptimizerSlice) -> set[bool]:
        gradients = self._engine.gradients.flat_grads
        return {gradients[flat].is_param_used[parameter] for flat, parameter, _, _ in optimizer_slice.param_ranges()}

    def _has_grad(self, optimizer_slice: OptimizerSlice) -> bool:
        gradients = self._engine.gradients.flat_grads
        reduced = any(gradients[flat_range.flat].has_shard for flat_range in optimizer_slice.flat_ranges)
        return reduced and (self._is_every_param_used or True in self._used_flags_of(optimizer_slice))

    def _split_per_param(self, optimizer_slice: OptimizerSlice) -> list[OptimizerSlice]:
        split = optimizer_slice.split_per_param(self.state.pop(optimizer_slice.parameter, {}))
        for param_slice, state in split:
            if state:
                self.state[param_slice.parameter] = state
        return [param_slice for param_slice, _ in split]

    # -- optimizer slices ---------------------------------------------------------------------------------------

    def _all_slices(self) -> list[OptimizerSlice]:
        return [slice_ for slices in self._slices for slice_ in slices]

    def _set_slices(self, index: int, slices: list[OptimizerSlice]) -> None:
        self._slices[index] = slices
        self._optimized_params = None
        self.inner.param_groups[index]["params"] = [slice_.parameter for slice_ in slices]
        self._step_runner.slice_guard.guard_slices(slices)
        for slice_ in slices:
            slice_.param_group = self.inner.param_groups[index]
        if self._cpu_updates is not None:
            self._cpu_updates.set_slices(self._all_slices())

    def _allocate_masters(self, names: set[str]) -> None:
        """Allocate fp32 master weights for flats that had none because no group trained them."""
        for flat in self._flats:
            if flat.master is None and names & set(flat.names) and self._engine.precision.has_master(flat.dtype):
                master = torch.empty(flat.layout.shard_numel, device=flat.device)
                flat.master = TieredTensor([TierSegment(Range(0, flat.layout.shard_numel), "device", master)])
                self._engine.tracker.add("master weights", master.nbytes)
                for shard_range, local_shard in zip(flat.shard_ranges, flat.local_shards, strict=True):
                    flat.master.write(shard_range, local_shard)
                flat.known_versions = param_versions(flat.parameters)
        self._engine.state_guard.expose_reduced_grads()  # from now on, detect in-place edits of these parameters

    # -- full (unsharded) states --------------------------------------------------------------------------------

    @torch.no_grad()
    def full_state(self, name: str) -> dict[str, Any]:
        """Return the full optimizer state of one parameter, in its original shape. All ranks must call it together."""
        what = f"read the optimizer's state of {name!r}"
        return self._full_state(name, self.describe_states([name], what)[name])

    def describe_states(
        self, names: Iterable[str] | None = None, what: str = "read the optimizer's states"
    ) -> dict[str, dict[str, Any]]:
        """Return which states each parameter has, without gathering them: for all parameters, or for ``names``.

        An elementwise state is described by its dtype; any other (a step count) by its value. All ranks must call it
        together. ``what`` names the operation in errors.
        """
        self._engine.order.begin_pass(f"to {what}")
        self._engine.state_guard.wait_updates()
        self._engine.state_guard.check_valid("optimizer")
        local: dict[str, dict[str, Any]] = {
            name: {} for name in (names or [n for group in self.group_param_names for n in group])
        }
        error_text = ""
        for slice_ in self._all_slices():
            state = self.state.get(slice_.parameter, {})
            described = {k: v.dtype if is_elementwise(k, v, slice_.parameter.shape) else v for k, v in state.items()}
            for flat, parameter, _, _ in slice_.param_ranges() if described else ():
                if flat.names[parameter] in local:
                    local[flat.names[parameter]] = described
                    error_text = error_text or self._state_error(flat.names[parameter], slice_.parameter, state)
        for name, frozen in self._frozen_states.items():
            if name in local:
                local[name] = {key: flattened.dtype for key, flattened in frozen.elementwise.items()} | frozen.scalars
        if self._engine.comm.shard_axis.size > 1 or self._engine.comm.tensor_axis.size > 1:
            self._engine.order.check(what)
        gathered = self._engine.comm.all_gather_object((error_text, {} if error_text else local), what)
        for error, _ in gathered:
            if error:
                raise RuntimeError(error)
        merged: dict[str, dict[str, Any]] = {}
        for name in local:
            held = [rank[name] for _, rank in gathered if rank[name]]
            merged[name] = held[0] if held else {}
            for other in held[1:]:
                different = [
                    key for key, value in merged[name].items() if key in other and not _is_equal(value, other[key])
                ]
                if different:
                    raise RuntimeError(
                        f"the state {different[0]!r} of {name!r} differs from rank to rank, so there is no whole one: "
                        f"{type(self.inner).__name__} computes it from the slices that each rank holds"
                    )
        return merged

    def _state_error(self, name: str, parameter: torch.Tensor, state: dict[str, Any]) -> str:
        """Return why the states of a slice are not valid states of its parameter; empty if they are."""
        for key, value in state.items():
            if not is_elementwise(key, value, parameter.shape) and not is_scalar_state(value):
                what = (
                    f"has shape {tuple(value.shape)}"
                    if isinstance(value, torch.Tensor)
                    else f"is a {_type_name(value)}"
                )
                return (
                    f"the state {key!r} that {type(self.inner).__name__} keeps for {name!r} cannot be saved or read "
                    f"whole: it {what} for a slice of {parameter.numel()} elements, so it belongs to the slice that "
                    "this rank holds, and not to the parameter or its elements. Train with an optimizer whose states "
                    "are elementwise or numbers (AdamW, …), or save the model without the optimizer"
                )
        return ""

    def _full_state(self, name: str, described: dict[str, Any]) -> dict[str, Any]:
        flat, index = find_parameter(self._engine.units, name)
        ranges = self._local_state_ranges(flat, index)
        result: dict[str, Any] = {}
        for key, value in described.items():
            if not isinstance(value, torch.dtype):
                result[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            flattened = torch.zeros(flat.layout.numels[index], dtype=value, device=flat.device)
            for state, within, at in ranges:
                flattened[within.start : within.end] = state[key][at : at + within.numel]
            result[key] = assemble_full_tensor(self._engine.comm, flattened, flat, index)
        return result

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the full state dict, as the plain optimizer would. All ranks must call it together.

        With fp16 it has an additional key, "loss_scale".
        """
        param_ids = {
            name: param_id for param_id, name in enumerate(name for group in self.group_param_names for name in group)
        }
        described = self.describe_states(param_ids, "read the optimizer's state_dict()")
        states = {param_id: self._full_state(name, described[name]) for name, param_id in param_ids.items()}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [param_ids[n] for n in names]}
            for group, names in zip(self.param_groups, self.group_param_names, strict=True)
        ]
        full: dict[str, Any] = {"state": {param_id: s for param_id, s in states.items() if s}, "param_groups": groups}
        return full if self._loss_scale is None else {**full, "loss_scale": self.loss_scale_state()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state dict, of a plain optimizer or of :meth:`state_dict`. Each rank keeps its shard."""
        self._engine.state_guard.wait_readers()
        self._engine.state_guard.wait_updates()
        groups, states = state_dict["param_groups"], state_dict["state"]
        sizes, expected = [len(group["params"]) for group in groups], [len(names) for names in self.group_param_names]
        if sizes != expected:
            raise ValueError(f"the state dict has groups of {sizes} parameters, the optimizer has groups of {expected}")
        names = [name for group in self.group_param_names for name in group]
        param_ids = [param_id for group in groups for param_id in group["params"]]
        found = {name: states[param_id] for name, param_id in zip(names, param_ids, strict=True) if param_id in states}
        check_shardable_states(describe_full_states(found, self._full_shapes()))
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        if "loss_scale" in state_dict:
            self.load_loss_scale(state_dict["loss_scale"])
        self.state.clear()
        self._load_states(found)

    def _local_state_ranges(self, flat: FlatParam, index: int) -> list[tuple[dict[str, Any], Range, int]]:
        """Return this rank's states of a parameter: (states, range in the parameter, offset in the state tensors)."""
        if flat.names[index] in self._frozen_states:
            return [
                (self._frozen_states[flat.names[index]].elementwise, *place)
                for place in _owned_param_ranges(flat, index)
            ]
        return [
            (self.state[slice_.parameter], within, at)
            for slice_ in self._all_slices()
            if any(flat_range.flat is flat for flat_range in slice_.flat_ranges)
            for other, parameter, within, at in slice_.param_ranges()
            if other is flat and parameter == index
        ]

    def _full_shapes(self) -> dict[str, torch.Size]:
        flats = [flat for unit in self._engine.units for flat in unit.flats]
        return {name: shape for flat in flats for name, shape in zip(flat.names, flat.full_shapes, strict=True)}

    def _load_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Fill the slices' states from full states, by parameter name."""
        self._frozen_states = {}
        if not states:
            return
        self.allocate_states(describe_full_states(states, self._full_shapes()))
        for slice_ in self._all_slices():
            for flat, parameter, within, at in slice_.param_ranges():
                for key, value in states.get(flat.names[parameter], {}).items():
                    if is_elementwise(key, value, flat.full_shapes[parameter]):
                        flattened = _flatten_local_state(value, flat, parameter)
                        self.state[slice_.parameter][key][at : at + within.numel] = flattened[within.start : within.end]
        for name, frozen in self._frozen_states.items():
            flat, parameter = find_parameter(self._engine.units, name)
            for key, values in frozen.elementwise.items():
                flattened = _flatten_local_state(states[name][key], flat, parameter)
                for within, at in _owned_param_ranges(flat, parameter):
                    values[at : at + within.numel] = flattened[within.start : within.end]

    def allocate_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all states: allocate zeros for an entry that is a dtype, copy any other value.

        As in torch, floating point states take their parameter's dtype, and step counts are placed where the
        optimizer's kernels need them.
        """
        check_shardable_states(states)
        self._engine.state_guard.wait_updates()
        self._engine.state_guard.invalidate_speculation()
        before = dict(self.state)
        self.state.clear()
        self._allocate_frozen_states(states)
        for index, slices in enumerate(self._slices):
            if not self._have_equal_scalars(slices, states):
                self._set_slices(
                    index, [param_slice for slice_ in slices for param_slice in self._split_per_param(slice_)]
                )
        before = {
            slice_.parameter: before[slice_.parameter] for slice_ in self._all_slices() if slice_.parameter in before
        }
        for group, slices in zip(self.param_groups, self._slices, strict=True):
            on_device = bool(group.get("capturable") or group.get("fused"))
            for slice_ in slices:
                old_states = before.pop(slice_.parameter, {})
                for flat, parameter, _, _ in slice_.param_ranges():
                    for key, value in states.get(flat.names[parameter], {}).items():
                        if key not in self.state[slice_.parameter]:
                            buffer = old_states.pop(key, None)
                            if (
                                slice_.tier_segment is not None
                                and self._cpu_updates is not None
                                and isinstance(value, torch.dtype)
                            ):
                                buffer = self._cpu_updates.state_buffer(
                                    slice_.tier_segment, slice_, key, state_dtype(value, slice_.parameter)
                                )
                            self.state[slice_.parameter][key] = allocate_state(
                                key, value, slice_.parameter, on_device, buffer
                            )
        self._track_state_bytes()

    def local_states(self) -> Iterator[tuple[str, str, Range, torch.Tensor]]:
        """Yield (parameter name, state key, range, values) for every elementwise state on this rank."""
        for name, frozen in self._frozen_states.items():
            ranges = _owned_param_ranges(*find_parameter(self._engine.units, name))
            for key, value in frozen.elementwise.items():
                for within, at in ranges:
                    yield name, key, within, value[at : at + within.numel]
        for slice_ in self._all_slices():
            for key, value in self.state.get(slice_.parameter, {}).items():
                if is_elementwise(key, value, slice_.parameter.shape):
                    for flat, parameter, within, at in slice_.param_ranges():
                        yield flat.names[parameter], key, within, value[at : at + within.numel]

    def local_scalars(self) -> dict[str, dict[str, Any]]:
        """Return the states that are not elementwise, such as step counts, by name of the parameters on this rank."""
        found: dict[str, dict[str, Any]] = {name: frozen.scalars for name, frozen in self._frozen_states.items()}
        for slice_ in self._all_slices():
            state = self.state.get(slice_.parameter, {})
            scalars = {k: v for k, v in state.items() if not is_elementwise(k, v, slice_.parameter.shape)}
            for flat, parameter, _, _ in slice_.param_ranges() if state else ():
                name = flat.names[parameter]
                error = self._state_error(name, slice_.parameter, scalars)
                if error:
                    raise RuntimeError(error)
                found[name] = scalars
        return found

    # -- states of frozen parameters ----------------------------------------------------------------------------

    def _allocate_frozen_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Allocate the states of parameters that are in a group and currently frozen.

        No optimizer slice holds them. Each rank keeps its shard; they are saved and restored like all other states.
        """
        trainable = {name for flat in self._flats for name in flat.names}
        self._frozen_states = {}
        for name, state in states.items():
            if state and name not in trainable:
                flat, index = find_parameter(self._engine.units, name)
                numel = sum(within.numel for within, _ in _owned_param_ranges(flat, index))
                dtypes = {key: value for key, value in state.items() if isinstance(value, torch.dtype)}
                self._frozen_states[name] = _FrozenParamStates(
                    {key: torch.zeros(numel, dtype=dtype, device=flat.device) for key, dtype in dtypes.items()},
                    {key: value for key, value in state.items() if key not in dtypes},
                )

    def _frozen_state_tensors(self) -> list[torch.Tensor]:
        return [flattened for frozen in self._frozen_states.values() for flattened in frozen.elementwise.values()]

    def _have_equal_scalars(self, slices: list[OptimizerSlice], states: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether all parameters of the slices have equal scalar states, so that one set per slice is enough."""
        ranges = (place for slice_ in slices for place in slice_.param_ranges())
        seen = [states.get(flat.names[parameter], {}) for flat, parameter, _, _ in ranges]
        return all(
            one.keys() == seen[0].keys() and all(_is_equal(one[key], seen[0][key]) for key in one) for one in seen[1:]
        )


def check_shardable_states(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise if a state cannot be sharded: it is neither elementwise (given as a dtype) nor a scalar.

    >>> check_shardable_states({"weight": {"exp_avg": torch.float32, "step": torch.tensor(3.0)}})
    """
    for name, state in states.items():
        for key, value in state.items():
            if not isinstance(value, torch.dtype) and not is_scalar_state(value):
                what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {_type_name(value)}"
                raise ValueError(
                    f"the state {key!r} of {name!r}, {what}, is neither elementwise nor a number, so it cannot be cut "
                    "over the ranks: use an optimizer that is not sharded, or drop these states (a new optimizer; "
                    "load(path, model) for the weights alone)"
                )


def describe_full_states(
    states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> dict[str, dict[str, Any]]:
    """Describe full states by parameter: elementwise states by their dtype, others by their value."""
    return {
        name: {k: v.dtype if is_elementwise(k, v, shapes[name]) else v for k, v in state.items()}
        for name, state in states.items()
    }


def _switch_mode_from_inner(sharded: weakref.ref[ShardedOptimizer], name: str) -> Any:
    """Handle a call of ``train()`` or ``eval()`` on the inner optimizer."""
    optimizer = sharded()
    if optimizer is None:
        raise RuntimeError(f"{name}() was called on an optimizer whose sharded model is gone: make a new optimizer")
    return optimizer._switch_mode(name)


def _owned_param_ranges(flat: FlatParam, index: int) -> list[tuple[Range, int]]:
    """Return this rank's ranges of a parameter, each with its offset when they are packed contiguously."""
    ranges, offset = [], 0
    for param_range in flat.owned_ranges:
        if param_range.param_index == index:
            ranges.append((param_range.elements, offset))
            offset += param_range.elements.numel
    return ranges


def _flatten_local_state(value: torch.Tensor, flat: FlatParam, index: int) -> torch.Tensor:
    """Return this tensor rank's TP shard of a full state, flattened like the parameter in its FlatParam."""
    tp_shard = flat.tp_shards[index]
    return flat.flatten((value if tp_shard is None else tp_shard.slice(value)).to(flat.device), index)


def _type_name(value: Any) -> str:
    return type(value).__name__


def _gather_dtensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return the states with every DTensor replaced by its full tensor."""
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def state_dtype(dtype: torch.dtype, parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a parameter stores a state of ``dtype``."""
    return parameter.dtype if dtype.is_floating_point and parameter.is_floating_point() else dtype


def allocate_state(key: str, value: Any, parameter: torch.Tensor, on_device: bool, reuse: Any = None) -> Any:
    """Allocate one state of a parameter. Take the memory of ``reuse`` if it fits, since allocation takes time."""
    if isinstance(value, torch.dtype):
        dtype = state_dtype(value, parameter)
        if torch.is_tensor(reuse) and reuse.dtype == dtype and reuse.shape == parameter.shape:
            return reuse.zero_()
        return torch.zeros_like(parameter, dtype=dtype)
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":
        return value.clone() if not on_device else value.to(parameter.device, torch.float32, copy=True)
    return value.to(parameter.device, copy=True)

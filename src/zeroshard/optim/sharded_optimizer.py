"""ShardedOptimizer: the user's own torch optimizer, run on this rank's shards (see [Note: runs] in runs.py)."""

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
from zeroshard.engine.engine import Engine
from zeroshard.engine.flat_grad import FlatGrad
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.full_tensors import assemble_full_tensor, find_parameter
from zeroshard.engine.parameter import PICKLE_ERROR, param_info, param_versions
from zeroshard.engine.unsupported_calls import raise_on_join
from zeroshard.memory.tier_allocator import TierAllocator
from zeroshard.memory.tiered_tensor import TieredTensor, TierSegment
from zeroshard.optim.cpu.updates import CpuUpdates
from zeroshard.optim.elementwise_check import check_elementwise_group
from zeroshard.optim.param_groups import HyperparamChecker, ParamGroupView
from zeroshard.optim.slices import OptimizerSlice, is_elementwise, is_scalar_state, make_slices
from zeroshard.optim.step import OptimizerStep
from zeroshard.sharding.layout import Range
from zeroshard.sharding.precision import LossScale


@dataclass
class _FrozenParamStates:
    """The states of a parameter that is in a group and frozen: no run holds them."""

    elementwise: dict[str, torch.Tensor]  # elementwise ones: what this rank owns, laid end to end
    scalars: dict[str, Any]


class ShardedOptimizer(torch.optim.Optimizer):
    """Returned by :func:`zeroshard.shard`: steps the inner optimizer on shards and brings the new parameters about.

    It shares groups, hyper-parameters and states with the optimizer it was given, so schedulers work on either.

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
        self._has_compared_tp_grads = False  # gradients over the tensor axis, in the first step
        self._optimized_params: list[torch.nn.Parameter] | None = None  # the groups' parameters, when last asked for
        self._is_every_param_used = True  # whether every parameter had a gradient on some rank in this step
        self._used_flags_cache: tuple[tuple[bool, ...], torch.Tensor] | None = None
        self._hyperparam_checker = HyperparamChecker(engine.comm.device)  # by all ranks, of the hyper-parameters
        self._ungrouped_params_cache: list[tuple[FlatGrad, int]] | None = None  # see ``_others``
        self._frozen_states: dict[str, _FrozenParamStates] = {}  # states of frozen parameters, by name
        plain = [[names[id(parameter)] for parameter in group["params"]] for group in inner.param_groups]
        states = {names[id(p)]: _gather_dtensors(state) for p, state in inner.state.items() if id(p) in names}
        super().__init__([torch.zeros(0)], {})
        self.param_groups = [
            self._make_group(group, names) for group, names in zip(inner.param_groups, plain, strict=True)
        ]
        self.state, self.defaults = inner.state, inner.defaults
        self.group_param_names = plain  # per group, in the order the user gave them
        self._slices: list[list[OptimizerSlice]] = [[] for _ in plain]
        self.state.clear()
        for index, group in enumerate(plain):
            self._set_slices(index, self._make_slices(group))
        self._load_states(states)
        self._mode_methods = self._redirect_train_eval()
        engine.state_guard.device_states = weakref.WeakMethod(self._states_on_device)
        if self._cpu_updates is not None:
            engine.state_guard.backward_listener = weakref.ref(self._cpu_updates)
            engine.gradients.on_shard_ready = weakref.WeakMethod(self._cpu_updates.on_shard_ready)
            engine.gradients.needs_overflow_check = loss_scale is not None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied: a copy would share shards and collectives with the original."""
        raise RuntimeError(f"{PICKLE_ERROR}. To copy the optimizer's states, use copy.deepcopy(optimizer.state_dict())")

    def join_hook(self, **options: object) -> NoReturn:
        """Refuse torch's Join."""
        raise_on_join()

    # -- the user's side ----------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # which would take every name for one of these

        def __getattr__(self, name: str) -> Any:
            """Give ``train()`` and ``eval()`` where the inner optimizer has them, as schedule-free ones do.

            They change parameters, so all ranks call them together; forward then uses the new values on every rank.
            """
            if name in self.__dict__.get("_mode_methods", ()):
                return partial(self._switch_mode, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def _redirect_train_eval(self) -> dict[str, Callable[[], Any]]:
        """Take the inner optimizer's ``train()`` and ``eval()``: called there, they come here."""
        found = ((name, getattr(self.inner, name, None)) for name in ("train", "eval"))
        modes = {name: method for name, method in found if callable(method)}
        for name in modes:
            self.inner.__dict__[name] = partial(_switch_mode_from_inner, weakref.ref(self), name)
        return modes

    def restore_train_eval(self) -> None:
        """Undo what makes the inner optimizer's ``train()`` and ``eval()`` come here."""
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
        """Multiply the loss by fp16's loss scale; under other precisions return it as it is."""
        if self._loss_scale is None:
            return loss
        scaled = self._loss_scale.apply(loss)
        if scaled.requires_grad:
            gradients = self._engine.gradients
            scaled.register_hook(partial(gradients.on_scaled_backward, self._loss_scale.inverse_scale))  # type: ignore[no-untyped-call]
        return scaled

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """fp16's present loss scale, on the device; None under other precisions."""
        return None if self._loss_scale is None else self._loss_scale.scale

    def loss_scale_state(self) -> list[float] | None:
        """fp16's loss scale and its streak without overflow, as :meth:`load_state_dict` takes them."""
        return None if self._loss_scale is None else self._loss_scale.state()

    def load_loss_scale(self, state: list[float]) -> None:
        """Go on from :meth:`loss_scale_state`; under other precisions there is nothing to do."""
        if self._loss_scale is not None:
            self._loss_scale.load(state)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before.

        All ranks call it together. The result stays on the device; nothing waits for it.
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
        if self._ungrouped_params():  # what is in no group is not clipped
            parts = [part for gradient, index in self._grouped_params() for _, part in gradient.param_shards(index)]
            self._engine.state_guard.invalidate_speculation()
            for gradient in gradients.flat_grads.values():
                gradients.prepare_write(gradient)
            gradients.scale_shards(parts, coefficient)
            return norm
        earlier = gradients.clip_coef
        gradients.clip_coef = coefficient if earlier is None else earlier * coefficient
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Limit every element of the gradients to ``-clip_value`` … ``clip_value``. All ranks call it together.

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
        parts = [part for gradient, index in self._grouped_params() for _, part in gradient.param_shards(index)]
        limit = torch.tensor(float(clip_value), device=self._engine.comm.device)
        limit = limit if gradients.inverse_scale is None else limit / gradients.inverse_scale
        for part in parts if self._ungrouped_params() else gradients.shards():
            high = limit.to(part.device, part.dtype)
            torch.clamp(part, -high, high, out=part)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is still to be reduced, update this rank's shards, and start to bring the result to all ranks."""
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
            changed = self._step_runner.run([run for run in self._all_slices() if self._has_grad(run)], backwards)
            if changed is not None:
                self._engine.state_guard.copy_masters(changed, device_only=True)
                self._engine.state_guard.on_values_changed(self._params_with_grad())
                self._engine.state_guard.start_param_refresh()
            self._engine.gradients.clip_coef = None
        self._track_state_bytes()
        self._engine.comm.counters.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the groups' parameters, or make them zero."""
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
        """Add parameters of the sharded model that no group holds yet."""
        if not hasattr(self, "_slices"):  # torch's own constructor
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        titles = [entry[0] for entry in params if isinstance(entry, tuple)]  # from named_parameters()
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        taken = {name for group in self.group_param_names for name in group}
        names = []
        for parameter in params:
            card = param_info(parameter)
            if card is None or card.flat() not in self._flats:
                raise ValueError("add_param_group takes trainable parameters of the sharded model itself")
            if card.name in taken:
                raise ValueError(f"{card.name!r} is in a parameter group already")
            names.append(card.name)
        self._engine.state_guard.check_not_gathered("add_param_group()")
        config = self._engine.config
        dtype = None if config.precision is None else torch.float32
        check_elementwise_group(self.inner, {**param_group, "params": params}, config.elementwise, dtype)
        self._engine.state_guard.wait_readers()
        self._engine.state_guard.wait_updates()
        self._allocate_masters(set(names))
        stand_in = torch.zeros(0, requires_grad=True)  # lets the inner optimizer check the group and fill in defaults
        self.inner.add_param_group({**param_group, "params": [("", stand_in) if titles else stand_in]})
        if titles:
            self.inner.param_groups[-1]["param_names"] = titles
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
        """Bytes of the optimizer's states on this rank, or in one tier, the master copy not counted."""
        tensors = [
            value
            for run in self._all_slices()
            if tier is None or tier == ("device" if run.tier_segment is None else run.tier_segment.tier)
            for value in list(self.state.get(run.parameter, {}).values())  # an update under way may add to it
            if isinstance(value, torch.Tensor)
        ]
        return sum(
            tensor.nbytes for tensor in (*tensors, *(self._frozen_state_tensors() if tier in (None, "device") else ()))
        )

    def _states_on_device(self) -> list[torch.Tensor]:
        states = [self.state.get(run.parameter, {}) for run in self._all_slices() if run.tier_segment is None]
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
        for axis in (comm.shard_axis, comm.tensor_axis):  # along the other axes, every rank has the same
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
        """For the name of a pass: gradients that carry a loss scale on one rank and none on another are not added."""
        return "" if self._engine.gradients.inverse_scale is None else " of scaled losses"

    # -- what is in the groups, and what is not -----------------------------------------------------------------

    def _make_group(self, inner: dict[str, Any], names: list[str]) -> ParamGroupView:
        flats = [flat for unit in self._engine.units for flat in unit.flats]
        parameters = {name: parameter for flat in flats for name, parameter in flat.named_parameters}
        return ParamGroupView(inner, [parameters[name] for name in names])

    def _ungrouped_params(self) -> list[tuple[FlatGrad, int]]:
        """The trainable parameters that are in no group: their gradients are not this optimizer's."""
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
        """In the first step, refuse plain parameters of which each tensor rank has another gradient.

        One that is used between divided layers (a norm of the heads) has only its rank's part of the sum.
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
        most, least = squares.clone(), -squares
        for tensor in (most, least):
            comm.all_reduce(tensor, comm.tensor_axis, what, dist.ReduceOp.MAX).wait()
        unlike = most + least > 0.1 * most  # kernels that add in any order differ by far less,
        unlike &= most > 1e-6 * most.sum()  # but for gradients that are nothing but rounding
        found = unlike.any().float()
        comm.all_reduce_over_mesh(found, what, dist.ReduceOp.MAX)
        if bool(found):
            bad = [name for name, differs in zip(names, unlike.tolist(), strict=True) if differs] or ["a parameter"]
            raise RuntimeError(
                f"the gradient of {bad[0]!r} is not the same on all ranks of the tensor axis: it is used between "
                "divided layers, where each rank has a part of the sum. Give its module a style in tensor_plan, so "
                "that it becomes a DTensor, or leave those layers undivided"
            )

    def _params_with_grad(self) -> list[torch.nn.Parameter]:
        """The parameters of the groups that have a gradient."""
        if self._optimized_params is None:
            trained = {name for group in self.group_param_names for name in group}
            self._optimized_params = [p for flat in self._flats for name, p in flat.named_parameters if name in trained]
        if self._is_every_param_used:
            return self._optimized_params
        gradients = self._engine.gradients.flat_grads
        used = {
            id(p) for f, g in gradients.items() for p, flag in zip(f.parameters, g.is_param_used, strict=True) if flag
        }
        return [parameter for parameter in self._optimized_params if id(parameter) in used]

    def _check_frozen_grads(self) -> None:
        """Raise where somebody gave a gradient to a parameter of a group that was frozen at shard().

        torch would update it; here it has no place among the shards.
        """
        given = self._engine.state_guard.frozen_params_with_grads()
        if given:
            names = {name for group in self.group_param_names for name in group}
            given = [name for name in given if name in names]
        if given:
            raise RuntimeError(
                f"{given[0]!r} was frozen when shard() was called, and was given a gradient since: clear it "
                "(parameter.grad = None), or call zeroshard.unshard(), set requires_grad, and shard again"
            )

    # -- unused parameters --------------------------------------------------------------------------------------

    def _sync_unused_params(self) -> None:
        """Find the parameters without gradient on every rank; cut runs that hold some with and some without.

        Each rank takes part, but only one that misses a gradient itself needs to read the result: the others know it
        is "used" throughout. So where all parameters are used, the host never waits.
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
        for index, runs in enumerate(self._slices):  # by group: so every stage cuts alike, and rounds alike
            if len({used for run in runs for used in self._used_flags_of(run)}) > 1:
                if self._cpu_updates is not None:
                    self._cpu_updates.wait()  # an update of the step before may still write to what is cut
                self._set_slices(index, [small for run in runs for small in self._split_per_param(run)])

    def _used_flags_of(self, optimizer_slice: OptimizerSlice) -> set[bool]:
        gradients = self._engine.gradients.flat_grads
        return {gradients[flat].is_param_used[parameter] for flat, parameter, _, _ in optimizer_slice.param_ranges()}

    def _has_grad(self, optimizer_slice: OptimizerSlice) -> bool:
        gradients = self._engine.gradients.flat_grads
        reduced = any(gradients[part.flat].has_shard for part in optimizer_slice.flat_ranges)
        return reduced and (self._is_every_param_used or True in self._used_flags_of(optimizer_slice))

    def _split_per_param(self, optimizer_slice: OptimizerSlice) -> list[OptimizerSlice]:
        cut = optimizer_slice.split_per_param(self.state.pop(optimizer_slice.parameter, {}))
        for small, state in cut:
            if state:
                self.state[small.parameter] = state
        return [small for small, _ in cut]

    # -- runs ---------------------------------------------------------------------------------------------------

    def _all_slices(self) -> list[OptimizerSlice]:
        return [run for runs in self._slices for run in runs]

    def _set_slices(self, index: int, slices: list[OptimizerSlice]) -> None:
        self._slices[index] = slices
        self._optimized_params = None
        self.inner.param_groups[index]["params"] = [run.parameter for run in slices]
        self._step_runner.slice_guard.guard_slices(slices)
        for run in slices:
            run.param_group = self.inner.param_groups[index]
        if self._cpu_updates is not None:
            self._cpu_updates.set_slices(self._all_slices())

    def _allocate_masters(self, names: set[str]) -> None:
        """Give an fp32 master copy to flats that had none because nobody trained them."""
        for flat in self._flats:
            if flat.master is None and names & set(flat.names) and self._engine.precision.has_master(flat.dtype):
                master = torch.empty(flat.layout.shard_numel, device=flat.device)
                flat.master = TieredTensor([TierSegment(Range(0, flat.layout.shard_numel), "device", master)])
                self._engine.tracker.add("master weights", master.nbytes)
                for home, owned in zip(flat.shard_ranges, flat.local_shards, strict=True):
                    flat.master.write(home, owned)
                flat.known_versions = param_versions(flat.parameters)
        self._engine.state_guard.expose_reduced_grads()  # edits of what has a master are looked for from now on

    # -- whole states -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of one parameter, whole, in its plain shape. All ranks call it together."""
        what = f"read the optimizer's state of {name!r}"
        return self._full_state(name, self.describe_states([name], what)[name])

    def describe_states(
        self, names: Iterable[str] | None = None, what: str = "read the optimizer's states"
    ) -> dict[str, dict[str, Any]]:
        """Tell which states each parameter has, without bringing them: all, or those of ``names``.

        A state with a value for each element is described by its dtype; one that has not (a step count) is given. All
        ranks call it together, for the sake of ``what``.
        """
        self._engine.order.begin_pass(f"to {what}")
        self._engine.state_guard.wait_updates()
        self._engine.state_guard.check_valid("optimizer")
        mine: dict[str, dict[str, Any]] = {
            name: {} for name in (names or [n for group in self.group_param_names for n in group])
        }
        refusal = ""
        for run in self._all_slices():
            state = self.state.get(run.parameter, {})
            known = {k: v.dtype if is_elementwise(k, v, run.parameter.shape) else v for k, v in state.items()}
            for flat, parameter, _, _ in run.param_ranges() if known else ():
                if flat.names[parameter] in mine:
                    mine[flat.names[parameter]] = known
                    refusal = refusal or self._state_error(flat.names[parameter], run.parameter, state)
        for name, aside in self._frozen_states.items():
            if name in mine:
                mine[name] = {key: line.dtype for key, line in aside.elementwise.items()} | aside.scalars
        if self._engine.comm.shard_axis.size > 1 or self._engine.comm.tensor_axis.size > 1:
            self._engine.order.check(what)
        told = self._engine.comm.all_gather_object((refusal, {} if refusal else mine), what)
        for complaint, _ in told:
            if complaint:
                raise RuntimeError(complaint)
        whole: dict[str, dict[str, Any]] = {}
        for name in mine:
            held = [rank[name] for _, rank in told if rank[name]]
            whole[name] = held[0] if held else {}
            for other in held[1:]:
                unlike = [
                    key for key, value in whole[name].items() if key in other and not _is_equal(value, other[key])
                ]
                if unlike:
                    raise RuntimeError(
                        f"the state {unlike[0]!r} of {name!r} differs from rank to rank, so there is no whole one: "
                        f"{type(self.inner).__name__} computes it from the slices that each rank holds"
                    )
        return whole

    def _state_error(self, name: str, parameter: torch.Tensor, state: dict[str, Any]) -> str:
        """Why the states of a slice cannot be given as those of the parameter it is of; empty where they can."""
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
        places = self._local_state_ranges(flat, index)
        result: dict[str, Any] = {}
        for key, value in described.items():
            if not isinstance(value, torch.dtype):
                result[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            line = torch.zeros(flat.layout.numels[index], dtype=value, device=flat.device)
            for state, within, at in places:
                line[within.start : within.end] = state[key][at : at + within.numel]
            result[key] = assemble_full_tensor(self._engine.comm, line, flat, index)
        return result

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's ``state_dict()`` would be, whole. All ranks call it together.

        Under fp16 a key of its own, "loss_scale", goes with it.
        """
        numbers = {
            name: number for number, name in enumerate(name for group in self.group_param_names for name in group)
        }
        described = self.describe_states(numbers, "read the optimizer's state_dict()")
        states = {number: self._full_state(name, described[name]) for name, number in numbers.items()}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [numbers[n] for n in names]}
            for group, names in zip(self.param_groups, self.group_param_names, strict=True)
        ]
        whole: dict[str, Any] = {"state": {number: s for number, s in states.items() if s}, "param_groups": groups}
        return whole if self._loss_scale is None else {**whole, "loss_scale": self.loss_scale_state()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a plain optimizer's ``state_dict()``, or one of :meth:`state_dict`: each rank keeps its part."""
        self._engine.state_guard.wait_readers()
        self._engine.state_guard.wait_updates()
        groups, states = state_dict["param_groups"], state_dict["state"]
        sizes, wanted = [len(group["params"]) for group in groups], [len(names) for names in self.group_param_names]
        if sizes != wanted:
            raise ValueError(f"the state dict has groups of {sizes} parameters, the optimizer has groups of {wanted}")
        names = [name for group in self.group_param_names for name in group]
        numbers = [number for group in groups for number in group["params"]]
        found = {name: states[number] for name, number in zip(names, numbers, strict=True) if number in states}
        check_shardable_states(describe_full_states(found, self._full_shapes()))
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        if "loss_scale" in state_dict:
            self.load_loss_scale(state_dict["loss_scale"])
        self.state.clear()
        self._load_states(found)

    def _local_state_ranges(self, flat: FlatParam, index: int) -> list[tuple[dict[str, Any], Range, int]]:
        """Where this rank's states of a parameter lie: (states, elements of the parameter, first element in them)."""
        if flat.names[index] in self._frozen_states:
            return [
                (self._frozen_states[flat.names[index]].elementwise, *place)
                for place in _owned_param_ranges(flat, index)
            ]
        return [
            (self.state[run.parameter], within, at)
            for run in self._all_slices()
            if any(part.flat is flat for part in run.flat_ranges)
            for other, parameter, within, at in run.param_ranges()
            if other is flat and parameter == index
        ]

    def _full_shapes(self) -> dict[str, torch.Size]:
        flats = [flat for unit in self._engine.units for flat in unit.flats]
        return {name: shape for flat in flats for name, shape in zip(flat.names, flat.full_shapes, strict=True)}

    def _load_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Fill the runs' states from whole states by name."""
        self._frozen_states = {}
        if not states:
            return
        self.allocate_states(describe_full_states(states, self._full_shapes()))
        for run in self._all_slices():
            for flat, parameter, within, at in run.param_ranges():
                for key, value in states.get(flat.names[parameter], {}).items():
                    if is_elementwise(key, value, flat.full_shapes[parameter]):
                        line = _flatten_local_state(value, flat, parameter)
                        self.state[run.parameter][key][at : at + within.numel] = line[within.start : within.end]
        for name, aside in self._frozen_states.items():
            flat, parameter = find_parameter(self._engine.units, name)
            for key, values in aside.elementwise.items():
                line = _flatten_local_state(states[name][key], flat, parameter)
                for within, at in _owned_param_ranges(flat, parameter):
                    values[at : at + within.numel] = line[within.start : within.end]

    def allocate_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Make room for states, in place of those there are: zeros where a dtype is given, else the value itself.

        As with torch, states of floating point take their parameter's dtype, and step counts go where the optimizer's
        kernels want them.
        """
        check_shardable_states(states)
        self._engine.state_guard.wait_updates()
        self._engine.state_guard.invalidate_speculation()
        before = dict(self.state)
        self.state.clear()
        self._allocate_frozen_states(states)
        for index, runs in enumerate(self._slices):
            if not self._have_equal_scalars(runs, states):
                self._set_slices(index, [small for run in runs for small in self._split_per_param(run)])
        before = {run.parameter: before[run.parameter] for run in self._all_slices() if run.parameter in before}
        for group, runs in zip(self.param_groups, self._slices, strict=True):
            on_device = bool(group.get("capturable") or group.get("fused"))
            for run in runs:
                old = before.pop(run.parameter, {})
                for flat, parameter, _, _ in run.param_ranges():
                    for key, value in states.get(flat.names[parameter], {}).items():
                        if key not in self.state[run.parameter]:
                            room = old.pop(key, None)
                            if (
                                run.tier_segment is not None
                                and self._cpu_updates is not None
                                and isinstance(value, torch.dtype)
                            ):
                                room = self._cpu_updates.state_buffer(
                                    run.tier_segment, run, key, state_dtype(value, run.parameter)
                                )
                            self.state[run.parameter][key] = allocate_state(key, value, run.parameter, on_device, room)
        self._track_state_bytes()

    def local_states(self) -> Iterator[tuple[str, str, Range, torch.Tensor]]:
        """Yield (parameter, state, elements, their values) for every elementwise state this rank holds."""
        for name, aside in self._frozen_states.items():
            places = _owned_param_ranges(*find_parameter(self._engine.units, name))
            for key, value in aside.elementwise.items():
                for within, at in places:
                    yield name, key, within, value[at : at + within.numel]
        for run in self._all_slices():
            for key, value in self.state.get(run.parameter, {}).items():
                if is_elementwise(key, value, run.parameter.shape):
                    for flat, parameter, within, at in run.param_ranges():
                        yield flat.names[parameter], key, within, value[at : at + within.numel]

    def local_scalars(self) -> dict[str, dict[str, Any]]:
        """The states that have no value for each element, such as step counts, of the parameters this rank holds."""
        found: dict[str, dict[str, Any]] = {name: aside.scalars for name, aside in self._frozen_states.items()}
        for run in self._all_slices():
            state = self.state.get(run.parameter, {})
            counters = {k: v for k, v in state.items() if not is_elementwise(k, v, run.parameter.shape)}
            for flat, parameter, _, _ in run.param_ranges() if state else ():
                name = flat.names[parameter]
                complaint = self._state_error(name, run.parameter, counters)
                if complaint:
                    raise RuntimeError(complaint)
                found[name] = counters
        return found

    # -- states of frozen parameters ----------------------------------------------------------------------------

    def _allocate_frozen_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Make room for states of parameters that are in a group and frozen now.

        No run holds them. Each rank keeps its part of them, and they are saved and given back like all others.
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
        return [line for aside in self._frozen_states.values() for line in aside.elementwise.values()]

    def _have_equal_scalars(self, slices: list[OptimizerSlice], states: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether all parameters of the runs have the same counters, so that a run needs only one set of states."""
        places = (place for run in slices for place in run.param_ranges())
        seen = [states.get(flat.names[parameter], {}) for flat, parameter, _, _ in places]
        return all(
            one.keys() == seen[0].keys() and all(_is_equal(one[key], seen[0][key]) for key in one) for one in seen[1:]
        )


def check_shardable_states(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise where states to be cut over the ranks, are neither elementwise (given as a dtype) nor numbers.

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
    """Describe whole states by parameter: elementwise ones by their dtype, others by themselves."""
    return {
        name: {k: v.dtype if is_elementwise(k, v, shapes[name]) else v for k, v in state.items()}
        for name, state in states.items()
    }


def _switch_mode_from_inner(sharded: weakref.ref[ShardedOptimizer], name: str) -> Any:
    """The inner optimizer's ``train()`` or ``eval()``, called on itself."""
    optimizer = sharded()
    if optimizer is None:
        raise RuntimeError(f"{name}() was called on an optimizer whose sharded model is gone: make a new optimizer")
    return optimizer._switch_mode(name)


def _owned_param_ranges(flat: FlatParam, index: int) -> list[tuple[Range, int]]:
    """What this rank owns of a parameter, and where each stretch begins when they are laid end to end."""
    found, at = [], 0
    for piece in flat.owned_ranges:
        if piece.param_index == index:
            found.append((piece.elements, at))
            at += piece.elements.numel
    return found


def _flatten_local_state(value: torch.Tensor, flat: FlatParam, index: int) -> torch.Tensor:
    """What this rank of the tensor axis has of a whole state, as the parameter lies in its flat."""
    share = flat.tp_shards[index]
    return flat.flatten((value if share is None else share.slice(value)).to(flat.device), index)


def _type_name(value: Any) -> str:
    return type(value).__name__


def _gather_dtensors(state: dict[str, Any]) -> dict[str, Any]:
    """The states of a parameter that was divided before it was sharded, whole."""
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def state_dtype(dtype: torch.dtype, parameter: torch.Tensor) -> torch.dtype:
    """The dtype that a parameter keeps a state of ``dtype`` in."""
    return parameter.dtype if dtype.is_floating_point and parameter.is_floating_point() else dtype


def allocate_state(key: str, value: Any, parameter: torch.Tensor, on_device: bool, reuse: Any = None) -> Any:
    """Room for one state of a parameter: that of the ``old`` one where it will do, since new memory takes time."""
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

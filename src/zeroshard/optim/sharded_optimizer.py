"""ShardedOptimizer: the user's torch optimizer on this rank's shards: see [Note: optimizer slices] in slices.py."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from zeroshard.config.config import Config
from zeroshard.config.offload import TIERS
from zeroshard.engine import PICKLE_ERROR, Engine, raise_on_join
from zeroshard.memory import Routing
from zeroshard.optim.clipping import clip_grad_norm, clip_grad_value
from zeroshard.optim.cpu.updates import CpuUpdates
from zeroshard.optim.elementwise_check import RuleChecker, find_whole_param_groups
from zeroshard.optim.local_steps import LocalSteps
from zeroshard.optim.model_optimizers import ModelOptimizers
from zeroshard.optim.optimizer_copy import is_scheduler_step, read_state_dict
from zeroshard.optim.param_groups import ParamGroups, StateView, check_unchanged
from zeroshard.optim.param_overrides import ParamOverrides
from zeroshard.optim.routing import check_empty_groups, find_routing
from zeroshard.optim.state_dict import (
    OptimizerStates,
    allocate_masters,
    check_shardable_states,
    describe_full_states,
    give_matrices_to_owners,
)
from zeroshard.optim.step import OptimizerStep
from zeroshard.sharding import Range
from zeroshard.utils.profiling import label


class _ModeSwitch:
    """Redirects ``train()`` and ``eval()`` of a schedule-free optimizer, on it and on the sharded optimizer.

    They change parameters, so all ranks must call them together. Forward then uses the new values.
    """

    def __init__(self, inner: torch.optim.Optimizer, engine: Engine, step: OptimizerStep) -> None:
        self._inner, self._engine, self._step = inner, engine, step
        methods = ((name, getattr(inner, name, None)) for name in ("train", "eval"))
        self.methods: dict[str, Callable[[], Any]] = {name: method for name, method in methods if callable(method)}
        for name in self.methods:
            inner.__dict__[name] = partial(_run_mode_switch, weakref.ref(self), name)

    def run(self, name: str) -> Any:
        """Call the inner optimizer's own method."""
        engine = self._engine
        if engine.is_running:
            raise RuntimeError(f"optimizer.{name}() was called in a forward or backward: call it between steps")
        engine.order.begin_pass(f"optimizer.{name}()")
        engine.state_guard.check_valid("weights", "optimizer")
        engine.state_guard.prepare_write()
        with torch.no_grad(), self._step.whole.gathered(self._step.whole.params, None):
            result = self.methods[name]()
        if self._step.rules is not None:
            self._step.rules.accept()
        engine.finish_write()
        return result

    def restore(self) -> None:
        """Restore the inner optimizer's own methods."""
        for name in self.methods:
            self._inner.__dict__.pop(name, None)


def _run_mode_switch(switch: weakref.ref[_ModeSwitch], name: str) -> Any:
    """Handle a call of ``train()`` or ``eval()`` on the inner optimizer."""
    found = switch()
    if found is None:
        raise RuntimeError(f"{name}() was called on an optimizer whose sharded model is gone: make a new optimizer")
    return found.run(name)


def _with_state_dict_hooks(read: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Run the hooks on ``state_dict()`` that were registered before and after shard(), as torch does."""

    @wraps(read)
    def state_dict(self: ShardedOptimizer, rank: int | None = None) -> dict[str, Any]:
        owners = (self.inner, self)
        for pre_hook in [hook for owner in owners for hook in owner._optimizer_state_dict_pre_hooks.values()]:
            pre_hook(self)
        with torch.no_grad():
            result = read(self, rank)
        hooks = [hook for owner in owners for hook in owner._optimizer_state_dict_post_hooks.values()]
        for post_hook in hooks if result else ():  # not on a rank that does not get it
            replaced = post_hook(self, result)
            result = result if replaced is None else replaced
        return result

    return state_dict


def _with_load_hooks(load: Callable[..., None]) -> Callable[..., None]:
    """Run the hooks on ``load_state_dict()`` that were registered before and after shard(), as torch does."""

    @wraps(load)
    def load_state_dict(self: ShardedOptimizer, state_dict: dict[str, Any]) -> None:
        owners, state_dict = (self.inner, self), state_dict.copy()
        for pre_hook in [hook for owner in owners for hook in owner._optimizer_load_state_dict_pre_hooks.values()]:
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        with torch.no_grad():
            load(self, state_dict)
        for post_hook in [hook for owner in owners for hook in owner._optimizer_load_state_dict_post_hooks.values()]:
            post_hook(self)

    return load_state_dict


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
        self, inner: torch.optim.Optimizer, shared: ModelOptimizers, names: dict[int, str], needs_whole: list[bool]
    ) -> None:
        """``names`` of the model's parameters, by id; ``needs_whole``: groups that run on whole parameters."""
        engine, loss_scale, config = shared.engine, shared.loss_scale, shared.engine.context.config
        self.inner, self._member, self._engine, self._loss_scale = inner, shared.add(), engine, loss_scale
        self._member.names.update(names[id(p)] for group in inner.param_groups for p in group["params"])
        self._cpu_updates = CpuUpdates(inner, self._member) if config.offload is not None else None
        self._step_runner = step = OptimizerStep(inner, shared, self._cpu_updates)
        self._groups = ParamGroups(inner, self._member, self._cpu_updates, step)
        self._states = OptimizerStates(engine, self._groups, self._cpu_updates)
        self.local_steps = self._member.local_steps = LocalSteps.of(engine, self._groups)
        self._needs_tp_grad_check = engine.comm.tensor_axis.size > 1  # in the first step
        states = {names[id(p)]: state for p, state in inner.state.items() if id(p) in names}
        super().__init__([torch.zeros(0, device="cpu")], {})
        move_step_hooks(inner, self)  # they see the model's parameters, instead of this rank's slices
        self.param_groups = self._groups.views  # type: ignore[assignment]
        self.state, self.defaults = StateView(inner.state), inner.defaults  # type: ignore[assignment]
        for group, is_whole in zip(inner.param_groups, needs_whole, strict=True):
            self._groups.add([names[id(parameter)] for parameter in group["params"]], is_whole)
        self._load_states(tree_map_only(DTensor, DTensor.full_tensor, states))
        step.rules = RuleChecker.of(inner, config.elementwise, _update_dtype(config), self._groups.views)
        self._mode_switch = _ModeSwitch(inner, engine, step)
        self.__dict__.update({name: partial(self._mode_switch.run, name) for name in self._mode_switch.methods})
        engine.state_guard.has_loss_scale = loss_scale is not None
        if self._cpu_updates is not None:
            engine.gradients.reducer.listeners.append(weakref.ref(self._cpu_updates))
            engine.gradients.reducer.needs_overflow_check = loss_scale is not None

    @property
    def group_param_names(self) -> list[list[str]]:
        """Return the parameter names of each group, in the order the user gave them."""
        return self._groups.names

    def routing(self) -> Routing:
        """Return how each parameter is updated."""
        return find_routing(self._engine, self._groups)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise on pickling and copying: a copy would share shards and collectives with the original."""
        raise RuntimeError(f"{PICKLE_ERROR}. To copy the optimizer's states, use copy.deepcopy(optimizer.state_dict())")

    def join_hook(self, **options: object) -> NoReturn:
        """Raise: torch's Join is not supported."""
        raise_on_join()

    def has_accumulated_grads(self) -> bool:
        """Whether backwards since its last step have left gradients that its loop has not cleared before."""
        return self._member.backwards > 0 and not self._member.discards_grads and self._groups.has_grads()

    def restore_inner(self) -> None:
        """Restore what ``shard()`` has replaced in the inner optimizer, except groups and states."""
        self._mode_switch.restore()
        move_step_hooks(self, self.inner)
        self._groups.whole.overrides.restore()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the fp16 loss scale; with other precisions return it unchanged."""
        if self._loss_scale is None:
            return loss
        scaled = self._loss_scale.apply(loss)
        if scaled.requires_grad:
            scaled.register_hook(partial(self._engine.gradients.on_scaled_backward, self._loss_scale.inverse_scale))  # type: ignore[no-untyped-call]
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

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of its parameters so that their norm is at most ``max_norm``; return the norm before.

        All ranks must call it together. The result stays on the device, so there is no host sync.
        """
        with label("clip_grad_norm_"):
            return clip_grad_norm(self._engine, self._groups, max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp the gradients of its parameters to [-clip_value, clip_value]. All ranks must call it together.

        >>> import zeroshard
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.tensor([[3.0, -0.5]])).sum().backward()
        >>> optimizer.clip_grad_value_(1.0)
        >>> zeroshard.full_gradient(model, "weight")
        tensor([[ 1.0000, -0.5000]])
        """
        with label("clip_grad_value_"):
            clip_grad_value(self._engine, self._groups, clip_value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish pending reductions, update this rank's shards, and start to refresh the parameters on all ranks."""
        loss, engine, guard = None, self._engine, self._engine.state_guard
        guard.check_states_reloaded()
        guard.check_not_gathered("optimizer.step()")
        check_unchanged(self._groups, self.param_groups, self.state)
        if closure is not None:
            self._groups.check_frozen_grads()
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self._step_runner.muon is not None and self._step_runner.needs_whole_matrices():
                give_matrices_to_owners(self._states, self._groups, engine)
            which, backwards = self._member.label, self._member.backwards
            engine.order.begin_pass(f"step{which} after {backwards} backwards{engine.gradients.scaled_suffix}")
            self._groups.check_frozen_grads()
            model_backwards = self._member.begin_step()
            engine.reduce_pending()
            if engine.gradients.local_sums.is_used:
                engine.gradients.local_sums.on_step(model_backwards, self._member.number)
            if self._needs_tp_grad_check:
                self._needs_tp_grad_check = False
                engine.gradients.norms.check_tp_replicated()
            guard.wait_readers()
            guard.sync_user_edits()
            self._groups.sync_unused_params()
            engine.release_retained()
            own = self._groups.own
            if own.has_ungrouped:
                guard.apply_clip()  # of all gradients: the step would apply it to its own only
            guard.begin_update(own.units, own.flats)
            changed = self._step_runner.run(self._groups.slices_with_grad(), backwards)
            if changed is not None:
                guard.copy_masters([flat for flat in changed if flat in own.flats], device_only=True)
                guard.on_values_changed(self._groups.params_with_grad())
                guard.start_param_refresh(own.units)
        self._track_state_bytes()
        self._member.end_step(model_backwards)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the groups' parameters, or set them to zero."""
        guard = self._engine.state_guard
        if self._engine.gradients.memory.has_grads:
            guard.check_states_reloaded()
        if self._cpu_updates is not None:
            self._cpu_updates.invalidate()
        if not set_to_none:
            self._step_runner.check_can_zero_grads()
            guard.wait_updates()
        if guard.frozen_flats:
            guard.clear_frozen_grads(self._member.names, set_to_none)
        self._groups.clear_grads(set_to_none)

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the sharded model that are in no group yet."""
        if not self._groups.names:  # called by torch's constructor
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        param_names = [entry[0] for entry in params if isinstance(entry, tuple)]  # from named_parameters()
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        engine, names = self._engine, self._groups.check_addable(params)
        engine.state_guard.check_not_gathered("add_param_group()")
        engine.order.begin_pass("add_param_group()")
        engine.order.check(f"add a group of {names}")
        new_group, config = {**self.inner.defaults, **param_group, "params": params}, engine.context.config
        check_empty_groups([*self._groups.as_named(), new_group])
        (needs_whole,) = find_whole_param_groups(self.inner, config.elementwise, _update_dtype(config), [new_group])
        needs_whole = needs_whole or any(self._groups.whole.overrides.find(len(self._groups.names), params))
        engine.state_guard.prepare_write()
        allocate_masters(engine, set(names))
        # The inner optimizer checks the group and adds defaults. Its parameters are replaced, and take no memory.
        shapes, device = self._states.full_shapes(), engine.comm.device
        placeholders = [_placeholder(p, shapes[name], device) for name, p in zip(names, params, strict=True)]
        named = list(zip(param_names, placeholders, strict=True)) if param_names else placeholders
        self.inner.add_param_group({**param_group, "params": named})
        self._groups.add(names, needs_whole)

    @_with_state_dict_hooks
    def state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """Return the full state dict, as the plain optimizer would. All ranks must call it together.

        With ``rank``, only that rank of the mesh gets it, in host memory. With fp16 it also has "loss_scale".
        """
        full = self._states.state_dict(rank)
        return full if self._loss_scale is None or not full else {**full, "loss_scale": self.loss_scale_state()}

    @_with_load_hooks
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state dict, of a plain optimizer or of :meth:`state_dict`. Each rank keeps its shard."""
        self._engine.state_guard.prepare_write()
        groups = state_dict["param_groups"]
        sizes, expected = [len(group["params"]) for group in groups], [len(names) for names in self.group_param_names]
        if sizes != expected:
            raise ValueError(f"the state dict has groups of {sizes} parameters, the optimizer has groups of {expected}")
        names, shapes = [name for group in self.group_param_names for name in group], self._states.full_shapes()
        dtype = _update_dtype(self._engine.context.config)
        dtypes = [[torch.promote_types(p.dtype, dtype or p.dtype) for p in g["params"]] for g in self.param_groups]
        in_groups = [[shapes[name] for name in group] for group in self.group_param_names]
        groups, states = read_state_dict(self.inner, state_dict, in_groups, dtypes)
        param_ids = [param_id for group in state_dict["param_groups"] for param_id in group["params"]]
        found = {name: states[param_id] for name, param_id in zip(names, param_ids, strict=True) if param_id in states}
        self._states.check_full(found)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: copy.deepcopy(value) for key, value in loaded.items() if key != "params"})
        if "loss_scale" in state_dict:
            self.load_loss_scale(state_dict["loss_scale"])
        self._load_states(found)

    @torch.no_grad()
    def full_state(self, name: str) -> dict[str, Any]:
        """Return the full optimizer state of one parameter, in its original shape. All ranks must call it together."""
        return self._states.full(self._states.describe([name], f"read the optimizer's state of {name!r}"))[name]

    @property
    def tp_whole_names(self) -> set[str]:
        """The parameters that are divided over the tensor axis and updated as a whole: see [Note: whole parameters]."""
        return {param.name for param in self._groups.whole.params if param.tp_shard is not None}

    def local_states(self) -> Iterator[tuple[str, str, Range, torch.Tensor]]:
        """Yield every elementwise state on this rank: see :meth:`OptimizerStates.local`."""
        return self._states.local()

    def local_scalars(self) -> dict[str, dict[str, Any]]:
        """Return the states that are not elementwise, such as step counts, by name of the parameters on this rank."""
        return self._states.local_scalars()

    def check_loadable(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise if states cannot be sharded: see :meth:`OptimizerStates.check_shardable`."""
        self._states.check_shardable(states)

    def allocate_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all states: see :meth:`OptimizerStates.allocate`."""
        self._states.allocate(states)
        self._track_state_bytes()

    def _load_states(self, states: dict[str, dict[str, Any]]) -> None:
        self._states.load_full(states)
        if states:
            self._track_state_bytes()

    def states_on_device(self) -> list[torch.Tensor]:
        """Return the optimizer states on the device."""
        return [tensor for tensor in self._groups.state_tensors("device") if tensor.device == self._engine.comm.device]

    def _track_state_bytes(self) -> None:
        for tier in TIERS if self._cpu_updates is not None else TIERS[:1]:
            self._member.track_state_bytes(tier, sum([state.nbytes for state in self._groups.state_tensors(tier)]))


def move_step_hooks(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Move the hooks on ``step()`` from one optimizer to another. Their handles stay valid."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks = vars(source)[name]
        vars(source)[name] = vars(target)[name]
        vars(target)[name] = hooks


def _placeholder(parameter: torch.Tensor, shape: torch.Size, device: torch.device) -> torch.nn.Parameter:
    """Return a parameter of zeros that takes no memory."""
    return torch.nn.Parameter(torch.zeros((), dtype=parameter.dtype, device=device).expand(shape))


def check_optimizer(optimizer: torch.optim.Optimizer, names: dict[int, str], config: Config) -> list[bool]:
    """Raise if an optimizer cannot run on shards, or has states that cannot be sharded.

    ``names`` are the names of the model's parameters, by id. Return for each group whether it needs whole parameters.
    """
    check_empty_groups(optimizer.param_groups)
    if "step" in vars(optimizer) and not is_scheduler_step(optimizer):
        raise ValueError(
            f"step() of this {type(optimizer).__name__} was replaced by another function, which would get one rank's "
            "slices: put what it does into register_step_pre_hook() or register_step_post_hook()"
        )
    overrides = ParamOverrides(optimizer)
    needs_whole = [
        is_whole or any(overrides.find(number, optimizer.param_groups[number]["params"]))
        for number, is_whole in enumerate(find_whole_param_groups(optimizer, config.elementwise, _update_dtype(config)))
    ]
    whole = {
        id(p)
        for group, is_whole in zip(optimizer.param_groups, needs_whole, strict=True)
        if is_whole
        for p in group["params"]
    }
    states = {p: state for p, state in optimizer.state.items() if id(p) in names and id(p) not in whole}
    shapes = {names[id(parameter)]: parameter.shape for parameter in states}
    check_shardable_states(describe_full_states({names[id(p)]: state for p, state in states.items()}, shapes))
    return needs_whole


def _update_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype in which parameters are updated; None: each in its own."""
    return None if config.precision is None else torch.float32

"""The public functions except shard(): unwrap, gathered, no_sync, offload_states, full_parameter, report, profile."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from zeroshard.comm import (
    CollectiveOrder,
    Communicator,
    ConsistencyChecker,
    MeshAxis,
    Traffic,
    count_tensor_traffic,
    mesh_axes,
    open_consistency_checker,
    product_axis,
    tensor_axis_name,
)
from zeroshard.config.config import Config, check_inner_axis, check_replicas
from zeroshard.engine import (
    Engine,
    OffloadedStates,
    ShardContext,
    build_engine,
    check_max_norm,
    check_model,
    full_tensors,
    make_plain,
    open_tiers,
    plan_model,
    unwrap_compiled,
    verify_same_model,
    verify_same_tensor_plan,
)
from zeroshard.engine import register_forward_method as _register_forward_method
from zeroshard.float8 import check_float8_device, load_casts
from zeroshard.memory import MemoryTracker, Pool, Profile, Report, TierAllocator
from zeroshard.optim import (
    ModelOptimizers,
    ShardedOptimizer,
    as_list,
    check_optimizer,
    mark_local_axis,
    state_bytes_per_element,
)
from zeroshard.sharding import Float8Layers, Placement, Precision, find_eight_bit_params, plan_units
from zeroshard.tensor_parallel import TensorParallelState, parallelize
from zeroshard.utils.profiling import ChromeTrace

_log = logging.getLogger("zeroshard")


class ShardedModel:
    """What a sharded model stores: its engine, the handles of its hooks, and its tensor parallelism."""

    def __init__(
        self,
        engine: Engine,
        hook_handles: list[Any],
        tp_state: TensorParallelState | None,
        float8_layers: Float8Layers | None,
        plan_reason: str = "",
    ) -> None:
        self.engine = engine
        self.float8_layers = float8_layers
        self._optimizers: list[weakref.ref[ShardedOptimizer]] = []  # weak: without one, its states are freed
        self.plan_reason = plan_reason  # this stage and offload, where they were chosen by a plan
        self.hook_handles = hook_handles
        self.tp_state = tp_state
        self.profiled_traffic: tuple[Traffic, Traffic] | None = (
            None  # of tensor parallelism, of P_a, in the last profile
        )

    @property
    def optimizers(self) -> list[ShardedOptimizer]:
        """The optimizers that the user still has."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def add_optimizer(self, optimizer: ShardedOptimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))


@dataclass(frozen=True)
class ChosenConfig:
    """The options that a plan has chosen, and why."""

    config: Config
    reason: str
    apply_checkpointing: Callable[[nn.Module], None] | None = None  # calls checkpoint_activations() if that was chosen


class ConfigChooser(Protocol):
    """Chooses the options that were left to a plan; see :func:`zeroshard.shard`."""

    def __call__(
        self,
        config: Config,
        consistency: ConsistencyChecker,
        device: torch.device,
        mesh_sizes: tuple[int, int, int],
        needs_whole: list[bool],
    ) -> ChosenConfig:
        """Return the chosen options.

        ``mesh_sizes``: sizes of the replicate, shard and tensor axes. ``needs_whole``: which groups of the optimizer
        are updated as whole parameters.
        """


def shard_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    config: Config,
    *,
    mesh: DeviceMesh | None = None,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    choose: ConfigChooser | None = None,
) -> tuple[nn.Module, Any]:
    """Partition a model's training states over the data-parallel ranks, in place: see :func:`zeroshard.shard`."""
    axes, tensor_axis = mesh_axes(mesh)
    shard_size, replicas = axes[-1].size, math.prod(axis.size for axis in axes[:-1])
    optimizers = _check_optimizers(model, optimizer)
    check_model(model, has_tensor_axis=tensor_axis.size > 1)
    device = _resolve_device(model, mesh, config)
    if config.precision == "fp8":
        check_float8_device(device)
        load_casts(device)
    consistency = open_consistency_checker(mesh, config.timeout, config.heartbeat_timeout, device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer_of = _find_optimizer_of_params(optimizers, names)
    needs_whole = [check_optimizer(each, names, config) for each in optimizers]
    chosen, whole_groups = ChosenConfig(config, ""), [is_whole for groups in needs_whole for is_whole in groups]
    if choose is not None:
        chosen = choose(config, consistency, device, (replicas, shard_size, tensor_axis.size), whole_groups)
        config = chosen.config
    check_max_norm(model, config, shard_size * replicas)
    verify_same_model(model, _optimizer_signature(optimizers, names), config, consistency, device)
    if chosen.apply_checkpointing is not None:
        chosen.apply_checkpointing(model)
    axes = mark_local_axis(axes, config, optimizers)
    check_replicas(config, replicas)
    shard_axis = _find_shard_axis(mesh, axes, config)
    placement = Placement.from_stage(
        config.stage,
        shard_axis.size,
        config.offload,
        shard_size * replicas // shard_axis.size,
        casts_master=config.needs_cast_on_gather and bool(optimizer_of),
        partition=config.partition if shard_axis.factors is not None else "hybrid",
    )
    comm = Communicator(axes, device, shard_axis if placement.optimizer else None, consistency, tensor_axis)
    context = _make_context(model, config, placement, comm)
    # the largest of several: a tier's limit holds for any split of the parameters
    state_bytes = max(map(state_bytes_per_element, optimizers), default=0) if config.offload is not None else 0
    unit_specs = plan_units(model, config.units, config.bucket_size)
    tp_state = _parallelize(model, mesh, tensor_axis, tensor_plan)  # changes the model, so it follows all checks
    try:
        verify_same_tensor_plan(tp_state, consistency)
        plan = plan_model(context, model, unit_specs, optimizer_of, state_bytes, tp_state)
        engine, handles = build_engine(context, model, plan, tp_state)
    except BaseException:
        if tp_state is not None:
            tp_state.restore()
        raise
    sharded = model._zeroshard = ShardedModel(  # type: ignore[assignment]
        engine, handles, tp_state, plan.float8_layers, chosen.reason
    )
    engine.state_guard.expose_reduced_grads()
    for _ in range(2):  # the collectives of building belong to no step
        context.comm.counters.end_step()
    found = _shard_optimizers(sharded, optimizers, names, needs_whole)
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return model, found[0] if found else None
    return model, tuple(found) if isinstance(optimizer, tuple) else found


def _find_shard_axis(mesh: DeviceMesh | None, axes: list[MeshAxis], config: Config) -> MeshAxis:
    """Return the axis that states are partitioned over: the inner one of the mesh, or the product of both."""
    shard_size, replicas = axes[-1].size, math.prod(axis.size for axis in axes[:-1])
    if mesh is None or replicas == 1 or config.partition == "hybrid":
        return axes[-1]
    check_inner_axis(config, shard_size)
    return product_axis(mesh, *axes)


def _make_context(model: nn.Module, config: Config, placement: Placement, comm: Communicator) -> ShardContext:
    """Return what all parts of the engine share, with its tiers opened on all ranks."""
    tracker = MemoryTracker()
    context = ShardContext(
        config,
        placement,
        Precision(model, config),
        comm,
        CollectiveOrder(comm.consistency),
        tracker,
        Pool(comm.device),
        TierAllocator(config.offload, comm.device, tracker),
    )
    open_tiers(context.tiers, comm.consistency)
    return context


def _shard_optimizers(
    sharded: ShardedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    names: dict[int, str],
    needs_whole: Sequence[list[bool]],
) -> list[ShardedOptimizer]:
    """Return the sharded optimizers of a sharded model, and register them with it."""
    shared = ModelOptimizers(sharded.engine, len(optimizers))
    found = [
        ShardedOptimizer(inner, shared, names, is_whole)
        for inner, is_whole in zip(optimizers, needs_whole, strict=True)
    ]
    for optimizer in found:
        sharded.add_optimizer(optimizer)
        if not sharded.engine.comm.consistency.rank and _log.isEnabledFor(logging.INFO):
            _log.info("%s updates %s", type(optimizer.inner).__name__, optimizer.routing())
    return found


def unwrap(model: nn.Module, optimizer: ShardedOptimizer | Sequence[ShardedOptimizer] | None = None) -> Any:
    """Return the plain model: full parameters in their original dtype, no hooks. All ranks call it together.

    Parameters get the values of their master weights, if there are any. With the sharded optimizer, returns ``(model,
    optimizer)``: the inner optimizer, on the plain parameters and with full states; with several in a list or tuple,
    all of them. Gradients are dropped.

    >>> import zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(2, 2))
    >>> zeroshard.unwrap(model)
    Linear(in_features=2, out_features=2, bias=True)
    """
    sharded = _sharded_model(model)
    engine: Engine = sharded.engine
    engine.state_guard.check_not_gathered("unwrap()")
    engine.state_guard.replica_steps.check_equal("unwrap()")
    optimizers = as_list(optimizer)
    if optimizers and {id(each) for each in sharded.optimizers} - {id(each) for each in optimizers}:
        raise ValueError(
            f"this {type(model).__name__} has {len(sharded.optimizers)} optimizers, got {len(optimizers)}: pass all in "
            "a list, or none"
        )
    states = [each.state_dict() for each in optimizers]
    engine.close()
    engine.order.begin_pass("unwrap")
    make_plain(engine.units, engine.comm, engine.order, sharded.tp_state)
    engine.comm.check_results("unwrap the model")
    for handle in sharded.hook_handles:
        handle.remove()
    del model._zeroshard
    engine.comm.consistency.close()
    if optimizer is None:
        return model
    parameters = dict(model.named_parameters())
    for each, state in zip(optimizers, states, strict=True):
        if sharded.tp_state is not None:
            sharded.tp_state.shard_optimizer_states(state, each.group_param_names)
        each.restore_inner()
        each.inner.state.clear()
        for group, names in zip(each.inner.param_groups, each.group_param_names, strict=True):
            group["params"] = [parameters[name] for name in names]
        each.inner.load_state_dict(state)
    inners = [each.inner for each in optimizers]
    if isinstance(optimizer, ShardedOptimizer):
        return model, inners[0]
    return model, tuple(inners) if isinstance(optimizer, tuple) else inners


def unshard(model: nn.Module, optimizer: ShardedOptimizer | Sequence[ShardedOptimizer] | None = None) -> Any:
    """Deprecated name of :func:`unwrap`; FSDP2's ``unshard()`` means all-gathering the parameters.

    >>> import zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(2, 2))
    >>> with warnings.catch_warnings(action="ignore"):
    ...     model = zeroshard.unshard(model)
    """
    warnings.warn("zeroshard.unshard() is now zeroshard.unwrap()", DeprecationWarning, stacklevel=2)
    return unwrap(model, optimizer)


@contextmanager
def gathered(module: nn.Module, write_rank: int | None = None) -> Iterator[None]:
    """Give all ranks the full parameters of a sharded model, or of one of its modules, inside the block.

    Inside, the parameters are those of a plain model: a forward, a ``state_dict()`` or an edit works as usual, and a
    forward computes with the edited values. Without ``write_rank``, changes are undone on exit. With it, the values of
    that rank of the mesh are written to all shards. Values read inside, such as a ``state_dict()``, stay valid
    afterwards. In nested blocks, an edit that the inner block does not write is still visible in the outer one. Calls
    that would change the states behind the values (``optimizer.step()``, a load) raise. All ranks enter and leave
    together; leaving by an exception changes nothing and needs no other rank. With a tensor axis, ``write_rank`` counts
    the data-parallel ranks only: each tensor rank writes its TP shards, and the first one what is replicated.

    >>> import zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(2, 2))
    >>> with zeroshard.gathered(model, write_rank=0):
    ...     nn.init.zeros_(model.weight)
    Parameter containing:
    tensor([[0., 0.],
            [0., 0.]], requires_grad=True)
    """
    engine, units = full_tensors.find_units(module)
    data_ranks = engine.comm.mesh_size // engine.comm.tensor_axis.size
    if write_rank is not None and not 0 <= write_rank < data_ranks:
        raise ValueError(
            f"write_rank is a rank of the mesh (of its data axes), 0 to {data_ranks - 1}, got {write_rank}"
        )
    if write_rank is not None:
        engine.state_guard.replica_steps.check_equal("gathered(write_rank=…)")
    else:
        engine.state_guard.replica_steps.warn_if_different("gathered()")
    with full_tensors.gathered_copies(engine, units, write_rank):
        yield
        if write_rank is not None:
            full_tensors.find_units(module)  # raises if a parameter was replaced


def offload_states(model: nn.Module) -> None:
    """Move all training states of a sharded model from the device to host memory, until :func:`reload_states`.

    In the meantime, the device memory is free for something else (generation, another model), and the model cannot be
    used. Does nothing if the states are already offloaded.

    >>> import zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(64, 64, bias=False))
    >>> zeroshard.offload_states(model)
    >>> zeroshard.report(model).total.now
    0
    >>> zeroshard.reload_states(model)
    >>> model(torch.ones(1, 64)).shape
    torch.Size([1, 64])
    """
    sharded = _sharded_model(model)
    guard = sharded.engine.state_guard
    guard.check_not_gathered("offload_states()")
    if guard.offloaded_states is None:
        guard.offloaded_states = OffloadedStates(
            sharded.engine, lambda: [state for each in sharded.optimizers for state in _states_on_device(each)]
        )


def reload_states(model: nn.Module) -> None:
    """Move the states that :func:`offload_states` has offloaded back to the device, byte for byte.

    >>> import zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(2, 2))
    >>> zeroshard.reload_states(model)  # nothing was out
    """
    guard = _sharded_model(model).engine.state_guard
    offloaded, guard.offloaded_states = guard.offloaded_states, None
    if isinstance(offloaded, OffloadedStates):
        offloaded.reload()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside the block, backward sums gradients locally. The next backward outside, or the step, reduces the sum.

    In stages 2 and 3 this saves communication and takes the memory of full gradients. In stages 0 and 1 gradients are
    summed locally anyway, and this backward is never taken for the last one of a step: see ``Config.backwards``.

    >>> import zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(2, 2))
    >>> with zeroshard.no_sync(model):
    ...     model(torch.ones(1, 2)).sum().backward()
    """
    engine = _sharded_model(model).engine
    before, engine.executor.needs_grad_sync = engine.executor.needs_grad_sync, False
    try:
        yield
    finally:
        engine.executor.needs_grad_sync = before


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method other than ``forward`` of a model, or of one of its modules, run as a forward does.

    ``model.compute_loss(x)`` then gathers parameters that the method uses itself, casts its floating-point inputs and
    syncs buffers as ``model(x)`` does, and its backward runs as that of a forward. Not registered, a method works if it
    only calls modules; at stage 3 it raises if it uses a parameter itself. FSDP2's ``register_fsdp_forward_method``.

    Call it before or after :func:`shard`; an unsharded model runs as before. It stays registered over :func:`unwrap`
    and the next :func:`shard`. Your hooks on the module belong to its ``forward`` and do not run.

    >>> import zeroshard
    >>> class Model(nn.Linear):
    ...     def compute_loss(self, x):
    ...         return nn.functional.linear(x, self.weight).square().mean()
    >>> model, _ = zeroshard.shard(Model(2, 2), precision="bf16")
    >>> zeroshard.register_forward_method(model, "compute_loss")
    >>> model.compute_loss(torch.ones(1, 2)).backward()
    """
    _register_forward_method(unwrap_compiled(module), name)


def report(model: nn.Module) -> Report:
    """Return what this rank holds, what it communicated in the last step, and how each parameter is updated.

    >>> import zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(64, 64, bias=False))
    >>> zeroshard.report(model).states
    16384
    """
    sharded = _sharded_model(model)
    engine = sharded.engine
    comm = engine.comm
    tensor, activations = sharded.profiled_traffic or (None, None)
    kinds = list(engine.context.tracker.by_kind.items())  # at once: an update under way may add to them
    routings = [optimizer.routing() for optimizer in sharded.optimizers]
    flat = {name: elements for each in routings for name, elements in each.flat.items()}
    whole = {name: param for each in routings for name, param in each.whole.items()}
    matrices = {name: matrix for each in routings for name, matrix in each.matrices.items()}
    routing = replace(routings[0], flat=flat, whole=whole, matrices=matrices) if routings else None
    return Report(
        rank=comm.consistency.rank,
        ranks=comm.mesh_size,
        parameters=sum(numel for unit in engine.units for flat in unit.flats for numel in flat.layout.numels),
        memory={kind: replace(held) for kind, held in kinds},
        total=replace(engine.context.tracker.total),
        collectives={kind: replace(traffic) for kind, traffic in comm.counters.last_step.items()},
        tensor_traffic=tensor,
        activation_traffic=activations,
        chosen=sharded.plan_reason,
        routing=routing,
        float8=sharded.float8_layers,
        eight_bits=find_eight_bit_params(
            (flat.spec for unit in engine.units for flat in unit.flats), engine.context.config
        ),
    )


@contextmanager
def profile(model: nn.Module, trace: str | os.PathLike[str] | None = None) -> Iterator[Profile]:
    """Record what this rank holds at every moment inside, and how long it waits for communication.

    Made for a step now and then, not for all: on a GPU it waits for the device before and after. Along a tensor axis it
    also counts the collectives of tensor parallelism, which :func:`report` then compares with those of P_a.

    With ``trace``, a path that ends in .json or .json.gz, torch's profiler runs on all threads, and each rank writes a
    Chrome trace, for Perfetto or chrome://tracing: ``trace.json`` becomes ``trace-rank0.json`` and so on. Units,
    all-gathers, reductions and updates have labels, and the collectives of tensor parallelism are not counted, which
    would slow down every operation. A torch.profiler of your own shows the same labels.

    >>> import tempfile, zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(64, 64, bias=False))
    >>> with zeroshard.profile(model) as profile:
    ...     model(torch.ones(1, 64)).sum().backward()
    >>> profile.moments[0].held["parameters"]
    16384
    >>> with zeroshard.profile(model, trace=tempfile.mkdtemp() + "/trace.json") as profile:
    ...     model(torch.ones(1, 64)).sum().backward()
    >>> profile.trace.name
    'trace-rank0.json'
    """
    sharded = _sharded_model(model)
    engine: Engine = sharded.engine
    if trace is None:
        with count_tensor_traffic(engine.comm) as sharded.profiled_traffic, _record_profile(engine) as result:
            yield result
        return
    with ChromeTrace(trace, engine.comm.device) as chrome_trace:
        with _record_profile(engine) as result:
            yield result
        # A range that is still open on another thread would be missing in the trace.
        engine.gradients.reducer.listeners.wait()
        engine.state_guard.wait_readers()
    result.trace = chrome_trace.path


@contextmanager
def _record_profile(engine: Engine) -> Iterator[Profile]:
    tracker, wait_timer, device = engine.context.tracker, engine.comm.wait_timer, engine.comm.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    held = {kind: nbytes.now for (kind, tier), nbytes in tracker.by_kind.items() if tier == "device"}
    result = Profile(held=held, device=device)
    tracker.on_change = result.record_bytes
    engine.comm.counters.current_step = {}  # what came since the last step (an evaluation, say) is no part of this one
    wait_timer.start()
    try:
        yield result
    finally:
        tracker.on_change = None
        wait_timer.stop()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        result.seconds = time.perf_counter() - result.start_time
        result.waited = wait_timer.seconds


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is one that :func:`zeroshard.shard` returned, also inside ``torch.compile``'s wrapper.

    A module of a sharded model, and a model that contains a sharded one, are not.

    >>> import zeroshard
    >>> model = nn.Linear(2, 1)
    >>> zeroshard.is_sharded(model)
    False
    >>> model, _ = zeroshard.shard(model)
    >>> zeroshard.is_sharded(model)
    True
    """
    return "_zeroshard" in unwrap_compiled(model).__dict__


def state_dict(model: nn.Module, rank: int | None = 0, *, trainable_only: bool = False) -> dict[str, Any]:
    """Return what the plain model's ``state_dict()`` would, in host memory, on one rank. All ranks call it together.

    Values are whole, also where the model is tensor-parallel, in the dtype the parameters had before ``shard()``, from
    the master weights if there are any (frozen parameters have none: under "bf16" and "fp16" they have 16 bits). Names
    are the plain model's, tied parameters under all of theirs. Buffers are those of rank 0, which all ranks get before
    the next forward. The model's own ``state_dict()`` makes it, so its hooks and overridden methods count; they see
    plain parameters on the CPU. Parameters are gathered one unit at a time: on the device this takes the memory of the
    largest unit.

    - ``rank``: the rank of the mesh that gets it, as in ``zeroshard.report(model).rank``; the others get ``{}``. None:
      all ranks get it, each in its own host memory.
    - ``trainable_only``: leave out frozen parameters, such as the base model of LoRA, without gathering them. Buffers
      stay.

    >>> import zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(2, 1), stage=3, precision="bf16")
    >>> {name: value.dtype for name, value in zeroshard.state_dict(model).items()}
    {'weight': torch.float32, 'bias': torch.float32}
    """
    model = unwrap_compiled(model)
    engine = _sharded_model(model).engine
    ranks = engine.comm.mesh_size
    if rank is not None and not (type(rank) is int and 0 <= rank < ranks):
        raise ValueError(f"rank is a rank of the mesh, 0 to {ranks - 1}, or None for all ranks, got {rank!r}")
    if engine.is_running:
        raise RuntimeError("zeroshard.state_dict() inside a forward or backward: call it between steps")
    engine.state_guard.replica_steps.warn_if_different("zeroshard.state_dict()")
    return full_tensors.full_state_dict(engine, model, rank, trainable_only)


def full_parameter(model: nn.Module, name: str) -> torch.Tensor:
    """Return a copy of one full parameter by name, in fp32 if it has a master weight. All ranks call it together.

    >>> import zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(2, 1, bias=False))
    >>> zeroshard.full_parameter(model, "weight").shape
    torch.Size([1, 2])
    """
    engine: Engine = _sharded_model(model).engine
    engine.state_guard.replica_steps.warn_if_different("full_parameter()")
    with torch.no_grad():
        return full_tensors.full_parameter(engine, name)


def average_replicas(model: nn.Module) -> None:
    """Average the parameters of replicas that train alone (``Config.local_steps``) now. All ranks call it together.

    Call it before what needs the same values on all ranks: an export, :func:`unwrap`, the end of training. It ends the
    local steps early, with the outer optimizer if there is one, and the next step is the first of the next ones. Does
    nothing if there were no steps since the last average.

    >>> import zeroshard
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = zeroshard.shard(model, optimizer, stage=0, local_steps=8)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> zeroshard.average_replicas(model)  # of one replica
    """
    sharded = _sharded_model(model)
    sharded.engine.state_guard.check_not_gathered("average_replicas()")
    if sharded.engine.is_running:
        raise RuntimeError("average_replicas() inside a forward or backward: call it between steps")
    for optimizer in sharded.optimizers:
        if optimizer.local_steps is not None:
            optimizer.local_steps.average()


def full_gradient(model: nn.Module, name: str) -> torch.Tensor | None:
    """Return the full, reduced gradient of one parameter by name, None if it has none. All ranks call it together.

    >>> import zeroshard
    >>> model, _ = zeroshard.shard(nn.Linear(2, 1, bias=False))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> zeroshard.full_gradient(model, "weight")
    tensor([[1., 1.]])
    """
    engine: Engine = _sharded_model(model).engine
    with torch.no_grad():
        return full_tensors.full_gradient(engine, name)


def full_state(optimizer: ShardedOptimizer, name: str) -> dict[str, Any]:
    """Return the full optimizer state of one parameter by name. All ranks call it together.

    >>> import zeroshard
    >>> model = nn.Linear(2, 1, bias=False)
    >>> model, optimizer = zeroshard.shard(model, torch.optim.Adagrad(model.parameters()))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> zeroshard.full_state(optimizer, "weight")["sum"]
    tensor([[1., 1.]])
    """
    return optimizer.full_state(name)


def _states_on_device(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    outer = optimizer.local_steps.outer if optimizer.local_steps is not None else None
    return optimizer.states_on_device() + (outer.device_tensors() if outer is not None else [])


def _sharded_model(model: nn.Module) -> ShardedModel:
    sharded: ShardedModel | None = model.__dict__.get("_zeroshard")
    if sharded is None:
        raise ValueError(f"this {type(model).__name__} is not a sharded model: pass what zeroshard.shard() returned")
    return sharded


def _parallelize(
    model: nn.Module, mesh: DeviceMesh | None, tensor: MeshAxis, plan: Mapping[str, ParallelStyle] | None
) -> TensorParallelState | None:
    name = tensor_axis_name(mesh) if mesh is not None else None
    if plan is not None and name is None:
        raise ValueError(
            "tensor_plan is given, and the mesh has no tensor axis: give one whose last axis is named 'tensor', as in "
            'init_device_mesh("cuda", (4, 2), mesh_dim_names=("shard", "tensor"))'
        )
    if mesh is None or name is None or tensor.size == 1:  # one rank has nothing to divide
        return None
    return parallelize(model, mesh[name], plan)


def _resolve_device(model: nn.Module, mesh: DeviceMesh | None, config: Config) -> torch.device:
    """Return the device of the states: of the mesh's kind, else where the model is."""
    current = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    serves_cuda = dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config()
    if mesh is not None:
        kind = mesh.device_type
    elif current.type in ("meta", "cpu"):
        kind = "cuda" if serves_cuda and torch.cuda.is_available() else "cpu"
    else:
        kind = current.type
    if current.type == kind:
        return current
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _optimizer_signature(optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> dict[str, str]:
    """Return, by name, which group of which optimizer updates each parameter."""
    found = {}
    for position, optimizer in enumerate(optimizers):
        which = f", optimizer {position}" if len(optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            place = f"in group {number} of {type(optimizer).__name__}{which}"
            found.update({names[id(parameter)]: place for parameter in group["params"]})
    return found


def _check_optimizers(model: nn.Module, optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that shard() got; raise on anything else, and on a model that has its optimizers."""
    optimizers = as_list(optimizer)
    if isinstance(optimizer, (list, tuple)) and not optimizers:
        raise ValueError("the list of optimizers is empty: pass None for a model without an optimizer")
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            hint = "; several are passed as a list" if isinstance(optimizer, dict) else ""
            raise TypeError(
                f"optimizer is a torch.optim.Optimizer, a list of them or None, got {type(each).__name__}{hint}"
            )
        if isinstance(each, ShardedOptimizer):
            continue  # see below
        if isinstance(model, nn.Module) and "_zeroshard" in model.__dict__:
            raise ValueError(
                f"this {type(model).__name__} is sharded already, and {type(each).__name__} cannot be added: pass all "
                "optimizers of a model to one call, as in shard(model, [first, second]), or add the parameters with "
                "add_param_group() of an optimizer that shard() returned. To use another optimizer, call "
                "zeroshard.unwrap() first"
            )
    return optimizers


def _find_optimizer_of_params(optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> dict[int, int]:
    """Return the number of the optimizer of each parameter, by the parameter's id.

    Raise if an optimizer is sharded already, has parameters of another model, or those of another optimizer.
    """
    found: dict[int, int] = {}
    for position, optimizer in enumerate(optimizers):
        which = f"optimizer {position}" if len(optimizers) > 1 else "the optimizer"
        if isinstance(optimizer, ShardedOptimizer):
            raise ValueError(f"{which} belongs to a sharded model already: unwrap it first, or make a new one")
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise ValueError(
                        f"parameter {place} of {which}'s group {number}, of shape {tuple(parameter.shape)}, is "
                        "not one of the model's: make the optimizer from model.parameters()"
                    )
                other = found.setdefault(id(parameter), position)
                if other != position:
                    raise ValueError(
                        f"{names[id(parameter)]!r} is in optimizer {other} ({type(optimizers[other]).__name__}) and in "
                        f"optimizer {position} ({type(optimizer).__name__}): give each parameter to one optimizer"
                    )
    return found

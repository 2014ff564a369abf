"""The public functions on this core. What it does not support yet raises NotImplementedError."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zeroshard
from zeroshard.comm.consistency import ConsistencyChecker, RanksDisagreeError, open_consistency_checker
from zeroshard.comm.mesh import find_or_create_group, group_backend, mesh_axes
from zeroshard.config.config import Config
from zeroshard.core import values
from zeroshard.core.axis import Axis
from zeroshard.core.build import Builder, axes_by_prefix
from zeroshard.core.checks import default_observers
from zeroshard.core.checks.optimizers import check_optimizers
from zeroshard.core.context import Context
from zeroshard.core.engine import Engine
from zeroshard.core.optimizer import ShardedOptimizer
from zeroshard.engine.model_checks import check_max_norm, check_model
from zeroshard.memory.pool import Pool

SUPPORTED_OPTIONS = frozenset(
    "stage partition precision keep_fp32 cast_inputs units bucket_size ring backwards prefetch broadcast_buffers "
    "defragment timeout heartbeat_timeout loss_scale elementwise init_fn".split()
)
SUPPORTED_PRECISIONS = (None, "fp32", "bf16", "fp16")


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    axes: Mapping[str, DeviceMesh] | None = None,
    config: Config | None = None,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Partition a model's training states over the data-parallel ranks, in place: see :func:`zeroshard.shard`.

    ``axes``: meshes of parameters, by a prefix of their names, that other ranks share than the rest of the model. Its
    ranks outside such a mesh have other parameters of these names.

    >>> model = nn.Linear(4, 2)
    >>> model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    """
    if config is not None:
        options = {**vars(config), **options}
    config = Config(**options)
    _check_options(config)
    _check_model(model, config)
    optimizers: list[Any] = (
        list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer] * (optimizer is not None)
    )
    if optimizers == [] and optimizer is not None:
        raise ValueError("the list of optimizers is empty: pass None for a model without an optimizer")
    check_optimizers(model, optimizers, config.elementwise)
    device = _device_of(model, mesh)
    checker = open_consistency_checker(mesh, config.timeout, config.heartbeat_timeout, device)
    _check_ranks(model, optimizers, config, checker)
    purpose = _purpose_of_groups(checker)
    own_axes = _axes_of_mesh(mesh, checker, device, purpose)
    others = {prefix: _axes_of_mesh(submesh, checker, device, purpose) for prefix, submesh in (axes or {}).items()}
    context = Context(own_axes, config, device, checker, Pool(device, config.defragment), default_observers())
    engine = Builder(model, context, axes_by_prefix(own_axes, others)).build()
    model.__dict__["_zeroshard_core"] = engine
    for module in _generating_modules(engine):
        module.__dict__["_is_fsdp_managed_module"] = True
    found = [ShardedOptimizer(engine, each) for each in optimizers]
    if isinstance(optimizer, (list, tuple)):
        return model, tuple(found) if isinstance(optimizer, tuple) else found
    return model, found[0] if found else None


def is_sharded(model: nn.Module) -> bool:
    """Return whether :func:`shard` has been called for a model."""
    return "_zeroshard_core" in model.__dict__


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of the backwards inside on this rank: the next backward or step outside reduces them."""
    engine = _engine_of(model)
    before = engine.syncs
    engine.syncs = False
    try:
        yield
    finally:
        engine.syncs = before


def gathered(model: nn.Module, write_rank: int | None = None) -> contextlib.AbstractContextManager[None]:
    """Have all parameters whole inside the context; with ``write_rank``, keep that rank's changes.

    ``model`` may be one module of the sharded model.
    """
    owner = next(model.parameters(), None)
    return values.gathered(getattr(owner, "_zeroshard_core", None) or _engine_of(model), model, write_rank)


def full_parameter(model: nn.Module, name: str) -> torch.Tensor:
    """Return one parameter whole, in the precision of its master: a collective."""
    return values.full_parameter(_engine_of(model), name)


def full_gradient(model: nn.Module, name: str) -> torch.Tensor | None:
    """Return one gradient whole: a collective."""
    return values.full_gradient(_engine_of(model), name)


def state_dict(model: nn.Module, rank: int | None = 0, trainable_only: bool = False) -> dict[str, torch.Tensor]:
    """Return the whole model in host memory on one rank, or on all if ``rank`` is None: a collective."""
    if trainable_only:
        _refuse("state_dict(trainable_only=True)")
    engine = _engine_of(model)
    found = values.state_dict(engine)
    own = dist.get_rank() if dist.is_initialized() else 0
    return found if rank is None or rank == own else {}


def unwrap(model: nn.Module, optimizer: ShardedOptimizer | Sequence[ShardedOptimizer] | None = None) -> Any:
    """Return the plain model, and the plain optimizers with full states: a collective. Gradients are dropped."""
    engine = _engine_of(model)
    optimizers = [optimizer] if isinstance(optimizer, ShardedOptimizer) else list(optimizer or ())
    states = [each.state_dict() for each in optimizers]
    values.make_plain(engine)
    for module in _generating_modules(engine):
        del module.__dict__["_is_fsdp_managed_module"]
    del model.__dict__["_zeroshard_core"]
    plain = [each.unwrapped(state) for each, state in zip(optimizers, states, strict=True)]
    if optimizer is None:
        return model
    if isinstance(optimizer, ShardedOptimizer):
        return model, plain[0]
    return model, tuple(plain) if isinstance(optimizer, tuple) else plain


def __getattr__(name: str) -> Any:
    """Raise for a public name that is still to come."""
    if name not in zeroshard.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _refuse(f"zeroshard.{name}")


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is not supported by the new core yet: unset ZEROSHARD_CORE")


def _engine_of(model: nn.Module) -> Engine:
    engine = model.__dict__.get("_zeroshard_core")
    if not isinstance(engine, Engine):
        raise ValueError(f"this {type(model).__name__} is not sharded: call zeroshard.shard(model, optimizer) first")
    return engine


def _generating_modules(engine: Engine) -> list[nn.Module]:
    """Return modules whose ``generate()`` transformers lets all ranks continue together, where they gather units."""
    is_sharded = any(unit.is_sharded for unit in engine.units)
    if not (
        dist.is_initialized() and is_sharded and math.prod(axis.size for axis in engine.axes) == dist.get_world_size()
    ):
        return []
    return [module for module in engine.model.modules() if hasattr(type(module), "generate")]


def _check_options(config: Config) -> None:
    """Raise for options that are still to come."""
    for field in dataclasses.fields(Config):
        is_default = getattr(config, field.name) == getattr(Config(), field.name)
        if field.name not in SUPPORTED_OPTIONS and not is_default:
            _refuse(f"{field.name}={getattr(config, field.name)!r}")
    if config.precision not in SUPPORTED_PRECISIONS:
        _refuse(f"precision={config.precision!r}")


def _check_model(model: nn.Module, config: Config) -> None:
    """Raise for models that cannot be sharded."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "_zeroshard_core"):
            raise ValueError(f"{name!r} is sharded already: call zeroshard.unwrap() on its model first")
    check_model(model, has_tensor_axis=False)
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            _refuse(f"the {type(parameter).__name__} {name!r}")
    check_max_norm(model, config, dist.get_world_size() if dist.is_initialized() else 1)
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters")


def _check_ranks(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], config: Config, checker: ConsistencyChecker
) -> None:
    """Raise on all ranks if their models, optimizers or options differ."""
    described = [
        (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        (type(each).__name__, [[names[id(parameter)] for parameter in group["params"]] for group in each.param_groups])
        for each in optimizers
    ]
    own = repr((dataclasses.replace(config, init_fn=None), described, groups))
    first = checker.broadcast_text("model", own)
    differs = first is not None and own != first
    errors = checker.gather_text("difference", "has another model, optimizer or options than rank 0" if differs else "")
    if errors:
        raise RanksDisagreeError("; ".join(f"rank {rank} {text}" for rank, text in errors.items()))


def _device_of(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """Return where the model trains: its own device, or this rank's GPU if its ranks communicate between GPUs."""
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta} or {torch.device("cpu")}
    if len(devices) > 1:
        raise ValueError(f"all parameters must be on one device, got {sorted(map(str, devices))}")
    device = devices.pop()
    is_gpu_job = mesh is not None and mesh.device_type == "cuda"
    if mesh is None and dist.is_available() and dist.is_initialized() and torch.cuda.is_available():
        is_gpu_job = group_backend(dist.group.WORLD, torch.device("cuda")) == "nccl"
    if device.type == "cpu" and is_gpu_job:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _axes_of_mesh(
    mesh: DeviceMesh | None, checker: ConsistencyChecker, device: torch.device, purpose: str
) -> tuple[Axis, ...]:
    found, tensor_axis = mesh_axes(mesh)
    if tensor_axis.size > 1:
        _refuse("a mesh with a tensor axis")
    axes = []
    for axis in found:
        backend = group_backend(axis.group, device)
        own = axis.group
        if axis.group is not None and axis.size > 1 and backend in ("nccl", "gloo"):
            ranks = dist.get_process_group_ranks(axis.group)
            own = find_or_create_group(ranks, purpose)
        axes.append(Axis(axis.size, axis.rank, axis.group, own, backend, checker))
    return tuple(axes)


# Which models live, by the number that the first rank has given them: groups of one that is gone are used again.
_MODELS: weakref.WeakValueDictionary[int, ConsistencyChecker] = weakref.WeakValueDictionary()


def _purpose_of_groups(checker: ConsistencyChecker) -> str:
    """Return a description of a model's own groups, the same on all its ranks, that no living model's groups have."""
    number = next(number for number in itertools.count() if number not in _MODELS)
    if checker.rank == 0:  # decides: garbage is not collected at the same time on all ranks
        _MODELS[number] = checker
    agreed = checker.broadcast_text("number of its process groups", str(number))
    return f"zeroshard core {checker.global_ranks[0]}.{agreed}"

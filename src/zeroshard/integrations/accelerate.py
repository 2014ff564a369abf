"""ZeroAccelerator: Accelerate's ``Accelerator``, with zeroshard where it would use DDP.

[Note: what Accelerate still does]
Data loaders, schedulers, when gradients are complete, metrics, trackers and file names are Accelerate's own code.
Overridden is what touches parameters, gradients and optimizer states, because these are sharded:

- ``prepare`` finds the optimizer of each model and shards the two together. A model without an optimizer is sharded
  for inference and keeps its dtype, so nothing is lost if its optimizer is prepared later.
- Mixed precision: a trained model computes with 16-bit parameters and has fp32 master weights (``Config.precision``).
  As with DDP, forward runs under autocast and returns fp32: losses, inside the model or after it, are not computed in
  16 bits. zeroshard's loss scale replaces the GradScaler.
- ``save_state`` and ``load_state`` run zeroshard's own save and load as the last of Accelerate's hooks, so directories
  are named, limited and given to the user's hooks as always.
"""

from __future__ import annotations

import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.comm import all_gather_object, tensor_axis_name
from zeroshard.engine import unwrap_compiled
from zeroshard.utils.version import check_version

check_version("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import AutocastKwargs, DistributedType  # noqa: E402

_WITHOUT_TRAINING: dict[str, Any] = {  # the options of a model without an optimizer: it has no steps to count or reduce
    "precision": None,
    "local_steps": 1,
    "outer_optimizer": None,
    "reduce_wire": None,
    "error_feedback": False,
}


class ZeroOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer around a :class:`zeroshard.ShardedOptimizer`: knows which fp16 steps were skipped."""

    def __init__(self, optimizer: zeroshard.ShardedOptimizer) -> None:
        super().__init__(optimizer, device_placement=False)  # placing would gather all states on every rank
        self._was_skipped: torch.Tensor | None = None  # 0-dim, on the device: read only if asked for

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step, if the gradients are complete."""
        before = self.optimizer.loss_scale
        before = None if before is None else before.clone()
        super().step(closure)
        if before is not None and self.gradient_state.sync_gradients:
            self._was_skipped = self.optimizer.loss_scale < before  # it is halved by an overflow and by nothing else

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient overflowed on some rank."""
        return self._was_skipped is not None and bool(self._was_skipped)


class ZeroAccelerator(Accelerator):
    """``accelerate.Accelerator`` with ZeRO stages 0 to 3 by zeroshard instead of DDP.

    ``zero`` has the options of :func:`zeroshard.shard`, ``{"stage": 3, "offload": "host"}``, or is a
    :class:`zeroshard.Config`. Everything else is Accelerate's. ``prepare`` changes models in place.
    ``mixed_precision="bf16"`` or "fp16" sets ``precision``.

    An ``Accelerator`` that other code has made becomes a ``ZeroAccelerator`` by :meth:`adopt`, before it has prepared
    anything.

    >>> accelerator = ZeroAccelerator(zero={"stage": 3}, cpu=True)
    >>> model = nn.Linear(2, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> accelerator.backward(model(torch.ones(1, 2)).sum())
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> zeroshard.is_sharded(model)
    True
    """

    zero: dict[str, Any]
    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, zero: Mapping[str, Any] | zeroshard.Config | None = None, **kwargs: Any) -> None:
        _check_no_other_strategy(kwargs)
        super().__init__(*args, **kwargs)
        self._configure(zero)

    @classmethod
    def adopt(
        cls, accelerator: Accelerator, zero: Mapping[str, Any] | zeroshard.Config | None = None
    ) -> ZeroAccelerator:
        """Turn an ``Accelerator`` that has prepared nothing yet into a ``ZeroAccelerator``, in place; return it."""
        if accelerator._models or accelerator._optimizers:
            raise ValueError("this Accelerator has prepared a model or an optimizer already: adopt it before prepare()")
        _check_no_other_strategy({})
        accelerator.__class__ = cls
        accelerator._configure(zero)
        adopted: ZeroAccelerator = accelerator
        return adopted

    def _configure(self, zero: Mapping[str, Any] | zeroshard.Config | None) -> None:
        self.zero = _resolve_options(self, zero)
        self.native_amp = self.mixed_precision != "no"  # on a CPU too, where Accelerate has no fp16
        self.scaler = None  # zeroshard's own loss scale is used
        # autocast's cache would keep a 16-bit copy of every fp32 parameter until the end of the forward
        handler = self.__dict__["autocast_handler"] or AutocastKwargs()
        self.autocast_handler = AutocastKwargs(enabled=handler.enabled, cache_enabled=False)

    # -- preparing ------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare all objects as Accelerate does; each model is sharded together with its optimizer."""
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        _check_disjoint(list(dict.fromkeys(map(unwrap_compiled, [*self._models, *models]))))
        sharded = self._shard_pairs(models, [optimizer for optimizer in optimizers if _is_plain(optimizer)])
        return super().prepare(*(sharded.get(id(arg), arg) for arg in args), device_placement=device_placement)

    def _shard_pairs(self, models: list[Any], optimizers: list[Any]) -> dict[int, zeroshard.ShardedOptimizer]:
        """Shard every model that one of the optimizers updates; return the sharded optimizers by id of the plain."""
        known = list(dict.fromkeys(map(unwrap_compiled, [*models, *self._models])))
        by_model: dict[nn.Module, list[torch.optim.Optimizer]] = {}
        for optimizer in optimizers:
            by_model.setdefault(_find_model(optimizer, known), []).append(optimizer)
        prepared = {id(prepared.optimizer) for prepared in self._sharded_optimizers()}
        for model, plain in by_model.items():
            for current in _optimizers_of(model):
                if id(current) in prepared:
                    raise ValueError(
                        f"{type(plain[0]).__name__} updates the same {type(model).__name__} as an optimizer that was "
                        f"prepared before, {type(current.inner).__name__}: pass all optimizers of a model to one call "
                        "of prepare(). To replace the earlier one, call accelerator.free_memory() first"
                    )
        pairs = [
            pair for model, plain in by_model.items() for pair in zip(plain, self._shard(model, plain), strict=True)
        ]
        return {id(plain): sharded for plain, sharded in pairs}

    def _shard(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[zeroshard.ShardedOptimizer]:
        """Shard a model in place; return its sharded optimizers."""
        if zeroshard.is_sharded(model):  # without these optimizers
            zeroshard.unwrap(model)
        if self.device_placement and not torch.distributed.is_initialized():
            _place(model, self.device)  # else shard() moves it, unit by unit
        if not optimizers:
            zeroshard.shard(model, **{**self.zero, **_WITHOUT_TRAINING})
            _allow_new_optimizer(model)
            return []
        if len(optimizers) == 1:
            return [zeroshard.shard(model, optimizers[0], **self.zero)[1]]
        if self.zero.get("precision") == "fp16":  # its optimizers share a loss scale: whose step was skipped?
            raise ValueError(
                f"{type(model).__name__} has {len(optimizers)} optimizers: with fp16 only one is supported"
            )
        several: Any = optimizers
        return list(zeroshard.shard(model, several, **self.zero)[1])

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model; shard it for inference if it is not sharded yet."""
        inner = unwrap_compiled(model)
        if next(inner.parameters(), None) is None:
            return super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[no-any-return]
        if not zeroshard.is_sharded(inner):
            self._shard(inner, [])
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)  # type: ignore[no-any-return]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Prepare an optimizer; shard its model with it, if the model was prepared without."""
        if _is_plain(optimizer):
            optimizer = self._shard_pairs([], [optimizer])[id(optimizer)]
        if isinstance(optimizer, zeroshard.ShardedOptimizer):
            optimizer = ZeroOptimizer(optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler. It may be of the plain optimizer, which has the same groups as the sharded one."""
        inner = getattr(scheduler, "optimizer", None)
        found = [prepared.optimizer for prepared in self._sharded_optimizers() if prepared.optimizer.inner is inner]
        if not found:
            return super().prepare_scheduler(scheduler)
        scheduler.optimizer = found[0]  # by which Accelerate finds the optimizer whose skipped steps count
        try:
            return super().prepare_scheduler(scheduler)
        finally:
            scheduler.optimizer = inner  # whose step() the scheduler watches

    def _sharded_optimizers(self) -> Iterator[ZeroOptimizer]:
        return (prepared for prepared in self._optimizers if isinstance(prepared, ZeroOptimizer))

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that was prepared. A model that you keep may get another optimizer."""
        for model in self._models:
            if zeroshard.is_sharded(model):
                _allow_new_optimizer(model)
        return super().free_memory(*objects)

    # -- training -------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Divide the loss by the accumulation steps, multiply it by the fp16 loss scale, and run backward."""
        scaled = [o.optimizer for o in self._sharded_optimizers() if o.optimizer.loss_scale is not None]
        if scaled:  # of several the lowest, because the loss may depend on all their models
            loss = (scaled[0] if len(scaled) == 1 else min(scaled, key=lambda o: float(o.loss_scale))).scale(loss)
        super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Sum gradients locally. Stages 2 and 3 reduce them anyway: else each rank would hold all of them."""
        inner = unwrap_compiled(model)
        if not zeroshard.is_sharded(inner):
            context = super().no_sync(model)
        else:
            is_partitioned = _engine_of(inner).gradients.is_partitioned
            context = nullcontext() if is_partitioned else zeroshard.no_sync(inner)
        with context:
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the gradients of sharded models are read without the loss scale."""

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip by the norm over all ranks, and return it. All ranks call it together."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self._find_optimizer(parameters)
        if optimizer is not None and norm_type in (2, float("inf")):
            return optimizer.clip_grad_norm_(max_norm, float(norm_type))
        norm: torch.Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clamp all elements of the gradients. All ranks call it together."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self._find_optimizer(parameters)
        if optimizer is not None:
            optimizer.clip_grad_value_(clip_value)
        else:
            super().clip_grad_value_(parameters, clip_value)

    def _find_optimizer(self, parameters: list[torch.Tensor]) -> zeroshard.ShardedOptimizer | None:
        """Return the sharded optimizer that updates exactly the trainable ones of these parameters."""
        given = {id(parameter) for parameter in parameters if parameter.requires_grad}
        for prepared in self._sharded_optimizers():
            groups = prepared.optimizer.param_groups
            if given == {id(p) for group in groups for p in group["params"] if p.requires_grad}:
                found: zeroshard.ShardedOptimizer = prepared.optimizer
                return found
        return None

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Raise if batches may be uneven: all ranks of a sharded model take every step together."""
        if not (self.even_batches if even_batches is None else even_batches):
            raise NotImplementedError(
                "join_uneven_inputs with even_batches=False: the ranks of a sharded model take every step together. "
                "Keep even_batches=True, Accelerate's default, or drop the last batch (drop_last=True)"
            )
        others = [joinable for joinable in joinables if not _is_sharded(joinable)]
        with super().join_uneven_inputs(others, even_batches):
            yield

    # -- saving ---------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the whole state dict in host memory on the first rank, and {} on the others. All ranks call it."""
        if zeroshard.is_sharded(model):
            return zeroshard.state_dict(model)
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Save everything that was prepared or registered; ``options`` are those of :func:`zeroshard.save`."""
        _check_options(self._models, options)
        save = partial(_save_sharded, self, list(self._models), [*self._save_model_state_pre_hook.values()], options)
        with self._without_sharded("_save_model_state_pre_hook", save):
            return super().save_state(output_dir, safe_serialization)

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        """Load what :meth:`save_state` saved on any number of ranks; ``options`` are :func:`zeroshard.load`'s.

        A directory that Accelerate's own DDP run has saved is loaded too.
        """
        map_location = {"map_location": options.pop("map_location")} if "map_location" in options else {}
        _check_options(self._models, options)
        prepared = list(self._models), list(self._optimizers)
        load = partial(_load_sharded, self, *prepared, [*self._load_model_state_pre_hook.values()], options)
        with self._without_sharded("_load_model_state_pre_hook", load):
            super().load_state(input_dir, load_kwargs, **map_location)

    @contextmanager
    def _without_sharded(self, hooks: str, hook: Callable[..., None]) -> Iterator[None]:
        """Hide sharded models and optimizers from Accelerate, and replace the hooks of the user by one of ours."""
        before = self._models, self._optimizers, getattr(self, hooks)
        self._models = [model for model in before[0] if not zeroshard.is_sharded(model)]
        self._optimizers = [o for o in before[1] if not isinstance(o, ZeroOptimizer)]
        setattr(self, hooks, OrderedDict(zeroshard=hook))
        try:
            yield
        finally:
            self._models, self._optimizers = before[:2]
            setattr(self, hooks, before[2])


def _save_sharded(
    accelerator: ZeroAccelerator,
    models: list[nn.Module],
    user_hooks: list[Callable[..., None]],
    options: dict[str, Any],
    _: Any,
    weights: list[Any],
    directory: str,
) -> None:
    """Call the user's hooks, then save what they have left; a hook of ``save_state``.

    ``weights`` are those of the models that are not sharded. The user's hooks get those of all ``models`` (on the first
    rank), and remove what they have saved themselves.
    """
    plain = iter(list(weights))
    all_weights = [
        next(plain) if not zeroshard.is_sharded(model) else accelerator.get_state_dict(model) if user_hooks else {}
        for model in models
    ]
    left = list(all_weights)
    for hook in user_hooks:
        hook(models, left, directory)
    weights[:] = [state for state in weights if any(state is other for other in left)]
    is_left = _on_first_rank([any(state is other for other in left) for state in all_weights])
    for model, has_weights, path in _sharded_models(models, is_left, directory):
        optimizer = _one_or_all(_optimizers_of(model))
        if has_weights or optimizer is not None:
            own = {"weights": has_weights, **_options_of(model, options)}
            extra = {"accelerator_step": accelerator.step, **(options.get("extra") or {})}
            zeroshard.save(path, model, optimizer, **{**own, "extra": extra})


def _load_sharded(
    accelerator: ZeroAccelerator,
    models: list[nn.Module],
    optimizers: list[Any],
    user_hooks: list[Callable[..., None]],
    options: dict[str, Any],
    plain: list[nn.Module],
    directory: str,
) -> None:
    """Call the user's hooks, then load what they have left; a hook of ``load_state``.

    The user's hooks get all ``models``, and remove those that they have loaded themselves.
    """
    left = list(models)
    for hook in user_hooks:
        hook(left, directory)
    plain[:] = [model for model in plain if any(model is other for other in left)]
    is_left = _on_first_rank([any(model is other for other in left) for model in models])
    sharded = list(_sharded_models(models, is_left, directory))
    if sharded and not any(path.is_dir() for _, _, path in sharded):
        _load_from_ddp(models, is_left, optimizers, Path(directory), options)
        return
    for model, has_weights, path in sharded:
        optimizer = _one_or_all(_optimizers_of(model))
        if has_weights or optimizer is not None:
            # Accelerate itself restores the RNG states
            own = {"weights": has_weights, "random": False, **_options_of(model, options)}
            loaded = zeroshard.load(path, model, optimizer, **own)
            # Accelerate reads it from the rank's own file, which a rank that did not exist at the save has not
            accelerator.step = loaded.extra.get("accelerator_step", accelerator.step)


def _check_options(models: list[nn.Module], options: dict[str, Any]) -> None:
    """Raise if an option of ``save_state`` or ``load_state`` does not fit all that is saved."""
    if options.get("keep") is not None:  # it would count the folders of several models as checkpoints
        raise ValueError(
            "keep= is for zeroshard.save: here ProjectConfiguration(total_limit=…) removes old checkpoints"
        )
    ema = options.get("ema")
    if ema is not None and not any(ema.is_of(_engine_of(model)) for model in models):
        raise ValueError("ema= averages none of the prepared models: make it with zeroshard.EMA after prepare()")


def _options_of(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``zeroshard.save`` or ``load`` for one of several models: ``ema`` is of one."""
    ema = options.get("ema")
    is_other = ema is not None and not ema.is_of(_engine_of(model))
    return {name: value for name, value in options.items() if not (is_other and name == "ema")}


def _engine_of(model: nn.Module) -> Any:
    sharded: Any = unwrap_compiled(model).__dict__.get("_zeroshard")
    return None if sharded is None else sharded.engine


def _on_first_rank(flags: list[bool]) -> list[bool]:
    """Return the first rank's flags: hooks often do everything on the main process."""
    found: list[bool] = all_gather_object(flags, dist.group.WORLD, "run the hooks", None)[0]
    return found


def _load_from_ddp(
    models: list[nn.Module], is_left: list[bool], optimizers: list[Any], directory: Path, options: dict[str, Any]
) -> None:
    """Load what Accelerate's own run has saved of models that were not sharded, if the user's hooks have left them."""
    for number, model in enumerate(models):
        ending = f"_{number}" if number else ""
        names = [f"model{ending}.safetensors", f"pytorch_model{ending}.bin"]
        path = next((directory / name for name in names if (directory / name).is_file()), None)
        if not zeroshard.is_sharded(model) or not is_left[number]:
            continue
        if path is None:
            raise ValueError(
                f"{directory} has no checkpoint of {type(model).__name__}: expected a folder 'zeroshard', or "
                f"{names[0]!r} or {names[1]!r} of Accelerate's own run. Was it saved with fewer models?"
            )
        zeroshard.load(path, model, **{"rename": lambda name: name.removeprefix("module."), **options})
    for number, optimizer in enumerate(optimizers):
        path = directory / (f"optimizer_{number}.bin" if number else "optimizer.bin")
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def _sharded_models(
    models: list[nn.Module], values: list[Any], directory: str
) -> Iterator[tuple[nn.Module, Any, Path]]:
    """Yield each sharded model once, with its value and the directory of its checkpoint."""
    found = {unwrap_compiled(model): value for model, value in zip(models, values, strict=True)}
    sharded = [(model, value) for model, value in found.items() if zeroshard.is_sharded(model)]
    for number, (model, value) in enumerate(sharded):
        yield model, value, Path(directory, f"zeroshard_{number}" if number else "zeroshard")


def _place(model: nn.Module, device: torch.device) -> None:
    """Move a model to the device of this process, the only one."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(device)
    elif device.type != "cpu":  # where shard() builds it without a process group
        raise ValueError(
            f"a {type(model).__name__} on the meta device is built on {device} only with a process group: start one "
            "process with torchrun --nproc-per-node 1, or build the model on the CPU"
        )


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is neither sharded nor prepared."""
    return not isinstance(optimizer, (AcceleratedOptimizer, zeroshard.ShardedOptimizer))


def _is_sharded(thing: Any) -> bool:
    """Return whether a model or an optimizer is sharded."""
    is_optimizer = isinstance(thing, (ZeroOptimizer, zeroshard.ShardedOptimizer))
    return is_optimizer or (isinstance(thing, nn.Module) and zeroshard.is_sharded(thing))


def _optimizers_of(model: nn.Module) -> list[Any]:
    """Return the sharded optimizers of a model."""
    sharded: Any = model.__dict__.get("_zeroshard")
    return [] if sharded is None else list(sharded.optimizers)


def _one_or_all(optimizers: list[Any]) -> Any:
    """Return what zeroshard's functions take: an optimizer, a list of several, or None."""
    return optimizers if len(optimizers) > 1 else optimizers[0] if optimizers else None


def _allow_new_optimizer(model: nn.Module) -> None:
    """Let the user make an optimizer for a model that is sharded without one; ``prepare`` shards them together."""
    for parameter in model.parameters():
        parameter.__dict__["_zeroshard"].allows_new_optimizer = True


def _check_disjoint(models: list[nn.Module]) -> None:
    """Raise if a parameter is in two models: each would be sharded, and reduce the gradient, on its own."""
    owners: dict[int, tuple[str, nn.Module]] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            first, owner = owners.setdefault(id(parameter), (name, model))
            if owner is not model:
                raise ValueError(
                    f"{first!r} of {type(owner).__name__} is also {name!r} of {type(model).__name__}, and a parameter "
                    "belongs to one prepared model: put both into one nn.ModuleList, prepare that, and make the "
                    "optimizer from its parameters. If one is a part of the other, prepare only the larger one"
                )


def _find_model(optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> nn.Module:
    """Return the model whose parameters an optimizer updates."""
    given = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    owners = {id(parameter): model for model in reversed(models) for parameter in model.parameters()}
    found = list(dict.fromkeys(owners[key] for key in given if key in owners))
    what = f"{type(optimizer).__name__}, with {len(given)} parameters,"
    strangers = [tuple(parameter.shape) for key, parameter in given.items() if key not in owners]
    if strangers or not found:
        raise ValueError(
            f"{what} updates {len(strangers)} parameters that are in no prepared model, the first of shape "
            f"{strangers[0] if strangers else None}: pass the model to prepare() together with its optimizer, and make "
            "the optimizer from the parameters of that model"
        )
    if len(found) > 1:
        names = " and ".join(type(model).__name__ for model in found)
        raise ValueError(
            f"{what} updates the parameters of {names}, and a sharded optimizer has one model: put them into one "
            "nn.ModuleList and prepare that, or make an optimizer for each"
        )
    return found[0]


_OTHER_STRATEGIES = (
    "deepspeed_plugin deepspeed_plugins fsdp_plugin megatron_lm_plugin torch_tp_plugin parallelism_config"
)


def _check_no_other_strategy(kwargs: Mapping[str, Any]) -> None:
    """Raise if DeepSpeed, FSDP or the like was chosen, by an argument or by ``accelerate launch``."""
    found = [f"{name}=" for name in _OTHER_STRATEGIES.split() if kwargs.get(name) is not None]
    for kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{kind}", "false").lower() == "true":
            found.append(f"ACCELERATE_USE_{kind}=true, which `accelerate launch` has set")
    if found:
        raise ValueError(
            f"ZeroAccelerator replaces DDP and works with no other strategy, got {found[0]}: launch with torchrun or "
            "`accelerate launch --multi_gpu`, and describe the sharding by ZeroAccelerator(zero={'stage': 3})"
        )


def _as_options(zero: Mapping[str, Any] | zeroshard.Config | None) -> dict[str, Any]:
    """Return ``zero`` as options by name; of a Config those that are not the default."""
    if isinstance(zero, zeroshard.Config):
        zero = {"config": zero}
    if zero is not None and not isinstance(zero, Mapping):
        raise TypeError(
            "zero is a dictionary of options of zeroshard.shard, as {'stage': 3}, or a zeroshard.Config, got "
            f"{zero!r}"
        )
    options = dict(zero or {})
    config = options.pop("config", None)
    if config is not None and not isinstance(config, zeroshard.Config):
        raise TypeError(f"config must be a zeroshard.Config, got {type(config).__name__}: pass options by name")
    chosen = {field.name: getattr(config, field.name) for field in fields(config)} if config is not None else {}
    defaults = vars(zeroshard.Config())
    return {**{name: value for name, value in chosen.items() if value != defaults[name]}, **options}


def _resolve_options(accelerator: Accelerator, zero: Mapping[str, Any] | zeroshard.Config | None) -> dict[str, Any]:
    """Return the options of ``zeroshard.shard`` that follow from ``zero`` and the accelerator's own arguments."""
    given = _as_options(zero)
    kind, precision = accelerator.distributed_type, accelerator.mixed_precision
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ValueError(f"ZeroAccelerator runs on CPUs and CUDA GPUs with DDP's launchers, got {kind}")
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks != accelerator.num_processes:
        raise ValueError(
            f"Accelerate counts {accelerator.num_processes} processes, but the process group has {ranks} ranks: each "
            "would get all data. On CPUs, pass cpu=True, or set ACCELERATE_USE_CPU=true"
        )
    if precision not in ("no", "bf16", "fp16"):
        hint = ": pass zero={'precision': 'fp8'} instead" if precision == "fp8" else ""
        raise ValueError(f"ZeroAccelerator's mixed_precision is 'no', 'bf16' or 'fp16', got {precision!r}{hint}")
    autocast = accelerator.__dict__["autocast_handler"]
    if autocast is not None and not autocast.enabled:  # DDP computes in fp32 then
        precision = "no"
    options = {**_handler_options(accelerator), **given}
    if precision != "no" and options.setdefault("precision", precision) != precision:
        raise ValueError(
            f"zero has precision {options['precision']!r}, but mixed_precision is {precision!r}: leave one of them out"
        )
    mesh = options.get("mesh")
    if options.get("tensor_plan") is not None or (mesh is not None and tensor_axis_name(mesh) is not None):
        raise ValueError(
            "zero has a tensor axis, whose ranks need equal batches, but Accelerate gives each rank its own: use "
            "zeroshard.shard in a loop of your own, or `zeroshard train --tensor`"
        )
    own = inspect.signature(zeroshard.shard).parameters
    zeroshard.Config(**{name: value for name, value in options.items() if name not in own and value != "auto"})
    return options


def _handler_options(accelerator: Accelerator) -> dict[str, Any]:
    """Return the options that Accelerate's handlers for DDP and GradScaler stand for; raise if there are none."""
    options: dict[str, Any] = {}
    ddp, scaler = accelerator.ddp_handler, accelerator.scaler_handler
    if ddp is not None:
        if str(ddp.comm_hook) != "no" or str(ddp.comm_wrapper) != "no":  # enums that equal no string
            raise ValueError(f"DDP's comm_hook {ddp.comm_hook!s} is not supported: set zero={{'reduce_dtype': 'bf16'}}")
        options["broadcast_buffers"] = ddp.broadcast_buffers
    if scaler is not None:
        fixed = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "enabled": True}
        if any(getattr(scaler, name) != value for name, value in fixed.items()):
            raise ValueError(
                "of GradScalerKwargs only init_scale can be set: zeroshard doubles the loss scale after 2000 steps "
                f"without overflow and halves it after one, got {scaler}"
            )
        options["loss_scale"] = scaler.init_scale
    return options

"""Strategies for Lightning: :class:`ZeroStrategy` for the Trainer, :class:`ZeroFabricStrategy` for Fabric.

Importing this module registers the names "zeroshard_stage_0" to "zeroshard_stage_3", and the same with "_offload", for
both. Checkpoints are Lightning's own files, so they load with any strategy.

[Note: Lightning's steps as forwards]
The Trainer calls ``training_step``, not ``forward``. The strategy runs it as the forward of the LightningModule, as
Lightning does for DDP: parameters that the step uses directly, and several modules that it calls, then belong to one
forward. In manual optimization the step also contains backwards and optimizer steps, so every module that it calls has
a forward of its own.

[Note: a model stays sharded after fit()]
With DDP, the model is plain again after ``fit()``. Here it stays sharded: making it plain would need the memory that
sharding saves, and ``trainer.save_checkpoint()`` needs the optimizer's shards. ``zeroshard.unwrap(model)`` makes it
plain; the next ``fit()`` does so by itself, because it makes a new optimizer.
"""

from __future__ import annotations

import os
import weakref
import zipfile
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard
from zeroshard.utils.version import check_version

check_version("lightning")

import lightning.pytorch as pl  # noqa: E402
from lightning.fabric.plugins import precision as fabric_precision  # noqa: E402
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO  # noqa: E402
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO  # noqa: E402
from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy  # noqa: E402
from lightning.fabric.strategies.registry import _StrategyRegistry  # noqa: E402
from lightning.fabric.strategies.strategy import _BackwardSyncControl  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import _MockOptimizer  # noqa: E402
from lightning.pytorch.plugins import precision as trainer_precision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

_SCALER_KEY = "MixedPrecision"  # under which Lightning saves the state of its GradScaler
_SHARD_ARGUMENTS = {"checkpoint", "inputs", "planning"}  # of shard(), besides the fields of Config
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


# ------------------------------------------------------------------------------------------ shared by both strategies


def _check_options(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of shard(); raise on those that Lightning decides."""
    if zero.get("precision") not in (None, "fp32", "fp8"):
        raise ValueError(
            f"precision={zero['precision']!r} is given to the strategy: give it to the Trainer or to Fabric, as "
            "'bf16-mixed' or '16-mixed'. The strategy accepts only 'fp32': fp32 weights, and autocast as with DDP; and "
            "'fp8', with 'bf16-mixed'"
        )
    for name in ("mesh", "tensor_plan"):
        if name in zero:
            raise ValueError(f"{name} is not supported in Lightning: all ranks of the job share the states")
    zeroshard.Config(**_config_options(zero, _SHARD_ARGUMENTS))
    return dict(zero)


def _config_options(zero: Mapping[str, Any], others: Container[str] = ()) -> dict[str, Any]:
    """Return the options that are not left to a plan, without those in ``others``."""
    is_planned = {name: isinstance(value, str) and value == "auto" for name, value in zero.items()}
    return {name: value for name, value in zero.items() if name not in others and not is_planned[name]}


def _shard_options(zero: Mapping[str, Any], precision: str, has_optimizer: bool) -> dict[str, Any]:
    """Return the options of shard() for a precision of Lightning.

    Without an optimizer there are no master weights: a 16-bit copy would be all that is left of the weights. And no
    steps, whose number decides when replicas are averaged.
    """
    options = dict(zero)
    given = options.pop("precision", None)
    if given != "fp32" and has_optimizer and precision in ("bf16-mixed", "16-mixed"):
        options["precision"] = given or ("bf16" if precision == "bf16-mixed" else "fp16")
    if not has_optimizer:
        options = _config_options(options, {*_SHARD_ARGUMENTS, "local_steps", "outer_optimizer"})
    return options


def _shard(
    module: nn.Module, optimizers: list[Optimizer], device: torch.device, zero: Mapping[str, Any], precision: str
) -> list[Optimizer]:
    """Shard a module in place, on the device; return its sharded optimizers, in the order given."""
    if device.type != "cpu" and "nccl" not in dist.get_backend_config():
        module.to(device)  # else shard() moves it there, one unit at a time
    options = _shard_options(zero, precision, bool(optimizers))
    are_several = len(optimizers) > 1  # a plan ("auto") takes a single one, in no list
    _, sharded = zeroshard.shard(module, *([optimizers] if are_several else optimizers), **options)
    module.to(device)  # what is no parameter: the states of metrics
    return list(sharded) if are_several else [sharded] if optimizers else []


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return the sharded optimizer inside Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's full state in host memory on rank 0, {} on the others. All ranks call it together."""
    optimizer = _unwrap_optimizer(optimizer)
    is_sharded = isinstance(optimizer, zeroshard.ShardedOptimizer)
    state: dict[str, Any] = optimizer.state_dict(rank=0) if is_sharded else optimizer.state_dict()
    return state


class _MappedCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files. Local ones are memory-mapped: the ranks of a node share the memory of a load."""

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if os.path.isfile(path) and zipfile.is_zipfile(path):
            loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        else:
            loaded = super().load_checkpoint(path, map_location, weights_only)
        return loaded


class _MappedCheckpoints:
    """Reads checkpoints with :class:`_MappedCheckpointIO`, unless the user has given a plugin for them."""

    _checkpoint_io: CheckpointIO | None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Return what reads and writes checkpoint files."""
        if self._checkpoint_io is None:
            self._checkpoint_io = _MappedCheckpointIO()
        io: CheckpointIO = super().checkpoint_io  # type: ignore[misc]
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io


def _load_weights(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Load a state dict into a sharded module; every rank reads its own shards of it."""
    own = tuple(f"{name}." if name else "" for name, child in module.named_modules() if _has_own_loading(child))
    if any(name.startswith(own) or not isinstance(value, Tensor) for name, value in state_dict.items()):
        with zeroshard.gathered(module, write_rank=0):
            module.load_state_dict(state_dict, strict=strict)
    else:
        zeroshard.load(state_dict, module, strict=strict)


def _has_own_loading(module: nn.Module) -> bool:
    """Return whether a module does more than copy tensors when it loads a state dict."""
    methods = [getattr(type(module), name) for name in ("load_state_dict", "_load_from_state_dict", "set_extra_state")]
    wrapped: list[Any] = list(module._load_state_dict_pre_hooks.values())
    hooks = [getattr(hook.hook, "func", hook.hook) for hook in wrapped]
    return any(not method.__module__.startswith(("torch.nn.", "zeroshard.")) for method in (*methods, *hooks))


def _register(registry: _StrategyRegistry, strategy: type[Any]) -> None:
    for stage in range(4):
        name, what = f"zeroshard_stage_{stage}", f"ZeRO stage {stage} by zeroshard"
        registry.register(name, strategy, description=what, override=True, stage=stage)
        what += ", optimizer states in host memory"
        registry.register(f"{name}_offload", strategy, description=what, override=True, stage=stage, offload="host")


# ------------------------------------------------------------------------------------------------------- the Trainer


class _ClipShards:
    """Clips gradients with the sharded optimizer, for a precision plugin of the Trainer."""

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        _unwrap_optimizer(optimizer).clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        _unwrap_optimizer(optimizer).clip_grad_value_(clip_val)


class _FullPrecision(_ClipShards, trainer_precision.Precision):
    """ "32-true"."""


class _HalfPrecision(_ClipShards, trainer_precision.HalfPrecision):
    """ "bf16-true" and "16-true": weights, gradients and optimizer states in 16 bits."""


class _DoublePrecision(_ClipShards, trainer_precision.DoublePrecision):
    """ "64-true"."""


class _MixedPrecision(_ClipShards, trainer_precision.MixedPrecision):
    """ "bf16-mixed" and "16-mixed": autocast, over 16-bit weights with fp32 master weights. fp16 has a loss scale."""

    def __init__(self, precision: Literal["16-mixed", "bf16-mixed"], device: str) -> None:
        super().__init__(precision, device)
        self.scaler = None  # the sharded optimizer has the loss scale

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Multiply the loss by the loss scale, which all optimizers share."""
        for optimizer in module.trainer.strategy.optimizers[:1]:
            tensor = optimizer.scale(tensor) if isinstance(optimizer, zeroshard.ShardedOptimizer) else tensor
        tensor = super().pre_backward(tensor, module)
        return tensor

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the loss scale as Lightning's own plugin does."""
        states = [state["loss_scale"] for state in checkpoint["optimizer_states"] if "loss_scale" in state]
        if states:
            scaler = torch.amp.GradScaler("cpu", init_scale=states[0][0]).state_dict()
            checkpoint[_SCALER_KEY] = {**scaler, "_growth_tracker": int(states[0][1])}


_TRAINER_PLUGINS: dict[type[Any], Callable[[Any], Any]] = {
    trainer_precision.Precision: lambda plugin: _FullPrecision(),
    trainer_precision.HalfPrecision: lambda plugin: _HalfPrecision(plugin.precision),
    trainer_precision.DoublePrecision: lambda plugin: _DoublePrecision(),
    trainer_precision.MixedPrecision: lambda plugin: _MixedPrecision(plugin.precision, plugin.device),
}


def _adapt_plugin(plugin: Any, known: Mapping[type[Any], Callable[[Any], Any]], zero: Mapping[str, Any]) -> Any:
    """Return the plugin that does for sharded models what a precision plugin of Lightning does."""
    if plugin is None or type(plugin).__module__ == __name__:
        return plugin
    if type(plugin) not in known:
        raise TypeError(
            f"the precision plugin {type(plugin).__name__} cannot be used with zeroshard: give precision='32-true', "
            "'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true'"
        )
    if zero.get("precision") == "fp8" and plugin.precision != "bf16-mixed":
        raise ValueError(
            "precision='fp8' of the strategy computes in bf16 between the float8 layers: give the Trainer or Fabric "
            f"precision='bf16-mixed', got {plugin.precision!r}"
        )
    if zero.get("precision") == "fp32" and plugin.precision == "16-mixed":
        raise ValueError(
            "precision='16-mixed' with fp32 weights would have no loss scale: leave out precision='fp32' of the "
            "strategy, or give 'bf16-mixed'"
        )
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and scaler.state_dict() != torch.amp.GradScaler(plugin.device).state_dict():
        raise ValueError(
            "the precision plugin has a GradScaler of its own, and zeroshard uses its own loss scale: leave it out, "
            "and give loss_scale=… to the strategy"
        )
    return known[type(plugin)](plugin)


def _check_callbacks(callbacks: list[Any]) -> None:
    """Raise if a callback copies, replaces or unfreezes parameters, which cannot be right while they are sharded."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{name} copies the model and would average weights that are partitioned, or rounded to 16 bits: "
                "average the shards with zeroshard.EMA(model, decay), in a callback of your own"
            )
        if isinstance(callback, BackboneFinetuning):
            raise ValueError(
                f"{name} unfreezes parameters during fit(), and those that are frozen when fit() starts have no "
                "gradients: set requires_grad before fit(), and call fit() once for each phase"
            )
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{name} replaces parameters of the model, which the optimizer would no longer update: prune the plain "
                "model, before fit() or after zeroshard.unwrap(model)"
            )


class ZeroStrategy(_MappedCheckpoints, DDPStrategy):
    """Trains with ZeRO in Lightning's Trainer.

    ``Trainer(strategy="zeroshard_stage_3")`` and ``Trainer(strategy=ZeroStrategy(stage=3))`` are the same. ``options``
    are those of :func:`zeroshard.shard`. The precision is the Trainer's: "bf16-mixed" and "16-mixed" compute with
    16-bit weights inside autocast and update fp32 master weights; with ``precision="fp32"`` here, "bf16-mixed" keeps
    fp32 weights, as DDP does. The others compute and update every parameter in its dtype.

    - ``accumulate_locally``: stages 2 and 3 with ``accumulate_grad_batches``: sum full gradients locally and reduce
      them once. Less communication, but the memory of full gradients. Stages 0 and 1 always do.
    - ``process_group_backend``: as in Lightning's DDPStrategy.

    >>> ZeroStrategy(stage=2, bucket_size=2**20).stage
    2
    >>> ZeroStrategy(stage=5)
    Traceback (most recent call last):
        ...
    ValueError: stage must be 0, 1, 2 or 3, got 5
    """

    optimizers: list[Optimizer]  # a property of Lightning's Strategy

    def __init__(
        self,
        stage: int | str = 3,
        *,
        accumulate_locally: bool = False,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        self.options = _check_options({"stage": stage, **options})
        self.stage, self.accumulate_locally = stage, accumulate_locally
        super().__init__(process_group_backend=process_group_backend)

    @property
    def precision_plugin(self) -> trainer_precision.Precision:
        """Return the precision plugin."""
        return self._precision_plugin if self._precision_plugin is not None else _FullPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: trainer_precision.Precision | None) -> None:
        self._precision_plugin = _adapt_plugin(plugin, _TRAINER_PLUGINS, self.options)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded into the shards."""
        return True

    # -- setup ----------------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create modules in host memory, or without memory: shard() moves or makes them, one unit at a time."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the optimizers and shard the model. To evaluate, without optimizers, or as fit() has left it."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module, is_fitting = self._module, trainer.state.fn == TrainerFn.FITTING
        _check_callbacks(trainer.callbacks if is_fitting else [])  # type: ignore[attr-defined]
        if zeroshard.is_sharded(module) and not is_fitting:
            return
        if zeroshard.is_sharded(module):  # a second fit() makes a new optimizer
            zeroshard.unwrap(module)
        if is_fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self._reset_optimizers_and_schedulers()
        if is_fitting:
            self.setup_optimizers(trainer)
        own = [optimizer for optimizer in self.optimizers if not isinstance(optimizer, _MockOptimizer)]
        sharded = _shard(module, own, self.root_device, self.options, self.precision_plugin.precision)
        for optimizer in sharded:
            vars(optimizer)["optimizer"] = own.pop(0)  # where LearningRateMonitor looks for the one of the schedulers
        self.optimizers = sharded or self.optimizers
        self.setup_precision_plugin()

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # -- steps ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training_step; see [Note: Lightning's steps as forwards]."""
        with self.precision_plugin.train_step_context():
            return self._run_step("training_step", args, kwargs, self._module.automatic_optimization)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation_step."""
        with self.precision_plugin.val_step_context():
            return self._run_step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test_step."""
        with self.precision_plugin.test_step_context():
            return self._run_step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict_step."""
        with self.precision_plugin.predict_step_context():
            return self._run_step("predict_step", args, kwargs)

    def _run_step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], as_forward: bool = True) -> Any:
        module = self._module
        step = getattr(module, name)
        if not as_forward:
            return step(*args, **kwargs)
        own = vars(module).get("forward")

        def restore() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own

        def forward() -> Any:
            restore()  # the step may call the module itself
            output = step(*args, **kwargs)
            return () if output is None else output  # not None: what a hook gets of a forward that has raised

        vars(module)["forward"] = forward
        try:
            output = module()  # without the batch, which a 16-bit model would cast
        finally:
            restore()
        return None if isinstance(output, tuple) and not output else output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, backwards sum gradients; the next one outside reduces the sum."""
        sums_locally = self.accumulate_locally or self.stage in (0, 1)
        with zeroshard.no_sync(self._module) if sums_locally else nullcontext():
            yield

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, whole and in host memory, on rank 0; {} on the others."""
        module = self._module
        return zeroshard.state_dict(module) if zeroshard.is_sharded(module) else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, whole and in host memory, on rank 0; {} on the others."""
        return _optimizer_state(optimizer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint."""
        _load_weights(self._module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states of a checkpoint, and the loss scale."""
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint has the states of {len(states)} optimizers, and configure_optimizers() has made "
                f"{len(self.optimizers)}: make the same ones in the same order, or load the weights only"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
            scaler = checkpoint.get(_SCALER_KEY)
            if scaler and isinstance(optimizer, zeroshard.ShardedOptimizer):
                optimizer.load_loss_scale([scaler["scale"], scaler["_growth_tracker"]])

    def teardown(self) -> None:
        """Leave the model sharded: see [Note: a model stays sharded after fit()]."""
        assert self.accelerator is not None and self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register the names of the stages."""
        _register(strategy_registry, cls)


ZeroStrategy.register_strategies(StrategyRegistry)


# ----------------------------------------------------------------------------------------------------------- Fabric


class _FabricMixedPrecision(fabric_precision.MixedPrecision):
    """ "bf16-mixed" and "16-mixed" in Fabric: see :class:`_MixedPrecision`."""

    def __init__(self, precision: Literal["16-mixed", "bf16-mixed"], device: str) -> None:
        super().__init__(precision, device)
        self.scaler = None  # the sharded optimizer has the loss scale
        # one of every model that was set up, with its model; weak: the user may drop them and set up others
        self._optimizers: list[tuple[weakref.ref[nn.Module], weakref.ref[Any]]] = []

    def add_optimizer(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Scale losses of the module by the optimizer's loss scale."""
        self._optimizers.append((weakref.ref(module), weakref.ref(optimizer)))

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run a backward of the loss, multiplied by the loss scale."""
        alive = [(own(), optimizer()) for own, optimizer in self._optimizers]
        scaled = [
            (own, optimizer) for own, optimizer in alive if optimizer is not None and optimizer.loss_scale is not None
        ]
        if model is not None:
            scaled = [(own, optimizer) for own, optimizer in scaled if own is _unwrap_module(model)]
        if len(scaled) > 1:
            raise ValueError(
                f"{len(scaled)} models were set up, each with its own loss scale: say which one the loss is of, "
                "fabric.backward(loss, model=model)"
            )
        for _, optimizer in scaled:
            tensor = optimizer.scale(tensor)
        super().backward(tensor, model, *args, **kwargs)


_FABRIC_PLUGINS: dict[type[Any], Callable[[Any], Any]] = {
    fabric_precision.Precision: lambda plugin: plugin,
    fabric_precision.HalfPrecision: lambda plugin: plugin,
    fabric_precision.DoublePrecision: lambda plugin: plugin,
    fabric_precision.MixedPrecision: lambda plugin: _FabricMixedPrecision(plugin.precision, plugin.device),
}


class _ForwardModule(nn.Module):
    """A module around a sharded one: Fabric then runs marked methods as forwards, as it does with DDP's wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _unwrap_module(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _ForwardModule) else module


class _NoSync(_BackwardSyncControl):
    """What ``fabric.no_backward_sync(model)`` does."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Sum gradients locally inside."""
        return zeroshard.no_sync(_unwrap_module(module)) if enabled else nullcontext()


class ZeroFabricStrategy(_MappedCheckpoints, FabricDDPStrategy):
    """Trains with ZeRO in Lightning's Fabric.

    ``Fabric(strategy="zeroshard_stage_3")`` and ``Fabric(strategy=ZeroFabricStrategy(stage=3))`` are the same. A model
    and its optimizers are set up together: ``model, optimizer = fabric.setup(model, optimizer)``; a model without an
    optimizer is for evaluation. ``options`` and precision are as in :class:`ZeroStrategy`.

    >>> ZeroFabricStrategy(stage=1).options
    {'stage': 1}
    """

    def __init__(
        self,
        stage: int | str = 3,
        *,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        **options: Any,
    ) -> None:
        self.options = _check_options({"stage": stage, **options})
        super().__init__(process_group_backend=process_group_backend, start_method=start_method)
        self._backward_sync_control = _NoSync()

    @property
    def precision(self) -> fabric_precision.Precision:
        """Return the precision plugin."""
        return self._precision if self._precision is not None else fabric_precision.Precision()

    @precision.setter
    def precision(self, plugin: fabric_precision.Precision | None) -> None:
        self._precision = _adapt_plugin(plugin, _FABRIC_PLUGINS, self.options)

    # -- setup ----------------------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Create a module in host memory, or without memory: shard() moves or makes it, one unit at a time."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else nullcontext())
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: shard() moves the module."""

    def setup_module(self, module: nn.Module) -> Any:
        """Shard a module without an optimizer, for evaluation."""
        _shard(module, [], self.root_device, self.options, self.precision.precision)
        return _ForwardModule(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise: the optimizer is needed when the module is sharded."""
        raise RuntimeError(
            "zeroshard shards a model together with its optimizer: call fabric.setup(model, optimizer) instead of "
            "setup_module() and setup_optimizers()"
        )

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard a module and its optimizers."""
        sharded = _shard(module, optimizers, self.root_device, self.options, self.precision.precision)
        if isinstance(self.precision, _FabricMixedPrecision):
            self.precision.add_optimizer(module, sharded[0])  # all have the model's loss scale
        return _ForwardModule(module), sharded, scheduler

    # -- steps and checkpoints ------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip gradients by their global norm; return the norm before clipping.

        With a loss scale, a norm that is not finite is no error: the step is skipped and the scale is halved.
        """
        is_error = error_if_nonfinite and optimizer.loss_scale is None
        norm: Tensor = optimizer.clip_grad_norm_(max_norm, float(norm_type), is_error)
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clip gradients by value."""
        optimizer.clip_grad_value_(clip_val)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's state dict, whole and in host memory, on rank 0; {} on the others."""
        module = _unwrap_module(module)
        return zeroshard.state_dict(module) if zeroshard.is_sharded(module) else super().get_module_state_dict(module)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, whole and in host memory, on rank 0; {} on the others."""
        return _optimizer_state(optimizer)

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state dict into a sharded module."""
        module = _unwrap_module(module)
        if zeroshard.is_sharded(module):
            _load_weights(module, state_dict, strict)
        else:
            module.load_state_dict(state_dict, strict=strict)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register the names of the stages."""
        _register(strategy_registry, cls)


ZeroFabricStrategy.register_strategies(STRATEGY_REGISTRY)

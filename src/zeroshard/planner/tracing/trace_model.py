"""Run a model on meta tensors as one rank would run it on a device. See [Note: tracing]."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from zeroshard.activations import CheckpointedForward, checkpointed_forwards, flatten_arguments, select_blocks
from zeroshard.config.config import Config
from zeroshard.float8 import install_float8_layers
from zeroshard.planner.tracing.inputs import Inputs, LossError, LossFn, compute_loss, model_arguments
from zeroshard.planner.tracing.meta_device import FusedAttentionMode, KnownValues
from zeroshard.planner.tracing.op_cost import iter_tensors
from zeroshard.planner.tracing.recorder import OpRecorder, ScheduleRecorder
from zeroshard.planner.tracing.tp_collectives import hook_tp_collectives
from zeroshard.planner.tracing.trace import Trace
from zeroshard.sharding import Precision, find_cast_blocks, find_float8_layers, find_repeated_blocks, plan_units
from zeroshard.tensor_parallel import tensor_plan_for
from zeroshard.utils.tree import cast_floats, tree_map_tensors

CheckpointMode = Literal["none", "recompute", "host"]
CHECKPOINT_MODES: tuple[CheckpointMode, ...] = ("none", "recompute", "host")


class UntraceableError(RuntimeError):
    """A model cannot run on the meta device."""


def trace_model(
    model: nn.Module,
    inputs: Inputs = None,
    *,
    micro_batch: int = 1,
    sequence: int | None = None,
    loss: LossFn = None,
    tensor: int = 1,
    checkpoint: CheckpointMode = "none",
    partition_activations: bool = True,
    device_kind: str = "cuda",
    **options: Any,
) -> Trace:
    """Trace one forward and backward of a model on the meta device.

    The model may be on any device, including meta, and is not changed. ``inputs`` and ``loss`` are as in
    :func:`zeroshard.plan`; ``tensor`` is the tensor-parallel degree. ``checkpoint`` is what blocks keep for backward:
    all activations ("none"), their inputs ("recompute"), or their inputs in host memory ("host"). With
    ``partition_activations``, each tensor-parallel rank keeps a shard of these inputs. ``device_kind`` selects the
    kernels, ``options`` are those of :class:`zeroshard.Config`.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> found = trace_model(model, torch.empty(1, 64), micro_batch=16)
    >>> sum(op.flops for op in found.ops) == 16 * 2 * (64 * 64 * 2 + 64 * 8 * 3)  # but the first has no input gradient
    True
    """
    config = Config(**{"precision": "fp32", **options})
    unit_specs = plan_units(model, config.units, config.bucket_size)
    recorder = OpRecorder()
    meta_model = _meta_copy(model, config, tensor, recorder)
    kept = KeptInputs(tensor if partition_activations else 1, recorder)
    if checkpoint != "none":
        if next(find_repeated_blocks(model), None) is None:
            raise ValueError(
                f"{type(model).__name__} has no repeated blocks, so the planner cannot checkpoint its activations: "
                'use checkpoint="none", or call checkpoint_activations on the model first'
            )
        _checkpoint_blocks(meta_model, kept)
    args, kwargs = tree_map_tensors(
        model_arguments(meta_model, inputs, micro_batch, sequence), partial(_to_meta, values=recorder.known_values)
    )
    schedule = ScheduleRecorder(meta_model, unit_specs, recorder)
    batch = list(iter_tensors((args, kwargs)))
    recorder.ignore_tensors(*meta_model.parameters(), *meta_model.buffers(), *batch)
    try:
        with FusedAttentionMode(device_kind), recorder:
            value = compute_loss(meta_model(*args, **kwargs), loss)
            schedule.begin_backward()
            _run_backward(value)
            del value
            schedule.end_backward()
    except LossError:
        raise
    except Exception as error:
        raise UntraceableError(_untraceable_message(model, error)) from error
    finally:
        schedule.remove_hooks()
    return Trace(
        tuple(recorder.events),
        tuple(spec.name for spec in unit_specs),
        micro_batch,
        input_bytes=float(sum(tensor.nbytes for tensor in batch)),
        buffer_bytes=float(sum(buffer.nbytes for buffer in meta_model.buffers())),
        kept_input_bytes=tuple(kept.nbytes),
    )


def _run_backward(value: torch.Tensor) -> None:
    """Run backward with modes active: torch's own call disables them, but recomputed attention needs its mode."""
    ones = torch.ones_like(value)
    _engine_run_backward((value,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _to_meta(tensor: torch.Tensor, values: KnownValues) -> torch.Tensor:
    """Return a meta tensor; record the values if models may read them."""
    if tensor.is_meta:
        return tensor
    meta_tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    values.set(meta_tensor, tensor)
    return meta_tensor.requires_grad_(tensor.requires_grad)


def _untraceable_message(model: nn.Module, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if not any(word in str(error) for word in ("meta", "Meta", "data-dependent", "DataDependent")):
        return (
            f"{type(model).__name__} raised {reason}\n"
            "The planner runs the model on tensors without values (the meta device). Check that it runs with inputs of "
            "these shapes, or pass inputs=, a function of the batch size that returns the model's arguments"
        )
    return (
        f"{type(model).__name__} cannot run on tensors without values (the meta device): {reason}\n"
        "The planner needs a forward and backward whose shapes follow from shapes alone. Do not branch on a tensor's "
        "values (.item(), .tolist(), `if tensor:`, nonzero, boolean masks) while planning. Integer and boolean inputs "
        "may be read: pass inputs= with real values, not on the meta device. To predict only the memory of the states, "
        "use zeroshard.planner.predict_memory"
    )


def _meta_copy(model: nn.Module, config: Config, tensor: int, recorder: OpRecorder) -> nn.Module:
    """Return a meta copy as one rank computes it: with compute dtypes, casts, and its TP shard of each layer."""
    precision, plan = Precision(model, config), None
    if tensor > 1:
        plan = tensor_plan_for(model)
        if plan is None:
            raise ValueError(
                f"no tensor-parallel plan is known for {type(model).__name__} (tensor degree {tensor}): supported are "
                "zeroshard's GPT and Hugging Face's Llama and GPT-2"
            )
        plan.check_divisible(tensor)
    tp_shards = plan.tp_shards(model, tensor) if plan is not None else {}
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        dtype = precision.compute_dtype(name, parameter)
        if name in tp_shards:
            meta_tensor = torch.empty(tp_shards[name].local_shape, dtype=dtype, device="meta")
        else:
            meta_tensor = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(meta_tensor, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = meta_tensor = torch.empty_like(buffer, device="meta", requires_grad=False)
        recorder.known_values.set(meta_tensor, buffer)
    meta_model = _deepcopy(model, memo)
    if not meta_model.training:  # a training model may have submodules in eval mode on purpose
        meta_model.train()
    if plan is not None:
        hook_tp_collectives(meta_model, plan, tensor, recorder)
    float8 = find_float8_layers(model, config, precision, tp_shards)
    if float8 is not None:
        install_float8_layers(meta_model, float8.names, {})
    if config.compute_dtype is not None:
        _register_casts(meta_model, config, config.compute_dtype, precision.fp32_modules)
    return meta_model


def _deepcopy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UntraceableError(
            f"{type(model).__name__} cannot be copied with copy.deepcopy, which planning needs: {error}"
        ) from error


def _register_casts(model: nn.Module, config: Config, dtype: torch.dtype, fp32_modules: list[str]) -> None:
    """Cast the inputs of the model and its blocks, and the inputs and outputs of modules that stay in fp32."""

    def cast_to(dtype: torch.dtype) -> Any:
        return lambda _, args, kwargs: (cast_floats(args, dtype), cast_floats(kwargs, dtype))

    for name in fp32_modules:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(cast_to(torch.float32), with_kwargs=True)
        module.register_forward_hook(lambda _, args, output: cast_floats(output, dtype))
    for module in (model, *find_cast_blocks(model, config)) if config.cast_inputs else ():
        module.register_forward_pre_hook(cast_to(dtype), with_kwargs=True)


class KeptInputs:
    """The inputs of recomputed blocks that a rank keeps: see [Note: P_a] in ``activations/block_inputs.py``."""

    def __init__(self, ranks: int, recorder: OpRecorder) -> None:
        self.nbytes: list[float] = []
        self._ranks, self._recorder = ranks, recorder
        self._seen: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Keep an input: only its shape, stride and dtype are stored."""
        if tensor.grad_fn is None or tensor.numel() == 0:
            return tensor
        if tensor not in self._seen:
            self._seen[tensor] = True
            nbytes = float(-(-tensor.numel() // self._ranks) * tensor.itemsize)
            self.nbytes.append(nbytes)
            self._recorder.record_copy(nbytes)
        return tensor.shape, tensor.stride(), tensor.dtype

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a kept input as a copy in new memory."""
        if isinstance(packed, torch.Tensor):
            return packed
        shape, stride, dtype = packed
        full = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if self._ranks > 1:
            self._recorder.record_collective("all-gather", full.nbytes)
        else:
            self._recorder.record_copy(full.nbytes)
        return full


def _checkpoint_blocks(model: nn.Module, kept: KeptInputs) -> None:
    """Make a model's blocks keep only their inputs."""

    def checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors, run = flatten_arguments(forward, args, kwargs)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            return checkpoint(run, *tensors, use_reentrant=False)

    for block in select_blocks(model, None).values():
        block.__dict__["forward"] = partial(checkpointed, block.forward)


# ------------------------------------------------------------------- models that already use activation checkpointing


def strip_checkpointing(model: nn.Module, tensor: int = 1) -> tuple[nn.Module, CheckpointMode]:
    """Return the model to plan with and its checkpoint mode, if it may use activation checkpointing already.

    The planner itself decides what blocks keep, so :func:`zeroshard.checkpoint_activations` is undone on a copy. A
    model stays checkpointed, on a meta copy, if it checkpoints other blocks than the planner would, has a policy, or
    keeps full inputs although the tensor-parallel degree ``tensor`` is above 1. The mode is then "none": the planner
    adds no checkpointing of its own.

    >>> import zeroshard
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    >>> strip_checkpointing(model) == (model, "none")
    True
    >>> strip_checkpointing(zeroshard.checkpoint_activations(model, offload=True))[1]
    'host'
    """
    if not checkpointed_forwards(model):
        return model, "none"
    meta_model = _deepcopy(model, meta_memo(model))
    wrapped = checkpointed_forwards(meta_model)
    is_default = (
        next(find_repeated_blocks(meta_model), None) is not None
        and wrapped.keys() == select_blocks(meta_model, None).keys()
        and all(_is_default_checkpointing(forward, tensor) for forward in wrapped.values())
    )
    is_offloaded = any(forward.context.has_offload for forward in wrapped.values())
    for forward in wrapped.values():
        if is_default:
            forward.restore()
        else:
            forward.save_full_on_device()  # a single rank needs no communication for its inputs
    if not is_default:
        return meta_model, "none"
    return meta_model, "host" if is_offloaded else "recompute"


def meta_memo(model: nn.Module) -> dict[int, Any]:
    """Return the memo that makes ``copy.deepcopy`` replace a model's parameters by meta parameters."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        meta_tensor = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(meta_tensor, requires_grad=parameter.requires_grad)
    memo |= {id(buffer): buffer for buffer in model.buffers()}  # shared: tracing copies them itself
    return memo


def _is_default_checkpointing(forward: CheckpointedForward, tensor: int) -> bool:
    """Return whether a block keeps what the planner assumes: a shard of its input on each tensor-parallel rank."""
    partition = forward.context.partition
    if isinstance(partition, DeviceMesh):
        return forward.policy is None and partition.size() == tensor
    return forward.policy is None and (tensor == 1 or partition is not False)

"""Run a model on meta tensors as one rank would run it on a device. See [Note: tracing]."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from zeroshard.activations import flatten_arguments, select_blocks
from zeroshard.config.config import Config
from zeroshard.planner.tracing.attention import FusedAttentionMode
from zeroshard.planner.tracing.inputs import Inputs, LossError, LossFn, compute_loss, model_arguments
from zeroshard.planner.tracing.known_values import KnownValues
from zeroshard.planner.tracing.recorder import OpRecorder, ScheduleRecorder
from zeroshard.planner.tracing.tp_collectives import hook_tp_collectives
from zeroshard.planner.tracing.trace import Trace
from zeroshard.sharding import Precision, find_repeated_blocks, plan_units
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
    num_blocks = 0
    if checkpoint != "none":
        if next(find_repeated_blocks(model), None) is None:
            raise ValueError(
                f"this {type(model).__name__} has no repeated blocks, whose inputs could be kept instead of all "
                'activations: give checkpoint="none", or call checkpoint_activations yourself'
            )
        num_blocks = _checkpoint_blocks(meta_model, kept)
    args, kwargs = tree_map_tensors(
        model_arguments(meta_model, inputs, micro_batch, sequence), partial(_to_meta, values=recorder.known_values)
    )
    schedule = ScheduleRecorder(meta_model, unit_specs, recorder)
    tensors = [*meta_model.parameters(), *meta_model.buffers(), *_tensor_leaves((args, kwargs))]
    recorder.ignore_tensors(*tensors)
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
        input_bytes=float(sum(tensor.nbytes for tensor in _tensor_leaves((args, kwargs)))),
        buffer_bytes=float(sum(buffer.nbytes for buffer in meta_model.buffers())),
        kept_input_bytes=tuple(kept.nbytes),
        num_recomputed_blocks=num_blocks,
    )


def _run_backward(value: torch.Tensor) -> None:
    """Run backward with modes active: torch's own call disables them, but recomputed attention needs its mode."""
    ones = torch.ones_like(value)
    _engine_run_backward((value,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _tensor_leaves(value: Any) -> list[torch.Tensor]:
    leaves: list[torch.Tensor] = []
    collect = leaves.append
    torch.utils._pytree.tree_map_only(torch.Tensor, collect, value)
    return leaves


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
            "A plan runs it on tensors without values (the meta device). See whether it runs at all with inputs of "
            "these shapes: give inputs=, a function of the batch that returns what the model is called with"
        )
    return (
        f"{type(model).__name__} cannot be run on tensors without values (the meta device): {reason}\n"
        "A plan needs a forward and backward whose shapes follow from shapes. Decide nothing by a tensor's values "
        "(.item(), .tolist(), `if tensor:`, nonzero, boolean masks) while planning. Integers and booleans that the "
        "model is given may be looked at: give inputs= with values, not on the meta device. Or plan the states alone, "
        "with zeroshard.planner.state_sizes.predict_memory"
    )


def _meta_copy(model: nn.Module, config: Config, tensor: int, recorder: OpRecorder) -> nn.Module:
    """Return a meta copy as one rank computes it: with compute dtypes, casts, and its TP shard of each layer."""
    precision, plan = Precision(model, config), None
    if tensor > 1:
        plan = tensor_plan_for(model)
        if plan is None:
            raise ValueError(
                f"no plan is known to divide a {type(model).__name__} over {tensor} ranks of a tensor axis: known are "
                "zeroshard's GPT and Hugging Face's Llama and GPT-2"
            )
        plan.check_divisible(tensor)
    tp_shards = plan.tp_shards(model, tensor) if plan is not None else {}
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        dtype = precision.compute_dtype(name, parameter)
        shape, stride = parameter.shape, parameter.stride()
        if name in tp_shards:
            shape = tp_shards[name].local_shape
            stride = torch.empty(shape, device="meta").stride()
        meta_tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(meta_tensor, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = meta_tensor = torch.empty_like(buffer, device="meta", requires_grad=False)
        recorder.known_values.set(meta_tensor, buffer)
    try:
        meta_model = copy.deepcopy(model, memo)
    except Exception as error:
        raise UntraceableError(f"{type(model).__name__} cannot be copied, which planning needs: {error}") from error
    if not meta_model.training:  # a training model may have submodules in eval mode on purpose
        meta_model.train()
    if plan is not None:
        hook_tp_collectives(meta_model, plan, tensor, recorder)
    if config.compute_dtype is not None:
        _register_casts(meta_model, config.compute_dtype, precision.fp32_modules, config.cast_inputs)
    return meta_model


def _register_casts(paper: nn.Module, dtype: torch.dtype, fp32_modules: list[str], inputs: bool) -> None:
    """Cast the model's inputs, and the inputs and outputs of modules that stay in fp32."""
    for name in fp32_modules:
        module = paper.get_submodule(name)
        module.register_forward_pre_hook(_cast_hook(torch.float32), with_kwargs=True)
        module.register_forward_hook(lambda _, args, output: cast_floats(output, dtype))
    if inputs:
        paper.register_forward_pre_hook(_cast_hook(dtype), with_kwargs=True)


def _cast_hook(dtype: torch.dtype) -> Any:
    return lambda _, args, kwargs: (cast_floats(args, dtype), cast_floats(kwargs, dtype))


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


def _checkpoint_blocks(paper: nn.Module, kept: KeptInputs) -> int:
    """Make a model's blocks keep only their inputs; return the number of blocks."""
    blocks = select_blocks(paper, None)
    for block in blocks.values():
        block.__dict__["forward"] = _checkpointed_forward(block.forward, kept)
    return len(blocks)


def _checkpointed_forward(forward: Any, kept: KeptInputs) -> Any:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        tensors, run = flatten_arguments(forward, args, kwargs)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            return checkpoint(run, *tensors, use_reentrant=False)

    return checkpointed

"""Tracing: running a model on meta tensors, as one rank would run it on a device. See [Note: tracing]."""

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

from zeroshard.activations.blocks import select_blocks
from zeroshard.activations.checkpoint import flatten_arguments
from zeroshard.config.config import Config
from zeroshard.planner.tracing.attention import FusedAttentionMode
from zeroshard.planner.tracing.inputs import Inputs, LossError, LossFn, compute_loss, model_arguments
from zeroshard.planner.tracing.known_values import KnownValues
from zeroshard.planner.tracing.recorder import OpRecorder, ScheduleRecorder
from zeroshard.planner.tracing.tp_collectives import hook_tp_collectives
from zeroshard.planner.tracing.trace import Trace
from zeroshard.sharding.precision import Precision, cast_floats, tree_map_tensors
from zeroshard.sharding.units import find_repeated_blocks, plan_units
from zeroshard.tensor_parallel.plans import tensor_plan_for

CheckpointMode = Literal["none", "recompute", "host"]
CHECKPOINT_MODES: tuple[CheckpointMode, ...] = ("none", "recompute", "host")


class UntraceableError(RuntimeError):
    """A model cannot be run without memory."""


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
    """Run one forward and backward of a model without memory and note what it would take.

    The model may be anywhere, the meta device included, and is not changed. ``inputs`` and ``loss`` are as
    :func:`zeroshard.plan` takes them; ``tensor`` ranks divide each layer; ``checkpoint`` says what is kept of blocks:
    everything, their inputs ("recompute"), or their inputs in host memory ("host"), of which each tensor rank has its
    part where ``partition`` says so. ``kind`` is that of the device whose kernels are meant, ``options`` are those of
    :class:`zeroshard.Config`.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> found = trace_model(model, torch.empty(1, 64), micro_batch=16)
    >>> sum(op.flops for op in found.ops) == 16 * 2 * (64 * 64 * 2 + 64 * 8 * 3)  # but the first has no input gradient
    True
    """
    config = Config(**{"precision": "fp32", **options})
    plans = plan_units(model, config.units, config.bucket_size)
    recorder = OpRecorder()
    paper = _meta_copy(model, config, tensor, recorder)
    kept = KeptInputs(tensor if partition_activations else 1, recorder)
    blocks = 0
    if checkpoint != "none":
        if next(find_repeated_blocks(model), None) is None:
            raise ValueError(
                f"this {type(model).__name__} has no repeated blocks, whose inputs could be kept instead of all "
                'activations: give checkpoint="none", or call checkpoint_activations yourself'
            )
        blocks = _checkpoint_blocks(paper, kept)
    args, kwargs = tree_map_tensors(
        model_arguments(paper, inputs, micro_batch, sequence), partial(_to_meta, values=recorder.known_values)
    )
    walk = ScheduleRecorder(paper, plans, recorder)
    tensors = [*paper.parameters(), *paper.buffers(), *_tensor_leaves((args, kwargs))]
    recorder.ignore_tensors(*tensors)
    try:
        with FusedAttentionMode(device_kind), recorder:
            value = compute_loss(paper(*args, **kwargs), loss)
            walk.end_forward()
            _run_backward(value)
            del value
            walk.end_backward()
    except LossError:
        raise
    except Exception as error:
        raise UntraceableError(_untraceable_message(model, error)) from error
    finally:
        walk.remove_hooks()
    return Trace(
        tuple(recorder.events),
        tuple(plan.name for plan in plans),
        micro_batch,
        input_bytes=float(sum(tensor.nbytes for tensor in _tensor_leaves((args, kwargs)))),
        buffer_bytes=float(sum(buffer.nbytes for buffer in paper.buffers())),
        kept_input_bytes=tuple(kept.nbytes),
        num_recomputed_blocks=blocks,
    )


def _run_backward(value: torch.Tensor) -> None:
    """Run backward. What torch offers for it switches modes off, and a recomputed block's attention wants its own."""
    ones = torch.ones_like(value)
    _engine_run_backward((value,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _tensor_leaves(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    cast = found.append
    torch.utils._pytree.tree_map_only(torch.Tensor, cast, value)
    return found


def _to_meta(tensor: torch.Tensor, values: KnownValues) -> torch.Tensor:
    """A tensor without memory; what it holds is taken note of where models may look at it."""
    if tensor.is_meta:
        return tensor
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    values.set(bare, tensor)
    return bare.requires_grad_(tensor.requires_grad)


def _untraceable_message(model: nn.Module, error: Exception) -> str:
    said = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
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
    """A copy without memory, as one rank computes it: compute dtypes, casts, and its share of each layer."""
    precision, plan = Precision(model, config), None
    if tensor > 1:
        plan = tensor_plan_for(model)
        if plan is None:
            raise ValueError(
                f"no plan is known to divide a {type(model).__name__} over {tensor} ranks of a tensor axis: known are "
                "zeroshard's GPT and Hugging Face's Llama and GPT-2"
            )
        plan.check_divisible(tensor)
    shares = plan.tp_shards(model, tensor) if plan is not None else {}
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        dtype = precision.compute_dtype(name, parameter)
        shape, stride = parameter.shape, parameter.stride()
        if name in shares:
            shape = shares[name].local_shape
            stride = torch.empty(shape, device="meta").stride()
        bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(bare, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = bare = torch.empty_like(buffer, device="meta", requires_grad=False)
        recorder.known_values.set(bare, buffer)
    try:
        paper = copy.deepcopy(model, memo)
    except Exception as error:
        raise UntraceableError(f"{type(model).__name__} cannot be copied, which planning needs: {error}") from error
    if not paper.training:  # else parts may be in another mode on purpose
        paper.train()
    if plan is not None:
        hook_tp_collectives(paper, plan, tensor, recorder)
    if config.compute_dtype is not None:
        _register_casts(paper, config.compute_dtype, precision.fp32_modules, config.cast_inputs)
    return paper


def _register_casts(paper: nn.Module, dtype: torch.dtype, fp32_modules: list[str], inputs: bool) -> None:
    """Cast what goes into the model, and what goes into and out of modules that stay in fp32."""
    for name in fp32_modules:
        module = paper.get_submodule(name)
        module.register_forward_pre_hook(_cast_hook(torch.float32), with_kwargs=True)
        module.register_forward_hook(lambda _, args, output: cast_floats(output, dtype))
    if inputs:
        paper.register_forward_pre_hook(_cast_hook(dtype), with_kwargs=True)


def _cast_hook(dtype: torch.dtype) -> Any:
    return lambda _, args, kwargs: (cast_floats(args, dtype), cast_floats(kwargs, dtype))


class KeptInputs:
    """The inputs of recomputed blocks that a rank would keep: see [Note: P_a] in ``activations/block_inputs.py``."""

    def __init__(self, ranks: int, recorder: OpRecorder) -> None:
        self.nbytes: list[float] = []
        self._ranks, self._recorder = ranks, recorder
        self._seen: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Keep an input: only its shape is."""
        if tensor.grad_fn is None or tensor.numel() == 0:
            return tensor
        if tensor not in self._seen:
            self._seen[tensor] = True
            nbytes = float(-(-tensor.numel() // self._ranks) * tensor.itemsize)
            self.nbytes.append(nbytes)
            self._recorder.record_copy(nbytes)
        return tensor.shape, tensor.stride(), tensor.dtype

    def unpack(self, packed: Any) -> torch.Tensor:
        """Give an input back: a copy, in memory of its own."""
        if isinstance(packed, torch.Tensor):
            return packed
        shape, stride, dtype = packed
        whole = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if self._ranks > 1:
            self._recorder.record_collective("all-gather", whole.nbytes)
        else:
            self._recorder.record_copy(whole.nbytes)
        return whole


def _checkpoint_blocks(paper: nn.Module, kept: KeptInputs) -> int:
    """Have a model's blocks keep their inputs alone; return how many they are."""
    blocks = select_blocks(paper, None)
    for block in blocks.values():
        block.__dict__["forward"] = _checkpointed_forward(block.forward, kept)
    return len(blocks)


def _checkpointed_forward(forward: Any, kept: KeptInputs) -> Any:
    def run_again(*args: Any, **kwargs: Any) -> Any:
        tensors, run = flatten_arguments(forward, args, kwargs)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            return checkpoint(run, *tensors, use_reentrant=False)

    return run_again

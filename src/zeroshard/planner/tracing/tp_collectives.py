"""Simulate one tensor-parallel rank of a model: its TP shards of the layers, and the collectives between them.

No process group is needed. A tensor-parallel module has this rank's TP shard of its parameters. Where torch's parallel
styles would communicate, an autograd function records the collective and continues with tensors of the right shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput

from zeroshard.planner.tracing.recorder import OpRecorder
from zeroshard.tensor_parallel import COLWISE_STYLES, ROWWISE_STYLES, TensorPlan


class _CopyToTensorParallelRegion(torch.autograd.Function):
    """Identity in forward; all-reduce of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorder: OpRecorder) -> torch.Tensor:
        ctx.recorder = recorder
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.recorder.record_collective("all-reduce", gradient.nbytes)
        return gradient.clone(), None


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """All-reduce in forward; identity in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorder: OpRecorder) -> torch.Tensor:
        recorder.record_collective("all-reduce", tensor.nbytes)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherFromTensorParallelRegion(torch.autograd.Function):
    """All-gather along the last dimension in forward; slice the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, width: int, recorder: OpRecorder) -> torch.Tensor:
        ctx.width = tensor.shape[-1]
        full = tensor.new_empty(*tensor.shape[:-1], width)
        recorder.record_collective("all-gather", full.nbytes)
        return full.clone()  # the gathered shards are contiguous; a copy joins them along the last dimension

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[..., : ctx.width].contiguous(), None, None


def hook_tp_collectives(model: nn.Module, plan: TensorPlan, ranks: int, recorder: OpRecorder) -> None:
    """Add hooks that record the collectives of a model whose parameters are already one rank's TP shards."""
    prepared = {name for name, _, style in plan.styled_modules(model) if isinstance(style, PrepareModuleInput)}
    for name, module, style in plan.styled_modules(model):
        _hook_module(name, module, style, ranks, recorder, prepared)
    plan.resize_attributes(model, ranks)


def _hook_module(
    name: str, module: nn.Module, style: Any, ranks: int, recorder: OpRecorder, prepared: set[str]
) -> None:
    if isinstance(style, PrepareModuleInput):
        module.register_forward_pre_hook(_copy_input_hook(recorder), with_kwargs=True)
    elif isinstance(style, COLWISE_STYLES):
        if name.rpartition(".")[0] not in prepared:  # otherwise its parent has prepared the input
            module.register_forward_pre_hook(_copy_input_hook(recorder), with_kwargs=True)
        if type(module).__name__ == "Conv1D":
            module.nf = cast(int, module.nf) // ranks  # type: ignore[assignment]  # it sets its output's width
        if isinstance(style, ColwiseParallel) and Replicate() in _output_layouts(style):
            width = _full_output_width(module)
            gather: Any = _GatherFromTensorParallelRegion
            module.register_forward_hook(lambda _, args, output: gather.apply(output, width, recorder))
    elif isinstance(style, ROWWISE_STYLES):
        module.register_forward_hook(lambda _, args, output: _ReduceFromTensorParallelRegion.apply(output, recorder))  # type: ignore[no-untyped-call]


def _output_layouts(style: ColwiseParallel) -> tuple[Any, ...]:
    layouts = style.output_layouts
    return layouts if isinstance(layouts, tuple) else (layouts,)


def _full_output_width(module: nn.Module) -> int:
    width = getattr(module, "out_features", None) or getattr(module, "embedding_dim", None)
    if not isinstance(width, int):
        raise ValueError(f"the output width of a tensor-parallel {type(module).__name__} is not known")
    return width


def _copy_input_hook(recorder: OpRecorder) -> Callable[..., Any]:
    """Return a hook that marks a module's first tensor input as replicated over the tensor axis."""

    def copy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args and isinstance(args[0], torch.Tensor):
            return (_CopyToTensorParallelRegion.apply(args[0], recorder), *args[1:]), kwargs  # type: ignore[no-untyped-call]
        key = next((key for key, value in kwargs.items() if isinstance(value, torch.Tensor)), None)
        if key is None:
            return args, kwargs
        return args, {**kwargs, key: _CopyToTensorParallelRegion.apply(kwargs[key], recorder)}  # type: ignore[no-untyped-call]

    return copy

"""One tensor rank's part of a model, on paper: layers of its own size, and the collectives between them.

No process group is needed. A module that the plan divides gets this rank's share of its parameters; where torch's
styles would communicate, a function of autograd's says so and goes on with tensors of the right shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from zeroshard.planner.tracing.recorder import OpRecorder
from zeroshard.tensor_parallel.plans import TensorPlan, name_matches_pattern
from zeroshard.tensor_parallel.styles import Conv1DRowwiseParallel, FusedColwiseParallel


class _CopyToTensorParallelRegion(torch.autograd.Function):
    """The same on all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorder: OpRecorder) -> torch.Tensor:
        ctx.recorder = recorder
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.recorder.record_collective("all-reduce", gradient.nbytes)
        return gradient.clone(), None


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """The sum over all ranks; its gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorder: OpRecorder) -> torch.Tensor:
        recorder.record_collective("all-reduce", tensor.nbytes)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherFromTensorParallelRegion(torch.autograd.Function):
    """All ranks' parts side by side; the gradient is cut again."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, width: int, recorder: OpRecorder) -> torch.Tensor:
        ctx.width = tensor.shape[-1]
        whole = tensor.new_empty(*tensor.shape[:-1], width)
        recorder.record_collective("all-gather", whole.nbytes)
        return whole.clone()  # the parts come one behind the other, and are put side by side

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[..., : ctx.width].contiguous(), None, None


def hook_tp_collectives(model: nn.Module, plan: TensorPlan, ranks: int, recorder: OpRecorder) -> None:
    """Have the modules of a model, whose parameters are one rank's already, say what they communicate."""
    prepared = [pattern for pattern, style in plan.styles.items() if isinstance(style, PrepareModuleInput)]
    for name, module in model.named_modules():
        for pattern, style in plan.styles.items():
            if name_matches_pattern(name, pattern):
                _hook_module(name, module, style, ranks, recorder, prepared)
        for pattern, attributes in plan.resized_attributes.items():
            for attribute in attributes if name_matches_pattern(name, pattern) else ():
                setattr(module, attribute, getattr(module, attribute) // ranks)


def _hook_module(
    name: str, module: nn.Module, style: Any, ranks: int, recorder: OpRecorder, prepared: list[str]
) -> None:
    if isinstance(style, PrepareModuleInput):
        module.register_forward_pre_hook(_copy_input_hook(recorder), with_kwargs=True)
    elif isinstance(style, (FusedColwiseParallel, ColwiseParallel)):
        parent = name.rpartition(".")[0]
        if not any(
            name_matches_pattern(parent, pattern) for pattern in prepared
        ):  # else its parent has done it for all
            module.register_forward_pre_hook(_copy_input_hook(recorder), with_kwargs=True)
        if type(module).__name__ == "Conv1D":
            module.nf = cast(int, module.nf) // ranks  # type: ignore[assignment]  # it gives its output the width it was told
        if isinstance(style, ColwiseParallel) and Replicate() in _output_layouts(style):
            width = _full_output_width(module)
            gather: Any = _GatherFromTensorParallelRegion
            module.register_forward_hook(lambda _, args, output: gather.apply(output, width, recorder))
    elif isinstance(style, (Conv1DRowwiseParallel, RowwiseParallel)):
        module.register_forward_hook(lambda _, args, output: _ReduceFromTensorParallelRegion.apply(output, recorder))  # type: ignore[no-untyped-call]


def _output_layouts(style: ColwiseParallel) -> tuple[Any, ...]:
    found = style.output_layouts
    return found if isinstance(found, tuple) else (found,)


def _full_output_width(module: nn.Module) -> int:
    width = getattr(module, "out_features", None) or getattr(module, "embedding_dim", None)
    if not isinstance(width, int):
        raise ValueError(f"it is not known how wide the output of a {type(module).__name__} is")
    return width


def _copy_input_hook(recorder: OpRecorder) -> Callable[..., Any]:
    """A hook that marks a module's first input, wherever it is given, as the same on all ranks."""

    def copy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args and isinstance(args[0], torch.Tensor):
            return (_CopyToTensorParallelRegion.apply(args[0], recorder), *args[1:]), kwargs  # type: ignore[no-untyped-call]
        key = next((key for key, value in kwargs.items() if isinstance(value, torch.Tensor)), None)
        if key is None:
            return args, kwargs
        return args, {**kwargs, key: _CopyToTensorParallelRegion.apply(kwargs[key], recorder)}  # type: ignore[no-untyped-call]

    return copy

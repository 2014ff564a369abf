"""float8_linear: a linear layer whose three matrix products are computed in float8, from bf16 tensors.

[Note: the float8 recipe]
It is torchao's "tensorwise" recipe: each tensor has one scale, computed from its largest absolute value when it is
cast. Inputs and weights are cast to e4m3, gradients of outputs to e5m2. Products are accumulated in fp32 and rounded to
bf16 once; only the output uses the faster accumulation of Hopper's tensor cores. The master weights, the gradients and
all that is between the layers are those of ``precision="bf16"``. An infinity or a NaN in a tensor gives NaN in its
product.

[Note: what backward keeps]
Backward needs the input and the weight cast and transposed. It casts them again, from the tensors that a bf16 layer
keeps as well: so layers that share an input (queries, keys, values) keep it once, and a partitioned weight is
all-gathered again. One launch casts all that backward multiplies, so that the host makes few calls; for a moment there
are the gradient of the output in float8 twice, and the input and the weight once.

[Note: float8 on the CPU]
A CPU casts to float8 like a GPU, and multiplies the float8 values in fp32. The products differ from a GPU's by the
order of their sums.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from zeroshard.float8.cast import E4M3, E5M2, MatrixCast, cast, largest


class Float8Weight:
    """A weight that was cast to float8 before it was gathered."""

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values = values  # e4m3
        self.columns = values.t()  # made once, not by each call of the layer
        self.scale = scale  # fp32, one element: what the values are to be multiplied by
        self.parameter: Any = None  # the weight of the layer
        self.is_in_use = True  # whether the layer computes with these values, not with those of its parameter


def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gathered: Float8Weight | None = None
) -> torch.Tensor:
    """Return ``F.linear(x, weight, bias)``, computed in float8: see [Note: the float8 recipe].

    ``gathered``: the weight in float8. While that is in use, ``weight`` only gets its gradient, and is not read.

    >>> x, weight = torch.ones(2, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)
    >>> float8_linear(x, weight, None)[0, :3]
    tensor([16., 16., 16.], dtype=torch.bfloat16)
    """
    is_autocast_enabled = _is_autocast_enabled(x)
    if is_autocast_enabled:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise RuntimeError(
            f"a float8 layer takes its input and its weight in bfloat16, got {x.dtype} and {weight.dtype}: leave "
            "cast_inputs on and autocast off, or name the layer in keep_bf16 of zeroshard.shard()"
        )
    given = (None, None, False) if gathered is None else (gathered.columns, gathered.scale, gathered.is_in_use)
    with torch.autocast(x.device.type, enabled=False) if is_autocast_enabled else nullcontext():
        output: torch.Tensor = _Float8Linear.apply(x, weight, bias, *given)  # type: ignore[no-untyped-call]
    return output


def _is_autocast_enabled(x: torch.Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


class _Float8Linear(torch.autograd.Function):
    """``F.linear`` in float8."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight8: torch.Tensor | None,
        weight_scale: torch.Tensor | None,
        is_in_use: bool,
    ) -> torch.Tensor:
        # ``weight8``: the transpose of the gathered weight, which is column-major
        ctx.weight_shape = weight.shape
        if not x.numel():  # an expert without tokens
            return x.new_zeros(*x.shape[:-1], weight.shape[0])
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_largest, kept_x = largest(x), x if needs_weight else None
        x_cast = MatrixCast(x, x_largest, E4M3)
        gathered = (weight8, weight_scale) if needs_x else (None, None)
        # new values come with a new scale: the version of this one shows whether they have changed since
        if weight8 is None or weight_scale is None or not is_in_use:
            values = weight.detach()
            weight_largest = largest(values)
            ctx.save_for_backward(kept_x, x_largest, weight if needs_x else None, weight_largest, *gathered)
            (x8, _, x_scale), (weight8, _, weight_scale) = cast(x_cast, MatrixCast(values, weight_largest, E4M3))
            weight8 = weight8.t()
        else:
            ctx.save_for_backward(kept_x, x_largest, None, None, *gathered)
            ((x8, _, x_scale),) = cast(x_cast)
        output = _product(x8, weight8, (x_scale, weight_scale), bias, is_fast=True)
        return output if x.dim() == 2 else output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not gradient.numel():
            shapes = (*gradient.shape[:-1], ctx.weight_shape[1]), ctx.weight_shape, ctx.weight_shape[:1]
            needed = zip(shapes, ctx.needs_input_grad, strict=False)
            return *(gradient.new_zeros(shape) if is_needed else None for shape, is_needed in needed), None, None, None
        x, x_largest, weight, weight_largest, weight8, weight_scale = ctx.saved_tensors
        x_grad = weight_grad = bias_grad = None
        is_autocast_enabled = _is_autocast_enabled(gradient)
        # a guarded weight is unsharded here, as it is for autograd's own nodes
        with (
            torch.autocast(gradient.device.type, enabled=False) if is_autocast_enabled else nullcontext(),
            torch._C.DisableTorchFunctionSubclass(),
        ):
            needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
            casts = []
            if needs_weight:
                casts.append(MatrixCast(x, x_largest, E4M3, needs_rows=False, needs_columns=True))
            # a placeholder: the forward ran inside gathered(), which has ended
            if needs_x and weight8 is not None and (weight is None or _is_placeholder(weight)):
                casts.append(MatrixCast(weight8.t(), None, E4M3, needs_rows=False, needs_columns=True))
            elif needs_x:
                values = weight.detach()
                casts.append(MatrixCast(values, weight_largest, E4M3, needs_rows=False, needs_columns=True))
            if casts:
                casts.append(MatrixCast(gradient, largest(gradient), E5M2, needs_x, needs_weight))
                *operands, (grad8, grad_columns8, grad_scale) = cast(*casts)
            if needs_x:
                _, columns8, scale = operands.pop()
                x_grad = _product(grad8, columns8, (grad_scale, weight_scale if scale is None else scale))
                x_grad = x_grad if gradient.dim() == 2 else x_grad.view(*gradient.shape[:-1], columns8.shape[1])
                del grad8, columns8
            if needs_weight:
                _, columns8, scale = operands.pop()
                weight_grad = _product(grad_columns8.t(), columns8, (grad_scale, scale))
            if needs_bias:
                bias_grad = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return x_grad, weight_grad, bias_grad, None, None, None


def _is_placeholder(weight: torch.Tensor) -> bool:
    return weight.stride() == (0, 0)


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
    is_fast: bool = False,
) -> torch.Tensor:
    """Return ``a @ b``, plus a bias, in bf16: of two float8 matrices, each to be multiplied by its scale.

    ``a`` is row-major, ``b`` column-major. ``is_fast``: a GPU may accumulate in less than fp32.
    """
    if a.device.type == "cpu":  # see [Note: float8 on the CPU]
        output = (a.float() @ b.float()) * (scales[0] * scales[1])
        return (output if bias is None else output + bias.float()).to(torch.bfloat16)
    return torch._scaled_mm(
        a, b, scale_a=scales[0], scale_b=scales[1], bias=bias, out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )

"""A model's arguments at any batch size, and the loss of its output; only shapes matter, not values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zeroshard.models import GPT
from zeroshard.utils.tree import tensors_in, tree_map_tensors

DEFAULT_SEQUENCE_TOKENS = 1024  # tokens per sample by default, if the model allows it

Inputs = Callable[[int], Any] | torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | None
LossFn = Callable[[Any], torch.Tensor] | None


ModelArguments = tuple[tuple[Any, ...], dict[str, Any]]


class LossError(ValueError):
    """No loss can be computed from a model's output."""


def model_arguments(model: nn.Module, inputs: Inputs, batch: int, sequence: int | None = None) -> ModelArguments:
    """Return the positional and keyword arguments of the model for ``batch`` samples.

    ``inputs`` is a function of the batch size that returns a tensor, a tuple or a dictionary of keywords; or an example
    of these, whose tensors have the batch as first dimension. None works for known language models: zeroshard's GPT
    and those of Hugging Face, with ``sequence`` tokens per sample.

    >>> args, kwargs = model_arguments(nn.Linear(8, 2), torch.empty(4, 8), batch=32)
    >>> args[0].shape, args[0].is_meta
    (torch.Size([32, 8]), True)
    """
    if inputs is None:
        arguments = _default_inputs(model, batch, sequence)
    elif callable(inputs):
        try:
            arguments = inputs(batch)
        except Exception as error:
            raise ValueError(f"inputs({batch}) failed with {type(error).__name__}: {error}") from error
    else:
        arguments = _resize_batch(inputs, batch)
    if isinstance(arguments, Mapping):
        return (), dict(arguments)
    return (tuple(arguments), {}) if isinstance(arguments, (tuple, list)) else ((arguments,), {})


def _resize_batch(example: Any, batch: int) -> Any:
    """Return the example with another first dimension."""
    lengths = {tensor.shape[0] for tensor in tensors_in(example) if tensor.dim()}
    if len(lengths) != 1:
        found = sorted(lengths) or "no tensor"
        raise ValueError(
            f"all tensors in inputs must have the batch as first dimension, got {found}: pass a function of the batch "
            "size instead, inputs=lambda batch: (…)"
        )

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        if tensor.is_meta or tensor.is_floating_point() or not tensor.shape[0]:
            return tensor.new_empty(batch, *tensor.shape[1:], device="meta")
        return tensor[torch.arange(batch, device=tensor.device) % tensor.shape[0]]  # models may read its values

    return tree_map_tensors(example, resize)


def _default_inputs(model: nn.Module, batch: int, sequence: int | None) -> Any:
    if isinstance(model, GPT):
        tokens = _zero_tokens(batch, _sequence_length(sequence, model.config.context, model.config.context))
        return tokens, tokens.clone()
    config: Any = getattr(model, "config", None)
    output_embeddings = getattr(model, "get_output_embeddings", lambda: None)()  # set if the model predicts tokens
    if getattr(config, "vocab_size", None) and output_embeddings is not None:
        max_tokens = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        default = min(max_tokens or DEFAULT_SEQUENCE_TOKENS, DEFAULT_SEQUENCE_TOKENS)
        tokens = _zero_tokens(batch, _sequence_length(sequence, default, max_tokens))
        return {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}
    raise ValueError(
        f"the arguments of {type(model).__name__} are not known: pass inputs=, a function of the batch size such as "
        "lambda batch: torch.empty(batch, 3, 224, 224), or an example batch"
    )


def _sequence_length(sequence: int | None, default: int, max_tokens: int | None) -> int:
    """Return the tokens per sample."""
    if sequence is None:
        return default
    if type(sequence) is not int or sequence < 1:
        raise ValueError(f"sequence must be a positive integer, got {sequence!r}")
    if max_tokens is not None and sequence > max_tokens:
        raise ValueError(
            f"sequence {sequence} is longer than the model's context of {max_tokens} tokens: use a shorter one, or a "
            "model with a longer context"
        )
    return sequence


def _zero_tokens(batch: int, sequence: int) -> torch.Tensor:
    return torch.zeros(batch, sequence, dtype=torch.int64, device="meta")


def compute_loss(output: Any, loss: LossFn) -> torch.Tensor:
    """Return the scalar that backward starts from: ``loss`` of the output, or the output's own loss.

    An output without a loss is summed: backward is the same, except for the real loss function itself.
    """
    if loss is not None:
        return _check_scalar(_call_loss(loss, output))
    model_loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(model_loss, torch.Tensor):
        return _check_scalar(model_loss)
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not outputs:
        raise LossError("the model's output does not depend on any trained parameter, so there is no backward to plan")
    if len(outputs) == 1 and outputs[0].numel() == 1:
        return outputs[0]
    return torch.stack([tensor.float().sum() for tensor in outputs]).sum()


def _call_loss(loss: Callable[[Any], torch.Tensor], output: Any) -> Any:
    try:
        return loss(output)
    except Exception as error:
        raise LossError(
            f"loss raised {type(error).__name__}: {error}\nWhile planning, the model's output is on the meta device: "
            "create the targets there too, as in torch.zeros(len(output), dtype=torch.int64, device=output.device)"
        ) from error


def _check_scalar(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise LossError(f"loss must return a scalar tensor, got {got}")
    return value

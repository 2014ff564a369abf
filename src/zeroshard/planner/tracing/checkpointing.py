"""Prepare a model that already uses activation checkpointing for planning.

The planner itself decides what blocks keep, on a meta copy ([Note: tracing] in ``trace.py``). So the effect of
:func:`zeroshard.checkpoint_activations` is undone on a copy, and the checkpoint mode is returned instead.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.activations import CheckpointedForward, RecomputeContext, select_blocks
from zeroshard.planner.tracing.trace_model import CheckpointMode, UntraceableError
from zeroshard.sharding import find_repeated_blocks


def strip_checkpointing(model: nn.Module, tensor: int = 1) -> tuple[nn.Module, CheckpointMode]:
    """Return the model to plan with, and its checkpoint mode.

    A model stays checkpointed, on a meta copy, if it checkpoints other blocks than the planner would, has a policy, or
    keeps full inputs although the tensor-parallel degree ``tensor`` is above 1. The mode is then "none": the planner
    adds no checkpointing of its own.

    >>> import zeroshard
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    >>> strip_checkpointing(model) == (model, "none")
    True
    >>> strip_checkpointing(zeroshard.checkpoint_activations(model, offload=True))[1]
    'host'
    """
    if not any(_checkpointed_forwards(model)):
        return model, "none"
    meta_model = meta_copy(model)
    wrapped = dict(_checkpointed_forwards(meta_model))
    is_default = (
        next(find_repeated_blocks(meta_model), None) is not None
        and wrapped.keys() == select_blocks(meta_model, None).keys()
    )
    is_default = is_default and all(_is_default_checkpointing(forward, tensor) for forward in wrapped.values())
    is_offloaded = any(forward._context._offload for forward in wrapped.values())
    for name, forward in wrapped.items():
        forward.restore()
        if not is_default:  # keep inputs by reference: a single rank needs no communication for them
            block, policy = meta_model.get_submodule(name), forward._policy
            checkpointed = CheckpointedForward(
                block, name, RecomputeContext(False, False), policy, block.__dict__.get("forward")
            )
            block.__dict__["forward"] = checkpointed
    if not is_default:
        return meta_model, "none"
    return meta_model, "host" if is_offloaded else "recompute"


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy with its parameters on the meta device, which takes no memory for them."""
    try:
        return copy.deepcopy(model, meta_memo(model))
    except Exception as error:
        raise UntraceableError(f"{type(model).__name__} cannot be copied, which planning needs: {error}") from error


def meta_memo(model: nn.Module) -> dict[int, Any]:
    """Return the memo that makes ``copy.deepcopy`` replace a model's parameters by meta parameters."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        meta_tensor = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(meta_tensor, requires_grad=parameter.requires_grad)
    memo |= {id(buffer): buffer for buffer in model.buffers()}  # shared: tracing copies them itself
    return memo


def _checkpointed_forwards(model: nn.Module) -> Any:
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, CheckpointedForward):
            yield name, forward


def _is_default_checkpointing(forward: CheckpointedForward, tensor: int) -> bool:
    """Return whether a block keeps what the planner assumes: a shard of its input on each tensor-parallel rank."""
    partition = forward._context._partition
    if isinstance(partition, DeviceMesh):
        return forward._policy is None and partition.size() == tensor
    return forward._policy is None and (tensor == 1 or partition is not False)

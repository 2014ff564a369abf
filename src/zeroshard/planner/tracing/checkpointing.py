"""Recomputed: a model whose blocks are recomputed already, as a plan wants it.

A plan decides itself what blocks keep, on a copy without memory ([Note: tracing] in ``trace.py``). What
:func:`zeroshard.checkpoint_activations` has done is therefore undone on a copy, and told instead.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.activations.block_inputs import RecomputeContext
from zeroshard.activations.blocks import select_blocks
from zeroshard.activations.checkpoint import CheckpointedForward
from zeroshard.planner.tracing.trace_model import CheckpointMode, UntraceableError
from zeroshard.sharding.units import find_repeated_blocks


def strip_checkpointing(model: nn.Module, tensor: int = 1) -> tuple[nn.Module, CheckpointMode]:
    """The model that is to be planned with, and what its blocks keep.

    A model with other blocks than a plan would choose, a policy, or inputs left whole along a tensor axis of so many
    ranks, stays as it is, on paper: "none" is then the right word for what the plan adds.

    >>> import zeroshard
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    >>> strip_checkpointing(model) == (model, "none")
    True
    >>> strip_checkpointing(zeroshard.checkpoint_activations(model, offload=True))[1]
    'host'
    """
    if not any(_checkpointed_forwards(model)):
        return model, "none"
    paper = meta_copy(model)
    wrapped = dict(_checkpointed_forwards(paper))
    usual = next(find_repeated_blocks(paper), None) is not None and wrapped.keys() == select_blocks(paper, None).keys()
    usual = usual and all(_is_default_checkpointing(forward, tensor) for forward in wrapped.values())
    far = any(forward._context._offload for forward in wrapped.values())
    for name, forward in wrapped.items():
        forward.restore()
        if not usual:  # kept by reference: alone on their rank, such inputs are asked of nobody
            block, policy = paper.get_submodule(name), forward._policy
            again = CheckpointedForward(
                block, name, RecomputeContext(False, False), policy, block.__dict__.get("forward")
            )
            block.__dict__["forward"] = again
    if not usual:
        return paper, "none"
    return paper, "host" if far else "recompute"


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device: takes no memory, wherever the model is."""
    try:
        return copy.deepcopy(model, meta_memo(model))
    except Exception as error:
        raise UntraceableError(f"{type(model).__name__} cannot be copied, which planning needs: {error}") from error


def meta_memo(model: nn.Module) -> dict[int, Any]:
    """What ``copy.deepcopy`` puts in the place of a model's parameters: others without memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        bare = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(bare, requires_grad=parameter.requires_grad)
    memo |= {id(buffer): buffer for buffer in model.buffers()}  # whoever traces copies them, if it does, as it likes
    return memo


def _checkpointed_forwards(model: nn.Module) -> Any:
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, CheckpointedForward):
            yield name, forward


def _is_default_checkpointing(forward: CheckpointedForward, tensor: int) -> bool:
    """Whether a block keeps what a plan takes it to keep: each tensor rank its part."""
    partition = forward._context._partition
    if isinstance(partition, DeviceMesh):
        return forward._policy is None and partition.size() == tensor
    return forward._policy is None and (tensor == 1 or partition is not False)

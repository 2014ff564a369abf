"""Shortened: a model with fewer of its blocks, which takes less long to trace: see [Note: straight lines in depth]."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from zeroshard.planner.traces.recomputed import meta_memo


def find_block_stack(model: nn.Module) -> nn.ModuleList | None:
    """The list of blocks that makes a model deep, where there is one and its blocks are of one kind.

    >>> import torch
    >>> from zeroshard.models import GPT, GPTConfig
    >>> with torch.device("meta"):
    ...     model = GPT(GPTConfig(layers=4, heads=2, width=64))
    >>> find_block_stack(model) is model.blocks
    True
    >>> find_block_stack(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)])) is None
    True
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    if not lists:
        return None
    stack = max(lists, key=lambda found: sum(parameter.numel() for parameter in found.parameters()))
    kinds = {_block_signature(block) for block in stack}
    return stack if len(kinds) == 1 else None


def _block_signature(block: nn.Module) -> tuple[Any, ...]:
    """What two blocks of one kind have in common."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    modules = tuple(type(module) for module in block.modules())
    return modules, tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors)


def truncate_model(model: nn.Module, blocks: int) -> nn.Module:
    """A copy without memory that has only the first ``blocks`` of its stack.

    >>> import torch
    >>> from zeroshard.models import GPT, GPTConfig
    >>> with torch.device("meta"):
    ...     model = GPT(GPTConfig(layers=4, heads=2, width=64))
    >>> len(truncate_model(model, 2).blocks), len(model.blocks)
    (2, 4)
    """
    stack = find_block_stack(model)
    if stack is None or len(stack) < blocks:
        raise ValueError(f"this {type(model).__name__} has no stack of {blocks} blocks or more that are alike")
    memo = meta_memo(model)
    short = copy.copy(stack)
    short._modules = {str(number): block for number, block in enumerate(stack) if number < blocks}
    memo[id(stack)] = copy.deepcopy(short, memo)
    return copy.deepcopy(model, memo)

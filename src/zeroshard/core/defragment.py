"""Defragmenter: keeps the memory of a GPU in few segments (the paper's M_D)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroshard.core.checks.observers import Observer
from zeroshard.core.engine import Engine
from zeroshard.memory.allocator.segment_preallocator import SegmentPreallocator
from zeroshard.memory.pool import CublasWorkspace
from zeroshard.utils.tree import tensors_in


class Defragmenter(Observer):
    """Has segments allocated for the model's temporaries, and one cuBLAS workspace for all threads."""

    def __init__(self, engine: Engine) -> None:
        self._segments = SegmentPreallocator(engine.device)
        self._workspace = CublasWorkspace(engine.context.pool)
        self._engine = engine

    def pre_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Before anything of a training pass is allocated: a hook of the model."""
        if torch.is_grad_enabled() and not self._engine.is_running:
            self._segments.on_forward_begin(sum(tensor.numel() for tensor in tensors_in((args, kwargs))))

    def on_forward_begin(self, engine: Engine) -> None:
        """Forward may run on another thread than the last backward."""
        self._workspace.acquire()

    def on_backward_begin(self, engine: Engine) -> None:
        """Backward runs on a thread of its own."""
        self._workspace.acquire()

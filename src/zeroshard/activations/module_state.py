"""ModuleState: the buffers and training modes with which a block's forward began.

[Note: module state]
A block may update buffers in its forward: running statistics, the vectors of a spectral norm, a codebook. Recomputation
must begin with the same buffers as the forward, and must not update them a second time. So the buffers that a forward
has changed are copied, and recomputation gets a copy of the copy. The module's own buffers are put aside meanwhile.
Likewise ``model.eval()`` between forward and backward must not change what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# batch norm changes them without incrementing their version counter
RUNNING_STATISTICS = ("running_mean", "running_var")


class ModuleState:
    """Buffers and training modes of some modules, as they are now.

    >>> norm = nn.BatchNorm1d(1)
    >>> state = ModuleState([norm])
    >>> _ = norm(torch.tensor([[0.0], [20.0]]))
    >>> state.keep_changed()
    >>> with state.restored():
    ...     _ = norm.running_mean.clone(), norm(torch.tensor([[0.0], [20.0]]))
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([1.]), tensor(1))
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._training = [module.training for module in modules]
        with torch.no_grad():
            self._buffers = [
                (module, key, buffer, _version(buffer), None if buffer is None else buffer.clone())
                for module in modules
                if module._buffers
                for key, buffer in module._buffers.items()
            ]

    def keep_changed(self) -> None:
        """Keep only the buffers that have changed since: forward has ended."""
        self._buffers = [
            (module, key, buffer, version, value if version != _version(buffer) or _is_running(module, key) else buffer)
            for module, key, buffer, version, value in self._buffers
            if version != _version(buffer) or buffer is not module._buffers.get(key) or _is_running(module, key)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore buffers and training modes inside the context, and the current ones after it."""
        current = [module._buffers.get(key) for module, key, *_ in self._buffers]
        training = [module.training for module in self._modules]
        copies: dict[int, torch.Tensor | None] = {}  # modules may share a buffer
        with torch.no_grad():
            for module, key, buffer, _, value in self._buffers:
                copies.setdefault(id(buffer), value if value is None or value is buffer else value.clone())
                module._buffers[key] = copies[id(buffer)]
        self._set_training(self._training)
        try:
            yield
        finally:
            self._set_training(training)
            for (module, key, *_), buffer in zip(self._buffers, current, strict=True):
                module._buffers[key] = buffer

    def _set_training(self, modes: list[bool]) -> None:
        for module, is_training in zip(self._modules, modes, strict=True):
            if module.training != is_training:
                module.training = is_training


def _version(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _is_running(module: nn.Module, key: str) -> bool:
    return module.training and key in RUNNING_STATISTICS


def with_module_state(run: Callable[..., Any], modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """Return a function that runs ``run``, and again with the module state of the first time."""
    state: ModuleState | None = None

    def run_in_state(*given: torch.Tensor) -> Any:
        nonlocal state
        if state is not None:
            with state.restored():
                return run(*given)
        state = ModuleState(modules)
        output = run(*given)
        state.keep_changed()
        return output

    return run_in_state

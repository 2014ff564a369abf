"""The dtypes in which each parameter is computed, reduced and updated, and the loss scale of fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeroshard.config.config import Config

GROWTH_INTERVAL = 2000  # steps without overflow after which the loss scale doubles

# Running backwards: autograd's graph task id → inverse of the scale of their loss; None: not scaled.
# One table for all models, because a loss may depend on several models.
_running_backwards: dict[int, torch.Tensor | None] = {}


def current_inverse_scale() -> torch.Tensor | None:
    """Return the inverse of the running backward's loss scale; None if its loss was not scaled.

    This fixes the scale: a loss found to be scaled later in the same backward is an error.
    """
    task_id = torch._C._current_graph_task_id()
    if task_id not in _running_backwards:
        _record_backward(task_id, None)
    return _running_backwards[task_id]


def _record_backward(number: int, inverse: torch.Tensor | None) -> None:
    _running_backwards[number] = inverse
    torch.autograd.Variable._execution_engine.queue_callback(partial(_remove_backward, number))


def _remove_backward(number: int) -> None:
    _running_backwards.pop(number, None)


def _on_scaled_loss(inverse: torch.Tensor, gradient: torch.Tensor) -> None:
    """Record that the running backward starts from a scaled loss; raise if another of its losses differs."""
    task_id = torch._C._current_graph_task_id()
    if task_id not in _running_backwards:
        _record_backward(task_id, inverse)
        return
    known = _running_backwards[task_id]
    if known is None or (known is not inverse and bool(known != inverse)):
        other = "is not scaled" if known is None else "has another scale"
        raise RuntimeError(
            f"one loss of this backward was multiplied by optimizer.scale(loss), and another one {other}: their "
            "gradients cannot be told apart. Add the losses first, and call optimizer.scale() on the sum"
        )


def matches(name: str, module: nn.Module, patterns: tuple[str | type[nn.Module], ...]) -> bool:
    """Return whether a module matches one of the patterns: a class, or a shell pattern for its name.

    >>> matches("layers.3", nn.Linear(1, 1), ("layers.*",)), matches("head", nn.Linear(1, 1), (nn.LayerNorm,))
    (True, False)
    """
    return any(fnmatchcase(name, p) if isinstance(p, str) else isinstance(module, p) for p in patterns)


class Precision:
    """The dtypes of one model's parameters.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> precision = Precision(model, Config(precision="bf16", keep_fp32=(nn.LayerNorm,)))
    >>> precision.compute_dtype("0.weight", model[0].weight), precision.compute_dtype("1.weight", model[1].weight)
    (torch.bfloat16, torch.float32)
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        self._config = config
        fp32_patterns = (*config.keep_fp32, _BatchNorm) if config.has_master else ()
        self.fp32_modules = [name for name, module in model.named_modules() if matches(name, module, fp32_patterns)]
        self._fp32_param_names = {
            f"{name}.{key}" if name else key
            for name in self.fp32_modules
            for key, _ in model.get_submodule(name).named_parameters(remove_duplicate=False)
        }
        self._fp32_patterns = [p for p in fp32_patterns if isinstance(p, str)]

    def compute_dtype(self, name: str, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype of the parameter in forward and backward."""
        dtype = self._config.compute_dtype
        if dtype is None or not parameter.is_floating_point():
            return parameter.dtype
        is_fp32 = name in self._fp32_param_names or any(fnmatchcase(name, pattern) for pattern in self._fp32_patterns)
        return torch.float32 if is_fp32 else dtype

    def has_master(self, dtype: torch.dtype) -> bool:
        """Return whether parameters computed in ``dtype`` have an fp32 master."""
        return self._config.has_master and dtype in (torch.bfloat16, torch.float16)

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters computed in ``dtype`` are reduced and kept."""
        chosen = self._config.reduce_dtype
        return chosen if isinstance(chosen, torch.dtype) else dtype


class LossScale:
    """The dynamic loss scale of fp16. It stays on the device: using or changing it needs no host sync."""

    def __init__(self, initial: float, device: torch.device) -> None:
        self.scale = torch.full((), initial, device=device)  # fp32
        self.inverse_scale = 1 / self.scale  # fp32
        self.found_inf = torch.zeros((), device=device)  # fp32, 1 if a gradient was not finite on any rank
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale, and hook its backward to record that."""
        scaled = loss.float() * self.scale
        if scaled.requires_grad:
            scaled.register_hook(partial(_on_scaled_loss, self.inverse_scale))  # type: ignore[no-untyped-call]
        return scaled

    def check_overflow(self, gradients: list[torch.Tensor], max_abs_values: Sequence[torch.Tensor] = ()) -> None:
        """Set ``found_inf`` if values are not finite, or would not be in fp32. Reads only, without a copy.

        ``max_abs_values`` are the largest magnitudes of gradients that are not in ``gradients``.
        """
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            if gradient.numel():
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
        norms = [torch.stack(torch._foreach_norm(group, math.inf)).float() for group in by_dtype.values()]
        norms += [torch.stack(list(max_abs_values))] if max_abs_values else []
        if norms:  # a tensor with a NaN has the norm NaN, and NaN < inf is False
            torch.logical_not((torch.cat(norms) < math.inf).all(), out=self.found_inf)

    def state(self) -> list[float]:
        """Return the scale and the growth tracker (steps since the last overflow), as plain numbers."""
        return [float(self.scale), float(self._growth_tracker)]

    def load(self, state: list[float]) -> None:
        """Restore the result of :meth:`state`."""
        self.scale.fill_(state[0])
        self._growth_tracker.fill_(int(state[1]))
        self.inverse_scale = 1 / self.scale

    def update(self) -> None:
        """Halve the scale after an overflow, double it after many steps without, and clear ``found_inf``."""
        torch._amp_update_scale_(self.scale, self._growth_tracker, self.found_inf, 2.0, 0.5, GROWTH_INTERVAL)
        self.inverse_scale = 1 / self.scale
        self.clear_overflow()

    def clear_overflow(self) -> None:
        """Clear ``found_inf``."""
        self.found_inf.zero_()

"""Precision: the dtypes in which each parameter is computed, reduced and updated."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeroshard.config.config import Config


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

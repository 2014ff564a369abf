"""Float8Layers: which layers of a model compute in float8, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroshard.config.config import Config
from zeroshard.sharding.precision import Precision, matches

FLOAT8_ALIGN = 16  # a GPU multiplies float8 matrices whose dimensions are multiples of this
MAX_SHOWN_NAMES = 4


@dataclass(frozen=True)
class Float8Layers:
    """The linear layers that compute in float8, and the layers with matrices that do not.

    >>> print(Float8Layers(("a", "b"), {"head": "in keep_bf16", "gate": "8 outputs are not a multiple of 16"}))
    2 layers; not head (in keep_bf16); not gate (8 outputs are not a multiple of 16)
    """

    names: tuple[str, ...]
    """Modules that compute in float8."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Other modules that have matrices, and why they do not. Embeddings, which multiply none, are not among them."""
    weights: dict[str, str] = field(default_factory=dict)
    """Weights that only their float8 layer uses, by name, and that layer: stage 3 gathers them in float8."""

    def __str__(self) -> str:
        return "; ".join([f"{len(self.names)} layer{'s' if len(self.names) != 1 else ''}", *describe(self.excluded)])


def describe(excluded: Mapping[str, str]) -> list[str]:
    """Return one text for each reason in ``excluded``, which has a reason for each name.

    >>> describe({"a": "too small", "b": "too small", "c": "too large"})
    ['not a, b (too small)', 'not c (too large)']
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        by_reason.setdefault(reason, []).append(name)
    parts = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
        parts.append(f"not {', '.join(names[:MAX_SHOWN_NAMES])}{more} ({reason})")
    return parts


def find_float8_layers(
    model: nn.Module, config: Config, precision: Precision, tensor_parallel: Iterable[str] = ()
) -> Float8Layers | None:
    """Return the layers that ``precision="fp8"`` computes in float8; None with another precision.

    ``tensor_parallel``: names of parameters that are divided over the tensor axis.

    >>> model, config = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10)), Config(precision="fp8")
    >>> print(find_float8_layers(model, config, Precision(model, config)))
    1 layer; not 1 (10 outputs are not a multiple of 16)
    """
    if config.precision != "fp8":
        return None
    kept = _kept_modules(model, config.keep_bf16)
    param_names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_attention = {
        child for module in model.modules() if isinstance(module, nn.MultiheadAttention) for child in module.children()
    }
    names: list[str] = []
    excluded: dict[str, str] = {}
    for name, module in model.named_modules():
        own = {param_names[id(parameter)]: parameter for parameter in _own_params(module)}
        is_lookup = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if is_lookup or all(parameter.dim() < 2 for parameter in own.values()):
            continue
        dtypes = {precision.compute_dtype(param_name, parameter) for param_name, parameter in own.items()}
        if module in kept:
            reason = "in keep_bf16"
        elif module in in_attention:
            reason = "nn.MultiheadAttention reads its weight"
        elif not own.keys().isdisjoint(tensor_parallel):
            reason = "tensor-parallel"
        else:
            reason = _reason_against(module, dtypes)
        if reason:
            excluded[name or "the model"] = reason
        else:
            names.append(name)
    found = Float8Layers(tuple(names), excluded, _find_own_weights(model, names))
    if not names:
        raise ValueError(
            f'precision="fp8": no layer of {type(model).__name__} can compute in float8, which takes an nn.Linear '
            f'whose dimensions are multiples of {FLOAT8_ALIGN}: use precision="bf16". {found}'
        )
    return found


def _find_own_weights(model: nn.Module, layers: list[str]) -> dict[str, str]:
    """Return the weights, by name, that are parameters of one of these layers and of no other module.

    Without transposed ones: the all-gather keeps their order, and a GPU multiplies by rows.
    """
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    own = {name: model.get_submodule(name)._parameters.get("weight") for name in layers}
    param_names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        param_names[id(p)]: name for name, p in own.items() if p is not None and uses[id(p)] == 1 and p.is_contiguous()
    }


def _kept_modules(model: nn.Module, patterns: tuple[str | type[nn.Module], ...]) -> set[nn.Module]:
    """Return the modules that match a pattern, and all inside them; raise on a pattern that matches none."""
    kept: set[nn.Module] = set()
    for pattern in patterns:
        found = [module for name, module in model.named_modules() if matches(name, module, (pattern,))]
        if not found:
            shown = repr(pattern) if isinstance(pattern, str) else pattern.__name__
            raise ValueError(f"keep_bf16: no module of {type(model).__name__} matches {shown}")
        kept.update(inner for module in found for inner in module.modules())
    return kept


def _own_params(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield a module's own parameters, also if they are parametrized."""
    yield from module.parameters(recurse=False)
    for parametrization in getattr(module, "parametrizations", {}).values():
        yield from parametrization.parameters()


def _reason_against(module: nn.Module, dtypes: set[torch.dtype]) -> str:
    """Return why a module with matrices of these compute dtypes cannot compute in float8, or an empty string."""
    kind = type(module).__name__
    if not isinstance(module, nn.Linear):
        return f"{kind} is not an nn.Linear"
    override = vars(module).get("forward")  # that of a checkpointed layer calls the class's
    has_own_forward = override is not None and not getattr(override, "calls_class_forward", False)
    if type(module).forward is not nn.Linear.forward or has_own_forward:
        return f"{kind} has its own forward"
    if dtypes != {torch.bfloat16}:
        return f"computes in {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}"
    for size, what in ((module.in_features, "inputs"), (module.out_features, "outputs")):
        if not size:
            return f"has no {what}"
        if size % FLOAT8_ALIGN:
            return f"{size} {what} are not a multiple of {FLOAT8_ALIGN}"
    return ""

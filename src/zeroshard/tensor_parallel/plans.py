"""Tensor-parallel plans of known models: which layers are sharded along the tensor axis, and how.

Every block is sharded as in Megatron-LM: attention by heads, the MLP by its inner width. So a block needs two
all-reduces in forward and two in backward. The vocabulary is sharded too; logits are replicated, so any loss works on
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from zeroshard.models import GPT
from zeroshard.tensor_parallel.styles import (
    COLWISE_STYLES,
    ROWWISE_STYLES,
    Conv1DRowwiseParallel,
    FusedColwiseParallel,
)
from zeroshard.tensor_parallel.tp_shard import TPShard


@dataclass
class TensorPlan:
    """How the layers of a model are sharded along the tensor axis."""

    styles: dict[str, ParallelStyle]
    """Module name pattern → style, in the format of ``torch.distributed.tensor.parallel.parallelize_module``."""
    divisible_sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that must be multiples of the number of ranks: description → size."""
    resized_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module name pattern → attributes that hold a width and must shrink with it."""

    def check_divisible(self, ranks: int) -> None:
        """Raise if the number of ranks does not divide the model's sizes."""
        for what, count in self.divisible_sizes.items():
            if count % ranks:
                raise ValueError(
                    f"the tensor axis has {ranks} ranks, which do not divide the model's {count} {what}: use a number "
                    f"of ranks that divides {', '.join(f'{n} {w}' for w, n in self.divisible_sizes.items())}"
                )

    def tp_shards(self, model: nn.Module, ranks: int, rank: int = 0) -> dict[str, TPShard]:
        """Return the TP shard of each sharded parameter, by name. It uses shapes only: no mesh, no process group.

        >>> from zeroshard.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig(vocab_size=8, context=4, layers=1, heads=2, width=4))
        >>> shards = tensor_plan_for(model).tp_shards(model, ranks=2)
        >>> shards["blocks.0.attention.qkv.weight"].local_shape, "norm.weight" in shards
        (torch.Size([6, 4]), False)
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        shards = {}
        for _, module, style in self.styled_modules(model):
            for key, dim, num_fused in _sharded_params(style, module):
                parameter = module._parameters.get(key)
                if parameter is not None:
                    shards[names[id(parameter)]] = TPShard.split_evenly(parameter.shape, dim, ranks, rank, num_fused)
        return shards

    def styled_modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
        """Yield the name and the style of each module that has one."""
        for pattern, style in self.styles.items():
            for name, module in modules_matching(model, pattern):
                yield name, module, style

    def resize_attributes(self, model: nn.Module, ranks: int) -> list[tuple[nn.Module, str, int]]:
        """Shrink the attributes that hold a width; return each with its module and its full width."""
        full_widths = [
            (module, attribute, getattr(module, attribute))
            for pattern, attributes in self.resized_attributes.items()
            for _, module in modules_matching(model, pattern)
            for attribute in attributes
        ]
        for module, attribute, width in full_widths:
            setattr(module, attribute, width // ranks)
        return full_widths


def tensor_plan_for(model: nn.Module) -> TensorPlan | None:
    """Return the plan of a known model (the reference GPT, Hugging Face's Llama and GPT-2), None for any other.

    >>> from zeroshard.models import GPT, GPTConfig
    >>> sorted(tensor_plan_for(GPT(GPTConfig(vocab_size=8, context=4, layers=1, heads=2, width=4))).styles)[-1]
    'tokens'
    >>> tensor_plan_for(nn.Linear(1, 1)) is None
    True
    """
    if isinstance(model, GPT):
        return _gpt_plan(model)
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if name.count("."):
            continue  # look only at the model itself and at its backbone
        if _is_hf_class(module, "LlamaModel"):
            return _llama_plan(model, module, prefix)
        if _is_hf_class(module, "GPT2Model"):
            return _gpt2_plan(model, module, prefix)
    return None


def local_numels(model: nn.Module, ranks: int) -> dict[str, int]:
    """Return the elements of each parameter, by name, on rank 0 of a tensor axis; no other rank has more.

    >>> from zeroshard.models import GPT, GPTConfig
    >>> model = GPT(GPTConfig(vocab_size=9, context=4, layers=1, heads=2, width=4))
    >>> numels = local_numels(model, ranks=2)
    >>> numels["tokens.weight"], numels["positions.weight"]
    (20, 16)
    """
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if ranks == 1:
        return numels
    plan = tensor_plan_for(model)
    if plan is None:
        raise ValueError(
            f"no plan is known to shard a {type(model).__name__} over {ranks} ranks of a tensor axis: plans exist for "
            "zeroshard's GPT and Hugging Face's Llama and GPT-2"
        )
    plan.check_divisible(ranks)
    return numels | {name: tp_shard.local_shape.numel() for name, tp_shard in plan.tp_shards(model, ranks).items()}


def _sharded_params(style: ParallelStyle, module: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Yield what a style shards of a module: (parameter key, dimension, number of fused matrices)."""
    is_colwise = isinstance(style, COLWISE_STYLES)
    if is_colwise or isinstance(style, ROWWISE_STYLES):
        num_fused = style.num_fused if isinstance(style, FusedColwiseParallel) else 1
        # nn.Linear's weight is (outputs, inputs); nn.Embedding's and Conv1D's are (inputs, outputs)
        yield "weight", int(is_colwise != isinstance(module, nn.Linear)), num_fused
        if is_colwise:
            yield "bias", 0, num_fused


def modules_matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose name matches a pattern, part by part, as in torch's ``parallelize_module``."""
    patterns = pattern.split(".")
    for name, module in model.named_modules():
        parts = name.split(".")
        if len(parts) == len(patterns) and all(map(fnmatch, parts, patterns)):
            yield name, module


def _is_hf_class(module: nn.Module, name: str) -> bool:
    """Return whether a module is an instance of a transformers class; transformers need not be installed."""
    return any(c.__name__ == name and c.__module__.startswith("transformers.") for c in type(module).__mro__)


def _vocab_styles(embedding: str, head: str) -> Iterator[tuple[str, ParallelStyle]]:
    yield embedding, RowwiseParallel(input_layouts=Replicate())
    if head:
        yield head, ColwiseParallel(output_layouts=Replicate())


def _gpt_plan(model: GPT) -> TensorPlan:
    styles: dict[str, ParallelStyle] = {
        "blocks.*.attention.qkv": FusedColwiseParallel(num_fused=3),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
    }
    return TensorPlan(styles | dict(_vocab_styles("tokens", "head")), {"heads": model.config.heads})


def _llama_plan(model: nn.Module, backbone: nn.Module, prefix: str) -> TensorPlan:
    layer = f"{prefix}layers.*."
    replicate = Replicate()
    styles: dict[str, ParallelStyle] = {
        # the input becomes a DTensor once for all projections that read it, so their gradients are summed once
        f"{layer}self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": replicate}, desired_input_kwarg_layouts={"hidden_states": replicate}
        ),
        f"{layer}self_attn.q_proj": ColwiseParallel(),
        f"{layer}self_attn.k_proj": ColwiseParallel(),
        f"{layer}self_attn.v_proj": ColwiseParallel(),
        f"{layer}self_attn.o_proj": RowwiseParallel(),
        f"{layer}mlp": PrepareModuleInput(input_layouts=(replicate,), desired_input_layouts=(replicate,)),
        f"{layer}mlp.gate_proj": ColwiseParallel(),
        f"{layer}mlp.up_proj": ColwiseParallel(),
        f"{layer}mlp.down_proj": RowwiseParallel(),
    }
    config: Any = backbone.config
    divisible_sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "units of the MLP": config.intermediate_size,
    }
    return TensorPlan(styles | dict(_vocab_styles(f"{prefix}embed_tokens", _lm_head_name(model))), divisible_sizes)


def _gpt2_plan(model: nn.Module, backbone: nn.Module, prefix: str) -> TensorPlan:
    layer = f"{prefix}h.*."
    styles: dict[str, ParallelStyle] = {
        f"{layer}attn.c_attn": FusedColwiseParallel(num_fused=3),
        f"{layer}attn.c_proj": Conv1DRowwiseParallel(),
        f"{layer}mlp.c_fc": FusedColwiseParallel(),
        f"{layer}mlp.c_proj": Conv1DRowwiseParallel(),
    }
    config: Any = backbone.config
    divisible_sizes = {"attention heads": config.n_head, "units of the MLP": config.n_inner or 4 * config.n_embd}
    resized_attributes = {f"{layer}attn": ("split_size",)}
    return TensorPlan(
        styles | dict(_vocab_styles(f"{prefix}wte", _lm_head_name(model))), divisible_sizes, resized_attributes
    )


def _lm_head_name(model: nn.Module) -> str:
    return "lm_head" if isinstance(getattr(model, "lm_head", None), nn.Linear) else ""

"""Plans: which layers of a known model are divided along the tensor axis, and how.

Every block is divided as Megatron-LM does it: attention by heads, the MLP by its inner width, so that a block needs two
all-reduces in forward and two in backward. The vocabulary is divided too; logits come out whole, so that any loss works
on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from zeroshard.models.gpt import GPT
from zeroshard.tensor_parallel.styles import Conv1DRowwiseParallel, FusedColwiseParallel
from zeroshard.tensor_parallel.tp_shard import TPShard


@dataclass
class TensorPlan:
    """How a model is divided."""

    styles: dict[str, ParallelStyle]
    """By pattern of module names, as ``torch.distributed.tensor.parallel.parallelize_module`` takes them."""
    divisible_sizes: dict[str, int] = field(default_factory=dict)
    """What must be a multiple of the number of ranks: what it is → how many there are."""
    resized_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By pattern of module names, attributes that are a width and shrink with it."""

    def check_divisible(self, ranks: int) -> None:
        """Refuse a number of ranks that does not divide the model."""
        for what, count in self.divisible_sizes.items():
            if count % ranks:
                raise ValueError(
                    f"the mesh's tensor axis has {ranks} ranks, which do not divide the model's {count} {what}: give "
                    "the axis a number of ranks that divides "
                    f"{', '.join(f'{n} {w}' for w, n in self.divisible_sizes.items())}"
                )

    def tp_shards(self, model: nn.Module, ranks: int, rank: int = 0) -> dict[str, TPShard]:
        """How each parameter that the plan divides is divided, by name, from shapes alone: no mesh, no process group.

        >>> from zeroshard.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig(vocab_size=8, context=4, layers=1, heads=2, width=4))
        >>> shares = tensor_plan_for(model).tp_shards(model, ranks=2)
        >>> shares["blocks.0.attention.qkv.weight"].local_shape, "norm.weight" in shares
        (torch.Size([6, 4]), False)
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        shares = {}
        for pattern, style in self.styles.items():
            for name, module in model.named_modules():
                for key, dim, pieces in _sharded_params(style, module) if name_matches_pattern(name, pattern) else ():
                    parameter = module._parameters.get(key)
                    if parameter is not None:
                        shares[names[id(parameter)]] = TPShard.split_evenly(parameter.shape, dim, ranks, rank, pieces)
        return shares


def tensor_plan_for(model: nn.Module) -> TensorPlan | None:
    """The plan of a model that is known here: the reference GPT, Hugging Face's Llama and GPT-2; None of any other.

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
            continue  # the model itself, or the one inside its head
        if _is_hf_class(module, "LlamaModel"):
            return _llama_plan(model, module, prefix)
        if _is_hf_class(module, "GPT2Model"):
            return _gpt2_plan(model, module, prefix)
    return None


def local_numels(model: nn.Module, ranks: int) -> dict[str, int]:
    """Elements of each parameter, by name, on the first of ``ranks`` on a tensor axis; no other one has more.

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
            f"no plan is known to divide a {type(model).__name__} over {ranks} ranks of a tensor axis: known are "
            "zeroshard's GPT and Hugging Face's Llama and GPT-2"
        )
    plan.check_divisible(ranks)
    return numels | {name: share.local_shape.numel() for name, share in plan.tp_shards(model, ranks).items()}


def _sharded_params(style: ParallelStyle, module: nn.Module) -> Iterator[tuple[str, int, int]]:
    """What a style divides of a module: (key of the parameter, dimension, how many pieces are fused in it)."""
    outputs = isinstance(style, (FusedColwiseParallel, ColwiseParallel))
    if outputs or isinstance(style, (Conv1DRowwiseParallel, RowwiseParallel)):
        pieces = style.num_fused if isinstance(style, FusedColwiseParallel) else 1
        # nn.Linear's weight is (outputs, inputs); nn.Embedding's and Conv1D's (inputs, outputs)
        yield "weight", int(outputs != isinstance(module, nn.Linear)), pieces
        if outputs:
            yield "bias", 0, pieces


def name_matches_pattern(name: str, pattern: str) -> bool:
    """Whether a module's name fits a pattern, part by part, as torch reads it."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatch(part, want) for part, want in zip(parts, wanted, strict=True))


def _is_hf_class(module: nn.Module, name: str) -> bool:
    """Whether a module is of a class of Hugging Face's library, which need not be installed."""
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
    whole = Replicate()
    styles: dict[str, ParallelStyle] = {
        # the input becomes a DTensor once for all projections that read it, so that their gradients are summed once
        f"{layer}self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        f"{layer}self_attn.q_proj": ColwiseParallel(),
        f"{layer}self_attn.k_proj": ColwiseParallel(),
        f"{layer}self_attn.v_proj": ColwiseParallel(),
        f"{layer}self_attn.o_proj": RowwiseParallel(),
        f"{layer}mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        f"{layer}mlp.gate_proj": ColwiseParallel(),
        f"{layer}mlp.up_proj": ColwiseParallel(),
        f"{layer}mlp.down_proj": RowwiseParallel(),
    }
    config: Any = backbone.config
    counts = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "units of the MLP": config.intermediate_size,
    }
    return TensorPlan(styles | dict(_vocab_styles(f"{prefix}embed_tokens", _lm_head_name(model))), counts)


def _gpt2_plan(model: nn.Module, backbone: nn.Module, prefix: str) -> TensorPlan:
    layer = f"{prefix}h.*."
    styles: dict[str, ParallelStyle] = {
        f"{layer}attn.c_attn": FusedColwiseParallel(num_fused=3),
        f"{layer}attn.c_proj": Conv1DRowwiseParallel(),
        f"{layer}mlp.c_fc": FusedColwiseParallel(),
        f"{layer}mlp.c_proj": Conv1DRowwiseParallel(),
    }
    config: Any = backbone.config
    counts = {"attention heads": config.n_head, "units of the MLP": config.n_inner or 4 * config.n_embd}
    narrowed = {f"{layer}attn": ("split_size",)}
    return TensorPlan(styles | dict(_vocab_styles(f"{prefix}wte", _lm_head_name(model))), counts, narrowed)


def _lm_head_name(model: nn.Module) -> str:
    return "lm_head" if isinstance(getattr(model, "lm_head", None), nn.Linear) else ""

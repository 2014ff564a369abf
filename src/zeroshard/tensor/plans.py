"""Plans: which layers of a known model are divided along the tensor axis, and how.

Every block is divided as Megatron-LM does it: attention by heads, the MLP by its inner width, so that a block needs two
all-reduces in forward and two in backward. The vocabulary is divided too; logits come out whole, so that any loss works
on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from zeroshard.models.gpt import GPT
from zeroshard.tensor.styles import Columns, Rows


@dataclass
class Plan:
    """How a model is divided."""

    styles: dict[str, ParallelStyle]
    """By pattern of module names, as ``torch.distributed.tensor.parallel.parallelize_module`` takes them."""
    counts: dict[str, int] = field(default_factory=dict)
    """What must be a multiple of the number of ranks: what it is → how many there are."""
    narrowed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By pattern of module names, attributes that are a width and shrink with it."""

    def check(self, ranks: int) -> None:
        """Refuse a number of ranks that does not divide the model."""
        for what, count in self.counts.items():
            if count % ranks:
                raise ValueError(
                    f"the mesh's tensor axis has {ranks} ranks, which do not divide the model's {count} {what}: give "
                    f"the axis a number of ranks that divides {', '.join(f'{n} {w}' for w, n in self.counts.items())}"
                )


def plan_of(model: nn.Module) -> Plan | None:
    """The plan of a model that is known here: the reference GPT, Hugging Face's Llama and GPT-2; None of any other.

    >>> from zeroshard.models import GPT, GPTConfig
    >>> sorted(plan_of(GPT(GPTConfig(vocab_size=8, context=4, layers=1, heads=2, width=4))).styles)[-1]
    'tokens'
    >>> plan_of(nn.Linear(1, 1)) is None
    True
    """
    if isinstance(model, GPT):
        return _gpt(model)
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if name.count("."):
            continue  # the model itself, or the one inside its head
        if _is_transformers(module, "LlamaModel"):
            return _llama(model, module, prefix)
        if _is_transformers(module, "GPT2Model"):
            return _gpt2(model, module, prefix)
    return None


def _is_transformers(module: nn.Module, name: str) -> bool:
    """Whether a module is of a class of Hugging Face's library, which need not be installed."""
    return any(c.__name__ == name and c.__module__.startswith("transformers.") for c in type(module).__mro__)


def _vocabulary(embedding: str, head: str) -> Iterator[tuple[str, ParallelStyle]]:
    yield embedding, RowwiseParallel(input_layouts=Replicate())
    if head:
        yield head, ColwiseParallel(output_layouts=Replicate())


def _gpt(model: GPT) -> Plan:
    styles: dict[str, ParallelStyle] = {
        "blocks.*.attention.qkv": Columns(pieces=3),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
    }
    return Plan(styles | dict(_vocabulary("tokens", "head")), {"heads": model.config.heads})


def _llama(model: nn.Module, inner: nn.Module, prefix: str) -> Plan:
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
    config: Any = inner.config
    counts = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "units of the MLP": config.intermediate_size,
    }
    return Plan(styles | dict(_vocabulary(f"{prefix}embed_tokens", _head(model))), counts)


def _gpt2(model: nn.Module, inner: nn.Module, prefix: str) -> Plan:
    layer = f"{prefix}h.*."
    styles: dict[str, ParallelStyle] = {
        f"{layer}attn.c_attn": Columns(pieces=3),
        f"{layer}attn.c_proj": Rows(),
        f"{layer}mlp.c_fc": Columns(),
        f"{layer}mlp.c_proj": Rows(),
    }
    config: Any = inner.config
    counts = {"attention heads": config.n_head, "units of the MLP": config.n_inner or 4 * config.n_embd}
    narrowed = {f"{layer}attn": ("split_size",)}
    return Plan(styles | dict(_vocabulary(f"{prefix}wte", _head(model))), counts, narrowed)


def _head(model: nn.Module) -> str:
    return "lm_head" if isinstance(getattr(model, "lm_head", None), nn.Linear) else ""

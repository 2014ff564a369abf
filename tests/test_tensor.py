"""Tensor parallelism: the same numbers as the undivided model on one rank, whatever mesh and stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from against_plain import adamw, built, part, sgd, tokens, train_plainly
from plain import assert_close
from ranks import RanksFailed, run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import zeroshard
from zeroshard.models import GPT, GPTConfig

VOCABULARY = 13  # two ranks do not divide it
AXES = {2: ("shard", "tensor"), 3: ("replicate", "shard", "tensor")}
MESHES = [(1, 2), (2, 2), (2, 1, 2)]


def gpt(**options: Any) -> GPT:
    return GPT(GPTConfig(**{"vocab_size": VOCABULARY, "context": 8, "layers": 2, "heads": 4, "width": 16} | options))


def gpt_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(ids, ids)
    loss.backward()
    return loss  # type: ignore[no-any-return]


def hf_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
    loss.backward()
    return loss


def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)])


def data_part(batch: Any, rank: int, shape: tuple[int, ...]) -> Any:
    """Ranks of one tensor axis get the same rows."""
    tensor = shape[-1]
    return part(batch, rank // tensor, torch.Size(shape).numel() // tensor)


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: zeroshard.full_parameter(model, name) for name, _ in model.named_parameters()}


def train(rank: int, model: nn.Module, step: Any, batches: Any, make: Any, shape: Any, clip: Any, options: Any) -> Any:
    model = copy.deepcopy(model)
    optimizer = make(model)
    model, optimizer = zeroshard.shard(model, optimizer, mesh=mesh_of(shape), timeout=20, **options)
    losses, norms = [], []
    for batch in batches:
        losses.append(step(model, data_part(batch, rank, shape)).item())
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(*clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, wholes(model)


def compare(
    model: nn.Module,
    step: Any,
    shape: tuple[int, ...],
    *,
    make: Any = sgd,
    clip: tuple[float, float] | None = None,
    run: Any = run_threads,
    relative: float = 1e-5,
    **options: Any,
) -> None:
    """Train divided and on one rank, and compare losses, norms and every parameter."""
    batches = tokens(3, VOCABULARY, rows=4)
    norms: list[float] = []

    def clipping(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = step(model, ids)
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), *clip)))
        return loss  # type: ignore[no-any-return]

    losses, parameters, _ = train_plainly(model, clipping, batches, make, 1)
    results = run(torch.Size(shape).numel(), train, model, step, batches, make, shape, clip, options)
    mean = torch.tensor([result[0] for result in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=relative, atol=relative)
    for _, theirs, ours in results:
        torch.testing.assert_close(theirs, norms, rtol=relative, atol=relative)
        assert_close(ours, parameters, relative)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", MESHES)
def test_a_divided_gpt_trains_as_on_one_rank(shape: tuple[int, ...], stage: int) -> None:
    model = built(lambda: gpt(tied=stage % 2 == 0))
    compare(model, gpt_step, shape, stage=stage, clip=(0.05, 2.0), make=adamw if stage > 1 else sgd)


def test_the_infinity_norm_is_that_of_the_whole_model() -> None:
    compare(built(gpt), gpt_step, (2, 2), stage=3, clip=(0.01, float("inf")))


def test_four_ranks_divide_a_gpt() -> None:
    compare(built(gpt), gpt_step, (1, 4), stage=2, clip=(0.05, 2.0))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_divided_gpt_trains_in_real_processes(stage: int) -> None:
    compare(built(gpt), gpt_step, (2, 2), stage=stage, clip=(0.05, 2.0), run=run_processes)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(("shape", "stage"), [((1, 2), 0), ((2, 2), 3), ((2, 1, 2), 2), ((2, 2), 1)])
def test_a_divided_hugging_face_model_trains_as_on_one_rank(make: Any, shape: tuple[int, ...], stage: int) -> None:
    compare(built(make), hf_step, shape, stage=stage, clip=(0.05, 2.0), relative=3e-5)

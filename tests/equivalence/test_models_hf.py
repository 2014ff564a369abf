"""Models of transformers, PEFT and PyTorch Geometric, unmodified, train sharded as they train plainly."""

from __future__ import annotations

import copy
from typing import Any

import hugging_face
import peft
import pytest
import torch
import transformers
from pairs import at_stages, every_stage
from plain import Tensors, assert_same, decayed, masters, numbers, sharded, split, tokens
from ranks import run_processes, run_threads
from torch import nn
from zoo import built

import zeroshard
from zeroshard.sharding.layout import ALIGN_ELEMENTS, round_up

VOCABULARY = 61


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    config.bos_token_id = config.eos_token_id = None
    return built(lambda: transformers.GPT2LMHeadModel(config))


def llama() -> nn.Module:
    return built(lambda: hugging_face.llama(VOCABULARY))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        max_position_embeddings=32,
    )
    return built(lambda: transformers.MixtralForCausalLM(config))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    return built(lambda: transformers.T5ForConditionalGeneration(config))


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return built(lambda: transformers.ViTForImageClassification(config))


def keyword_step(model: Any, batch: Tensors) -> torch.Tensor:
    loss = model(**batch).loss
    loss.backward()
    return loss


def language_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return keyword_step(model, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 3)])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_causal_language_models_train_as_plain(make: Any, stage: int, world: int) -> None:
    assert_same(make(), language_step, tokens(3, VOCABULARY), stage=stage, world=world)


def test_tied_weights_stay_one_parameter() -> None:
    def body(rank: int) -> tuple[bool, bool]:
        model, _ = zeroshard.shard(gpt2(), stage=3)
        tied = model.lm_head.weight is model.transformer.wte.weight
        with zeroshard.gathered(model):
            state = model.state_dict()
            return tied, torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])

    assert run_threads(2, body) == [(True, True)] * 2


@at_stages(1, 3)
def test_mixture_of_experts_trains_as_plain(stage: int) -> None:
    """Part by part: the router's balancing loss of a batch is not the mean of its parts'."""
    assert_same(mixtral(), language_step, tokens(3, VOCABULARY), stage=stage, whole=False)


@at_stages(2, 3)
def test_encoder_decoder_with_shared_embeddings_trains_as_plain(stage: int) -> None:
    sources, targets = tokens(2, VOCABULARY), tokens(2, VOCABULARY, length=4)
    batches = [{"input_ids": a, "labels": b} for a, b in zip(sources, targets, strict=True)]
    assert_same(t5(), keyword_step, batches, stage=stage)


@at_stages(1, 3)
def test_vision_transformer_trains_as_plain(stage: int) -> None:
    images = numbers(2, 6, 3, 8, 8)
    batches = [{"pixel_values": image, "labels": torch.arange(6) % 5} for image in images]
    assert_same(vit(), keyword_step, batches, stage=stage)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_own_gradient_checkpointing_trains_as_plain(make: Any, reentrant: bool) -> None:
    model = make()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    assert model.is_gradient_checkpointing
    assert_same(model, language_step, tokens(2, VOCABULARY), stage=3)


# ------------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_generate_gives_the_plain_models_tokens_before_between_and_after_training(make: Any, beams: int) -> None:
    """Weights of some size, so that the likeliest token is far from the second and not the same each time."""
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    prompt = tokens(1, VOCABULARY, rows=2)[0]
    data = tokens(2, VOCABULARY)

    def small_sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def run(model: Any, optimizer: Any, rank: int, world: int) -> list[torch.Tensor]:
        said = []
        for batch in [None, *data]:
            if batch is not None:
                model.train()
                language_step(model, split(batch, rank, world))
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
            said.append(
                model.generate(
                    prompt, max_new_tokens=8, do_sample=False, num_beams=beams, pad_token_id=0, use_cache=True
                )
            )
        return said

    def body(rank: int) -> list[torch.Tensor]:
        mine, optimizer = sharded(model, small_sgd, stage=3, timeout=20)
        return run(mine, optimizer, rank, 2)

    plain = copy.deepcopy(model)
    expected = run(plain, small_sgd(plain), 0, 1)
    assert expected[0][:, 5:].unique().numel() > 2
    for said in run_threads(2, body):
        for ours, theirs in zip(said, expected, strict=True):
            assert torch.equal(ours, theirs)


def generate_unevenly(rank: int, stage: int, wrap: bool) -> None:
    """Ranks end after different numbers of tokens; with replicated parameters, a rank generates alone."""
    model = gpt2().eval()
    expected = [model.generate(tokens(1, VOCABULARY, rows=1)[0], **uneven(other)) for other in (0, 1)]
    if wrap:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    model, _ = zeroshard.shard(model, stage=stage, timeout=20)
    for _ in range(2):
        assert torch.equal(model.generate(tokens(1, VOCABULARY, rows=1)[0], **uneven(rank)), expected[rank])
    with zeroshard.gathered(model):
        assert torch.equal(model.generate(tokens(1, VOCABULARY, rows=1)[0], **uneven(rank)), expected[rank])
    if rank == 0 and stage < 3:
        assert torch.equal(model.generate(tokens(1, VOCABULARY, rows=1)[0], **uneven(0)), expected[0])
    plain = zeroshard.unwrap(model)
    assert not getattr(plain, "_is_fsdp_managed_module", False)


def uneven(rank: int) -> dict[str, Any]:
    return {"max_new_tokens": 3 + 4 * rank, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize(("stage", "wrap"), [(3, False), (3, True), (1, False)])
def test_ranks_generate_different_numbers_of_tokens(stage: int, wrap: bool) -> None:
    run_processes(2, generate_unevenly, stage, wrap)


# ----------------------------------------------------------------------------------------------------------- LoRA


def lora() -> nn.Module:
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], lora_dropout=0.0, fan_in_fan_out=True
    )
    config.init_lora_weights = False  # not zero, so that both factors have gradients at once
    return built(lambda: peft.get_peft_model(gpt2(), config))


@every_stage
def test_lora_on_a_frozen_base_trains_as_plain(stage: int) -> None:
    assert_same(lora(), language_step, tokens(3, VOCABULARY), stage=stage)


def test_lora_with_checkpointing_trains_as_plain() -> None:
    """Reentrant checkpointing of a frozen base needs inputs that require gradients, which transformers arranges."""
    model = lora()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    assert_same(model, language_step, tokens(2, VOCABULARY), stage=3)


@every_stage
def test_adapters_are_merged_evaluated_and_unmerged_inside_gathered(stage: int) -> None:
    model = lora()
    batch = tokens(1, VOCABULARY)[0]
    plain = copy.deepcopy(model)
    plain.merge_adapter()
    with torch.no_grad():
        expected = plain(input_ids=batch).logits

    def body(rank: int) -> Any:
        mine, optimizer = sharded(model, decayed, stage=stage)
        before = masters(mine)
        with zeroshard.gathered(mine), torch.no_grad():
            mine.merge_adapter()
            logits = mine(input_ids=batch).logits
            mine.unmerge_adapter()
        after = masters(mine)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        language_step(mine, split(batch, rank, 2))
        optimizer.step()
        return logits

    for logits in run_threads(2, body):
        torch.testing.assert_close(logits, expected)


@at_stages(1, 2, 3)
def test_frozen_parameters_cost_no_gradient_no_optimizer_state_and_no_reduction(stage: int) -> None:
    model = lora()
    trained = sum(round_up(p.numel(), ALIGN_ELEMENTS) for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert frozen > 4 * trained

    def body(rank: int) -> Any:
        mine, optimizer = sharded(model, decayed, stage=stage)
        for batch in tokens(2, VOCABULARY):
            language_step(mine, split(batch, rank, 2))
            optimizer.step()
            optimizer.zero_grad()
        return zeroshard.report(mine)

    for report in run_threads(2, body):
        peak = {kind: held.peak for (kind, _), held in report.memory.items()}
        padding = 4 * 2 * ALIGN_ELEMENTS * 8  # bytes: each of at most 8 units is made to divide over the ranks
        assert 0 < peak["gradients"] <= 4 * trained // (1 if stage == 1 else 2) + padding
        assert 0 < peak["optimizer states"] <= 4 * trained // 2 + padding  # SGD's momentum
        assert 0 < report.collectives["reduce-scatter"].bytes <= 4 * trained + padding
        assert peak["autograd"] <= 4 * trained


# ------------------------------------------------------------------------------------------------------------ graph


class GraphNet(nn.Module):
    """Three kinds of message passing over one graph."""

    def __init__(self) -> None:
        from torch_geometric.nn import GATConv, GCNConv, SAGEConv  # late: it takes two seconds

        super().__init__()
        self.convs = nn.ModuleList([GCNConv(5, 8), GATConv(8, 4, heads=2), SAGEConv(8, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = torch.relu(conv(x, edges))
        return self.head(x)


def graph_step(model: Any, batch: Tensors) -> torch.Tensor:
    loss = model(batch["nodes"][0], batch["edges"][0]).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 2), (3, 3)])
def test_message_passing_trains_as_plain(stage: int, world: int) -> None:
    """Part by part: every rank has a graph of its own."""
    pytest.importorskip("torch_geometric", reason="in the extra test-nightly")
    edges = [batch[..., :2].transpose(1, 2).argsort(-1) % 9 for batch in numbers(3, world, 20, 2, seed=3)]
    batches = [{"nodes": nodes, "edges": edge} for nodes, edge in zip(numbers(3, world, 9, 5), edges, strict=True)]
    assert_same(built(GraphNet), graph_step, batches, stage=stage, world=world, whole=False)


@every_stage
def test_embeddings_that_are_resized_after_shard_are_refused(stage: int) -> None:
    model, _ = sharded(gpt2(), decayed, stage=stage)
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    with pytest.raises(RuntimeError, match=r"the data of 'transformer\.wte\.weight' was replaced after zeroshard"):
        model(tokens(1, VOCABULARY)[0])

"""Muon in the main job: its numbers are those of torch's two optimizers in a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain import Tensors, take_step
from ranks import run_threads
from torch import nn
from zoo import built

import zeroshard
from zeroshard.models import GPT, GPTConfig
from zeroshard.optim import MuonWithAdamW
from zeroshard.sharding import find_block_matrices
from zeroshard.train.commands.train import read_options
from zeroshard.train.options import StepOptions
from zeroshard.train.trainer import learning_rate
from zeroshard.train.training_setup import make_optimizer

CONFIG = GPTConfig(vocab_size=50, context=8, layers=2, heads=2, width=32)
OPTIONS = StepOptions(optimizer="muon", steps=6, warmup=2, lr=3e-3, muon_lr=2e-2, weight_decay=0.2)


GPT_AT_START = built(lambda: GPT(CONFIG))


@pytest.fixture(autouse=True)
def one_library_for_products(settled: None) -> None:
    """On a CPU without bf16, torch changes it at Muon's first product, and sums of fp32 are rounded differently."""
    torch.backends.mkldnn.set_flags(False)


def make_gpt() -> GPT:
    return copy.deepcopy(GPT_AT_START)  # ranks that are threads share one generator


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (2, 9), generator=generator) for _ in range(count)]


def unfused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Fused kernels of a CPU round the last elements of a tensor differently, so slices differ in the last bit."""
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"] = None
    return optimizer


def train_plain(precision: str | None) -> Tensors:
    """Train with torch's Muon and AdamW, as a script without zeroshard does it; with bf16, on fp32 master weights."""
    model = make_gpt()
    masters = dict(model.named_parameters())
    if precision == "bf16":
        masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        model = model.to(torch.bfloat16)
    matrices = [p for name, p in masters.items() if name.startswith("blocks.") and p.dim() == 2]
    others = [p for name, p in masters.items() if not (name.startswith("blocks.") and p.dim() == 2)]
    muon = torch.optim.Muon(matrices, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": 0.2},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=OPTIONS.betas)
    for step, tokens in enumerate(batches(4)):
        muon.param_groups[0]["lr"] = learning_rate(step, OPTIONS, "muon")
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step, OPTIONS)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.to(masters[name].dtype)
        muon.step()
        adamw.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
                parameter.grad = None
    return {name: master.detach().clone() for name, master in masters.items()}


def train_sharded(rank: int, stage: int, precision: str | None) -> Tensors:
    """Every rank has the same batch: the mean of two equal gradients is the plain run's to the bit."""
    plain = make_gpt()
    model, optimizer = zeroshard.shard(plain, unfused(make_optimizer(plain, OPTIONS)), stage=stage, precision=precision)
    for step, tokens in enumerate(batches(4)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, OPTIONS, group["rule"])
        take_step(optimizer, model(tokens[:, :-1], tokens[:, 1:]))
    return {name: zeroshard.full_parameter(model, name).clone() for name, _ in model.named_parameters()}


@pytest.mark.guarantee("Whole-parameter rules")
@pytest.mark.parametrize(
    ("ranks", "stage", "precision"),
    [
        (2, 3, None),
        (2, 0, None),
        (2, 1, None),
        (2, 2, None),
        (2, 3, "bf16"),
        (1, 2, "bf16"),
    ],
)
def test_the_numbers_are_those_of_torchs_two_optimizers(ranks: int, stage: int, precision: str | None) -> None:
    expected = train_plain(precision)
    for found in run_threads(ranks, train_sharded, stage, precision):
        different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
        assert different == []


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_clipping_and_offload_keep_the_bits(precision: str | None) -> None:
    def train(rank: int, **options: Any) -> Tensors:
        plain = make_gpt()
        inner = unfused(make_optimizer(plain, OPTIONS))
        # with fp16, the first step overflows
        model, optimizer = zeroshard.shard(plain, inner, precision=precision, loss_scale=2.0**17, **options)
        for tokens in batches(4):
            take_step(optimizer, optimizer.scale(model(tokens[:, :-1], tokens[:, 1:])), 0.5)
        assert precision != "fp16" or float(optimizer.loss_scale) == 2.0**16
        return {name: zeroshard.full_parameter(model, name).clone() for name, _ in model.named_parameters()}

    expected, _ = run_threads(2, train)
    for offload in ({"optimizer": "host"}, {"optimizer": ("host", 0.5)}, {"optimizer": "host", "parameters": "host"}):
        for found in run_threads(2, lambda rank, offload=offload: train(rank, offload=offload)):
            assert all(torch.equal(value, found[name]) for name, value in expected.items()), offload


def test_one_step_updates_every_parameter_by_its_own_rule() -> None:
    model = make_gpt()
    optimizer = make_optimizer(model, OPTIONS)
    assert isinstance(optimizer, MuonWithAdamW)
    rules = {id(p): group["rule"] for group in optimizer.param_groups for p in group["params"]}
    assert {name for name, p in model.named_parameters() if rules[id(p)] == "muon"} == {
        f"blocks.{block}.{layer}.weight"
        for block in range(2)
        for layer in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    }
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.2, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [2e-2, 3e-3, 3e-3]
    model(*(part.contiguous() for part in (batches(1)[0][:, :-1], batches(1)[0][:, 1:]))).backward()
    before = copy.deepcopy(model.state_dict())
    assert optimizer.step(lambda: 3.0) == 3.0
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
    states = {name: set(optimizer.state[p]) for name, p in model.named_parameters()}
    assert states["blocks.0.mlp.up.weight"] == {"momentum_buffer"}
    assert states["head.weight"] == states["blocks.0.mlp.up.bias"] == {"step", "exp_avg", "exp_avg_sq"}


def test_adamw_is_the_default_and_has_no_rule() -> None:
    model = make_gpt()
    optimizer = make_optimizer(model, StepOptions())
    assert type(optimizer) is torch.optim.AdamW
    assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(11, 0.1), (18, 0.0)]
    assert learning_rate(30, StepOptions()) == learning_rate(30, StepOptions(), "adamw")


def test_which_matrices_are_muons() -> None:
    """Not embeddings inside of blocks, not what is tied to the head, not frozen matrices or kernels of convolutions."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.places = nn.Linear(4, 4), nn.Embedding(5, 4)
            self.frozen, self.kernel = nn.Linear(4, 4).requires_grad_(False), nn.Conv1d(4, 4, 3)
            self.tied = nn.Linear(4, 9, bias=False)

    model = nn.ModuleDict({"blocks": nn.ModuleList([Odd(), Odd()]), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["blocks"][1].tied.weight
    assert find_block_matrices(model) == ["blocks.0.linear.weight", "blocks.0.tied.weight", "blocks.1.linear.weight"]


def test_a_model_without_matrices_in_blocks_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    with pytest.raises(ValueError, match=r"Sequential has no trained matrices in repeated blocks.*: use AdamW"):
        make_optimizer(model, OPTIONS)


def test_the_flags_are_read_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    training = read_options(["--optimizer", "muon", "--muon-lr", "0.02"]).training
    assert (training.optimizer, training.muon_lr) == ("muon", 0.02)
    with pytest.raises(ValueError, match="muon_lr must be positive"):
        StepOptions(optimizer="muon", muon_lr=0.0)
    with pytest.raises(SystemExit):
        read_options(["--optimizer", "sgd"])
    assert "sgd" in capsys.readouterr().err

"""Memory tiers on a GPU, where one is: streams, pinned memory, and the same bits wherever an update runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import OPTIMIZERS, assert_same, everything
from ranks import run_processes
from zoo import built

import zeroshard
from zeroshard.models.gpt import GPT, GPTConfig
from zeroshard.optim.cpu.apply import make_update_spec
from zeroshard.optim.cpu.chunk import StateChunk
from zeroshard.optim.cpu.kernels import load_kernels
from zeroshard.optim.hyperparams import AdamHyperparams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALL = GPTConfig(vocab_size=256, context=64, layers=4, heads=4, width=128)
ALIKE = ("Adam", "AdamW", "SGD", "momentum", "nesterov", "fused SGD")  # the same bits on a GPU and on the host
ROUNDED = torch.__version__.startswith("2.11.")  # as the host's update rounds what a GPU's fused Adam does
if ROUNDED:
    ALIKE = (*ALIKE, "fused AdamW")
LENGTHS = (1, 7, 37, 1025, 40_003)
CHOSEN: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.95, 0.98), "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.9999)}),
    (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
)
TIERS: tuple[dict[str, Any], ...] = (
    {"optimizer": "host"},
    {"optimizer": ("host", 0.4)},
    {"optimizer": "host", "gradients": "device"},
    {"optimizer": "host", "parameters": "host"},
    {"optimizer": {"host": 0.3, "disk": 0.4}, "gradients": "disk", "parameters": "disk"},
)


def trained(
    kind: str, offload: Any = None, steps: int = 5, clip: float | None = None, accumulate: int = 1, **options: Any
) -> dict[str, Any]:
    """All numbers of a few steps."""
    model = built(lambda: GPT(SMALL).cuda())
    model, optimizer = zeroshard.shard(model, OPTIMIZERS[kind](model.parameters()), offload=offload, **options)
    zeroshard.checkpoint_activations(model)
    generator, told = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        for _ in range(accumulate):
            tokens = torch.randint(0, 256, (2, 64), generator=generator).cuda(non_blocking=True)
            loss = model(tokens, tokens)
            optimizer.scale(loss / accumulate).backward()
            told.append(loss.detach())
        if clip is not None:
            told.append(optimizer.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad()
    return {"steps": told, **everything(model, optimizer)}


@pytest.mark.parametrize("kind", ALIKE)
def test_an_update_that_moves_to_the_host_changes_no_bit(kind: str) -> None:
    wanted = trained(kind, precision="bf16", clip=0.5)
    assert_same(trained(kind, {"optimizer": "host"}, precision="bf16", clip=0.5), wanted)


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize(("kind", "chosen"), CHOSEN)
def test_the_native_update_gives_a_gpus_bits(kind: Any, chosen: dict[str, Any], way: str) -> None:
    native = load_kernels()
    if native is None or (way == "fused" and kind is not torch.optim.SGD and not ROUNDED):
        pytest.skip("no C compiler here, or a torch whose fused Adam was not looked at")
    if way == "fused" and kind is torch.optim.Adam and chosen["weight_decay"]:
        pytest.skip("how it rounds a decay that is part of the gradient is not known: see docs/tiers.md")
    torch.manual_seed(0)
    for numel in LENGTHS:
        parameter = torch.nn.Parameter(torch.randn(numel, device="cuda"))
        optimizer = kind([parameter], lr=1e-2, **chosen, **{way: True})
        held: dict[str, Any] = {}
        lines = {key: torch.zeros(numel) for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
        lines[""] = parameter.detach().cpu()
        for step in (*range(1, 12), 102, 140, 173, 175, 5000):  # where the GPU's powers of beta are its own
            gradient = torch.randn(numel) * 10 ** (6 * torch.rand(numel) - 4)
            parameter.grad = gradient.cuda()
            state = optimizer.state[parameter]
            if kind is not torch.optim.SGD:
                held = {"step": torch.tensor(step - 1.0)}
                if state:
                    state["step"].fill_(step - 1.0)
            recipe = make_update_spec(
                optimizer, optimizer.param_groups[0], held, (torch.float32,) * 3, is_cuda_rounding=True
            )
            assert recipe is not None
            recipe.apply(native, lines, lines, gradient, None, (), 2)
            optimizer.step()
            if not isinstance(recipe.hyperparams, AdamHyperparams):
                held = {"momentum_buffer": lines["momentum_buffer"]}
            for key in recipe.state_keys:
                assert torch.equal(lines[key], state[key].cpu()), (numel, step, key)
            assert torch.equal(lines[""], parameter.detach().cpu()), (numel, step)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16", "clip": 1.0}, {"accumulate": 2}])
@pytest.mark.parametrize("tiers", TIERS)
def test_where_states_rest_changes_no_bit(tiers: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    assert_same(trained("AdamW", {**tiers, "directory": tmp_path}, **options), trained("AdamW", **options))


def test_fused_adam_differs_in_last_bits_alone() -> None:
    wanted, ours = (trained("fused AdamW", offload, steps=1)["parameters"] for offload in (None, "host"))
    for name, value in wanted.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_a_plain_loop_is_updated_ahead_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    confirmed = []
    exchange = StateChunk.swap
    monkeypatch.setattr(StateChunk, "swap", lambda granule, *a: (confirmed.append(granule), exchange(granule, *a))[1])
    wanted = trained("AdamW", precision="bf16", steps=8)
    assert_same(trained("AdamW", "host", precision="bf16", steps=8), wanted)
    assert confirmed


def on_ranks(rank: int, offload: Any, stage: int) -> list[torch.Tensor]:
    found = trained("AdamW", offload, stage=stage, precision="bf16", clip=0.5)
    return [value.cpu() for value in (*found["parameters"].values(), *found["steps"])]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_on_one_gpu(stage: int) -> None:
    wanted = run_processes(2, on_ranks, None, stage)
    assert_same(run_processes(2, on_ranks, {"optimizer": ("host", 0.6)}, stage), wanted)


def test_states_that_are_sent_away_leave_the_device_and_come_back() -> None:
    model = built(lambda: GPT(SMALL).cuda())
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), precision="bf16")
    tokens = torch.randint(0, 256, (2, 64)).cuda()
    model(tokens, tokens).backward()
    optimizer.step()
    before, held = everything(model, optimizer), torch.cuda.memory_allocated()
    states = zeroshard.report(model).states
    zeroshard.offload_states(model)
    assert torch.cuda.memory_allocated() <= held - 0.95 * states
    zeroshard.reload_states(model)
    assert_same(everything(model, optimizer), before)

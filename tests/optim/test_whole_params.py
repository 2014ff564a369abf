"""Parameters that an optimizer updates as a whole: the plain run's numbers in every stage, precision, mesh and tier."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import at_stages
from plain import (
    adamw,
    assert_close,
    assert_equal,
    assert_same_training,
    batches,
    clip,
    copied,
    full_parameters,
    masters,
    mesh_of,
    net_loss,
    of,
    run_plain,
    sharded,
    shares,
    split,
    take_step,
    token_step,
    train_steps,
)
from ranks import run_processes, run_threads, seeded
from rules import Blend, Lamb
from torch import nn
from zoo import Skips, built, make_net

import zeroshard
from zeroshard.models import GPT, GPTConfig


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb([p for p in model.parameters() if p.requires_grad])


def lamb_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return Lamb([{"params": [p for p in trained if p.dim() == d], "lr": 0.01 * (d + 1)} for d in (1, 2)])


def blend(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = {"params": [p for p in trained if p.dim() == 2 and p.numel()], "ortho": True}
    return Blend([matrices, {"params": [p for p in trained if p.dim() != 2 or not p.numel()]}])


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for p in model.parameters() if p.numel()], lr=0.03)


BASE = make_net(blocks=2)
DATA = batches(4)
WHOLE: dict[str, Any] = {"elementwise": False}  # not tried, which takes most of the time of these small runs


@pytest.mark.guarantee("Whole-parameter rules")
@pytest.mark.parametrize(
    ("make", "world"), [(lamb, 1), (lamb, 2), (lamb, 3), (lamb, 4), (adafactor, 1), (adafactor, 3)]
)
def test_all_stages_train_like_the_plain_run(make: Any, world: int) -> None:
    assert_same_training(world, BASE, make, DATA, **WHOLE)


@pytest.mark.usefixtures("tried_once")
def test_whole_and_elementwise_groups_live_in_one_optimizer() -> None:
    assert_same_training(2, BASE, blend, DATA)


def clipped(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    """Two backwards a step, a clip in every other step, gradients set to zero instead of None, and a scheduler."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for number, batch in enumerate(data):
        for part in (batch, batch.flip(0)):
            (net_loss(model, part) / 2).backward()
        if number % 2:
            clip(model, optimizer, 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=number > 1)
        optimizer.param_groups[0]["lr"] *= 1.5


def test_accumulation_clipping_groups_and_schedules_change_nothing() -> None:
    assert_same_training(3, BASE, lamb_in_groups, DATA, clipped, identical=False, **WHOLE)


def steps_twice(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    """Gradients stay clipped after a step, and a further backward adds to them."""
    for batch in data[:2]:
        token_step(model, batch)
        for norm in (0.1, 0.05):
            clip(model, optimizer, norm)
            optimizer.step()


@pytest.mark.parametrize("world", [1, 2])
def test_a_clip_lasts_after_the_step(world: int) -> None:
    assert_same_training(world, BASE, lamb, DATA, steps_twice, identical=False, **WHOLE)


def steps_of_scaled(rank: int, world: int, elementwise: bool) -> Any:
    options = {"precision": "fp16", "keep_fp32": ["head"], "elementwise": elementwise}
    model, optimizer = sharded(BASE, adamw, **options)
    for batch in DATA[:2]:
        optimizer.scale(net_loss(model, split(batch, rank, world))).backward()
        for norm in (0.1, 0.05):
            optimizer.clip_grad_norm_(norm)
            optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    return [{name: read(model, name) for name in names} for read in (zeroshard.full_parameter, zeroshard.full_gradient)]


@pytest.mark.parametrize("world", [1, 2])
def test_unscaled_and_clipped_gradients_are_those_of_elementwise_optimizers(world: int) -> None:
    whole, flat = (run_threads(world, steps_of_scaled, world, elementwise)[0] for elementwise in (False, True))
    for ours, wanted in zip(whole, flat, strict=True):
        assert_equal(ours, wanted)


def test_a_hybrid_mesh_trains_like_the_plain_run() -> None:
    assert_same_training(4, BASE, lamb, DATA, mesh=(2, 2), **WHOLE)


@pytest.mark.parametrize("make", [lamb, adafactor])
def test_gloo_processes_train_like_the_plain_run_in_one_call_and_in_batches(make: Any) -> None:
    assert_same_training(3, BASE, make, DATA, stages=[3], run=run_processes, bucket_size=300, **WHOLE)


def test_small_buckets_give_the_same_bits_and_bounded_exchanges() -> None:
    results = []
    for bucket_size in (100_000, 300):

        def body(rank: int, bucket_size: int = bucket_size) -> Any:
            model, optimizer = sharded(BASE, adafactor, bucket_size=bucket_size)
            train_steps(model, optimizer, shares(DATA, rank, 2))
            report = zeroshard.report(model)
            return full_parameters(model), report.collectives["all-to-all"].count, report.memory["step", "device"].peak

        results.append(run_threads(2, body)[0])
    assert_equal(results[1][0], results[0][0])
    assert results[0][1] == 2 and results[1][1] > 2
    largest = max(p.numel() for p in BASE.parameters())
    assert results[1][2] <= 4 * 4 * max(300, 2 * largest) < results[0][2]


def test_a_single_rank_steps_its_values_and_gradients_without_copies() -> None:
    model, optimizer = sharded(BASE, lamb, **WHOLE)
    token_step(model, DATA[0])
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    report = zeroshard.report(model)
    assert report.memory["step", "device"].peak == 0 and "all-to-all" not in report.collectives


def test_a_step_runs_after_one_in_which_the_optimizer_has_raised() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(BASE, adafactor, bucket_size=300, timeout=20)
        token_step(model, DATA[0])
        (group,) = optimizer.param_groups
        rate, group["lr"] = group["lr"], "fast"
        with pytest.raises(TypeError):
            optimizer.step()
        group["lr"] = rate
        before = full_parameters(model)
        optimizer.step()
        after = full_parameters(model)
        assert all(torch.equal(before[n], p) for n, p in BASE.named_parameters())
        assert all(not torch.equal(before[n], p) for n, p in after.items() if p.numel() > 1)

    run_threads(2, body)


def test_an_exchange_sends_at_most_four_elements_for_each_element_that_a_rank_has() -> None:
    def body(rank: int) -> Any:
        model, optimizer = sharded(
            nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))), of(torch.optim.Adafactor), stage=2
        )
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        return zeroshard.report(model).collectives["all-to-all"]

    for traffic in run_threads(4, body):
        assert traffic.count == 2 and traffic.bytes == 3 * 4 * 8 * 64 * 64 // 4


@at_stages(1, 3)
def test_bf16_steps_masters_with_the_gradients_of_elementwise_optimizers(stage: int) -> None:
    """The same optimizer on whole parameters and on slices sees the same masters and gradients: the same bits."""

    def body(rank: int, elementwise: bool) -> Any:
        model, optimizer = sharded(BASE, adamw, precision="bf16", stage=stage, elementwise=elementwise)
        for batch in DATA:
            take_step(optimizer, net_loss(model, split(batch, rank, 2)), 0.5)
        return masters(model), optimizer.state_dict()

    (whole, states), (flat, flat_states) = (run_threads(2, body, elementwise)[0] for elementwise in (False, True))
    assert_equal(whole, flat)
    for number, state in flat_states["state"].items():
        assert_equal(states["state"][number], state)


def overflowing(rank: int, make: Any, options: dict[str, Any], elementwise: bool | None) -> Any:
    model, optimizer = sharded(BASE, make, precision="fp16", elementwise=elementwise, **options)
    scales = []
    for number, batch in enumerate(DATA):
        loss = net_loss(model, split(batch, rank, 2))
        take_step(optimizer, optimizer.scale(loss * (1e38 if number == 1 and rank == 1 else 1.0)), 0.5)
        scales.append(optimizer.loss_scale_state())
    return masters(model), scales


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"stage": 3, "offload": "host"}], ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_all(options: dict[str, Any]) -> None:
    runs = [run_threads(2, overflowing, adamw, options, elementwise) for elementwise in (False, True)]
    for (ours, scales), (wanted, wanted_scales) in zip(*runs, strict=True):
        assert_equal(ours, wanted)
        assert scales == wanted_scales and scales[1][0] < scales[0][0]


def skips_loss(model: nn.Module, x: torch.Tensor, use: bool) -> torch.Tensor:
    loss: torch.Tensor = model(x, use).square().mean()
    return loss


def uses_in_turn(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    for number, x in enumerate(data):
        take_step(optimizer, skips_loss(model, x, use=number % 2 == 1))


@pytest.mark.parametrize("world", [1, 3])
def test_a_parameter_without_gradient_is_not_stepped(world: int) -> None:
    with seeded(0):
        base, data = Skips(), [torch.randn(6, 16) for _ in range(4)]
    assert_same_training(world, base, lamb, data, uses_in_turn, **WHOLE)


class Restless(torch.optim.Optimizer):
    """Momentum at the norm of the parameter, which goes on without a gradient, and sets ``data``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9)
                if p.grad is not None:
                    momentum.add_(p.grad)
                p.data = p.data - momentum * (group["lr"] * (p.norm() + 0.1) / (momentum.norm() + 0.1))


def restless(model: nn.Module) -> torch.optim.Optimizer:
    return Restless(model.parameters())


def decays_in_a_hook(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    inner = optimizer.inner if isinstance(optimizer, zeroshard.ShardedOptimizer) else optimizer

    def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data = parameter.data * 0.9

    inner.register_step_post_hook(decay)
    uses_in_turn(model, optimizer, data)


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize(
    ("make", "loop", "options"),
    [
        (restless, uses_in_turn, WHOLE),
        (adafactor, decays_in_a_hook, {}),
        (adamw, decays_in_a_hook, {}),  # on slices
    ],
)
def test_a_rule_or_hook_may_change_parameters_without_gradient(
    make: Any, loop: Any, options: dict[str, Any], offload: str | None
) -> None:
    with seeded(0):
        base, data = Skips(), [torch.randn(6, 16) for _ in range(4)]
    assert_same_training(2, base, make, data, loop, offload=offload, **options)


def test_a_parameter_that_one_rank_uses_is_stepped() -> None:
    with seeded(0):
        base, x = Skips(), torch.randn(4, 16)
    plain = copy.deepcopy(base)
    optimizer = lamb(plain)
    sum(skips_loss(plain, part, use=rank == 1) / 2 for rank, part in enumerate(x.chunk(2))).backward()  # type: ignore[union-attr]
    optimizer.step()

    def body(rank: int, stage: int) -> Any:
        model, ours = sharded(base, lamb, stage=stage, **WHOLE)
        skips_loss(model, x.chunk(2)[rank], use=rank == 1).backward()
        ours.step()
        return full_parameters(model)

    for stage in (0, 1, 2):  # in stage 3 all ranks use the same units
        for parameters in run_threads(2, body, stage):
            assert_close(parameters, dict(plain.named_parameters()))


class Tied(nn.Module):
    """A tied embedding, a frozen layer, a convolution in channels-last order, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.conv = nn.Conv2d(2, 2, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.transposed = nn.Parameter(torch.randn(5, 8).t() * 0.3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens))
        x = x + self.conv(x.view(-1, 2, 1, 4)).reshape(x.shape) + x @ self.transposed @ self.transposed.t()
        return self.head(x)  # type: ignore[no-any-return]


def test_tied_frozen_channels_last_and_transposed_parameters() -> None:
    base = built(Tied)
    assert not base.transposed.is_contiguous() and not base.conv.weight.is_contiguous()
    assert_same_training(2, base, lamb, DATA, bucket_size=128, **WHOLE)


def added_later(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    train_steps(model, optimizer, data[:2])
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.05})  # type: ignore[union-attr]
    train_steps(model, optimizer, data[2:])


def test_a_group_added_later_is_stepped() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Lamb([p for name, p in model.named_parameters() if "head" not in name])

    assert_same_training(2, BASE, make, DATA, added_later, **WHOLE)


class OnlyMatrices(Lamb):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        assert all(isinstance(p, nn.Parameter) and p.dim() == 2 for p in param_group["params"])
        super().add_param_group(param_group)


@at_stages(1, 3)
def test_the_optimizer_checks_the_parameters_of_a_group_added_later(stage: int) -> None:
    model = copy.deepcopy(BASE)
    optimizer = OnlyMatrices([{"params": [model.embedding.weight]}])
    model, sharded = zeroshard.shard(model, optimizer, stage=stage, **WHOLE)
    sharded.add_param_group({"params": [model.head.weight]})
    with pytest.raises(AssertionError):
        sharded.add_param_group({"params": [model.head.bias]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


class ByLabel(Lamb):
    """A rate for each parameter, by an attribute of it and by its name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, name in zip(group["params"], group["param_names"], strict=True):
                if p.grad is not None:
                    self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad.square().mean()
                    p.sub_(p.grad * (0.01 * len(name) * getattr(p, "rate", 1.0) / (self.state[p]["sum"].sqrt() + 1)))


def test_whole_parameters_keep_their_names_and_the_users_attributes() -> None:
    base = copy.deepcopy(BASE)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        for name, p in model.named_parameters():
            if "up" in name:
                p.rate = 3.0  # type: ignore[attr-defined]
        return ByLabel(model.named_parameters())

    assert_same_training(3, base, make, DATA, **WHOLE)
    model = copy.deepcopy(base)
    names = [name for name, _ in model.named_parameters()]
    model, optimizer = zeroshard.shard(model, make(model), **WHOLE)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["param_names"] == optimizer.state_dict()["param_groups"][0]["param_names"] == names


def test_states_of_a_parameter_that_is_frozen_now_are_kept(tmp_path: Path) -> None:
    def make(frozen: bool) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False))
        model[0].weight.requires_grad_(not frozen)
        return zeroshard.shard(model, torch.optim.Adafactor(model.parameters()), stage=3)

    def body(rank: int) -> None:
        model, optimizer = make(frozen=False)
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        wanted = copy.deepcopy(optimizer.state_dict()["state"])
        zeroshard.save(tmp_path / "saved", model, optimizer)
        for again in (True, False):
            model, optimizer = make(frozen=again)
            zeroshard.load(tmp_path / "saved", model, optimizer)
            assert_same_states(optimizer.state_dict()["state"], wanted)
            zeroshard.save(tmp_path / "saved", model, optimizer)

    run_threads(2, body)


def test_torchs_muon_steps_as_it_does_on_the_same_gradients() -> None:
    """It computes in bf16, where a last bit of a gradient may show: the plain run gets the sharded run's gradients."""

    def body(rank: int, stage: int) -> None:
        model = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 7, bias=False))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
        plain = copy.deepcopy(model)
        wanted, ours = (torch.optim.Muon(each.parameters(), lr=0.05) for each in (plain, model))
        model, optimizer = zeroshard.shard(model, ours, stage=stage)
        for step in range(4):
            x = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            for name, p in plain.named_parameters():
                p.grad = zeroshard.full_gradient(model, name).clone()
            optimizer.step()
            wanted.step()
            optimizer.zero_grad()
            assert_equal(full_parameters(model), dict(plain.named_parameters()))

    for stage in range(4):
        run_threads(3, body, stage)


# ------------------------------------------------------------------------------------------------------------- tiers


def tiered(rank: int, world: int, make: Any, offload: Any, options: dict[str, Any]) -> Any:
    model, optimizer = sharded(BASE, make, offload=offload, **options)
    for number, batch in enumerate(DATA):
        token_step(model, split(batch, rank, world))
        if number == 2:
            optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    states = {tier: held.now for (kind, tier), held in zeroshard.report(model).memory.items() if "optim" in kind}
    full = masters(model)
    return full, optimizer.state_dict()["state"], states


def assert_same_states(ours: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert ours.keys() == wanted.keys()
        for key in wanted:
            assert_same_states(ours[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(ours) == len(wanted)
        for one, other in zip(ours, wanted, strict=True):
            assert_same_states(one, other)
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(ours, wanted)
    else:
        assert ours == wanted


IN_BF16 = {"stage": 3, "precision": "bf16", "bucket_size": 300}


@pytest.mark.guarantee("Offload")
@pytest.mark.parametrize(
    ("make", "world", "options"),
    [(lamb, 1, {"stage": 1}), (lamb, 2, IN_BF16), (adafactor, 1, IN_BF16), (adafactor, 2, {"stage": 1})],
)
def test_states_rest_in_a_tier_and_give_the_same_bits(
    make: Any, world: int, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {**options, **WHOLE}
    wanted = run_threads(world, tiered, world, make, None, options)
    disk = {"optimizer": "disk", "directory": str(tmp_path)}
    half: dict[str, Any] = {"optimizer": {"host": 0.5, "disk": 0.25}, "directory": str(tmp_path)}
    half |= {"parameters": "host"} if options["stage"] == 3 else {}
    for offload in ("host", disk, half):
        ours = run_threads(world, tiered, world, make, offload, options)
        for (parameters, states, held), (full, full_states, on_device) in zip(ours, wanted, strict=True):
            assert_equal(parameters, full)
            assert_same_states(states, full_states)
            assert sum(held.values()) == sum(on_device.values()) > 0
            if offload is not half:
                assert held.get("device", 0) == 0
            else:
                assert all(held.get(tier) for tier in ("device", "host", "disk")) or world > 1


@pytest.mark.parametrize("clear", ["load", "clear"])
def test_states_on_the_host_can_be_cleared(clear: str) -> None:
    """The second half trains as a new optimizer does."""
    parameters = {}
    for is_new in (True, False):
        model, optimizer = sharded(BASE, lamb, offload="host", **WHOLE)
        if not is_new:
            before = copy.deepcopy(optimizer.state_dict())
            train_steps(model, optimizer, DATA[:2])
            with zeroshard.gathered(model, write_rank=0):
                model.load_state_dict(BASE.state_dict())
            optimizer.load_state_dict(before) if clear == "load" else optimizer.state.clear()
        train_steps(model, optimizer, DATA[2:])
        parameters[is_new] = full_parameters(model)
    assert_equal(parameters[False], parameters[True])


@pytest.mark.usefixtures("tried_once")
def test_whole_and_elementwise_groups_share_a_tier(tmp_path: Path) -> None:
    wanted = run_threads(2, tiered, 2, blend, None, {"stage": 3})
    disk = {"optimizer": "disk", "directory": str(tmp_path)}
    for ours, plain in zip(run_threads(2, tiered, 2, blend, disk, {"stage": 3}), wanted, strict=True):
        assert_equal(ours[0], plain[0])
        assert_same_states(ours[1], plain[1])


def test_offload_states_moves_the_states_of_owners() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(BASE, lamb, stage=2, **WHOLE)
        train_steps(model, optimizer, shares(DATA[:2], rank, 2))
        before = copy.deepcopy(optimizer.state_dict())
        tensors = [value for state in optimizer.inner.state.values() for value in (state["m"], *state["norms"])]
        zeroshard.offload_states(model)
        assert all(tensor.untyped_storage().size() == 0 for tensor in tensors)
        assert zeroshard.report(model).total.now == 0
        zeroshard.reload_states(model)
        assert_same_states(optimizer.state_dict()["state"], before["state"])
        train_steps(model, optimizer, shares(DATA[2:], rank, 2))
        assert_close(full_parameters(model), run_plain(BASE, lamb, DATA))

    run_threads(2, body)


# ------------------------------------------------------------------------------------------------------- checkpoints


def made(make: Any, mesh: tuple[int, ...] | None = None, **options: Any) -> tuple[Any, Any]:
    return sharded(BASE, make, mesh=mesh, **options, **WHOLE)


def contents(model: Any, optimizer: Any) -> Any:
    full = masters(model)
    return full, copy.deepcopy(optimizer.state_dict())


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"stage": 0}),
    "three ranks": (3, {"stage": 1, "offload": {"optimizer": ("host", 0.5)}}),
    "hybrid": (4, {"stage": 2, "mesh": (2, 2)}),
    "bf16 on the host": (2, {"stage": 3, "precision": "bf16", "offload": "host", "bucket_size": 300}),
}


@pytest.mark.parametrize(("make", "there"), [*((lamb, there) for there in LAYOUTS), (adafactor, "bf16 on the host")])
def test_a_checkpoint_loads_in_any_layout_bit_for_bit(make: Any, there: str, tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        model, optimizer = made(make, stage=3, precision="bf16")
        train_steps(model, optimizer, shares(DATA[:2], rank, 2))
        zeroshard.save(tmp_path / "saved", model, optimizer)
        return contents(model, optimizer)

    def load(rank: int) -> Any:
        model, optimizer = made(make, **LAYOUTS[there][1])
        train_steps(model, optimizer, [DATA[3]])  # other values and states
        zeroshard.load(tmp_path / "saved", model, optimizer)
        loaded = contents(model, optimizer)
        train_steps(model, optimizer, [DATA[3]])
        return loaded

    wanted = run_threads(2, save)[0]
    for ours in run_threads(LAYOUTS[there][0], load):
        assert_equal(ours[0], wanted[0])
        assert_same_states(ours[1], wanted[1])
    plain = copy.deepcopy(BASE)
    optimizer = make(plain)
    zeroshard.load(tmp_path / "saved", plain, optimizer)
    assert_equal(copied(plain), wanted[0])
    assert_same_states(optimizer.state_dict()["state"], wanted[1]["state"])


def test_states_of_a_parameter_without_elements_are_saved_by_any_owner(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = made(lamb, stage=1)
        train_steps(model, optimizer, DATA[:1])
        assert zeroshard.report(model).routing.whole["nothing"].owner != 0
        zeroshard.save(tmp_path / "saved", model, optimizer)
        zeroshard.load(tmp_path / "saved", model, optimizer)
        assert optimizer.full_state("nothing").keys() == {"step", "m", "v", "norms"}
        train_steps(model, optimizer, DATA[1:])

    run_threads(3, body)


def save_meanwhile(rank: int, path: Path, offload: str | None) -> None:
    model, optimizer = made(lamb, stage=3, offload=offload)
    parts = shares(DATA, rank, 2)
    train_steps(model, optimizer, parts[:2])
    wanted = contents(model, optimizer)
    saving = zeroshard.save(path, model, optimizer, wait=False)
    train_steps(model, optimizer, parts[2:])
    saving.wait()
    zeroshard.load(path, model, optimizer)
    assert_same_states(contents(model, optimizer)[1], wanted[1])


@pytest.mark.parametrize("offload", [None, "host"])
def test_an_asynchronous_save_keeps_the_states_of_its_call(offload: str | None, tmp_path: Path) -> None:
    run_processes(2, save_meanwhile, tmp_path / "saved", offload)


def test_states_of_another_optimizer_are_refused_and_weights_load(tmp_path: Path) -> None:
    def make(kind: Any) -> tuple[Any, Any]:
        return sharded(
            nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False)), of(kind, lr=0.01)
        )

    for saved, loaded in ((torch.optim.AdamW, torch.optim.Muon), (torch.optim.Muon, torch.optim.AdamW)):
        model, optimizer = make(saved)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        zeroshard.save(tmp_path / saved.__name__, model, optimizer)
        other, refusing = make(loaded)
        with pytest.raises(zeroshard.CheckpointError, match=rf"{saved.__name__}, expected {loaded.__name__}.*weights"):
            zeroshard.load(tmp_path / saved.__name__, other, refusing)
        zeroshard.load(tmp_path / saved.__name__, other)
        assert_equal(full_parameters(other), full_parameters(model))


def test_a_plain_optimizer_continues_what_unwrap_returns() -> None:
    plain = run_plain(BASE, lamb, DATA)

    def body(rank: int) -> Any:
        model, optimizer = made(lamb, stage=3, offload="host")
        train_steps(model, optimizer, shares(DATA[:2], rank, 2))
        model, inner = zeroshard.unwrap(model, optimizer)
        train_steps(model, inner, DATA[2:])
        return copied(model)

    for parameters in run_threads(2, body):
        assert_close(parameters, plain)


class Averaged(Lamb):
    """Trains with half of the last update, and evaluates with all of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = [(p, p.clone()) for group in self.param_groups for p in group["params"] if p.grad is not None]
        super().step()
        for p, value in before:
            self.state[p]["update"] = (p - value) / 2
            p.sub_(self.state[p]["update"])

    @torch.no_grad()
    def eval(self) -> None:
        for p, state in self.state.items():
            p.add_(state["update"])  # type: ignore[union-attr]

    @torch.no_grad()
    def train(self) -> None:
        for p, state in self.state.items():
            p.sub_(state["update"])  # type: ignore[union-attr]


def modes(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        train_steps(model, optimizer, [batch])
        optimizer.eval()
        net_loss(model, batch)
        optimizer.train()
    optimizer.eval()


@pytest.mark.parametrize("offload", [None, "host"])
def test_an_optimizer_that_switches_modes_has_whole_values(offload: str | None) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Averaged(model.parameters())

    stages = (1, 2, 3) if offload else (0, 1, 2, 3)
    assert_same_training(2, BASE, make, DATA, modes, stages=stages, offload=offload, **WHOLE)


# ------------------------------------------------------------------------------------------------------- tensor axis


def make_gpt() -> GPT:
    return built(lambda: GPT(GPTConfig(vocab_size=11, context=8, layers=1, heads=2, width=8)))


def gpt_loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for number, ids in enumerate(data):
        model(ids, ids).backward()
        if number == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


def train_divided(rank: int, shape: tuple[int, ...], data: list[torch.Tensor], options: dict[str, Any]) -> Any:
    mesh = mesh_of(shape, "replicate shard tensor")
    model, optimizer = sharded(make_gpt(), lamb, mesh=mesh, timeout=20, **options, **WHOLE)
    tensor, world = shape[-1], torch.Size(shape).numel()
    gpt_loop(model, optimizer, [split(ids, rank // tensor, world // tensor) for ids in data])
    return model, optimizer


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 2), {"stage": 0}),
        ((2, 2), {"stage": 3, "bucket_size": 200}),
        ((1, 2), {"stage": 2, "offload": "host"}),
        ((2, 1, 2), {"stage": 1}),
    ],
)
def test_a_parameter_that_is_divided_over_the_tensor_axis_is_put_together(shape: Any, options: Any) -> None:
    plain = make_gpt()
    optimizer = lamb(plain)
    gpt_loop(plain, optimizer, DATA)

    def body(rank: int) -> Any:
        model, ours = train_divided(rank, shape, DATA, options)
        assert len(ours.tp_whole_names) > 3 and zeroshard.report(model).memory["step", "device"].now == 0
        full = masters(model)
        return full, ours.state_dict()["state"]

    for parameters, states in run_threads(torch.Size(shape).numel(), body):
        assert_close(parameters, copied(plain))
        for number, state in optimizer.state_dict()["state"].items():
            assert_close({k: states[number][k] for k in ("m", "v")}, {k: state[k] for k in ("m", "v")})
            assert len(states[number]["norms"]) == 2 and states[number]["step"] == 4


@pytest.mark.parametrize("there", [((1, 2), 3), ((3, 1), 2)], ids=str)
def test_states_of_divided_parameters_are_saved_and_loaded_in_any_mesh(there: Any, tmp_path: Path) -> None:
    def save(rank: int, shape: Any, stage: int) -> Any:
        model, optimizer = train_divided(rank, shape, DATA[:2], {"stage": stage})
        zeroshard.save(tmp_path / "saved", model, optimizer)
        return optimizer.state_dict()["state"]

    def load(rank: int, shape: Any, stage: int) -> Any:
        model, optimizer = train_divided(rank, shape, DATA[2:3], {"stage": stage})
        zeroshard.load(tmp_path / "saved", model, optimizer)
        return optimizer.state_dict()["state"]

    for saved_in, loaded_in in ((((2, 2), 2), there), (there, ((2, 2), 0))):
        wanted = run_threads(torch.Size(saved_in[0]).numel(), save, *saved_in)[0]
        for states in run_threads(torch.Size(loaded_in[0]).numel(), load, *loaded_in):
            assert_same_states(states, wanted)

"""What loops for plain models do with gradients, done to a sharded one: the plain run's numbers, or a clear error."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairs import at_stages, every_stage, pairwise
from plain import assert_close, clip, full_parameters, masters, scaled, square_loss, take_step
from ranks import RanksFailed, run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zoo import built

import zeroshard
from zeroshard.engine.sharded_gradient import ShardedGradient

HOST, BF16, FP16 = {"offload": "host"}, {"precision": "bf16"}, {"precision": "fp16", "loss_scale": 1024.0}
PLACES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "host": HOST,
    "bf16": BF16,
    "fp16": FP16,
    "fp16 host": {**FP16, **HOST},
}
every_place = pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)


class Net(nn.Module):
    """Blocks, and a parameter of the model's own, which stays in memory between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x) * self.scale


@functools.cache
def net() -> nn.Module:
    return built(Net)


@functools.cache
def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(seed))


def part(rank: int, world: int, seed: int = 1) -> torch.Tensor:
    return batch(seed).chunk(world)[rank]


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def sharded(world: int = 1, make_optimizer: Callable[..., Any] = sgd, **options: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(net())
    mesh = init_device_mesh("cpu", (2, world // 2)) if options.pop("hybrid", False) else None
    return zeroshard.shard(model, make_optimizer(model), mesh=mesh, timeout=30.0, **options)


def grouped(optimizer: Any) -> list[nn.Parameter]:
    """The idiom of apex, Lightning and others."""
    return [p for group in optimizer.param_groups for p in group["params"]]


Loop = Callable[[Any, Any, Callable[[int], torch.Tensor]], Any]


def assert_same_as_plain(loop: Loop, world: int, make_optimizer: Callable[..., Any] = sgd, **options: Any) -> None:
    """A loop over a model, its optimizer and its data returns numbers and leaves parameters as the plain run does."""
    plain = copy.deepcopy(net())
    wanted = loop(plain, make_optimizer(plain), batch)

    def body(rank: int) -> Any:
        model, optimizer = sharded(world, make_optimizer, **options)
        found = loop(model, optimizer, lambda seed=1: part(rank, world, seed))
        return found, masters(model)

    near = 0.05 if options.get("precision") else 1e-5
    before = dict(net().named_parameters())
    for found, parameters in run_threads(world, body):
        assert found == (None if wanted is None else pytest.approx(wanted, rel=near, abs=near * 0.01))
        for name, value in plain.named_parameters():
            moved = (value - before[name]).abs().max().item()
            assert (parameters[name] - value).abs().max().item() <= near * (moved + 0.01) + 1e-6, name


# ------------------------------------------------------------------------------------------------------- clipping


def by_norm(parameters: Callable[..., Any], **how: Any) -> Loop:
    def loop(model: Any, optimizer: Any, data: Any) -> list[float]:
        norms = []
        for seed in (1, 2):
            scaled(optimizer, square_loss(model, data(seed))).backward()
            norms.append(nn.utils.clip_grad_norm_(parameters(model, optimizer), 0.1, **how).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    return loop


def by_parts(model: Any, optimizer: Any, data: Any) -> list[float]:
    """The norm and the clip apart, over a list of some parameters; and each parameter by itself."""
    scaled(optimizer, square_loss(model, data())).backward()
    some = list(model.blocks[1].parameters())
    total = nn.utils.get_total_norm([p.grad for p in some])
    nn.utils.clip_grads_with_norm_(some, 0.1, total)
    alone = [nn.utils.clip_grad_norm_(p, 0.02).item() for p in model.blocks[2].parameters()]
    by_hand = sum(p.grad.detach().norm(2).item() ** 2 for p in grouped(optimizer) if p.grad is not None) ** 0.5
    optimizer.step()
    return [total.item(), *alone, by_hand]


def by_value(parameters: Callable[..., Any], **how: Any) -> Loop:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        scaled(optimizer, square_loss(model, data())).backward()
        nn.utils.clip_grad_value_(parameters(model, optimizer), 0.01, **how)
        optimizer.step()

    return loop


def by_our_value(model: Any, optimizer: Any, data: Any) -> None:
    scaled(optimizer, square_loss(model, data())).backward()
    if isinstance(optimizer, zeroshard.ShardedOptimizer):
        optimizer.clip_grad_value_(0.01)
    else:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()


def of_model(model: Any, optimizer: Any) -> Any:
    return model.parameters()


def of_groups(model: Any, optimizer: Any) -> Any:
    return grouped(optimizer)


CLIPS = {
    "model": by_norm(of_model),
    "groups": by_norm(of_groups, foreach=True),
    "infinity": by_norm(of_groups, norm_type=math.inf),
    "one": by_norm(of_model, norm_type=1.0, foreach=False),
    "three": by_norm(of_model, norm_type=3.0, foreach=True, error_if_nonfinite=True),
    "parts": by_parts,
    "value": by_value(of_model),
    "value of groups": by_value(of_groups, foreach=True),
    "our value": by_our_value,
}


# In fp32 all in every stage; elsewhere some, and where gradients are whole and where they are parts.
CASES = [("fp32", clip, stage) for clip in CLIPS for stage in (0, 1, 2, 3)] + [
    (place, clip, stage)
    for place in PLACES
    for clip in ("groups", "parts", "value")
    for stage in ((0, 1, 2, 3) if place == "fp16 host" else (0, 3))
    if place != "fp32"
]


@pytest.mark.guarantee("Clipping")
@pytest.mark.parametrize(("place", "clip", "stage"), CASES)
def test_torchs_clipping_is_that_of_the_plain_run(place: str, clip: str, stage: int) -> None:
    for world in (1, 3) if stage == 3 else (3,):
        assert_same_as_plain(CLIPS[clip], world, stage=stage, **PLACES[place])


@pytest.mark.parametrize("clip", ["model", "infinity", "value"])
@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"stage": 2, **FP16}])
def test_torchs_clipping_over_a_hybrid_mesh(clip: str, options: dict[str, Any]) -> None:
    assert_same_as_plain(CLIPS[clip], 4, hybrid=True, **options)


@every_stage
def test_the_norm_of_gradients_that_are_not_finite_is_not_finite_on_any_rank(stage: int) -> None:
    def body(rank: int) -> list[bool]:
        model, optimizer = sharded(2, stage=stage)
        (square_loss(model, part(rank, 2)) * (math.nan if rank == 1 else 1.0)).backward()
        found = []
        for norm_type in (2.0, math.inf, 1.0):
            found.append(nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type).isfinite().item())
            found.append(
                optimizer.clip_grad_norm_(1e9, min(norm_type, math.inf) if norm_type != 1 else 2).isfinite().item()
            )
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        return found

    assert run_threads(2, body) == [[False] * 6] * 2


# ------------------------------------------------------------------------------------------------------ zero_grad


def zero_model(model: Any, optimizer: Any, to_none: bool) -> None:
    model.zero_grad(to_none)


def zero_block(model: Any, optimizer: Any, to_none: bool) -> None:
    model.blocks[1].zero_grad(to_none)


def zero_optimizer(model: Any, optimizer: Any, to_none: bool) -> None:
    optimizer.zero_grad(to_none)


@pytest.mark.guarantee("zero_grad")
@pytest.mark.parametrize(
    ("zero", "place", "stage"), pairwise([zero_model, zero_block, zero_optimizer], PLACES, [0, 1, 2, 3])
)
def test_zero_grad_clears_what_it_would_in_a_plain_model(zero: Any, place: str, stage: int) -> None:
    """After a backward, and between a forward and its backward."""

    def loop(model: Any, optimizer: Any, data: Any) -> list[bool]:
        there = []
        for to_none in (True, False):
            scaled(optimizer, square_loss(model, data(1))).backward()
            loss = scaled(optimizer, square_loss(model, data(2)))
            zero(model, optimizer, to_none)
            there += [p.grad is not None for p in model.parameters()]
            loss.backward()
            optimizer.step()
            zero(model, optimizer, to_none)
        return there

    for world in (1, 2) if stage == 3 else (2,):
        assert_same_as_plain(loop, world, functools.partial(sgd, lr=0.1), stage=stage, **PLACES[place])


def some(model: nn.Module) -> torch.optim.Optimizer:
    """Trains the last block alone; the others have gradients all the same."""
    return torch.optim.SGD(model.blocks[2].parameters(), lr=0.1)  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    ("options", "to_none", "stage"), pairwise([{}, FP16, HOST], [True, False], [0, 1, 2, 3]), ids=str
)
def test_what_is_in_no_group_is_neither_cleared_nor_clipped(options: dict[str, Any], to_none: bool, stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> list[float]:
        found = []
        for _ in range(2):
            scaled(optimizer, square_loss(model, data())).backward()
            if isinstance(optimizer, zeroshard.ShardedOptimizer):
                found.append(optimizer.clip_grad_norm_(0.01).item())
            else:
                found.append(nn.utils.clip_grad_norm_(grouped(optimizer), 0.01).item())
            found.append(model.scale.grad.norm().item())
            found.append(model.blocks[2][0].weight.grad.norm().item())
            optimizer.step()
            optimizer.zero_grad(to_none)
        return found

    for world in (1, 2) if stage == 3 else (2,):
        assert_same_as_plain(loop, world, some, stage=stage, **options)


@at_stages(0, 1, 2)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("zero", [zero_model, zero_optimizer])
def test_a_gradient_put_there_before_the_first_backward_is_cleared(zero: Any, to_none: bool, stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        model.scale.grad = torch.ones(5)
        zero(model, optimizer, to_none)
        take_step(optimizer, square_loss(model, data()))

    assert_same_as_plain(loop, 2, stage=stage)


# ---------------------------------------------------------------------------------------------- reading p.grad


@pytest.mark.guarantee("Gradients that are read and changed")
@every_stage
@every_place
def test_a_gradient_can_be_read_and_changed(options: dict[str, Any], stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> list[float]:
        assert not any(p.grad is not None for p in model.parameters())
        scaled(optimizer, square_loss(model, data())).backward()
        weight = model.blocks[0][0].weight
        assert weight.grad.shape == weight.shape and weight.grad.device == weight.device
        found = [weight.grad.abs().max().item(), weight.grad.float().mean().item(), weight.grad[1, 2].item()]
        found += [torch.isfinite(weight.grad).all().item(), weight.grad.detach().clone().sum().item()]
        weight.grad.mul_(torch.linspace(1, 2, weight.numel()).view(weight.shape))
        weight.grad.add_(torch.ones(5), alpha=0.25)
        weight.grad.div_(2)
        model.scale.grad.zero_()
        model.blocks[1][0].bias.grad = None
        optimizer.step()
        return [*found, weight.grad.sum().item()]

    for world in (1, 2) if stage == 3 else (2,):
        assert_same_as_plain(loop, world, stage=stage, **options)


@at_stages(1, 2, 3)
def test_what_cannot_be_done_to_a_gradient_in_parts_is_refused_by_name(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(2, stage=stage)
        square_loss(model, part(rank, 2)).backward()
        gradient = model.scale.grad
        with pytest.raises(RuntimeError, match=r"'scale' is partitioned .* 'cumsum_' .*full_gradient"):
            gradient.cumsum_(0)
        assert "ShardedGradient of 'scale' ((5,), torch.float32, cpu" in repr(gradient)
        optimizer.zero_grad()
        assert model.scale.grad is None
        with pytest.raises(RuntimeError, match="'scale' was cleared"):
            gradient.norm()

    run_threads(2, body)


class Sides(nn.Module):
    """Each rank uses one of two sides; nobody the third."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ParameterList(nn.Parameter(torch.linspace(1, 2, 5) * (n + 1)) for n in range(3))

    def forward(self, x: torch.Tensor, side: int) -> torch.Tensor:
        return (self.sides[side] * x).square().mean()


@every_stage
def test_a_gradient_that_only_another_rank_has_made_is_there_on_all(stage: int) -> None:
    def train(model: Any, optimizer: Any, losses: Callable[[], torch.Tensor]) -> tuple[list[bool], float]:
        losses().backward()
        there = [p.grad is not None for p in model.parameters()]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        optimizer.step()
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        return there, norm

    def body(rank: int) -> Any:
        model = Sides()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        found = train(model, optimizer, lambda: model(part(rank, 2), rank))
        return found, full_parameters(model)

    plain = Sides()
    wanted = train(plain, sgd(plain), lambda: (plain(part(0, 2), 0) + plain(part(1, 2), 1)) / 2)
    for (there, norm), parameters in run_threads(2, body):
        assert there == wanted[0] == [True, True, False]
        assert norm == pytest.approx(wanted[1], rel=1e-6)
        assert_close(parameters, dict(plain.named_parameters()))


@every_stage
def test_gradients_are_seen_inside_gathered(stage: int) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(2, stage=stage)
        square_loss(model, part(rank, 2)).backward()
        outside = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        with zeroshard.gathered(model):
            inside = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert inside.item() == outside.item() > 0

    run_threads(2, body)


# ----------------------------------------------------------------------------------------------------- GradScaler


def with_scaler(model: Any, optimizer: Any, data: Any) -> list[float]:
    """Of three steps the second overflows (on one rank of several), and is skipped by all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    found = []
    for seed in (1, 2, 3):
        loss = square_loss(model, data(seed))
        if seed == 2 and torch.equal(data(1)[0], batch()[0]):
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if seed != 3:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
            found.append(norm if math.isfinite(norm) else -1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found


@pytest.mark.guarantee("GradScaler")
@every_stage
@pytest.mark.parametrize(
    "options", [{}, BF16, FP16, HOST, {**FP16, **HOST}], ids=["fp32", "bf16", "fp16", "host", "fp16 host"]
)
def test_torchs_grad_scaler_works_as_in_a_plain_loop(options: dict[str, Any], stage: int) -> None:
    for world in (1, 2) if stage == 3 else (2,):
        assert_same_as_plain(with_scaler, world, functools.partial(sgd, lr=0.1), stage=stage, **options)


# ------------------------------------------------------------------------------ the optimizer given to shard()


@pytest.mark.guarantee("The optimizer before shard()")
@every_stage
@pytest.mark.parametrize("options", [{}, HOST, BF16], ids=["fp32", "host", "bf16"])
def test_the_optimizer_given_to_shard_says_which_one_to_use(options: dict[str, Any], stage: int) -> None:
    model = copy.deepcopy(net())
    mine = torch.optim.Adam(model.parameters(), lr=0.1)
    calls: list[int] = []
    mine.register_step_pre_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(mine, 1)
    model, optimizer = zeroshard.shard(model, mine, stage=stage, **options)
    mine.zero_grad()
    square_loss(model, batch()).backward()
    for use in (mine.step, mine.zero_grad, lambda: nn.utils.clip_grad_norm_(grouped(mine), 1.0)):
        with pytest.raises(RuntimeError, match=r"the optimizer that was passed to zeroshard\.shard"):
            use()
    calls.clear()
    optimizer.step()
    assert calls == [1]
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == mine.param_groups[0]["lr"] == pytest.approx(0.01)
    pickle.loads(pickle.dumps(mine.state_dict()))
    copy.deepcopy(mine.param_groups)
    before = full_parameters(model)
    model, again = zeroshard.unwrap(model, optimizer)
    square_loss(model, batch()).backward()
    again.step()
    assert again is mine and not torch.equal(model.scale.detach(), before["scale"])


def test_groups_show_the_models_parameters_and_the_inner_options() -> None:
    model = copy.deepcopy(net())
    frozen = model.blocks[0][0].bias.requires_grad_(False)  # type: ignore[union-attr, index]
    mine = torch.optim.AdamW([{"params": [model.scale, frozen], "lr": 0.5}, {"params": model.blocks[1].parameters()}])
    wanted = [list(group["params"]) for group in mine.param_groups]
    model, optimizer = zeroshard.shard(model, mine, stage=3)
    for group, parameters in zip(optimizer.param_groups, wanted, strict=True):
        assert all(one is other for one, other in zip(group["params"], parameters, strict=True))
    group = optimizer.param_groups[0]
    assert isinstance(group, dict) and group["lr"] == 0.5 and group.get("weight_decay") == 0.01
    group["lr"] = 0.25
    group.setdefault("initial_lr", 0.5)
    assert mine.param_groups[0]["lr"] == 0.25 and {**group}["initial_lr"] == 0.5 and "lr" in dict(group)
    assert copy.deepcopy(group)["lr"] == 0.25
    with pytest.raises(RuntimeError, match="add_param_group"):
        group["params"] = []
    group["params"].append(model.blocks[2][0].weight)
    with pytest.raises(RuntimeError, match=r"had 2 parameters at shard\(\) and has 3 now"):
        optimizer.step()


# ----------------------------------------------------------------------------------------------- fp16's loss scale


@pytest.mark.guarantee("fp16")
@pytest.mark.parametrize(
    ("scales", "options", "stage"), pairwise([True, False], [{}, {"reduce_dtype": "fp32"}, HOST], [0, 1, 2, 3]), ids=str
)
def test_fp16_is_right_whether_the_loss_is_scaled_or_not(scales: bool, options: dict[str, Any], stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> list[float]:
        norms = []
        for seed in (1, 2, 3):
            loss = square_loss(model, data(seed))
            (scaled(optimizer, loss) if scales else loss).backward()
            norms.append(model.scale.grad.norm().item())
            optimizer.step()
            norms.append(model.scale.grad.norm().item())  # as before the step
            if seed != 2:
                optimizer.zero_grad()
        return norms

    for world in (1, 2) if stage == 3 else (2,):
        assert_same_as_plain(loop, world, functools.partial(sgd, lr=0.1), stage=stage, precision="fp16", **options)


def test_a_step_after_a_loss_that_was_not_scaled_warns_once_and_only_if_nobody_scales() -> None:
    model, optimizer = sharded(1, stage=3, **FP16)
    square_loss(model, batch()).backward()
    with pytest.warns(UserWarning, match=r"optimizer\.scale\(loss\)") as found:
        optimizer.step()
    assert [Path(warning.filename) for warning in found] == [Path(__file__)]
    with warnings.catch_warnings(action="error"):
        square_loss(model, batch()).backward()
        optimizer.step()

        model, optimizer = sharded(1, stage=3, **FP16)
        optimizer.step()
        optimizer.scale(square_loss(model, batch())).backward()
        optimizer.step()
        for scaler in (torch.amp.GradScaler("cpu", init_scale=256.0), None):
            model, optimizer = sharded(1, stage=3, **FP16)
            if scaler is not None:
                scaler.scale(square_loss(model, batch())).backward()
                scaler.step(optimizer)
                continue
            (square_loss(model, batch()) * 256).backward()
            for parameter in model.parameters():
                parameter.grad.div_(256)
            optimizer.step()


@every_stage
def test_the_scale_may_change_between_backwards_that_are_summed(stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> list[float]:
        found = []
        for number in range(3):
            scaled(optimizer, square_loss(model, data())).backward()
            if isinstance(optimizer, zeroshard.ShardedOptimizer):
                optimizer.load_loss_scale([64.0 * 4**number, 0])
            found.append(model.scale.grad.norm().item())
        optimizer.step()
        return found

    assert_same_as_plain(loop, 2, stage=stage, **FP16)


@pytest.mark.guarantee("fp16")
@every_stage
def test_scaled_and_unscaled_losses_are_not_added_up(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(2, stage=stage, **FP16)
        optimizer.scale(square_loss(model, part(rank, 2))).backward()
        with pytest.raises(RuntimeError, match="and the loss of this backward was not"):
            square_loss(model, part(rank, 2)).backward()
        optimizer.zero_grad()
        square_loss(model, part(rank, 2)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.scale(square_loss(model, part(rank, 2))).backward()
        optimizer.step()
        assert optimizer.loss_scale.item() == 1024.0

    run_threads(2, body)


@every_stage
def test_a_rank_that_does_not_scale_is_noticed(stage: int) -> None:
    def body(rank: int) -> str:
        model, optimizer = sharded(2, stage=stage, **FP16)
        loss = square_loss(model, part(rank, 2))
        try:
            (optimizer.scale(loss) if rank else loss).backward()
            optimizer.step()
        except zeroshard.RanksDisagreeError as error:
            return str(error)
        return "nothing noticed"

    for error in run_threads(2, body):
        assert "scaled loss" in error


# --------------------------------------------------------------------------------------------- hyper-parameters


@pytest.mark.guarantee("Ranks that disagree")
@every_stage
@pytest.mark.parametrize("make_optimizer", [sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-3))])
def test_learning_rates_that_differ_by_rank_are_refused(make_optimizer: Any, stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(2, make_optimizer, stage=stage)
        for rate in (0.1, 0.2):
            optimizer.param_groups[0]["lr"] = rate
            take_step(optimizer, square_loss(model, part(rank, 2)))
        optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
        square_loss(model, part(rank, 2)).backward()
        with pytest.raises(RuntimeError, match=rf"differ between ranks: rank {rank} has .*'lr': {0.1 * (rank + 1)}"):
            optimizer.step()

    run_threads(2, body)


@every_stage
def test_a_gradient_of_a_frozen_parameter_is_refused(stage: int) -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        with pytest.raises(RuntimeError, match=r"'0\.weight' (was frozen when shard\(\)|is kept by zeroshard)"):
            model[0].weight.grad = torch.ones(2, 2)  # refused here in stage 3
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    run_threads(2, body)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("is_grouped", [True, False])
@at_stages(0, 3)
def test_zero_grad_clears_a_frozen_parameters_gradient_as_torch_does(
    stage: int, is_grouped: bool, set_to_none: bool
) -> None:
    def left_over(is_sharded: bool) -> torch.Tensor | None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        optimizer: Any = torch.optim.SGD([p for p in model.parameters() if is_grouped or p.requires_grad], lr=0.1)
        if is_sharded:
            model, optimizer = zeroshard.shard(model, optimizer, stage=stage)
        model[0].weight.grad = torch.ones(2, 2)
        optimizer.zero_grad(set_to_none=set_to_none)
        return model[0].weight.grad

    ours, plain = left_over(True), left_over(False)
    assert (ours is None) == (plain is None) == (is_grouped and set_to_none)
    assert ours is None or plain is None or torch.equal(ours, plain)


def test_replaced_param_groups_are_refused() -> None:
    model = nn.Linear(2, 2)
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.param_groups = [dict(group, lr=5.0) for group in optimizer.param_groups]
    with pytest.raises(RuntimeError, match=r"change the groups in place \(optimizer\.param_groups\[0\]\['lr'\] = …\)"):
        optimizer.step()


@pytest.mark.guarantee("Optimizer states")
@pytest.mark.parametrize("change", ["remove", "add", "replace"])
def test_groups_that_are_changed_in_the_list_are_refused(change: str) -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(groups, lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    if change == "remove":
        del optimizer.param_groups[1]
    elif change == "add":
        optimizer.param_groups.append(optimizer.param_groups[0])
    else:
        optimizer.param_groups[0] = dict(optimizer.param_groups[0], lr=5.0)
    with pytest.raises(RuntimeError, match="had 2 groups, and some were added, removed or replaced"):
        optimizer.step()


INNER_HABITS: dict[str, Any] = {
    "load": lambda inner: inner.load_state_dict(inner.state_dict()),
    "add": lambda inner: inner.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "state": lambda inner: setattr(inner, "state", defaultdict(dict)),
    "groups": lambda inner: setattr(inner, "param_groups", [dict(group, lr=5.0) for group in inner.param_groups]),
}


@pytest.mark.guarantee("Optimizer states")
@pytest.mark.parametrize("habit", INNER_HABITS)
def test_the_optimizer_given_to_shard_is_not_changed_behind_its_shards(habit: str) -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = zeroshard.shard(model, inner)
    INNER_HABITS[habit](inner)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"call load_state_dict\(\), .* on the optimizer that shard\(\) returned"):
        optimizer.step()


STATE_HABITS: dict[str, Any] = {
    "read": lambda optimizer, weight: optimizer.state[weight],
    "get": lambda optimizer, weight: optimizer.state.get(weight),
    "in": lambda optimizer, weight: weight in optimizer.state,
    "set": lambda optimizer, weight: optimizer.state.update({weight: {}}),
    "pop": lambda optimizer, weight: optimizer.state.pop(weight, None),
    "delete": lambda optimizer, weight: optimizer.state.__delitem__(weight),
}


@pytest.mark.guarantee("Optimizer states")
@pytest.mark.parametrize("habit", STATE_HABITS)
def test_the_state_of_a_parameter_of_the_model_is_not_silently_empty(habit: str) -> None:
    model = nn.Linear(2, 2)
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"read them by zeroshard\.full_state\(optimizer, 'weight'\)"):
        STATE_HABITS[habit](optimizer, model.weight)


@pytest.mark.guarantee("Optimizer states")
def test_a_replaced_state_is_refused_and_a_cleared_one_is_that_of_a_new_optimizer() -> None:
    model = nn.Linear(2, 2)
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    states = optimizer.state
    copied = copy.deepcopy(states)
    assert type(copied) is defaultdict and len(copied) == len(states) > 0
    optimizer.state = defaultdict(dict)
    with pytest.raises(RuntimeError, match=r"optimizer\.state was replaced .* by optimizer\.state\.clear\(\)"):
        optimizer.step()
    optimizer.state = states
    optimizer.state.clear()
    before = zeroshard.full_parameter(model, "bias").clone()
    optimizer.step()
    torch.testing.assert_close(zeroshard.full_parameter(model, "bias"), before - 0.1)


# ---------------------------------------------------------------------------------------------- writing p.grad

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda g: g[:7].fill_(0),
    "item": lambda g: g.__setitem__((slice(2), 1), 0.0),
    "select": lambda g: g.select(0, 1).mul_(0),
    "narrow": lambda g: g.narrow(0, 0, 2).copy_(torch.ones(2, 5)),
    "t": lambda g: g.t().add_(1),
    "data": lambda g: g.data.view(-1).zero_(),
    "unbind": lambda g: g.unbind()[2].sub_(1),
    "chunk": lambda g: torch._foreach_mul_(list(g.chunk(2)), 0.5),
    "split": lambda g: g.split(3, dim=1)[1].index_put_((torch.tensor([0]),), torch.zeros(())),
    "unsafe split": lambda g: torch.unsafe_split(g, 3)[0].zero_(),
    "unsafe chunk": lambda g: torch.unsafe_chunk(g, 2, dim=1)[1].mul_(2),
    "unsafe view": lambda g: torch.ops.aten._unsafe_view(g, [35]).zero_(),
    "diagonal": lambda g: g.diagonal().zero_(),
    "fill_diagonal": lambda g: g.fill_diagonal_(0),
    "as_strided": lambda g: g.as_strided((2,), (1,)).normal_(),
    "part of a part": lambda g: g[1:][1:].clamp_(0, 1),
    "out": lambda g: torch.mul(torch.ones(()), g, out=g),
    "out of a part": lambda g: torch.neg(g[0], out=g[0]),
    "foreach out": lambda g: torch.ops.aten._foreach_mul.Scalar_out([g], 2.0, out=[g]),
    "index": lambda g: g.index_fill_(0, torch.tensor([1]), 0.0),
    "apply": lambda g: g.apply_(abs),
    "map": lambda g: g.map_(torch.ones(7, 5), max),
    "share_memory": lambda g: g.share_memory_(),
    "data_ptr": lambda g: g.data_ptr(),
    "storage": lambda g: g.untyped_storage(),
    "dlpack": torch.from_dlpack,
    "set": lambda g: g.set_(torch.ones(7, 5, dtype=g.dtype)),
}


@pytest.mark.guarantee("Writes into gradients that would be lost")
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, BF16), (3, {})])
def test_a_write_into_a_part_of_a_gradient_is_refused_and_changes_nothing(stage: int, options: Any) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(2, stage=stage, **options)
        square_loss(model, part(rank, 2)).backward()
        weight = model.blocks[1][0].weight
        before = weight.grad.clone()
        for way, write in WRITES.items():
            with pytest.raises(RuntimeError, match=r"gradient of 'blocks\.1\.0\.weight' is partitioned"):
                write(weight.grad)
                raise AssertionError(way)
            assert torch.equal(weight.grad, before), way
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):  # torch's: it asks for no dispatch
            torch.utils.dlpack.to_dlpack(weight.grad)
        assert options or not weight.grad.numpy().flags.writeable
        close = functools.partial(torch.testing.assert_close, check_stride=False)
        close(weight.grad[:3].norm(), before[:3].norm())
        close(torch.stack([row.sum() for row in weight.grad]), before.sum(1))
        close(weight.grad[0].tolist(), before[0].tolist())
        close(torch.cat([weight.grad.view(-1), weight.grad.t().reshape(-1)])[35:], before.t().reshape(-1))
        close(weight.grad.t().contiguous() * weight.grad[:5, :1], before.t() * before[:5, :1])
        assert copy.deepcopy(weight.grad[0]).mul_(0).sum() == 0 and weight.grad[1].float().numpy().shape == (5,)
        weight.grad.add_(weight.grad[:1], alpha=-1)
        assert not weight.grad[0].any()

    run_threads(2, body)


def _collectives(rank: int) -> None:
    model, optimizer = sharded(2, stage=1)
    square_loss(model, part(rank, 2)).backward()
    gradient, full = model.scale.grad, model.scale.grad.clone()
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(gradient),
        lambda: dist.all_reduce(gradient.data),
        lambda: dist.all_reduce(gradient[:2]),
        lambda: dist.broadcast(gradient, 0),
        lambda: dist.reduce(gradient, 0),
        lambda: dist.reduce_scatter_tensor(torch.zeros(3), gradient),
        lambda: dist.all_gather_into_tensor(gradient, torch.zeros(3)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="'scale' is partitioned over the ranks and averaged already"):
            call()
        assert torch.equal(model.scale.grad, full)
    optimizer.step()


@pytest.mark.guarantee("Writes into gradients that would be lost")
def test_a_collective_over_a_gradient_is_refused() -> None:
    run_processes(2, _collectives)


@pytest.mark.guarantee("Gradients that are read and changed")
@every_stage
@every_place
def test_a_gradient_can_be_replaced(options: dict[str, Any], stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for seed in (1, 2):
            scaled(optimizer, square_loss(model, data(seed))).backward()
            for parameter in model.parameters():
                parameter.grad *= 0.5
                parameter.grad += 0.25
                parameter.grad /= 2
            first, second, third = (block[0].weight for block in model.blocks)
            first.grad = first.grad * 0.5
            second.grad = torch.arange(35.0).view(7, 5).to(second.grad)
            third.grad = third.grad.data.clamp(-0.1, 0.1)
            third.grad.data /= 3
            if isinstance(third.grad, ShardedGradient):
                nn.utils.vector_to_parameters(third.grad.flatten() * 2, [third.grad])
            else:
                third.grad *= 2
            model.scale.grad = torch.zeros_like(model.scale.grad)
            if "precision" not in options:  # with a loss scale it is a gradient of an unscaled loss
                model.blocks[0][0].bias.grad = None
                model.blocks[0][0].bias.grad = torch.linspace(0, 1, 7)
                assert model.blocks[0][0].bias.grad.sum().item() == pytest.approx(3.5)
            optimizer.step()
            if seed == 1:
                optimizer.zero_grad()

    for world in (1, 2):
        assert_same_as_plain(loop, world, stage=stage, **options)


@pytest.mark.guarantee("Gradients that are read and changed")
@every_stage
def test_all_gradients_can_be_set_by_hand(stage: int) -> None:
    """PCGrad, DP-SGD, assigned results of autograd.grad: also where no backward has left one."""

    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for seed in (1, 2, 3):
            optimizer.zero_grad()
            if stage == 3:
                square_loss(model, data(seed)).backward()
                gradients = [p.grad.clone() for p in model.parameters()]
                optimizer.zero_grad()
            else:
                gradients = torch.autograd.grad(square_loss(model, data(seed)), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    for world in (1, 2):
        assert_same_as_plain(loop, world, stage=stage)


def held(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


def taken(model: Any) -> list[torch.Tensor]:
    """The gradients, which the parameters no longer have."""
    gradients = held(model)
    for p in model.parameters():
        p.grad = None
    return gradients


def swap(model: Any) -> None:
    first, second = model.blocks[0][0], model.blocks[1][0]
    first.weight.grad, second.weight.grad = second.weight.grad, first.weight.grad


def share(model: Any) -> None:
    model.blocks[0][0].bias.grad = model.blocks[1][0].bias.grad


def share_data(model: Any) -> None:
    model.blocks[0][0].weight.grad = model.blocks[2][0].weight.grad.data


def share_a_view(model: Any) -> None:
    model.blocks[0][0].weight.grad = model.blocks[0][2].weight.grad.t()


def share_where_none_is(model: Any) -> None:
    model.blocks[0][0].weight.grad = None
    share_data(model)


@pytest.mark.guarantee("Gradients that are read and changed")
@every_stage
@pytest.mark.parametrize("share", [swap, share, share_data, share_a_view, share_where_none_is])
@pytest.mark.parametrize("options", [{}, HOST, BF16, FP16], ids=str)
def test_two_parameters_cannot_share_a_gradient(options: dict[str, Any], share: Any, stage: int) -> None:
    def body(rank: int, world: int) -> None:
        model, optimizer = sharded(world, stage=stage, **options)
        for _ in range(2):
            scaled(optimizer, square_loss(model, part(rank, world))).backward()
            last = model.blocks[2][2].bias.grad.clone()
            with pytest.raises(RuntimeError, match=r"'blocks\.0\.0\.\w+' was set to another parameter's.*clone\(\)"):
                share(model)
            assert torch.equal(model.blocks[2][2].bias.grad, last)
            model.blocks[2][0].weight.grad = model.blocks[1][0].weight.grad * 2
            optimizer.step()
            optimizer.zero_grad()

    for world in (1, 2):
        run_threads(world, body, world)


def put_back_after_zero_grad(model: Any, optimizer: Any, data: Any) -> None:
    kept = held(model)
    optimizer.zero_grad()
    square_loss(model, data(2)).backward()
    for p, gradient in zip(model.parameters(), kept, strict=True):
        p.grad = gradient


def put_back_after_clearing_each(model: Any, optimizer: Any, data: Any) -> None:
    for p, gradient in zip(model.parameters(), taken(model), strict=True):
        p.grad = gradient


def add_two(model: Any, optimizer: Any, data: Any) -> None:
    """Gradients of two losses that are taken from the parameters, and added."""
    kept = taken(model)
    square_loss(model, data(2)).backward()
    for p, gradient in zip(model.parameters(), kept, strict=True):
        p.grad += gradient


def write_one_that_was_cleared(model: Any, optimizer: Any, data: Any) -> None:
    gradient = model.scale.grad
    model.scale.grad = None
    square_loss(model, data(2)).backward()
    gradient.zero_()


def read_one_that_was_replaced(model: Any, optimizer: Any, data: Any) -> None:
    gradient = model.scale.grad
    model.scale.grad = gradient * 3
    model.scale.grad += gradient.sign()


def keep_differences(model: Any, optimizer: Any, data: Any) -> None:
    earlier = model.scale.grad
    for seed in (2, 3):
        optimizer.zero_grad()
        square_loss(model, data(seed)).backward()
        model.scale.grad, earlier = model.scale.grad - earlier, model.scale.grad


@pytest.mark.guarantee("Gradients that are read and changed")
@every_stage
@pytest.mark.parametrize(
    "use",
    [
        put_back_after_zero_grad,
        put_back_after_clearing_each,
        add_two,
        write_one_that_was_cleared,
        read_one_that_was_replaced,
        keep_differences,
    ],
)
@pytest.mark.parametrize("options", [{}, HOST], ids=["device", "host"])
def test_a_gradient_that_is_held_is_the_users_or_is_refused(options: dict[str, Any], use: Any, stage: int) -> None:
    """After its parameter got another one: where a rank has all of it, it keeps its values, as in a plain loop."""

    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for seed in (1, 2):
            square_loss(model, data(seed)).backward()
            use(model, optimizer, data)
            optimizer.step()
            optimizer.zero_grad()

    assert_same_as_plain(loop, 1, stage=stage, **options)
    if stage == 0:
        assert_same_as_plain(loop, 2, stage=stage, **options)
        return
    with pytest.raises(RanksFailed, match=r"gradient of '\S+' was (set to .* cleared|cleared or replaced)"):
        assert_same_as_plain(loop, 2, stage=stage, **options)


@pytest.mark.guarantee("Gradients that are read and changed")
@every_stage
def test_what_else_is_assigned_is_the_gradient_or_a_copy(stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        square_loss(model, data()).backward()
        weight = model.blocks[0][0].weight
        for gradient in (weight.grad, weight.grad.data, weight.grad.detach(), copy.copy(weight.grad)):
            weight.grad = gradient
            gradient.mul_(2)
        weight.grad = weight.grad.view(35).view(7, 5)
        weight.grad = weight.grad.contiguous().float()
        model.blocks[1][0].weight.grad = weight.grad.clone()
        weight.grad.mul_(2)
        optimizer.step()

    for world in (1, 2):
        assert_same_as_plain(loop, world, stage=stage)


@pytest.mark.guarantee("Gradients that are read and changed")
@every_stage
@every_place
def test_the_closure_of_a_step_may_read_and_replace_gradients(options: dict[str, Any], stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> list[float]:
        norms = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = scaled(optimizer, square_loss(model, data()))
            loss.backward()
            norms.append(sum(p.grad.float().norm().item() for p in model.parameters()))
            model.scale.grad *= 0.5
            model.blocks[0][0].bias.grad = model.blocks[0][0].bias.grad.clamp(min=0)
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return norms

    for world in (1, 2):
        assert_same_as_plain(loop, world, functools.partial(sgd, lr=0.1), stage=stage, **options)


@pytest.mark.guarantee("Gradients that are read and changed")
@every_stage
@every_place
def test_lists_of_gradients_are_changed_and_what_is_held_shows_it(options: dict[str, Any], stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> list[float]:
        norms = []
        for seed in (1, 2, 3):
            for p in model.parameters():  # as optimizers did before zero_grad() had an option
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()
            scaled(optimizer, square_loss(model, data(seed))).backward()
            gradients = held(model)
            torch._foreach_addcmul_(gradients, gradients, gradients, 0.5)
            torch._foreach_addcdiv_(gradients, gradients, [torch.full_like(g, 2.0) for g in gradients], 0.25)
            torch._foreach_mul_(gradients, [1.0 / (1 + index) for index in range(len(gradients))])
            if isinstance(optimizer, zeroshard.ShardedOptimizer):
                optimizer.clip_grad_norm_(0.05)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            norms.append(sum(gradient.float().norm().item() for gradient in gradients))
            optimizer.step()
        return norms

    for world in (1, 2):
        assert_same_as_plain(loop, world, functools.partial(sgd, lr=0.1), stage=stage, **options)


@every_stage
def test_a_gradient_of_another_shape_is_refused(stage: int) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(2, stage=stage)
        square_loss(model, part(rank, 2)).backward()
        for wrong in (torch.ones(1), torch.ones(5, 5), 1.0):
            with pytest.raises(ValueError, match=r"'scale' .* shape \(5,\), got"):
                model.scale.grad = wrong

    run_threads(2, body)


@pytest.mark.guarantee("Gradients that are read and changed")
@at_stages(0, 1, 2)
@pytest.mark.parametrize("seen", [False, True])
def test_gradients_of_a_forward_that_ran_no_hook_are_those_of_all_ranks(seen: bool, stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> list[float]:
        found = []
        for seed in (1, 2):
            if seen:  # the gradients of a whole forward are there, and were read
                square_loss(model, data(3)).backward()
                found.append(model.blocks[0][0].weight.grad.norm().item())
            nn.functional.linear(
                model.blocks[0][0](data(seed)), model.blocks[1][0].weight.t()
            ).square().mean().backward()
            found.append(model.blocks[1][0].weight.grad.norm().item())
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
            optimizer.step()
            optimizer.zero_grad()
        return found

    for world in (1, 2):
        assert_same_as_plain(loop, world, stage=stage)


@pytest.mark.guarantee("Clipping")
@at_stages(0, 1, 2)
@pytest.mark.parametrize("options", [{}, BF16, HOST], ids=["fp32", "bf16", "host"])
@pytest.mark.parametrize("scales", [False, True])
def test_a_penalty_on_the_weights_after_a_clip_is_not_clipped(
    scales: bool, options: dict[str, Any], stage: int
) -> None:
    """Its backward visits no module; unscaling by a GradScaler is a factor like that of a clip."""

    def loop(model: Any, optimizer: Any, data: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scales)
        scaler.scale(square_loss(model, data())).backward()
        scaler.unscale_(optimizer)
        clip(model, optimizer, 0.01)
        sum(p.float().square().sum() for p in model.parameters()).mul(0.1).backward()
        scaler.step(optimizer)

    for world in (1, 2):
        assert_same_as_plain(loop, world, stage=stage, **options)


@pytest.mark.guarantee("fp16")
@at_stages(0, 1, 2)
def test_a_gradient_set_by_hand_beside_scaled_ones_that_no_hook_has_seen_is_refused(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(world, stage=stage, **FP16)
        optimizer.scale(model.blocks[2][2].weight.float().square().sum()).backward()
        model.scale.grad = torch.ones_like(model.scale)
        with pytest.raises(RuntimeError, match="'scale' was set by hand"):
            optimizer.step()

    for world in (1, 2):
        run_threads(world, body)


@pytest.mark.guarantee("Clipping")
@at_stages(0, 1, 2)
@pytest.mark.parametrize("options", [{}, HOST], ids=["fp32", "host"])
def test_a_clip_sees_changes_of_gradients_that_were_read_together(options: dict[str, Any], stage: int) -> None:
    """Reading the last of them reduces what a backward without modules has left, with norms of the others, too."""

    def loop(model: Any, optimizer: Any, data: Any) -> float:
        square_loss(model, data()).backward()
        assert model.scale.grad is not None
        model.blocks[2][2].weight.square().sum().backward()
        torch._foreach_mul_([p.grad for p in model.parameters()], 0.25)
        norm = clip(model, optimizer, 0.05).item()
        optimizer.step()
        return norm

    for world in (1, 2):
        assert_same_as_plain(loop, world, stage=stage, **options)


@every_stage
def test_an_unscaled_autograd_grad_may_come_before_the_scaled_backward(stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for seed in (1, 2):
            x = data(seed).clone().requires_grad_()
            loss = square_loss(model, x)
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
            torch.autograd.grad(square_loss(model, x), x)
            scaled(optimizer, loss).backward()
            take_step(optimizer, scaled(optimizer, square_loss(model, x.detach() + gradient.sign())))

    for world in (1, 2):
        assert_same_as_plain(loop, world, functools.partial(sgd, lr=0.1), stage=stage, **FP16)


@pytest.mark.guarantee("Evaluation with other values")
@pytest.mark.parametrize("options", [BF16, {**BF16, **HOST}], ids=["device", "host"])
@at_stages(0, 1, 2)
def test_an_evaluation_with_swapped_weights_does_not_round_masters(stage: int, options: dict[str, Any]) -> None:
    def body(rank: int, evaluates: bool) -> dict[str, torch.Tensor]:
        model, optimizer = sharded(2, functools.partial(sgd, lr=1e-3), stage=stage, **options)
        for _ in range(10):
            take_step(optimizer, square_loss(model, part(rank, 2)))
            with torch.no_grad():
                kept = [p.clone() for p in model.parameters()] if evaluates else []
                for p in model.parameters() if evaluates else ():
                    p.mul_(0.5)
                halved = model.scale.clone()
                if evaluates:
                    model(part(rank, 2))
                assert torch.equal(model.scale, halved)
                for p, q in zip(model.parameters(), kept, strict=False):
                    p.copy_(q)
        return masters(model)

    swapped, alone = run_threads(2, body, True)[0], run_threads(2, body, False)[0]
    for name, value in alone.items():
        assert torch.equal(swapped[name], value), name


def _freezes_on_rank_1(rank: int, stage: int, reads: bool) -> str:
    model, optimizer = sharded(2, stage=stage)
    try:
        for step in range(4):
            model.blocks[1][0].bias.requires_grad_(step != 1 or rank != 1)
            square_loss(model, part(rank, 2)).backward()
            if reads:
                model.scale.grad.norm()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.guarantee("Frozen on one rank")
@every_stage
@pytest.mark.parametrize("reads", [False, True])
def test_a_parameter_frozen_on_one_rank_is_noticed(reads: bool, stage: int) -> None:
    for told in run_processes(2, _freezes_on_rank_1, stage, reads):
        assert "'blocks.1.0.bias' is frozen on this rank" in told


def _adds_groups(rank: int, stage: int, blocks: list[list[int]]) -> str:
    model, optimizer = sharded(2, first, stage=stage)
    try:
        for block in blocks[rank]:
            optimizer.add_param_group({"params": model.blocks[block].parameters()})
        for _ in range(2):
            take_step(optimizer, square_loss(model, part(rank, 2)))
    except RuntimeError as error:
        return str(error)
    return ""


def first(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)


@pytest.mark.guarantee("Ranks that disagree")
@every_stage
@pytest.mark.parametrize("blocks", [[[], [1]], [[1], [2]], [[1, 2], [2, 1]]], ids=["one rank", "others", "order"])
def test_groups_that_are_not_added_on_all_ranks_are_noticed(blocks: list[list[int]], stage: int) -> None:
    for told in run_processes(2, _adds_groups, stage, blocks):
        assert "ranks disagree: rank" in told and ("add_param_group()" in told or "add a group of ['blocks." in told)


@every_stage
def test_parameters_may_be_frozen_on_all_ranks(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(2, stage=stage)
        for step in range(4):
            model.blocks[0].requires_grad_(step != 2)
            take_step(optimizer, square_loss(model, part(rank, 2)))

    run_threads(2, body)

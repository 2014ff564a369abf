"""local_steps: replicas that train alone and average now and then, as a plain loop over copies of the model does."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_replicas import DILOCO, Outer, PlainReplicas, Values
from pairs import at_stages, every_stage
from plain import (
    ONE_BATCH,
    adamw_in_groups,
    assert_close,
    batches,
    copied,
    full_parameters,
    mesh_of,
    net_loss,
    of,
    sharded,
    split,
    take_step,
    token_step,
    train_step,
)
from ranks import RanksFailed, run_processes, run_threads, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zoo import built, make_net

import zeroshard
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import predict_memory

STAGES = [0, 1, 2, 3]
OUTER_ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def train(
    rank: int,
    model: nn.Module,
    make: Any,
    data: list[torch.Tensor],
    *,
    shape: tuple[int, ...] = (2, 2),
    accumulate: int = 1,
    max_norm: float | None = None,
    no_sync: bool = False,
    **options: Any,
) -> tuple[Values, list[float], zeroshard.Report]:
    """Train one rank; return the values of its replica, the norms and the report."""
    model, optimizer = sharded(model, make, mesh=shape, **options)
    norms = []
    for batch in data:
        parts = split(batch, rank, 4).chunk(accumulate)
        for number, part in enumerate(parts):
            if no_sync and number < len(parts) - 1:
                with zeroshard.no_sync(model):
                    token_step(model, part)
            else:
                token_step(model, part)
        if max_norm is not None:
            norms.append(optimizer.clip_grad_norm_(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), norms, zeroshard.report(model)


ignore = pytest.mark.filterwarnings("ignore:.*between two averages")


@pytest.mark.guarantee("Local steps")
@ignore
@pytest.mark.parametrize(  # buckets and the number of replicas with one outer optimizer: it sees slices
    ("shape", "bucket_size", "outer"),
    [
        *(((2, 2), 2**25, outer) for outer in (None, DILOCO, OUTER_ADAM)),
        *(((2, 2), 128, DILOCO), ((4, 1), 2**25, None), ((4, 1), 2**25, OUTER_ADAM)),
    ],
)
@every_stage
def test_training_gives_the_numbers_of_a_plain_loop_over_replicas(
    stage: int, shape: tuple[int, int], bucket_size: int, outer: Outer
) -> None:
    model, data = make_net(), batches(5)
    plain = PlainReplicas(model, adamw_in_groups, shape[0], 2, outer)
    for batch in data:
        plain.step(batch)
    options: dict[str, Any] = {"stage": stage, "bucket_size": bucket_size, "local_steps": 2, "outer_optimizer": outer}
    run = functools.partial(train, model=model, make=adamw_in_groups, data=data, shape=shape, **options)
    for rank, (parameters, _, _) in enumerate(run_threads(4, run)):
        assert_close(parameters, plain.values(rank // shape[1]), 1e-6)
    first, last = plain.values(0), plain.values(shape[0] - 1)
    assert not all(torch.equal(first[name], last[name]) for name in first)  # five steps: one since the last average


def train_in_process(rank: int, model: nn.Module, data: list[torch.Tensor], stage: int) -> Values:
    return train(rank, model, adamw_in_groups, data, stage=stage, local_steps=3, outer_optimizer=DILOCO)[0]


@ignore
@at_stages(0, 2, 3)
def test_gloo_processes_give_the_numbers_of_a_plain_loop(stage: int) -> None:
    model, data = make_net(), batches(7)
    plain = PlainReplicas(model, adamw_in_groups, 2, 3, DILOCO)
    for batch in data:
        plain.step(batch)
    for rank, parameters in enumerate(run_processes(4, train_in_process, model, data, stage)):
        assert_close(parameters, plain.values(rank // 2), 1e-6)


def test_bf16_masters_are_averaged_in_fp32() -> None:
    model, data = make_net(), batches(4)
    options = {"precision": "bf16", "local_steps": 2}
    for stage in STAGES:
        run = functools.partial(train, model=model, make=adamw_in_groups, data=data, stage=stage, **options)
        found = [values for values, _, _ in run_threads(4, run)]
        plain = PlainReplicas(model, adamw_in_groups, 2, 2)
        for batch in data:
            plain.step(batch)
        for values in found[1:]:
            assert all(torch.equal(values[name], found[0][name]) for name in values)
        assert_close({n: v.float() for n, v in found[0].items()}, plain.values(0), 0.05)


@ignore
@pytest.mark.parametrize("no_sync", [False, True])
@every_stage
def test_a_replica_accumulates_and_clips_by_its_own_norm(stage: int, no_sync: bool) -> None:
    model, data = make_net(), batches(5, rows=24)
    plain, wanted = PlainReplicas(model, adamw_in_groups, 2, 2), []
    for batch in data:
        # a rank has six rows in three parts: the mean over its parts, and over the two ranks
        for number, (replica, optimizer) in enumerate(zip(plain.models, plain.optimizers, strict=True)):
            ranks = split(batch, number, 2).chunk(2)
            for part in (part for rows in ranks for part in rows.chunk(3)):
                (net_loss(replica, part) / 2).backward()
            norm = nn.utils.clip_grad_norm_(replica.parameters(), 0.3).item()
            wanted.append(norm)
            optimizer.step()
            optimizer.zero_grad()
        plain.steps += 1
        if plain.steps % 2 == 0:
            plain.average()
    run = functools.partial(train, model=model, make=adamw_in_groups, data=data, stage=stage, local_steps=2)
    run = functools.partial(run, accumulate=3, max_norm=0.3, no_sync=no_sync)
    for rank, (values, norms, _) in enumerate(run_threads(4, run)):
        assert norms == pytest.approx(wanted[rank // 2 :: 2], rel=1e-5)
        assert_close(values, plain.values(rank // 2), 1e-6)
    assert wanted[2] != pytest.approx(wanted[3], rel=1e-3)  # each has its own


@ignore
@pytest.mark.parametrize("outer", [None, DILOCO])
@pytest.mark.parametrize("offload", ["host", {"optimizer": "host", "parameters": "host"}])
def test_updates_on_the_host_end_before_the_average(offload: Any, outer: Outer) -> None:
    model, data = make_net(), batches(7)
    plain = PlainReplicas(model, adamw_in_groups, 2, 3, outer)
    for batch in data:
        plain.step(batch)
    for stage in (3,) if isinstance(offload, dict) else (1, 2, 3):
        options: dict[str, Any] = {"local_steps": 3, "outer_optimizer": outer, "offload": offload, "bucket_size": 256}
        run = functools.partial(train, model=model, make=adamw_in_groups, data=data, stage=stage, **options)
        for rank, (values, _, report) in enumerate(run_threads(4, run)):
            assert_close(values, plain.values(rank // 2), 1e-6)
            held = report.memory.get(("outer optimizer", "host"))
            assert (held is not None and held.now > 0) == (outer is not None)


@ignore
def test_each_rank_is_a_replica_in_stage_0_with_one_axis() -> None:
    model, data = make_net(), batches(5)
    plain = PlainReplicas(model, adamw_in_groups, 4, 2, DILOCO)
    for batch in data:
        plain.step(batch)
    options: dict[str, Any] = {"stage": 0, "local_steps": 2, "outer_optimizer": DILOCO, "shape": (4,)}
    run = functools.partial(train, model=model, make=adamw_in_groups, data=data, **options)
    for rank, (values, _, _) in enumerate(run_threads(4, run)):
        assert_close(values, plain.values(rank), 1e-6)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2 and p.numel()], lr=0.02)


@ignore
@at_stages(0, 3)
def test_whole_parameters_are_averaged(stage: int) -> None:
    model, data = make_net(), batches(5)
    plain = PlainReplicas(model, muon, 2, 2)
    for batch in data:
        plain.step(batch)
    run = functools.partial(train, model=model, make=muon, data=data, stage=stage, local_steps=2)
    for rank, (values, _, _) in enumerate(run_threads(4, run)):
        assert_close(values, plain.values(rank // 2), 0.02)  # Muon computes in bf16


class Mixed(nn.Module):
    """Tied, frozen and sometimes unused parameters, and one that is in no group at first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen, self.extra, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(3, 3)
        self.late = nn.Parameter(torch.ones(6))
        self.frozen.requires_grad_(False)

    def forward(self, batch: torch.Tensor, uses_extra: bool) -> torch.Tensor:
        x = self.embedding(batch.flatten()) * self.late
        x = self.extra(x) if uses_extra else x
        return nn.functional.cross_entropy(self.head(self.frozen(x)), batch.flatten())


def mixed_adam(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for name, p in model.named_parameters() if name != "late" and p.requires_grad]
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.1)


def mixed_steps(model: Any, replica: int, parts: list[Callable[[torch.Tensor], torch.Tensor]], stage: int) -> Any:
    """Make an optimizer, train with a scheduler, and yield after every step; works for plain and sharded models."""
    optimizer = yield
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for number, batch in enumerate(batches(8)):
        if number == 4:
            optimizer.add_param_group({"params": [model.late], "lr": 0.05})
            scheduler.base_lrs.append(0.05)
        # the first replica does not use all parameters in every step; in stage 3 all must use the same units
        uses_extra = number % 3 == 0 or (stage < 3 and replica == 1)
        for part in parts:
            (model(part(batch), uses_extra) / len(parts)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


def part_of(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda batch: split(batch, rank, 4)


@ignore
@pytest.mark.parametrize("outer", [None, DILOCO])
@every_stage
def test_unused_tied_frozen_and_late_parameters_and_a_scheduler(stage: int, outer: Outer) -> None:
    model = built(Mixed)
    plain = PlainReplicas(model, mixed_adam, 2, 3, outer)
    loops = [mixed_steps(plain.models[r], r, [part_of(2 * r), part_of(2 * r + 1)], stage) for r in range(2)]
    for loop, optimizer in zip(loops, plain.optimizers, strict=True):
        next(loop)
        loop.send(optimizer)
    for number in range(8):
        if (number + 1) % 3 == 0:
            plain.average()
        for loop in loops:
            next(loop, None)

    def body(rank: int) -> Values:
        options: dict[str, Any] = {"local_steps": 3, "outer_optimizer": outer, "stage": stage}
        ours, optimizer = sharded(model, mixed_adam, mesh=(2, 2), **options)
        loop = mixed_steps(ours, rank // 2, [part_of(rank)], stage)
        next(loop)
        loop.send(optimizer)
        for _ in loop:
            pass
        return full_parameters(ours)

    for rank, values in enumerate(run_threads(4, body)):
        assert_close(values, plain.values(rank // 2), 1e-6)


class Ungrouped(nn.Module):
    """One unit with a parameter that is in no group, between two that are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.free, self.last = (nn.Parameter(torch.randn(30)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.first - self.free) * self.last).square().mean()


@pytest.mark.guarantee("Parameters in no group")
@pytest.mark.parametrize("outer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.ASGD, None])
@pytest.mark.parametrize(("stage", "shape"), [(0, (3,)), (3, (2, 2)), (1, (2, 2))])
def test_parameters_in_no_group_are_left_as_they_are(stage: int, shape: tuple[int, ...], outer: Any) -> None:
    """The outer optimizer decays what it has, and a sum of three replicas rounds."""
    decay = {"lambd": 0.3} if outer is torch.optim.ASGD else {"weight_decay": 0.3}
    momentum = {"momentum": 0.9} if outer is torch.optim.SGD else {}
    make = None if outer is None else functools.partial(outer, lr=0.5, **decay, **momentum)
    with seeded(0):
        model, data = Ungrouped(), torch.randn(6, 30)

    def inner(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.first, model.last], lr=0.1)

    def body(rank: int) -> list[Values]:
        ours, found = copy.deepcopy(model), []
        options: dict[str, Any] = {"stage": stage, "local_steps": 2, "outer_optimizer": make}
        ours, optimizer = zeroshard.shard(ours, inner(ours), mesh=mesh_of(shape), **options)
        for step in range(6):
            if step == 4:  # as if it had never been stored beside the others
                optimizer.add_param_group({"params": [ours.free], "lr": 0.0})
            take_step(optimizer, ours(data[step] * (1 + rank // shape[-1] if len(shape) > 1 else 1 + rank)))
            if step % 2:
                found.append(full_parameters(ours))
        return found

    replicas = [copy.deepcopy(model) for _ in range(shape[0])]
    optimizers = [inner(replica) for replica in replicas]
    names = ["first", "last"]
    anchors = {name: nn.Parameter(model.get_parameter(name).detach().clone()) for name in names}
    plain_outer = make(anchors.values()) if make is not None else None
    ranks = run_threads(math.prod(shape), body)
    for step in range(4):
        for number, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            take_step(optimizer, replica(data[step] * (1 + number)))
        for name in names if step % 2 else ():
            mean = torch.stack([replica.get_parameter(name).detach() for replica in replicas]).mean(0)
            anchors[name].grad = anchors[name].detach() - mean
            if plain_outer is None:
                anchors[name].data.copy_(mean)
        if step % 2 and plain_outer is not None:
            plain_outer.step()
        for replica in replicas if step % 2 else ():
            for name in names:
                replica.get_parameter(name).data.copy_(anchors[name].detach())
        for found in ranks if step % 2 else ():
            assert torch.equal(found[step // 2]["free"], model.free.detach())
            expected = {name: anchor.detach() for name, anchor in anchors.items()}
            assert_close({name: found[step // 2][name] for name in names}, expected, 1e-5)
    if outer is torch.optim.SGD:  # its first outer step decays by 0.5 * 0.3, without momentum of the time before
        assert_close({"free": ranks[0][2]["free"]}, {"free": model.free.detach() * (1 - 0.15)}, 1e-6)


# ------------------------------------------------------------------------------------------------- what is averaged


def test_a_step_of_the_outer_optimizer_looks_at_one_bucket() -> None:
    """Else the host time of an average grows with the square of the number of buckets."""
    seen: list[int] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = DILOCO(parameters)
        optimizer.register_step_pre_hook(
            lambda self, *_: seen.append(sum(len(group["params"]) for group in self.param_groups))
        )
        return optimizer

    def body(rank: int) -> None:
        train(rank, make_net(), adamw_in_groups, batches(4), local_steps=2, outer_optimizer=make, bucket_size=64)

    run_threads(4, body)
    assert len(seen) > 4 * 2 * 2  # 4 ranks, 2 averages, many buckets
    assert set(seen) == {1}


def test_averages_are_counted_as_their_own_kind() -> None:
    def body(rank: int, outer: Outer) -> list[Any]:
        options: dict[str, Any] = {"stage": 2, "local_steps": 2, "outer_optimizer": outer, "bucket_size": 64}
        model, optimizer = sharded(make_net(), of(torch.optim.SGD, lr=0.1), mesh=(2, 2), **options)
        found = []
        for batch in batches(4):
            train_step(model, optimizer, split(batch, rank, 4))
            report = zeroshard.report(model)
            found.append((report.collectives.get("replica average"), report.memory.get(("outer optimizer", "device"))))
        shard = sum(flat.layout.shard_numel for unit in model._zeroshard.engine.units for flat in unit.flats)
        return [found, shard]

    for outer in (None, DILOCO):
        for found, shard in run_threads(4, body, outer):
            traffic = [each and each.bytes for each, _ in found]
            assert traffic == [None, 2 * 4 * shard, None, 2 * 4 * shard]  # an all-reduce of this rank's shard in fp32
            held = [each and each.now for _, each in found]
            assert held == ([None] * 4 if outer is None else [4 * shard, 8 * shard, 8 * shard, 8 * shard])


def test_replicas_exchange_nothing_between_averages() -> None:
    def body(rank: int) -> dict[str, int]:
        model, optimizer = sharded(make_net(), adamw_in_groups, mesh=(2, 2), local_steps=50)
        axis, sent = model._zeroshard.engine.comm.average_axis, 0
        assert axis.size == 2 and not model._zeroshard.engine.comm.replicate_axes
        for batch in batches(3):
            take_step(optimizer, net_loss(model, split(batch, rank, 4)), 1.0)
        for each in model._zeroshard.engine.comm.counters.total:
            sent += each == "replica average"
        return {"averages": sent}

    assert run_threads(4, body) == [{"averages": 0}] * 4


@ignore
def test_an_ema_is_that_of_the_mean_and_buffers_are_those_of_the_first_replica() -> None:
    model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)))
    data = [torch.randn(12, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]

    def body(rank: int) -> Any:
        ours = copy.deepcopy(model)
        sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
        ours, optimizer = zeroshard.shard(ours, sgd, mesh=mesh_of((2, 2)), stage=2, local_steps=2)
        ema, found = zeroshard.EMA(ours, 0.5), []
        for x in data:
            take_step(optimizer, ours(split(x, rank, 4)).square().mean())
            ema.update()
            with ema.swapped():
                averages = full_parameters(ours)
            found.append((full_parameters(ours), averages, ours[1].running_mean.clone()))
        return found

    ranks = run_threads(4, body)
    average = copied(model)
    for step in range(len(data)):
        values, averages, buffers = zip(*(found[step] for found in ranks), strict=True)
        for name in average:  # of the mean of both replicas, in every step
            average[name] = (average[name] + (values[0][name] + values[2][name]) / 2) / 2
            torch.testing.assert_close((averages[0][name] + averages[2][name]) / 2, average[name], rtol=0, atol=1e-6)
        is_equal = all(torch.equal(averages[0][name], averages[2][name]) for name in average)
        assert is_equal == torch.equal(buffers[0], buffers[2]) == (step % 2 == 1)


@ignore
def test_an_overflow_skips_the_step_on_all_replicas_and_counts() -> None:
    def body(rank: int) -> Any:
        options: dict[str, Any] = {"precision": "fp16", "local_steps": 2, "stage": 2, "loss_scale": 8.0}
        model, optimizer = sharded(make_net(), adamw_in_groups, mesh=(2, 2), **options)
        start, scales, counts = full_parameters(model), [], []
        for number, batch in enumerate(batches(4)):
            loss = net_loss(model, split(batch, rank, 4))
            loss = loss * float("inf") if number == 0 and rank == 3 else loss
            take_step(optimizer, optimizer.scale(loss))
            scales.append(optimizer.loss_scale.item())
            counts.append(optimizer.local_steps.count)
            if number == 0:
                values = {name: zeroshard.full_parameter(model, name) for name in start}
                assert all(torch.equal(values[name].half(), start[name]) for name in start)
        return full_parameters(model), scales, counts

    ranks = run_threads(4, body)
    for values, scales, counts in ranks:
        assert scales == [4.0] * 4 and counts == [1, 0, 1, 0]
        assert all(torch.equal(values[name], ranks[0][0][name]) for name in values)


@ignore
@pytest.mark.parametrize(("stage", "shape"), [(0, (2,)), (1, (2, 1)), (2, (2, 2))])
def test_an_overflow_that_torchs_grad_scaler_finds_skips_the_step_on_all_replicas(
    stage: int, shape: tuple[int, ...]
) -> None:
    model, data, world = make_net(), batches(4), torch.Size(shape).numel()

    def body(rank: int) -> tuple[Values, float]:
        ours: Any = copy.deepcopy(model)
        sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
        ours, optimizer = zeroshard.shard(ours, sgd, mesh=mesh_of(shape), stage=stage, local_steps=3, timeout=20)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number, batch in enumerate(data):
            factor = math.inf if rank == 0 and number == 1 else 1.0
            scaler.scale(net_loss(ours, split(batch, rank, world)) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return full_parameters(ours), scaler.get_scale()

    plain = PlainReplicas(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 2, 3)
    for number, batch in enumerate(data):
        if number != 1:
            plain.step(batch)
    for values, scale in run_threads(world, body):
        assert scale == 2.0
        assert_close(values, plain.values(0))


@ignore
def test_several_optimizers_count_their_own_steps() -> None:
    def body(rank: int) -> Any:
        model = make_net()
        heads = [p for name, p in model.named_parameters() if name.startswith("head")]
        rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
        both = [torch.optim.SGD(heads, lr=0.1), torch.optim.Adam(rest, lr=0.01)]
        model, (first, second) = zeroshard.shard(model, both, mesh=mesh_of((2, 2)), local_steps=2)
        for number, batch in enumerate(batches(3)):
            token_step(model, split(batch, rank, 4))
            first.step()
            if number:
                second.step()
            first.zero_grad()
            second.zero_grad()
        return full_parameters(model), first.local_steps.count, second.local_steps.count

    ranks = run_threads(4, body)
    assert [found[1:] for found in ranks] == [(1, 0)] * 4
    ours, other = ranks[0][0], ranks[2][0]
    for name in ours:
        assert torch.equal(ours[name], other[name]) == (not name.startswith("head"))


@every_stage
def test_parameters_that_are_stored_together_cannot_be_added_to_two_optimizers(stage: int) -> None:
    """Each average would change the other's parameters, and the outer optimizer would update them twice."""

    def body(rank: int) -> None:
        model = make_net()
        groups = [[model.head.weight], [model.embedding.weight]]
        both = [torch.optim.SGD(group, lr=0.1) for group in groups]
        model, (first, second) = zeroshard.shard(model, both, mesh=mesh_of((2, 1)), local_steps=2, stage=stage)
        block, other = model.blocks[0], model.blocks[1]
        first.add_param_group({"params": [block.up.weight]})
        with pytest.raises(ValueError, match=r"'blocks.0.up.bias' is stored together with 'blocks.0.up.weight'"):
            second.add_param_group({"params": [other.up.weight, block.up.bias]})
        first.add_param_group({"params": [block.up.bias]})
        second.add_param_group({"params": [other.up.weight]})
        token_step(model, split(ONE_BATCH, rank, 2))
        first.step()
        second.step()
        zeroshard.average_replicas(model)

    run_threads(2, body)


# ------------------------------------------------------------------------------------------- values between averages


@pytest.mark.guarantee("Between two averages")
def test_writing_between_averages_raises_until_replicas_are_averaged() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(make_net(), adamw_in_groups, mesh=(2, 2), local_steps=8)
        train_step(model, optimizer, split(ONE_BATCH, rank, 4))
        for call in (lambda: zeroshard.unwrap(model), lambda: zeroshard.gathered(model, write_rank=0).__enter__()):
            with pytest.raises(RuntimeError, match=r"1 steps alone .* call zeroshard.average_replicas"):
                call()
        zeroshard.average_replicas(model)
        zeroshard.average_replicas(model)  # nothing to do
        with zeroshard.gathered(model, write_rank=3), torch.no_grad():
            model.head.bias.fill_(rank)
        assert zeroshard.full_parameter(model, "head.bias").eq(3).all()
        zeroshard.unwrap(model)

    run_threads(4, body)


@pytest.mark.guarantee("Between two averages")
@pytest.mark.parametrize(
    "read", [lambda m: zeroshard.state_dict(m), lambda m: zeroshard.full_parameter(m, "head.bias")]
)
def test_a_read_between_averages_warns(read: Callable[[nn.Module], Any]) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(make_net(), adamw_in_groups, mesh=(2,), stage=0, local_steps=8)
        token_step(model, split(ONE_BATCH, rank, 2))
        optimizer.step()
        read(model)

    with pytest.warns(UserWarning, match="between two averages of the replicas"):
        run_threads(2, body)


# ------------------------------------------------------------------------------------------------- what is refused


def refused(mesh_shape: tuple[int, ...] | None, message: str, **options: Any) -> None:
    def body(rank: int) -> None:
        model = make_net()
        optimizer = options.pop("optimizer", adamw_in_groups)(model)
        mesh = mesh_of(mesh_shape) if mesh_shape is not None else None
        with pytest.raises(ValueError, match=message):
            zeroshard.shard(model, optimizer, mesh=mesh, **options)

    run_threads(2, body)


def test_a_mesh_without_replicas_is_refused() -> None:
    refused(None, r"local_steps=4 averages replicas, and stage 3 .* init_device_mesh", local_steps=4)
    refused((2,), r"local_steps=4 averages replicas, and stage 1 .* or use stage=0", local_steps=4, stage=1)


def test_local_steps_without_an_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match="shard\\(\\) got none"):
        zeroshard.shard(make_net(), stage=0, local_steps=2)


class AdamMean(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, "local_steps must be an integer of at least 1"),
        ({"local_steps": 2, "partition": "full"}, "partition='full' has none: use partition='hybrid'"),
        ({"local_steps": 2, "partition": "hierarchical"}, "partition='hierarchical' has none"),
        ({"outer_optimizer": DILOCO}, "set local_steps above 1"),
        ({"local_steps": 2, "outer_optimizer": 3}, "must be a function of parameters"),
        ({"local_steps": 2, "outer_optimizer": lambda parameters: None}, "must return a torch.optim.Optimizer"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zeroshard.Config(**options)


def test_an_outer_optimizer_that_is_not_elementwise_is_refused() -> None:
    model = make_net()
    with pytest.raises(ValueError, match=r"one of torch's elementwise optimizers .* got AdamMean"):
        zeroshard.shard(model, adamw_in_groups(model), stage=0, local_steps=2, outer_optimizer=AdamMean)


def test_an_optimizer_that_switches_modes_is_refused() -> None:
    class ScheduleFree(torch.optim.SGD):
        def train(self) -> None:
            pass

    model = make_net()
    with pytest.raises(ValueError, match=r"ScheduleFree, whose train\(\) and eval\(\)"):
        zeroshard.shard(model, ScheduleFree(model.parameters()), stage=0, local_steps=2, elementwise=True)


def test_replicas_with_different_learning_rates_are_found() -> None:
    def body(rank: int) -> None:
        model = make_net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1 if rank == 0 else 0.2)
        model, optimizer = zeroshard.shard(model, sgd, stage=0, local_steps=2)
        for _ in range(2):
            token_step(model, split(ONE_BATCH, rank, 2))
            optimizer.step()

    with pytest.raises(RanksFailed, match="the hyper-parameters of the optimizer differ between ranks"):
        run_threads(2, body)


@pytest.mark.parametrize("offload", [None, "host"])
@every_stage
def test_the_planner_knows_the_bytes_of_the_outer_optimizer(stage: int, offload: str | None) -> None:
    options: dict[str, Any] = {"stage": stage, "offload": offload, "outer_optimizer": DILOCO, "local_steps": 2}
    if stage == 0 and offload is not None:
        return
    run = functools.partial(train, model=make_net(), make=adamw_in_groups, data=batches(2), **options)
    predicted = predict_memory(make_net(), ranks=4, replicas=2, on_gpu=False, **options)
    wanted = predicted.states.get("outer optimizer", 0) + sum(
        nbytes for (kind, _), nbytes in predicted.offloaded.items() if kind == "outer optimizer"
    )
    for _, _, report in run_threads(4, run):
        assert sum(held.now for (kind, _), held in report.memory.items() if kind == "outer optimizer") == wanted > 0


def test_a_plan_leaves_the_replicas_as_they_are() -> None:
    def body(rank: int) -> Any:
        options: dict[str, Any] = {"stage": "auto", "local_steps": 2, "outer_optimizer": DILOCO}
        example = torch.zeros(2, 5, dtype=torch.int64)
        model, _ = sharded(make_net(), adamw_in_groups, mesh=(2, 2), inputs=(example,), **options)
        return model._zeroshard.engine.context.config.partition

    assert run_threads(4, body) == ["hybrid"] * 4


# ------------------------------------------------------------------------------------------- with other parts


def average_alone(rank: int) -> None:
    model, optimizer = sharded(make_net(), adamw_in_groups, stage=0, local_steps=2)
    for number in range(2):
        token_step(model, split(ONE_BATCH, rank, 2))
        optimizer.step()
        if rank == 1 and number == 0:
            zeroshard.average_replicas(model)


def test_a_rank_that_averages_alone_is_found() -> None:
    with pytest.raises(RanksFailed, match="rank 1 is about to start average of replicas"):
        run_processes(2, average_alone)


@ignore
def test_states_on_disk_are_averaged(tmp_path: Any) -> None:
    model, data = make_net(), batches(5)
    plain = PlainReplicas(model, adamw_in_groups, 2, 2, DILOCO)
    for batch in data:
        plain.step(batch)
    offload = {"optimizer": "disk", "directory": str(tmp_path)}
    options: dict[str, Any] = {"local_steps": 2, "outer_optimizer": DILOCO, "offload": offload, "stage": 3}
    run = functools.partial(train, model=model, make=adamw_in_groups, data=data, **options)
    for rank, (values, _, _) in enumerate(run_threads(4, run)):
        assert_close(values, plain.values(rank // 2), 1e-6)


@ignore
@at_stages(0, 2, 3)
def test_states_moved_to_the_host_and_back_go_on(stage: int) -> None:
    def body(rank: int, moves: bool) -> Values:
        options: dict[str, Any] = {"stage": stage, "local_steps": 2, "outer_optimizer": DILOCO}
        model, optimizer = sharded(make_net(), adamw_in_groups, mesh=(2, 2), **options)
        for batch in batches(5):
            train_step(model, optimizer, split(batch, rank, 4))
            if moves:
                before = zeroshard.report(model).memory["outer optimizer", "device"].now
                zeroshard.offload_states(model)
                assert zeroshard.report(model).total.now == 0
                zeroshard.reload_states(model)
                assert zeroshard.report(model).memory["outer optimizer", "device"].now == before
        return full_parameters(model)

    for ours, moved in zip(run_threads(4, body, False), run_threads(4, body, True), strict=True):
        assert all(torch.equal(ours[name], moved[name]) for name in ours)


@ignore
@at_stages(1, 3)
def test_replicas_of_a_tensor_parallel_model(stage: int, tmp_path: Any) -> None:
    config = GPTConfig(vocab_size=32, layers=2, heads=2, width=16, context=8)

    def body(rank: int, shape: tuple[int, ...], names: tuple[str, ...], at: int | None) -> Values:
        model: Any = built(lambda: GPT(config))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        options: dict[str, Any] = {"stage": stage, "local_steps": 2, "outer_optimizer": DILOCO}
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = zeroshard.shard(model, sgd, mesh=mesh, **options)
        replica = rank // (4 // shape[0])
        for number in range(5):
            if number == at:
                zeroshard.save(tmp_path / "step", model, optimizer)
                for parameter_group in optimizer.param_groups:
                    parameter_group["lr"] = 7.0
                zeroshard.load(tmp_path / "step", model, optimizer)
            generator = torch.Generator().manual_seed(10 * number + replica)
            tokens = torch.randint(32, (2, 8), generator=generator)
            take_step(optimizer, model(tokens, tokens))
        return zeroshard.state_dict(model, rank=None)

    wanted = run_threads(4, body, (2, 2), ("replicate", "shard"), None)
    for at in (None, 3):
        found = run_threads(4, body, (2, 1, 2), ("replicate", "shard", "tensor"), at)
        for ours, other in zip(found, wanted, strict=True):
            assert_close(ours, other, 1e-5)
    assert any(not torch.equal(value, wanted[2][name]) for name, value in wanted[0].items())

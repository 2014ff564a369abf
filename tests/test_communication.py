"""A step moves the bytes the paper counts, in collectives of at most a bucket, the next unit's gather ahead of use."""

from __future__ import annotations

import copy

import pytest
import torch
from live import Collectives
from ranks import run_threads
from torch import nn

import zeroshard
from zeroshard.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=8000, context=64, layers=8, heads=4, width=256)  # 10.4 M parameters
PSI = CONFIG.parameters
ALIGNMENT = 0.005
SMALL = GPTConfig(vocab_size=256, context=16, layers=3, heads=2, width=64)


def steady_step(rank: int, model: GPT, steps: int, **options):
    """Train; return the report of the last step and what a dispatch mode saw of it."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = zeroshard.shard(model, optimizer, precision="bf16", **options)
    tokens = torch.arange(1).view(1, -1)
    for _ in range(steps):
        with Collectives() as seen:
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return zeroshard.report(model), seen


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return GPT(CONFIG)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_steady_step_communicates_what_the_paper_counts(gpt: GPT, stage: int, volume: int, world: int) -> None:
    def body(rank: int):
        return steady_step(rank, gpt, 3, stage=stage, bucket_size=2**19)

    for report, seen in run_threads(world, body):
        wanted = volume * PSI * 2  # bytes, bf16
        assert wanted <= report.communicated < wanted * (1 + ALIGNMENT)
        assert seen.communicated == report.communicated  # the report's word against the dispatcher's
        for kind, traffic in report.collectives.items():
            assert traffic.count == len(seen.of(kind)), kind
        unknown = {name for name, _ in seen.events} - set(report.collectives)
        assert not unknown, "collectives the report does not count"


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        (0, {"all-reduce": 2}),
        (1, {"reduce-scatter": 1, "all-gather": 1}),
        (2, {"reduce-scatter": 1, "all-gather": 1}),
        (3, {"reduce-scatter": 1, "all-gather": 2}),
    ],
)
def test_each_stage_uses_its_own_collectives(stage: int, kinds: dict[str, int]) -> None:
    model = GPT(SMALL)

    def body(rank: int):
        return steady_step(rank, model, 3, stage=stage)

    for report, _ in run_threads(2, body):
        sizes = {kind: traffic.bytes for kind, traffic in report.collectives.items() if traffic.bytes > 1024}
        assert sizes.keys() == kinds.keys()
        for kind, times in kinds.items():
            assert sizes[kind] == pytest.approx(times * SMALL.parameters * 2, rel=0.05)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_alone_communicates_nothing(stage: int) -> None:
    model = GPT(SMALL)
    for report, seen in run_threads(1, steady_step_of, model, stage):
        assert report.communicated == 0
        assert not seen.events


def steady_step_of(rank: int, model: GPT, stage: int):
    return steady_step(rank, model, 2, stage=stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_smaller_buckets_make_more_and_smaller_collectives_of_the_same_volume(stage: int) -> None:
    model = GPT(SMALL)

    def body(rank: int, bucket_size: int):
        return steady_step(rank, model, 3, stage=stage, bucket_size=bucket_size)

    (large, seen_large), *_ = run_threads(2, body, 2**25)
    (small, seen_small), *_ = run_threads(2, body, 2**12)
    assert small.communicated == pytest.approx(large.communicated, rel=0.02)
    for kind, traffic in large.collectives.items():
        if traffic.bytes < 1024:
            continue
        assert small.collectives[kind].count > 2 * traffic.count
        times = 2 if kind == "all-reduce" else 1
        assert max(seen_small.of(kind)) <= 2 * times * 2**12 < max(seen_large.of(kind))


# ------------------------------------------------------------------------------------------------- prefetch

HIDDEN = (67, 199, 331, 463)  # of each block: sizes tell the blocks apart, in gathers and in products


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, hidden, bias=False), nn.Linear(hidden, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def uneven_steps(rank: int, model: nn.Module, prefetch: bool):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zeroshard.shard(model, optimizer, stage=3, prefetch=prefetch)
    for _ in range(3):
        with Collectives(ops=("mm", "addmm")) as seen:
            loss = model(torch.ones(2, 16)).square().mean()
            seen.events.append(("forward is over", None))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen.events


def first_gathers_and_products(events) -> list[tuple[str, int]]:
    """In order: ("gather", block) and ("compute", block), each when it first happens."""
    first: dict[tuple[str, int], None] = {}
    for name, what in events:
        for block, hidden in enumerate(HIDDEN):
            if name == "all-gather" and abs(what // 4 - 32 * hidden) < 32 * 33:  # elements, alignment allowed
                first["gather", block] = None
            elif name in ("mm", "addmm") and any(hidden in shape for shape in what):
                first["compute", block] = None
    return list(first)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_next_unit_is_gathered_before_the_present_one_computes_when_prefetching(prefetch: bool, backward: bool) -> None:
    model = nn.Sequential(*(Block(hidden) for hidden in HIDDEN))
    for events in run_threads(2, uneven_steps, model, prefetch):
        over = events.index(("forward is over", None))
        order = first_gathers_and_products(events[over:] if backward else events[:over])
        blocks = list(range(len(HIDDEN)))[:: -1 if backward else 1]
        for present, upcoming in zip(blocks, blocks[1:], strict=False):
            ahead = order.index(("gather", upcoming)) < order.index(("compute", present))
            assert ahead == prefetch, order
            assert order.index(("gather", upcoming)) < order.index(("compute", upcoming))


def test_a_change_of_order_costs_a_missed_prefetch_and_no_wrong_result() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(hidden) for hidden in HIDDEN)

        def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
            for index in order:
                x = self.blocks[index](x)
            return x

    model = Either()
    orders = [(0, 1, 2, 3), (0, 1, 2, 3), (2, 0, 3, 1), (3, 2), (0, 1, 2, 3), (1, 1, 0)]
    x = torch.ones(2, 16)

    def body(rank: int):
        ours = copy.deepcopy(model)
        ours, _ = zeroshard.shard(ours, stage=3)
        losses = []
        for order in orders:
            loss = ours(x, order).square().sum()
            loss.backward()
            losses.append(loss.detach())
        return losses, zeroshard.full_gradient(ours, "blocks.1.up.weight")

    plain = copy.deepcopy(model)
    expected = []
    for order in orders:
        loss = plain(x, order).square().sum()
        loss.backward()
        expected.append(loss.detach())
    for losses, gradient in run_threads(2, body):
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(gradient, plain.blocks[1].up.weight.grad)

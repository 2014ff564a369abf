"""Large gradients are reduced as autograd has made them; numbers, and what users have seen of them, stay the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairs import at_stages
from plain import Tensors, adamw, assert_close, assert_equal, full_parameters, masters, sgd, sharded, take_step
from ranks import run_processes, run_threads
from torch import nn

import zeroshard
from zeroshard.comm.collectives import Communicator
from zeroshard.config.config import Config
from zeroshard.engine.flat_grad import FlatGrad
from zeroshard.planner.footprint import SimulatedRings
from zeroshard.planner.state_sizes import StateSizes, predict_memory, state_sizes

WIDTH, LAYERS = 48, 3
LARGE = 64 * WIDTH  # elements of each large weight: a multiple of 64 elements a rank, for 1, 2, 3 and 4 of them
ALIGNED = 3 * 64 * 4  # elements that all else of a layer takes at most


class Layer(nn.Module):
    """Two large weights and some small parameters between them. ``skip``: the second is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        up = self.up(self.norm(x)).relu()
        return x + (up[..., :WIDTH] if skip else self.down(up))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, skip)
        return x.float().square().mean()


@functools.cache
def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


Loss = Callable[[nn.Module, int, int], torch.Tensor]


def plainly(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(data(rank, step))


def with_a_rank_that_skips(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """In the second step the last weight of each layer has no gradient on the first rank, in the third on none."""
    return model(data(rank, step), skip=step == 2 or (step == 1 and rank == 0))


def trained(rank: int, model: nn.Module, loss: Loss, backwards: int = 1, **options: Any) -> Tensors:
    model, optimizer = sharded(model, adamw, **{"units": (Layer,), **options})
    for step in range(4):
        for number in range(backwards):
            optimizer.scale(loss(model, rank, step + 7 * number)).backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


# ----------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("loss", [plainly, with_a_rank_that_skips])
@pytest.mark.parametrize(("world", "precision"), [(2, "bf16"), (3, "fp32"), (4, "bf16")])
def test_stages_2_and_3_train_as_stage_1_does_which_packs_nothing(world: int, precision: str, loss: Loss) -> None:
    wanted, *found = (
        run_threads(world, partial(trained, stage=stage, precision=precision, bucket_size=LARGE), stack(), loss)
        for stage in (1, 2, 3)
    )
    for ranks in found:
        for parameters in ranks:
            assert_equal(parameters, wanted[0])


@pytest.mark.parametrize("world", [2, 3])
def test_several_backwards_add_up_as_where_all_is_packed(world: int) -> None:
    wanted, found = (
        run_threads(world, partial(trained, backwards=3, bucket_size=size), stack(), plainly)
        for size in (8 * LARGE, LARGE)
    )
    assert_close(found[0], wanted[0], 1e-5)  # the norm is summed in another order


def test_a_parameter_larger_than_a_bucket_is_reduced_in_parts() -> None:
    wanted, found = (
        run_threads(2, partial(trained, stage=stage, bucket_size=LARGE // 3), stack(), plainly) for stage in (1, 3)
    )
    assert_equal(found[0], wanted[0])


def skipped_on_one_rank(rank: int, model: nn.Module, at: int, **options: Any) -> Tensors:
    """On the second of two replicas of two ranks, norms in fp32: one rank packs what the others do not."""
    given = {"precision": "bf16", "keep_fp32": ("*.norm",), "units": (Layer,), "bucket_size": LARGE, "timeout": 20.0}
    model, optimizer = sharded(model, sgd, mesh=(2, 2), **given, **options)
    for step in range(2):
        x = data(rank, step)
        for number, layer in enumerate(model.layers):
            x = layer(x, skip=rank == 1 and number == at)
        take_step(optimizer, x.float().square().mean())
    return masters(model)


@pytest.mark.parametrize(("at", "ring"), [(0, 1), (1, 2), (0, 3)])
def test_replicas_sum_in_one_order_though_one_rank_has_no_gradient(at: int, ring: int) -> None:
    (wanted, *_), found = (
        run_threads(4, partial(skipped_on_one_rank, stage=stage, ring=ring), stack(), at) for stage in (1, 3)
    )
    for parameters in found:
        assert_equal(parameters, wanted)


# -------------------------------------------------------------------------------------------- what is not copied


class Reduced:
    """What each rank has given to reductions: elements, and how many of them where autograd has made them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.every: dict[int, int] = {}
        self.as_they_lay: dict[int, int] = {}
        made: dict[int, set[int]] = {}  # addresses, by rank
        take, reduce_scatter = FlatGrad.pop_autograd_grads, Communicator.reduce_scatter

        def taking(gradient: FlatGrad) -> list[torch.Tensor | None]:
            taken = take(gradient)
            made[dist.get_rank()] = {g.data_ptr() for g in taken if g is not None}
            return taken

        def reducing(comm: Communicator, shard: torch.Tensor, packed: torch.Tensor, *rest: Any) -> Any:
            rank = dist.get_rank()
            self.every[rank] = self.every.get(rank, 0) + packed.numel()
            self.as_they_lay[rank] = self.as_they_lay.get(rank, 0) + packed.numel() * (packed.data_ptr() in made[rank])
            return reduce_scatter(comm, shard, packed, *rest)

        monkeypatch.setattr(FlatGrad, "pop_autograd_grads", taking)
        monkeypatch.setattr(Communicator, "reduce_scatter", reducing)


def one_backward(rank: int, model: nn.Module, skip: bool = False, **options: Any) -> int:
    """The most bytes that the ring had."""
    model, _ = sharded(model, adamw, **{"stage": 3, "units": (Layer,), "bucket_size": LARGE, **options})
    model(data(rank, 0), skip=skip and rank == 0).backward()
    return zeroshard.report(model).memory["buckets", "device"].peak


@pytest.mark.parametrize("world", [2, 3, 4])
def test_large_gradients_are_reduced_where_autograd_has_made_them(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = Reduced(monkeypatch)
    rings = run_threads(world, one_backward, stack())
    for rank, ring in enumerate(rings):
        assert reduced.as_they_lay[rank] == LAYERS * 2 * LARGE
        assert 0 < reduced.every[rank] - reduced.as_they_lay[rank] <= LAYERS * ALIGNED
        assert 0 < ring <= 2 * 4 * ALIGNED
    planned = state_sizes(stack(), PLANNED, ranks=world)
    assert sum(unit.in_place_grad_bytes for unit in planned.units) == LAYERS * 2 * LARGE * 4
    assert opened(planned) == rings[0]


PLANNED = Config(stage=3, units=(Layer,), bucket_size=LARGE)


def opened(planned: StateSizes, packs: bool = True) -> int:
    """Bytes of the buffers that the last of the planner's reductions leaves open. ``packs``: small gradients."""
    rings = SimulatedRings(planned.ring_slots)
    for unit in reversed(planned.units):
        if packs:
            rings.add_buckets(unit.buckets, is_accumulating=False)
        else:
            rings.add_local_sum(unit.buckets)
    return rings.nbytes


def one_step(rank: int, stage: int) -> int:
    """The most bytes that buckets had."""
    model, optimizer = sharded(stack(), sgd, stage=stage, units=(Layer,), bucket_size=LARGE)
    model(data(rank, 0)).backward()
    optimizer.step()
    return zeroshard.report(model).memory["buckets", "device"].peak


@pytest.mark.parametrize(("stage", "world"), [(1, 3), (2, 2), (3, 4)])
def test_gloo_takes_the_buffers_that_the_planner_says(stage: int, world: int) -> None:
    planned = state_sizes(stack(), replace(PLANNED, stage=stage), ranks=world, on_gpu=False)
    expected = planned.shard_buffer_bytes + opened(planned, packs=False) if stage == 1 else opened(planned)
    assert 2 * 4 * LARGE < expected < 2 * 4 * (2 * LARGE + 2 * ALIGNED)
    limit = predict_memory(stack(), ranks=world, on_gpu=False, stage=stage, units=(Layer,), bucket_size=LARGE)
    assert expected <= limit.transient["buckets"]
    assert run_processes(world, one_step, stage) == [expected] * world


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"precision": "bf16", "reduce_dtype": "fp32"}, 0),
        ({"bucket_size": 8 * LARGE}, 0),  # less than a third of it
        ({"stage": 2}, LAYERS * 2 * LARGE),
        ({"offload": {"optimizer": "host"}}, 0),  # they leave the device
    ],
)
def test_what_has_to_be_cast_or_sent_or_is_small_is_packed(
    options: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced = Reduced(monkeypatch)
    run_threads(2, partial(one_backward, **options), stack())
    assert reduced.as_they_lay[0] == expected


def test_the_ring_has_no_buffers_for_large_gradients_even_where_one_is_missing() -> None:
    """Zeros take its place, where it would lie."""
    usual, missing = (run_threads(2, one_backward, stack(), skip) for skip in (False, True))
    assert usual == missing
    assert usual[0] <= predict_memory(stack(), ranks=2, units=(Layer,), bucket_size=LARGE).transient["buckets"]


def summed_before(rank: int, stage: int, bucket_size: int) -> tuple[Tensors, int]:
    """Two backwards of each step are summed inside ``no_sync``; the most bytes that the ring had."""
    model, optimizer = sharded(stack(), sgd, units=(Layer,), stage=stage, bucket_size=bucket_size)
    for step in range(3):
        with zeroshard.no_sync(model):
            for number in range(2):
                model(data(rank, step + 7 * number), skip=step == 1 and rank == 0).backward()
        take_step(optimizer, model(data(rank, step + 14)))
    memory = zeroshard.report(model).memory
    return full_parameters(model), memory["buckets", "device"].peak if ("buckets", "device") in memory else 0


@pytest.mark.parametrize("world", [2, 3])
def test_what_was_summed_inside_no_sync_is_reduced_where_it_lies(world: int) -> None:
    wanted, packed, found = (
        run_threads(world, summed_before, stage, size) for stage, size in ((1, LARGE), (3, 64 * LARGE), (3, LARGE))
    )
    for parameters, ring in (*packed, *found):
        assert_equal(parameters, wanted[0][0])
        assert ring == 0


def test_gloo_reduces_what_was_summed_where_it_lies() -> None:
    (wanted, _), *_ = run_threads(2, summed_before, 1, LARGE)
    for parameters, ring in run_processes(2, summed_before, 3, LARGE):
        assert_equal(parameters, wanted)
        assert ring == opened(state_sizes(stack(), PLANNED, ranks=2, on_gpu=False), packs=False)


# ------------------------------------------------------------------------------------------ what users have kept


def kept_gradients(rank: int, stage: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients that a hook of the user's has kept, each with a copy made at that moment."""
    model = copy.deepcopy(stack())
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    nodes = [(p, p.view_as(p).grad_fn.next_functions[0][0]) for p in (layer.down.weight for layer in model.layers)]
    for p, node in nodes:
        node.register_hook(lambda *_, p=p: kept.append((p.grad, p.grad.clone())))
    model, _ = zeroshard.shard(model, stage=stage, units=(Layer,), bucket_size=LARGE)
    model(data(rank, 0)).backward()
    zeroshard.full_gradient(model, "layers.0.up.weight")
    return kept


@pytest.mark.parametrize("run", [run_threads, run_processes])
@at_stages(2, 3)
def test_a_gradient_that_a_hook_has_kept_is_not_overwritten(run: Callable[..., Any], stage: int) -> None:
    for kept in run(2, kept_gradients, stage):
        assert len(kept) == LAYERS
        for gradient, copied in kept:
            assert torch.equal(gradient, copied)

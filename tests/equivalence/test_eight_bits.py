"""Collectives in 8 bits: exactly the arithmetic that the documentation states, in every stage and layout."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import at_stages, pairwise
from plain import (
    ONE_BATCH,
    Tensors,
    adamw_in_groups,
    assert_close,
    assert_equal,
    batches,
    copied,
    full_parameters,
    mesh_of,
    net_loss,
    of,
    run_ranks,
    sgd,
    sharded,
    shares,
    split,
    take_step,
    token_step,
    train_step,
    train_steps,
)
from ranks import RanksFailed, run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zoo import make_net

import zeroshard
from zeroshard.comm import payload_bytes

EIGHT_BITS = ["int8", "fp8"]


def round_to_eight_bits(dtype: str, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is after being sent, computed one block of 64 elements after the other."""
    restored = values.flatten().clone()
    for block in restored.split(64) if restored.numel() else ():
        largest, limit = block.abs().max().item(), 127.0 if dtype == "int8" else 448.0
        exact = torch.tensor(largest / limit)
        scale = exact.bfloat16().float()
        if scale < exact:
            scale = torch.nextafter(exact.bfloat16(), torch.tensor(math.inf, dtype=torch.bfloat16)).float()
        if scale != 0:
            quotient = block / scale
            quotient = quotient.round() if dtype == "int8" else quotient.to(torch.float8_e4m3fn).float()
            block.copy_(quotient * scale)
    return restored.view_as(values)


def sent_and_summed(dtype: str | None, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of what ranks send, in their order."""
    received = [value if dtype is None else round_to_eight_bits(dtype, value) for value in values]
    return sum(received[1:], start=received[0])


def train_reference(model: nn.Module, world: int, options: dict[str, Any], steps: int, inner: int = 4) -> Tensors:
    """Train in one process, with parameters and gradients rounded as if they had been sent.

    ``inner``: ranks of a node; gradients are summed inside nodes, and between them.
    """
    residuals: dict[tuple[int, int], torch.Tensor] = {}  # by rank and parameter
    model = copy.deepcopy(model)
    optimizer, gather_dtype, reduce_wire = (
        adamw_in_groups(model),
        options.get("gather_dtype"),
        options.get("reduce_wire"),
    )
    for batch in batches(steps):
        sent = copy.deepcopy(model)
        for parameter in sent.parameters() if gather_dtype else ():
            parameter.data = round_to_eight_bits(gather_dtype, parameter.data)
        losses = [net_loss(sent, split(batch, rank, world)) for rank in range(world)]
        gradients = [list(torch.autograd.grad(loss, list(sent.parameters()))) for loss in losses]
        for rank in range(world if options.get("error_feedback") else 0):
            for index, gradient in enumerate(gradients[rank]):
                gradients[rank][index] = total = gradient + residuals.get((rank, index), 0)
                residuals[rank, index] = total - round_to_eight_bits(reduce_wire, total)
        for parameter, of_ranks in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            total = sent_and_summed(reduce_wire, of_ranks)
            if inner < world:  # a second hop
                nodes = [of_ranks[first : first + inner] for first in range(0, world, inner)]
                total = sent_and_summed(reduce_wire, [sent_and_summed(reduce_wire, node) for node in nodes])
            parameter.grad = total * (1 / world)
        optimizer.step()
    return copied(model)


def train(world: int, model: nn.Module, steps: int = 3, **options: Any) -> Tensors:
    return run_ranks(world, model, adamw_in_groups, batches(steps), **options)


@pytest.mark.guarantee("Collectives in 8 bits")
@pytest.mark.parametrize(
    ("dtype", "world", "sends"),
    pairwise(EIGHT_BITS, [2, 3, 4], [("gather_dtype",), ("reduce_wire",), ("gather_dtype", "reduce_wire")]),
    ids=str,
)
def test_the_numbers_are_those_of_the_stated_rounding(dtype: str, world: int, sends: tuple[str, ...]) -> None:
    model, options = make_net(width=16), dict.fromkeys(sends, dtype)
    wanted = train_reference(model, world, options, steps=3)
    plain = train_reference(model, world, {}, steps=3)
    assert any(not torch.allclose(wanted[name], plain[name], rtol=0, atol=1e-6) for name in wanted)
    assert_close(train(world, model, stage=3, **options), wanted)


@pytest.mark.parametrize(("stage", "bucket_size"), [(1, 2**25), (2, 256), (3, 2**25)])
def test_error_feedback_sends_what_was_left_of_the_last_gradient(stage: int, bucket_size: int) -> None:
    model, options = make_net(width=16), {"reduce_wire": "int8", "error_feedback": True}
    wanted = train_reference(model, 2, options, steps=4)
    without = train_reference(model, 2, {"reduce_wire": "int8"}, steps=4)
    assert any(not torch.allclose(wanted[name], without[name], rtol=0, atol=1e-5) for name in wanted)
    assert_close(train(2, model, 4, stage=stage, bucket_size=bucket_size, **options), wanted)


def test_gloo_processes_give_the_same_numbers() -> None:
    model, options = make_net(width=16), {"gather_dtype": "int8", "reduce_wire": "int8"}
    wanted = train_reference(model, 3, options, steps=3)
    assert_close(train(3, model, run=run_processes, stage=3, **options), wanted)


@pytest.mark.guarantee("Collectives in 8 bits")
@pytest.mark.parametrize(("dtype", "precision", "bucket_size"), pairwise(EIGHT_BITS, [None, "bf16"], [2**25, 256]))
def test_stages_1_to_3_reduce_to_the_same_bits(dtype: str, precision: str | None, bucket_size: int) -> None:
    model = make_net(width=16)
    options = {"precision": precision, "reduce_wire": dtype, "bucket_size": bucket_size}
    first, *others = (train(2, model, stage=stage, **options) for stage in (1, 2, 3))
    for other in others:
        assert_equal(first, other)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "cast_on_gather": False},
        {"precision": "bf16", "bucket_size": 256},
        {"precision": "bf16", "offload": {"parameters": "host", "optimizer": "host"}},
        {"precision": "bf16", "prefetch": False},
        {"precision": "bf16", "keep_fp32": ("*norm*",)},
    ],
    ids=str,
)
def test_options_that_change_no_bits_change_none_here(options: dict[str, Any]) -> None:
    model, sent = make_net(width=16), {"stage": 3, "gather_dtype": "int8", "reduce_wire": "int8"}
    base = {"precision": "bf16", **({"keep_fp32": options["keep_fp32"]} if "keep_fp32" in options else {})}
    assert_equal(train(2, model, **sent, **options), train(2, model, **sent, **base))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("partition", ["full", "hierarchical"])
def test_gathers_of_two_hops_restore_the_same_bits(partition: str, precision: str | None) -> None:
    options = {"stage": 3, "precision": precision, "gather_dtype": "int8", "mesh": (2, 2)}
    wanted, found = (train(4, make_net(width=16), partition=each, **options) for each in ("hybrid", partition))
    assert_equal(found, wanted)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("partition", ["full", "hierarchical"])
def test_reductions_of_two_hops_are_rounded_once_in_each(partition: str, dtype: str) -> None:
    model, options = make_net(width=16), {"gather_dtype": dtype, "reduce_wire": dtype}
    wanted = train_reference(model, 4, options, steps=3, inner=2)
    assert_close(train(4, model, stage=3, partition=partition, mesh=(2, 2), **options), wanted)


def test_error_feedback_covers_the_first_of_two_hops() -> None:
    model, options = make_net(width=16), {"reduce_wire": "int8", "error_feedback": True}
    wanted = train_reference(model, 4, options, steps=3, inner=2)
    assert_close(train(4, model, stage=2, partition="full", mesh=(2, 2), **options), wanted)


@pytest.mark.parametrize("partition", ["full", "hierarchical"])
def test_two_hops_of_gloo_processes(partition: str) -> None:
    model, options = make_net(width=16), {"gather_dtype": "int8", "reduce_wire": "int8"}
    wanted = train_reference(model, 4, options, steps=3, inner=2)
    options |= {"stage": 3, "partition": partition, "mesh": (2, 2), "run": run_processes}
    assert_close(train(4, model, **options), wanted)


def train_with_habits(rank: int, model: nn.Module, options: dict[str, Any]) -> Tensors:
    """Accumulate with no_sync, clip, evaluate, edit between steps, recompute."""
    model, optimizer = sharded(model, adamw_in_groups, **options)
    for step, batch in enumerate(batches(4)):
        halves = split(batch, rank, 2).chunk(2)
        if step % 2:
            with zeroshard.no_sync(model):
                token_step(model, halves[0])
        else:
            token_step(model, halves[0])
        take_step(optimizer, net_loss(model, halves[1]), 0.5)
        with torch.no_grad():
            net_loss(model, halves[0])
        if step == 1:
            with zeroshard.gathered(model, write_rank=0), torch.no_grad():
                model.head.bias.add_(0.25)
    return full_parameters(model)


@pytest.mark.parametrize("sent", [{"reduce_wire": "int8"}, {"gather_dtype": "fp8", "reduce_wire": "int8"}], ids=str)
def test_accumulation_clipping_and_edits(sent: dict[str, Any]) -> None:
    model = make_net(width=16)
    exact = run_threads(2, train_with_habits, model, {"stage": 3})[0]
    found = run_threads(2, train_with_habits, model, {"stage": 3, **sent})
    assert_equal(found[0], found[1])
    assert_close(found[0], exact, 0.06)


def unchanged_by_gathers(rank: int, model: nn.Module, folder: Path, options: dict[str, Any]) -> None:
    """Everything that reads values between steps sees the exact ones."""
    exact = copied(model)
    sharded, _ = zeroshard.shard(copy.deepcopy(model), None, stage=3, gather_dtype="int8", **options)
    sharded(ONE_BATCH)
    assert_equal(full_parameters(sharded), exact)
    with zeroshard.gathered(sharded, write_rank=0):
        pass
    assert_equal({name: zeroshard.full_parameter(sharded, name) for name in exact}, exact)
    zeroshard.save(folder / "saved", sharded)
    assert_equal(dict(zeroshard.unwrap(sharded).named_parameters()), exact)
    loaded, _ = zeroshard.shard(make_net(seed=3, width=16), None, stage=1)
    zeroshard.load(folder / "saved", loaded)
    assert_equal(full_parameters(loaded), exact)


@pytest.mark.guarantee("Collectives in 8 bits")
def test_gathers_change_no_value_that_is_kept(tmp_path: Path) -> None:
    run_threads(2, unchanged_by_gathers, make_net(width=16), tmp_path, {})


class ReturnsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.second(self.first(x)), self.first.weight


def gather_again(rank: int, model: nn.Module, options: dict[str, Any]) -> int:
    """Gather a unit while a graph still uses it; return how often."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded, _ = zeroshard.shard(model, optimizer, stage=3, gather_dtype="int8", units=("first", "second"), **options)
    flat = sharded._zeroshard.engine.units[0].flats[0]
    start, checked = flat.quantized.start, 0
    _, weight = sharded(torch.ones(2, 64))
    restored = weight.detach().clone()

    def start_and_check(*args: Any) -> Any:
        nonlocal checked
        assert torch.equal(flat.view(flat.full, 0), restored)
        checked += 1
        return start(*args)

    flat.quantized.start = start_and_check
    with torch.no_grad():
        sharded(torch.ones(2, 64))
    assert torch.equal(weight, restored)
    return checked


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"offload": {"parameters": "host", "optimizer": "host"}}], ids=str
)
def test_values_that_a_graph_uses_stay_the_restored_ones(options: dict[str, Any]) -> None:
    assert run_threads(2, lambda rank: gather_again(rank, ReturnsWeight(), options))[0] > 0


class SumOfWeights(nn.Module):
    """Autograd gives both weights gradients in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.linspace(-1, 1, 4096).sin().view(64, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.one.view(-1) + self.two.view(-1)).view(64, 64))


def train_sum(rank: int, stage: int, bucket_size: int) -> Tensors:
    model, optimizer = sharded(
        SumOfWeights(), sgd, stage=stage, reduce_wire="int8", error_feedback=True, bucket_size=bucket_size
    )
    for step in range(3):
        take_step(optimizer, model(torch.linspace(-1, step + rank, 128).view(2, 64)).square().mean())
    return full_parameters(model)


@at_stages(2, 3)
def test_error_feedback_does_not_change_gradients_that_share_memory(stage: int) -> None:
    large = run_threads(2, train_sum, stage, 2**25)[0]
    assert_equal(run_threads(2, train_sum, stage, 4096)[0], large)  # each weight has its own bucket


class Experts(nn.Module):
    """Two weights in one unit; each forward uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.linspace(-1, 1, 42).sin().view(6, 7)) for _ in range(2))

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return nn.functional.linear(x, getattr(self, name)).square().sum()


def use_experts(rank: int, names: Sequence[str], options: dict[str, Any]) -> list[tuple[float, torch.Tensor]]:
    """Return the norm of all gradients, and that of the weight in use, after each backward. No value changes."""
    mesh = init_device_mesh("cpu", (2, 2)) if "partition" in options else None
    model, optimizer = sharded(Experts(), partial(sgd, lr=0.0), mesh=mesh, reduce_wire="int8", **options)
    found = []
    for name in names:
        (model(torch.linspace(-1, 1 + rank, 14).view(2, 7), name) * (1e3 if name == "one" else 1e-3)).backward()
        norm = float(optimizer.clip_grad_norm_(1.0))
        found.append((norm, zeroshard.full_gradient(model, name)))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    "options", [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "partition": "hierarchical-gradients"}], ids=str
)
def test_error_feedback_waits_for_the_next_gradient_of_a_parameter(options: dict[str, Any]) -> None:
    """What is left of an unused parameter's last gradient is not a gradient: it would count in the norm."""
    world = 4 if "partition" in options else 2
    without = run_threads(world, use_experts, ("one", "two"), options)[0]
    options = {**options, "error_feedback": True}
    in_turns = run_threads(world, use_experts, ("one", "two", "one"), options)[0]
    always = run_threads(world, use_experts, ("one", "one"), options)[0]
    assert in_turns[1][0] == without[1][0]
    assert torch.equal(in_turns[2][1], always[1][1])
    assert not torch.equal(always[1][1], always[0][1])


def move_feedback(rank: int, model: nn.Module, moves: bool) -> Tensors:
    model, optimizer = sharded(model, adamw_in_groups, stage=2, reduce_wire="int8", error_feedback=True)
    for batch in batches(3):
        train_step(model, optimizer, split(batch, rank, 2))
        if moves:
            zeroshard.offload_states(model)
            assert zeroshard.report(model).memory["error feedback", "device"].now == 0
            zeroshard.reload_states(model)
    return full_parameters(model)


@at_stages(1, 2, 3)
@pytest.mark.parametrize("unscales", [False, True])
def test_error_feedback_is_refused_with_torchs_grad_scaler(stage: int, unscales: bool) -> None:
    """When its scale changes, what is left of the last gradient has the old one, and no later call can tell."""
    model = make_net(width=16)

    def body(rank: int, error_feedback: bool) -> None:
        options: dict[str, Any] = {"stage": stage, "reduce_wire": "int8", "error_feedback": error_feedback}
        ours, optimizer = sharded(model, adamw_in_groups, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(net_loss(ours, ONE_BATCH)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    run_threads(2, body, False)
    with pytest.raises(RanksFailed, match=r"error_feedback=True with torch\.amp\.GradScaler"):
        run_threads(2, body, True)


def test_error_feedback_is_offloaded_with_the_states() -> None:
    model = make_net(width=16)
    assert_equal(run_threads(2, move_feedback, model, True)[0], run_threads(2, move_feedback, model, False)[0])


def resume(rank: int, model: nn.Module, folder: Path, options: dict[str, Any]) -> None:
    """Save after two steps; a new model that loads it goes on with the same bits."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
        train_steps(model, optimizer, shares(data, rank, 2))

    one, optimizer = sharded(model, adamw_in_groups, **options)
    steps(one, optimizer, batches(4)[:2])
    zeroshard.save(folder / "saved", one, optimizer)
    if options.get("error_feedback"):  # which is not saved: going on after a load is the same in both
        zeroshard.load(folder / "saved", one, optimizer)
    steps(one, optimizer, batches(4)[2:])
    two, optimizer = sharded(make_net(seed=3, width=16), adamw_in_groups, **options)
    zeroshard.load(folder / "saved", two, optimizer)
    steps(two, optimizer, batches(4)[2:])
    assert_equal(full_parameters(two), full_parameters(one))


@pytest.mark.parametrize("more", [{}, {"precision": "bf16"}, {"error_feedback": True}], ids=str)
def test_a_run_resumes_with_the_same_bits(tmp_path: Path, more: dict[str, Any]) -> None:
    options = {"stage": 3, "gather_dtype": "int8", "reduce_wire": "int8", **more}
    run_threads(2, resume, make_net(width=16), tmp_path, options)


class NaNForZero(torch.optim.SGD):
    """Makes zeros NaN, as Adam does without epsilon: of a flat slice, the padding between parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.masked_fill_(parameter == 0, math.nan)


def train_with_bad_padding(rank: int, model: nn.Module, options: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    model, optimizer = sharded(
        model, of(NaNForZero, lr=0.1), stage=3, gather_dtype="int8", reduce_wire="int8", elementwise=True, **options
    )
    train_steps(model, optimizer, shares(batches(2), rank, 2))
    return full_parameters(model), model(ONE_BATCH).detach().float()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16", "cast_on_gather": False},
        {"offload": {"parameters": "host", "optimizer": "host"}},
    ],
    ids=str,
)
def test_what_an_optimizer_makes_of_padding_is_not_sent(options: dict[str, Any]) -> None:
    model = make_net(width=16)
    parameters, output = run_threads(2, train_with_bad_padding, model, options)[0]
    dtype = torch.bfloat16 if "precision" in options else torch.float32
    for name, parameter in model.to(dtype).named_parameters():
        parameter.data = round_to_eight_bits("int8", parameters[name].to(dtype).float()).to(dtype)
    torch.testing.assert_close(output, model(ONE_BATCH).detach().float(), rtol=0.02, atol=0.02)


def bytes_of_a_step(
    rank: int, mesh: tuple[int, int] | None, options: dict[str, Any]
) -> tuple[dict[str, int], int, int, int]:
    model, optimizer = sharded(
        nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(2)]),
        sgd,
        mesh=mesh,
        stage=3,
        precision="bf16",
        units=("0", "1"),
        prefetch=False,
        **options,
    )
    for _ in range(2):
        take_step(optimizer, model(torch.ones(2, 64)).sum())
    report = zeroshard.report(model)
    traffic = {kind: traffic.bytes for kind, traffic in report.collectives.items()}
    kinds = {kind: held for (kind, _), held in report.memory.items()}
    feedback = kinds["error feedback"].now if "error feedback" in kinds else 0
    return traffic, kinds["gathered"].peak, kinds["parameters"].now, feedback


def test_the_report_counts_the_bytes_that_are_sent() -> None:
    numel, options = 64 * 64, {"gather_dtype": "int8", "reduce_wire": "int8"}
    assert run_threads(2, bytes_of_a_step, None, {**options, "error_feedback": True})[0][3] == 2 * 2 * numel
    traffic, gathered, kept, _ = run_threads(2, bytes_of_a_step, None, options)[0]
    per_unit = 2 * payload_bytes(numel // 2)
    assert traffic["all-gather"] == 4 * per_unit  # both units, in forward and in backward
    assert traffic["reduce-scatter"] == 2 * per_unit
    assert gathered == 2 * numel + per_unit  # the full unit, and the payloads while they are restored
    assert kept == 0
    traffic, _, kept, _ = run_threads(4, bytes_of_a_step, (2, 2), {**options, "partition": "hierarchical"})[0]
    payload = payload_bytes(numel // 4)
    assert traffic["outer all-gather"] == 2 * 2 * payload  # once per unit and step
    assert traffic["all-gather"] == 4 * 4 * payload
    assert traffic["reduce-scatter"] == 2 * 2 * payload_bytes(numel // 2)
    assert traffic["outer reduce-scatter"] == 2 * 2 * payload
    assert kept == 2 * 2 * payload


def eight_bits_of(rank: int, model: nn.Module, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    sharded, _ = zeroshard.shard(copy.deepcopy(model), **options)
    report = zeroshard.report(sharded)
    return report.eight_bits, str(report)


def test_the_report_lists_the_parameters_that_are_not_sent_in_8_bits() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32).double(), nn.Linear(32, 32))
    model[3].bias.requires_grad_(False)
    both = {"gather_dtype": "int8", "reduce_wire": "fp8"}
    found, text = run_threads(2, eight_bits_of, model, {"stage": 3, **both})[0]
    assert found["gather_dtype"].excluded == {"2.weight": "in float64", "2.bias": "in float64"}
    assert set(found["gather_dtype"].names) == {f"{layer}.{name}" for layer in "013" for name in ("weight", "bias")}
    assert set(found["reduce_wire"].names) == set(found["gather_dtype"].names) - {"3.bias"}
    assert found["reduce_wire"].excluded == found["gather_dtype"].excluded
    assert "gather_dtype: int8, 6 parameters; not 2.weight, 2.bias (in float64)" in text
    assert "reduce_wire: fp8, 5 parameters; not 2.weight, 2.bias (in float64)" in text

    kept = {"stage": 3, "precision": "bf16", "keep_fp32": nn.LayerNorm, **both}
    found, _ = run_threads(2, eight_bits_of, model, kept)[0]
    stays = dict.fromkeys(("1.weight", "1.bias"), "stays in fp32 under bf16")
    assert {option: params.excluded for option, params in found.items()} == dict.fromkeys(both, stays)

    for offload in (None, "host"):
        options = {"stage": 3, "precision": "fp8", "offload": offload, **both}
        found, _ = run_threads(2, eight_bits_of, model, options)[0]
        weights = dict.fromkeys(("0.weight", "2.weight", "3.weight"), "the weight of a float8 layer")
        assert found["gather_dtype"].excluded == weights and found["reduce_wire"].excluded == {}

    found, _ = run_threads(1, eight_bits_of, model, {"stage": 3, **both})[0]
    assert set(found["gather_dtype"].excluded.values()) == {"on one rank"} and not found["gather_dtype"].names
    assert run_threads(2, eight_bits_of, model, {"stage": 3})[0][0] == {}


def overflow(rank: int, bad: float, options: dict[str, Any]) -> tuple[float, bool]:
    model, optimizer = sharded(make_net(width=16), adamw_in_groups, **options)
    before = full_parameters(model)
    loss = optimizer.scale(net_loss(model, ONE_BATCH)) if options["precision"] == "fp16" else None
    loss = net_loss(model, ONE_BATCH) if loss is None else loss
    (loss * (bad if rank == 1 else 1.0)).backward()
    norm = float(optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    after = full_parameters(model)
    return norm, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_of_one_rank_is_seen_by_all(bad: float) -> None:
    for norm, _ in run_threads(2, overflow, bad, {"stage": 2, "precision": "bf16", "reduce_wire": "int8"}):
        assert not math.isfinite(norm)
    for _, is_skipped in run_threads(2, overflow, bad, {"stage": 2, "precision": "fp16", "reduce_wire": "int8"}):
        assert is_skipped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 2, "gather_dtype": "int8"}, "gather_dtype='int8' needs stage=3, got stage=2"),
        ({"stage": 0, "reduce_wire": "int8"}, "reduce_wire='int8' needs stage 1, 2 or 3"),
        ({"stage": 3, "gather_dtype": "int4"}, "gather_dtype must be None, 'int8' or 'fp8', got 'int4'"),
        ({"stage": 3, "reduce_wire": True}, "reduce_wire must be None, 'int8' or 'fp8', got True"),
        ({"stage": 3, "reduce_wire": "int8", "reduce_dtype": "fp32"}, "reduce_dtype asks for torch.float32"),
        ({"stage": 3, "error_feedback": True}, "error_feedback=True needs reduce_wire"),
        ({"stage": 3, "error_feedback": True, "reduce_wire": "int8", "precision": "fp16"}, "not precision='fp16'"),
    ],
)
def test_what_cannot_be_sent_in_8_bits_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        zeroshard.Config(**options)


def shard_with(rank: int, options: dict[str, list[str]]) -> None:
    model = make_net()
    with pytest.raises(zeroshard.RanksDisagreeError, match=f"{next(iter(options))} is fp8 here and int8 on rank 0"):
        zeroshard.shard(
            model, adamw_in_groups(model), stage=3, **{name: given[rank] for name, given in options.items()}
        )


@pytest.mark.parametrize("option", ["gather_dtype", "reduce_wire"])
def test_ranks_that_send_other_8_bits_are_refused(option: str) -> None:
    run_threads(2, shard_with, {option: ["int8", "fp8"]})


def shard_on_hybrid_mesh(rank: int) -> None:
    mesh = mesh_of((2, 2))
    with pytest.raises(ValueError, match="use partition='hierarchical' or 'full'"):
        zeroshard.shard(make_net(), None, mesh=mesh, stage=2, reduce_wire="int8")


def test_a_hybrid_mesh_is_refused_for_reductions() -> None:
    run_threads(4, shard_on_hybrid_mesh)

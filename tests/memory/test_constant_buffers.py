"""Buffers are as large as ``bucket_size`` makes them, however large the model, and the update through them is exact.

Sizes: a rank's part of the smallest model is already more than a bucket, so that every buffer is as large as it gets.
"gathered", "autograd" and "staging" are whole units, the model's own size: they grow with a block, not with the depth.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live import allocated_bytes
from pairs import every_stage
from plain import ONE_BATCH, Tensors, assert_equal, batches, masters, net_loss, split, token_step, whole_states
from ranks import run_processes, run_threads
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from zoo import Skips, built, make_net

import zeroshard
from zeroshard.engine.flat_grad import MAX_SEGMENTS
from zeroshard.engine.module_buffers import MAX_PACKED_ELEMENTS, BufferBroadcaster
from zeroshard.optim import step as optimizer_step
from zeroshard.optim.slices import OptimizerSlice, max_slice_numel
from zeroshard.optim.step import ELEMENTWISE_OPTIMIZERS
from zeroshard.planner.state_sizes import predict_memory

BUCKET = 1024  # elements
WORLD = 4
DEEPER = {1: (2, 64), 4: (8, 64), 16: (32, 64)}  # times the parameters → layers, width
WIDER = {1: (2, 64), 4: (2, 128), 16: (2, 256)}
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SMALL = 4096  # bytes: scalars of each flat, such as its norm
every_way_to_grow = pytest.mark.parametrize(
    ("precision", "deeper"), [("fp32", True), ("bf16", True), ("fp16", True), ("fp32", False)]
)


class Layer(nn.Sequential):
    """A block. It is named as a unit below: many small ones would be gathered together."""


def stack(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*[Layer(nn.Linear(width, width, bias=False)) for _ in range(layers)])


# ------------------------------------------------------------------------------------- 1, 4 and 16 times the model


Found = tuple[Any, dict[str, int], int]  # the report, the most that was allocated, what was predicted of a step


def measured(rank: int, stage: int, precision: str, sizes: dict[int, tuple[int, int]]) -> dict[int, Found]:
    """One rank of ``WORLD``, alone: the fake backend moves no data, so all that is allocated is the library's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    options = {"stage": stage, "precision": precision, "bucket_size": BUCKET, "loss_scale": 1.0, "units": (Layer,)}
    reduced = None if sizes == DEEPER else "bf16"  # where nothing has to be cast, nothing is packed
    return {times: measured_once(*size, **options, reduce_dtype=reduced) for times, size in sizes.items()}


def measured_once(layers: int, width: int, **options: Any) -> Found:
    predicted = predict_memory(stack(layers, width), ranks=WORLD, **options)
    model = stack(layers, width)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), fused=True), **options)
    inputs = torch.ones(1, width)

    def passes() -> None:
        optimizer.scale(model(inputs).float().square().mean()).backward()

    clip = functools.partial(optimizer.clip_grad_norm_, 1.0)
    parts: dict[str, Callable[[], Any]] = {"passes": passes, "clip": clip, "step": optimizer.step}
    for part in (*parts.values(), optimizer.zero_grad):  # the first step makes the states
        part()
    most = {}
    for name, part in parts.items():
        before = gradients_of(model)
        taken, left = allocated_bytes(part)
        opened = gradients_of(model) - before  # by backward, until zero_grad(): a state, no buffer
        assert abs(left - opened) <= 8  # the clip's coefficient
        most[name] = taken - opened
    return zeroshard.report(model), most, predicted.transient["step"]


def gradients_of(model: nn.Module) -> int:
    return int(zeroshard.report(model).memory["gradients", "device"].now)


@functools.cache
def grown(stage: int, precision: str, deeper: bool) -> dict[int, Found]:
    """What is found, by how many times the parameters there are."""
    (found,) = run_processes(1, measured, stage, precision, DEEPER if deeper else WIDER, fresh=True)
    return found


@pytest.mark.guarantee("Constant buffers")
@every_way_to_grow
@every_stage
def test_buffers_of_models_of_1_4_and_16_times_the_parameters_are_the_same(
    stage: int, precision: str, deeper: bool
) -> None:
    found = grown(stage, precision, deeper)
    for times, (report, _, _) in found.items():
        assert report.parameters == times * found[1][0].parameters
        assert report.states == pytest.approx(times * found[1][0].states, rel=0.01)
    peaks = {times: {k: v.peak for (k, _), v in report.memory.items()} for times, (report, _, _) in found.items()}
    buffers = {"buckets", "step", *(("gathered", "autograd", "staging") if deeper else ())} & peaks[1].keys()
    for times in (4, 16):
        assert {kind: peaks[times][kind] for kind in buffers} == {kind: peaks[1][kind] for kind in buffers}
    ring = 2 * BUCKET * (BYTES[precision] if deeper else BYTES["bf16"])
    packed = 0 if deeper else ring  # what large gradients take that are reduced as they lie is autograd's
    assert peaks[1].get("buckets", 0) == {0: 0, 1: ring // WORLD}.get(stage, packed)
    assert peaks[1]["step"] == (0 if precision == "fp32" and deeper else 4 * BUCKET)
    assert [predicted for _, _, predicted in found.values()] == [peaks[1]["step"]] * 3


@every_way_to_grow
@every_stage
def test_a_step_allocates_the_same_by_torchs_own_count(stage: int, precision: str, deeper: bool) -> None:
    for _, most, predicted in grown(stage, precision, deeper).values():
        assert predicted <= most["step"] <= predicted + SMALL


@pytest.mark.parametrize("precision", BYTES)
@every_stage
def test_passes_and_clipping_of_a_deeper_model_allocate_no_more_than_activations(stage: int, precision: str) -> None:
    found = grown(stage, precision, True)
    for times, (layers, width) in DEEPER.items():
        activations = (layers - DEEPER[1][0]) * width * BYTES[precision]  # each layer keeps its input
        ahead = width * width * BYTES[precision]  # of two layers none is gathered ahead when both have gradients
        assert abs(found[times][1]["passes"] - found[1][1]["passes"]) <= activations + ahead + SMALL
        assert abs(found[times][1]["clip"] - found[1][1]["clip"]) <= SMALL


def scratch_of_a_step(rank: int, layers: int) -> int:
    model = stack(layers, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    model, optimizer = zeroshard.shard(model, optimizer, bucket_size=BUCKET)
    for _ in range(2):  # the first makes the states
        model(torch.ones(1, 64)).sum().backward()
        most, _ = allocated_bytes(optimizer.step)
    return most


def test_scratch_of_an_optimizers_own_kernels_is_that_of_one_bucket() -> None:
    """In fp32, where gradients need no copy: the plain AdamW makes tensors as long as its parameters."""
    (few,), (many,) = (run_processes(1, scratch_of_a_step, layers, fresh=True) for layers in (1, 16))
    assert few > 0
    assert abs(few - many) <= 1024  # torch's profiler counts a small tensor of another thread, now and then
    assert many <= 3 * 4 * BUCKET


# ------------------------------------------------------------------------------------------------ the same numbers

Change = Callable[[Any], object]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.1, t0=1, weight_decay=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adam amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW lr in a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.01, momentum_decay=0.1),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.01),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.01),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}


def in_one_call(optimizer: torch.optim.Optimizer) -> None:
    """A hook wants to see all gradients, at every step once."""
    optimizer.register_step_pre_hook(lambda *_: None)


NET = make_net(blocks=1)  # not in a rank: threads draw from one generator


def held(optimizer: Any) -> Tensors:
    """What this rank holds: the values of its runs and their states."""
    found = {}
    for number, run in enumerate(optimizer._groups.all_slices):
        found[str(number)] = run.parameter.detach().clone()
        for key, value in optimizer.state.get(run.parameter, {}).items():
            found[f"{number} {key}"] = torch.as_tensor(value).clone()
    return found


def sharded(make: Callable[[Any], torch.optim.Optimizer], change: Change = lambda _: None, **options: Any) -> Any:
    """A small net of some ten batches of 64 elements, unless ``change`` makes it one call."""
    model = copy.deepcopy(NET)
    inner = make(model.parameters())
    change(inner)
    return zeroshard.shard(model, inner, **{"precision": "bf16", "bucket_size": 64, "loss_scale": 64.0, **options})


def train(rank: int, world: int, kind: str, max_norm: float | None = None, **options: Any) -> Tensors:
    """Some steps; what comes of them."""
    model, optimizer = sharded(OPTIMIZERS[kind], **options)
    for batch in batches(7 if kind == "RAdam" else 3):  # it does otherwise from the sixth step on
        optimizer.scale(net_loss(model, split(batch, rank, world))).backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return whole_states(model, optimizer)


@contextmanager
def uncut() -> Iterator[None]:
    """Inside, every optimizer is taken for somebody's own: runs are as long as they get and are updated by one call."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizer_step, "ELEMENTWISE_OPTIMIZERS", ())
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The class of each optimizer of torch's that is stepped, call by call."""
    seen: list[type] = []

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(self))
            return step(self, *args, **kwargs)

        return counted

    for kind in ELEMENTWISE_OPTIMIZERS:
        kind([nn.Parameter(torch.zeros(1))])  # torch wraps step() when it first makes one
    for kind in ELEMENTWISE_OPTIMIZERS:
        if "step" in vars(kind):  # not that of its parent
            monkeypatch.setattr(kind, "step", counting(vars(kind)["step"]))
    return seen


def test_every_class_that_is_stepped_in_batches_is_compared() -> None:
    made = {type(make([nn.Parameter(torch.zeros(1))])) for make in OPTIMIZERS.values()}
    assert made == set(ELEMENTWISE_OPTIMIZERS)


@pytest.mark.parametrize(("stage", "kind"), [(number % 4, kind) for number, kind in enumerate(OPTIMIZERS)])
def test_batches_update_bit_for_bit_as_one_call(stage: int, kind: str, calls: list[type]) -> None:
    run = functools.partial(train, world=2, stage=stage, kind=kind)
    with uncut():
        whole = run_threads(2, run)[0]
    once = len(calls)
    calls.clear()
    for ours in run_threads(2, run):
        assert_equal(ours, whole)
    assert len(calls) >= 5 * once > 0


MODES = [
    {"precision": "fp32"},
    {"precision": "fp32", "reduce_dtype": "bf16"},
    {"precision": "bf16"},
    {"precision": "bf16", "reduce_dtype": "fp32"},
    {"precision": "bf16", "keep_fp32": (nn.LayerNorm,), "bucket_size": 200},
    {"precision": "bf16", "reduce_dtype": torch.float64},
    {"precision": "fp16"},
    {"precision": "fp16", "reduce_dtype": "bf16", "keep_fp32": ("head",)},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("stage", [1, 3])  # gradients of each unit apart, and all in one piece of memory
def test_batches_are_exact_in_every_precision_and_clipped_equally(stage: int, mode: dict[str, Any]) -> None:
    run = functools.partial(train, world=2, kind="AdamW fused", max_norm=0.1, stage=stage, **mode)
    with uncut():
        whole = run_threads(2, run)[0]
    for ours in run_threads(2, run):
        assert_equal(ours, whole)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@every_stage
def test_unused_parameters_and_groups_are_updated_equally(stage: int, precision: str) -> None:
    base = built(Skips)

    def body(rank: int) -> Tensors:
        model = copy.deepcopy(base)
        groups = [[*model.layers[0].parameters(), model.layers[1].weight], [model.layers[1].bias]]
        inner = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 0.1}], fused=True)
        model, optimizer = zeroshard.shard(model, inner, stage=stage, precision=precision, bucket_size=64)
        for number, use in enumerate([True, False, True, True]):
            model(torch.full((2, 16), float(rank + number)), use).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                optimizer.add_param_group({"params": list(model.layers[2].parameters()), "lr": 0.01})
        return whole_states(model, optimizer)

    with uncut():
        whole = run_threads(2, body)[0]
    assert (whole["layers.1.bias step"], whole["layers.2.weight step"]) == (3, 2)
    for ours in run_threads(2, body):
        assert_equal(ours, whole)


def test_runs_are_no_longer_than_a_bucket_cut_between_vectors_and_hold_every_element_once() -> None:
    def body(rank: int) -> list[OptimizerSlice]:
        model = make_net(width=13)
        _, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters()), precision="bf16", bucket_size=200)
        return optimizer._groups.all_slices

    held: dict[str, int] = {}
    for runs in run_threads(3, body):
        lengths = [run.parameter.numel() for run in runs]
        assert max(lengths) == max_slice_numel(200) == 192 and len(lengths) > 2
        assert (
            sum(length < 192 for length in lengths) <= MAX_SEGMENTS + 1
        )  # what is left of each, and an empty parameter
        for run in runs:
            assert run.parameter.storage_offset() % 64 == 0
            for flat, parameter, within, at in run.param_ranges():
                assert 0 <= at <= at + within.numel <= run.parameter.numel()
                held[flat.names[parameter]] = held.get(flat.names[parameter], 0) + within.numel
    assert held == {name: parameter.numel() for name, parameter in make_net(width=13).named_parameters()}


def test_states_travel_between_sizes_of_buckets(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        def go_on(model: nn.Module, optimizer: Any) -> Tensors:
            for batch in batches(2):
                token_step(model, split(batch, rank, 2))
                optimizer.step()
                optimizer.zero_grad()
            return masters(model)

        model, optimizer = sharded(OPTIMIZERS["AdamW"])
        go_on(model, optimizer)
        zeroshard.save(tmp_path / "saved", model, optimizer)
        states, wanted = optimizer.state_dict(), go_on(model, optimizer)
        for bucket_size, from_dict in ((64, False), (192, True), (2**20, False)):
            model, optimizer = sharded(OPTIMIZERS["AdamW"], bucket_size=bucket_size)
            zeroshard.load(tmp_path / "saved", model, optimizer)
            if from_dict:
                optimizer.load_state_dict(states)
            assert_equal(go_on(model, optimizer), wanted)

    run_threads(2, body)


# ------------------------------------------------------------------------------------------------------- overflow


PLACES = [(kind, where) for kind in ("AdamW", "AdamW fused", "SGD", "SGD fused") for where in ("embedding", "head")]


@pytest.mark.parametrize(("kind", "where", "stage"), [(*place, n * 3 % 4) for n, place in enumerate(PLACES)])
def test_no_batch_is_updated_when_any_gradient_overflowed_on_any_rank(kind: str, where: str, stage: int) -> None:
    """In the first batch or in the last, before there are states and after."""

    def body(rank: int) -> None:
        model, optimizer = sharded(OPTIMIZERS[kind], stage=stage, precision="fp16")
        now = {"spoilt": False}
        model.get_submodule(where).weight.register_hook(lambda g: g * math.inf if now["spoilt"] else g)
        for number, batch in enumerate(batches(4)):
            now["spoilt"] = number in (0, 2) and rank == 1
            before = held(optimizer)
            optimizer.scale(net_loss(model, split(batch, rank, 2))).backward()
            optimizer.step()
            optimizer.zero_grad()
            after = held(optimizer)
            if number in (0, 2):
                assert_equal({name: after[name] for name in before}, before)
                assert not any(value.any() for name, value in after.items() if name not in before)  # new: zeros
            else:
                assert any(not torch.equal(after[name], value) for name, value in before.items())
        assert optimizer.loss_scale.item() == 16.0
        assert all(value.isfinite().all() for value in held(optimizer).values())

    run_threads(2, body)


# ----------------------------------------------------------------------------------------------- how often, and when


def steps(model: nn.Module, optimizer: Any, number: int = 2) -> None:
    for batch in batches(number):
        optimizer.scale(net_loss(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@every_stage
def test_a_part_that_fits_one_buffer_is_updated_by_one_call(
    stage: int, precision: str | None, calls: list[type]
) -> None:
    model, optimizer = sharded(torch.optim.AdamW, stage=stage, precision=precision, bucket_size=2**27)
    steps(model, optimizer)
    assert calls == [torch.optim.AdamW] * 2
    report = zeroshard.report(model)
    copied = 0 if precision is None else report.memory["master weights", "device"].now
    assert (report.memory["step", "device"].now, report.memory["step", "device"].peak) == (0, copied)


class Counts(torch.optim.AdamW):
    """Somebody's own, with a count of its calls."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


@pytest.mark.parametrize("make", [Counts, torch.optim.AdamW])
def test_who_may_count_the_calls_is_called_once(make: Any, calls: list[type]) -> None:
    model, optimizer = sharded(make)
    if make is not Counts:
        in_one_call(optimizer.inner)
    steps(model, optimizer)
    assert (optimizer.inner.count if make is Counts else len(calls)) == 2
    assert zeroshard.report(model).memory["step", "device"].peak > 4 * 64


def test_a_hook_of_torchs_on_all_optimizers_is_called_once(calls: list[type]) -> None:
    inner_calls: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda one, *_: inner_calls.append(type(one)))
    try:
        steps(*sharded(torch.optim.AdamW))
    finally:
        handle.remove()
    assert inner_calls == [zeroshard.ShardedOptimizer] * 2 and len(calls) == 2


@pytest.mark.filterwarnings("error:.*lr_scheduler")  # not garbage that an earlier test has left
def test_a_scheduler_made_on_the_inner_optimizer_changes_nothing(calls: list[type]) -> None:
    schedulers = []

    def schedule(inner: Any) -> None:
        schedulers.extend([torch.optim.lr_scheduler.StepLR(inner, 1), torch.optim.lr_scheduler.ConstantLR(inner)])

    model, optimizer = sharded(torch.optim.AdamW, schedule)
    for _ in range(2):
        steps(model, optimizer, 1)
        for scheduler in schedulers:
            scheduler.step()
    assert len(calls) > 2 * 5


def test_after_an_error_inside_a_batch_no_gradient_is_left(monkeypatch: pytest.MonkeyPatch, calls: list[type]) -> None:
    model, optimizer = sharded(torch.optim.AdamW)
    steps(model, optimizer, 1)
    step, wanted = torch.optim.AdamW.step, len(calls)

    def fails_in_the_middle(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(calls) == wanted + 2:
            raise RuntimeError("out of luck")
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of luck"):
        patched.setattr(torch.optim.AdamW, "step", fails_in_the_middle)
        steps(model, optimizer, 1)
    assert all(run.parameter._grad is None for run in optimizer._groups.all_slices)
    assert zeroshard.report(model).memory["step", "device"].now == 0
    optimizer.zero_grad()
    steps(model, optimizer, 1)


# ------------------------------------------------------------------------------------------------- the model's buffers


class Normed(nn.Module):
    """Buffers of two dtypes, small ones and large ones, one of them turned."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.norms = nn.ModuleList(nn.BatchNorm1d(10, affine=False) for _ in range(copies))
        self.register_buffer("large", torch.arange(500.0))
        self.register_buffer("turned", torch.arange(300.0).view(3, 100).t())


@pytest.mark.parametrize("bucket_size", [64, 10**9])
def test_rank_0s_buffers_reach_all_ranks_in_packs_of_one_size(bucket_size: int) -> None:
    def body(rank: int, copies: int) -> tuple[list[int], Tensors]:
        model, _ = zeroshard.shard(Normed(copies))
        for buffer in model.buffers():
            buffer.add_(rank)
        engine = model._zeroshard.engine
        engine.order.begin_pass("a test")
        sent: list[int] = []
        send = engine.comm.broadcast_over_axis
        engine.comm.broadcast_over_axis = lambda axis, tensor, *args: (
            sent.append(tensor.nbytes),
            send(axis, tensor, *args),
        )
        context = replace(engine.context, config=replace(engine.context.config, bucket_size=bucket_size))
        BufferBroadcaster(model, context).sync_buffers()
        return sent, dict(model.named_buffers())

    for copies in (2, 8, 32):
        for sent, buffers in run_threads(2, body, copies):
            assert_equal(buffers, dict(Normed(copies).named_buffers()))
            assert sum(sent) == sum(buffer.nbytes for buffer in buffers.values())
            if bucket_size > MAX_PACKED_ELEMENTS:
                assert len(sent) == 2  # one a dtype
            else:  # means and variances by the six, counts by the 64
                assert sorted(sent)[-2:] == [4 * 300, 4 * 500] and max(sorted(sent)[:-2]) <= 8 * 64
                assert len(sent) == 2 + math.ceil(copies * 2 / 6) + 1


def memory_of_a_large_buffer(rank: int) -> int:
    model = nn.Linear(1, 1)
    model.register_buffer("table", torch.zeros(10_000))
    model, _ = zeroshard.shard(model)
    engine = model._zeroshard.engine
    buffers = BufferBroadcaster(model, replace(engine.context, config=replace(engine.context.config, bucket_size=64)))
    engine.order.begin_pass("a test")
    most, _ = allocated_bytes(buffers.sync_buffers)
    return most


def test_a_large_buffer_is_sent_where_it_lies() -> None:
    for most in run_processes(2, memory_of_a_large_buffer, fresh=True):
        assert most < 10_000


# ------------------------------------------------------------------------------- gradients reduced, and added to


class Pair(nn.Module):
    """Two parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.eye(16)), nn.Parameter(torch.eye(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first @ self.second).square().mean()


@every_stage
def test_gradients_that_are_carried_on_are_counted_and_can_be_cleared_one_by_one(stage: int) -> None:
    """A backward after the reduction adds to what is reduced: replicated gradients keep that next to the new sum."""

    def body(rank: int) -> None:
        model = Pair()
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=stage)

        def gradients() -> int:
            return gradients_of(model)

        model(torch.full((2, 16), 1.0 + rank)).backward()
        once = zeroshard.full_gradient(model, "first")
        before = gradients()
        model(torch.full((2, 16), 1.0 + rank)).backward()
        assert gradients() - before == {0: 2 * 256 * 4, 1: 256 * 4}.get(stage, 0)
        model.second.grad = None
        assert torch.equal(zeroshard.full_gradient(model, "first"), 2 * once)
        assert zeroshard.full_gradient(model, "second") is None
        assert gradients() == before
        model(torch.full((2, 16), 1.0 + rank)).backward()
        optimizer.zero_grad()
        assert gradients() == before

    run_threads(2, body)


# ----------------------------------------------------------------------------------------------------------- a GPU


def on_a_gpu(rank: int, precision: str, whole: bool) -> Tensors:
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = make_net(width=64, blocks=4).cuda()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    options = {"precision": precision, "bucket_size": 1024, "loss_scale": 64.0}
    model, optimizer = zeroshard.shard(model, inner, **options)
    if whole:
        in_one_call(inner)
    data = ONE_BATCH.cuda()
    for number in range(4):
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        optimizer.scale(net_loss(model, data)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    taken = zeroshard.report(model).memory["step", "device"].peak
    assert taken == (0 if optimizer._step_runner._fused_adam is not None else 4 * 1024) or whole
    return {name: value.cpu() for name, value in held(optimizer).items()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batches_on_a_gpu_are_exact_and_wait_for_nothing(precision: str) -> None:
    (ours,), (theirs,) = (run_processes(1, on_a_gpu, precision, whole) for whole in (False, True))
    assert_equal(ours, theirs)

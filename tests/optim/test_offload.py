"""Offloaded states on one rank: the same bits, any checkpoint, memory where it was asked for, and clear errors."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live import live_beyond, live_bytes_at_start
from offloaded import OPTIMIZERS, Case, assert_same, everything, loop, train
from pairs import at_stages
from plain import ONE_BATCH, adamw, batches, momentum, net_loss, of, sharded, take_step, token_step, train_steps
from torch import nn
from zoo import make_net

import zeroshard
from zeroshard.config.offload import Offload
from zeroshard.memory.disk.file import DiskError, OffloadFile
from zeroshard.models.gpt import GPT, GPTConfig
from zeroshard.optim.cpu.apply import ChunkUpdater

pytestmark = pytest.mark.usefixtures("tried_once")

THERE = tempfile.gettempdir()
RESTS: list[Any] = [
    "host",
    ("host", 0.3),
    "disk",
    ("disk", 0.5),
    {"host": 0.5, "disk": 0.5},
    {"host": 0.3, "disk": 0.3},
]


def offload(optimizer: Any = "device", **options: Any) -> dict[str, Any]:
    return {"optimizer": optimizer, "directory": THERE, **options}


def assert_unchanged(case: Case, *choices: Any) -> None:
    """Each choice of tiers gives all the bits of the run without."""
    wanted = train(0, 1, case)
    for choice in choices:
        assert_same(train(0, 1, case, choice), wanted, str(choice))


# ---------------------------------------------------------------------------------------------- the same bits


@pytest.mark.guarantee("Offload")
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("number", range(len(OPTIMIZERS)), ids=list(OPTIMIZERS))
def test_every_optimizer_gives_the_bits_of_the_run_without_offload(number: int, native: bool, monkeypatch) -> None:
    if not native:
        monkeypatch.setattr("zeroshard.optim.cpu.updates.load_kernels", lambda: None)
    first, second = RESTS[(number + 3 * native) % len(RESTS)], RESTS[(number + 3 * native + 2) % len(RESTS)]
    case = Case(
        optimizer=list(OPTIMIZERS)[number],
        groups=(number + native) % 2 == 0,
        options={"stage": number % 4, "bucket_size": 500},
    )
    assert_unchanged(case, offload(first), offload(second))


@pytest.mark.parametrize("rest", RESTS, ids=str)
@pytest.mark.parametrize("kind", ["optimizer", "gradients", "parameters"])
def test_every_kind_rests_anywhere_alone(kind: str, rest: Any) -> None:
    assert_unchanged(Case(steps=4, options={"stage": 3, "bucket_size": 300}), {kind: rest, "directory": THERE})


@pytest.mark.parametrize("net", ["wide", "fickle", "tied", "frozen"])
@pytest.mark.parametrize("optimizer", ["AdamW", "momentum", "RMSprop"])
def test_unused_tied_and_frozen_parameters(net: str, optimizer: str) -> None:
    case = Case(net=net, optimizer=optimizer, steps=6, options={"stage": 3, "bucket_size": 400})
    assert_unchanged(case, offload("host"), offload(("disk", 0.7), parameters=("host", 0.5), gradients="device"))


@pytest.mark.parametrize(
    ("accumulate", "clip", "unsynchronised"),
    [
        ((1,), (0.05,), False),
        ((1,), (1e3,), False),
        ((1,), (1e3, 1e3, 1e3, 0.05), False),
        ((2,), (None,), True),
        ((3,), (0.05,), False),
        ((1, 2, 3), (None, 0.05), True),
        ((1, 1, 1, 2), (1e3,), False),
    ],
)
def test_accumulation_clipping_and_no_sync(accumulate: Any, clip: Any, unsynchronised: bool) -> None:
    case = Case(
        steps=7,
        accumulate=accumulate,
        clip=clip,
        unsynchronised=unsynchronised,
        options={"stage": 2, "bucket_size": 500},
    )
    assert_unchanged(case, offload("host"), offload({"host": 0.4, "disk": 0.6}, gradients=("host", 0.5)))


@pytest.mark.parametrize(
    ("precision", "optimizer", "overflow", "clip", "rests"),
    [
        ("bf16", "AdamW", None, None, (0, 3, 4)),
        ("bf16", "nesterov", None, 0.05, (0, 3)),
        ("bf16", "Adagrad", None, None, (4,)),
        ("fp16", "AdamW", 3, None, (0, 3, 4)),
        ("fp16", "fused AdamW", 2, 1e3, (3,)),
        ("fp16", "dampened", 0, 0.05, (0, 4)),  # the first step does not count: the next one makes the momentum
        ("fp16", "AdamW", 0, None, (0, 3)),
        ("fp16", "RMSprop", 1, None, (4,)),
        ("fp16", "Lion", 1, None, (3,)),
    ],
)
def test_sixteen_bits_with_loss_scale_and_overflow(
    precision: str, optimizer: str, overflow: int | None, clip: float | None, rests: tuple[int, ...]
) -> None:
    options = {"stage": 3, "precision": precision, "keep_fp32": (nn.LayerNorm,)}
    case = Case(optimizer=optimizer, steps=5, overflow=overflow, clip=(clip,), options=options)
    assert_unchanged(case, *(offload(RESTS[rest], parameters="host") for rest in rests))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_whose_own_dtype_the_native_update_does_not_serve(dtype: torch.dtype) -> None:
    def run(choice: Any) -> Any:
        model, optimizer = sharded(make_net(blocks=1).to(dtype), adamw, stage=3, offload=choice)
        train_steps(model, optimizer, batches(4))
        return everything(model, optimizer)

    wanted = run(None)
    assert_same(run(offload("host", parameters="host")), wanted)
    assert_same(run(offload(("disk", 0.5))), wanted)


def test_the_reference_gpt_from_the_meta_device() -> None:
    config = GPTConfig(vocab_size=64, context=16, layers=2, heads=2, width=32)

    def run(choice: Any) -> Any:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = zeroshard.shard(model, optimizer, stage=3, offload=choice, bucket_size=3000)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(5):
            tokens = torch.randint(64, (4, 16), generator=generator)
            losses.append(take_step(optimizer, model(tokens, tokens)))
        return {"losses": losses, **everything(model, optimizer)}

    wanted = run(None)
    assert wanted["losses"][-1] < wanted["losses"][0]
    assert_same(run(offload("host", parameters="host")), wanted)
    assert_same(run(offload({"host": 0.5, "disk": 0.5}, parameters={"host": 0.5, "disk": 0.5})), wanted)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_chunks_on_disk_may_be_updated_in_any_order(seed: int) -> None:
    """As they are where gradients arrive late: first those that are there."""
    case = Case(net="wide", steps=5, options={"stage": 3, "bucket_size": 300})
    model, optimizer = case.make(offload("disk"))
    order = optimizer._cpu_updates._chunk_order
    for step in range(5):
        places = torch.randperm(len(order), generator=torch.Generator().manual_seed(5 * seed + step)).tolist()
        order.update(zip(order, places if seed else reversed(range(len(order))), strict=True))
        loop(model, optimizer, replace(case, steps=step + 1), first=step)
        zeroshard.full_parameter(model, "head.weight")  # the update is over
        assert (
            not optimizer._cpu_updates._disk_staging._reading
        )  # what is read and not used would be old in the next step
    assert len(order) > 8
    assert_same(everything(model, optimizer), everything_of(train(0, 1, case)))


def test_a_model_without_optimizer_may_keep_its_parameters_anywhere() -> None:
    plain = make_net()
    model, _ = zeroshard.shard(copy.deepcopy(plain), stage=3, offload={"parameters": "disk", "directory": THERE})
    batch = ONE_BATCH
    with torch.no_grad():
        assert torch.equal(model(batch), plain(batch))


def test_schedulers_closures_hooks_and_late_groups_go_on_as_ever() -> None:
    def run(choice: Any) -> Any:
        model = make_net(blocks=2)
        head = list(model.head.parameters())
        late = {id(p) for p in head}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if id(p) not in late], lr=1e-2)
        model, optimizer = zeroshard.shard(model, optimizer, stage=2, offload=choice)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        calls: list[int] = []
        for number, batch in enumerate(batches(8)):

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = net_loss(model, batch)
                loss.backward()
                return loss

            if number == 4:
                optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.1})
            if number == 6:
                optimizer.inner.register_step_post_hook(lambda *_: calls.append(1))
            optimizer.step(closure)
            scheduler.step()
        return {"calls": calls, **everything(model, optimizer)}

    wanted = run(None)
    for choice in ("host", offload("disk"), offload(("host", 0.5))):
        assert_same(run(choice), wanted)


# ------------------------------------------------------------------------------------------------ checkpoints

PAIRS = [
    (None, offload("host")),
    (offload("host"), None),
    (offload("disk", parameters="host"), offload(("host", 0.4))),
    (offload(("host", 0.5)), offload({"host": 0.3, "disk": 0.7}, parameters="disk")),
]


@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop"])
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=["out", "back", "nearer", "farther"])
def test_a_checkpoint_is_saved_and_loaded_in_any_tier(before: Any, after: Any, optimizer: str, tmp_path: Path) -> None:
    case = Case(optimizer=optimizer, groups=True, steps=6, options={"stage": 3})
    wanted = train(0, 1, case)
    first = replace(case, steps=3)
    model, optimizer_ = case.make(before)
    losses = loop(model, optimizer_, first)
    zeroshard.save(tmp_path / "there", model, optimizer_)
    model, optimizer_ = case.make(after)
    loop(model, optimizer_, first)  # whatever is there is replaced
    zeroshard.load(tmp_path / "there", model, optimizer_)
    losses += loop(model, optimizer_, case, first=3)
    assert_same({"steps": losses, **everything(model, optimizer_)}, wanted)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=["out", "back", "nearer", "farther"])
def test_state_dicts_and_unwrap_carry_states_between_tiers(before: Any, after: Any) -> None:
    case = Case(optimizer="nesterov", steps=6, options={"stage": 3})
    wanted = train(0, 1, case)
    losses, model, optimizer = [], *case.make(before)
    losses += loop(model, optimizer, replace(case, steps=2))
    with zeroshard.gathered(model):
        values = copy.deepcopy(model.state_dict())
    states = copy.deepcopy(optimizer.state_dict())
    model, optimizer = case.make(after)
    with zeroshard.gathered(model, write_rank=0):
        model.load_state_dict(values)
    optimizer.load_state_dict(states)
    losses += loop(model, optimizer, replace(case, steps=4), first=2)
    plain, inner = zeroshard.unwrap(model, optimizer)
    model, optimizer = zeroshard.shard(plain, inner, stage=3, offload=before)
    losses += loop(model, optimizer, case, first=4)
    assert_same({"steps": losses, **everything(model, optimizer)}, wanted)


def test_loaded_states_go_straight_to_the_disk(tmp_path: Path) -> None:
    case = Case(steps=2, options={"stage": 3})
    model, optimizer = case.make()
    loop(model, optimizer, case)
    zeroshard.save(tmp_path / "there", model, optimizer)
    model, optimizer = case.make(offload("disk"))
    zeroshard.load(tmp_path / "there", model, optimizer)
    places = optimizer._cpu_updates._tiers.disk._mappings
    states = [value for _, _, _, value in optimizer.local_states() if value.numel()]
    assert len(states) > 10
    assert all(value.untyped_storage().data_ptr() in places for value in states)


@pytest.mark.parametrize("choice", [offload("host"), offload("disk")], ids=["host", "disk"])
def test_a_save_during_training_has_the_states_of_its_moment(choice: Any, tmp_path: Path) -> None:
    case = Case(steps=6, options={"stage": 2})
    model, optimizer = case.make(choice)
    loop(model, optimizer, replace(case, steps=3))
    pending = zeroshard.save(tmp_path / "there", model, optimizer, wait=False)
    loop(model, optimizer, case, first=3)
    pending.wait()
    assert_same(everything(model, optimizer), everything_of(train(0, 1, case)))
    model, optimizer = case.make(None)
    zeroshard.load(tmp_path / "there", model, optimizer)
    assert_same(everything(model, optimizer), everything_of(train(0, 1, replace(case, steps=3))))


def everything_of(outcome: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in outcome.items() if key != "steps"}


# ----------------------------------------------------------------------------------------------------- memory


def held(model: nn.Module, tier: str) -> dict[str, int]:
    return {kind: found.now for (kind, there), found in zeroshard.report(model).memory.items() if there == tier}


def peak(model: nn.Module, tier: str) -> int:
    """At most: each kind at its own."""
    return sum(found.peak for (_, there), found in zeroshard.report(model).memory.items() if there == tier)


@pytest.mark.parametrize(("precision", "width"), [(None, 4), ("bf16", 2)])
def test_with_the_optimizer_on_the_host_the_device_holds_parameters_alone(precision: str | None, width: int) -> None:
    case = Case(net="wide", steps=4, options={"stage": 2, "precision": precision})
    model, optimizer = case.make({"optimizer": "host", "speculate": False})
    loop(model, optimizer, case)
    zeroshard.full_parameter(model, "head.weight")  # everything has come
    psi = sum(p.numel() for p in model.parameters())
    on_device, on_host = held(model, "device"), held(model, "host")
    assert psi * width <= on_device["parameters"] < psi * width * 1.1 + 4096
    assert sum(nbytes for kind, nbytes in on_device.items() if kind != "parameters") < 64  # step counts of no element
    for kind, bytes_each in (("master weights", 4), ("optimizer states", 8), ("gradients", width)):
        assert psi * bytes_each <= on_host[kind] < psi * bytes_each * 1.1 + 8192, kind
    peaks = {kind: found.peak for (kind, tier), found in zeroshard.report(model).memory.items() if tier == "device"}
    assert not peaks.get("master weights", 0) and not peaks.get("gradients", 0)


def test_with_everything_on_the_host_the_device_holds_nothing_at_rest() -> None:
    case = Case(net="wide", steps=3, options={"stage": 3, "precision": "bf16"})
    model, optimizer = case.make({"optimizer": "host", "parameters": "host"})
    assert zeroshard.report(model).total.now == 0
    loop(model, optimizer, case)
    zeroshard.full_parameter(model, "head.weight")
    assert sum(held(model, "device").values()) < 64
    assert zeroshard.report(model).total.peak > 0


def test_the_report_shows_each_tier() -> None:
    case = Case(steps=3, options={"stage": 3})
    model, optimizer = case.make(offload({"host": 0.4, "disk": 0.4}, parameters="disk"))
    loop(model, optimizer, case)
    zeroshard.full_parameter(model, "head.weight")
    report = zeroshard.report(model)
    found = {(kind, tier): bytes_.now for (kind, tier), bytes_ in report.memory.items()}
    for tier in ("device", "host", "disk"):
        assert found["master weights", tier] > 0
        assert found["optimizer states", tier] > 0
    assert found["parameters", "disk"] > 0
    assert found["buckets", "host"] > 0  # what travels between disk and processor
    lines = str(report).splitlines()
    assert any(line.split()[:3] == ["master", "weights", "disk"] for line in lines)


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("limit", [0, 3000, 120_000, 250_000])
def test_host_bytes_bound_all_that_is_taken_there(limit: int, speculate: bool) -> None:
    case = Case(net="wide", steps=5, options={"stage": 3, "bucket_size": 1000})
    model, optimizer = case.make(
        offload({"host": 0.5, "disk": 0.5}, parameters="host", host_bytes=limit, speculate=speculate)
    )
    ours = {"steps": loop(model, optimizer, case), **everything(model, optimizer)}
    assert peak(model, "host") <= limit
    assert_same(ours, train(0, 1, case))
    if limit == 250_000:
        assert peak(model, "host") > 100_000  # as much as there is of half the states and the buffers


@pytest.mark.parametrize("limit", [0, 300_000, 500_000])
def test_disk_bytes_bound_the_file(limit: int) -> None:
    case = Case(net="wide", optimizer="Adam", steps=3, options={"stage": 3, "bucket_size": 1000})
    model, optimizer = case.make(offload("disk", gradients="disk", parameters="disk", disk_bytes=limit))
    ours = {"steps": loop(model, optimizer, case), **everything(model, optimizer)}
    assert optimizer._cpu_updates._tiers.disk.used_bytes <= limit
    assert optimizer._cpu_updates._tiers.disk.used_bytes > 0.1 * limit or not limit
    assert_same(ours, train(0, 1, case))


def test_fractions_are_those_of_the_report() -> None:
    case = Case(net="wide", steps=2, options={"stage": 3})
    model, _ = case.make(offload({"host": 0.3, "disk": 0.5}))
    device, host, disk = (held(model, tier).get("master weights", 0) for tier in ("device", "host", "disk"))
    flats = [flat for unit in model._zeroshard.engine.units for flat in unit.flats]
    total = 4 * sum(flat.layout.shard_numel for flat in flats)
    assert abs(host - 0.3 * total) <= 256
    assert abs(disk - 0.5 * total) <= 256
    assert device == 0  # fp32: what stays is the parameters themselves


def maps_of_files() -> int:
    return sum("(deleted)" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("way", ["at rest", "updating", "ahead", "failed"])
def test_nothing_is_left_when_model_and_optimizer_go(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def live() -> Any:
        model, optimizer = Case(options={"stage": 3}).make(offload({"host": 0.5, "disk": 0.5}, parameters="disk"))
        train_steps(model, optimizer, batches(4))
        if way == "at rest":
            zeroshard.full_parameter(model, "head.weight")
        elif way == "ahead":
            token_step(model, ONE_BATCH)
        elif way == "failed":
            monkeypatch.setattr(OffloadFile, "transfer", broken)
            with pytest.raises(RuntimeError):
                loop(model, optimizer, Case())
        return weakref.ref(model._zeroshard.engine), weakref.ref(optimizer._cpu_updates)

    before = live_bytes_at_start()
    threads, maps = set(threading.enumerate()), maps_of_files()
    engine, host = live()
    monkeypatch.undo()
    if way == "failed":  # errors keep their stacks, also those that come late
        assert eventually(lambda: gc.collect() >= 0 and host() is None and engine() is None)
    assert eventually(lambda: host() is None and engine() is None)
    assert eventually(lambda: not set(threading.enumerate()) - threads)
    assert eventually(lambda: maps_of_files() <= maps)
    assert live_beyond(before) == 0


def eventually(happens: Any) -> bool:
    """Whether something comes true before long: threads take a moment to end."""
    deadline = time.monotonic() + 5
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(happens())


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("gpu", "the tier of optimizer must be 'device', 'host' or 'disk', got 'gpu'"),
        ({"optimizer": ("host", 1.5)}, r"fraction of optimizer on host must be from 0 to 1, got 1\.5"),
        ({"parameters": ("host", -0.1)}, r"fraction of parameters on host must be from 0 to 1, got -0\.1"),
        ({"gradients": ("host", True)}, "fraction of gradients on host must be from 0 to 1, got True"),
        ({"optimizer": {"host": 0.7, "disk": 0.7}, "directory": "."}, r"add up to 1\.4, which is more than 1"),
        ({"optimizer": 7}, "optimizer must be a tier, a pair of a tier and a fraction, or fractions by tier"),
        ({"optimizer": "disk"}, "optimizer is placed on disk: set directory="),
        ({"optimizer": "host", "host_bytes": "much"}, "host_bytes is a number of bytes, or one with a unit"),
        ({"optimizer": "host", "disk_bytes": -1}, "disk_bytes is a number of bytes"),
        ({"optimizer": "host", "speculate": 1}, "speculate must be True or False, got 1"),
        ({"optimizer": "host", "threads": 0}, "threads must be None or an integer of at least 1, got 0"),
        ({"optimizer": "host", "directory": 3}, "directory must be a path, got 3"),
        (7, "offload must be None, 'host', a dictionary or a zeroshard.Offload, got 7"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_wanted(choice: Any, words: str) -> None:
    refused(choice, ValueError, words)


def refused(choice: Any, kind: type[Exception], words: str, stage: int = 3) -> None:
    model = make_net()
    before = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(kind, match=words):
        zeroshard.shard(model, optimizer, stage=stage, offload=choice)
    batch = ONE_BATCH
    assert torch.equal(model(batch), before(batch)), "the model was harmed"
    assert all(type(p) is nn.Parameter and not hasattr(p, "_zeroshard") for p in model.parameters())
    token_step(model, batch)
    optimizer.step()  # and trains


def test_unknown_options_are_refused_by_name() -> None:
    refused({"optimiser": "host"}, TypeError, "unknown offload option 'optimiser': did you mean 'optimizer'?")


def test_a_missing_directory_is_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    refused({"optimizer": "disk", "directory": tmp_path / "gone"}, DiskError, "gone is not a directory: create it")


@at_stages(0, 1, 2)
def test_parameters_go_in_stage_three_alone(stage: int) -> None:
    refused({"parameters": "host"}, ValueError, f"stage {stage} keeps full parameters.*: use stage=3", stage)


def test_options_are_brought_into_one_form() -> None:
    assert Offload.from_option(None) is None and Offload.from_option("device") is None
    assert Offload.from_option({"optimizer": {"host": 0.5, "device": 0.5}}) == Offload(optimizer=("host", 0.5))
    assert Offload(optimizer="host", host_bytes="1.5GiB").host_bytes == 3 * 2**29
    assert list(Offload(optimizer={"host": 0.1, "disk": 0.2}, directory=".").optimizer) == ["disk", "host"]


# --------------------------------------------------------------------------------------------- a failing disk


def broken(self: OffloadFile, way: str, memory: memoryview, offset: int) -> None:
    error = OSError(errno.EIO, "Input/output error")
    raise DiskError.from_os_error(f"the {way} of {len(memory)} bytes failed", error) from error


@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop"])
def test_a_disk_that_fails_ends_training_with_its_reason_until_a_load(
    way: str, optimizer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = Case(net="wide", optimizer=optimizer, steps=6, options={"stage": 3, "bucket_size": 600})
    model, sharded = case.make(offload("disk"))
    loop(model, sharded, replace(case, steps=3))
    zeroshard.save(tmp_path / "there", model, sharded)
    whole, moves = OffloadFile.transfer, itertools.count()

    def sometimes(self: OffloadFile, which: Any, memory: memoryview, offset: int) -> None:
        if which == way and next(moves) > 4:
            broken(self, which, memory, offset)
        whole(self, which, memory, offset)

    monkeypatch.setattr(OffloadFile, "transfer", sometimes)
    with pytest.raises(RuntimeError, match=rf"the update of offloaded states failed: DiskError: the {way} of .*failed"):
        loop(model, sharded, case, first=3)
    monkeypatch.setattr(OffloadFile, "transfer", whole)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Input/output error.*invalid now: load a checkpoint"):
            model(ONE_BATCH)
    for use in (
        lambda: zeroshard.save(tmp_path / "spoilt", model, sharded),
        lambda: zeroshard.full_parameter(model, "head.weight"),
        lambda: sharded.state_dict(),
    ):
        with pytest.raises(RuntimeError, match="invalid now: load a checkpoint"):
            use()
    zeroshard.load(tmp_path / "there", model, sharded)
    loop(model, sharded, case, first=3)
    assert_same(everything(model, sharded), everything_of(train(0, 1, case)))


def test_a_failure_on_the_thread_of_updates_is_raised_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = Case(options={"stage": 2}).make({"optimizer": "host", "speculate": False})
    token_step(model, ONE_BATCH)

    def raising(self: ChunkUpdater, *arguments: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(ChunkUpdater, "_apply_native", raising)
    optimizer.step()
    with pytest.raises(RuntimeError, match="MemoryError: no room"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="MemoryError: no room"):
        model(ONE_BATCH)


def test_buffers_for_states_and_for_parameters_on_disk_are_both_counted() -> None:
    case = Case(net="wide", steps=2, options={"stage": 3})
    model, optimizer = case.make(offload("disk", parameters="disk"))
    loop(model, optimizer, case)
    zeroshard.full_parameter(model, "head.weight")  # no update is under way any more
    staged = sum(line.nbytes for one in optimizer._cpu_updates._disk_staging._buffer_sets for line in one.values())
    (reader,) = model._zeroshard.engine.executor._prefetchers
    read = sum(one.memory.nbytes for one in (*reader._free_buffers, *reader._buffer_by_shard.values()))
    assert staged and read
    assert held(model, "host")["buckets"] == staged + read


@pytest.fixture
def slow_rmsprop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's own update wait on the host's thread."""
    module = sys.modules["torch.optim.rmsprop"]  # torch.optim.rmsprop is its function
    update = module.rmsprop

    def slow(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
        update(*args, **kwargs)

    monkeypatch.setattr(module, "rmsprop", slow)


def assert_step_is_finished(then: Callable[[Any, Any], object], holds: bool = False) -> None:
    """Assert that a step has a plain run's numbers, whatever follows it while its update runs."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    make = of(torch.optim.RMSprop, lr=0.1, eps=1.0)  # the update depends on the size of the gradients
    model, stepper = sharded(plain, make, stage=1, offload="host")
    for net, optimizer in ((plain, make(plain)), (model, stepper)):
        net(torch.ones(2, 8)).sum().backward()
        if holds:
            held = net[0].weight.grad
        optimizer.step()
        then(held if holds else net, optimizer)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(zeroshard.full_parameter(model, name), parameter.detach())


@pytest.mark.guarantee("Edits during an update")
@pytest.mark.usefixtures("slow_rmsprop")
def test_a_step_without_gradients_waits_for_the_one_before() -> None:
    """The update runs on the host's thread, of the very optimizer that such a step calls."""

    def step_again(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        optimizer.step()

    assert_step_is_finished(step_again)


@pytest.mark.guarantee("Edits during an update")
@pytest.mark.usefixtures("slow_rmsprop")
def test_a_write_into_a_gradient_that_was_read_before_the_step_comes_after_its_update() -> None:
    assert_step_is_finished(lambda gradient, _: gradient.zero_(), holds=True)


@pytest.mark.guarantee("Edits during an update")
@pytest.mark.usefixtures("slow_rmsprop")
def test_a_clip_after_a_step_waits_for_its_update() -> None:
    """The clip changes gradients when they are read next, and the update reads them as they were."""

    def clip_and_read(model: Any, optimizer: Any) -> None:
        if isinstance(optimizer, zeroshard.ShardedOptimizer):
            optimizer.clip_grad_norm_(0.01)
        assert model[0].weight.grad is not None

    assert_step_is_finished(clip_and_read)


@pytest.mark.guarantee("Edits during an update")
def test_an_edit_right_after_a_step_is_not_written_over_by_its_update(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The update still goes to disk when the new values are there to be edited."""
    move = OffloadFile.transfer

    def slow(self: OffloadFile, way: Any, *args: Any) -> None:
        if way == "write" and threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
        move(self, way, *args)

    monkeypatch.setattr(OffloadFile, "transfer", slow)
    model, stepper = sharded(
        nn.Linear(4, 4, bias=False), momentum, stage=1, offload=Offload(optimizer="disk", directory=tmp_path)
    )
    take_step(stepper, model(torch.ones(2, 4)).sum())
    expected = 0.5 * model.weight.detach().clone()
    model.weight.data.mul_(0.5)
    stepper.step()
    torch.testing.assert_close(zeroshard.full_parameter(model, "weight"), expected)

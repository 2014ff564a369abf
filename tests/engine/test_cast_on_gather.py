"""cast_on_gather: no 16-bit copy of this rank's part is kept, and no number changes."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from live import live_bytes, live_bytes_at_start
from offloaded import Case, assert_same, everything, loop
from one_pass import in_one_pass
from plain import (
    ONE_BATCH,
    adamw,
    batches,
    copied,
    full_parameters,
    masters,
    mesh_of,
    net_loss,
    sharded,
    split,
    take_step,
    token_step,
    train_step,
)
from ranks import run_processes, run_threads
from torch import nn
from zoo import make_net

import zeroshard
from zeroshard.config.config import Config
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner.auto import AUTO, JobTopology, NothingFitsError, choose_plan_for_machine
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.state_sizes import predict_memory, state_sizes
from zeroshard.train.commands.train import read_options
from zeroshard.train.summary import dry_run

pytestmark = pytest.mark.usefixtures("traced_once")

COUNTERS = 512  # bytes of step counts, one for each stretch of shards
GPT_CONFIG = GPTConfig(vocab_size=1024, context=16, layers=3, heads=4, width=128)
PSI = GPT_CONFIG.parameters
ALIGNMENT = 0.005
BF16 = {"stage": 3, "precision": "bf16", "bucket_size": 200}
FP16 = {"stage": 3, "precision": "fp16", "bucket_size": 200, "loss_scale": 1024.0}


def with_it(case: Case) -> Case:
    return dataclasses.replace(case, options={**case.options, "cast_on_gather": True})


def flats_of(model: Any) -> list[Any]:
    return [flat for unit in model._zeroshard.engine.units for flat in unit.flats]


def assert_no_copy_of(model: Any) -> None:
    """Flats with an fp32 master have no other shard, and nobody's full parameters are there."""
    for flat in flats_of(model):
        casts = flat.master is not None and flat.dtype != torch.float32
        assert (flat.shard is None) == casts, flat.names
        assert not flat.full.untyped_storage().nbytes(), flat.names


def numbers(rank: int, world: int, case: Case) -> Any:
    """All that a case comes to, and what computation sees at its end."""
    model, optimizer = case.make()
    told = loop(model, optimizer, case, rank, world)
    if case.options.get("cast_on_gather"):
        assert_no_copy_of(model)
    return {"steps": told, "computed": full_parameters(model), **everything(model, optimizer)}


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "case",
    [
        Case(options=BF16),
        Case(optimizer="fused AdamW", groups=True, clip=(0.1, None), options=BF16),
        Case(optimizer="momentum", net="tied", options=BF16),
        Case(optimizer="Lion", accumulate=(2, 1), options={**BF16, "prefetch": False}),
        Case(optimizer="fused AdamW", accumulate=(1, 3), unsynchronised=True, clip=(0.1,), options=BF16),
        Case(net="frozen", options=BF16),
        Case(net="fickle", steps=4, options=BF16),
        Case(options={**BF16, "keep_fp32": ("blocks.1",), "reduce_dtype": "fp32"}),
        Case(overflow=2, clip=(0.1,), options=FP16),
        Case(optimizer="fused AdamW", overflow=1, options={**FP16, "bucket_size": 2**20}),
    ],
    ids=lambda case: f"{case.net}, {case.optimizer}, {case.options['precision']}",
)
def test_every_number_is_the_same(case: Case) -> None:
    wanted, found = (run_threads(3, numbers, 3, one) for one in (case, with_it(case)))
    assert_same(found, wanted)
    if case.overflow is not None:
        assert found[0]["scale"][0] < case.options["loss_scale"]


@pytest.mark.parametrize(
    "case",
    [
        Case(optimizer="fused AdamW", accumulate=(1, 3), unsynchronised=True, clip=(0.1,), options=BF16),
        Case(net="fickle", steps=4, options=BF16),
        Case(overflow=2, clip=(0.1,), options=FP16),
    ],
    ids=lambda case: f"{case.net}, {case.optimizer}, {case.options['precision']}",
)
def test_every_number_is_the_same_on_one_rank(case: Case) -> None:
    assert_same(run_threads(1, numbers, 1, with_it(case)), run_threads(1, numbers, 1, case))


def test_every_number_is_the_same_over_gloo_processes() -> None:
    case = Case(optimizer="fused AdamW", clip=(0.1,), options=BF16)
    assert_same(run_processes(2, numbers, 2, with_it(case)), run_processes(2, numbers, 2, case))


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)])
def test_every_number_is_the_same_on_a_mesh_of_replicas(mesh: tuple[int, int]) -> None:
    case = Case(mesh=mesh, clip=(0.1,), options=BF16)
    assert_same(run_threads(4, numbers, 4, with_it(case)), run_threads(4, numbers, 4, case))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("options", [BF16, FP16], ids=["bf16", "fp16"])
def test_one_pass_writes_no_copy_and_the_same_numbers(options: dict[str, Any], world: int) -> None:
    case = Case(optimizer="fused AdamW", clip=(0.1,), overflow=2 if options is FP16 else None, options=options)
    with in_one_pass():
        wanted = run_threads(world, numbers, world, case)
    with in_one_pass() as kernels:
        found = run_threads(world, numbers, world, with_it(case))
    assert_same(found, wanted)
    assert all(strip.compute_param is None for kernel in kernels for strips in kernel.laid for strip in strips)
    assert any(kernel.runs for kernel in kernels)


def test_a_divided_model_has_the_same_numbers() -> None:
    small = GPT(GPTConfig(vocab_size=13, context=8, layers=2, heads=4, width=16))

    def body(rank: int, shape: tuple[int, ...], cast: bool) -> Any:
        mesh = mesh_of(shape, "shard tensor")
        options = {"mesh": mesh, "precision": "bf16", "cast_on_gather": cast}
        model, optimizer = sharded(small, adamw, **options)
        losses = []
        for step in range(3):
            ids = (torch.arange(16).view(2, 8) + step + rank // shape[-1]) % 13
            loss = model(ids, ids)
            take_step(optimizer, loss, 0.5)
            losses.append(loss.item())
        if cast:
            assert_no_copy_of(model)
        return {"losses": losses, **everything(model, optimizer)}

    for shape in ((1, 2), (2, 2)):
        world = shape[0] * shape[1]
        assert_same(run_threads(world, body, shape, True), run_threads(world, body, shape, False))


def test_forwards_without_gradients_see_the_new_values() -> None:
    def body(rank: int, cast: bool) -> list[float]:
        model, optimizer = Case(options={**BF16, "cast_on_gather": cast}).make()
        seen = []
        for batch in batches(3):
            for mode in (torch.no_grad, torch.inference_mode):
                model.eval()
                with mode():
                    seen.append(net_loss(model, batch).item())
            model.train()
            train_step(model, optimizer, split(batch, rank, 2))
        assert len(set(seen)) > 2
        return seen

    assert run_threads(2, body, True) == run_threads(2, body, False)


# -------------------------------------------------------------------------------------------------------- memory


def measured(rank: int, options: dict[str, Any]) -> Any:
    """What a rank holds with gradients and without, and really, then."""
    before = live_bytes_at_start()
    model, optimizer = sharded(GPT(GPT_CONFIG), partial(adamw, fused=True), **options)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    for _ in range(2):
        model(tokens, tokens).backward()
        optimizer.step()
        held = copy.deepcopy(zeroshard.report(model))
        live = live_bytes() - before
        optimizer.zero_grad()
    return held, live


@pytest.mark.parametrize("world", [1, 3])
def test_a_rank_holds_fourteen_bytes_a_parameter_as_predicted(world: int) -> None:
    options = {"stage": 3, "precision": "bf16", "bucket_size": 2**14, "cast_on_gather": True}
    with torch.device("meta"):
        predicted = predict_memory(GPT(GPT_CONFIG), ranks=world, on_gpu=False, **options)
    wanted = 14 * PSI / world
    assert wanted <= predicted.state_bytes < wanted * (1 + ALIGNMENT)
    assert predicted.states["parameters"] == 0
    for report, live in run_processes(world, measured, options, fresh=True):
        assert wanted <= report.states < wanted * (1 + ALIGNMENT)
        for kind, nbytes in predicted.states.items():
            held = report.memory[kind, "device"].now if (kind, "device") in report.memory else 0
            assert nbytes <= held <= nbytes + (COUNTERS if kind == "optimizer states" else 0), kind
        peak = {kind: nbytes.peak for (kind, _), nbytes in report.memory.items()}
        for kind, nbytes in predicted.transient.items():
            assert peak.get(kind, 0) <= nbytes, kind
        buckets = report.memory["buckets", "device"].now if ("buckets", "device") in report.memory else 0
        assert wanted <= live - buckets < wanted * (1 + 2 * ALIGNMENT)


def test_only_what_is_trained_in_sixteen_bits_has_no_copy() -> None:
    def body(rank: int) -> None:
        case = Case(net="frozen", options={**BF16, "keep_fp32": ("head",), "cast_on_gather": True})
        model, optimizer = case.make()
        loop(model, optimizer, case, rank, 2)
        assert_no_copy_of(model)
        kinds = {(flat.spec.is_trainable, flat.dtype, flat.shard is None) for flat in flats_of(model)}
        assert kinds == {
            (True, torch.bfloat16, True),
            (False, torch.bfloat16, False),
            (True, torch.float32, False),
        }
        kept = sum(flat.shard.nbytes for flat in flats_of(model) if flat.shard is not None)
        assert zeroshard.report(model).memory["parameters", "device"].now == kept

    run_threads(2, body)


UNCHANGED: dict[str, tuple[dict[str, Any], Any]] = {
    "optimizer on the host": ({}, "host"),
    "parameters on the host": ({}, {"optimizer": "device", "parameters": "host"}),
    "stage 2": ({"stage": 2}, None),
    "stage 0": ({"stage": 0}, None),
    "fp32": ({"precision": "fp32"}, None),
    "no precision": ({"precision": None}, None),
}


@pytest.mark.parametrize(
    ("what", "world"), [*((what, 2) for what in UNCHANGED), ("optimizer on the host", 1), ("stage 2", 1)]
)
def test_elsewhere_nothing_changes(what: str, world: int) -> None:
    changes, offload = UNCHANGED[what]

    def body(rank: int, cast: bool) -> Any:
        case = Case(options={**BF16, **changes, "cast_on_gather": cast})
        model, optimizer = case.make(offload)
        told = loop(model, optimizer, case, rank, world)
        bytes_of = {kind: held.now for kind, held in zeroshard.report(model).memory.items()}
        return {"steps": told, "memory": {str(kind): n for kind, n in bytes_of.items()}, **everything(model, optimizer)}

    assert_same(run_threads(world, body, True), run_threads(world, body, False))
    config = {**BF16, **changes, "offload": offload}
    plain, cast = (predict_memory(make_net(), ranks=world, cast_on_gather=on, **config) for on in (False, True))
    assert plain == cast


def resident(rank: int, trained: bool, mesh: tuple[int, int] | None) -> bool:
    """Whether parameters can be read outside forward."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters()) if trained else None
    where = None if mesh is None else mesh_of(mesh)
    model, _ = zeroshard.shard(model, optimizer, mesh=where, stage=3, precision="bf16", cast_on_gather=True)
    try:
        model.state_dict()
    except RuntimeError as error:
        assert "there in forward and backward alone" in str(error)
        return False
    return True


@pytest.mark.parametrize(
    ("world", "trained", "mesh", "expected"), [(1, True, None, False), (1, False, None, True), (2, True, (2, 1), True)]
)
def test_units_come_and_go_only_where_that_saves_memory(
    world: int, trained: bool, mesh: tuple[int, int] | None, expected: bool
) -> None:
    """On one rank there must be masters; of replicas each holds everything, and need not use the same units."""
    assert run_threads(world, resident, trained, mesh) == [expected] * world


def test_of_states_that_rest_partly_outside_the_device_the_rest_has_no_copy() -> None:
    offload = {"optimizer": ("host", 0.5)}

    def body(rank: int, cast: bool) -> Any:
        case = Case(net="wide", options={**BF16, "cast_on_gather": cast})
        model, optimizer = case.make(offload)
        told = loop(model, optimizer, case, rank, 2)
        assert {flat.shard is None for flat in flats_of(model)} == ({True, False} if cast else {False})
        parameters = zeroshard.report(model).memory["parameters", "device"].now
        predicted = predict_memory(
            make_net(width=16, blocks=3), ranks=2, offload=offload, cast_on_gather=cast, **BF16
        ).states
        assert parameters == predicted["parameters"]
        return {"steps": told, **everything(model, optimizer)}

    assert_same(run_threads(2, body, True), run_threads(2, body, False))


# ------------------------------------------------------------------------------------ values, read and written


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_written_is_read_again_and_the_rest_stays_exact(world: int) -> None:
    def body(rank: int) -> None:
        case = Case(steps=2, options={**BF16, "cast_on_gather": True})
        model, optimizer = case.make()
        loop(model, optimizer, case, rank, world)
        exact = masters(model)
        for name, values in full_parameters(model).items():
            assert torch.equal(values, exact[name].bfloat16()), name
        with zeroshard.gathered(model, write_rank=0), torch.no_grad():
            model.head.bias.fill_(0.3)
        assert_no_copy_of(model)
        for name, values in exact.items():
            wanted = values if name != "head.bias" else torch.full_like(values, 0.3).bfloat16().float()
            assert torch.equal(zeroshard.full_parameter(model, name), wanted), name
        assert torch.equal(full_parameters(model)["head.bias"], torch.full((11,), 0.3).bfloat16())
        loop(model, optimizer, case, rank, world)
        assert not torch.equal(zeroshard.full_parameter(model, "head.bias"), torch.full((11,), 0.3).bfloat16().float())

    run_threads(world, body)


@pytest.mark.parametrize("world", [1, 2])
def test_unwrap_gives_the_master(world: int) -> None:
    def body(rank: int, cast: bool) -> Any:
        case = Case(steps=2, options={**BF16, "cast_on_gather": cast})
        model, optimizer = case.make()
        loop(model, optimizer, case, rank, world)
        plain, inner = zeroshard.unwrap(model, optimizer)
        assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in plain.parameters())
        inner.zero_grad()
        token_step(plain, ONE_BATCH)
        inner.step()
        return copied(plain)

    assert_same(run_threads(world, body, True), run_threads(world, body, False))


@pytest.mark.parametrize("world", [1, 2])
def test_states_go_and_come_back(world: int) -> None:
    def body(rank: int, away: bool) -> Any:
        case = Case(steps=2, options={**FP16, "cast_on_gather": True})
        model, optimizer = case.make()
        told = loop(model, optimizer, case, rank, world)
        for _ in range(2):
            optimizer.scale(net_loss(model, split(ONE_BATCH, rank, world))).backward()
            if away:
                held = zeroshard.report(model).states
                zeroshard.offload_states(model)
                assert zeroshard.report(model).states == 0
                with pytest.raises(RuntimeError, match=r"reload_states\(model\)"):
                    model(ONE_BATCH)
                zeroshard.reload_states(model)
                assert zeroshard.report(model).states == held
            optimizer.step()
            optimizer.zero_grad()
        return {"steps": told, **everything(model, optimizer)}

    assert_same(run_threads(world, body, True), run_threads(world, body, False))


@pytest.mark.parametrize(("saving", "loading"), [(True, False), (False, True), (True, True)])
def test_checkpoints_pass_between_with_and_without(saving: bool, loading: bool, tmp_path: Path) -> None:
    case = Case(steps=4, optimizer="fused AdamW", options=BF16)

    def whole(rank: int) -> Any:
        model, optimizer = case.make()
        loop(model, optimizer, case, rank, 2)
        return everything(model, optimizer)

    def body(rank: int) -> Any:
        model, optimizer = (with_it(case) if saving else case).make()
        loop(model, optimizer, dataclasses.replace(case, steps=2), rank, 2)
        zeroshard.save(tmp_path / "saved", model, optimizer)
        model, optimizer = (with_it(case) if loading else case).make()
        zeroshard.load(tmp_path / "saved", model, optimizer)
        loop(model, optimizer, case, rank, 2, first=2)
        return everything(model, optimizer)

    assert_same(run_threads(2, body), run_threads(2, whole))


def test_a_group_that_is_added_later_keeps_its_copy_and_learns() -> None:
    net = make_net(blocks=2)  # not in a rank: threads draw from one generator

    def body(rank: int, cast: bool) -> Any:
        model = copy.deepcopy(net)
        later = list(model.head.parameters())
        first = [p for p in model.parameters() if all(p is not other for other in later)]
        options = {**BF16, "units": ("blocks.*", "head"), "cast_on_gather": cast}
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(first, lr=1e-2), **options)
        told = []
        for number, batch in enumerate(batches(4)):
            if number == 2:
                optimizer.add_param_group({"params": list(model.head.parameters())})
            told.append(train_step(model, optimizer, split(batch, rank, 2)))
        return {"steps": told, **everything(model, optimizer)}

    assert_same(run_threads(2, body, True), run_threads(2, body, False))


# ----------------------------------------------------------------------------------------- refused, planned, told


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_bad_value_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"cast_on_gather must be True or False, got {value!r}"):
        Config(cast_on_gather=value)


def test_ranks_that_do_not_agree_on_it_raise() -> None:
    def body(rank: int) -> None:
        with pytest.raises(zeroshard.RanksDisagreeError, match="cast_on_gather is True here and False on rank 0"):
            zeroshard.shard(make_net(), stage=3, precision="bf16", cast_on_gather=rank == 1, timeout=10)

    run_threads(2, body)


@pytest.mark.parametrize(("one_pass", "updated"), [(True, 26), (False, 34)])
def test_an_update_moves_less(one_pass: bool, updated: int) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    found = partial(state_sizes, model, ranks=2, has_fused_adam=one_pass)
    assert found(Config(precision="bf16", cast_on_gather=True)).update_bytes_per_element == updated
    assert found(Config(precision="bf16", cast_on_gather=True, stage=2)).update_bytes_per_element > updated
    assert found(Config(precision="bf16", cast_on_gather=False)).update_bytes_per_element > updated


def test_a_plan_counts_with_it() -> None:
    with torch.device("meta"):
        model = GPT(GPT_CONFIG)
    for devices in (1, 8):
        asked = {"devices": devices, "machine": "h100", "batch": 8, "stage": 3, "offload": None, "sequence": 16}
        asked |= {"tensor": 1, "checkpoint": "none"}
        plain, cast = (
            zeroshard.plan(model, **asked, precision="bf16", cast_on_gather=on).best.footprint for on in (False, True)
        )
        states = predict_memory(model, ranks=devices, precision="bf16", cast_on_gather=True).states
        assert cast.states == states and not cast.states["parameters"]
        assert plain.states["parameters"] == pytest.approx(2 * PSI / devices, rel=ALIGNMENT)


def test_a_stage_left_to_a_plan_fits_where_only_it_does() -> None:
    ranks = 8
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, context=16, layers=4, heads=8, width=512))
    asked = {"batch": ranks, "sequence": 16, "precision": "bf16", "micro_batch": 1}
    told = {"devices": ranks, "offload": None, "tensor": 1, "checkpoint": "none"}
    plain, cast = (
        min(plan.memory for plan in zeroshard.plan(model, **told, cast_on_gather=on, **asked).candidates)
        for on in (False, True)
    )
    assert cast < plain
    machine = Machine.resolve("h100", memory=int(plain + cast) // 2)
    asked |= {"stage": AUTO, "offload": None, "checkpoint": None}
    site = JobTopology(torch.device("cuda"), ranks)
    assert choose_plan_for_machine(model, None, site, machine, **asked).strategy.stage == 3
    with pytest.raises(NothingFitsError):
        choose_plan_for_machine(model, None, site, machine, cast_on_gather=False, **asked)


def test_a_stage_is_left_to_a_plan_with_it() -> None:
    def body(rank: int) -> Any:
        planning = {"loss": lambda output: output.float().sum()}
        options = {"inputs": ONE_BATCH, "planning": planning, "precision": "bf16", "cast_on_gather": True}
        model, optimizer = sharded(make_net(), adamw, stage="auto", **options)
        token_step(model, ONE_BATCH)
        optimizer.step()
        return zeroshard.report(model).chosen

    assert all("stage" in why for why in run_threads(2, body))


def test_the_command_takes_it_and_a_dry_run_counts_with_it() -> None:
    flags = ["--ranks", "4", "--precision", "bf16", "--device", "cpu"]
    without = [*flags, "--no-cast-on-gather"]
    assert read_options(flags).sharding.cast_on_gather and not read_options(without).sharding.cast_on_gather
    plain, cast = (dry_run(read_options(given), ranks=4).splitlines() for given in (without, flags))
    assert any("kept" in line for line in plain[:8]) and not any("kept" in line for line in cast[:8])
    rows = [next(line.split() for line in told if line.startswith("parameters")) for told in (plain, cast)]
    assert rows[0][:-2] == rows[1][:-2] and rows[1][-2:] == ["0", "B"]

"""The update in one pass: which runs it takes, what it gets of them, and that nothing else changes.

The kernel itself needs a GPU (test_fused_adam_gpu.py). In its place stands one of torch's own operations (one_pass.py),
so that a run in one pass equals torch's way to the bit here, too.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from one_pass import TorchKernel, in_one_pass
from pairs import at_stages, every_stage
from plain import (
    ONE_BATCH,
    Tensors,
    assert_equal,
    batches,
    full_gradients,
    net_loss,
    sharded,
    shares,
    split,
    take_step,
    token_step,
    train_steps,
    whole_states,
)
from ranks import run_threads
from torch import nn
from zoo import Block, Skips, make_net

import zeroshard
from zeroshard.optim.fused_adam import fused_adam, triton_kernel
from zeroshard.optim.fused_adam.launch_table import ROW_FIELDS, LaunchTable, SliceTensors, make_tables
from zeroshard.optim.hyperparams import fused_hyperparams_from_group

NET = make_net(blocks=2)  # not in a rank: threads draw from one generator
Make = Callable[[nn.Module], torch.optim.Optimizer]


def fused(model: nn.Module, **chosen: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, "fused": True, **chosen})


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, the rest does not; and betas differ."""
    flat = [p for p in model.parameters() if p.dim() < 2]
    rest = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": rest}, {"params": flat, "weight_decay": 0.0, "betas": (0.8, 0.95), "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True)


def held(model: nn.Module, optimizer: Any) -> Tensors:
    """Parameters as they compute and as they are updated, states, and gradients."""
    gradients = {f"{name} gradient": value for name, value in full_gradients(model).items() if value is not None}
    return whole_states(model, optimizer) | gradients


def train(
    rank: int,
    world: int,
    make: Make = fused,
    *,
    steps: int = 3,
    clip: float | None = None,
    accumulate: int = 1,
    clear: bool = True,
    **options: Any,
) -> Tensors:
    options = {"precision": "bf16", "bucket_size": 200, "loss_scale": 64.0, **options}
    model, optimizer = sharded(NET, make, **options)
    for batch in batches(steps):
        for part in split(batch, rank, world).chunk(accumulate):
            optimizer.scale(net_loss(model, part)).backward()
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        if clear:
            optimizer.zero_grad()
    return held(model, optimizer)


def assert_same_in_one_pass(world: int, body: Callable[..., Any] = train, **options: Any) -> list[TorchKernel]:
    """Both ways end with the same bits; the kernels of the ranks are returned."""
    run = functools.partial(body, world=world, **options)
    wanted = run_threads(world, run)
    with in_one_pass() as kernels:
        ours = run_threads(world, run)
    for mine, its in zip(ours, wanted, strict=True):
        assert_equal(mine, its)
    assert len(kernels) == world and all(one.runs for one in kernels)
    return kernels


# ------------------------------------------------------------------------------------------------ the same numbers

CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"precision": "fp16"},
    "fp32": {"precision": None, "clip": 0.1},
    "clipped": {"clip": 0.1},
    "fp16 clipped": {"precision": "fp16", "clip": 0.1},
    "summed": {"accumulate": 2},
    "clipped, and no zero_grad": {"clip": 0.1, "clear": False},
    "reduced in fp32": {"reduce_dtype": "fp32", "clip": 0.1},
    "reduced in fp64": {"reduce_dtype": torch.float64},
    "norms in fp32": {"keep_fp32": (nn.LayerNorm,), "clip": 0.1},
    "two groups": {"make": two_groups},
    "maximised": {"make": functools.partial(fused, maximize=True)},
    "lr in a tensor": {"make": functools.partial(fused, lr=torch.tensor(0.01))},
    "one bucket": {"bucket_size": 2**20},
    "no decay": {"make": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True)},
}


@pytest.mark.parametrize(("stage", "case"), [(n % 4, case) for n, case in enumerate(CASES)])
def test_two_ranks_update_as_torch_does(stage: int, case: str) -> None:
    if case == "reduced in fp64":
        with pytest.raises(AssertionError, match="all\\(<generator"):  # not one run is taken
            assert_same_in_one_pass(2, stage=stage, **CASES[case])
        return
    assert_same_in_one_pass(2, stage=stage, **CASES[case])


@pytest.mark.parametrize("world", [1, 3])
@every_stage
def test_one_and_three_ranks_update_as_torch_does(stage: int, world: int) -> None:
    assert_same_in_one_pass(world, stage=stage, clip=0.1, precision="bf16" if world == 3 else "fp16")


@every_stage
def test_every_element_is_updated_once_and_written_where_it_computes(stage: int) -> None:
    def body(rank: int) -> tuple[int, float]:
        options = {"stage": stage, "precision": "bf16", "bucket_size": 200, "cast_on_gather": False}
        model, optimizer = sharded(NET, fused, **options)
        token_step(model, split(ONE_BATCH, rank, 2))
        copied: list[int] = []
        optimizer._engine.state_guard.copy_masters = lambda flats, device_only: copied.extend(flats)
        optimizer.step()
        masters = zeroshard.report(model).memory["master weights", "device"].now // 4
        assert not copied and zeroshard.report(model).memory["step", "device"].peak == 0
        runs = optimizer._groups.all_slices
        owned = sum(
            piece.elements.numel for flat in optimizer._engine.gradients.flat_grads for piece in flat.owned_ranges
        )
        assert owned == sum(within.numel for run in runs for _, _, within, _ in run.param_ranges())
        return masters, sum(run.parameter.numel() for run in runs)

    with in_one_pass() as kernels:
        found = run_threads(2, body)
    assert all(0 <= masters - runs < 4 * 64 for masters, runs in found)  # no run has alignment alone
    assert sorted(sum(s.master.numel() for s in one.laid[0]) for one in kernels) == sorted(n for _, n in found)
    assert all(
        strip.compute_param is not None and strip.compute_param.dtype == torch.bfloat16
        for one in kernels
        for strip in one.laid[0]
    )


SKIPS = Skips()


@every_stage
def test_unused_parameters_are_left_alone(stage: int) -> None:
    def body(rank: int, world: int) -> Tensors:
        model, optimizer = sharded(SKIPS, fused, stage=stage, precision="bf16", bucket_size=200)
        for number in range(6):
            data = torch.full((2, 16), 0.1 * number + rank)
            take_step(optimizer, model(data, number in (1, 4)).float().square().mean())
        return held(model, optimizer)

    assert_same_in_one_pass(2, body)
    wanted = run_threads(2, functools.partial(body, world=2))[0]
    assert wanted["layers.1.weight step"].item() == 2 and wanted["layers.0.weight step"].item() == 6


def overflows(rank: int, world: int, stage: int, make: Make = fused) -> Tensors:
    """Five steps; the second and the fourth overflow on one rank."""
    options = {"stage": stage, "precision": "fp16", "bucket_size": 200, "loss_scale": 64.0}
    model, optimizer = sharded(NET, make, **options)
    for number, batch in enumerate(batches(5)):
        loss = optimizer.scale(net_loss(model, split(batch, rank, world)))
        take_step(optimizer, loss * (1e30 if number % 2 and rank == 1 else 1))
    assert optimizer.loss_scale.item() == 16.0
    return held(model, optimizer)


@every_stage
def test_after_an_overflow_nothing_changes_and_no_step_is_counted(stage: int) -> None:
    assert_same_in_one_pass(2, overflows, stage=stage)
    with in_one_pass():
        assert run_threads(2, overflows, 2, stage)[0]["head.weight step"].item() == 3


# ---------------------------------------------------------------------------------------- compared with torch's way


def half_fused(model: nn.Module) -> torch.optim.Optimizer:
    """Some groups in one pass, and some not: by their options alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[0::3]},
        {"params": parameters[1::3], "amsgrad": True},
        {"params": parameters[2::3], "fused": False},
    ]
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@every_stage
def test_groups_that_torch_has_to_update_are_left_to_it(stage: int, precision: str) -> None:
    assert_same_in_one_pass(2, stage=stage, make=half_fused, precision=precision, clip=0.1, clear=False)


def one_not_fused(model: Any) -> torch.optim.Optimizer:
    """Fused but for one parameter of one element, which one rank has: it alone reads the overflow."""
    rest = [p for p in model.parameters() if p is not model.temperature]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": [model.temperature]}], lr=0.01)
    optimizer.param_groups[0]["fused"] = True
    return optimizer


def test_ranks_agree_on_an_overflow_that_not_all_read() -> None:
    assert_same_in_one_pass(2, overflows, stage=2, make=one_not_fused)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("tiers", [{"optimizer": ("host", 0.5)}, {"optimizer": ("host", 0.5), "parameters": "host"}])
def test_what_rests_on_the_device_next_to_other_tiers(tiers: Any, clip: float | None) -> None:
    def body(rank: int, world: int, clear: bool) -> Tensors:
        found = train(rank, world, offload=tiers, bucket_size=2048, clip=clip, clear=clear)
        return {name: value.clone() for name, value in found.items()}

    run = functools.partial(body, world=2, clear=clip is None)
    wanted = run_threads(2, run)
    with in_one_pass() as kernels:
        for mine, its in zip(run_threads(2, run), wanted, strict=True):
            assert_equal(mine, its)
    assert any(one.runs for one in kernels) == ("parameters" not in tiers)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1, fused=True),
        functools.partial(fused, amsgrad=True),
        functools.partial(fused, fused=False),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, fused=True),
        functools.partial(fused, betas=(torch.tensor(0.9), torch.tensor(0.99)), fused=True),
    ],
)
def test_what_is_not_known_to_the_bit_goes_torchs_way(make: Make) -> None:
    model = nn.Linear(3, 3)
    inner = make(model)
    assert fused_hyperparams_from_group(type(inner), inner.param_groups[0], torch.device("cpu")) is None


def test_a_learning_rate_on_a_device_stays_there_and_one_on_the_host_is_read() -> None:
    group = torch.optim.AdamW([torch.zeros(1)], lr=torch.tensor(0.5), fused=True).param_groups[0]
    found = fused_hyperparams_from_group(torch.optim.AdamW, group, torch.device("cpu"))
    assert found is not None and found.lr == 0.5
    elsewhere = torch.zeros((), device="meta")
    for value, kept in ((elsewhere, True), (elsewhere.double(), False), (elsewhere.expand(2), False)):
        found = fused_hyperparams_from_group(torch.optim.AdamW, {**group, "lr": value}, torch.device("meta"))
        assert (found is not None and found.lr is value) == kept


@pytest.mark.parametrize(
    "change",
    [
        lambda inner: inner.register_step_pre_hook(lambda *_: None),
        lambda inner: setattr(inner, "step", functools.partial(inner.step)),
    ],
)
def test_who_wants_to_see_the_call_sees_it(change: Callable[[Any], Any]) -> None:
    with in_one_pass() as kernels:
        model = copy.deepcopy(NET)
        inner = fused(model)
        model, optimizer = zeroshard.shard(model, inner, precision="bf16")
        change(inner)
        token_step(model, ONE_BATCH)
        optimizer.step()
    assert not kernels[0].runs


@pytest.mark.filterwarnings("error:.*lr_scheduler")  # not garbage that an earlier test has left
@pytest.mark.parametrize("on_inner", [True, False])
def test_schedulers_do_not_miss_a_step(on_inner: bool) -> None:
    def body(rank: int, world: int) -> Tensors:
        model, optimizer = sharded(NET, fused, precision="bf16")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.inner if on_inner else optimizer, 0.5)
        for batch in batches(3):
            token_step(model, batch)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=False)  # gradients stay where they are
        return held(model, optimizer)

    (one,) = assert_same_in_one_pass(1, body)
    assert len(one.laid) == 1  # a new rate needs no new table


# ---------------------------------------------------------------------------------------------- states, and where


@at_stages(1, 3)
def test_a_checkpoint_of_either_way_is_loaded_by_the_other(stage: int, tmp_path: Path) -> None:
    def body(rank: int, load: Path | None, save: Path) -> Tensors:
        model, optimizer = sharded(NET, fused, stage=stage, precision="bf16", bucket_size=200)
        if load is not None:
            zeroshard.load(load, model, optimizer)
        train_steps(model, optimizer, shares(batches(2), rank, 2))
        zeroshard.save(save, model, optimizer)
        return held(model, optimizer)

    run_threads(2, body, None, tmp_path / "torch")
    wanted = run_threads(2, body, tmp_path / "torch", tmp_path / "torch further")[0]
    with in_one_pass():
        run_threads(2, body, None, tmp_path / "ours")
        assert_equal(run_threads(2, body, tmp_path / "torch", tmp_path / "ours further")[0], wanted)
    assert_equal(run_threads(2, body, tmp_path / "ours", tmp_path / "torch further 2")[0], wanted)


def test_what_is_noted_holds_until_something_moves() -> None:
    with in_one_pass() as kernels:
        options = {"precision": "bf16", "bucket_size": 200, "cast_on_gather": False}
        model, optimizer = sharded(NET, fused, **options)

        def step() -> int:
            token_step(model, ONE_BATCH)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # gradients stay where they are
            return len(kernels[0].laid)

        assert (step(), step(), step()) == (1, 1, 1)
        for run in optimizer._groups.all_slices[:1]:
            state = optimizer.state[run.parameter]
            state["exp_avg"] = state["exp_avg"].clone()
        assert (step(), step()) == (2, 2)
        flat = next(iter(optimizer._engine.gradients.flat_grads))
        flat.local_shards = [shard.clone() for shard in flat.local_shards]
        assert (step(), step()) == (3, 3)
        optimizer.load_state_dict(optimizer.state_dict())
        step()
        strips = kernels[0].laid[-1]
        moments = {
            optimizer.state[run.parameter]["exp_avg"].untyped_storage().data_ptr()
            for run in optimizer._groups.all_slices
        }
        assert {strip.exp_avg.untyped_storage().data_ptr() for strip in strips} == moments - {0}


def test_states_of_another_optimizer_are_not_touched() -> None:
    """Loaded from one with amsgrad: torch decides what becomes of them."""
    with in_one_pass() as kernels:
        plain = copy.deepcopy(NET)
        other = fused(plain, amsgrad=True)
        token_step(plain, ONE_BATCH)
        other.step()
        model, optimizer = sharded(NET, fused, precision="bf16")
        loaded = other.state_dict()
        loaded["param_groups"][0]["amsgrad"] = False
        optimizer.load_state_dict(loaded)
        token_step(model, ONE_BATCH)
        optimizer.step()
    assert not kernels[0].runs


def test_without_triton_there_is_one_warning_and_torchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "triton", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device, optimizer = torch.device("cuda", 100), torch.optim.AdamW([torch.zeros(1)], fused=True)
    with pytest.warns(RuntimeWarning, match=r"torch's slower operations run on cuda:100: ImportError"):
        assert fused_adam.kernel_for(optimizer, device) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused_adam.kernel_for(optimizer, device) is None


def test_a_kernel_that_does_something_else_is_not_used() -> None:
    class Wrong(TorchKernel):
        def run(self, laid: Any, steps: Any, numbers: Any, factors: Any) -> None:
            super().run(laid, steps, numbers, factors)
            laid[0].exp_avg_sq[3] *= 1.001

    fused_adam.KERNEL_LOADER.self_test(TorchKernel(), torch.device("cpu"))
    with pytest.raises(AssertionError, match="item \\[2\\]"):
        fused_adam.KERNEL_LOADER.self_test(Wrong(), torch.device("cpu"))


# ------------------------------------------------------------------------------------------------------- tables


@given(
    numels=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    gaps=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    runs=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    block=st.sampled_from([1, 16, 64]),
    narrow=st.booleans(),
)
def test_a_table_has_every_element_once(
    numels: list[int], gaps: list[int], runs: list[int], block: int, narrow: bool
) -> None:
    dtype = torch.bfloat16 if narrow else torch.float32
    lines = [torch.zeros(1000, dtype=dtype if i in (0, 4) else torch.float32) for i in range(5)]
    strips, at = [], 0
    for numel, gap, run in zip(numels, gaps, sorted(runs), strict=False):
        views = [line[at : at + numel] for line in lines]
        strips.append(SliceTensors(run, *views[:4], views[4] if narrow else None))
        at += numel + gap
    seen: dict[tuple[int, ...], int] = {}  # addresses of an element → its run
    for table in make_tables(strips, block, torch.device("cpu")):
        assert table.rows.shape[1] == ROW_FIELDS and table.rows.dtype == torch.int64
        sizes = [
            table.spec.grad_dtype.itemsize,
            4,
            4,
            4,
            table.spec.compute_dtype.itemsize if table.spec.compute_dtype else 0,
        ]
        for program, row in enumerate(table.program_rows.tolist()):
            *addresses, numel, run, first = table.rows[row].tolist()
            if table.spec.is_aligned:
                assert numel % 4 == 0 and not any(a % (4 * s) for a, s in zip(addresses, sizes, strict=True) if s)
            begin = (program - first) * block
            assert 0 <= begin < numel
            for element in range(begin, min(begin + block, numel)):
                place = tuple(a + element * s for a, s in zip(addresses, sizes, strict=True))
                assert place not in seen
                seen[place] = run
    wanted = {}
    for strip in strips:
        tensors = [strip.gradient, strip.master, strip.exp_avg, strip.exp_avg_sq]
        for element in range(strip.master.numel()):
            place = tuple(t.data_ptr() + element * t.element_size() for t in tensors)
            copied = 0 if strip.compute_param is None else strip.compute_param.data_ptr() + 2 * element
            wanted[*place, copied] = strip.slice_index
    assert seen == wanted


def test_strips_that_adjoin_everywhere_become_one_row() -> None:
    lines = [torch.zeros(1024) for _ in range(4)]
    copied = torch.zeros(2048, dtype=torch.bfloat16)

    def strips(apart: int, runs: int) -> list[SliceTensors]:
        return [
            SliceTensors(
                i % runs, *(line[256 * i : 256 * i + 256] for line in lines), copied[i * apart : i * apart + 256]
            )
            for i in range(4)
        ]

    def rows(found: list[SliceTensors]) -> int:
        (table,) = make_tables(found, 128, torch.device("cpu"))
        assert table.spec.is_aligned and table.program_rows.numel() == math.ceil(1024 / 128)
        return len(table.rows)

    assert (rows(strips(256, 1)), rows(strips(512, 1)), rows(strips(256, 4))) == (1, 4, 4)
    assert not make_tables([SliceTensors(0, *(line[:0] for line in lines), None)], 128, torch.device("cpu"))


def test_where_only_addresses_differ_programs_are_shared() -> None:
    kept = []

    def table(*sizes: int) -> LaunchTable:
        kept.append([SliceTensors(i, *(torch.zeros(size) for _ in range(4)), None) for i, size in enumerate(sizes)])
        (found,) = make_tables(kept[-1], 64, torch.device("cpu"))
        return found

    one, moved, other = table(100, 200), table(100, 200), table(200, 100)
    assert one.rows[0, 0] != moved.rows[0, 0]
    assert one.program_rows is moved.program_rows and one.program_rows.tolist() == [0, 0, 1, 1, 1, 1]
    assert other.program_rows.tolist() == [0, 0, 0, 0, 1, 1]


BLOCKS = nn.Sequential(*[Block(8) for _ in range(5)])


def test_units_of_stage_3_lie_in_a_row_for_each_piece_of_the_gradients() -> None:
    """Shards of all units lie side by side, for parameters as for the gradients of a piece: a row for each run."""

    def body(rank: int) -> int:
        model, optimizer = sharded(BLOCKS, fused, stage=3, precision="bf16")
        model(torch.ones(1, 8)).float().sum().backward()
        optimizer.step()
        return len(optimizer._groups.all_slices)

    with in_one_pass() as kernels:
        assert run_threads(2, body) == [4, 4]
    for one in kernels:
        (table,) = make_tables(one.laid[0], 64, torch.device("cpu"))
        assert len(one.laid[0]) == 5 and len(table.rows) == 4


def test_powers_of_beta_are_in_fp32_with_any_default_dtype() -> None:
    """In bf16, 0.999 is 1, and there would be no update."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        launch = triton_kernel.PreparedLaunch([], 1, torch.device("cpu"))
        powers = launch.beta_powers((0.9, 0.999), [torch.tensor(2.0, dtype=torch.float32)])
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(powers, torch.tensor([[0.81, 0.998001]]))

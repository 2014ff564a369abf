"""Offloaded states on several ranks: the same bits in every stage and on every mesh, and errors on every rank."""

from __future__ import annotations

import copy
import errno
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import Case, assert_same, everything, loop, train
from pairs import at_stages, every_stage
from plain import ONE_BATCH, take_step
from ranks import RanksFailed, run_processes, run_threads
from zoo import Block, built, make_net

import zeroshard
from zeroshard.comm.consistency import RanksDisagreeError
from zeroshard.memory.disk.file import DiskError, OffloadFile

pytestmark = pytest.mark.usefixtures("tried_once")

THERE = tempfile.gettempdir()
RESTS: list[Any] = [
    "host",
    ("disk", 0.5),
    {"host": 0.5, "disk": 0.5},
    ("host", 0.3),
    "disk",
    {"host": 0.3, "disk": 0.3},
]


def offload(optimizer: Any = "device", **options: Any) -> dict[str, Any]:
    return {"optimizer": optimizer, "directory": THERE, **options}


def assert_unchanged(world: int, case: Case, *choices: Any, run: Any = run_threads) -> None:
    """On every rank, each choice of tiers gives all the bits of the run without."""
    wanted = run(world, train, world, case)
    for choice in choices:
        for rank, ours in enumerate(run(world, train, world, case, choice)):
            assert_same(ours, wanted[rank], f"rank {rank}, {choice}: ")


@pytest.mark.parametrize("world", [2, 3, 4])
@every_stage
def test_every_stage_on_every_number_of_ranks(stage: int, world: int) -> None:
    number = 4 * world + stage
    case = Case(
        net=["net", "fickle", "tied", "frozen"][(stage + world) % 4],
        optimizer=["AdamW", "momentum", "RMSprop", "Adam", "Lion"][number % 5],
        groups=number % 2 == 0,
        steps=5,
        clip=[(None,), (1e3, 1e3, 1e3, 0.05)][number % 2],
        options={"stage": stage, "bucket_size": [300, 2**25][number % 3 == 0]},
    )
    params = {"parameters": RESTS[number % 6]} if stage == 3 else {}
    gradients = {"gradients": RESTS[(number + 2) % 6]} if stage > 1 else {}
    assert_unchanged(world, case, offload("host", **params), offload(RESTS[(number + 1) % 6], **gradients))


@every_stage
def test_accumulation_and_no_sync_on_two_ranks(stage: int) -> None:
    case = Case(steps=4, accumulate=(2, 3), clip=(0.05, None), unsynchronised=stage % 2 == 0, options={"stage": stage})
    assert_unchanged(2, case, offload("host"), offload({"host": 0.5, "disk": 0.5}))


@pytest.mark.parametrize(("mesh", "stage"), [((2, 2), 3), ((2, 2), 1), ((2, 1), 2), ((2, 1), 0), ((1, 2), 3)])
def test_a_mesh_of_replicas_and_shards(mesh: tuple[int, int], stage: int) -> None:
    case = Case(mesh=mesh, steps=5, clip=(0.5,), options={"stage": stage, "bucket_size": 300})
    params = {"parameters": "host"} if stage == 3 else {}
    assert_unchanged(mesh[0] * mesh[1], case, offload("host", **params), offload(("disk", 0.5)))


def test_accumulation_over_replicas_sums_before_it_reduces_in_stage_zero() -> None:
    case = Case(mesh=(2, 1), steps=4, accumulate=(2,), options={"stage": 0})
    assert_unchanged(2, case, offload("host"))


@pytest.mark.parametrize(
    ("precision", "stage", "overflow", "rest"),
    [
        ("bf16", 3, None, "host"),
        ("bf16", 1, None, {"host": 0.5, "disk": 0.3}),
        ("fp16", 2, 2, ("host", 0.5)),
        ("fp16", 3, 1, "disk"),
        ("fp16", 0, 1, "host"),
    ],
)
def test_sixteen_bits_on_two_ranks(precision: str, stage: int, overflow: int | None, rest: Any) -> None:
    case = Case(steps=4, overflow=overflow, clip=(0.5,), options={"stage": stage, "precision": precision})
    assert_unchanged(2, case, offload(rest))


def test_a_rank_with_nothing_near_skips_an_overflow_like_those_with_something() -> None:
    """Of 257 elements the fourth rank has none, so it need not look whether the step counts."""

    def body(rank: int, choice: Any) -> Any:
        model = torch.nn.Linear(1, 257, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = zeroshard.shard(model, optimizer, offload=choice, stage=2, precision="fp16", timeout=10)
        for number in range(4):
            loss = model(torch.ones(1, 1)).float().square().mean() * (1e38 if number == 1 else 1)
            take_step(optimizer, optimizer.scale(loss))
        return everything(model, optimizer)

    wanted = run_threads(4, body, None)
    assert_same(run_threads(4, body, offload(("host", 0.5))), wanted)


@pytest.mark.parametrize(
    ("world", "stage", "choice"),
    [
        (2, 3, offload("host", parameters="host")),
        (2, 1, offload({"host": 0.5, "disk": 0.5})),
        (3, 2, offload(("disk", 0.5), gradients="host")),
    ],
)
def test_processes_over_gloo(world: int, stage: int, choice: Any) -> None:
    case = Case(steps=5, clip=(1e3, 1e3, 1e3, 0.05), options={"stage": stage, "bucket_size": 500})
    assert_unchanged(world, case, choice, run=run_processes)


def save_part(rank: int, world: int, case: Case, choice: Any, path: Path) -> None:
    model, optimizer = case.make(choice)
    loop(model, optimizer, case, rank, world)
    zeroshard.save(path, model, optimizer)


def load_part(rank: int, world: int, case: Case, choice: Any, path: Path, first: int) -> Any:
    model, optimizer = case.make(choice)
    zeroshard.load(path, model, optimizer)
    loop(model, optimizer, case, rank, world, first=first)
    return everything(model, optimizer)


@pytest.mark.parametrize(("before", "after"), [(offload("host"), None), (None, offload(("disk", 0.6)))])
def test_a_checkpoint_goes_from_any_tier_to_any_on_other_ranks_and_stages(before: Any, after: Any, tmp_path) -> None:
    case = Case(groups=True, steps=3, options={"stage": 3})
    run_threads(3, save_part, 3, case, before, tmp_path / "there")
    longer = replace(case, steps=6, options={"stage": 1})
    ours = run_threads(2, load_part, 2, longer, after, tmp_path / "there", 3)
    run_threads(3, save_part, 3, case, None, tmp_path / "plain")
    wanted = run_threads(2, load_part, 2, longer, None, tmp_path / "plain", 3)
    assert_same(ours, wanted)


# ------------------------------------------------------------------------------------------------------ errors


def refused(rank: int, choices: list[Any], stage: int) -> str:
    """What shard() says to this rank; the model has to be as it was."""
    model = make_net()
    before = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises((ValueError, DiskError, RanksDisagreeError)) as caught:
        zeroshard.shard(model, optimizer, stage=stage, offload=choices[rank % len(choices)], timeout=10)
    batch = ONE_BATCH
    assert torch.equal(model(batch), before(batch)), "the model was harmed"
    return str(caught.value)


@at_stages(0, 1)
def test_gradients_that_are_summed_whole_stay(stage: int) -> None:
    for said in run_threads(2, refused, [{"gradients": "host"}], stage):
        assert f"stage {stage} keeps full gradients on every rank: use stage=2 or 3 to offload them" in said


def test_parameters_below_stage_three_stay_on_several_ranks() -> None:
    for said in run_threads(2, refused, [{"parameters": "host"}], 2):
        assert "stage 2 keeps full parameters on every rank: use stage=3 to offload them" in said


@pytest.mark.parametrize("other", [None, ("host", 0.5), {"optimizer": "host", "host_bytes": "1GB"}], ids=str)
def test_ranks_with_different_options_all_raise(other: Any) -> None:
    other = {"optimizer": other} if isinstance(other, tuple) else other
    for said in run_threads(2, refused, ["host", other], 3):
        assert "rank 1: offload is" in said and "on rank 0" in said


def test_where_one_rank_has_no_directory_all_ranks_raise(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    choices = [{"optimizer": "disk", "directory": str(tmp_path)}, {"optimizer": "disk", "directory": gone}]
    for said in run_threads(2, refused, choices, 3):
        assert f"rank 1: {gone} is not a directory: create it, or pass one that exists" in said


def test_ranks_may_keep_their_files_in_different_directories(tmp_path: Path) -> None:
    def body(rank: int, case: Case, chosen: bool) -> Any:
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        choice = {"optimizer": "disk", "directory": tmp_path / str(rank), "threads": rank + 1} if chosen else None
        return train(rank, 2, case, choice)

    case = Case(steps=3)
    assert_same(run_threads(2, body, case, True), run_threads(2, body, case, False))
    assert not list(tmp_path.glob("*/*"))  # no file has a name


# ---------------------------------------------------------------------------------------------- a failing disk


def lose_the_disk(rank: int, world: int, stage: int, kind: str) -> None:
    """Rank 0's disk fails once, after two steps."""
    case = Case(net="wide", steps=2, options={"stage": stage})
    case.options["bucket_size"] = 600
    model, optimizer = case.make({kind: "disk", "directory": THERE})
    loop(model, optimizer, case, rank, world)

    move = OffloadFile.transfer

    def fail(self: OffloadFile, way: Any, memory: memoryview, offset: int) -> None:
        OffloadFile.transfer = move  # type: ignore[method-assign]
        raise DiskError.from_os_error(
            f"the {way} of {len(memory)} bytes failed", OSError(errno.EIO, "Input/output error")
        )

    if rank == 0:
        OffloadFile.transfer = fail  # type: ignore[method-assign]  # this process is not used again
    loop(model, optimizer, replace(case, steps=6), rank, world, first=2)


def test_where_parameters_cannot_be_read_no_process_is_left_waiting() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_processes(2, lose_the_disk, 2, 3, "parameters", timeout=60)
    accounts = failed.value.accounts
    assert "DiskError: the read of " in accounts[0] and "Input/output error. The device failed" in accounts[0]
    assert "rank 0 failed: the read of" in accounts[1]


@at_stages(1, 3)
def test_when_one_rank_loses_its_disk_no_process_is_left_waiting(stage: int) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_processes(2, lose_the_disk, 2, stage, "optimizer", timeout=60)
    accounts = failed.value.accounts
    assert "the update of offloaded states failed: DiskError" in accounts[0]
    assert "Input/output error. The device failed" in accounts[0]
    assert "rank 0 failed: the update of offloaded states failed: DiskError" in accounts[1]


# ----------------------------------------------------------------------------------------- ranks that differ in forward


class Branching(torch.nn.Module):
    """Leaves out the block that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(8) for _ in range(3))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, without: int | None = None) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != without:
                x = block(x)
        return self.head(x)


def branch(rank: int, stage: int, failing: bool, offload: Any) -> Any:
    model: Any = built(Branching)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = zeroshard.shard(model, adam, stage=stage, offload=offload, timeout=10)
    for number in range(5):
        x = torch.full((2, 8), 1.0 + rank + number)
        if failing and number == 3:
            if rank == 0:
                with pytest.raises(TypeError):
                    model("no tensor")
            else:
                model(x)
            continue  # all skip the batch
        differs = rank == 1 and number > 1 and not failing
        take_step(optimizer, model(x, without=number % 3 if differs else None).square().sum())
    return everything(model, optimizer)


@pytest.mark.parametrize("failing", [False, True], ids=["another branch", "a failed forward"])
@at_stages(1, 2)
def test_a_forward_that_differs_on_one_rank_is_harmless_where_parameters_stay(stage: int, failing: bool) -> None:
    wanted = run_threads(2, branch, stage, failing, None)
    assert_same(run_threads(2, branch, stage, failing, "host"), wanted)

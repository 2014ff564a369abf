"""Ranks that disagree get an error that names what and who, not a hang and not each other's data."""

from __future__ import annotations

import copy
import os
import re

import pytest
import torch
import torch.distributed as dist
from pairs import at_stages, every_stage
from plain import (
    ONE_BATCH,
    adamw,
    assert_close,
    batches,
    copied,
    full_parameters,
    net_loss,
    sharded,
    shares,
    split,
    take_step,
    train_step,
    train_steps,
)
from ranks import run_processes, run_threads
from torch import nn
from zoo import InOrder, Mlp, make_net

import zeroshard
from zeroshard.comm import open_consistency_checker
from zeroshard.config.config import Config
from zeroshard.engine import verify_same_model

TIMEOUT = 2.5  # seconds a rank waits before it says so
SOON = 1.0  # the same where a rank is meant to wait in vain


# ----------------------------------------------------------------------------------------------- at shard()


def other_model(kind: str) -> nn.Module:
    model = make_net()
    if kind == "shape":
        model.blocks[1].up = nn.Linear(7, 16)
    elif kind == "name":
        model.blocks[1].over, model.blocks[1].up = model.blocks[1].up, None
    elif kind == "extra":
        model.extra = nn.Linear(2, 2)
    elif kind == "missing":
        del model.head
    elif kind == "dtype":
        model.blocks[1].up.half()
    elif kind == "requires_grad":
        model.blocks[1].up.weight.requires_grad_(False)
    elif kind == "buffer":
        model.register_buffer("table", torch.zeros(3))
    return model


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("shape", "blocks.1.up.weight"),
        ("name", "blocks.1"),
        ("extra", "extra.weight"),
        ("missing", "head.weight"),
        ("dtype", "blocks.1.up.weight"),
        ("requires_grad", "blocks.1.up.weight"),
        ("buffer", "table"),
    ],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_different_models_are_an_error_on_every_rank_that_names_parameter_and_ranks(kind, named, odd: int) -> None:
    models = [other_model(kind if rank == odd else "same") for rank in range(3)]

    def body(rank: int):
        with pytest.raises(zeroshard.RanksDisagreeError) as caught:
            zeroshard.shard(models[rank], stage=3, timeout=TIMEOUT)
        return str(caught.value)

    texts = run_threads(3, body)
    assert len(set(texts)) == 1
    assert named in texts[0]
    complaining = [2] if odd == 2 else [1, 2]  # those that differ from rank 0
    assert [int(rank) for rank in re.findall(r"rank (\d): ", texts[0])] == complaining


@pytest.mark.guarantee("Ranks that disagree")
@pytest.mark.parametrize(
    ("option", "here", "there"),
    [
        ("stage", 2, 3),
        ("precision", "bf16", None),
        ("bucket_size", 128, 256),
        ("ring", 1, 2),
        ("loss_scale", 2.0**10, 2.0**11),
        ("reduce_dtype", "fp32", None),
        ("units", ("blocks.*",), None),
        ("keep_fp32", ("head",), ()),
    ],
)
def test_different_options_are_an_error_on_every_rank_that_names_the_option(option: str, here, there) -> None:
    def body(rank: int, model):
        options = {"precision": "bf16", option: here if rank == 0 else there}
        with pytest.raises(zeroshard.RanksDisagreeError) as caught:
            sharded(model, stage=options.pop("stage", 3), timeout=TIMEOUT, **options)
        return str(caught.value)

    for text in run_threads(2, body, make_net()):
        assert option in text
        assert "rank 1" in text


def different_optimizers(rank: int, kind: str) -> str:
    model = make_net()
    if kind == "none on one":
        optimizer = adamw(model) if rank == 0 else None
    elif kind == "fewer parameters":
        optimizer = torch.optim.Adam(list(model.parameters())[: None if rank == 0 else 3])
    else:
        parameters = list(model.parameters())
        groups = [{"params": parameters[:4]}, {"params": parameters[4:]}]
        optimizer = torch.optim.Adam(groups if rank == 0 else parameters)
    try:
        zeroshard.shard(model, optimizer, stage=3, precision="bf16", timeout=TIMEOUT)
    except zeroshard.RanksDisagreeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["none on one", "fewer parameters", "other groups"])
def test_different_optimizers_are_an_error_on_every_rank(kind: str) -> None:
    for text in run_processes(2, different_optimizers, kind, timeout=30):
        assert "optimizer" in text
        assert "rank 1" in text


def one_rank_calls_shard(rank: int) -> str:
    if rank == 1:
        return ""
    try:
        zeroshard.shard(make_net(), stage=3, timeout=SOON)
    except zeroshard.RanksDisagreeError as error:
        return str(error)
    return "no error"


def nccl_settings(rank: int, device: str, value: str) -> str:
    if rank == 1:
        os.environ["NCCL_BUFFSIZE"] = value  # the harness removes it
    model = nn.Linear(2, 2)
    try:
        checker = open_consistency_checker(None, TIMEOUT)
        verify_same_model(model, {}, Config(), checker, torch.device(device))
    except zeroshard.RanksDisagreeError as error:
        return str(error)
    return ""


@pytest.mark.guarantee("Ranks that disagree")
def test_different_nccl_settings_are_an_error_on_every_rank_that_uses_nccl() -> None:
    for text in run_processes(2, nccl_settings, "cuda", "1048576"):
        assert "rank 1: NCCL_BUFFSIZE is 1048576 here and not set on rank 0" in text
        assert "Set NCCL's variables to the same values on all ranks" in text
    assert run_processes(2, nccl_settings, "cpu", "1048576") == ["", ""]


def test_a_rank_that_never_calls_shard_is_an_error_on_those_that_do() -> None:
    text, _ = run_processes(2, one_rank_calls_shard, timeout=30)
    assert "shard()" in text


# ------------------------------------------------------------------------------------------ different ways


SIZES = {"equal sizes": (24, 24, 24, 24), "different sizes": (8, 40, 24, 72)}
STRAYED = {"skips": [0, 2, 3], "swaps": [0, 2, 1, 3], "repeats": [0, 1, 2, 3, 1], "stops early": [0, 1]}


def branching(sizes: str) -> InOrder:
    """Blocks whose order a branch that depends on the rank would change."""
    return InOrder(Mlp(8, hidden) for hidden in SIZES[sizes])


def stray(rank: int, sizes: str, how: str, after: int) -> tuple[str, str]:
    """Train; rank 1 takes another way through the blocks from step ``after`` on."""
    model, optimizer = sharded(branching(sizes), adamw, stage=3, timeout=SOON)
    x = torch.ones(2, 8)
    try:
        for number in range(after + 2):
            if rank == 1 and number == after:
                model.order = STRAYED[how]
            take_step(optimizer, model(x).square().mean())
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize(
    ("sizes", "how", "after"),
    [
        ("equal sizes", "skips", 0),
        ("equal sizes", "swaps", 3),
        ("equal sizes", "skips", 3),
        ("different sizes", "skips", 0),
        ("different sizes", "skips", 3),
        ("equal sizes", "repeats", 2),
        ("equal sizes", "stops early", 2),
    ],
)
def test_a_rank_dependent_branch_around_a_unit_names_unit_and_ranks(sizes: str, how: str, after: int) -> None:
    outcomes = run_processes(2, stray, sizes, how, after, timeout=20)
    assert [kind for kind, _ in outcomes] == ["RanksDisagreeError"] * 2, outcomes
    for rank, (_, text) in enumerate(outcomes):
        assert f"rank {rank}" in text
        assert re.search(rf"rank {1 - rank}|ranks \[{1 - rank}\]", text), text
    assert any(re.search(r"unit 'blocks\.\d'", text) for _, text in outcomes), outcomes


def misstep(rank: int, how: str, stage: int) -> tuple[str, str]:
    """Train; in the third step rank 1 leaves out, or adds, one call."""
    model, optimizer = sharded(branching("equal sizes"), adamw, stage=stage, timeout=SOON)
    x = torch.ones(2, 8)
    try:
        for number in range(4):
            odd = rank == 1 and number == 2
            loss = model(x).square().mean()
            if odd and how == "extra forward":
                with torch.no_grad():
                    model(x)
            if not (odd and how == "no backward"):
                loss.backward()
            if odd and how == "clip":
                optimizer.clip_grad_norm_(1.0)
            if not (odd and how == "no step"):
                optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize(
    ("how", "stage"),
    [
        ("no backward", 2),
        ("no backward", 3),
        ("no step", 1),
        ("no step", 2),
        ("no step", 3),
        ("extra forward", 3),
        ("clip", 2),
    ],
)
def test_a_rank_that_leaves_out_or_adds_a_call_is_an_error_on_all(how: str, stage: int) -> None:
    outcomes = run_processes(2, misstep, how, stage, timeout=20)
    assert [kind for kind, _ in outcomes] == ["RanksDisagreeError"] * 2, outcomes
    for rank, (_, text) in enumerate(outcomes):
        assert f"rank {rank}" in text
        assert re.search(rf"rank {1 - rank}|ranks \[{1 - rank}\]", text), text


def test_all_ranks_changing_their_way_together_is_not_an_error() -> None:
    def body(rank: int, model):
        model, optimizer = sharded(model, adamw, stage=3, timeout=TIMEOUT)
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], *STRAYED.values(), [0, 1, 2, 3]):
            model.order = order
            take_step(optimizer, model(torch.ones(2, 8)).square().mean())
        return True

    assert run_threads(2, body, branching("equal sizes")) == [True, True]


# --------------------------------------------------------------------------------- an exception on one rank


class Spoiled(Exception):
    """Raised by the user's code."""


class Spoiler:
    """A hook that raises once, when told to."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, *_) -> None:
        if self.armed:
            self.armed = False
            raise Spoiled


def place(model: nn.Module, where: str, hook: Spoiler) -> None:
    if where == "before the first unit":
        model.embedding.register_forward_pre_hook(hook)
    elif where == "in the middle":
        model.blocks[1].norm.register_forward_hook(hook)
    elif where == "in the last unit":
        model.head.register_forward_hook(hook)


def train_with_a_spoiled_batch(rank: int, world: int, model: nn.Module, stage: int, where: str, spoiled: int):
    """The user's way: catch, agree by an all-reduce of their own, skip the batch together, go on."""
    model, hook = copy.deepcopy(model), Spoiler()
    place(model, where, hook)
    model, optimizer = zeroshard.shard(model, adamw(model), stage=stage, timeout=TIMEOUT)
    raised = 0
    for number, batch in enumerate(batches(5)):
        hook.armed = rank == world - 1 and number == spoiled
        fine = torch.ones(1)
        try:
            loss = net_loss(model, split(batch, rank, world))
            if where == "in the loss" and hook.armed:
                raise Spoiled
        except Spoiled:
            fine.zero_()
            raised += 1
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        if fine:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), raised


def plain_without(model: nn.Module, left_out: int) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = adamw(model)
    for number, batch in enumerate(batches(5)):
        if number != left_out:
            train_step(model, optimizer, batch)
    return copied(model)


WHERE = ["before the first unit", "in the middle", "in the last unit", "in the loss"]


@pytest.mark.parametrize("where", WHERE)
@every_stage
def test_an_exception_in_one_rank_s_forward_leaves_it_usable(stage: int, where: str) -> None:
    model = make_net()
    wanted = plain_without(model, 2)
    for rank, (parameters, raised) in enumerate(run_threads(2, train_with_a_spoiled_batch, 2, model, stage, where, 2)):
        assert raised == rank
        assert_close(parameters, wanted)


@at_stages(2, 3)
def test_an_exception_in_one_gloo_process_s_forward_leaves_it_usable(stage: int) -> None:
    model = make_net()
    wanted = plain_without(model, 2)
    for parameters, _ in run_processes(2, train_with_a_spoiled_batch, 2, model, stage, "in the middle", 2, timeout=20):
        assert_close(parameters, wanted)


def first_forward_fails(rank: int) -> tuple[str, str]:
    """No order is known yet, so the failing rank cannot stand in for the rest of its forward."""
    model, hook = make_net(), Spoiler()
    place(model, "in the middle", hook)
    model, _ = zeroshard.shard(model, adamw(model), stage=3, timeout=SOON)
    hook.armed = rank == 1
    try:
        net_loss(model, ONE_BATCH)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_an_exception_in_the_very_first_forward_is_an_error_on_the_ranks_that_wait_for_it() -> None:
    (waiting, text), (failed, _) = run_processes(2, first_forward_fails, timeout=20)
    assert (waiting, failed) == ("RanksDisagreeError", "Spoiled")
    assert re.search(r"unit 'blocks\.\d'", text), text
    assert re.search(r"rank 1|ranks \[1\]", text), text


@every_stage
def test_a_failed_forward_leaves_no_full_parameters_in_memory(stage: int) -> None:
    def body(rank: int, model):
        model, hook = copy.deepcopy(model), Spoiler()
        place(model, "in the middle", hook)
        model, optimizer = zeroshard.shard(model, adamw(model), stage=stage)
        train_steps(model, optimizer, shares(batches(2), rank, 2))
        held = zeroshard.report(model).total.now
        hook.armed = True
        with pytest.raises(Spoiled):
            model(ONE_BATCH)
        return held, zeroshard.report(model).total.now

    for before, after in run_threads(2, body, make_net()):
        assert after == before

"""Checkpoints of replicas that train alone: a run continues to the bit, and other loads are as documented."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import (
    ONE_BATCH,
    Tensors,
    adamw_in_groups,
    assert_equal,
    batches,
    copied,
    copied_buffers,
    full_parameters,
    mesh_of,
    net_loss,
    sharded,
    split,
    take_step,
    token_step,
)
from ranks import RanksFailed, run_processes, run_threads
from torch import nn
from zoo import Tied, built

import zeroshard
from zeroshard.checkpoint import CheckpointError, export
from zeroshard.checkpoint.commands import inspect

pytestmark = pytest.mark.filterwarnings("ignore:.*between two averages", "ignore:.*with local_steps has the states")
DILOCO = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
OUTER_ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def shard(shape: tuple[int, ...] | None = (2, 2), **options: Any) -> tuple[Any, Any, zeroshard.EMA]:
    mesh = mesh_of(shape) if shape else None
    model, optimizer = sharded(built(Tied), adamw_in_groups, mesh=mesh, **options)
    return model, optimizer, zeroshard.EMA(model, 0.5)


def train(rank: int, model: Any, optimizer: Any, ema: zeroshard.EMA, data: list[torch.Tensor]) -> None:
    for batch in data:
        take_step(optimizer, net_loss(model, split(batch, rank, 4)))
        ema.update()


def everything(model: Any, optimizer: Any, ema: zeroshard.EMA) -> Tensors:
    """What this rank's replica has."""
    found = full_parameters(model) | copied_buffers(model)
    with ema.swapped():
        found |= {f"ema {name}": value for name, value in full_parameters(model).items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return found


CASES: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    *({"stage": stage, "outer_optimizer": DILOCO} for stage in (0, 3)),
    {"stage": 2, "outer_optimizer": OUTER_ADAM, "bucket_size": 50},
    {"stage": 3, "outer_optimizer": DILOCO, "offload": "host"},
    {"stage": 3, "outer_optimizer": DILOCO, "precision": "bf16"},
    {"stage": 2, "outer_optimizer": DILOCO, "precision": "bf16", "offload": "host"},
]


@pytest.mark.guarantee("Local steps")
@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_run_continues_to_the_bit_from_between_and_from_averages(tmp_path: Path, options: Any) -> None:
    data, moments = batches(5), (1, 2, 3)  # averages come after steps 2 and 4

    def body(rank: int) -> tuple[Any, Any]:
        ours = shard(local_steps=2, **options)
        for step, batch in enumerate(data, 1):
            train(rank, *ours, [batch])
            if step in moments:
                zeroshard.save(tmp_path / str(step), ours[0], ours[1], ema=ours[2])
        again = shard(local_steps=2, **options)
        train(rank, *again, batches(1, seed=9))  # everything is replaced
        found = []
        for step in moments:
            zeroshard.load(tmp_path / str(step), again[0], again[1], ema=again[2])
            assert again[1].local_steps.count == step % 2
            train(rank, *again, data[step:])
            found.append(everything(*again))
        return everything(*ours), found

    ranks = run_threads(4, body)
    for ours, found in ranks:
        for again in found:
            assert_equal(again, ours)
    assert any(not torch.equal(value, ranks[2][0][name]) for name, value in ranks[0][0].items())


def save_one(directory: Path, at: int, **options: Any) -> list[Tensors]:
    def body(rank: int) -> Tensors:
        ours = shard(local_steps=4, **options)
        train(rank, *ours, batches(at))
        zeroshard.save(directory, ours[0], ours[1], ema=ours[2])
        return everything(*ours)

    return run_threads(4, body)


@pytest.mark.parametrize(
    ("shape", "options"),
    [((4, 1), {"local_steps": 4}), ((2, 2), {}), (None, {"stage": 1}), ((4,), {"local_steps": 2, "stage": 0})],
)
def test_other_loads_give_all_ranks_the_first_replicas_states_and_warn(
    tmp_path: Path, shape: Any, options: Any
) -> None:
    first = save_one(tmp_path / "step", 6)[0]

    def body(rank: int) -> Tensors:
        ours = shard(shape, **options)
        zeroshard.load(tmp_path / "step", ours[0], ours[1], ema=ours[2])
        if ours[1].local_steps is not None:
            assert ours[1].local_steps.count == 0
        return everything(*ours)

    with pytest.warns(UserWarning, match="2 replicas, 2 steps after their last average .* first one's parameters"):
        ranks = run_threads(4, body)
    for found in ranks:
        assert_equal(found, first)


def test_after_an_average_another_load_does_not_warn(tmp_path: Path) -> None:
    first = save_one(tmp_path / "step", 4)[0]
    model = built(Tied)
    optimizer = adamw_in_groups(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zeroshard.load(tmp_path / "step", model, optimizer)
        export(tmp_path / "step", tmp_path / "exported")
    assert_equal(copied(model), {n: first[n] for n, _ in model.named_parameters()})


def test_weights_alone_are_the_first_replicas_on_all_and_end_the_local_steps(tmp_path: Path) -> None:
    first = save_one(tmp_path / "step", 6, outer_optimizer=DILOCO)[0]

    def body(rank: int) -> Any:
        ours = shard(local_steps=4, outer_optimizer=DILOCO)
        train(rank, *ours, batches(1, seed=5))
        zeroshard.load(tmp_path / "step", ours[0])
        assert ours[1].local_steps.count == 0
        return full_parameters(ours[0])

    with pytest.warns(UserWarning, match="first one's parameters"):
        ranks = run_threads(4, body)
    for found in ranks:
        assert_equal(found, {name: first[name] for name in found})


@pytest.mark.parametrize("loads_ema", [False, True])
def test_weights_alone_leave_the_mean_of_the_replicas_emas(loads_ema: bool, tmp_path: Path) -> None:
    save_one(tmp_path / "step", 6)

    def body(rank: int) -> Any:
        model, optimizer, ema = shard(local_steps=4, stage=3)
        train(rank, model, optimizer, ema, batches(1, seed=5))
        before = everything(model, optimizer, ema)
        zeroshard.load(tmp_path / "step", model, ema=ema if loads_ema else None)
        zeroshard.save(tmp_path / "again", model, optimizer, ema=ema)
        return before, everything(model, optimizer, ema)

    with pytest.warns(UserWarning, match="first one's parameters"):
        ranks = run_threads(4, body)
    names = [name for name in ranks[0][0] if name.startswith("ema ")]
    assert any(not torch.equal(ranks[0][0][name], ranks[2][0][name]) for name in names)
    for _, after in ranks:
        assert_equal({name: after[name] for name in names}, {name: ranks[0][1][name] for name in names})
    for name in names if not loads_ema else ():
        mean = (ranks[0][0][name] + ranks[2][0][name]) / 2
        torch.testing.assert_close(ranks[0][1][name], mean, rtol=0, atol=1e-6)


def test_an_export_and_an_inspection_say_whose_values_they_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_one(tmp_path / "step", 6, outer_optimizer=DILOCO)
    with pytest.warns(UserWarning, match=r"export of .* first one's parameters are read"):
        export(tmp_path / "step", tmp_path / "exported")
    assert inspect.main([str(tmp_path / "step"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "replicas    2, 2 local steps after an average: model has the values of the first" in printed
    assert "intact" in printed


def test_an_outer_optimizer_without_the_values_of_the_last_average_is_refused(tmp_path: Path) -> None:
    save_one(tmp_path / "step", 6)
    save_one(tmp_path / "even", 4)

    def body(rank: int) -> None:
        ours = shard(local_steps=4, outer_optimizer=DILOCO)
        zeroshard.load(tmp_path / "even", ours[0], ours[1])  # starts with new states
        zeroshard.load(tmp_path / "step", ours[0], ours[1])

    with pytest.raises(RanksFailed, match="was saved between two averages of a run without an outer optimizer"):
        run_threads(4, body)


@pytest.mark.parametrize("at", [4, 6])
def test_states_of_another_outer_optimizer_are_refused_or_skipped(tmp_path: Path, at: int) -> None:
    save_one(tmp_path / "step", at, outer_optimizer=DILOCO)

    def body(rank: int) -> Tensors:
        ours = shard(local_steps=4, outer_optimizer=OUTER_ADAM)
        with pytest.raises(CheckpointError, match="but no step, which Adam needs"):
            zeroshard.load(tmp_path / "step", ours[0], ours[1])
        loaded = zeroshard.load(tmp_path / "step", ours[0], ours[1], strict=False)
        assert loaded.unexpected == ["the states of the outer optimizer"]
        train(rank, *ours, batches(4 - at % 4))
        return full_parameters(ours[0])

    ranks = run_threads(4, body)
    assert_equal(ranks[2], ranks[0])  # after an average


def test_replicas_continue_between_averages_with_an_optimizer_of_another_class(tmp_path: Path) -> None:
    save_one(tmp_path / "step", 7, outer_optimizer=DILOCO)

    def body(rank: int) -> tuple[Any, Any]:
        mesh = mesh_of((2, 2))
        model: Any = built(Tied)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = zeroshard.shard(model, sgd, mesh=mesh, local_steps=4, outer_optimizer=DILOCO)
        zeroshard.load(tmp_path / "step", model, optimizer, strict=False)
        again = shard(local_steps=4, outer_optimizer=DILOCO)
        zeroshard.load(tmp_path / "step", again[0], again[1])
        optimizer.step()  # changes nothing, and is the last before the average
        zeroshard.average_replicas(again[0])
        return full_parameters(model), full_parameters(again[0])

    for ours, wanted in run_threads(4, body):
        assert_equal(ours, wanted)


def test_a_parameter_that_was_not_trained_before_starts_from_its_saved_value(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        def make(model: Any, trained: list[nn.Parameter]) -> tuple[Any, Any]:
            mesh = mesh_of((2, 2))
            sgd = torch.optim.SGD(trained, lr=0.0)
            return zeroshard.shard(model, sgd, mesh=mesh, local_steps=2, outer_optimizer=DILOCO)

        first, later = built(Tied), built(Tied)
        nn.init.zeros_(later.blocks[0].up.weight)
        saved = make(first, [first.embedding.weight])
        saved[1].step()
        zeroshard.save(tmp_path / "step", *saved)
        model, optimizer = make(later, [later.embedding.weight, later.blocks[0].up.weight])
        zeroshard.load(tmp_path / "step", model, optimizer, strict=False)
        optimizer.step()  # changes nothing, and an average follows
        return zeroshard.full_parameter(model, "blocks.0.up.weight"), zeroshard.full_parameter(
            saved[0], "blocks.0.up.weight"
        )

    for found, expected in run_threads(4, body):
        assert torch.equal(found, expected)


def test_a_parameter_that_is_frozen_between_averages_is_saved_by_each_replica(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[Any, Any]:
        ours, again = shard(local_steps=4), shard(local_steps=4)
        train(rank, *ours, batches(2))
        ours[0].blocks[0].up.weight.requires_grad_(False)
        zeroshard.save(tmp_path / "step", ours[0], ours[1])
        zeroshard.load(tmp_path / "step", again[0], again[1])
        return full_parameters(ours[0]), full_parameters(again[0])

    for ours, again in run_threads(4, body):
        assert_equal(again, ours)


def test_dropped_states_of_an_outer_optimizer_warn(tmp_path: Path) -> None:
    save_one(tmp_path / "step", 4, outer_optimizer=DILOCO)
    model = built(Tied)
    with pytest.warns(UserWarning, match="has states of an outer optimizer"):
        zeroshard.load(tmp_path / "step", model, adamw_in_groups(model))


def test_a_plain_checkpoint_starts_new_local_steps(tmp_path: Path) -> None:
    plain = built(Tied)
    optimizer = adamw_in_groups(plain)
    token_step(plain, ONE_BATCH)
    optimizer.step()
    zeroshard.save(tmp_path / "step", plain, optimizer)

    def body(rank: int) -> Any:
        ours = shard(local_steps=4, outer_optimizer=DILOCO)
        train(rank, *ours, batches(2))
        zeroshard.load(tmp_path / "step", ours[0], ours[1])
        assert ours[1].local_steps.count == 0
        return full_parameters(ours[0])

    for found in run_threads(4, body):
        assert_equal(found, copied(plain))


def save_while_training(rank: int, directory: Path) -> tuple[Any, Any]:
    data, ours = batches(5), shard(local_steps=4, outer_optimizer=DILOCO)
    train(rank, *ours, data[:3])
    before = everything(*ours)
    handle = zeroshard.save(directory, ours[0], ours[1], ema=ours[2], wait=False)
    train(rank, *ours, data[3:])
    handle.wait()
    zeroshard.load(directory, ours[0], ours[1], ema=ours[2])
    return before, everything(*ours)


def test_an_asynchronous_save_has_the_values_before_the_next_average(tmp_path: Path) -> None:
    ranks = run_processes(4, save_while_training, tmp_path / "step")
    for before, after in (ranks[0], ranks[2]):  # the others get the buffers of these before the next forward
        assert_equal(after, before)

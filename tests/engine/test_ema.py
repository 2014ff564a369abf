"""EMA: the averages of a plain loop, on the shards, for evaluation and in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage
from plain import ONE_BATCH, Tensors, batches, mesh_of, momentum, net_loss, sharded, split, take_step, token_step
from ranks import run_processes, run_threads
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from zoo import Tied, built

import zeroshard

DECAYS = [0.5, 0.9, 0.7]
OPTIONS: list[dict[str, Any]] = [{}, {"offload": "host"}, {"precision": "bf16"}]


def train(model: Any, optimizer: Any, ema: Any, rank: int, world: int) -> list[Tensors]:
    """Train; return the full parameters after each step."""
    found = []
    for batch, decay in zip(batches(len(DECAYS)), DECAYS, strict=True):
        take_step(optimizer, net_loss(model, split(batch, rank, world)))
        if ema is not None:
            ema.decay = decay
            ema.update()
        found.append(zeroshard.state_dict(model, rank=None))
    return found


def plain_average(values: list[Tensors], start: nn.Module) -> Tensors:
    """Return the averages of a plain loop, for parameters that had these values after each step."""
    trained = {name: p for name, p in start.named_parameters(remove_duplicate=False) if p.requires_grad}
    average = {name: p.detach().float().clone() for name, p in trained.items()}
    for state, decay in zip(values, DECAYS, strict=True):
        for name, value in average.items():
            value.lerp_(state[name].float(), 1 - decay)
    return {**values[-1], **average}


def close(found: Tensors, wanted: Tensors, tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@every_stage
def test_the_average_is_that_of_a_plain_loop(stage: int, options: dict[str, Any]) -> None:
    def body(rank: int) -> None:
        model, optimizer = zeroshard.shard(built(Tied), None, stage=stage)  # without an optimizer: nothing changes
        ema = zeroshard.EMA(model, 0.5)
        ema.update()
        with ema.swapped():
            close(zeroshard.state_dict(model, None), built(Tied).state_dict(), 0)
        model, optimizer = sharded(built(Tied), momentum, stage=stage, **options)
        before = zeroshard.report(model).states
        ema = zeroshard.EMA(torch.compile(model), decay=0.99)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        extra = zeroshard.report(model).states - before
        share = 4 * trained / (1 if stage == 0 else 2)
        assert share <= extra < 1.9 * share, (extra, share)  # small flats are padded
        values = train(model, optimizer, ema, rank, 2)
        wanted = plain_average(values, built(Tied))
        batch = ONE_BATCH
        with ema.swapped():
            averages = zeroshard.state_dict(model, None)
            close(averages, wanted)
            model.eval()
            with torch.no_grad():
                found = model(batch).float()
            plain = built(Tied).eval()
            plain.load_state_dict(wanted)
            tolerance = 0.1 if options.get("precision") else 1e-5
            torch.testing.assert_close(found, plain(batch), rtol=tolerance, atol=tolerance)
            model.train()
            for call in (ema.update, optimizer.step, net_loss(model, batch).backward):
                with pytest.raises(RuntimeError, match=r"inside `with ema.swapped\(\):`"):
                    call()
            with pytest.raises(RuntimeError, match="gathered"), zeroshard.gathered(model, write_rank=0):
                pass
        after, own = zeroshard.state_dict(model, None), values[-1]
        assert all(torch.equal(after[name], own[name]) for name in dict(model.named_parameters()))
        zeroshard.offload_states(model)
        with pytest.raises(RuntimeError, match="reload_states"):
            ema.update()
        held = zeroshard.report(model).memory
        assert ("averages", "device") not in held or not held["averages", "device"].now
        zeroshard.reload_states(model)
        token_step(model, split(batch, rank, 2))
        optimizer.step()
        with ema.swapped():  # not updated
            again = zeroshard.state_dict(model, None)
        assert all(torch.equal(again[name], averages[name]) for name in dict(model.named_parameters()))
        ema.copy_to_model()
        plain_model = zeroshard.unwrap(model)
        for name, parameter in plain_model.named_parameters():
            torch.testing.assert_close(parameter, nn.Parameter(wanted[name], parameter.requires_grad))
        with pytest.raises(RuntimeError, match="the model is gone or unwrapped"):
            ema.update()

    run_threads(2, body)


def test_training_is_not_changed_by_an_ema() -> None:
    def body(rank: int, stage: int) -> list[Any]:
        runs = []
        for has_ema in (False, True):
            model, optimizer = sharded(built(Tied), momentum, stage=stage, precision="bf16")
            ema = zeroshard.EMA(model, 0.9) if has_ema else None
            for batch in batches(3):
                if ema is not None:
                    with ema.swapped(), torch.no_grad():
                        model.eval()(batch)
                    model.train()
                take_step(optimizer, net_loss(model, split(batch, rank, 2)))
                if ema is not None:
                    ema.update()
            runs.append(zeroshard.state_dict(model, None))
        return runs

    for stage in (1, 3):
        for plain, averaged in run_threads(2, body, stage):
            assert all(torch.equal(plain[name], averaged[name]) for name in plain)


def test_sixteen_bit_parameters_without_masters_are_averaged_in_fp32() -> None:
    def body(rank: int) -> None:
        model = nn.Linear(5, 3).bfloat16()
        nn.init.ones_(model.weight)
        model, _ = zeroshard.shard(model)
        ema = zeroshard.EMA(model, 0.999)
        with zeroshard.gathered(model, write_rank=0):
            model.weight.data.fill_(3.0)
        for _ in range(100):
            ema.update()
        with ema.swapped():
            average = zeroshard.state_dict(model, None)["weight"]
        torch.testing.assert_close(average, torch.full((3, 5), 3 - 2 * 0.999**100).bfloat16(), rtol=0, atol=0)
        assert zeroshard.state_dict(model, None)["weight"].eq(3).all()

    run_threads(2, body)


def saved(rank: int, path: str, stage: int, precision: str | None) -> Tensors:
    model, optimizer = sharded(built(Tied), momentum, stage=stage, precision=precision)
    ema = zeroshard.EMA(model, 0.9)
    train(model, optimizer, ema, rank, 2)
    save = zeroshard.save(path, model, optimizer, ema=ema, wait=False)
    ema.update()  # not in the checkpoint
    ema.update()
    save.wait()
    zeroshard.save(path + "-without", model, optimizer)
    zeroshard.load(path, model, optimizer, ema=ema)
    with ema.swapped():
        with pytest.raises(zeroshard.CheckpointError, match="save the averages as weights"):
            zeroshard.save(path + "-wrong", model, optimizer)
        zeroshard.save(path + "-weights", model)
        return zeroshard.state_dict(model, None)


def test_averages_load_on_other_ranks_and_stages(tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    wanted = run_processes(2, saved, path, 3, "bf16")[0]

    def body(rank: int, options: dict[str, Any]) -> Tensors:
        model, optimizer = sharded(built(Tied), momentum, **options)
        ema = zeroshard.EMA(model, 0.9)
        zeroshard.load(path, model, optimizer, ema=ema)
        with ema.swapped():
            found = zeroshard.state_dict(model, None)
        with pytest.raises(zeroshard.CheckpointError, match="contains no EMA: it was saved without ema="):
            zeroshard.load(path + "-without", model, optimizer, ema=ema)
        missing = zeroshard.load(path + "-without", model, optimizer, ema=ema, strict=False).missing
        assert "embedding.weight (EMA)" in missing
        other, _ = zeroshard.shard(built(Tied))
        with pytest.raises(zeroshard.CheckpointError, match="of another model"):
            zeroshard.load(path, other, ema=ema)
        return found

    for world, options in ((1, {"stage": 0}), (3, {"stage": 1, "offload": "host"}), (2, {"stage": 3})):
        for found in run_threads(world, body, options):
            close(found, wanted, 0)
    weights = built(Tied)
    zeroshard.load(path + "-weights", weights)
    close(weights.state_dict(), wanted, 0)
    zeroshard.load(path, weights)  # the weights, not the averages
    assert not torch.equal(weights.embedding.weight, wanted["embedding.weight"])
    with pytest.raises(zeroshard.CheckpointError, match="an EMA belongs to a sharded model"):
        zeroshard.save(path, weights, ema=zeroshard.EMA(zeroshard.shard(built(Tied))[0], 0.9))


def test_averages_of_tensor_parallel_parameters(tmp_path: Path) -> None:
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    blocks = nn.Sequential(*built(Tied).blocks)

    def body(rank: int) -> None:
        model, optimizer = sharded(blocks, momentum, mesh=mesh_of((2, 2), "shard tensor"), tensor_plan=plan)
        ema = zeroshard.EMA(model, 0.5)
        first = zeroshard.state_dict(model, None)
        model(torch.linspace(-1, 1, 16).view(2, 8)).square().mean().backward()
        optimizer.step()
        ema.update()
        second = zeroshard.state_dict(model, None)
        zeroshard.save(tmp_path / "tp", model, ema=ema)
        plain = sharded(blocks, stage=1)[0]
        loaded = zeroshard.EMA(plain, 0.1)
        zeroshard.load(tmp_path / "tp", plain, ema=loaded)
        for average, one in ((ema, model), (loaded, plain)):
            with average.swapped():
                found = zeroshard.state_dict(one, None)
            close(found, {name: torch.lerp(first[name], second[name], 0.5) for name in first})

    run_threads(4, body)


def test_wrong_calls_raise() -> None:
    with pytest.raises(ValueError, match="this Linear is not a sharded model"):
        zeroshard.EMA(nn.Linear(2, 2), 0.9)
    model, _ = zeroshard.shard(nn.Linear(2, 2))
    for decay in (1.5, -0.1, float("nan"), True, "0.9", None):
        with pytest.raises(ValueError, match="expected a number from 0 to 1"):
            zeroshard.EMA(model, decay)  # type: ignore[arg-type]

    def body(rank: int) -> None:
        model, _ = zeroshard.shard(built(Tied), stage=2, timeout=20)
        ema = zeroshard.EMA(model, 0.9)
        with pytest.raises(zeroshard.RanksDisagreeError):
            if rank == 0:
                ema.update()
            model(torch.arange(4))
            model(torch.arange(4))

    run_threads(2, body)


def average_after_a_new_group(rank: int, stage: int) -> None:
    model = built(Tied)
    options: dict[str, Any] = {"stage": stage, "precision": "bf16", "bucket_size": 32}
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.blocks.parameters(), lr=0.1), **options)
    ema = zeroshard.EMA(model, 0.5)
    optimizer.add_param_group({"params": [model.head.weight]})  # which gets a master weight only now
    with ema.swapped():
        before = zeroshard.state_dict(model, rank=None)["head.weight"]
    token_step(model, ONE_BATCH)
    optimizer.step()
    ema.update()
    now = zeroshard.state_dict(model, rank=None)["head.weight"]
    with ema.swapped():
        average = zeroshard.state_dict(model, rank=None)["head.weight"]
    assert not torch.equal(now, before)
    torch.testing.assert_close(average, (before + now) / 2)


@at_stages(1, 3)
def test_a_parameter_that_gets_a_master_weight_later_is_averaged(stage: int) -> None:
    run_threads(2, average_after_a_new_group, stage)


def average_of_another_engine(rank: int, stage: int) -> None:
    model, _ = zeroshard.shard(built(Tied), stage=stage)
    ema = zeroshard.EMA(model, 0.5)
    kept = vars(model)["_zeroshard"].engine  # as a user keeps it with the old optimizer
    model = zeroshard.unwrap(model)
    zeroshard.shard(model, stage=stage)
    for call in (ema.update, lambda: ema.swapped().__enter__()):
        with pytest.raises(RuntimeError, match="gone or unwrapped"):
            call()
    del kept


@at_stages(1, 3)
def test_an_average_belongs_to_one_shard_call(stage: int) -> None:
    run_threads(2, average_of_another_engine, stage)


def update_with_own_decay(rank: int) -> None:
    model, _ = zeroshard.shard(built(Tied), stage=3)
    ema = zeroshard.EMA(model, 0.5)
    ema.decay = 0.5 + rank / 10
    with pytest.raises(zeroshard.RanksDisagreeError, match="decay"):
        ema.update()
        zeroshard.state_dict(model)


def test_ranks_with_different_decays_are_told() -> None:
    run_threads(2, update_with_own_decay)

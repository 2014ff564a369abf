"""Nothing is left behind: not by the import, not by unwrap(), not by del."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
import torch.distributed as dist
from live import live_beyond, live_bytes
from pairs import every_stage
from plain import (
    ONE_BATCH,
    adamw,
    assert_close,
    assert_equal,
    batches,
    copied,
    net_loss,
    run_plain,
    sharded,
    split,
    take_step,
    train_step,
)
from ranks import run_processes, run_threads
from torch import nn
from zoo import Net, make_net

import zeroshard

STAGES = [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------ the import


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )


def test_import_prints_and_starts_nothing_and_leaves_torch_as_it_is_and_one_rank_trains() -> None:
    done = run_python(
        """
        import threading, types
        import torch, torch.distributed, torch.nn.functional, torch.utils.checkpoint, torch.optim
        import torch.distributed.tensor, torch.distributed.device_mesh

        def surface():
            places = (torch, torch.nn.functional, torch.nn.Module, torch.nn.Parameter, torch.nn.utils, torch.Tensor,
                      torch.optim.Optimizer, torch.optim.AdamW, torch.autograd, torch.distributed)
            return {(str(place), name): id(value) for place in places for name, value in vars(place).items()
                    if not name.startswith("__") and name != "reduce_op" and not isinstance(value, types.ModuleType)}

        before, threads = surface(), threading.enumerate()
        defaults = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), torch.get_rng_state()
        import zeroshard
        after = surface()
        changed = [key for key in before | after if before.get(key) != after.get(key)]
        assert not changed, changed
        assert threading.enumerate() == threads
        assert not torch.distributed.is_initialized()
        now = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
        assert now == defaults[:3]
        assert torch.equal(torch.get_rng_state(), defaults[3])

        model = torch.nn.Linear(3, 2)
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert not torch.distributed.is_initialized()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@every_stage
def test_sharding_and_training_patch_no_class_and_no_function(stage: int) -> None:
    places = (torch, nn.functional, nn.Module, nn.Parameter, nn.Linear, torch.Tensor, torch.optim.AdamW, Net)

    def surface() -> dict:
        return {(place, name): id(value) for place in places for name, value in vars(place).items()}

    def body(rank: int):
        model, optimizer = zeroshard.shard(model_of[rank], adamw(model_of[rank]), stage=stage)
        train_step(model, optimizer, ONE_BATCH)
        return type(model), type(model.head), type(optimizer.inner)

    plain = make_net()
    model_of = [copy.deepcopy(plain) for _ in range(2)]
    train_step(plain, adamw(plain), ONE_BATCH)  # whatever torch itself loads or wraps at the first use
    run_threads(1, lambda rank: None)
    before = surface()
    classes = run_threads(2, body)
    assert surface() == before
    assert classes == [(Net, nn.Linear, torch.optim.AdamW)] * 2


def test_two_sharded_models_in_one_process_do_not_meet() -> None:
    first, second, data = make_net(1), make_net(2, width=9), batches(3)

    def body(rank: int):
        a, b = sharded(first, adamw, stage=3), sharded(second, adamw, stage=2)
        for batch in data:  # interleaved
            losses = [net_loss(model, split(batch, rank, 2)) for model, _ in (a, b)]
            for loss, (_, optimizer) in zip(losses, (a, b), strict=True):
                take_step(optimizer, loss)
        return [copied(zeroshard.unwrap(model)) for model, _ in (a, b)]

    wanted = [run_plain(model, adamw, data) for model in (first, second)]
    for found in run_threads(2, body):
        for ours, plain in zip(found, wanted, strict=True):
            assert_close(ours, plain)


# -------------------------------------------------------------------------------------------------- unwrap


def outside(model: nn.Module) -> dict:
    """What a user can see of a module tree that sharding might have changed."""
    return {
        name: (
            type(module),
            sorted(vars(module)),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._backward_hooks),
            len(module._load_state_dict_post_hooks),
            len(module._state_dict_hooks),
            {
                key: (type(p), p.shape, p.dtype, p.stride(), p.requires_grad, sorted(vars(p)))
                for key, p in params(module)
            },
        )
        for name, module in model.named_modules()
    }


def params(module: nn.Module):
    return module.named_parameters(recurse=False)


@pytest.mark.parametrize("precision", [None, "bf16"])
@every_stage
def test_unwrap_gives_back_the_plain_model_as_it_was(stage: int, precision: str | None) -> None:
    plain = make_net()

    def body(rank: int):
        model = copy.deepcopy(plain)
        before = dict(model.named_parameters())
        sharded, _ = zeroshard.shard(model, adamw(model), stage=stage, precision=precision)
        returned = zeroshard.unwrap(sharded)
        assert returned is model
        assert all(p is before[name] for name, p in model.named_parameters())
        return outside(model), copied(model)

    for seen, parameters in run_threads(2, body):
        assert seen == outside(plain)
        assert_equal(parameters, dict(plain.named_parameters()))


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_training_goes_on_plainly_after_unwrap_with_the_optimizer(stage: int, precision: str | None) -> None:
    plain, data = make_net(), batches(6)

    def body(rank: int):
        model = copy.deepcopy(plain)
        given = adamw(model)
        model, optimizer = zeroshard.shard(model, given, stage=stage, precision=precision)
        for batch in data[:3]:
            train_step(model, optimizer, split(batch, rank, 2))
        model, optimizer = zeroshard.unwrap(model, optimizer)
        assert optimizer is given
        assert [p for g in optimizer.param_groups for p in g["params"]] == list(model.parameters())
        for batch in data[3:]:
            train_step(model, optimizer, batch)  # the whole batch, on each rank alone
        copy.deepcopy(model)
        return copied(model)

    wanted = run_plain(plain, adamw, data)
    for parameters in run_threads(2, body):
        assert_close(parameters, wanted, 1e-6 if precision is None else 0.02)
        assert all(p.dtype == torch.float32 for p in parameters.values())


@every_stage
def test_a_model_can_be_sharded_again_after_unwrap_in_another_stage(stage: int) -> None:
    plain, data = make_net(), batches(4)

    def body(rank: int):
        model = copy.deepcopy(plain)
        optimizer = adamw(model)
        for batch, here in zip(data, (stage, 3 - stage, stage, 0), strict=True):
            model, optimizer = zeroshard.shard(model, optimizer, stage=here)
            train_step(model, optimizer, split(batch, rank, 2))
            model, optimizer = zeroshard.unwrap(model, optimizer)
        return copied(model)

    wanted = run_plain(plain, adamw, data)
    for parameters in run_threads(2, body):
        assert_close(parameters, wanted)


def test_sharding_twice_is_an_error_that_names_the_parameter() -> None:
    def body(rank: int):
        model, _ = zeroshard.shard(make_net(), stage=3)
        with pytest.raises(ValueError, match=r"is sharded already.*unwrap"):
            zeroshard.shard(model, stage=3)

    run_threads(2, body)


# ------------------------------------------------------------------------------------------------------ del


def warm_up(data: list[torch.Tensor]) -> None:
    """Whatever torch imports at the first use may leave cycles that hold the frames, and the models, of its callers."""
    model = make_net()
    train_step(model, adamw(model), data[0])
    dist.all_reduce(torch.ones(1))


def train_and_delete(rank: int, world: int, stage: int, precision: str | None, way: str, times: int):
    """With the cycle collector off: bytes and storages held after each round, and whether the objects have gone."""
    data = batches(2, seed=4)
    held, gone = [], []
    warm_up(data)
    gc.disable()
    gc.freeze()  # what was there before, garbage too, is neither counted nor looked through: some 300,000 objects
    try:
        before = live_bytes()
        for _ in range(times):
            model, optimizer = sharded(make_net(width=40), adamw, stage=stage, precision=precision)
            for batch in data:
                train_step(model, optimizer, split(batch, rank, world))
            with zeroshard.gathered(model):
                pass
            watched = {
                "model": weakref.ref(model),
                "parameter": weakref.ref(model.head.weight),
                "engine": weakref.ref(model._zeroshard.engine),
                "unit": weakref.ref(model._zeroshard.engine.units[0]),
                "optimizer": weakref.ref(optimizer),
            }
            if way == "unwrap":
                model, optimizer = zeroshard.unwrap(model, optimizer)
                del watched["optimizer"]
            elif way == "forward without backward":
                net_loss(model, split(data[0], rank, world))
            del model, optimizer
            gone.append([name for name, ref in watched.items() if ref() is not None])
            held.append(live_beyond(before))
    finally:
        gc.unfreeze()
        gc.enable()
    return held, gone


WAYS = ["del", "unwrap", "forward without backward"]


@pytest.mark.parametrize(
    ("stage", "precision", "way"),
    [(stage, (None, "bf16")[(stage + number) % 2], way) for stage in STAGES for number, way in enumerate(WAYS)],
)
def test_del_frees_everything_with_the_cycle_collector_off(stage: int, precision: str | None, way: str) -> None:
    for held, gone in run_processes(2, train_and_delete, 2, stage, precision, way, 1, fresh=True):
        assert gone == [[]], "still alive"
        assert held == [0]


@every_stage
def test_five_times_in_a_row_nothing_grows(stage: int) -> None:
    for held, gone in run_processes(2, train_and_delete, 2, stage, "bf16", "del", 5, fresh=True):
        assert gone == [[]] * 5
        assert held == [0] * 5


def delete_on_a_failure(rank: int, stage: int):
    """An exception in the user's code, caught, with the cycle collector off: nothing is kept by it either."""
    warm_up(batches(1))
    gc.disable()
    gc.freeze()
    try:
        before = live_bytes()
        model, optimizer = sharded(make_net(width=40), adamw, stage=stage)
        try:
            model("no tokens")
        except (TypeError, AttributeError, RuntimeError) as error:
            text = str(error)
        del model, optimizer
        return live_beyond(before), text
    finally:
        gc.unfreeze()
        gc.enable()


@every_stage
def test_del_frees_everything_after_a_failed_forward(stage: int) -> None:
    for held, _ in run_processes(2, delete_on_a_failure, stage, fresh=True):
        assert held == 0


@every_stage
def test_no_hook_of_the_library_stays_on_an_output_that_outlives_the_model(stage: int) -> None:
    def body(rank: int):
        model, _ = zeroshard.shard(copy.deepcopy(plain), stage=stage)
        output = model(ONE_BATCH).detach()
        watched = weakref.ref(model._zeroshard.engine)
        del model
        return watched() is None, output.sum().isfinite().item()

    plain = make_net()
    assert run_threads(2, body) == [(True, True)] * 2


def test_the_old_name_of_unwrap_says_the_new_one() -> None:
    model, _ = zeroshard.shard(nn.Linear(2, 2))
    with pytest.warns(DeprecationWarning, match=r"zeroshard\.unshard\(\) is now zeroshard\.unwrap\(\)"):
        assert type(zeroshard.unshard(model)) is nn.Linear

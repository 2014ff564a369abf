"""What a rank holds moment by moment, how long it waits, and single parameters and states read whole."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from plain import batches, masters, net_loss
from ranks import run_processes, run_threads
from zoo import make_net

import zeroshard

STAGES = (0, 1, 2, 3)


def sharded(stage: int, **options):
    model = make_net()
    return zeroshard.shard(model, torch.optim.Adam(model.parameters()), stage=stage, timeout=20, **options)


def step(model, optimizer, tokens) -> None:
    optimizer.scale(net_loss(model, tokens)).backward()
    optimizer.step()
    optimizer.zero_grad()


def profiled(rank: int, stage: int):
    model, optimizer = sharded(stage)
    tokens = batches(1, 4)[0]
    step(model, optimizer, tokens)
    before = zeroshard.report(model)
    with zeroshard.profile(model) as profile:
        profile.phase("all of it")
        step(model, optimizer, tokens)
    unseen = len(profile.moments)
    step(model, optimizer, tokens)
    return profile, before, zeroshard.report(model), len(profile.moments) - unseen


@pytest.mark.parametrize("stage", STAGES)
def test_the_moments_of_a_step_lead_from_what_was_held_to_the_peak_and_back(stage: int) -> None:
    for profile, before, after, more in run_processes(2, profiled, stage):
        held = {kind: nbytes.now for (kind, _), nbytes in before.memory.items()}
        assert profile.moments[0].held == held
        assert {kind: n for kind, n in profile.moments[-1].held.items() if n} == {k: n for k, n in held.items() if n}
        for (kind, _), nbytes in after.memory.items():
            if kind != "staging":  # of building alone
                assert max(moment.held.get(kind, 0) for moment in profile.moments) == nbytes.peak
        assert profile.phases[0][0] == "all of it"
        assert [moment.seconds for moment in profile.moments] == sorted(moment.seconds for moment in profile.moments)
        assert 0 < profile.waited < profile.seconds
        assert more == 0  # what comes after is not taken down


def late(rank: int) -> float:
    model, optimizer = sharded(3)
    tokens = batches(1, 4)[0]
    for _ in range(3):  # from then on ranks meet in collectives alone, not to agree on their order
        step(model, optimizer, tokens)
    with zeroshard.profile(model) as profile:
        if rank == 1:
            time.sleep(0.3)
        step(model, optimizer, tokens)
    return profile.waited


def test_waiting_for_a_late_rank_is_counted_where_it_is_waited() -> None:
    first, second = run_processes(2, late)
    assert first > second + 0.2


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_read_whole_is_the_masters_value(stage: int, precision: str | None) -> None:
    plain = make_net()

    def body(rank: int):
        model = copy.deepcopy(plain)
        model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=stage, precision=precision)
        return masters(model)

    for parameters in run_threads(2, body):
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameters[name], parameter)  # fp32, though computation may be in 16 bits


def test_a_parameter_that_is_not_there_is_refused_with_the_nearest() -> None:
    model, _ = zeroshard.shard(make_net())
    with pytest.raises(KeyError, match="did you mean 'head\\.weight'"):
        zeroshard.full_parameter(model, "head.wait")


def test_states_are_described_without_loading_them() -> None:
    def body(rank: int):
        model, optimizer = sharded(3)
        nothing = optimizer._states.describe()
        step(model, optimizer, batches(1, 4)[0])
        return nothing, optimizer._states.describe(), [name for name, _ in model.named_parameters()]

    for nothing, described, names in run_threads(3, body):
        assert nothing == {name: {} for name in names}
        assert list(described) == names
        for state in described.values():
            assert state["exp_avg"] is torch.float32 and state["step"] == 1


def test_the_loss_scale_is_part_of_the_state_under_fp16() -> None:
    def body(rank: int):
        model, optimizer = sharded(2, precision="fp16", loss_scale=2.0**40)  # overflows at once
        for _ in range(3):
            step(model, optimizer, batches(1, 2)[0])
        state = optimizer.state_dict()
        _, other = sharded(2, precision="fp16")
        other.load_state_dict(state)
        return state["loss_scale"], other.loss_scale_state(), float(other.loss_scale)

    for saved, loaded, scale in run_threads(2, body):
        assert saved == loaded
        assert scale == 2.0**37

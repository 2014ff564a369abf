"""Several optimizers on one model, each for a part of the parameters, give the numbers of the plain loop."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import at_stages
from plain import Tensors, masters, sharded
from ranks import RanksFailed, run_processes, run_threads
from torch import nn
from two_optimizers import (
    MAKERS,
    PlainSide,
    ShardedSide,
    Trace,
    adam_and_sgd,
    assert_same_as_plain,
    assert_same_trace,
    batches,
    gan_loop,
    model_of_seed,
    random_loop,
    rare_loop,
    run,
    split_modules,
    together_loop,
)
from zoo import built

import zeroshard
from zeroshard.engine.last_backward import LastBackward

UNITS = ("gen.*", "disc.*")
STAGES = pytest.mark.parametrize("stage", range(4))


@STAGES
def test_the_loop_of_a_gan_with_clipping_gives_the_plain_numbers(stage: int) -> None:
    assert_same_as_plain("adam_and_sgd", gan_loop(4, clips=True), 2, stage=stage, units=UNITS, bucket_size=40)


@STAGES
def test_optimizers_that_share_every_unit_are_stepped_one_after_the_other(stage: int) -> None:
    assert_same_as_plain("mixed_units", together_loop(4), 3, stage=stage, units=UNITS, bucket_size=40)
    assert_same_as_plain("muon_and_adamw", together_loop(3), 2, stage=stage)


@STAGES
def test_an_optimizer_that_is_stepped_rarely_accumulates_meanwhile(stage: int) -> None:
    assert_same_as_plain("three", rare_loop(6), 2, stage=stage, bucket_size=40)


@STAGES
@pytest.mark.parametrize("seed", [1, 8])
def test_operations_in_any_order_give_the_plain_numbers(stage: int, seed: int) -> None:
    # seed 1: no_sync, toggled parameters, a closure; seed 8: a graph that is older than another optimizer's step
    options: dict[str, Any] = {"backwards": 1} if seed == 8 else {}
    operations = [operation for operation in random_loop(seed, 30) if operation[0] != "fake" or operation[1] == 1]
    assert_same_as_plain("adam_and_sgd", operations, 2, stage=stage, units=UNITS, **options)


@at_stages(1, 2, 3)
def test_offloaded_states_are_updated_per_optimizer(stage: int) -> None:
    assert_same_as_plain("adam_and_sgd", gan_loop(4), 2, stage=stage, offload="host", units=UNITS)
    assert_same_as_plain("mixed_units", rare_loop(6), 2, stage=stage, offload={"optimizer": ("host", 0.5)})


def rank_trace(rank: int, make: str, operations: list[Any], options: dict[str, Any]) -> Trace:
    return run(ShardedSide(model_of_seed(), make, 2, rank, options), operations)


@at_stages(1, 3)
def test_processes_give_the_plain_numbers(stage: int) -> None:
    operations = [*gan_loop(3, clips=True), *rare_loop(3)]
    plain = run(PlainSide(model_of_seed(), "adam_and_sgd", 2), operations)
    assert_same_trace(plain, run_processes(2, rank_trace, "adam_and_sgd", operations, {"stage": stage}))


def test_a_graph_of_changed_parameters_is_refused_as_in_plain_pytorch() -> None:
    # the first optimizer changes the generator before its backward
    operations = [("backward", "gen", batches(1)[0]), ("fake", 0, batches(1)[0])]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(PlainSide(model_of_seed(), "adam_and_sgd", 2), operations)
    for stage in range(4):
        with pytest.raises(RanksFailed, match="modified by an inplace operation"):
            run_threads(2, rank_trace, "adam_and_sgd", operations, {"stage": stage})


# -------------------------------------------------------------------------------------------- 16 bits and tiers


def adams(model: nn.Module, together: bool) -> list[torch.optim.Optimizer]:
    """Adam for two groups, or two of them."""
    first, second = split_modules(model)
    if together:
        return [torch.optim.AdamW([{"params": first}, {"params": second, "lr": 0.05}], lr=0.02)]
    return [torch.optim.AdamW(first, lr=0.02), torch.optim.AdamW(second, lr=0.05)]


def train_adams(rank: int, together: bool, options: dict[str, Any]) -> Tensors:
    model: Any = model_of_seed()
    model, optimizers = zeroshard.shard(model, adams(model, together), timeout=20, units=UNITS, **options)
    for batch in batches(5):
        loss = model(batch.chunk(2)[rank], "both")
        optimizers[0].scale(loss).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return masters(model)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("stage", "offload"),
    [(0, None), (1, None), (2, "host"), (3, None), (3, {"optimizer": "disk"})],
)
def test_two_optimizers_update_masters_as_one_with_two_groups(
    stage: int, offload: Any, precision: str, tmp_path: Path
) -> None:
    options = {"stage": stage, "precision": precision, "loss_scale": 256.0}
    options |= {"offload": offload if not isinstance(offload, dict) else {**offload, "directory": str(tmp_path)}}
    one, two = (run_threads(2, train_adams, together, options)[0] for together in (True, False))
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


class Steep(nn.Module):
    """Two layers; the second one's gradient can be made too large for fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.steep = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor, slopes: tuple[float, float]) -> torch.Tensor:
        return self.flat(x).float().mean() * slopes[0] + self.steep(x).float().mean() * slopes[1]


@at_stages(0, 3)
def test_one_loss_scale_is_shared_as_with_torchs_scaler(stage: int) -> None:
    """Each optimizer skips its own overflow; the scale is halved once for both, as by scaler.update()."""
    model = built(Steep)
    slopes = [(1.0, 1.0), (1.0, 1e6), (1e6, 1e6), (1.0, 1.0)]

    def body(rank: int) -> tuple[list[float], list[torch.Tensor]]:
        sharded: Any = copy.deepcopy(model)
        optimizers: Any = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (sharded.flat, sharded.steep)]
        sharded, optimizers = zeroshard.shard(sharded, optimizers, stage=stage, precision="fp16", loss_scale=1024.0)
        scales = []
        for slope in slopes:
            optimizers[1].scale(sharded(torch.ones(2, 4), slope)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            scales.append(optimizers[0].loss_scale.item())
            assert optimizers[1].loss_scale_state() == optimizers[0].loss_scale_state()
        return scales, [zeroshard.full_parameter(sharded, f"{name}.weight") for name in ("flat", "steep")]

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (plain.flat, plain.steep)]
    expected = []
    for flat, steep in slopes:
        infinite = [value * 1024 > 65504 for value in (flat, steep)]  # of an fp16 gradient
        scaler.scale(plain(torch.ones(2, 4), (flat, steep))).backward()
        for optimizer, is_infinite in zip(optimizers, infinite, strict=True):
            if is_infinite:
                optimizer.param_groups[0]["params"][0].grad.fill_(float("inf"))
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        expected.append(scaler.get_scale())
    for scales, weights in run_threads(2, body):
        assert scales == expected == [1024.0, 512.0, 256.0, 256.0]
        torch.testing.assert_close(weights, [plain.flat.weight.data, plain.steep.weight.data], rtol=1e-3, atol=1e-4)


# -------------------------------------------------------------------------------------------- states and memory


@pytest.mark.parametrize(("stage", "world"), [(3, 3), (1, 2), (0, 1)])
def test_a_checkpoint_has_the_states_of_both_and_continues_anywhere(stage: int, world: int, tmp_path: Path) -> None:
    before, after = gan_loop(2), [("zero", 0), ("zero", 1), *rare_loop(3)]
    plain = PlainSide(model_of_seed(), "adam_and_sgd", 1)
    run(plain, before)
    expected = run(plain, after)
    path = tmp_path / "step-2"

    def save(rank: int) -> None:
        side = ShardedSide(model_of_seed(), "adam_and_sgd", 2, rank, {"stage": 2})
        run(side, before)
        for optimizer, inner in zip(side.optimizers, MAKERS["adam_and_sgd"](model_of_seed()), strict=True):
            state = optimizer.state_dict()
            inner.load_state_dict(state)  # a plain optimizer takes it
        zeroshard.save(path, side.model, side.optimizers)

    def load(rank: int) -> Trace:
        side = ShardedSide(model_of_seed(), "adam_and_sgd", world, rank, {"stage": stage})
        zeroshard.load(path, side.model, side.optimizers)
        return run(side, after)

    run_threads(2, save)
    assert_same_trace(expected, run_threads(world, load))
    unsharded = PlainSide(model_of_seed(), "adam_and_sgd", 1)
    zeroshard.load(path, unsharded.model, unsharded.optimizers)
    assert_same_trace(expected, [run(unsharded, after)])


def test_a_checkpoint_of_one_optimizer_continues_with_two_of_its_class(tmp_path: Path) -> None:
    model, (one,) = sharded(model_of_seed(), partial(adams, together=True))
    model(batches(1)[0], "both").backward()
    one.step()
    zeroshard.save(tmp_path / "one", model, one)
    other: Any = model_of_seed()
    other, (first, second) = zeroshard.shard(other, tuple(adams(other, together=False)))
    zeroshard.load(tmp_path / "one", other, [first, second])
    for name, owner in (("gen.0.0.weight", first), ("disc.0.0.weight", second)):
        torch.testing.assert_close(zeroshard.full_state(owner, name), zeroshard.full_state(one, name))
    with pytest.raises(zeroshard.CheckpointError, match="other param groups"):
        zeroshard.load(tmp_path / "one", other, [second, first])
    with pytest.raises(zeroshard.CheckpointError, match="given twice"):
        zeroshard.save(tmp_path / "twice", other, [first, first])
    wrong, optimizers = sharded(model_of_seed(), adam_and_sgd)
    with pytest.raises(zeroshard.CheckpointError, match=r"saved with the optimizer AdamW, expected Adam \+ SGD"):
        zeroshard.load(tmp_path / "one", wrong, optimizers)


def test_a_save_warns_of_gradients_that_an_optimizer_still_accumulates(tmp_path: Path) -> None:
    model, optimizers = sharded(model_of_seed(), partial(adams, together=False))
    model(batches(1)[0], "both").backward()
    optimizers[0].step()
    with pytest.warns(UserWarning, match=r"optimizer 1 \(AdamW\) has gradients of backwards since its last step"):
        zeroshard.save(tmp_path / "early", model, optimizers)


@at_stages(1, 3)
def test_memory_and_traffic_are_reported_for_all_and_freed_with_the_last(stage: int) -> None:
    def body(rank: int, together: bool) -> tuple[Any, ...]:
        model: Any = model_of_seed()
        model, optimizers = zeroshard.shard(model, adams(model, together), stage=stage)
        for batch in batches(2):
            model(batch, "spare").backward()  # uses all parameters
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        report = zeroshard.report(model)
        kinds = {kind: held.now for (kind, tier), held in report.memory.items() if tier == "device"}
        if len(optimizers) > 1:
            with pytest.raises(ValueError, match="Pair has 2 optimizers, got 1"):
                zeroshard.unwrap(model, optimizers[0])
        plain = zeroshard.unwrap(model, optimizers)
        assert [type(optimizer) for optimizer in plain[1]] == [torch.optim.AdamW] * len(optimizers)
        assert report.routing is not None
        return kinds["gradients"], kinds["optimizer states"], sorted(report.routing.flat), set(report.collectives)

    one, two = (run_threads(2, body, together)[0] for together in (True, False))
    assert two[0] == one[0] == 0
    assert two[1] >= one[1] > 0  # padding differs
    assert two[2:] == one[2:]


def test_the_number_of_backwards_is_learnt_for_each_optimizers_turn() -> None:
    prediction = LastBackward(backwards=None)
    found: list[bool] = []
    for _ in range(4):  # two backwards for the second optimizer, one for the first, as in a GAN; a third is stepped too
        for optimizer, backwards in ((1, 2), (0, 1)):
            found += [prediction.on_backward(number, needs_grad_sync=True) for number in range(1, backwards + 1)]
            prediction.on_step(optimizer, has_backwards=True)
            prediction.on_step(2 + optimizer, has_backwards=False)
    assert found[-3:] == [False, True, True]


# ------------------------------------------------------------------------------------------------------- errors


def test_what_cannot_be_is_refused() -> None:
    model: Any = model_of_seed()
    first, second = split_modules(model)
    with pytest.raises(ValueError, match=r"'scale' is in optimizer 0 \(SGD\) and in optimizer 1 \(Adam\)"):
        zeroshard.shard(model, [torch.optim.SGD(first), torch.optim.Adam(first)])
    with pytest.raises(ValueError, match="the list of optimizers is empty"):
        zeroshard.shard(model, [])
    with pytest.raises(TypeError, match="got str"):
        zeroshard.shard(model, [torch.optim.SGD(first), "adam"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="stage='auto' plans for one optimizer, got 2"):
        zeroshard.shard(model, adams(model, together=False), stage="auto", inputs=batches(1)[0])
    spare = list(model.spare.parameters())
    without = [p for p in second if not any(p is other for other in spare)]
    model, (one, two) = zeroshard.shard(model, [torch.optim.SGD(first), torch.optim.SGD(without)])
    with pytest.raises(ValueError, match=r"'disc.0.0.weight' is already in a parameter group of optimizer 1"):
        one.add_param_group({"params": [without[0]]})
    one.add_param_group({"params": [spare[0]]})
    two.add_param_group({"params": [spare[1]]})  # both are in one flat
    with pytest.raises(ValueError, match=r"'spare.weight' is already in a parameter group of optimizer 0"):
        two.add_param_group({"params": [spare[0]]})


@STAGES
def test_parameters_added_later_belong_to_their_optimizer(stage: int) -> None:
    def parts(model: Any) -> tuple[list[torch.optim.Optimizer], list[nn.Parameter]]:
        sgds = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model.gen, model.disc)]
        return [*sgds], list(model.spare.parameters())

    operations = [("backward", "spare", batches(1)[0]), ("clip", 0, 0.01), ("step", 0), ("zero", 0), ("step", 1)]
    operations += [("look",), ("backward", "both", batches(1)[0]), ("zero", 1), ("step", 0), ("step", 1)]
    plain = PlainSide(model_of_seed(), "adam_and_sgd", 2)
    plain.optimizers, added = parts(plain.model)
    for optimizer, parameter in zip(plain.optimizers, added, strict=True):
        optimizer.add_param_group({"params": [parameter]})

    def body(rank: int) -> Trace:
        side = ShardedSide(model_of_seed(), "adam_and_sgd", 2, rank, {"stage": stage})
        model: Any = model_of_seed()
        optimizers, added = parts(model)
        side.model, side.optimizers = zeroshard.shard(model, optimizers, stage=stage)
        for optimizer, parameter in zip(side.optimizers, added, strict=True):
            optimizer.add_param_group({"params": [parameter]})
        return run(side, operations)

    assert_same_trace(run(plain, operations), run_threads(2, body))


@at_stages(0, 3)
def test_ranks_that_step_or_clear_different_optimizers_are_told(stage: int) -> None:
    def body(rank: int, name: str) -> None:
        side = ShardedSide(model_of_seed(), "adam_and_sgd", 2, rank, {"stage": stage})
        run(side, [("backward", "both", batches(1)[0]), ("step", 0), (name, rank), ("backward", "both", batches(1)[0])])
        side.optimizers[0].step()

    with pytest.raises(RanksFailed, match="step of optimizer"):
        run_threads(2, body, "step")
    with pytest.raises(RanksFailed, match="some ranks have cleared gradients"):
        run_threads(2, body, "zero")


def adafactor_beside_asserted(rank: int, elementwise: bool | None) -> Tensors:
    model = built(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)))
    weights, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    made = [torch.optim.Adafactor(weights, lr=0.1), torch.optim.SGD(biases, lr=0.1)]
    model, optimizers = zeroshard.shard(model, made, stage=3, elementwise=elementwise)
    model(torch.ones(2, 6)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return zeroshard.state_dict(model, rank=None)


def test_an_assertion_for_one_optimizer_does_not_put_another_on_slices() -> None:
    """``elementwise`` is an option of the model; Adafactor is known to need whole parameters."""
    tried, asserted = (run_threads(2, adafactor_beside_asserted, value)[0] for value in (None, True))
    assert all(torch.equal(tried[name], asserted[name]) for name in tried)

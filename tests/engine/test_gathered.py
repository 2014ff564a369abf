"""gathered(): inside it the model is a plain model, and nothing of it is left over afterwards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage, pairwise
from plain import (
    ONE_BATCH,
    Tensors,
    assert_close,
    assert_equal,
    assert_same_training,
    batches,
    full_parameters,
    masters,
    momentum,
    net_loss,
    numbers,
    run_plain,
    sgd,
    sharded,
    shares,
    split,
    square_steps,
    take_step,
    token_step,
    train_step,
    train_steps,
)
from ranks import run_threads
from torch import nn
from zoo import make_net

import zeroshard
from zeroshard.engine import param_access, param_versions

STAGES = [0, 1, 2, 3]
PLACES: list[dict[str, Any]] = [{}, {"offload": "host"}, {"precision": "bf16"}]
NAME = "blocks.1.up.weight"


def shard(plain: nn.Module, stage: int, **options: Any) -> tuple[nn.Module, Any]:
    return sharded(plain, momentum, stage=stage, **options)


@pytest.mark.parametrize("options", PLACES, ids=str)
@every_stage
def test_parameters_are_fresh_after_every_step_that_follows_a_block(stage: int, options: dict[str, Any]) -> None:
    plain = make_net()

    def body(rank: int) -> None:
        model, optimizer = shard(plain, stage, **options)
        with zeroshard.gathered(model):
            pass
        for batch in batches(3):
            train_step(model, optimizer, split(batch, rank, 2))
            if stage < 3:
                seen = {name: value.clone() for name, value in model.state_dict().items()}
            with zeroshard.gathered(model):
                inside = {name: value.clone() for name, value in model.state_dict().items()}
            true = full_parameters(model)
            for name in true:
                assert torch.equal(inside[name], true[name].to(inside[name].dtype)), name
                assert stage == 3 or torch.equal(seen[name], inside[name]), name

    run_threads(2, body)


@pytest.mark.guarantee("gathered()")
@pytest.mark.parametrize(("stage", "options", "world"), pairwise(STAGES, PLACES, [1, 2]), ids=str)
def test_a_forward_inside_sees_edits_and_leaves_the_values(stage: int, options: dict[str, Any], world: int) -> None:
    plain, batch = make_net(), ONE_BATCH
    reference = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.5)
    edited_loss = net_loss(reference, batch)

    def body(rank: int) -> None:
        model, optimizer = shard(plain, stage, **options)
        before = full_parameters(model)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if options.get("precision") else {}
        for write_rank in (None, 0):
            with zeroshard.gathered(model, write_rank=write_rank), torch.no_grad():
                net_loss(model, batch)  # a look at the output
                for parameter in model.parameters():
                    parameter.mul_(0.5)
                torch.testing.assert_close(net_loss(model, batch), edited_loss.detach(), **tolerance)
                inside = {name: value.clone() for name, value in model.state_dict().items()}
                for parameter in model.parameters():
                    parameter.mul_(2)  # and back: exact in binary
            assert_equal(full_parameters(model), before)
            for name, value in before.items():
                assert torch.equal(inside[name], (value / 2).to(inside[name].dtype)), name
        train_step(model, optimizer, split(batch, rank, world))

    run_threads(world, body)


@pytest.mark.guarantee("gathered()")
@every_stage
def test_training_inside_a_block_is_plain_until_the_step(stage: int) -> None:
    """Forward inside, backward inside or outside, forward before and backward inside: the plain gradients."""

    def loop(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
        with zeroshard.gathered(model):
            token_step(model, data[0])
            with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) inside .*gathered.*Leave the block"):
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        with zeroshard.gathered(model):
            loss = net_loss(model, data[1])
        take_step(optimizer, loss)
        loss = net_loss(model, data[2])
        with zeroshard.gathered(model):
            loss.backward()
        optimizer.step()

    assert_same_training(2, make_net(), momentum, batches(3), loop, stages=[stage], plain_loop=train_steps)


@pytest.mark.parametrize("options", PLACES, ids=str)
@every_stage
def test_a_block_in_a_forward_hook_changes_no_number(stage: int, options: dict[str, Any]) -> None:
    plain, data = make_net(), batches(4)

    def body(rank: int, logs: bool) -> list[float]:
        model, optimizer = shard(plain, stage, **options)

        def log(module: nn.Module, args: Any, output: Any) -> None:
            with zeroshard.gathered(model):
                norms = [parameter.detach().norm() for parameter in model.parameters()]
                assert torch.stack(norms).isfinite().all()

        if logs:
            model.blocks[0].register_forward_hook(log)
        return [train_step(model, optimizer, split(batch, rank, 2)) for batch in data]

    assert run_threads(2, body, True) == run_threads(2, body, False)


def test_a_backward_that_needs_a_blocks_values_afterwards_says_so() -> None:
    plain = make_net()

    def body(rank: int) -> None:
        model, _ = shard(plain, 3)
        with zeroshard.gathered(model):
            inside = model.get_parameter(NAME).pow(2).sum()
            inside.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=rf"{NAME}.*inside the block"):
            inside.backward()

    run_threads(2, body)


@every_stage
def test_a_graph_made_of_edits_that_are_undone_is_refused(stage: int) -> None:
    plain = make_net()

    def body(rank: int) -> None:
        model, _ = shard(plain, stage)
        with zeroshard.gathered(model):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            loss = net_loss(model, ONE_BATCH)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_threads(2, body)


@every_stage
def test_values_written_before_an_exception_are_gone_also_where_a_graph_is_kept(stage: int) -> None:
    plain, batch = make_net(), ONE_BATCH

    def body(rank: int) -> Tensors:
        model, optimizer = shard(plain, stage)
        loss = net_loss(model, batch)  # keeps some units in memory
        with pytest.raises(ZeroDivisionError), zeroshard.gathered(model, write_rank=0), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            _ = 1 / 0
        with zeroshard.gathered(model):
            inside = {name: value.clone() for name, value in model.named_parameters()}
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        train_step(model, optimizer, split(batch, rank, 2))
        return inside

    for inside in run_threads(2, body):
        assert_equal(inside, dict(plain.named_parameters()))


@pytest.mark.parametrize("options", PLACES, ids=str)
@every_stage
def test_data_replaced_inside_a_writing_block_is_written(stage: int, options: dict[str, Any]) -> None:
    plain, data = make_net(), batches(2)

    def halve(model: nn.Module) -> None:
        vector = nn.utils.parameters_to_vector(model.parameters()) * 0.5
        nn.utils.vector_to_parameters(vector, model.parameters())  # sets parameter.data
        first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
        first.data, second.data = second.data, first.data

    def body(rank: int) -> Tensors:
        model, optimizer = shard(plain, stage, **options)
        with zeroshard.gathered(model, write_rank=0):
            halve(model)
        for batch in data:
            train_step(model, optimizer, split(batch, rank, 2))
        return masters(model)

    expected = copy.deepcopy(plain)
    halve(expected)
    wanted = run_plain(expected, momentum, data)
    for parameters in run_threads(2, body):
        assert_close(parameters, wanted, 3e-2 if options.get("precision") else 1e-6)


@every_stage
def test_what_a_writing_block_cannot_keep_is_refused_and_changes_nothing(stage: int) -> None:
    plain, batch = make_net(), ONE_BATCH

    def body(rank: int) -> None:
        model, optimizer = shard(plain, stage)
        before = full_parameters(model)
        block = zeroshard.gathered(model, write_rank=0)
        with pytest.raises(RuntimeError, match=r"float64.*before zeroshard\.shard"), block:
            model.to(torch.float64)
        assert_equal(full_parameters(model), before)
        train_step(model, optimizer, split(batch, rank, 2))
        for call, change in (
            ("unwrap", lambda: zeroshard.unwrap(model)),
            ("offload_states", lambda: zeroshard.offload_states(model)),
            ("load", lambda: zeroshard.load("nowhere", model)),
        ):
            with pytest.raises(RuntimeError, match=rf"{call}.*gathered"), zeroshard.gathered(model):
                change()
        with zeroshard.gathered(model), torch.no_grad():
            zeroshard.full_parameter(model, NAME)
            model.get_parameter(NAME).zero_()
            with pytest.raises(RuntimeError, match=rf"{NAME}.*was edited inside"):
                zeroshard.full_parameter(model, NAME)

    run_threads(2, body)


# ------------------------------------------------------------------------------------ edits outside of it


MORE_PLACES = [*PLACES, {"precision": "fp16"}, {"precision": "bf16", "offload": "host"}]


@pytest.mark.guarantee("Edits in place")
@pytest.mark.parametrize(("stage", "options", "world"), pairwise([0, 1, 2], MORE_PLACES, [1, 2]), ids=str)
def test_edits_in_place_count_whenever_they_are_made(stage: int, options: dict[str, Any], world: int) -> None:
    plain, data = make_net(), batches(3)

    def edit(model: nn.Module) -> None:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                (parameter.data if number % 2 else parameter).mul_(0.5)

    def train(model: nn.Module, optimizer: Any, of: Any, scale: Any = lambda loss: loss) -> None:
        edit(model)  # before the first forward
        take_step(optimizer, scale(net_loss(model, of(data[0]))))
        edit(model)  # between steps
        scale(net_loss(model, of(data[1]))).backward()
        edit(model)  # between backward and step
        optimizer.step()
        edit(model)  # last

    def body(rank: int) -> Tensors:
        model, optimizer = shard(plain, stage, **options)
        train(model, optimizer, lambda batch: split(batch, rank, world), optimizer.scale)
        return masters(model)

    expected = copy.deepcopy(plain)
    train(expected, momentum(expected), lambda batch: batch)
    for parameters in run_threads(world, body):
        assert_close(parameters, dict(expected.named_parameters()), 2e-2 if options.get("precision") else 1e-6)


def edit_in_place(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        model.get_parameter(NAME).mul_(1 + rank)


def edit_data(model: nn.Module, rank: int) -> None:
    model.get_parameter(NAME).data.mul_(1 + rank)


def load_all(model: nn.Module, rank: int) -> None:
    model.load_state_dict(make_net(5 + rank).state_dict())


def load_block(model: nn.Module, rank: int) -> None:
    model.get_submodule("blocks.1").load_state_dict(make_net(5 + rank).get_submodule("blocks.1").state_dict())


@pytest.mark.guarantee("Edits that differ by rank")
@pytest.mark.parametrize("options", [*PLACES, {"precision": "bf16", "offload": "host"}], ids=str)
@pytest.mark.parametrize("edit", [edit_in_place, edit_data, load_all, load_block])
@at_stages(0, 1, 2)
@pytest.mark.filterwarnings("ignore:load_state_dict.. rounds")
def test_edits_that_differ_between_ranks_raise_at_the_step(stage: int, edit: Any, options: dict[str, Any]) -> None:
    plain, data = make_net(), batches(2)

    def body(rank: int) -> None:
        model, optimizer = shard(plain, stage, **options)
        for value in (rank, 7, rank):  # all ranks may make the same edit
            edit(model, value)
            token_step(model, split(data[1], rank, 2))
            if value == 7:
                optimizer.step()
                continue
            with pytest.raises(RuntimeError, match=r"changed since the last step.*write_rank=0"):
                optimizer.step()
            with zeroshard.gathered(model, write_rank=0):
                pass
            train_step(model, optimizer, split(data[1], rank, 2))

    run_threads(2, body)


@pytest.mark.guarantee("Edits that differ by rank")
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("edit", [edit_in_place, edit_data, load_all, load_block])
@at_stages(0, 1, 2)
@pytest.mark.filterwarnings("ignore:load_state_dict.. rounds")
def test_an_edit_on_one_rank_raises_at_the_step(stage: int, edit: Any, options: dict[str, Any]) -> None:
    plain, data = make_net(), batches(2)

    def body(rank: int) -> None:
        model, optimizer = shard(plain, stage, **options)
        train_step(model, optimizer, split(data[0], rank, 2))
        if rank == 1:
            edit(model, 2)
        with pytest.raises(RuntimeError, match=r"changed since the last step.*but not on all ranks"):
            train_step(model, optimizer, split(data[1], rank, 2))

    run_threads(2, body)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=str)
@at_stages(0, 1, 2)
@pytest.mark.filterwarnings("ignore:load_state_dict.. rounds")
def test_one_rank_may_read_data_and_use_other_values_for_a_while(stage: int, options: dict[str, Any]) -> None:
    plain, data = make_net(), batches(3)

    def body(rank: int) -> Tensors:
        model, optimizer = shard(plain, stage, **options)
        for batch in data:
            train_step(model, optimizer, split(batch, rank, 2))
            if rank == 1:
                assert sum(p.data.norm() for p in model.parameters()) > 0
            own = copy.deepcopy(model.state_dict())
            if rank == 1:
                model.load_state_dict(make_net(5).state_dict())
                model.load_state_dict(own)
            if rank == 0:
                own_values = model.get_parameter(NAME).data.clone()
                model.get_parameter(NAME).data.zero_()
                model.get_parameter(NAME).data.copy_(own_values)
        return masters(model)

    wanted = run_plain(plain, momentum, data)
    for parameters in run_threads(2, body):
        assert_close(parameters, wanted, 2e-2 if options.get("precision") else 1e-6)


class Clamped(nn.Module):
    """A layer whose forward changes its own weight, as constrained layers do."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.inner, self.through_data = nn.Linear(3, 3), through_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            (self.inner.weight.data if self.through_data else self.inner.weight).clamp_(-0.1, 0.1)
        return self.inner(x)


@pytest.mark.guarantee("Forwards that change weights")
@pytest.mark.parametrize(("stage", "through_data", "options"), pairwise(STAGES, [False, True], PLACES), ids=str)
def test_a_forward_that_changes_its_weights_is_right_or_refused(
    stage: int, through_data: bool, options: dict[str, Any]
) -> None:
    plain, data = nn.Sequential(Clamped(through_data), Clamped(through_data)), numbers(3, 4, 3)
    wanted = run_plain(plain, momentum, data, square_steps)

    def body(rank: int) -> Tensors:
        model, optimizer = shard(plain, stage, **options)
        if stage == 3:
            with pytest.raises(RuntimeError, match="changed in place during a forward"):
                square_steps(model, optimizer, shares(data, rank, 2))
            return wanted
        square_steps(model, optimizer, shares(data, rank, 2))
        return masters(model)

    for parameters in run_threads(2, body):
        assert_close(parameters, wanted, 2e-2 if options.get("precision") else 1e-6)


@pytest.mark.guarantee("Replaced data")
@pytest.mark.parametrize("change", ["data", "vector", "dtype", "format"])
@every_stage
def test_data_replaced_outside_is_refused_at_the_latest_by_the_next_forward(stage: int, change: str) -> None:
    plain = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))
    inputs = torch.ones(2, 2, 3, 3)

    def replace(model: nn.Module) -> None:
        if change == "data":
            model[2].bias.data = torch.ones(2)
        elif change == "vector":
            nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in model.parameters())), model.parameters())
        elif change == "dtype":
            model.to(torch.float64)
        else:
            model.to(memory_format=torch.channels_last)

    def body(rank: int) -> None:
        model, optimizer = shard(plain, stage)
        take_step(optimizer, model(inputs).sum())
        with pytest.raises(RuntimeError, match=r"zeroshard\.(shard|gathered)\("):
            replace(model)
            model(inputs)

    run_threads(2, body)


@pytest.mark.guarantee("Graphs from before a step")
@pytest.mark.parametrize("options", PLACES, ids=str)
@every_stage
def test_a_backward_over_a_graph_older_than_the_step_raises(stage: int, options: dict[str, Any]) -> None:
    plain, data = make_net(), batches(2)

    def body(rank: int) -> None:
        model, optimizer = shard(plain, stage, **options)
        old = net_loss(model, split(data[0], rank, 2))
        old.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        optimizer.zero_grad()
        train_step(model, optimizer, split(data[1], rank, 2))

    run_threads(2, body)


def test_an_update_leaves_graphs_of_what_it_does_not_update_alone() -> None:
    """As with plain torch: only what the optimizer changed is changed."""

    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model[1].parameters(), lr=0.1), stage=1)
        old = model[0](torch.ones(1, 3, requires_grad=True)).pow(2).sum()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        old.backward()

    run_threads(2, body)


# --------------------------------------------------------------------- memory that something else shares


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_numpy_array_of_a_gathered_parameter_keeps_its_values(precision: str | None) -> None:
    plain, data = make_net(), batches(3)

    def body(rank: int, shares: bool) -> tuple[list[float], list[Any]]:
        model, optimizer = shard(plain, 3, precision=precision)
        kept: list[Any] = []
        if shares:

            def keep(module: nn.Module, args: Any, output: Any) -> None:
                weight = module.up.weight.detach()
                kept.append((weight.view(torch.uint8).numpy(), weight.view(torch.uint8).numpy().copy()))

            model.blocks[1].register_forward_hook(keep)
        return [train_step(model, optimizer, split(batch, rank, 2)) for batch in data], kept

    for (shared, kept), (alone, _) in zip(run_threads(2, body, True), run_threads(2, body, False), strict=True):
        assert shared == alone
        assert len(kept) == 3
        for view, values in kept:
            assert (view == values).all()


@pytest.mark.guarantee("States that are away")
@every_stage
def test_parameters_stay_guarded_while_the_states_are_out(stage: int) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), sgd, stage=stage)
        model(torch.ones(1, 2)).sum().backward()
        loss = model(torch.ones(1, 2)).sum()
        zeroshard.offload_states(model)
        for _ in range(2):
            for use in (lambda: model(torch.ones(1, 2)), model.state_dict, loss.backward):
                with pytest.raises(RuntimeError, match="zeroshard"):
                    use()
        zeroshard.reload_states(model)
        model(torch.ones(1, 2)).sum().backward()

    run_threads(2, body)


@pytest.mark.guarantee("Edits in stage 3")
def test_between_a_forward_and_its_backward_parameters_are_partitioned_too() -> None:
    """Stage 3 keeps the model's own in memory for backward; what is written there would be lost."""

    def body(rank: int) -> None:
        model, optimizer = shard(make_net(), 3)
        for _ in range(2):
            loss = net_loss(model, ONE_BATCH)
            for use in (
                lambda: model.temperature.data.mul_(2.0),
                lambda: model.temperature.detach(),
                lambda: torch.nn.init.ones_(model.temperature),
            ):
                with pytest.raises(RuntimeError, match=r"temperature.*partitioned over the ranks"):
                    use()
            loss.backward()
            optimizer.step()

    run_threads(2, body)


def test_a_hook_of_the_model_may_read_its_parameters() -> None:
    """Also one that came after shard(): it runs before the parameters go."""

    def body(rank: int) -> None:
        model, _ = shard(make_net(), 3)
        read: list[float] = []
        model.register_forward_hook(lambda module, args, output: read.append(module.temperature.detach().norm().item()))
        value = zeroshard.full_parameter(model, "temperature").norm().item()
        token_step(model, ONE_BATCH)
        with torch.no_grad():
            net_loss(model, ONE_BATCH)
        assert read == [value, value]

    run_threads(2, body)


def test_an_edit_that_a_failed_backward_would_lose_is_reported_by_the_next_forward() -> None:
    """Stage 3 keeps the model's own parameters in memory from its forward to its backward."""

    def body(rank: int) -> None:
        model, _ = shard(make_net(), 3)

        def edit(module: nn.Module, args: object, output: object) -> None:
            with torch.no_grad():
                model.temperature.mul_(2.0)

        handle = model.register_forward_hook(edit)
        output = model(ONE_BATCH)
        handle.remove()
        output.register_hook(lambda gradient: 1 / 0)
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            output.sum().backward()
        del output
        with pytest.raises(RuntimeError, match=r"temperature.*changed in place"):
            for batch in batches(2):
                token_step(model, batch)

    run_threads(2, body)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=str)
@at_stages(0, 2)
def test_a_load_after_one_rank_has_read_data_is_no_edit(stage: int, options: dict[str, Any], tmp_path: Path) -> None:
    plain, data = make_net(), batches(2)
    zeroshard.save(tmp_path / "a", plain)

    def body(rank: int) -> Tensors:
        model, optimizer = shard(plain, stage, **options)
        if rank == 0:
            assert sum(p.data.numel() for p in model.parameters()) > 0
        zeroshard.load(tmp_path / "a", model)
        train_step(model, optimizer, split(data[1], rank, 2))
        return full_parameters(model)

    first, second = run_threads(2, body)
    assert_equal(first, second)


def test_a_unit_is_checked_for_edits_once_however_many_parameters_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(parameters: Any) -> list[int]:
        calls.append(len(parameters))
        return param_versions(parameters)

    monkeypatch.setattr(param_access, "param_versions", counted)

    def body(rank: int) -> int:
        model, _ = sharded(nn.Sequential(*[nn.Linear(2, 2) for _ in range(50)]), sgd, stage=2)
        before = len(calls)
        for parameter in model.parameters():
            _ = parameter.data
        return len(calls) - before

    assert run_threads(1, body) == [0]  # there is nobody to compare with
    assert max(run_threads(2, body)) < 100  # of both ranks, not for each of 100 parameters

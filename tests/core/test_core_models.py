"""What users do to the model besides training it: the plain run's numbers, or an error before anything computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import plain
import pytest
import torch
from core_runs import api, assert_same, in_processes, new_core, on_ranks
from core_runs import tested_core as tested_core
from pairs import at_stages, every_stage
from plain import ONE_BATCH, batches, net_loss, sharded, square_loss, take_step
from ranks import RanksFailed
from torch import nn
from zoo import Block, make_net

NET = make_net()
NAME = "blocks.1.up.weight"


def halve(parameters: Any) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)


# -- edits, and what reads the masters ------------------------------------------------------------------------------


def look(model: Any) -> None:
    with api.gathered(model):
        pass


def look_at_a_block(model: Any) -> None:
    with api.gathered(model.blocks[0]):
        halve([model.blocks[1].up.weight])  # of another unit: it counts


@at_stages(0, 1, 2)
@pytest.mark.parametrize("read", [look, look_at_a_block])
def test_edits_before_a_gathered_block_count(stage: int, read: Callable[[Any], None]) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            halve(model.parameters())
            if api.is_sharded(model):
                read(model)
            elif read is look_at_a_block:
                halve([model.blocks[1].up.weight])
            take_step(optimizer, net_loss(model, batch))

    assert_same(NET, loop, precision="bf16", stages=[stage])


@every_stage
def test_masters_are_not_read_inside_gathered(stage: int) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(NET, stage=stage, precision="bf16")
        before = plain.masters(model)
        with api.gathered(model):
            halve(model.parameters())
            for read in (lambda: api.full_parameter(model, NAME), lambda: api.state_dict(model)):
                with pytest.raises(RuntimeError, match="read them directly"):
                    read()
        plain.assert_equal(plain.masters(model), before)

    on_ranks(2, body)


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_one_module_is_gathered_and_written(stage: int, precision: str | None) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            if api.is_sharded(model):
                with api.gathered(model.blocks[1], write_rank=0):
                    halve(model.blocks[1].parameters())
                    if stage == 3:
                        with pytest.raises(RuntimeError, match="gathered"):
                            model.blocks[0].up.weight.sum()
            else:
                halve(model.blocks[1].parameters())
            take_step(optimizer, net_loss(model, batch))

    assert_same(NET, loop, precision=precision, stages=[stage])


def swap_data(model: Any) -> None:
    nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    first.data, second.data = second.data, first.data


@every_stage
def test_data_replaced_inside_gathered_is_written(stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        if not api.is_sharded(model):
            swap_data(model)
        for batch in data:
            if api.is_sharded(model):
                with api.gathered(model, write_rank=0 if batch is data[0] else None):
                    swap_data(model)
            take_step(optimizer, net_loss(model, batch))

    assert_same(NET, loop, stages=[stage])


@every_stage
def test_data_of_another_kind_is_not_kept(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage)
        before = plain.masters(model)
        with pytest.raises(RuntimeError, match=r"float64.*before zeroshard.shard"), api.gathered(model, write_rank=0):
            model.double()
        plain.assert_equal(plain.masters(model), before)
        take_step(optimizer, net_loss(model, ONE_BATCH))

    on_ranks(2, body)


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_values_taken_inside_gathered_stay_valid(stage: int, precision: str | None) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage, precision=precision)
        for batch in batches(2):
            before = plain.masters(model)
            loss = net_loss(model, batch)
            with api.gathered(model):
                state = model.state_dict()
                array = model.head.bias.detach().float().numpy()
            if stage == 3:  # else they are the parameters
                take_step(optimizer, loss)
                plain.assert_equal(state, {name: value.to(state[name].dtype) for name, value in before.items()})
                assert torch.equal(torch.from_numpy(array), before["head.bias"].to(state["head.bias"].dtype).float())
            else:
                take_step(optimizer, loss)

    on_ranks(2, body)


@every_stage
@pytest.mark.parametrize("write_rank", [None, 0])
def test_a_graph_of_other_values_is_refused(stage: int, write_rank: int | None) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(NET, plain.sgd, stage=stage)
        loss = net_loss(model, ONE_BATCH)
        with api.gathered(model, write_rank=write_rank):
            if write_rank is None or rank == 0:
                halve(model.parameters())
            if write_rank is None:
                loss = net_loss(model, ONE_BATCH)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    on_ranks(2, body)


def test_a_rank_that_does_not_exist_writes_nothing() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(NET, stage=3)
        for wrong in (-1, 2):
            with pytest.raises(ValueError, match="write_rank"), api.gathered(model, write_rank=wrong):
                pass

    on_ranks(2, body)


# -- changes of the model -------------------------------------------------------------------------------------------


@every_stage
def test_the_memory_of_parameters_is_not_shared_with_processes(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage)
        with pytest.raises(RuntimeError, match="is sharded: its memory cannot be shared"):
            model.share_memory()
        with pytest.raises(RuntimeError, match=f"'{NAME}' is sharded: its memory cannot be shared"):
            model.get_parameter(NAME).share_memory_()
        take_step(optimizer, net_loss(model, ONE_BATCH))

    on_ranks(2, body)


@every_stage
def test_a_gradient_of_a_frozen_parameter_is_refused(stage: int) -> None:
    base = copy.deepcopy(NET)
    base.get_parameter(NAME).requires_grad_(False)

    def body(rank: int) -> None:
        model, optimizer = sharded(base, plain.sgd, stage=stage)
        net_loss(model, ONE_BATCH).backward()
        model.get_parameter(NAME).grad = torch.ones(17, 7)
        with pytest.raises(RuntimeError, match=f"'{NAME}' was frozen when shard"):
            optimizer.step()

    on_ranks(2, body)


def assign_data(model: Any) -> None:
    model.get_parameter(NAME).data = torch.zeros(17, 7)


def shrink(model: Any) -> None:
    weight = model.embedding.weight
    weight.data = weight.data[:5]


def resize(model: Any) -> None:
    new = nn.Embedding(20, 7)
    new.weight.data[:11] = model.embedding.weight.data
    model.embedding.weight.data = new.weight.data


def set_from_a_vector(model: Any) -> None:
    vector = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    nn.utils.vector_to_parameters(vector, model.parameters())


def assign_state(model: Any) -> None:
    model.load_state_dict(make_net(1).state_dict(), assign=True)


def replace(model: Any) -> None:
    model.embedding = nn.Embedding.from_pretrained(torch.ones(11, 7), freeze=False)


CHANGES: list[Any] = [
    *(assign_data, shrink, resize, set_from_a_vector, assign_state, replace),
    *(lambda model: model.half(), lambda model: model.double(), lambda model: model.to_empty(device="cpu")),
]


@every_stage
@pytest.mark.parametrize("change", CHANGES)
def test_replaced_parameters_stop_before_the_next_forward(stage: int, change: Callable[[Any], None]) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage)
        take_step(optimizer, net_loss(model, ONE_BATCH))
        ran: list[Any] = []
        model.embedding.register_forward_pre_hook(lambda *_: ran.append(1))
        with pytest.raises(RuntimeError, match=r"after zeroshard.shard\(\)|sharded"):  # now, or in the next forward
            change(model)
            net_loss(model, ONE_BATCH)
        assert not ran

    on_ranks(2, body)


class Momentum(nn.Module):
    """Replaces the data of one layer in its forward, as momentum contrast may do."""

    replaces = False

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.replaces:
            self.key.weight.data = self.key.weight.data * 0.9 + self.query.weight.data * 0.1
        return self.query(x) + self.key(x)


@every_stage
def test_a_forward_that_replaces_data_is_refused(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Momentum(), plain.momentum, stage=stage, units=("query", "key"))
        take_step(optimizer, model(torch.ones(2, 4)).sum())
        model.replaces = True
        with pytest.raises(RuntimeError, match=r"the data of 'key\.weight' was replaced"):
            take_step(optimizer, model(torch.ones(2, 4)).sum())

    on_ranks(2, body)


def freeze_on_one_rank(rank: int, stage: int) -> str:
    model, optimizer = sharded(NET, plain.sgd, stage=stage, timeout=10)
    take_step(optimizer, net_loss(model, ONE_BATCH))
    if rank == 1:
        model.get_parameter(NAME).requires_grad_(False)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):  # another rank hears of it in its next collective
            take_step(optimizer, net_loss(model, ONE_BATCH))
    return str(caught.value)


@every_stage
def test_a_parameter_that_one_rank_has_frozen_is_refused(stage: int) -> None:
    texts = in_processes(2, freeze_on_one_rank, stage, fresh=True)
    assert f"'{NAME}' is frozen on this rank" in texts[1]
    assert "rank 1" in texts[0]


@every_stage
def test_parameters_that_all_ranks_freeze_keep_their_values(stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for number, batch in enumerate(data):
            model.blocks[1].requires_grad_(number != 1)
            take_step(optimizer, net_loss(model, batch))

    assert_same(NET, loop, plain.sgd, stages=[stage], identical=False)


# -- values from elsewhere ------------------------------------------------------------------------------------------


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_state_dict_is_loaded_into_a_sharded_model(stage: int, precision: str | None) -> None:
    state = make_net(1).state_dict()

    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for number, batch in enumerate(data):
            take_step(optimizer, net_loss(model, batch))
            if number == 1:
                model.load_state_dict(state)
                model.blocks[0].load_state_dict(make_net(2).blocks[0].state_dict())

    assert_same(NET, loop, stages=[stage], precision=precision, data=batches(4, rows=24))


@pytest.mark.parametrize("partition", ["full", "hierarchical", "inner-gradients"])
def test_a_state_dict_is_loaded_on_a_mesh(partition: str) -> None:
    state = make_net(1).state_dict()

    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            take_step(optimizer, net_loss(model, batch))
            model.load_state_dict(state)

    options = {"mesh": (2, 2), "partition": partition}
    assert_same(NET, loop, stages=[3], world=4, identical=False, **options)


def test_ranks_that_load_other_values_are_refused() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(NET, stage=3, timeout=20)
        model.load_state_dict(make_net(rank).state_dict())

    with pytest.raises(RanksFailed, match="written other values"):
        on_ranks(2, body)


@every_stage
def test_conversions_that_change_nothing_do_nothing(stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            assert model.to("cpu").cpu().float().to(torch.float32) is model
            net_loss(model, batch).backward()
            model.cpu()
            optimizer.step()
            optimizer.zero_grad()

    assert_same(NET, loop, stages=[stage])


def call_with_others(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    own = {name: torch.full(p.shape, 0.1) for name, p in model.named_parameters()}

    def called(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    gradients = torch.func.grad(called)(own, x)
    return [called(own, x), *gradients.values(), torch.func.grad(lambda x: model(x).square().mean())(x)]


@every_stage
def test_a_functional_call_uses_other_parameters(stage: int) -> None:
    base = nn.Sequential(*[Block(8) for _ in range(2)])

    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
        found = []
        for batch in data:
            found += [tensor.sum().item() for tensor in call_with_others(model, torch.ones(4, 8))]
            take_step(optimizer, square_loss(model, batch))
        return found[: len(found) // 2]

    assert_same(base, loop, stages=[stage], data=plain.numbers(2, 12, 8))


class Layers(nn.Module):
    """Two layers, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.own = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.eye(8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()) @ self.own


@every_stage
def test_a_hook_on_the_model_uses_its_parameters(stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        kept: list[torch.Tensor] = []
        model.register_forward_hook(lambda module, args, output: kept.append((args[0] @ module.own).square().mean()))
        for batch in data:
            take_step(optimizer, square_loss(model, batch) + kept.pop())
            model(batch)
            take_step(optimizer, kept.pop())

    assert_same(Layers(), loop, plain.sgd, plain.numbers(3, 12, 8), stages=[stage], units=(nn.Linear,), identical=False)


def run_alone(rank: int, stage: int) -> None:
    model, optimizer = sharded(NET, plain.sgd, stage=stage, timeout=30)
    for step in range(3):
        with api.gathered(model), torch.no_grad():
            for _ in range((rank + step) % 3):
                net_loss(model, ONE_BATCH)
        if stage < 3 and rank == 0:
            model(ONE_BATCH)
        assert api.full_parameter(model, NAME).shape == (17, 7)
        take_step(optimizer, net_loss(model, ONE_BATCH))


@every_stage
def test_ranks_run_different_numbers_of_forwards(stage: int) -> None:
    in_processes(2, run_alone, stage)


# -- making a model, and what is left of it -------------------------------------------------------------------------


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_model_from_meta_trains_as_the_plain_one_with_its_values(stage: int, precision: str | None) -> None:
    def body(rank: int) -> tuple[Any, Any]:
        with torch.device("meta"):
            base = TiedNet().eval()
        model, optimizer = sharded(base, plain.momentum, stage=stage, precision=precision)
        assert model.head.weight is model.embedding.weight
        first = plain.masters(model)
        for batch in batches(3):
            take_step(optimizer, net_loss(model, batch.chunk(2)[rank]))
        return first, plain.masters(model)

    for first, last in on_ranks(2, body):
        wanted = TiedNet().eval()
        wanted.load_state_dict({**wanted.state_dict(), **first})
        optimizer = plain.momentum(wanted)
        for batch in batches(3):
            take_step(optimizer, net_loss(wanted, batch))
        if precision is None:
            plain.assert_close(last, dict(wanted.named_parameters()))
        assert last["blocks.0.norm.weight"].sub(1).abs().max() < 0.5


def test_the_given_function_initializes_modules_from_meta() -> None:
    def body(rank: int) -> Any:
        def initialize(module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                nn.init.constant_(parameter, rank + 1.0)

        with torch.device("meta"):
            base = nn.Sequential(*[Block(8) for _ in range(2)])
        return plain.masters(sharded(base, stage=3, init_fn=initialize)[0])

    for values in on_ranks(2, body):
        assert all(value.eq(1).all() for value in values.values())


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_an_unwrapped_model_trains_on_alone(stage: int, precision: str | None) -> None:
    def body(rank: int) -> plain.Tensors:
        model, optimizer = sharded(NET, plain.adamw, stage=stage, precision=precision)
        for batch in batches(2):
            take_step(optimizer, net_loss(model, batch.chunk(2)[rank]))
        before = plain.masters(model)
        found = api.unwrap(model, optimizer)
        assert found == (model, found[1]) and type(found[1]) is torch.optim.AdamW
        plain.assert_equal(plain.copied(model), before)
        assert not api.is_sharded(model) and {type(p) for p in model.parameters()} == {nn.Parameter}
        assert all(parameter.grad is None for parameter in model.parameters())
        take_step(found[1], net_loss(model, batches(3)[2]))
        copy.deepcopy(model).half().share_memory()
        api.shard(model, found[1], stage=stage)
        return plain.masters(model)

    wanted = copy.deepcopy(NET)
    optimizer = plain.adamw(wanted)
    for batch in batches(3):
        take_step(optimizer, net_loss(wanted, batch))
    for values in on_ranks(2, body):
        plain.assert_close(values, dict(wanted.named_parameters()), 2e-2 if precision else 1e-5)


class Widens(nn.Module):
    """Gives its second block, and its head, fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(8), Block(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).float()).float())


@every_stage
@pytest.mark.parametrize("cast", [True, "model"])
def test_layers_cast_the_other_floats_that_they_are_given(stage: int, cast: Any) -> None:
    options = {"precision": "bf16", "cast_inputs": cast, "units": (Block,), "identical": False}
    assert_same(Widens(), data=plain.numbers(3, 24, 8), loss_of=square_loss, stages=[stage], **options)


def overlap() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data[:2].view(2, 4))
    return model


@every_stage
def test_parameters_over_one_memory_are_refused(stage: int) -> None:
    with pytest.raises(ValueError, match="two parameters over one memory"):
        api.shard(overlap(), stage=stage)


@new_core
def test_blocks_of_gathered_may_be_nested_though_values_are_kept() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(NET, plain.sgd, stage=3)
        with api.gathered(model):
            before = plain.copied(model)
            with api.gathered(model):
                kept = [parameter.detach() for parameter in model.parameters()]
            plain.assert_equal(plain.copied(model), before)
            assert all(torch.equal(a, b) for a, b in zip(kept, before.values(), strict=True))

    on_ranks(2, body)

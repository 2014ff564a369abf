"""Stage 3 gathers the weights of float8 layers in float8: bytes, memory, and what users see of such weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from plain import (
    assert_equal,
    full_parameters,
    net_loss,
    sharded,
    split,
    take_step,
    token_step,
    train_losses,
    train_steps,
)
from ranks import RanksFailed, run_threads, seeded
from test_float8 import FP8, adamw, batches, make_net
from torch import nn
from torch.nn import functional as F
from zoo import Block, built

import zeroshard
from zeroshard.engine.float8_flat import SCALES_LABEL, Float8FlatParam
from zeroshard.float8.cast import E4M3, MatrixCast, ShardCast, ShardCasts, cast, largest
from zeroshard.planner.state_sizes import predict_memory

LAYERS = [f"blocks.{number}.{name}.weight" for number in range(3) for name in ("up", "down")]


def float8_flats(model: Any) -> list[Float8FlatParam]:
    flats = [flat for unit in model._zeroshard.engine.units for flat in unit.flats]
    return [flat for flat in flats if isinstance(flat, Float8FlatParam)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_cast_to_what_the_whole_weight_casts_to(dtype: torch.dtype) -> None:
    values = (torch.randn(48, 32, generator=torch.Generator().manual_seed(0)) * 7).to(dtype)
    weight = values.bfloat16()
    ((whole, _, _),) = cast(MatrixCast(weight, largest(weight), E4M3))
    shards = torch.empty(48 * 32, dtype=E4M3)
    parts = [ShardCast(values.flatten()[start:end], 1, start) for start, end in ((0, 700), (700, 1536))]
    ShardCasts(parts, torch.stack([torch.zeros(()), largest(values)]).bfloat16(), shards).run()
    assert torch.equal(shards.view(torch.uint8), whole.flatten().view(torch.uint8))


def gathered_values(rank: int, world: int, **options: Any) -> None:
    """Compare what each layer gets in a forward with the bf16 weight, cast."""
    model = make_net()
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=3, **{**FP8, **options})
    flats = float8_flats(sharded)
    assert sorted(name for flat in flats for name in flat.names) == sorted(LAYERS)
    for batch in batches(3):
        expected = full_parameters(sharded)
        seen = 0

        def compare(layer: nn.Module, *_: object) -> None:
            nonlocal seen
            (name,) = (name for name, module in sharded.named_modules() if module is layer)
            gathered = vars(layer)["_zeroshard_float8_weight"]
            weight = expected[f"{name}.weight"]  # noqa: B023
            ((values, _, scale),) = cast(MatrixCast(weight, largest(weight), E4M3))
            assert torch.equal(gathered.values.view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(gathered.scale, scale)
            seen += 1

        layers = [sharded.get_submodule(name.removesuffix(".weight")) for name in LAYERS]
        hooks = [layer.register_forward_pre_hook(compare) for layer in layers]
        token_step(sharded, split(batch, rank, world))
        assert seen == len(LAYERS)
        for hook in hooks:
            hook.remove()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.guarantee("Float8 layers")
@pytest.mark.parametrize("options", [{}, {"cast_on_gather": False}, {"bucket_size": 200}, {"prefetch": False}], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_layers_get_the_bf16_weight_cast_to_the_bit(world: int, options: dict[str, Any]) -> None:
    if world == 1 and not options.get("cast_on_gather", True):
        pytest.skip("a single rank then has its parameters")
    run_threads(world, partial(gathered_values, world=world, **options))


def test_addresses_are_those_that_a_gpu_can_multiply() -> None:
    model = make_net()
    sharded, _ = zeroshard.shard(model, adamw(model), stage=3, **FP8)
    for weight in (weight for flat in float8_flats(sharded) for weight in flat.weights):
        assert weight.values.storage_offset() % 16 == 0
        assert weight.scale.storage_offset() * weight.scale.itemsize % 16 == 0


def traffic(rank: int, precision: str) -> tuple[dict[str, Any], int]:
    model = make_net(64)
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=3, precision=precision, keep_bf16=["head"])
    train_steps(sharded, optimizer, batches(2))
    report = zeroshard.report(sharded)
    return report.collectives, report.memory["gathered", "device"].peak


def test_weights_are_gathered_in_one_byte() -> None:
    bf16, bf16_peak = run_threads(2, partial(traffic, precision="bf16"))[0]
    fp8, fp8_peak = run_threads(2, partial(traffic, precision="fp8"))[0]
    weights = 3 * 2 * 64 * 128
    saved = bf16["all-gather"].bytes - fp8["all-gather"].bytes
    assert 2 * weights * 0.98 <= saved <= 2 * weights  # a byte of each, in forward and backward; less by alignment
    assert fp8["all-reduce"].count - bf16.get("all-reduce", fp8["all-reduce"]).count in (0, 1)
    assert fp8["all-reduce"].bytes <= 1000
    assert fp8_peak < 0.6 * bf16_peak


def test_one_all_reduce_per_step_computes_all_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroshard.comm import Communicator

    found: list[str] = []
    inner = Communicator.all_reduce

    def all_reduce(self: Any, tensor: torch.Tensor, axis: Any, what: str, *args: Any) -> Any:
        found.append(what)
        return inner(self, tensor, axis, what, *args)

    monkeypatch.setattr(Communicator, "all_reduce", all_reduce)

    def body(rank: int) -> None:
        model = make_net()
        sharded, optimizer = zeroshard.shard(model, adamw(model), stage=3, **FP8)
        for batch in batches(3):
            for part in batch.chunk(2):
                token_step(sharded, part)
            optimizer.step()
            optimizer.zero_grad()

    run_threads(2, body)
    assert found.count(SCALES_LABEL) == 2 * 3


# ----------------------------------------------------------------------------------------- what users see of a weight


class Reader(Block):
    """A block that also uses the weight of one of its layers."""

    how = "values"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "metadata":
            weight = self.up.weight
            assert weight.dtype == torch.bfloat16 and weight.shape == (32, 16) and weight.stride() == (16, 1)
            return super().forward(x.to(weight.device, weight.dtype))
        if self.how == "linear":
            return x + F.linear(F.linear(x, self.up.weight), self.down.weight)
        return super().forward(x) * self.up.weight.float().norm()


def make_readers(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Reader(16, 32), Reader(16, 32))
    for block in model:
        block.how = how  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("how", ["values", "linear"])
def test_other_uses_of_such_a_weight_raise(how: str) -> None:
    model, _ = sharded(make_readers(how), adamw, stage=3, precision="fp8")
    with pytest.raises(RuntimeError, match=r"'0\.up\.weight' are gathered in float8.*keep_bf16"):
        model(torch.randn(4, 16))


@pytest.mark.parametrize("how", ["values", "linear"])
def test_a_layer_in_keep_bf16_is_used_as_ever(how: str) -> None:
    plain = make_readers(how)
    model, _ = sharded(plain, adamw, stage=3, precision="fp8", keep_bf16=["0.*", "1.up"])
    expected, _ = zeroshard.shard(plain, stage=0, precision="fp8", keep_bf16=["0.*", "1.up"])
    x = torch.randn(4, 16)
    if how == "linear":
        with pytest.raises(RuntimeError, match=r"'1\.down\.weight' are gathered in float8"):
            model(x)
    else:
        assert torch.equal(model(x), expected(x))


def test_what_needs_no_values_is_answered() -> None:
    model, _ = sharded(make_readers("metadata"), adamw, stage=3, precision="fp8")
    model(torch.randn(4, 16)).float().sum().backward()


def test_a_tied_weight_is_gathered_in_bf16() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.block = nn.Embedding(16, 16), Block(16, 32)
            self.head = nn.Linear(16, 16, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(self.embedding(tokens)))

    torch.manual_seed(0)
    base, tokens = Tied(), torch.arange(8).view(2, 4)
    losses = []
    for stage in (0, 3):
        model = copy.deepcopy(base)
        sharded, optimizer = zeroshard.shard(model, adamw(model), stage=stage, precision="fp8")
        assert zeroshard.report(sharded).float8.names == ("block.up", "block.down", "head")  # type: ignore[union-attr]
        losses.append(train_losses(sharded, optimizer, [tokens] * 3))
        if stage == 3:
            assert [name for flat in float8_flats(sharded) for name in flat.names] == [
                "block.up.weight",
                "block.down.weight",
            ]
    assert losses[0] == losses[1]


def test_a_transposed_weight_is_gathered_in_bf16() -> None:
    """A GPU multiplies by a weight that is stored by rows, and the all-gather would keep it stored by columns."""
    x, found = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)), []
    for stage in (0, 3):
        model = built(lambda: Block(16, 32))
        model.up.weight = nn.Parameter(model.up.weight.detach().t().contiguous().t())
        sharded, optimizer = zeroshard.shard(model, adamw(model), stage=stage, precision="fp8")
        sharded(x).float().square().mean().backward()
        optimizer.step()
        found.append(sharded(x).detach())
    assert [name for flat in float8_flats(sharded) for name in flat.names] == ["down.weight"]
    for weight in (weight for flat in float8_flats(sharded) for weight in flat.weights):
        assert weight.columns.stride(0) == 1
    assert torch.equal(*found)


def test_new_values_get_new_scales() -> None:
    model = make_net()
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=3, **FP8)
    reference, _ = zeroshard.shard(make_net(), stage=0, **FP8)
    tokens = batches(1)[0]
    sharded(tokens)
    for factor in (100.0, 0.01):
        for each in (sharded, reference):
            with zeroshard.gathered(each, write_rank=0), torch.no_grad():
                each.blocks[0].up.weight.mul_(factor)
        assert torch.equal(sharded(tokens), reference(tokens))
    ema = zeroshard.EMA(sharded, decay=0.0)
    train_steps(sharded, optimizer, [tokens])
    before = sharded(tokens).detach()
    with ema.swapped():
        assert torch.equal(sharded(tokens), reference(tokens))
    assert torch.equal(sharded(tokens), before)


def test_a_backward_over_old_values_raises() -> None:
    model = make_net()
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=3, **FP8)
    loss = net_loss(sharded, batches(1)[0])
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def step_from_gathered_forward(rank: int, stage: int) -> torch.Tensor:
    model = make_net()
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=stage, **FP8)
    with zeroshard.gathered(sharded):
        loss = net_loss(sharded, batches(1)[0])
    loss.backward()
    optimizer.step()
    return net_loss(sharded, batches(1)[0]).detach()


def test_a_backward_after_a_forward_inside_gathered() -> None:
    expected, found = (run_threads(2, partial(step_from_gathered_forward, stage=stage)) for stage in (0, 3))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def step_after_gathered(rank: int, stage: int, is_entered: bool = True, edited: int | None = None) -> torch.Tensor:
    """Enter and leave gathered() between forward and backward; change a block that the loss does not depend on."""
    with seeded(0):
        model, x = nn.ModuleList([Block(16, 32), Block(16, 32)]), torch.randn(4, 16)
    options: dict[str, Any] = {"units": [Block], "precision": "fp8"}
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=stage, **options)
    sharded[1](x)
    loss = sharded[0](x).float().square().mean()
    if is_entered:
        with zeroshard.gathered(sharded, write_rank=0), torch.no_grad():
            if edited is not None and rank == 0:
                sharded[edited].up.weight.mul_(4)
    loss.backward()
    optimizer.step()
    return torch.stack([block(x) for block in sharded]).detach()


@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_after_gathered_without_a_change(world: int) -> None:
    expected = run_threads(world, partial(step_after_gathered, stage=3, is_entered=False))
    for stage in (0, 3):
        found = run_threads(world, partial(step_after_gathered, stage=stage))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_change_in_gathered_leaves_the_scales_of_other_units_alone() -> None:
    expected, found = (run_threads(2, partial(step_after_gathered, stage=stage, edited=1)) for stage in (0, 3))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_backward_over_values_that_gathered_has_changed_raises() -> None:
    with pytest.raises(RanksFailed, match="modified by an inplace operation"):
        run_threads(2, partial(step_after_gathered, stage=3, edited=0))


def step_one_of_two(rank: int, stage: int) -> list[torch.Tensor]:
    """Run the backward of one block's graph after the step of another block's optimizer."""
    with seeded(0):
        model, x = nn.ModuleList([Block(16, 32), Block(16, 32)]), torch.randn(4, 16)
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.5) for block in model]
    sharded, optimizers = zeroshard.shard(model, optimizers, stage=stage, precision="fp8")
    losses = [block(x).float().square().mean() for block in sharded]
    for loss, optimizer in zip(losses, optimizers, strict=True):
        take_step(optimizer, loss)
    return [block(x).detach() for block in sharded]


def test_a_step_leaves_the_scales_of_other_optimizers_alone() -> None:
    expected, found = (run_threads(2, partial(step_one_of_two, stage=stage)) for stage in (0, 3))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Pair(nn.Module):
    """Two blocks that are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(16, 32), Block(16, 32)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [block(x) for block in self.blocks]


def step_one_of_two_in_a_unit(rank: int, stage: int) -> list[torch.Tensor]:
    with seeded(0):
        model, x = nn.Sequential(Pair()), torch.randn(4, 16)
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.5) for block in model[0].blocks]
    sharded, optimizers = zeroshard.shard(model, optimizers, stage=stage, precision="fp8", units=[Pair])
    assert len(sharded._zeroshard.engine.units) == 1
    losses = [output.float().square().mean() for output in sharded(x)]
    for loss, optimizer in zip(losses, optimizers, strict=True):
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    return [output.detach() for output in sharded(x)]


def test_a_step_leaves_the_scales_of_other_optimizers_in_its_unit_alone() -> None:
    expected, found = (run_threads(2, partial(step_one_of_two_in_a_unit, stage=stage)) for stage in (0, 3))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_training_after_an_evaluation_in_inference_mode() -> None:
    model = make_net()
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=3, **FP8)
    reference = make_net()
    plain, plain_optimizer = zeroshard.shard(reference, adamw(reference), stage=0, **FP8)
    for batch in batches(2):
        with torch.inference_mode():
            assert torch.equal(sharded(batch), plain(batch))
        losses = train_losses(sharded, optimizer, [batch])
        assert losses == train_losses(plain, plain_optimizer, [batch])


def test_a_replaced_weight_is_used() -> None:
    found = []
    for stage in (0, 3):
        model = make_net()
        sharded, _ = zeroshard.shard(model, adamw(model), stage=stage, **FP8)
        weight = torch.ones(32, 16, dtype=torch.bfloat16, requires_grad=True)
        output = torch.func.functional_call(sharded, {"blocks.0.up.weight": weight}, (batches(1)[0],))
        output.float().square().mean().backward()
        found.append((output.detach(), weight.grad))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Experts(nn.Module):
    """Two experts, of which each rank uses one: the other gets no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block(16, 32), Block(16, 32)])

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        is_chosen = (expert == chosen for expert in range(2))
        return torch.cat([expert(x if c else x[:0]) for c, expert in zip(is_chosen, self.experts, strict=True)])


def step_experts(rank: int, stage: int) -> list[torch.Tensor]:
    with seeded(0):
        model, x = Experts(), torch.randn(4, 16)
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=stage, precision="fp8")
    for _ in range(2):
        take_step(optimizer, sharded(x, rank).float().square().mean())
    return [sharded(x, chosen).detach() for chosen in range(2)]


def test_an_expert_without_tokens() -> None:
    expected, found = (run_threads(2, partial(step_experts, stage=stage)) for stage in (0, 3))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_unwrap_and_shard_again() -> None:
    model = make_net()
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=3, **FP8)
    train_steps(sharded, optimizer, batches(2))
    expected = {name: zeroshard.full_parameter(sharded, name) for name in LAYERS}
    plain = zeroshard.unwrap(sharded)
    assert_equal({name: p for name, p in plain.named_parameters() if name in LAYERS}, expected)
    assert not [key for module in plain.modules() for key in vars(module) if "zeroshard" in key]
    again, _ = zeroshard.shard(plain, stage=3, precision="bf16")
    again(batches(1)[0])


def test_torch_checkpointing_and_saved_tensor_hooks() -> None:
    losses = []
    for recomputed in (False, True):
        model = make_net()
        sharded, optimizer = zeroshard.shard(model, adamw(model), stage=3, **FP8)
        for block in sharded.blocks if recomputed else ():
            inner = block.forward
            block.forward = partial(torch.utils.checkpoint.checkpoint, inner, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            losses.append(train_losses(sharded, optimizer, batches(3)))
    assert losses[0] == losses[1]


def test_the_planner_predicts_the_same_states() -> None:
    sizes = {
        precision: predict_memory(make_net(64), ranks=2, stage=3, precision=precision) for precision in ("bf16", "fp8")
    }
    assert sizes["fp8"].state_bytes == sizes["bf16"].state_bytes

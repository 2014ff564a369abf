"""What checkpoint_activations refuses, and how it says so."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from plain import ONE_BATCH, mesh_of, net_loss, sgd
from ranks import run_threads
from torch import nn
from zoo import built, make_net

import zeroshard


@pytest.mark.parametrize(
    ("blocks", "kind", "words"),
    [
        (0, ValueError, "an int of at least 1"),
        (-2, ValueError, "an int of at least 1"),
        (True, ValueError, "or a list, got True"),
        (1.5, TypeError, "None, an int, a list or a function"),
        ("blocks.*", TypeError, r"is a single entry: pass a list, \['blocks\.\*'\]"),
        (nn.Linear, TypeError, "is a single entry: pass a list"),
        (nn.Linear(1, 1), TypeError, "is a single entry: pass a list"),
        (["block.*"], ValueError, r"'block\.\*' matches no module .*module names: \['blocks', 'blocks\.0'"),
        (["blocks.0", "blocks.7"], ValueError, r"'blocks\.7' matches no module"),
        ([nn.Conv2d], ValueError, "Conv2d'> matches no module"),
        ([nn.Linear(1, 1)], ValueError, "the Linear given matches no module"),
        ([3], TypeError, "name patterns, module classes or modules, got 3"),
        ([int], TypeError, "module classes or modules, got <class 'int'>"),
        (lambda name, module: False, ValueError, "selects no module"),
        (["blocks"], ValueError, "'blocks' is a ModuleList, which is never called"),
    ],
)
def test_blocks_that_mean_nothing_are_refused(blocks: Any, kind: type[Exception], words: str) -> None:
    model = make_net()
    with pytest.raises(kind, match=words):
        zeroshard.checkpoint_activations(model, blocks)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_without_repeated_blocks_gets_an_error_with_its_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no repeated blocks: select some .* module names: \['0', '1'\]"):
        zeroshard.checkpoint_activations(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "tensor"}, "partition must be None, a bool or a DeviceMesh, got 'tensor'"),
        ({"partition": 2}, "partition must be None, a bool or a DeviceMesh, got 2"),
        ({"offload": 1}, "offload must be a bool, got 1"),
        ({"policy": 3}, "policy must be a function or a list of operators.*got 3"),
        ({"policy": [torch.ops.aten.mm]}, "policy must be a function or a list of operators.*OpOverload"),
    ],
)
def test_options_of_a_wrong_kind_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        zeroshard.checkpoint_activations(make_net(), **options)


def test_anything_but_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got function"):
        zeroshard.checkpoint_activations(lambda x: x)  # type: ignore[arg-type]


def test_a_refused_call_leaves_the_one_before_in_place() -> None:
    model = make_net()
    zeroshard.checkpoint_activations(model, 2)
    with pytest.raises(ValueError):
        zeroshard.checkpoint_activations(model, ["nothing"])
    assert ["forward" in block.__dict__ for block in model.blocks] == [True, False, True]


def test_partition_needs_an_axis() -> None:
    model = make_net()
    zeroshard.checkpoint_activations(model, partition=True)
    with pytest.raises(
        RuntimeError, match="this model has none: shard it with a mesh whose last axis is named 'tensor'"
    ):
        net_loss(model, ONE_BATCH)

    def body(rank: int) -> None:
        mesh = mesh_of((1, 2))
        with pytest.raises(ValueError, match=r'one axis, got 2 .*mesh\["tensor"\]'):
            zeroshard.checkpoint_activations(make_net(), partition=mesh)
        divided = zeroshard.checkpoint_activations(make_net(), partition=mesh["shard"])
        with pytest.raises(TypeError, match="cannot be pickled: undo checkpointing first"):
            pickle.dumps(divided)
        copy.deepcopy(divided)

    run_threads(2, body)


# ------------------------------------------------------------------------------------------- changed in place


class Writing(nn.Module):
    """Writes into its input, or has it written into later."""

    class Layer(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.writes = writes

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.inner(x)) * mask
            if self.writes:
                x += y
                return x
            return x + y

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(writes and index == 1) for index in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for layer in self.layers:
            x = layer(x, mask)
        return x.sum()


@pytest.mark.parametrize("offload", [False, True])
def test_a_block_that_writes_into_its_input_is_refused(offload: bool) -> None:
    model = built(lambda: Writing(True))
    zeroshard.checkpoint_activations(model, offload=offload)
    with pytest.raises(RuntimeError, match=r"an input of block 'layers\.1' .*modified in place.* by the block itself"):
        model(torch.randn(2, 4, requires_grad=True), torch.ones(4))


@pytest.mark.parametrize("offload", [False, True])
def test_an_input_kept_by_reference_that_was_written_into_is_refused(offload: bool) -> None:
    model, mask = built(lambda: Writing(False)), torch.ones(4)
    zeroshard.checkpoint_activations(model, offload=offload)
    loss = model(torch.randn(2, 4, requires_grad=True), mask)
    mask.zero_()
    with pytest.raises(RuntimeError, match=r"an input of block 'layers\.2' .*modified in place.* before the backward"):
        loss.backward()


@pytest.mark.parametrize("offload", [False, True])
def test_an_input_that_was_copied_may_be_written_into_later(offload: bool) -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    model = nn.Sequential(layer, copy.deepcopy(layer))
    start = torch.randn(2, 4, requires_grad=True)

    def gradient(write: bool) -> torch.Tensor:
        x = start * 1
        y = model(x)
        if write:
            with torch.no_grad():
                x.zero_()
        return torch.autograd.grad(y.sum(), start)[0]

    plain = gradient(False)
    zeroshard.checkpoint_activations(model, offload=offload)
    assert torch.equal(gradient(True), plain)


@pytest.mark.parametrize("offload", [False, True])
def test_a_tensor_that_changes_between_two_blocks_is_kept_twice(offload: bool) -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    model = nn.ModuleList([layer, copy.deepcopy(layer)])
    start = torch.randn(2, 4, requires_grad=True)

    def gradient(in_place: bool) -> torch.Tensor:
        x = start * 1
        y = model[0](x)
        x = x.mul_(2) if in_place else x * 2
        return torch.autograd.grad((y * model[1](x)).sum(), start)[0]

    plain = gradient(False)
    zeroshard.checkpoint_activations(model, offload=offload)
    assert torch.equal(gradient(True), plain)


def test_a_cache_with_something_in_it_is_refused() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[torch.Tensor] = []

        def update(self, key: torch.Tensor) -> None:
            self.keys.append(key)

        def get_seq_length(self) -> int:
            return len(self.keys)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
            if cache is not None:
                cache.update(x)
            return self.inner(x)

    model, cache = nn.ModuleList([Layer(), Layer()]), Cache()
    zeroshard.checkpoint_activations(model, ["1"])
    x = torch.randn(1, 2)
    model[1](x, cache).sum().backward()
    assert cache.keys == []  # a new one is of no use in training
    with torch.no_grad():
        model[1](x, cache)
    assert len(cache.keys) == 1
    with pytest.raises(ValueError, match=r"a Cache that contains keys and values.*use_cache=False"):
        model[1](x, cache)


def test_a_cache_that_is_wanted_outside_of_training_is_filled() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(5)[None]
    plain = model.eval()(ids).logits
    zeroshard.checkpoint_activations(model)
    first = model(ids[:, :4])  # with gradients enabled
    assert first.past_key_values.get_seq_length() == 4
    torch.testing.assert_close(model(ids[:, 4:], past_key_values=first.past_key_values).logits[:, -1], plain[:, -1])


@pytest.mark.guarantee("Recomputation after a change")
@pytest.mark.parametrize("policy", [None, [torch.ops.aten.mm.default]])
@pytest.mark.parametrize("stage", [None, 1, 3])
def test_a_backward_after_parameters_changed_is_refused(stage: int | None, policy: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(2)])
    zeroshard.checkpoint_activations(model, policy=policy)
    optimizer: Any = sgd(model)
    if stage is not None:
        model, optimizer = zeroshard.shard(model, optimizer, stage=stage, precision="bf16")
    x = torch.randn(2, 3).requires_grad_()
    model(x).float().sum().backward()
    old = model(x).float().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"'1\.0\.weight' was modified between the forward .* block '1'"):
        old.backward()
    optimizer.zero_grad()
    model(x).float().sum().backward(retain_graph=True)
    optimizer.step()


class TiedHead(nn.Module):
    """A block that gets the weight of another module as an argument, or reads it."""

    def __init__(self, is_given: bool) -> None:
        super().__init__()
        self.inputs, self.head, self.is_given = nn.Linear(8, 8), nn.Bilinear(1, 1, 1).requires_grad_(False), is_given
        self.head.forward = self.run_head  # type: ignore[method-assign]

    def run_head(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.inputs.weight if weight is None else weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.head(x, self.inputs.weight) if self.is_given else self.head(x)
        return head + self.inputs(x)  # type: ignore[no-any-return]


@pytest.mark.guarantee("Recomputation after a change")
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("policy", [None, [torch.ops.aten.mm.default]])
@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_a_backward_after_a_parameter_of_another_module_changed_is_refused(
    stage: int | None, is_given: bool, policy: Any, is_first: bool
) -> None:
    model: nn.Module = zeroshard.checkpoint_activations(TiedHead(is_given), ["head"], policy=policy)
    optimizer: Any = sgd(model)
    if stage is not None:
        model, optimizer = zeroshard.shard(model, optimizer, stage=stage)
    if is_first:
        old = model(torch.ones(2, 8)).sum()
        model(torch.ones(2, 8)).sum().backward()
    else:
        model(torch.ones(2, 8)).sum().backward()
        old = model(torch.ones(2, 8)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"a parameter of another module, which the block .* was modified"):
        old.backward()


def test_a_change_of_what_a_block_reads_only_through_its_inputs_is_none_of_its_own() -> None:
    embedding, block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    zeroshard.checkpoint_activations(nn.Sequential(embedding, block), [block])
    hidden = embedding(torch.ones(2, 4))
    loss = block(hidden).sum()
    with torch.no_grad():
        embedding.weight.zero_()
    loss.backward()
    assert block[0].weight.grad is not None

"""Checkpointed activations: torch's own checkpointing bit for bit, in a part of the memory, whatever is kept where."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import hugging_face
import pytest
import torch
from live import Collectives, allocated_bytes
from pairs import pairwise
from plain import (
    ONE_BATCH,
    Tensors,
    assert_equal,
    assert_same,
    batches,
    decayed,
    full_parameters,
    net_loss,
    token_step,
    tokens,
    train_step,
    train_steps,
)
from ranks import run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from zoo import Block, Net, built, make_net

import zeroshard
from zeroshard.activations.stack import ALIGN_BYTES
from zeroshard.models.gpt import GPT, GPTConfig
from zeroshard.sharding.layout import round_up

MODES: dict[str, dict[str, Any]] = {
    "kept": {},
    "divided": {"partition": True},
    "offloaded": {"offload": True},
    "both": {"partition": True, "offload": True},
}


def by_torch(model: Any) -> None:
    """Checkpoint the blocks as torch does, by hand."""

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: checkpoint(forward, *args, use_reentrant=False)

    for block in model.blocks:
        block.forward = wrapped(block.forward)


def gradients(model: nn.Module, batch: torch.Tensor | None = None, loss_of: Any = net_loss) -> Tensors:
    model.zero_grad()
    loss_of(model, ONE_BATCH if batch is None else batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def expected(model: nn.Module, batch: torch.Tensor | None = None, loss_of: Any = net_loss) -> Tensors:
    plain = copy.deepcopy(model)
    by_torch(plain)
    return gradients(plain, batch, loss_of)


def used(model: nn.Module) -> tuple[int, int]:
    """Bytes in use for activations, near and far."""
    wrapped = next(m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__)
    stores = wrapped.context._stores.values()
    return sum(store.device_stack.used_bytes for store in stores), sum(store.host_stack.used_bytes for store in stores)


def counted(modules: Any) -> list[int]:
    """How often each module runs from now on."""
    runs = [0] * len(modules)

    def count(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            runs[index] += 1

        return hook

    for index, module in enumerate(modules):
        module.register_forward_pre_hook(count(index))
    return runs


# ------------------------------------------------------------------------------------------------ the same numbers


def train(rank: int, model: nn.Module, mode: str, stage: int | None, before: bool, units: Any) -> Any:
    """Train on data that is the same on all ranks, so that activations may be divided over them."""
    model = copy.deepcopy(model)
    options = dict(MODES[mode]) if mode != "torch" else {}
    if "partition" in options:
        options["partition"] = init_device_mesh("cpu", (2,))
    optimizer: Any = decayed(model)
    if mode == "torch":
        by_torch(model)
    elif before:
        zeroshard.checkpoint_activations(model, **options)
    if stage is not None:
        model, optimizer = zeroshard.shard(model, optimizer, stage=stage, units=units, timeout=20)
    if mode != "torch" and not before:
        zeroshard.checkpoint_activations(model, **options)
    train_steps(model, optimizer, batches(3))
    if stage is None:
        return {name: p.detach() for name, p in model.named_parameters()}
    return full_parameters(model)


FINER = ("*.up", "*.down", "*.norm")  # units, than the blocks


@pytest.mark.guarantee("Recomputed blocks")
@pytest.mark.parametrize(("stage", "units"), [(None, None), (0, None), (3, None), (3, FINER)])
def test_training_is_bit_equal_to_torchs_checkpointing(stage: int | None, units: Any) -> None:
    model = make_net(blocks=4)
    reference = run_threads(2, train, model, "torch", stage, True, units)[0]
    for number, mode in enumerate(MODES):
        for result in run_threads(2, train, model, mode, stage, number % 2 == 0, units):
            assert_equal(result, reference)


class Noisy(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


class Stages(Net):
    """Blocks inside stages, which are units: units coarser than blocks, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(Noisy(7), Noisy(7)) for _ in range(2)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids))) * self.temperature + self.nothing.sum()


def train_stages(rank: int, model: nn.Module, mode: str | None) -> Any:
    if mode is not None:
        options = dict(MODES[mode])
        if "partition" in options:
            options["partition"] = init_device_mesh("cpu", (2,))
        zeroshard.checkpoint_activations(model, [Noisy], **options)
    model, optimizer = zeroshard.shard(model, decayed(model), stage=3, timeout=20)
    torch.manual_seed(7)
    train_steps(model, optimizer, batches(3))
    return full_parameters(model)


def test_dropout_is_drawn_again_equally_in_units_coarser_than_blocks_in_processes() -> None:
    model = built(Stages)
    reference = run_processes(2, train_stages, model, None)[0]  # not checkpointed at all
    for mode in ("kept", "both"):
        for result in run_processes(2, train_stages, model, mode):
            assert_equal(result, reference)


def test_strides_of_inputs_are_kept_so_that_kernels_are_the_same() -> None:
    """A convolution over channels-last input, whose strides a recomputation must have too."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(3, 3, 3, padding=1)
            self.seen: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append((x.stride(), x.clone()))
            return self.inner(x).tanh()

    model = built(lambda: nn.Sequential(*(Layer() for _ in range(3)))).to(memory_format=torch.channels_last)
    zeroshard.checkpoint_activations(model, offload=True)
    x = torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last).requires_grad_()
    model(x * 1).sum().backward()
    for layer in model:
        (first, values), (second, again) = layer.seen
        assert first == second == (60, 1, 12, 3)
        assert torch.equal(values, again)


# ------------------------------------------------------------------------------------------------------- memory


def keep(rank: int, world: int, rows: int, length: int, offload: bool) -> Any:
    model, optimizer = zeroshard.shard(*paired(make_net(blocks=5)), stage=3, timeout=20)
    zeroshard.checkpoint_activations(model, partition=init_device_mesh("cpu", (world,)), offload=offload)
    reports = []
    for batch in batches(3, rows, length):
        with zeroshard.profile(model) as profile:
            train_step(model, optimizer, batch)
        reports.append((zeroshard.report(model), profile))
    return reports


def paired(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, decayed(model)


@pytest.mark.parametrize(  # 7 wide: 336 elements, 105, 7
    ("world", "shape", "offload"), pairwise([2, 3], [(12, 4), (3, 5), (1, 1)], [False, True]), ids=str
)
def test_a_rank_keeps_its_part_of_each_input_and_gathers_each_once(
    world: int, shape: tuple[int, int], offload: bool
) -> None:
    rows, length = shape
    part = -(-rows * length * 7 // world) * 4  # bytes, rounded up
    slot = round_up(part, ALIGN_BYTES)
    for reports in run_threads(world, keep, world, rows, length, offload):
        for report, profile in reports:  # in the first step, in pieces, and later, in one
            on_device = {kind: held.now for (kind, tier), held in report.memory.items() if tier == "device"}
            assert report.total.now == sum(on_device.values())
            assert profile.held["activations"] == on_device["activations"]
            assert report.memory["activations", "device"].peak == (2 if offload else 5) * slot
            if offload:
                assert report.memory["activations", "host"].peak == 5 * slot
            gathers = report.collectives["activation gather"]
            assert (gathers.count, gathers.bytes) == (5, 5 * world * part)


def after_forward(rank: int, depth: int, options: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes that are held between forward and backward: on the device by the ledger, on the host, and all in truth."""
    model, _ = zeroshard.shard(make_net(blocks=depth, width=16))
    zeroshard.checkpoint_activations(model, **options)
    batch = batches(1, rows=32, length=16)[0]
    for _ in range(2):
        token_step(model, batch)
    kept: list[Any] = []
    _, left = allocated_bytes(lambda: kept.append(net_loss(model, batch)))
    memory = zeroshard.report(model).memory
    near = memory["activations", "device"].now
    far = memory["activations", "host"].now if options else 0
    return near, far, near + left


def test_device_memory_of_offloaded_activations_is_that_of_two_blocks_whatever_the_depth() -> None:
    each, states = 32 * 16 * 16 * 4, 5056  # bytes of a block's input, of the random state that torch keeps for it
    (shallow,), (deep,) = (run_processes(1, after_forward, depth, {"offload": True}, fresh=True) for depth in (4, 16))
    assert shallow[:2] == (2 * each, 4 * each)
    assert deep[:2] == (2 * each, 16 * each)
    assert deep[2] - shallow[2] <= 12 * states  # nothing else is held either
    (shallow,), (deep,) = (run_processes(1, after_forward, depth, {}, fresh=True) for depth in (4, 16))
    assert deep[0] - shallow[0] == 12 * each


def test_what_runs_next_is_on_its_way_while_a_block_runs_again_and_what_is_over_is_gone() -> None:
    model, batch = make_net(blocks=5), ONE_BATCH
    zeroshard.checkpoint_activations(model, offload=True)
    slot = round_up(batch.numel() * 7 * 4, ALIGN_BYTES)
    loss = net_loss(model, batch)
    near: list[int] = []
    for block in model.blocks:
        block.norm.register_forward_pre_hook(lambda *_: near.append(used(model)[0] // slot))
    loss.backward(retain_graph=True)  # so that nothing is given back for good
    assert near == [2, 2, 2, 2, 1]
    assert used(model)[1] == 5 * slot


class Decoder(nn.Module):
    """Its blocks are given the stream, by position and among keywords, and what all of them share."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Any, /, *, stream: torch.Tensor, mask: torch.Tensor, flag: bool, extra: Any) -> Any:
            assert flag and x[1] == "name" and x[0] is stream
            return {"out": torch.tanh(self.inner(x[0]) * mask + extra["memory"].mean(0))}

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, mask = self.encoder(x), torch.ones(8)
        for block in self.blocks:
            x = block((x, "name"), stream=x, mask=mask, flag=True, extra={"memory": memory})["out"]
        return x


def sum_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


@pytest.mark.parametrize("offload", [False, True])
def test_what_blocks_share_is_kept_once_and_what_has_no_gradient_not_at_all(offload: bool) -> None:
    model, x = built(Decoder), torch.randn(6, 8)
    plain = gradients(model, x, sum_loss)
    zeroshard.checkpoint_activations(model, offload=offload)
    for _ in range(2):
        assert_equal(gradients(model, x, sum_loss), plain)
    loss = sum_loss(model, x)
    slot = round_up(x.nbytes, ALIGN_BYTES)
    near, far = used(model)
    # The encoder's output once, and the inputs of three blocks: x itself, the first block's, has no gradient.
    assert (far if offload else near) == 4 * slot
    loss.backward()


def test_an_input_given_twice_is_gathered_once() -> None:
    plain, x = built(Decoder), torch.randn(6, 8)

    def body(rank: int) -> Any:
        model, optimizer = zeroshard.shard(*paired(copy.deepcopy(plain)), timeout=20)
        zeroshard.checkpoint_activations(model, partition=init_device_mesh("cpu", (2,)))
        sum_loss(model, x).backward()
        optimizer.step()
        return zeroshard.report(model).collectives["activation gather"]

    for gathers in run_threads(2, body):
        assert gathers.count == 4 + 3  # the encoder's output for each block, and the streams that have a gradient


# ---------------------------------------------------------------------------------------------------- lifetimes


@pytest.mark.parametrize("mode", ["kept", "offloaded"])
def test_graphs_may_overlap_be_dropped_be_used_twice_and_break_off(mode: str) -> None:
    model = make_net(blocks=4)
    zeroshard.checkpoint_activations(model, **MODES[mode])
    first, second = batches(2)
    wanted = [expected(make_net(blocks=4), batch) for batch in (first, second)]

    def found() -> Tensors:
        result = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return result

    for _ in range(3):
        losses = [net_loss(model, first), net_loss(model, second)]  # several forwards, then backwards in their order
        for index in range(2):
            losses[index].backward()
            assert_equal(found(), wanted[index])
        del losses
        assert used(model) == (0, 0)

        loss = net_loss(model, first)  # no backward comes
        assert sum(used(model)) > 0
        del loss
        assert used(model) == (0, 0)

        loss = net_loss(model, second)  # two backwards over one graph
        loss.backward(retain_graph=True)
        assert_equal(found(), wanted[1])
        token_step(model, first)
        assert_equal(found(), wanted[0])
        loss.backward()
        assert_equal(found(), wanted[1])
        del loss
        assert used(model) == (0, 0)

        handle = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)  # an exception in the middle
        with pytest.raises(ZeroDivisionError):
            net_loss(model, first)
        handle.remove()
        assert used(model) == (0, 0)

        loss = net_loss(model, first)  # and one in backward
        handle = model.blocks[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        model.zero_grad()
        del loss
        assert used(model) == (0, 0)


def test_a_graph_made_by_backward_has_values_of_its_own() -> None:
    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        model(x * 0).sum().backward()  # writes into the memory that activations were kept in
        return gradient.square().sum()

    model = built(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))))
    x = torch.randn(2, 4)
    plain = gradients(model, x, penalty)
    zeroshard.checkpoint_activations(model)
    assert_equal(gradients(model, x, penalty), plain)


@pytest.mark.parametrize("mode", ["kept", "offloaded"])
def test_who_holds_an_input_of_a_recomputed_block_holds_its_values(mode: str) -> None:
    model = make_net()
    zeroshard.checkpoint_activations(model, **MODES[mode])
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.blocks[1].norm.register_forward_pre_hook(lambda module, args: seen.append((args[0], args[0].clone())))
    for batch in batches(3):
        gradients(model, batch)
    assert len(seen) == 6  # three in forward, three in backward
    for held, then in seen:
        assert torch.equal(held, then)


def test_without_gradients_nothing_is_kept_or_run_again() -> None:
    model = make_net()
    zeroshard.checkpoint_activations(model)
    runs = counted([block.up for block in model.blocks])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            net_loss(model, ONE_BATCH)
    model.requires_grad_(False)
    net_loss(model, ONE_BATCH)
    assert runs == [3, 3, 3]
    assert model.blocks[0].forward.context._stores == {}


@pytest.mark.parametrize("mode", ["kept", "offloaded"])
def test_deleting_the_model_frees_it_without_the_cycle_collector_once_its_graph_is_gone(mode: str) -> None:
    model = make_net()
    zeroshard.checkpoint_activations(model, **MODES[mode])
    loss = net_loss(model, ONE_BATCH)
    gc.collect()
    gc.disable()
    try:
        watched = [weakref.ref(model.blocks[0]), weakref.ref(model.blocks[0].forward.context)]
        weight = model.blocks[1].up.weight
        del model
        loss.backward()
        assert weight.grad is not None
        del loss
        assert [reference() for reference in watched] == [None, None]
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------ which blocks


@pytest.mark.parametrize(
    ("blocks", "chosen"),
    [
        (None, "yyyyy"),
        (1, "yyyyy"),
        (2, "ynyny"),
        (3, "ynnyn"),
        (["blocks.[13]"], "nynyn"),
        ([Block], "yyyyy"),
        (lambda model: [model.blocks[4], "blocks.0"], "ynnny"),
        (lambda model: model.blocks[1:3], "nyynn"),
        (lambda model: lambda name, module: name.endswith("2"), "nnynn"),
    ],
)
def test_only_the_chosen_blocks_are_run_again(blocks: Any, chosen: str) -> None:
    model = make_net(blocks=5)
    wanted = expected(model)
    blocks = blocks(model) if callable(blocks) else blocks
    assert zeroshard.checkpoint_activations(model, blocks) is model
    runs = counted([block.norm for block in model.blocks])
    assert_equal(gradients(model), wanted)
    assert runs == [2 if letter == "y" else 1 for letter in chosen]


def test_a_policy_saves_what_is_not_to_be_computed_again() -> None:
    model = make_net(blocks=3)
    wanted = expected(model)

    def products(policy: Any) -> int:
        zeroshard.checkpoint_activations(model, policy=policy)
        with Collectives(ops=("addmm", "mm")) as seen:
            found = gradients(model)
        assert_equal(found, wanted)
        return len(seen.of("addmm")) + len(seen.of("mm"))

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import CheckpointPolicy

        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    everything = products(None)
    assert products([torch.ops.aten.addmm.default]) == everything - 3  # the first product of each block
    assert products(policy) == everything - 3


def test_blocks_inside_blocks_drop_what_the_outer_one_computes_again() -> None:
    model = built(Stages).eval()
    wanted = gradients(copy.deepcopy(model))
    batch = ONE_BATCH
    zeroshard.checkpoint_activations(model, ["blocks.?", "blocks.?.?"])
    runs = counted([block.up for stage in model.blocks for block in stage])
    loss = net_loss(model, batch)
    assert used(model)[0] == 2 * round_up(batch.numel() * 7 * 4, ALIGN_BYTES)  # the inputs of the two stages alone
    loss.backward()
    assert runs == [3, 2, 3, 2]  # the last one's input is all that the outer one needs of it
    assert_equal({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, wanted)


def test_another_call_replaces_the_first_and_an_empty_one_undoes_it() -> None:
    model = make_net()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    zeroshard.checkpoint_activations(model)
    zeroshard.checkpoint_activations(model, 2, offload=True)
    runs = counted([block.norm for block in model.blocks])
    gradients(model)
    assert runs == [2, 1, 2]
    assert isinstance(model.blocks[0], Block)
    assert list(model.state_dict()) == keys
    assert str(inspect.signature(model.blocks[0].forward)) == "(x: 'torch.Tensor') -> 'torch.Tensor'"
    zeroshard.checkpoint_activations(model, ())
    gradients(model)
    assert runs == [3, 2, 3]
    assert {name: module.__dict__.keys() for name, module in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }


def test_a_forward_that_the_instance_had_is_called_and_given_back() -> None:
    model = make_net()
    theirs = model.blocks[0].forward = lambda x: x * 2
    wanted = gradients(copy.deepcopy(model))
    zeroshard.checkpoint_activations(model)
    assert_equal(gradients(model), wanted)
    zeroshard.checkpoint_activations(model, [])
    assert model.blocks[0].forward is theirs


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_checkpointed_on_its_own(copied: Any) -> None:
    model = make_net()
    wanted = expected(model)
    zeroshard.checkpoint_activations(model, offload=True)
    gradients(model)
    other = copied(model)
    block = copied(other.blocks[1])  # and so is a block alone
    del model
    runs = counted([*(block.norm for block in other.blocks), block.norm])
    assert_equal(gradients(other), wanted)
    block(torch.randn(2, 7, requires_grad=True) * 1).sum().backward()
    assert runs == [2, 2, 2, 2]


def test_a_model_goes_on_after_unwrap_and_is_counted_only_while_it_is_sharded() -> None:
    plain = make_net()
    wanted = expected(plain)

    def body(rank: int) -> None:
        model = copy.deepcopy(plain)
        zeroshard.checkpoint_activations(model, partition=init_device_mesh("cpu", (2,)))
        assert_equal(gradients(model), wanted)
        model.zero_grad()
        zeroshard.shard(model, stage=3, timeout=20)
        token_step(model, ONE_BATCH)
        assert zeroshard.report(model).memory["activations", "device"].now > 0
        assert_equal({name: zeroshard.full_gradient(model, name) for name in wanted}, wanted)
        ledger = model._zeroshard.engine.context.tracker
        zeroshard.unwrap(model)
        assert_equal(gradients(model), wanted)
        assert ledger.by_kind["activations", "device"].now == 0

    run_threads(2, body)


# ------------------------------------------------------------------------------------------------- real models


def gpt(**options: Any) -> GPT:
    return built(lambda: GPT(GPTConfig(vocab_size=13, context=8, layers=4, heads=2, width=16, **options)))


def gpt_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, ids)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("mode", ["kept", "offloaded"])
def test_the_reference_gpt_also_where_it_checkpoints_itself(mode: str, own: bool) -> None:
    model, ids = gpt(checkpoint=own), tokens(1, 13)[0]
    wanted = gradients(gpt(checkpoint=True), ids, gpt_loss)
    zeroshard.checkpoint_activations(model, **MODES[mode])
    assert_equal(gradients(model, ids, gpt_loss), wanted)


def llama() -> Any:
    return built(lambda: hugging_face.llama(13))


def hf_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss


@pytest.mark.parametrize("mode", ["kept", "offloaded"])
def test_llama_keeps_its_hidden_states_and_nothing_of_what_layers_share(mode: str) -> None:
    model, ids = llama(), tokens(1, 13)[0]
    theirs = copy.deepcopy(model)
    theirs.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wanted = gradients(theirs.train(), ids, hf_loss)
    zeroshard.checkpoint_activations(model.train(), **MODES[mode])
    assert_equal(gradients(model, ids, hf_loss), wanted)  # though it makes a cache by default
    loss = hf_loss(model, ids)
    assert max(used(model)) == 3 * round_up(ids.numel() * 16 * 4, ALIGN_BYTES)
    del loss
    output = model(input_ids=ids, output_hidden_states=True)
    assert len(output.hidden_states) == 4
    with torch.no_grad():
        generated = model.generate(ids[:, :3], max_new_tokens=4, do_sample=False)
    assert generated.shape[1] == 7


def test_llama_trains_sharded_as_plain() -> None:
    def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = hf_loss(model, ids)
        loss.backward()
        return loss

    model = llama().train()
    zeroshard.checkpoint_activations(model, 2, offload=True)
    model.config.use_cache = False  # what blocks in between write into a cache would be refused
    assert_same(model, step, tokens(2, 13), stage=3)


def test_t5_keeps_the_encoders_output_once() -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=13, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=4, num_heads=2, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    model = built(lambda: transformers.T5ForConditionalGeneration(config))
    ids = tokens(1, 13)[0]

    def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    wanted = gradients(copy.deepcopy(model), ids, loss_of)
    zeroshard.checkpoint_activations(model)
    assert_equal(gradients(model, ids, loss_of), wanted)
    loss = loss_of(model, ids)
    rows, length = ids.shape
    stream, bias = rows * length * 16 * 4, 2 * length * length * 4
    # Two and four blocks' inputs, the encoder's output, and two position biases, however many blocks use them.
    assert used(model)[0] == 7 * round_up(stream, ALIGN_BYTES) + 2 * round_up(bias, ALIGN_BYTES)
    loss.backward()

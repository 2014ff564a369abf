"""Offloaded and divided activations on a GPU: streams, pinned memory, true bytes. Skipped elsewhere."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain import Tensors, assert_equal, batches, full_parameters, net_loss
from ranks import run_processes
from torch.distributed.device_mesh import init_device_mesh
from zoo import make_net

import zeroshard
from zeroshard.activations.store import ActivationStore
from zeroshard.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH, ROWS, LENGTH = 256, 16, 128
EACH = ROWS * LENGTH * WIDTH * 2  # bytes of a block's input in bf16


def gpt(layers: int, own: bool = False) -> GPT:
    torch.manual_seed(0)
    shape = GPTConfig(vocab_size=512, context=LENGTH, layers=layers, heads=4, width=WIDTH, checkpoint=own)
    return GPT(shape).cuda().bfloat16()


def ids() -> torch.Tensor:
    return torch.randint(512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()


def gradients(model: GPT, tokens: torch.Tensor) -> Tensors:
    model.zero_grad()
    model(tokens, tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def store_of(model: GPT) -> ActivationStore:
    (store,) = model.blocks[0].forward.context._stores.values()
    return store  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("late", ["neither", "lane", "compute"])
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_are_bit_equal_whichever_stream_is_late(offload: bool, late: str) -> None:
    tokens = ids()
    wanted = gradients(gpt(6, own=True), tokens)
    model = gpt(6)
    zeroshard.checkpoint_activations(model, offload=offload)
    gradients(model, tokens)

    def sleep(*_: Any) -> None:
        if late == "compute":
            torch.cuda._sleep(2_000_000)  # about a millisecond
        elif late == "lane":
            with store_of(model)._copy_stream:
                torch.cuda._sleep(2_000_000)

    for block in model.blocks:
        block.mlp.register_forward_pre_hook(sleep)  # in forward and in recomputation
    for _ in range(3):
        assert_equal(gradients(model, tokens), wanted)


def test_host_memory_is_pinned_one_piece_and_given_back() -> None:
    model, tokens = gpt(4), ids()
    zeroshard.checkpoint_activations(model, offload=True)
    for _ in range(3):
        gradients(model, tokens)
    store = store_of(model)
    loss = model(tokens, tokens)
    (chunk,) = store.host_stack._chunks
    assert chunk.nbytes == 4 * EACH
    assert chunk.buffer.tensor.is_pinned()
    address = chunk.buffer.tensor
    loss.backward()
    del loss, chunk, store
    zeroshard.checkpoint_activations(model, ())
    assert not address.is_pinned()


def held_after_forward(layers: int, options: dict[str, Any]) -> int:
    """Bytes that a forward leaves on the device, beyond the model's gradients."""
    model, tokens = gpt(layers), ids()
    zeroshard.checkpoint_activations(model, **options)
    for _ in range(2):
        model(tokens, tokens).backward()
    gc.collect()  # else what other tests left may be freed while this one counts
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - store_of(model).device_stack.allocated_bytes
    loss = model(tokens, tokens)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del loss
    return held


def test_device_bytes_after_forward_are_constant_with_depth_when_offloaded() -> None:
    shallow, deep = (held_after_forward(layers, {"offload": True}) for layers in (4, 16))
    assert abs(deep - shallow) < EACH / 8
    grown = held_after_forward(16, {}) - held_after_forward(4, {})
    assert grown == pytest.approx(12 * EACH, rel=0.05)


def no_syncs(rank: int, options: dict[str, Any]) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = gpt(4).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    mesh = init_device_mesh("cuda", (8,))
    model, sharded = zeroshard.shard(model, optimizer, stage=3, precision="bf16", mesh=mesh)
    if "partition" in options:
        options = {**options, "partition": mesh}
    zeroshard.checkpoint_activations(model, **options)
    tokens = ids()
    for step in range(5):
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        model(tokens, tokens).backward()
        sharded.step()
        sharded.zero_grad()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"partition": True, "offload": True}])
def test_a_step_never_waits_for_the_device(options: dict[str, Any]) -> None:
    run_processes(1, no_syncs, options)


def divided(rank: int, model: Any, options: dict[str, Any] | None, stage: int) -> Tensors:
    model = copy.deepcopy(model).cuda()
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, timeout=60)
    if options is not None:
        zeroshard.checkpoint_activations(model, partition=init_device_mesh("cuda", (2,)), **options)
    for batch in batches(3):
        net_loss(model, batch.cuda()).backward()  # the same on both ranks
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in full_parameters(model).items()}


def test_two_gloo_ranks_on_one_gpu_divide_their_inputs() -> None:
    model = make_net(blocks=4)
    (wanted, _) = run_processes(2, divided, model, None, 3)
    for options in ({}, {"offload": True}):
        for found in run_processes(2, divided, model, options, 3):
            assert_equal(found, wanted)

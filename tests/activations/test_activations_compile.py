"""Checkpointed blocks that are compiled, or that call compiled code, train as the plain model does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ranks
import torch
from plain import (
    ONE_BATCH,
    Tensors,
    assert_close,
    assert_equal,
    batches,
    full_parameters,
    net_loss,
    sgd,
    shares,
    token_step,
    train_steps,
)
from ranks import run_processes
from test_models_compile import in_place, wrappers
from zoo import make_net

import zeroshard


@pytest.fixture(scope="module", autouse=True)
def own_processes() -> Iterator[None]:
    """The compiler leaves much behind in a process, which tests that count tensors would find."""
    yield
    ranks.close_pool()


def gradients(model: Any) -> Tensors:
    model.zero_grad()
    token_step(model, ONE_BATCH)
    return {name.replace("_orig_mod.", ""): p.grad.clone() for name, p in model.named_parameters()}


def inside(model: Any, backend: Any) -> None:
    for block in model.blocks:
        block.up = torch.compile(block.up, backend=backend)


def whole(model: Any, backend: Any) -> None:
    model.compile(backend=backend)


WAYS: list[Callable[[Any, Any], None]] = [in_place, wrappers, inside, whole]


def compiled(rank: int, plain: Any) -> list[tuple[str, Any, list[str], int]]:
    """Each way in both orders: gradients of a second step, what was compiled, and bytes kept far between."""
    results = []
    for way in WAYS:
        for first in ("compile", "checkpoint"):
            torch._dynamo.reset()
            targets: list[str] = []

            def recording(graph: Any, inputs: Any, targets: list[str] = targets) -> Any:
                inner = [graph, *(m for m in graph.children() if isinstance(m, torch.fx.GraphModule))]
                targets.extend(str(node.target) for module in inner for node in module.graph.nodes)
                return graph.forward

            model = copy.deepcopy(plain)
            if first == "compile":
                way(model, recording)
            zeroshard.checkpoint_activations(model, offload=True)
            if first == "checkpoint":
                way(model, recording)
            gradients(model)
            found = gradients(model)
            held = net_loss(model, ONE_BATCH)
            wrapped = next(
                m.__dict__["forward"] for m in model.modules() if hasattr(m.__dict__.get("forward"), "restore")
            )
            far = sum(store.host_stack.used_bytes for store in wrapped.context._stores.values())
            del held
            results.append((f"{way.__name__} {first}", found, targets, far))
    return results


def train_sharded(rank: int, model: Any, way: Callable[[Any, Any], None] | None) -> Tensors:
    torch._dynamo.reset()
    model, optimizer = zeroshard.shard(model, sgd(model), stage=3, timeout=20)
    if way is not None:
        zeroshard.checkpoint_activations(model, offload=True)
        way(model, "aot_eager")
    train_steps(model, optimizer, shares(batches(2), rank, 2))
    return full_parameters(model)


@pytest.mark.parametrize("way", [in_place, whole])
def test_sharded_checkpointed_and_compiled_at_once(way: Any) -> None:
    wanted, _ = run_processes(2, train_sharded, make_net(), None)
    for found in run_processes(2, train_sharded, make_net(), way):
        assert_close(found, wanted)


def test_compiled_blocks_and_models_train_as_plain_and_compiled_code_inside_a_block_is_offloaded_around() -> None:
    plain = make_net()
    wanted = gradients(copy.deepcopy(plain))
    (results,) = run_processes(1, compiled, plain)
    assert len(results) == 2 * len(WAYS)
    for what, found, targets, far in results:
        assert_equal(found, wanted)
        assert any("linear" in target for target in targets), what
        # Where the compiler has the block in its hands, it decides; else each block's input is in host memory.
        assert (far > 0) == (what in ("wrappers compile", "inside compile", "inside checkpoint")), what

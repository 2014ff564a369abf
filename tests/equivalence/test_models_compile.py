"""Compiled blocks and models, compiled before or after they are sharded, train as the plain model does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ranks
import torch
from plain import adamw, assert_close, copied, full_parameters, net_loss, split, token_step, tokens
from ranks import run_processes
from zoo import Net, built

import zeroshard

VOCABULARY = 11  # of zoo.Net


@pytest.fixture(scope="module", autouse=True)
def own_processes() -> Iterator[None]:
    """The compiler leaves much behind in a process, which tests that count tensors would find."""
    yield
    ranks.close_pool()


_compiled: list[str] = []  # names of the operations in the graphs compiled in this process


def recording(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend that runs the graph as it is and notes what is in it."""
    _compiled.extend(str(node.target) for node in graph.graph.nodes)
    return graph.forward


def in_place(model: Any, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def wrappers(model: Any, backend: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)


def whole(model: Any, backend: Any) -> None:
    model.compile(backend=backend)


def train_compiled(
    rank: int, model: Any, compile_it: Callable[[Any, Any], None], backend: Any, first: str, data: Any, stage: int
) -> tuple[float, dict[str, torch.Tensor], list[str]]:
    """Train a model compiled before or after it is sharded; evaluate in between; tell what was compiled."""
    torch._dynamo.reset()
    _compiled.clear()
    if first == "compile":
        compile_it(model, backend)
    model, optimizer = zeroshard.shard(model, adamw(model), stage=stage, timeout=20)
    if first == "shard":
        compile_it(model, backend)
    for batch in data:
        token_step(model, split(batch, rank, 2))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss = net_loss(model, batch).item()
        model.train()
    parameters = {name.replace("_orig_mod.", ""): value for name, value in full_parameters(model).items()}
    return loss, parameters, _compiled


@pytest.mark.parametrize(
    ("stage", "backend", "compile_it", "first"),  # each way in both orders, also in stage 3 alone
    [
        (stage, backend, compile_it, ("compile", "shard")[(row + column) % 2])
        for row, (stage, backend) in enumerate([(1, recording), (3, recording), (3, "aot_eager")])
        for column, compile_it in enumerate([in_place, wrappers, whole])
    ],
)
def test_compiled_models_train_as_plain(stage: int, backend: Any, compile_it: Any, first: str) -> None:
    model, data = built(Net), tokens(2, VOCABULARY)
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    for batch in data:
        token_step(plain, batch)
        optimizer.step()
        optimizer.zero_grad()
    expected = net_loss(plain, data[-1]).item()
    results = run_processes(2, train_compiled, model, compile_it, backend, first, data, stage)
    for loss, parameters, compiled in results:
        assert loss == pytest.approx(expected, rel=1e-6)
        assert_close(parameters, copied(plain))
        if backend is recording:  # the blocks' own work is in a graph, not around it
            assert any("tanh" in name for name in compiled)
            assert any("linear" in name for name in compiled)

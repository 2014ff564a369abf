"""register_forward_method(): methods other than forward train as in a plain run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage
from plain import assert_close, momentum, take_step
from ranks import run_processes, run_threads
from torch import nn
from torch.nn.functional import cross_entropy, linear
from zoo import Mlp, built

import zeroshard


class Layer(Mlp):
    """A block with a method that uses its parameters itself, and a part of it inside another module."""

    def transposed(self, x: torch.Tensor) -> torch.Tensor:
        return x + linear(torch.tanh(linear(x, self.down.weight.t())), self.up.weight.t())


class Encoder(nn.Module):
    """A module without units of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(3))

    def encode(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * scale
        return x + self.layers[0].up.bias


class Model(nn.Module):
    """Trains by several methods, which call forward, each other and modules, and use parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(11, 8), Encoder()
        self.gain = nn.Parameter(torch.ones(8))
        self.seen: list[torch.dtype] = []

    def forward(self, tokens: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self.score(self.encoder.layers[1](self.embedding(tokens)) + noise)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x * self.gain, self.embedding.weight)

    def compute_loss(self, tokens: torch.Tensor, noise: torch.Tensor) -> dict[str, Any]:
        """Return the loss."""
        self.seen.append(noise.dtype)
        logits = self(tokens, noise) + self.score(self.encoder.layers[2].up(self.embedding(tokens)) + noise)
        return {"loss": cross_entropy(logits.float(), tokens)}

    def fails(self, tokens: torch.Tensor) -> torch.Tensor:
        self.embedding(tokens).sum()
        raise KeyError("no loss")

    def batches(self) -> Iterator[torch.Tensor]:
        yield self.gain.sum()


METHODS = ("compute_loss", "encoder.encode", "encoder.layers.0.transposed", "fails")


def make_model() -> Model:
    return built(Model)


def losses(model: Any, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    noise = tokens.float().outer(torch.linspace(0, 0.1, 8))
    yield model.compute_loss(tokens, noise=noise)["loss"]
    scale = torch.full((), 0.5)
    loss = model.encoder.encode(noise, scale=scale).float().square().mean()
    yield loss + model(tokens, noise).float().square().mean() / 9
    yield model.encoder.layers[0].transposed(noise).float().square().mean()


def train(model: Any, optimizer: Any, rank: int, world: int) -> list[torch.Tensor]:
    found = []
    for step in range(2):
        tokens = (torch.arange(8) * (step + 3) % 11).chunk(world)[rank]
        for loss in losses(model, tokens):
            with pytest.raises(KeyError, match="no loss"):
                model.fails(tokens)
            take_step(optimizer, loss)
            found.append(loss.detach().float())
    return found


def register(model: nn.Module) -> None:
    for path in METHODS:
        module, _, name = path.rpartition(".")
        zeroshard.register_forward_method(model.get_submodule(module), name)


def trained(rank: int, registers_before: bool, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = make_model()
    if registers_before:
        register(model)
    model, optimizer = zeroshard.shard(model, momentum(model), **options)
    if not registers_before:
        register(model)
    assert model.compute_loss.__doc__ == "Return the loss."
    train(model, optimizer, rank, 2)
    wanted = torch.bfloat16 if options.get("precision") else torch.float32
    assert set(model.seen) == {wanted}
    state = zeroshard.state_dict(model, rank=None)
    kept = model.compute_loss
    plain = zeroshard.unwrap(model)
    assert not {"compute_loss", "fails"} & vars(plain).keys() and "encode" not in vars(plain.encoder)
    assert kept(torch.arange(3), torch.ones(3, 8))["loss"].dtype == torch.float32  # a plain method again
    model, optimizer = zeroshard.shard(plain, momentum(plain), **options)  # it stays registered
    train(model, optimizer, rank, 2)
    return state


@pytest.mark.parametrize("options", [{}, {"offload": "host"}, {"precision": "bf16"}], ids=str)
@every_stage
def test_methods_train_as_in_a_plain_run(stage: int, options: dict[str, Any]) -> None:
    plain = make_model()
    train(plain, momentum(plain), 0, 1)
    tolerance = {"rtol": 0.05, "atol": 0.02} if options.get("precision") else {"rtol": 2e-6, "atol": 2e-6}
    for state in run_threads(2, trained, bool(stage % 2), {"stage": stage, **options}):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, **tolerance)


def test_methods_train_over_gloo() -> None:
    plain = make_model()
    train(plain, momentum(plain), 0, 1)
    for state in run_processes(2, trained, True, {"stage": 3}):
        assert_close(state, plain.state_dict(), 2e-6)


@at_stages(0, 3)
def test_a_method_that_is_not_registered_is_right_or_raises(stage: int) -> None:
    def body(rank: int) -> None:
        model, _ = zeroshard.shard(make_model(), stage=stage)
        tokens, noise = torch.arange(3), torch.ones(3, 8)
        if stage == 3:
            with pytest.raises(RuntimeError, match=r"register it: zeroshard.register_forward_method\(model"):
                model.encoder.encode(noise, scale=torch.ones(()))
        else:
            model.compute_loss(tokens, noise)["loss"].backward()
            plain = make_model()
            plain.compute_loss(tokens, noise)["loss"].backward()
            for name, parameter in plain.named_parameters():
                wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found = zeroshard.full_gradient(model, name)
                torch.testing.assert_close(torch.zeros_like(parameter) if found is None else found, wanted)

    run_threads(2, body)


def test_a_registered_model_is_freed() -> None:
    model, _ = zeroshard.shard(make_model(), stage=0)
    register(model)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_wrong_names_raise() -> None:
    for model in (make_model(), zeroshard.shard(make_model())[0]):
        for name, words in {
            "compute_los": "Model has no method 'compute_los': did you mean 'compute_loss'",
            "gain": "Model has no method 'gain'",
            "encoder": "Model has no method 'encoder'",
            "forward": "'forward' runs as a forward already",
            "state_dict": "'state_dict' is a method of nn.Module",
            "batches": "Model.batches is a generator",
        }.items():
            with pytest.raises(ValueError, match=words):
                zeroshard.register_forward_method(model, name)

"""Options of single parameters, which the optimizers of bitsandbytes read from a manager: those of the plain run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import Tensors, copied, take_step
from ranks import run_threads
from torch import nn
from zoo import built

import zeroshard


class Manager:
    """The tables of bitsandbytes' manager; here one for each rank."""

    def __init__(self) -> None:
        self.pid2config: dict[int, dict[str, Any]] = {}
        self.index2config: dict[tuple[int, int], dict[str, Any]] = {}
        self.module_weight_config_triple: list[tuple[nn.Module, str, dict[str, Any]]] = []


class Overridable(torch.optim.Optimizer):
    """Momentum SGD with options of single parameters, found as bitsandbytes finds them."""

    def __init__(self, params: Any, manager: Manager) -> None:
        super().__init__(params, {"lr": 0.1})
        self.mng, self.initialized = manager, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.initialized:
            for module, name, options in self.mng.module_weight_config_triple:
                for number, group in enumerate(self.param_groups):
                    for place, parameter in enumerate(group["params"]):
                        if parameter is getattr(module, name):
                            self.mng.pid2config[id(parameter)] = options
                            self.mng.index2config[number, place] = options
            self.initialized = True
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                options = {"lr": group["lr"], **self.mng.index2config.get((number, place), {})}
                options.update(self.mng.pid2config.get(id(parameter), {}))
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(options.get("sign", 1.0) * options["lr"] * momentum)


def make_model() -> Any:
    return built(lambda: nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)))


def make_optimizer(model: Any, manager: Manager, is_late: bool = False) -> Overridable:
    """By module, by id and by place; with ``is_late`` the last parameter is in no group yet."""
    parameters = list(model.parameters())
    manager.index2config[0, 0] = {"sign": -1.0}  # which the options of the module replace, of which the last ones count
    manager.module_weight_config_triple += [(model[0], "weight", {"lr": lr}) for lr in (5.0, 0.01)]
    manager.pid2config[id(model[3].weight)] = {"lr": 0.3}
    optimizer = Overridable([{"params": parameters[:1]}, {"params": parameters[1 : -1 if is_late else None]}], manager)
    manager.index2config[1, 1] = {"lr": 0.0}  # the bias
    return optimizer


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        take_step(optimizer, model(torch.tensor([1, 3, 5, 5])).square().sum())


def train_plain() -> Tensors:
    model = make_model()
    train(model, make_optimizer(model, Manager()))
    return copied(model)


def train_sharded(rank: int, stage: int, is_late: bool) -> Tensors:
    model, manager = make_model(), Manager()
    plain = make_optimizer(model, manager, is_late)
    model, optimizer = zeroshard.shard(model, plain, stage=stage)
    assert plain.mng is not manager
    if is_late:
        optimizer.add_param_group({"params": [model[3].weight]})
    train(model, optimizer, 1)
    manager.index2config[1, 0] = {"lr": 5.0}  # by another optimizer of the process
    train(model, optimizer, 1)
    model, restored = zeroshard.unwrap(model, optimizer)
    assert restored is plain and plain.mng is manager
    del manager.index2config[1, 0]
    train(model, restored, 1)
    return copied(model)


@pytest.mark.parametrize(("world", "stage", "is_late"), [(1, 3, False), (2, 0, True), (2, 2, False), (3, 3, True)])
def test_they_are_those_of_the_plain_run(world: int, stage: int, is_late: bool) -> None:
    expected = train_plain()
    assert torch.equal(expected["1.bias"], dict(make_model().named_parameters())["1.bias"])
    for found in run_threads(world, train_sharded, stage, is_late):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_groups_without_them_stay_on_slices() -> None:
    model, manager = make_model(), Manager()
    manager.pid2config[id(model[0].weight)] = {"lr": 0.01}
    groups = [{"params": [model[0].weight]}, {"params": [*model[1].parameters(), model[3].weight]}]
    model, _ = zeroshard.shard(model, Overridable(groups, manager))
    routing = zeroshard.report(model).routing
    assert set(routing.whole) == {"0.weight"} and set(routing.flat) == {"1.weight", "1.bias", "3.weight"}


@pytest.mark.parametrize("kind", ["module", "id", "value"])
def test_what_is_registered_after_shard_raises(kind: str) -> None:
    model, manager = make_model(), Manager()
    plain = make_optimizer(model, manager)
    model, optimizer = zeroshard.shard(model, plain)
    train(model, optimizer, 1)
    manager.pid2config[id(plain)] = {"lr": 1.0}  # of another model
    train(model, optimizer, 1)
    if kind == "module":
        manager.module_weight_config_triple.append((model[1], "weight", {"lr": 1.0}))
    elif kind == "id":
        manager.pid2config[id(model[1].weight)] = {"lr": 1.0}
    else:
        manager.pid2config[id(model[3].weight)]["lr"] = 1.0
    with pytest.raises(RuntimeError, match="registered or changed after shard"):
        train(model, optimizer, 1)

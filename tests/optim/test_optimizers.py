"""Which optimizers run on shards, found by trying, and what becomes of their states."""

from __future__ import annotations

import copy
import functools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import at_stages, pairwise
from plain import (
    adamw,
    assert_close,
    assert_same_training,
    full_parameters,
    masters,
    of,
    sgd,
    sharded,
    square_steps,
    take_step,
)
from ranks import RanksFailed, run_processes, run_threads
from rules import Rule
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.two_tensor import TwoTensor
from zoo import built

import zeroshard
from zeroshard.optim.elementwise_check import find_whole_param_groups


def make_model() -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1)))


MODEL = make_model()
DATA = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Own(Rule):
    """SGD with momentum, to be made worse by subclasses."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, lr, momentum=0.5, **options)

    def change(self, group: dict[str, Any], p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(group["momentum"]).add_(grad)
        state["step"] = state.get("step", 0) + 1
        return self.change(group, p, momentum)


class TrustRatio(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum * (p.norm() / momentum.norm() if p.norm() > 0 and momentum.norm() > 0 else 1.0)


class ClipsByTensor(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    nn.utils.clip_grad_norm_([p], 100.0)
        return super().step(closure)


class ByDimensions(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum + 0.01 * p if p.ndim > 1 else momentum


class OnlyIfLarge(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / momentum.abs().mean() if min(p.shape, default=0) >= 128 else momentum


class OnlyIfHuge(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / momentum.abs().mean() if p.ndim == 2 and min(p.shape) > 1000 else momentum


class AfterLongWarmup(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / momentum.abs().max().clamp(min=1e-3) if self.state[p]["step"] > 100_000 else momentum


class AfterWarmup(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / momentum.abs().max().clamp(min=1e-3) if self.state[p]["step"] > 100 else momentum


class EveryHundredth(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum - momentum.mean() if self.state[p]["step"] % 100 == 0 else momentum


class SumInGroup(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        group["d"] = group.get("d", 1e-6) + float(p.grad.abs().sum())  # type: ignore[union-attr]
        return momentum


class CountsParameters(Own):
    calls = 0

    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return momentum


class StateOfRows(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        self.state[p]["rows"] = momentum.sum(-1) if p.ndim else momentum
        return momentum


class ByAttribute(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum * getattr(p, "rate", 1.0)


class LossOfAll(Own):
    """Elementwise in each group, but for the largest of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        largest = max(
            (p.grad.abs().max() for g in self.param_groups for p in g["params"] if p.grad is not None), default=1
        )
        for group in self.param_groups:
            group["momentum"] = float(0.5 * largest / (1 + largest))
        super().step()


class ByIndex(Own):
    """Treats the first parameter of a group differently."""

    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / momentum.abs().max().clamp(min=1e-3) if p is group["params"][0] else momentum


class ByShape(Own):
    """Divides by the largest momentum of all parameters of a shape."""

    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        alike = [self.state[q]["momentum"] for q in group["params"] if q.shape == p.shape and self.state[q]]
        return momentum / (1 + max(other.norm() for other in alike))


class OnlyIfAllHaveGrads(Own):
    """Waits for a step in which every parameter has a gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if all(p.grad is not None for group in self.param_groups for p in group["params"]):
            super().step()


WHOLE = (
    *(TrustRatio, ClipsByTensor, ByDimensions, OnlyIfLarge, AfterWarmup, AfterLongWarmup, EveryHundredth, StateOfRows),
    ByAttribute,
)
TOGETHER: dict[type, str] = {
    SumInGroup: "the group's number 'd' is",
    CountsParameters: "its attribute 'calls' is",
    LossOfAll: "without some others|the group's number 'momentum'",
    ByIndex: "has moved by .* without some others, and by .* with all",
    ByShape: "has moved by .* without some others, and by .* with all",
    OnlyIfAllHaveGrads: "has moved by .* without some others, and by .* with all",
}


@pytest.mark.guarantee("Trial of an optimizer")
@pytest.mark.parametrize("kind", [*WHOLE, *TOGETHER], ids=lambda kind: kind.__name__)
def test_an_optimizer_that_looks_beyond_one_element_is_found_by_what_it_does(kind: Any) -> None:
    model = copy.deepcopy(MODEL)
    model[0].weight.rate = 0.5  # type: ignore[union-attr, assignment]
    optimizer = kind(model.parameters())
    random = torch.get_rng_state()
    if kind in TOGETHER:
        with pytest.raises(ValueError, match=f"{kind.__name__} reads more than one parameter .*{TOGETHER[kind]}"):
            zeroshard.shard(model, optimizer)
    else:
        assert find_whole_param_groups(optimizer, None, None) == [True]
    assert not optimizer.state and "d" not in optimizer.param_groups[0] and torch.equal(random, torch.get_rng_state())
    model(DATA).sum().backward()
    optimizer.step()  # both are as they were


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 2), (2, 2, 2, 2)], ids=str)
def test_parameters_of_one_number_of_dimensions_that_read_each_other_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ByShape reads more than one parameter"):
        find_whole_param_groups(ByShape([nn.Parameter(torch.ones(shape)) for _ in range(2)]), None, None)


class OfVolumes(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum - momentum.mean() if p.ndim == 5 else momentum


def test_a_rule_for_many_dimensions_is_tried_if_the_model_has_them() -> None:
    for model, needs_whole in ((nn.Conv2d(2, 2, 2), False), (nn.Conv3d(2, 2, 2), True)):
        assert find_whole_param_groups(OfVolumes(model.parameters()), None, None) == [needs_whole]


def test_a_rule_for_large_matrices_is_tried_if_the_model_has_some() -> None:
    for shape, needs_whole in (((1000, 40_000), False), ((1001, 1001), True)):
        parameter = nn.Parameter(torch.zeros(()).expand(shape))  # takes no memory
        assert find_whole_param_groups(OnlyIfHuge([parameter]), None, None) == [needs_whole]


class ReadsOtherGroup(Own):
    """Each group alone is right: the second, of matrices, is scaled by the size of the first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if len(self.param_groups) > 1:
            for p in self.param_groups[1]["params"]:
                p.mul_(1 - 1e-3 * len(self.param_groups[0]["params"]))

    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / momentum.norm().clamp(min=1e-3) if group["momentum"] == 0.9 else momentum


def test_groups_that_read_each_other_are_refused() -> None:
    groups = [{"params": [p for p in MODEL.parameters() if p.ndim == dims]} for dims in (1, 2)]
    assert find_whole_param_groups(ReadsOtherGroup([{**groups[1], "momentum": 0.9}]), None, None) == [True]
    both = [groups[0], {**groups[1], "momentum": 0.9}]
    with pytest.raises(ValueError, match=r"ReadsOtherGroup reads more than one parameter .* of group 1 has moved"):
        find_whole_param_groups(ReadsOtherGroup(both), None, None)


class ByFlag(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return 0.5 * momentum if p.use_muon else momentum  # type: ignore[attr-defined]


class ByName(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                p.mul_(0.9 if name == "0.weight" else 0.99)
        super().step()


@pytest.mark.parametrize("kind", [ByFlag, ByName])
def test_attributes_and_names_of_parameters_are_there_in_a_step(kind: Any) -> None:
    """A rule that reads them is never run on slices, which have none, even if it is elementwise for the rest."""

    def make(model: Any) -> torch.optim.Optimizer:
        for name, p in model.named_parameters():
            p.use_muon = name == "0.weight"
        return kind(model.named_parameters() if kind is ByName else model.parameters())

    assert_same_training(2, MODEL, make, [DATA] * 3, square_steps, stages=[3])


class NeedsClosure(Own):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Draws(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum + 0.01 * torch.randn_like(p)


class DrawsFromItsOwn(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(0)

    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum + 0.01 * torch.rand(p.shape, generator=self.generator)


class Raises(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("only on Thursdays")


class HoldsParameters(Own):
    def __init__(self, params: Any) -> None:
        self.params = list(params)
        super().__init__(self.params)


class HoldsIds(Own):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.large = {id(p) for p in params if p.ndim > 1}


class Wraps(Own):
    def __init__(self, params: Any) -> None:
        self.base = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.base.param_groups[0]["params"])


class StateOfItsOwn(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["all"]["count"] = 1  # type: ignore[index]


class MoreInStateDict(Own):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 1}


class KeepsData(TrustRatio):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return super().change(group, p, momentum) + 0.1 * self.state[p].setdefault("anchor", [p.data])[0]


UNDECIDED: dict[type, str] = {
    NeedsClosure: r"needs 'closure'",
    Raises: r"step\(\) raises RuntimeError: only on Thursdays",
}
REFUSED: dict[type, str] = {
    HoldsParameters: "attribute 'params' holds parameters",
    HoldsIds: r"attribute 'large' holds the id\(\) of a parameter",
    Wraps: r"attribute 'base' holds a SGD.*pass that one to shard\(\)",
    Draws: "draws random numbers.*draws would not be those of the unsharded run",
    DrawsFromItsOwn: "'generator' holds a generator: its step.* draws random numbers",
    StateOfItsOwn: "a state under 'all', which is not one of its parameters",
    KeepsData: "its state 'anchor' shares the memory of its parameter",
    MoreInStateDict: r"its state_dict\(\) also has 'count'",
}


@pytest.mark.guarantee("Trial of an optimizer")
@pytest.mark.parametrize("kind", [*UNDECIDED, *REFUSED], ids=lambda kind: kind.__name__)
def test_what_trying_does_not_decide_is_refused(kind: Any) -> None:
    model, random = copy.deepcopy(MODEL), torch.get_rng_state()
    wanted = (
        f"cannot run on shards.*{REFUSED[kind]}" if kind in REFUSED else f"may read.*{UNDECIDED[kind]}.*elementwise="
    )
    with pytest.raises(ValueError, match=f"{kind.__name__} {wanted}"):
        zeroshard.shard(model, kind(model.parameters()))
    assert torch.equal(random, torch.get_rng_state())
    for asserted in (True, False):
        optimizer = kind(list(model.parameters()))
        if kind not in (HoldsParameters, HoldsIds, Wraps):
            assert find_whole_param_groups(optimizer, asserted, None) == [not asserted]
            continue
        not_copied = [torch.zeros(5000), torch.Generator(), iter(()), nn.Linear(2, 2)]
        optimizer.__dict__ = {"first": not_copied, **vars(optimizer)}
        with pytest.raises(ValueError, match=f"{kind.__name__} cannot run on shards: its {REFUSED[kind]}"):
            find_whole_param_groups(optimizer, asserted, None)


def test_a_hooked_step_is_refused_for_classes_that_are_not_torchs() -> None:
    hooked = Own(MODEL.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks on its step"):
        find_whole_param_groups(hooked, None, None)


class MakesStates(Own):
    """Its constructor makes what its step needs, has a signature of its own, and counts in several places."""

    def __init__(self, speed: float, *, of: Any) -> None:
        super().__init__(of, speed, k=0, betas=[0.9, 0.99])
        self.rule, self.steps, self.history = self._rule, 0, [0.0]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.1)

    def _rule(self, p: torch.Tensor) -> torch.Tensor:
        self.history.append(self.history[-1] + 1.0)
        return self.state[p]["sum"].add_(p.grad.square()).sqrt()  # type: ignore[union-attr]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.addcdiv_(p.grad, self.rule(p), value=-group["lr"] / group["k"])
            del self.history[1:]


def test_a_class_with_its_own_constructor_and_states_runs() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = MakesStates(0.1, of=model.parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)  # a warmup begins with 0: nothing would move
        return optimizer

    def loop(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
        optimizer.param_groups[0]["lr"] = 0.1
        square_steps(model, optimizer, data)

    assert_same_training(2, MODEL, make, [DATA] * 3, loop, stages=[3])


class ByGroup(Own):
    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / momentum.abs().max().clamp(min=1e-3) if group.get("normalise") else momentum


def test_a_group_that_is_added_later_is_tried_too() -> None:
    model = copy.deepcopy(MODEL)
    model, optimizer = zeroshard.shard(model, ByGroup(model[0].parameters()), stage=3)
    optimizer.add_param_group({"params": list(model[2].parameters()), "normalise": True})
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.1})
    # a slice of two parameters, two whole parameters, a slice
    assert [[p.ndim for p in group["params"]] for group in optimizer.inner.param_groups] == [[1], [2, 1], [1]]
    model(DATA).sum().backward()
    optimizer.step()


def test_torchs_own_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.optim.elementwise_check.classification._run_trials", lambda *_: pytest.fail("tried"))
    model = copy.deepcopy(MODEL)
    zeroshard.shard(model, torch.optim.AdamW(model.parameters()))


def test_an_optimizer_made_after_shard_gets_an_error_of_its_own() -> None:
    wanted = r"Adam was given '0.weight' of a sharded model.*give it to shard\(\)"
    for stage in range(4):

        def body(rank: int, stage: int = stage) -> None:
            model, _ = zeroshard.shard(copy.deepcopy(MODEL), stage=stage)
            optimizer = torch.optim.Adam(model.parameters())
            model(DATA).sum().backward()
            optimizer.step()

        with pytest.raises(RanksFailed, match=wanted):
            run_threads(2, body)


def test_a_second_optimizer_is_refused_after_the_first() -> None:
    model = copy.deepcopy(MODEL)
    one, two = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    zeroshard.shard(model, one)
    with pytest.raises(ValueError, match="pass all optimizers of a model to one call"):
        zeroshard.shard(model, two)


class Replaces(Own):
    """Puts the new values into new tensors, with a step of the same size for all tensors in groups that ask for it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = 1 / p.grad.norm().clamp(min=1e-3) if group.get("normalise") else 1.0
                    p.data = p.data - group["lr"] * scale * p.grad


@pytest.mark.usefixtures("tried_once")
@at_stages(0, 3)
def test_a_step_may_replace_the_tensors_of_parameters(stage: int) -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        return Replaces([{"params": model[0].parameters(), "normalise": True}, {"params": model[2:].parameters()}])

    assert_same_training(2, MODEL, make, [DATA] * 3, square_steps, stages=[stage])


# ------------------------------------------------------------------------------------------------------ train and eval


class Averages(Own):
    """As schedule-free optimizers do: parameters are the training point or, after eval(), an average."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, train_mode=False)

    @torch.no_grad()
    def _exchange(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 0.9 if train else 1 - 1 / 0.9)
                group["train_mode"] = train

    def train(self) -> None:
        self._exchange(True)

    def eval(self) -> None:
        self._exchange(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    z.sub_(group["lr"] * p.grad)
                    p.lerp_(z, 0.3).sub_(0.5 * group["lr"] * p.grad)


def averaged(model: Any, optimizer: Any, data: torch.Tensor, by: Any) -> list[torch.Tensor]:
    outputs = []
    for _ in range(2):
        by.train()
        for _ in range(2):
            take_step(optimizer, model(data).float().pow(2).mean())
        by.eval()
        with torch.no_grad():
            outputs.append(model(DATA).float())
    return outputs


@pytest.mark.guarantee("Schedule-free optimizers")
@pytest.mark.parametrize(
    ("stage", "precision", "offload"), pairwise([0, 1, 2, 3], [None, "bf16"], [None, "host"]), ids=str
)
def test_train_and_eval_change_the_parameters_on_all_ranks(stage: int, precision: Any, offload: Any) -> None:
    plain = copy.deepcopy(MODEL)
    optimizer = Averages(plain.parameters())
    wanted = averaged(plain, optimizer, DATA, optimizer)

    def body(rank: int) -> Any:
        model = copy.deepcopy(MODEL)
        inner = Averages(model.parameters())
        options = {"precision": precision, "offload": offload, "elementwise": True}
        model, ours = zeroshard.shard(model, inner, stage=stage, **options)
        outputs = averaged(model, ours, DATA[4 * rank : 4 * rank + 4], ours if offload is None else inner)
        with pytest.raises(RuntimeError, match="call train"):
            model(DATA).float().sum().backward()
            ours.step()
        parameters = masters(model)
        _, given_back = zeroshard.unwrap(model, ours)
        assert given_back is inner and "eval" not in vars(inner)
        inner.train()
        return outputs, parameters

    first, second = run_threads(2, body)
    for outputs, parameters in (first, second):
        torch.testing.assert_close(outputs, wanted, rtol=0, atol=1e-6 if precision is None else 3e-2)
        assert_close(parameters, dict(plain.named_parameters()), 1e-6 if precision is None else 1e-2)
    assert all(torch.equal(one, other) for one, other in zip(first[0], second[0], strict=True))


def test_an_optimizer_that_averages_is_elementwise() -> None:
    assert find_whole_param_groups(Averages(MODEL.named_parameters()), None, None) == [False]
    assert find_whole_param_groups(Averages(MODEL.parameters()), None, None) == [False]


def test_train_and_eval_are_there_only_where_the_inner_optimizer_has_them() -> None:
    _, optimizer = sharded(MODEL, sgd)
    assert not hasattr(optimizer, "train") and not hasattr(optimizer, "eval")


# -------------------------------------------------------------------------------------------------------------- states


class Blocks(Own):
    """Keeps the largest of each block of its states, as 8-bit optimizers do."""

    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        self.state[p]["absmax"] = torch.stack([block.abs().max() for block in momentum.flatten().split(16)])
        return momentum


def test_states_of_slices_are_never_saved_as_those_of_parameters(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        model, optimizer = sharded(MODEL, of(Blocks), stage=2, elementwise=True)
        take_step(optimizer, model(DATA).sum())
        told = []
        for call in (
            optimizer.state_dict,
            lambda: optimizer.full_state("0.weight"),
            lambda: zeroshard.save(tmp_path / "a", model, optimizer),
            lambda: zeroshard.unwrap(model, optimizer),
        ):
            with pytest.raises(RuntimeError, match="the state 'absmax' that Blocks keeps for '") as error:
                call()
            told.append(str(error.value))
        model(DATA).sum().backward()  # a refused unwrap leaves everything as it was
        optimizer.step()
        return told

    run_threads(2, body)
    model = copy.deepcopy(MODEL)
    optimizer = Blocks(model.parameters())
    model(DATA).sum().backward()
    optimizer.step()
    zeroshard.save(tmp_path / "plain", model, optimizer)
    with pytest.raises(ValueError, match=r"the state 'absmax' of '0.weight', of shape \(4,\), is neither elementwise"):
        zeroshard.shard(model, optimizer, elementwise=True)
    ours = copy.deepcopy(MODEL)
    ours, stepper = zeroshard.shard(ours, Blocks(ours.parameters()), elementwise=True)
    for call in (
        lambda: stepper.load_state_dict(optimizer.state_dict()),
        lambda: zeroshard.load(tmp_path / "plain", ours, stepper),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"the state 'absmax' of '0\.weight'"):
            call()
    ours(DATA).sum().backward()  # nothing has changed
    stepper.step()


class Subclass(Own):
    """Keeps a tensor subclass, as optimizers with quantized states do."""

    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        pair = self.state[p].get("pair", TwoTensor(torch.zeros_like(p), torch.zeros_like(p)))
        self.state[p]["pair"] = TwoTensor(0.5 * pair.a + momentum, pair.b + 1)
        return self.state[p]["pair"].a


def test_states_that_are_tensor_subclasses_are_saved_by_their_owners(tmp_path: Path) -> None:
    def step(model: Any, optimizer: Any) -> None:
        take_step(optimizer, model(DATA).pow(2).mean())

    plain = copy.deepcopy(MODEL)
    expected = Subclass(plain.parameters())
    assert find_whole_param_groups(expected, None, None) == [True]
    for _ in range(3):
        step(plain, expected)

    def body(rank: int, stage: int, is_load: bool) -> Any:
        model, optimizer = sharded(MODEL, of(Subclass), stage=stage, elementwise=False)
        if is_load:
            zeroshard.load(tmp_path / "a", model, optimizer)
        else:
            step(model, optimizer)
            zeroshard.save(tmp_path / "a", model, optimizer)
        for _ in range(2):
            step(model, optimizer)
        nbytes = zeroshard.report(model).memory["optimizer states", "device"].now
        return full_parameters(model), optimizer.state_dict()["state"], nbytes

    for world, stage, is_load in ((2, 2, False), (4, 3, True)):
        results = run_threads(world, body, stage, is_load)
        for parameters, states, _ in results:
            assert_close(parameters, dict(plain.named_parameters()))
            for number, p in enumerate(plain.parameters()):
                assert type(states[number]["pair"]) is TwoTensor
                assert_close({"a": states[number]["pair"].a}, {"a": expected.state[p]["pair"].a})
                assert states[number]["pair"].b.eq(3).all()
        assert sum(nbytes for _, _, nbytes in results) == 3 * 4 * sum(p.numel() for p in plain.parameters())


class NumPyScale(Own):
    """Keeps NumPy's numbers, whose classes are not torch's."""

    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        self.state[p]["scale"] = 1 / np.sqrt(self.state[p]["step"])
        return momentum * self.state[p]["scale"]


def read_numpy_scale(rank: int) -> float:
    model, optimizer = sharded(MODEL, of(NumPyScale), stage=1)
    for _ in range(2):
        take_step(optimizer, model(DATA).pow(2).mean())
    return optimizer.state_dict()["state"][0]["scale"]


def test_numbers_of_numpy_in_states_are_read_as_in_torch() -> None:
    assert run_processes(2, read_numpy_scale) == [1 / np.sqrt(2)] * 2


def read_and_load_with_hooks(rank: int) -> tuple[list[str], float]:
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    calls: list[str] = []
    inner.register_state_dict_post_hook(lambda _, states: calls.append("read before shard()"))
    model, optimizer = zeroshard.shard(model, inner, stage=2)

    def halve(_: Any, states: dict[str, Any]) -> dict[str, Any]:
        return {**states, "param_groups": [{**group, "lr": group["lr"] / 2} for group in states["param_groups"]]}

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before read"))
    optimizer.register_state_dict_post_hook(halve)
    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after load"))
    assert bool(optimizer.state_dict(rank=0)) == (rank == 0)
    optimizer.load_state_dict(optimizer.state_dict())
    return calls, optimizer.param_groups[0]["lr"]


def test_hooks_on_the_state_dict_are_called_as_in_torch() -> None:
    first, second = run_threads(2, read_and_load_with_hooks)
    read = ["before read", "read before shard()"]
    assert first == ([*read, *read, "after load"], 0.125)
    assert second == (["before read", *read, "after load"], 0.125)


def test_a_state_dict_of_another_class_is_refused() -> None:
    """Its states would be kept, and the momentum would silently start at zero."""
    given = torch.optim.AdamW([nn.Parameter(torch.ones(4, 4))])
    for kind in (torch.optim.Muon, torch.optim.SGD):
        model = nn.Linear(4, 4, bias=False)
        _, optimizer = zeroshard.shard(model, kind(model.parameters(), lr=0.1, momentum=0.9))
        with pytest.raises(
            ValueError, match=f"the state dict is not of {kind.__name__}: its group 0 has no .*'momentum'"
        ):
            optimizer.load_state_dict(given.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.NAdam])
def test_step_counts_and_options_of_earlier_versions_are_loaded_as_by_torch(kind: Any) -> None:
    x = torch.arange(12.0).view(3, 4) / 12

    def train(model: Any, optimizer: Any) -> None:
        take_step(optimizer, model(x).square().sum())

    plain = built(lambda: nn.Linear(4, 4))
    ours = copy.deepcopy(plain)
    sides = [(plain, kind(plain.parameters())), zeroshard.shard(ours, kind(ours.parameters(), maximize=True))]
    train(*sides[0])
    old = copy.deepcopy(sides[0][1].state_dict())
    for state in old["state"].values():
        state["step"] = int(state["step"])
    for group in old["param_groups"]:
        del group["maximize"]
    with torch.no_grad(), zeroshard.gathered(ours, write_rank=0):
        for parameter, other in zip(ours.parameters(), plain.parameters(), strict=True):
            parameter.copy_(other)
    for model, optimizer in sides:
        optimizer.load_state_dict(copy.deepcopy(old))
        train(model, optimizer)
    assert all(type(state["step"]) is int for state in old["state"].values())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(zeroshard.full_parameter(ours, name), parameter.detach())


def test_a_loaded_state_dict_does_not_change_with_the_optimizer() -> None:
    _, optimizer = sharded(nn.Linear(3, 2), partial(adamw, lr=torch.tensor(0.5)), stage=2)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].fill_(0.25)  # as a scheduler does
    assert saved["param_groups"][0]["lr"] == 0.5


class SumInState(Own):
    """Keeps a number that depends on what a rank holds."""

    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        self.state[p]["d"] = float(momentum.sum())
        return momentum


def test_numbers_that_differ_from_rank_to_rank_are_not_saved(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(nn.Linear(30, 20, bias=False), of(SumInState), elementwise=True)
        take_step(optimizer, model(DATA[:, :1].expand(8, 30) * torch.arange(30)).pow(2).sum())
        with pytest.raises(RuntimeError, match="the state 'd' of 'weight' differs between ranks"):
            optimizer.state_dict()
        with pytest.raises(RuntimeError, match="scalar states of 'weight' differ between ranks"):
            zeroshard.save(tmp_path / "a", model, optimizer)

    run_threads(2, body)


class Vector(Own):
    """Its counter is a tensor of one element."""

    def change(self, group: Any, p: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        self.state[p].setdefault("count", torch.zeros(1, dtype=torch.float64)).add_(1)
        return momentum


def test_counters_that_are_tensors_of_one_element_are_saved(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        model: Any = copy.deepcopy(MODEL)[:3]  # type: ignore[index]  # no parameter of one element
        model, optimizer = zeroshard.shard(model, Vector(model.parameters()), stage=3)
        for number in range(3):
            take_step(optimizer, model(DATA).sum())
            if number == 0:
                zeroshard.save(tmp_path / "a", model, optimizer)
            if number == 1:
                zeroshard.load(tmp_path / "a", model, optimizer)
        return [float(state["count"]) for state in optimizer.state_dict()["state"].values()]

    assert run_threads(2, body) == [[2.0] * 4] * 2


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_states_of_before_a_load_do_not_come_back(tier: str, tmp_path: Path) -> None:
    def step(model: Any, optimizer: Any, times: float = 1.0) -> None:
        take_step(optimizer, times * model(DATA).pow(2).mean())

    makes = [lambda m: torch.optim.RMSprop(m.parameters()), lambda m: torch.optim.Adam(m.parameters(), amsgrad=True)]
    for number, make in enumerate(makes):
        plain, model = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
        expected, path = make(plain), tmp_path / str(number)
        offload = {"optimizer": tier, "directory": str(tmp_path)}
        model, optimizer = zeroshard.shard(model, make(model), stage=2, offload=offload)
        zeroshard.save(path, model, optimizer)  # before the first step
        step(model, optimizer, 10.0)
        zeroshard.load(path, model, optimizer)
        for _ in range(3):
            step(model, optimizer)
            step(plain, expected)
        assert_close(full_parameters(model), dict(plain.named_parameters()))


@at_stages(1, 3)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_layer_frozen_between_two_shards_keeps_its_states(stage: int, precision: Any, tmp_path: Path) -> None:
    def train(model: Any, optimizer: Any, part: slice) -> None:
        take_step(optimizer, model(DATA[part]).float().pow(2).mean())

    def body(rank: int) -> Any:
        part, model = slice(4 * rank, 4 * rank + 4), copy.deepcopy(MODEL)
        model, optimizer = zeroshard.shard(
            model, torch.optim.Adam(model.parameters()), stage=stage, precision=precision
        )
        train(model, optimizer, part)
        model, plain = zeroshard.unwrap(model, optimizer)
        model[0].weight.requires_grad_(False)
        before = copy.deepcopy(plain.state[model[0].weight])
        model, optimizer = zeroshard.shard(model, plain, stage=stage, precision=precision)
        train(model, optimizer, part)
        zeroshard.save(tmp_path / "a", model, optimizer)
        kept = optimizer.full_state("0.weight")
        optimizer.load_state_dict(optimizer.state_dict())
        zeroshard.load(tmp_path / "a", model, optimizer)
        train(model, optimizer, part)
        model, plain = zeroshard.unwrap(model, optimizer)
        for state in (kept, plain.state[model[0].weight]):
            assert state.keys() == before.keys() and all(torch.equal(state[key], before[key]) for key in before)
        assert plain.state[model[2].weight]["step"] == 3
        model[0].weight.requires_grad_(True)
        model, optimizer = zeroshard.shard(model, plain, stage=stage, precision=precision)
        train(model, optimizer, part)
        return optimizer.full_state("0.weight")["step"]

    assert run_threads(2, body) == [2, 2]


def train_with_default_dtype(rank: int, case: str) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(MODEL)
    parameters = list(model.parameters())
    optimizer: Any = torch.optim.AdamW(parameters[:2] if case == "new group" else parameters, lr=1e-2)
    options: dict[str, Any] = {"offload": "host"} if case == "offload" else {}
    options["precision"] = "fp16" if case == "loss scale" else "bf16"
    model, optimizer = zeroshard.shard(model, optimizer, stage=3, **options)
    if case == "new group":
        optimizer.add_param_group({"params": parameters[2:]})
    for _ in range(3):
        take_step(optimizer, optimizer.scale(model(DATA).float().square().mean()), 0.013)
    return full_parameters(model)


@pytest.mark.parametrize("case", ["new group", "offload", "loss scale"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_no_number(dtype: torch.dtype, case: str) -> None:
    """Master weights, step counts, loss scales and clip coefficients are in fp32."""
    wanted = run_threads(2, train_with_default_dtype, case)[0]
    torch.set_default_dtype(dtype)
    try:
        found = run_threads(2, train_with_default_dtype, case)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


# ------------------------------------------------------------------------------------------------- hooks on step()


@pytest.mark.guarantee("Step hooks")
@at_stages(0, 1, 2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon])
def test_hooks_made_before_shard_see_the_models_parameters(kind: Any, stage: int) -> None:
    """nGPT's rows of norm 1 after each step, and gradients of norm 1 before it."""

    def train(rank: int, world: int) -> list[Any]:
        model: Any = built(lambda: nn.Sequential(nn.Linear(6, 11, bias=False), nn.Linear(11, 3, bias=False)))
        optimizer, shapes = kind(model.parameters(), lr=0.1), []

        @torch.no_grad()
        def unit_grads(optimizer: Any, *_: Any) -> None:
            for p in optimizer.param_groups[0]["params"]:
                p.grad /= p.grad.norm()

        @torch.no_grad()
        def unit_rows(optimizer: Any, *_: Any) -> None:
            for p in optimizer.param_groups[0]["params"]:
                shapes.append(tuple(p.shape))
                p.div_(p.norm(dim=-1, keepdim=True))

        optimizer.register_step_pre_hook(unit_grads)
        last = optimizer.register_step_post_hook(unit_rows)
        if world:
            model, optimizer = zeroshard.shard(model, optimizer, stage=stage)
        for step in range(4):
            if step == 3:
                last.remove()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            take_step(optimizer, model(x if world != 2 else x.chunk(2)[rank]).square().mean())
        if world:
            model, optimizer = zeroshard.unwrap(model, optimizer)
        assert len(optimizer._optimizer_step_pre_hooks) == 1 and not optimizer._optimizer_step_post_hooks
        return [shapes, *(p.detach() for p in model.parameters())]

    for world in (1, 2):
        for found in run_threads(world, train, world):
            for ours, plain in zip(found, train(0, 0), strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.guarantee("Step hooks")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Muon, Own])
@pytest.mark.parametrize("scheduled", [False, True])
def test_hooks_on_all_optimizers_run_once_a_step(scheduled: bool, kind: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer, seen = kind(model.parameters(), lr=0.1), []
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = zeroshard.shard(model, optimizer, stage=1)
    handles = [
        register(lambda optimizer, *_: seen.append(optimizer))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [optimizer] * 4


@pytest.mark.guarantee("Step hooks")
def test_a_replaced_step_is_refused_unless_a_scheduler_did_it() -> None:
    def lambda_of(step: Any) -> Any:
        return lambda *args: step(*args)

    for wrap in (lambda_of, partial, lambda step: functools.wraps(step)(partial(step))):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step = wrap(optimizer.step)  # type: ignore[method-assign]
        with pytest.raises(ValueError, match=r"step\(\) of this AdamW was replaced .* register_step_post_hook"):
            zeroshard.shard(model, optimizer)
        assert type(model.weight) is nn.Parameter

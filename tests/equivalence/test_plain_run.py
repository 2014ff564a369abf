"""Every stage gives the numbers of the plain, unsharded run, whatever the optimizer, its groups and the sizes."""

import copy
import functools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage
from plain import (
    ONE_BATCH,
    Tensors,
    assert_close,
    assert_equal,
    assert_same_training,
    batches,
    full_parameters,
    momentum,
    net_loss,
    run_stages,
    sgd,
    sharded,
    shares,
    square_steps,
    token_step,
    train_losses,
    train_steps,
)
from ranks import run_processes, run_threads
from torch import nn
from zoo import built, make_net

import zeroshard

pytestmark = pytest.mark.usefixtures("tried_once")


class Lion(torch.optim.Optimizer):
    """A third party's elementwise optimizer, written against torch's documented base class and nothing else."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["calls"] = 0  # a plain number among the states
                    state["momentum"] = torch.zeros_like(p)
                state["calls"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["momentum"].lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                state["momentum"].lerp_(p.grad, 1 - second)
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD fused, Nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "Adam": partial(torch.optim.Adam, lr=1e-3),
    "Adam fused, amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    "Lion": Lion,
}
# One of each kind of state: tensors alone, tensors and a counter that is a tensor, a counter that is a plain number.
KINDS = ("SGD with momentum", "AdamW fused", "Lion")
every_kind = pytest.mark.parametrize("kind", KINDS)
STEPS = 3  # the first notes the order of the units, the second prefetches by it, the third starts from its states


def of_all(kind: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """One group with all parameters of the model."""
    return lambda model: OPTIMIZERS[kind](model.parameters())


class Odd(nn.Module):
    """Parameters of odd sizes, shapes and memory orders, used directly and in submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.none = nn.Parameter(torch.zeros(3, 0))
        self.turned = nn.Parameter(torch.randn(7, 5).t())  # column by column in memory
        self.conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
        self.large = nn.Linear(7, 131)
        self.out = nn.Linear(131 + 12, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens % 5, 5).float()  # [rows, length, 5]
        seen = self.conv((x.mean(1) @ self.turned)[:, None, :6].unflatten(2, (3, 2))).flatten(1)[:, :12]
        seen = nn.functional.pad(seen, (0, 12 - seen.shape[1]))[:, None].expand(-1, tokens.shape[1], -1)
        hidden = torch.tanh(self.large(x @ self.turned)) * self.scalar
        return self.out(torch.cat([hidden, seen], -1)) * self.one + self.none.sum()


@functools.cache
def odd() -> Odd:
    return built(Odd, seed=3)


@functools.cache
def net() -> nn.Module:
    """A net without small values: Adam makes steps of one size, so errors show next to values of that size."""
    model = make_net()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) / 4
    return model


# -------------------------------------------------------------------------------------- optimizers, worlds, sizes


@pytest.mark.guarantee("All stages alike")
@pytest.mark.parametrize(  # an optimizer sees a shard, not how many there are
    ("kind", "world"), [("AdamW fused", 1), *((kind, 2) for kind in OPTIMIZERS), ("SGD with momentum", 3), ("Lion", 4)]
)
def test_every_stage_equals_the_plain_run(kind: str, world: int) -> None:
    assert_same_training(world, net(), of_all(kind), batches(STEPS))


@pytest.mark.parametrize(("kind", "world"), [("AdamW fused", 1), *((kind, 3) for kind in OPTIMIZERS)])
def test_odd_shapes_and_buckets_smaller_than_a_parameter_equal_the_plain_run(kind: str, world: int) -> None:
    assert_same_training(world, odd(), of_all(kind), batches(STEPS), bucket_size=100)


@every_kind
def test_a_rank_that_owns_nothing_takes_part(kind: str) -> None:
    """Over four ranks two of them have only alignment."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    data = [batch.float() for batch in batches(STEPS)]

    assert_same_training(4, model, of_all(kind), data, square_steps)


@pytest.mark.parametrize("kind", ["SGD with momentum", "AdamW fused"])
def test_a_hybrid_mesh_equals_the_plain_run(kind: str) -> None:
    assert_same_training(4, net(), of_all(kind), batches(STEPS), mesh=(2, 2), bucket_size=100)


@pytest.mark.parametrize("options", [{"ring": 1}, {"ring": 5}, {"prefetch": False}, {"units": ("embedding", "head")}])
def test_options_of_speed_and_memory_change_no_number(options: dict[str, Any]) -> None:
    default = run_by_default()
    changed = run_stages(2, net(), of_all("Adam"), batches(STEPS), bucket_size=100, **options)
    for stage in default:
        assert_equal(changed[stage], default[stage])


@functools.cache
def run_by_default() -> dict[int, Tensors]:
    return run_stages(2, net(), of_all("Adam"), batches(STEPS), bucket_size=100)


def test_losses_are_those_of_the_plain_run() -> None:
    def body(rank: int) -> list[float]:
        model, optimizer = sharded(net(), of_all("AdamW"))
        return train_losses(model, optimizer, shares(batches(STEPS), rank, 3))

    model = copy.deepcopy(net())
    plain = train_losses(model, of_all("AdamW")(model), batches(STEPS))
    mean = [sum(of_ranks) / 3 for of_ranks in zip(*run_threads(3, body), strict=True)]
    assert mean == pytest.approx(plain, rel=1e-6)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@pytest.mark.parametrize(("make_optimizer", "world"), [(fused_adamw, 2), (momentum, 3)])
def test_processes_over_gloo_equal_the_plain_run(make_optimizer: Any, world: int) -> None:
    assert_same_training(world, net(), make_optimizer, batches(STEPS), run=run_processes, bucket_size=100)


# ------------------------------------------------------------------------------------ groups, schedulers, closures


def three_groups(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Different hyper-parameters, in an order that is not the model's; the embedding is in no group."""
    named = list(reversed(list(model.named_parameters())))
    plain = [p for name, p in named if name.endswith("bias")]
    matrices = [p for name, p in named if name.endswith("weight") and "embedding" not in name]
    rest = [p for name, p in named if not name.endswith(("bias", "weight"))]
    return OPTIMIZERS[kind]([{"params": matrices}, {"params": plain, "lr": 0.03}, {"params": rest, "lr": 0.003}])


@pytest.mark.parametrize(
    ("kind", "world"), [("AdamW fused", 1), *((kind, 2) for kind in (*KINDS, "AdamW foreach")), ("Adam", 4)]
)
def test_groups_with_their_own_hyperparameters_equal_the_plain_run(kind: str, world: int) -> None:
    assert_same_training(world, net(), partial(three_groups, kind=kind), batches(STEPS), clear_all_loop)


def clear_all_loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """As the simple loop; gradients of parameters in no group are cleared too."""
    for batch in data:
        token_step(model, batch)
        optimizer.step()
        model.zero_grad()


@pytest.mark.guarantee("Groups and schedules")
@pytest.mark.parametrize(
    ("kind", "named", "world"),
    [
        ("SGD with momentum", False, 3),
        ("AdamW fused", True, 3),
        ("AdamW fused", False, 1),
        ("Lion", True, 1),
    ],
)
def test_a_group_added_after_some_steps_equals_the_plain_run(kind: str, named: bool, world: int) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        blocks = model.get_submodule("blocks")
        return OPTIMIZERS[kind](blocks.named_parameters() if named else blocks.parameters())

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
        clear_all_loop(model, optimizer, data[:2])
        head, rest = model.get_submodule("head"), [p for n, p in model.named_parameters() if n == "temperature"]
        optimizer.add_param_group({"params": list(head.named_parameters() if named else head.parameters()), "lr": 0.02})
        clear_all_loop(model, optimizer, data[2:3])
        optimizer.add_param_group({"params": [("temperature", rest[0])] if named else rest[0]})
        clear_all_loop(model, optimizer, data[3:])
        assert len(optimizer.param_groups) == 3
        assert optimizer.param_groups[1]["lr"] == 0.02

    assert_same_training(world, net(), make, batches(STEPS + 1), loop)


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda model: model.head.weight, "'head.weight' is already in a parameter group"),
        (lambda model: nn.Parameter(torch.ones(2)), "parameters of the sharded model only"),
        (lambda model: model.nothing, "trainable"),
    ],
)
def test_a_group_of_the_wrong_parameters_is_refused(choose: Any, words: str) -> None:
    model = make_net()
    model.nothing.requires_grad_(False)
    model, optimizer = zeroshard.shard(model, torch.optim.Adam(model.head.parameters()))
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [choose(model)]})


SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
    "LambdaLR per group": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: 1 / (step + 1), lambda step: 0.5**step, lambda step: 1.0]
    ),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10),  # betas too
}


@pytest.mark.guarantee("Groups and schedules")
@pytest.mark.parametrize("before_shard", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_lr_schedulers_equal_the_plain_run(schedule: str, before_shard: bool) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = three_groups(model, "Adam")
        if before_shard:
            optimizer.scheduler = SCHEDULERS[schedule](optimizer)  # type: ignore[attr-defined]
        return optimizer

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
        if before_shard:
            scheduler = getattr(optimizer, "inner", optimizer).scheduler
        else:
            scheduler = SCHEDULERS[schedule](optimizer)
        for batch in data:
            clear_all_loop(model, optimizer, [batch])
            scheduler.step()

    assert_same_training(2, net(), make, batches(STEPS), loop)


@pytest.mark.parametrize(("kind", "world"), [("SGD with momentum", 2), ("Lion", 1)])
def test_step_with_a_closure_equals_the_plain_run_and_returns_its_loss(kind: str, world: int) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
        for batch in data:

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = net_loss(model, batch)
                loss.backward()
                closure.losses.append(loss)  # type: ignore[attr-defined]
                return loss

            closure.losses = []  # type: ignore[attr-defined]
            returned = optimizer.step(closure)
            assert [returned] == closure.losses  # type: ignore[attr-defined]

    assert_same_training(world, net(), of_all(kind), batches(STEPS), loop)


@every_stage
def test_step_hooks_run_around_every_step(stage: int) -> None:
    def body(rank: int) -> list[str]:
        events: list[str] = []
        model = copy.deepcopy(net())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        inner.register_step_post_hook(lambda *_: events.append("inner"))
        model, optimizer = zeroshard.shard(model, inner, stage=stage)
        optimizer.register_step_pre_hook(lambda *_: events.append("before"))
        handle = optimizer.register_step_post_hook(lambda *_: events.append("after"))
        train_steps(model, optimizer, batches(1))
        handle.remove()
        train_steps(model, optimizer, batches(1))
        return events

    assert run_threads(2, body) == [["before", "inner", "after", "before", "inner"]] * 2


# ---------------------------------------------------------------------------------------------- states, gradients


def assert_state_dicts_close(ours: dict[str, Any], plain: dict[str, Any], relative: float = 1e-6) -> None:
    """The same structure and hyper-parameters; states of the same shapes and dtypes, close."""
    assert ours["param_groups"] == plain["param_groups"]
    assert ours["state"].keys() <= plain["state"].keys()
    for number, state in plain["state"].items():
        if number not in ours["state"] and any(
            value.numel() == 0 for value in state.values() if torch.is_tensor(value)
        ):
            continue  # of zero elements: has a test of its own
        assert ours["state"][number].keys() == state.keys()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in state.items() if key not in tensors}
        assert {key: ours["state"][number][key] for key in others} == others
        for key, value in tensors.items():
            assert ours["state"][number][key].shape == value.shape, (number, key)
            assert ours["state"][number][key].dtype == value.dtype, (number, key)
            assert_close({key: ours["state"][number][key]}, {key: value}, relative)


@pytest.mark.parametrize(
    ("kind", "base", "grouped"),
    [
        *((kind, net, True) for kind in OPTIMIZERS),
        ("Adam fused, amsgrad", odd, False),
    ],
)
def test_the_state_dict_is_the_plain_optimizers_and_travels_both_ways(kind: str, base: Any, grouped: bool) -> None:
    make = partial(three_groups, kind=kind) if grouped else of_all(kind)
    half = 2
    data = batches(2 * half)
    model = copy.deepcopy(base())
    optimizer = make(model)
    clear_all_loop(model, optimizer, data[:half])
    halfway, half_state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    clear_all_loop(model, optimizer, data[half:])
    plain = dict(model.named_parameters())

    def body(rank: int, stage: int) -> None:
        parts = shares(data, rank, 2)
        model, optimizer = sharded(base(), make, stage=stage, bucket_size=100)
        clear_all_loop(model, optimizer, parts[:half])
        ours = optimizer.state_dict()
        assert_state_dicts_close(ours, half_state)

        back = copy.deepcopy(halfway)  # ours into a plain optimizer
        back_optimizer = make(back)
        back_optimizer.load_state_dict(ours)
        clear_all_loop(back, back_optimizer, data[half:])
        assert_close(dict(back.named_parameters()), plain)

        there, there_optimizer = sharded(halfway, make, stage=stage, bucket_size=100)
        there_optimizer.load_state_dict(copy.deepcopy(half_state))
        clear_all_loop(there, there_optimizer, parts[half:])
        assert_close(full_parameters(there), plain)

    for stage in (0, 1, 3) if kind in KINDS else (3,):
        run_threads(2, partial(body, stage=stage))


@pytest.mark.parametrize("world", [1, 2])
def test_no_two_parameters_share_a_tensor_in_the_state_dict(world: int) -> None:
    """A plain optimizer takes loaded counters as they are: shared ones would count every parameter's steps."""

    def body(rank: int) -> None:
        model, optimizer = sharded(net(), of_all("Adam"))
        train_steps(model, optimizer, batches(1))
        tensors = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
        assert len({id(tensor) for tensor in tensors}) == len(tensors) > 3

    run_threads(world, body)


@every_stage
def test_the_state_dict_has_the_states_of_a_parameter_without_elements(stage: int) -> None:
    def body(rank: int) -> dict[str, Any]:
        model, optimizer = sharded(net(), of_all("Adam"), stage=stage)
        train_steps(model, optimizer, batches(2))
        return zeroshard.full_state(optimizer, "nothing")

    for state in run_threads(2, body):
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["step"] == 2
        assert state["exp_avg"].shape == (0, 3)


@at_stages(0, 1, 3)
def test_a_loaded_state_dict_sets_its_hyperparameters(stage: int) -> None:
    def body(rank: int) -> list[float]:
        saved = torch.optim.Adam(copy.deepcopy(net()).parameters(), lr=0.125).state_dict()
        _, optimizer = sharded(net(), of_all("Adam"), stage=stage)
        optimizer.load_state_dict(saved)
        return [group["lr"] for group in optimizer.inner.param_groups]

    assert run_threads(2, body) == [[0.125], [0.125]]


def test_a_state_dict_of_other_groups_is_refused() -> None:
    other = torch.optim.Adam(nn.Linear(2, 2).parameters()).state_dict()
    _, optimizer = sharded(make_net(), of_all("Adam"))
    with pytest.raises(ValueError, match="groups of"):
        optimizer.load_state_dict(other)


@pytest.mark.parametrize(
    ("kind", "base", "world"),
    [
        *((kind, odd, 3) for kind in OPTIMIZERS),
        ("AdamW", odd, 1),
        ("SGD with momentum", net, 2),
    ],
)
def test_an_optimizer_with_states_goes_on_where_it_was(kind: str, base: Any, world: int) -> None:
    model = copy.deepcopy(base())
    optimizer = of_all(kind)(model)
    train_steps(model, optimizer, batches(STEPS, seed=5))
    saved = copy.deepcopy(optimizer.state_dict())

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = of_all(kind)(model)
        optimizer.load_state_dict(copy.deepcopy(saved))
        return optimizer

    assert_same_training(world, model, make, batches(2), bucket_size=100)


@every_kind
def test_states_of_different_age_stay_apart(kind: str) -> None:
    """Some parameters were trained before shard(), others were not: their step counts differ."""
    model = copy.deepcopy(net())
    optimizer = OPTIMIZERS[kind](model.parameters())
    blocks = {id(p) for p in model.get_submodule("blocks").parameters()}
    token_step(model, batches(1, seed=7)[0])
    for parameter in model.parameters():
        if id(parameter) not in blocks:
            parameter.grad = None
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[kind](model.parameters())
        optimizer.load_state_dict(copy.deepcopy(saved))
        return optimizer

    assert_same_training(2, model, make, batches(STEPS))


@every_stage
@pytest.mark.parametrize("base", [net, odd])
def test_full_state_and_full_gradient_are_the_plain_ones(base: Any, stage: int) -> None:
    data = batches(STEPS + 1)
    model = copy.deepcopy(base())
    optimizer = of_all("Adam")(model)
    train_steps(model, optimizer, data[:-1])
    token_step(model, data[-1])
    states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}

    def body(rank: int) -> None:
        parts = shares(data, rank, 3)
        model, optimizer = sharded(base(), of_all("Adam"), stage=stage, bucket_size=100)
        assert all(zeroshard.full_gradient(model, name) is None for name in gradients)
        train_steps(model, optimizer, parts[:-1])
        token_step(model, parts[-1])
        assert_close({name: zeroshard.full_gradient(model, name) for name in gradients}, gradients)
        for name, state in states.items():
            ours = zeroshard.full_state(optimizer, name)
            if name not in ("nothing", "none"):  # of zero elements: has a test of its own
                assert_close(ours, state)
        optimizer.zero_grad()
        assert all(zeroshard.full_gradient(model, name) is None for name in gradients)

    run_threads(3, body)


def test_gradients_that_happen_to_be_neighbours_in_memory_are_not_taken_for_one_tensor() -> None:
    """An allocator may place two of them without a gap; the master they update is one stretch."""

    def train(move: bool) -> Tensors:
        model, optimizer = sharded(net(), momentum, precision="bf16", reduce_dtype="fp32")
        token_step(model, ONE_BATCH)
        zeroshard.full_gradient(model, "head.weight")  # all gradients are reduced
        gradients = model._zeroshard.engine.gradients.flat_grads.values()
        memory, offset = bytearray(sum(gradient.shard.nbytes for gradient in gradients)), 0
        for gradient in gradients if move else ():
            alone = torch.frombuffer(memory, dtype=torch.float32, count=gradient.shard.numel(), offset=offset)
            gradient.shard = alone.copy_(gradient.shard)
            offset += alone.nbytes
        optimizer.step()
        return full_parameters(model)

    assert_equal(train(move=True), train(move=False))


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    model, optimizer = zeroshard.shard(make := make_net(), sgd(make))
    with pytest.raises(KeyError, match=r"did you mean 'head.weight'"):
        zeroshard.full_gradient(model, "head.wieght")
    with pytest.raises(KeyError, match=r"did you mean 'head.weight'"):
        zeroshard.full_state(optimizer, "head.wieght")


# ------------------------------------------------------------------------------------------------------ refusals


class OwnLBFGS(torch.optim.LBFGS):
    """A user's subclass: no more elementwise than its parent."""


@pytest.mark.parametrize("refused", [torch.optim.LBFGS, OwnLBFGS, torch.optim.SparseAdam])
def test_an_optimizer_that_needs_more_than_a_gradient_is_refused_before_anything_is_changed(refused: Any) -> None:
    model = nn.Linear(3, 3, bias=False)
    weight = model.weight.detach().clone()
    with pytest.raises(ValueError, match=f"{refused.__name__.removeprefix('Own')}.*cannot run on shards"):
        zeroshard.shard(model, refused(list(model.parameters())))
    assert not hasattr(model.weight, "_zeroshard"), "the model was sharded all the same"
    assert torch.equal(model.weight, weight)
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))  # the model can still be used


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of the model's"):
        zeroshard.shard(make_net(), torch.optim.Adam(make_net().parameters()))


def test_an_optimizer_that_is_sharded_already_is_refused() -> None:
    _, optimizer = sharded(make_net(), sgd)
    with pytest.raises(ValueError, match="belongs to a sharded model already"):
        zeroshard.shard(make_net(), optimizer)


def test_anything_else_is_refused_as_optimizer() -> None:
    with pytest.raises(TypeError, match=r"torch.optim.Optimizer, a list of them or None, got str"):
        zeroshard.shard(make_net(), "adam")

"""Clipping by the global norm: the true norm in every stage, without waiting for the device, and no silent mistake."""

import copy
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pairs import every_stage
from plain import (
    ONE_BATCH,
    Tensors,
    assert_close,
    assert_same_training,
    batches,
    full_parameters,
    momentum,
    net_loss,
    run_plain,
    sgd,
    sharded,
    split,
    token_step,
)
from ranks import run_processes, run_threads
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import make_net

import zeroshard

every_norm = pytest.mark.parametrize("norm_type", [2.0, math.inf])
WORLDS = {"1 rank": (1, None), "2 ranks": (2, None), "2x2 mesh": (4, (2, 2))}
every_world = pytest.mark.parametrize(("world", "mesh_shape"), WORLDS.values(), ids=WORLDS)


@functools.cache
def net() -> nn.Module:
    return make_net()


@functools.cache
def plain_gradients() -> Tensors:
    model = copy.deepcopy(net())
    token_step(model, ONE_BATCH)
    return {name: p.grad for name, p in model.named_parameters()}


def plain_norm(norm_type: float) -> float:
    every = torch.cat([gradient.double().flatten() for gradient in plain_gradients().values()])
    return torch.linalg.vector_norm(every, norm_type).item()


def clip_with_torch(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """torch itself cannot take the largest of no elements: parameters without any are left out."""
    parameters = [parameter for parameter in model.parameters() if parameter.numel()]
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def after_backward(
    rank: int, world: int, mesh_shape: tuple[int, ...] | None, make_optimizer: Any = momentum, **options: Any
) -> tuple[nn.Module, Any]:
    """A sharded pair that has the plain gradients."""
    model, optimizer = sharded(net(), make_optimizer, mesh=mesh_shape, **options)
    optimizer.scale(net_loss(model, split(ONE_BATCH, rank, world))).backward()
    return model, optimizer


# ---------------------------------------------------------------------------------------- optimizer.clip_grad_norm_


@every_stage
@every_norm
@every_world
def test_the_norm_is_the_true_global_one(world: int, mesh_shape: Any, norm_type: float, stage: int) -> None:
    def body(rank: int) -> torch.Tensor:
        _, optimizer = after_backward(rank, world, mesh_shape, stage=stage, bucket_size=100)
        return optimizer.clip_grad_norm_(1.0, norm_type)

    for norm in run_threads(world, body):
        assert isinstance(norm, torch.Tensor) and norm.shape == ()
        assert norm.item() == pytest.approx(plain_norm(norm_type), rel=1e-6)


CLIPPED = [(world, 0.05, norm_type) for world in WORLDS for norm_type in (2.0, math.inf)]


@pytest.mark.parametrize(
    ("place", "max_norm", "norm_type"), [*CLIPPED, ("2 ranks", 1e9, 2.0), ("2x2 mesh", 1e9, math.inf)]
)
def test_clipped_training_equals_the_plain_run(place: str, max_norm: float, norm_type: float) -> None:
    world, mesh_shape = WORLDS[place]

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
        for batch in data:
            token_step(model, batch)
            if isinstance(optimizer, zeroshard.ShardedOptimizer):
                optimizer.clip_grad_norm_(max_norm, norm_type)
            else:
                clip_with_torch(model, max_norm, norm_type)
            optimizer.step()
            optimizer.zero_grad()

    assert_same_training(world, net(), momentum, batches(3), loop, mesh=mesh_shape, bucket_size=100)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_over_gloo_clip_equally(world: int) -> None:
    for stage in (0, 1, 2, 3):
        for norms in run_processes(world, gloo_rank, world, stage):
            assert norms == pytest.approx([plain_norm(2.0), plain_norm(math.inf)], rel=1e-6)


def gloo_rank(rank: int, world: int, stage: int) -> list[float]:
    _, optimizer = after_backward(rank, world, None, stage=stage, bucket_size=100)
    two = optimizer.clip_grad_norm_(1e9)
    return [two.item(), optimizer.clip_grad_norm_(1e9, math.inf).item()]


@every_stage
@every_norm
def test_the_gradients_read_after_clipping_are_clipped(norm_type: float, stage: int) -> None:
    wanted = {name: gradient * (0.01 / plain_norm(norm_type)) for name, gradient in plain_gradients().items()}

    def body(rank: int) -> None:
        model, optimizer = after_backward(rank, 2, None, stage=stage)
        optimizer.clip_grad_norm_(0.01, norm_type)
        assert_close({name: zeroshard.full_gradient(model, name) for name in wanted}, wanted, 1e-4)
        assert optimizer.clip_grad_norm_(1e9, norm_type).item() == pytest.approx(0.01, rel=1e-4)
        if stage == 0:
            assert_close({name: p.grad for name, p in model.named_parameters()}, wanted, 1e-4)

    run_threads(2, body)


@every_stage
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"precision": "bf16", "reduce_dtype": "fp32"}])
def test_clipped_gradients_stay_clipped_after_the_step(options: dict[str, Any], stage: int) -> None:
    """As in plain PyTorch: who does not call zero_grad() goes on from them."""

    def body(rank: int) -> float:
        _, optimizer = after_backward(rank, 2, None, stage=stage, **options)
        optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        return optimizer.clip_grad_norm_(1e9).item()

    assert run_threads(2, body) == pytest.approx([0.01, 0.01], rel=1e-2)


@every_stage
def test_nothing_is_clipped_unless_asked(stage: int) -> None:
    """Large gradients and plain steps: the update is lr times the gradient."""

    def body(rank: int) -> Tensors:
        model, optimizer = sharded(net(), partial(sgd, lr=1e-06), stage=stage)
        (1e6 * net_loss(model, split(ONE_BATCH, rank, 2))).backward()
        optimizer.step()
        return full_parameters(model)

    wanted = {name: p.detach() - plain_gradients()[name] for name, p in net().named_parameters()}
    for result in run_threads(2, body):
        assert_close(result, wanted, 1e-5)


@every_stage
@every_norm
@every_world
def test_the_norm_takes_at_most_one_all_reduce_per_mesh_axis(
    world: int, mesh_shape: Any, norm_type: float, stage: int
) -> None:
    """Of one number. In stage 0 every rank has all gradients: none."""

    def body(rank: int) -> tuple[int, int]:
        model, optimizer = after_backward(rank, world, mesh_shape, stage=stage)
        zeroshard.full_gradient(model, "head.weight")  # all gradients are reduced
        counters = model._zeroshard.engine.comm.counters
        before = copy.deepcopy(counters.current_step)
        optimizer.clip_grad_norm_(1.0, norm_type)
        new = {
            kind: (traffic.count - (before[kind].count if kind in before else 0))
            for kind, traffic in counters.current_step.items()
        }
        nbytes = sum(t.bytes for t in counters.current_step.values()) - sum(t.bytes for t in before.values())
        assert not any(count for kind, count in new.items() if kind != "all-reduce")
        return new.get("all-reduce", 0), nbytes

    partitioned = stage > 0 and world > 1
    for count, nbytes in run_threads(world, body):
        assert count == (1 if partitioned else 0)  # ranks along the other axis hold the same shards
        assert nbytes == (2 * 4 if partitioned else 0)


class NoHostSync(TorchDispatchMode):
    """Raises where a value goes from a tensor to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        ):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class NoValuesOnHost(TorchFunctionMode):
    """Raises for the ways to the host that do not dispatch on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.__bool__):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [lambda t: t.item(), bool, float, lambda t: t.tolist(), lambda t: t.nonzero()])
def test_a_host_sync_would_be_noticed(read: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(AssertionError, match="waits for the device"), NoHostSync(), NoValuesOnHost():
        read(torch.ones(()))


STEADY = {
    "SGD": momentum,
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
}


@every_stage
@every_norm
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("kind", STEADY)
def test_clip_and_step_never_wait_for_the_device(
    kind: str, precision: str | None, norm_type: float, stage: int
) -> None:
    if precision == "fp16" and kind != "AdamW fused":
        pytest.skip("only fused optimizers can skip a step on the device")

    def body(rank: int) -> None:
        model, optimizer = after_backward(rank, 2, None, STEADY[kind], stage=stage, precision=precision)
        for batch in batches(2):
            with NoHostSync(), NoValuesOnHost():
                optimizer.clip_grad_norm_(0.1, norm_type)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.scale(net_loss(model, split(batch, rank, 2))).backward()

    run_threads(2, body)


@every_stage
@pytest.mark.parametrize("norm_type", [1, 3, 0, "inf", -math.inf])
def test_other_norms_are_refused(norm_type: Any, stage: int) -> None:
    _, optimizer = sharded(net(), momentum, stage=stage)
    with pytest.raises(ValueError, match="norm_type must be 2 or inf, got"):
        optimizer.clip_grad_norm_(1.0, norm_type)


@every_stage
@every_norm
def test_without_gradients_the_norm_is_zero(norm_type: float, stage: int) -> None:
    def body(rank: int) -> float:
        model, optimizer = sharded(net(), momentum, stage=stage)
        norm = optimizer.clip_grad_norm_(1.0, norm_type)
        optimizer.step()
        assert_close(full_parameters(model), dict(net().named_parameters()), 0)
        return norm.item()

    assert run_threads(2, body) == [0.0, 0.0]


@every_stage
def test_a_norm_that_is_not_finite_can_be_an_error_on_all_ranks(stage: int) -> None:
    def body(rank: int) -> float:
        model, optimizer = sharded(net(), momentum, stage=stage)
        loss = net_loss(model, split(ONE_BATCH, rank, 2))
        (loss * (math.nan if rank == 1 else 1)).backward()
        with pytest.raises(RuntimeError, match=r"gradient norm is nan: the gradients were not clipped"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        return optimizer.clip_grad_norm_(1.0).item()

    assert all(math.isnan(norm) for norm in run_threads(2, body))


@every_stage
@every_norm
def test_parameters_of_several_dtypes_have_one_norm(norm_type: float, stage: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in32 = nn.Parameter(torch.linspace(-1, 2, 70))
            self.in64 = nn.Parameter(torch.linspace(-3, 1, 90, dtype=torch.float64))
            self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((self.in32.square().sum() + self.in64.square().sum() + self.empty.sum()) * x).mean()

    base = Mixed()
    every = torch.cat([2 * base.in32.detach().double(), 2 * base.in64.detach()])

    def body(rank: int) -> float:
        model, optimizer = sharded(base, momentum, stage=stage)
        model(torch.ones(1)).backward()
        return optimizer.clip_grad_norm_(1.0, norm_type).item()

    for norm in run_threads(2, body):
        assert norm == pytest.approx(torch.linalg.vector_norm(every, norm_type).item(), rel=1e-6)


# ------------------------------------------------------------------------------- torch.nn.utils.clip_grad_norm_


def at_once(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    """Straight after backward."""


def after_evaluation(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    with torch.no_grad():
        model(batch)


def after_a_forward(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    model(batch)


def after_reading_a_gradient(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    zeroshard.full_gradient(model, "head.weight")


def after_reading_parameters(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    full_parameters(model)


def after_our_own(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.clip_grad_norm_(1e9)


MOMENTS = [
    at_once,
    after_evaluation,
    after_a_forward,
    after_reading_a_gradient,
    after_reading_parameters,
    after_our_own,
]
REMEDY = "optimizer.clip_grad_norm_"


@every_stage
@pytest.mark.parametrize(
    ("moment", "norm_type", "world", "mesh_shape"),
    [(at_once, math.inf, 1, None), (at_once, math.inf, 2, None), (at_once, 2.0, 4, (2, 2))]
    + [(moment, 2.0, world, None) for moment in MOMENTS for world in (1, 2)],
)
def test_torchs_own_clipping_is_right_or_says_what_is(
    moment: Any, norm_type: float, world: int, mesh_shape: Any, stage: int
) -> None:
    def body(rank: int) -> Any:
        model, optimizer = after_backward(rank, world, mesh_shape, stage=stage)
        moment(model, optimizer, split(ONE_BATCH, rank, world))
        try:
            norm = clip_with_torch(model, 0.05, norm_type)
        except RuntimeError as error:
            assert REMEDY in str(error)
            return "refused"
        optimizer.step()
        return norm.item(), full_parameters(model)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
        token_step(model, data[0])
        clip_with_torch(model, 0.05, norm_type)
        optimizer.step()

    wanted = run_plain(net(), momentum, batches(1), loop)
    results = run_threads(world, body)
    assert len({result == "refused" for result in results}) == 1, "the ranks must agree"
    for norm, parameters in results if results[0] != "refused" else ():
        assert norm == pytest.approx(plain_norm(norm_type), rel=1e-6)
        assert_close(parameters, wanted)


@every_stage
@pytest.mark.parametrize(
    "measure",
    [
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e9),
        lambda parameters: torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]),
    ],
    ids=["clip_grad_norm_", "get_total_norm"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_under_fp16_torch_never_measures_scaled_gradients(world: int, measure: Any, stage: int) -> None:
    def body(rank: int) -> Any:
        model, _ = after_backward(rank, world, None, stage=stage, precision="fp16", loss_scale=1024.0)
        try:
            return measure(list(model.parameters())).item()
        except RuntimeError as error:
            assert REMEDY in str(error)
            return "refused"

    for norm in run_threads(world, body):
        assert norm == "refused" or norm == pytest.approx(plain_norm(2.0), rel=1e-2)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clip_value_is_not_rounded(dtype: torch.dtype, default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        model, optimizer = sharded(nn.Linear(4, 1, bias=False, dtype=dtype), momentum)
        model(torch.ones(1, 4, dtype=dtype)).sum().backward()
        optimizer.clip_grad_value_(0.1)
        found = zeroshard.full_gradient(model, "weight")
    finally:
        torch.set_default_dtype(torch.float32)
    assert found is not None
    assert torch.equal(found, torch.full((1, 4), 0.1, dtype=dtype))


@every_stage
def test_clip_grad_value_is_right_or_says_what_is(stage: int) -> None:
    wanted = {name: gradient.clamp(-1e-3, 1e-3) for name, gradient in plain_gradients().items()}

    def body(rank: int) -> str:
        model, _ = after_backward(rank, 2, None, stage=stage)
        try:
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        except RuntimeError as error:
            assert "full_gradient" in str(error)
            return "refused"
        assert_close({name: zeroshard.full_gradient(model, name) for name in wanted}, wanted, 1e-4)
        return "clipped"

    assert len(set(run_threads(2, body))) == 1


@every_world
def test_under_bf16_the_norm_is_that_of_the_reduced_gradients(world: int, mesh_shape: Any) -> None:
    def body(rank: int, stage: int) -> None:
        model, optimizer = after_backward(rank, world, mesh_shape, stage=stage, precision="bf16")
        names = [name for name, _ in model.named_parameters()]
        every = torch.cat([zeroshard.full_gradient(model, name).double().flatten() for name in names])
        norm = optimizer.clip_grad_norm_(0.05).item()
        assert norm == pytest.approx(every.norm().item(), rel=1e-6)
        assert norm == pytest.approx(plain_norm(2.0), rel=0.02)

    for stage in (0, 1, 2, 3):
        run_threads(world, partial(body, stage=stage))


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_norm_that_is_read_after_a_clipped_step_is_that_of_clipped_gradients(
    precision: str | None, stage: int
) -> None:
    """Also if it was read before: neither the norm of then nor the gradients before the clip are given out."""

    def body(rank: int) -> tuple[float, float]:
        model, optimizer = after_backward(rank, 2, None, stage=stage, precision=precision)
        before = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        optimizer.clip_grad_norm_(before / 4)
        optimizer.step()
        return before, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()

    for before, after in run_threads(2, body):
        assert after == pytest.approx(before / 4, rel=1e-2)

"""Dtypes: what is computed, reduced and updated in which, the loss scale of fp16, and that no second copy is kept."""

import copy
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage, pairwise
from plain import (
    ONE_BATCH,
    Tensors,
    adamw,
    assert_close,
    assert_equal,
    batches,
    copied,
    full_parameters,
    masters,
    momentum,
    net_loss,
    of,
    sgd,
    sharded,
    shares,
    split,
    take_step,
    token_step,
    train_step,
    train_steps,
)
from ranks import run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from zoo import Block, Net, built, make_net

import zeroshard
from zeroshard.optim import loss_scale as loss_scale_module

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 3
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@functools.cache
def net() -> nn.Module:
    return make_net()


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": momentum,
    "SGD fused": partial(momentum, fused=True),
    "AdamW": adamw,
    "AdamW fused": partial(adamw, fused=True),
    "Adagrad": of(torch.optim.Adagrad, lr=1e-2),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


class Reference:
    """Mixed precision written by hand: a 16-bit copy computes, an fp32 master is updated."""

    def __init__(self, base: nn.Module, make_optimizer: MakeOptimizer, dtype: torch.dtype, prepare: Any = None) -> None:
        self.master = copy.deepcopy(base)
        self.copy = copy.deepcopy(base).to(dtype)
        if prepare is not None:
            prepare(self.copy)
        self.optimizer = make_optimizer(self.master)

    def gradients(self, batch: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
        """The 16-bit gradients of one backward."""
        self.copy.zero_grad()
        (net_loss(self.copy, batch) * scale).backward()
        return [parameter.grad.clone() for parameter in self.copy.parameters()]

    def step(self, gradients: list[torch.Tensor]) -> None:
        """Update the master with gradients in any dtype, then the copy."""
        for parameter, gradient in zip(self.master.parameters(), gradients, strict=True):
            parameter.grad = gradient.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.copy.parameters(), self.master.parameters(), strict=True):
                parameter.copy_(master)

    def assert_equals(self, model: nn.Module) -> None:
        """Bit for bit: first the values in computation, then, after unwrap, the master's."""
        assert_equal(full_parameters(model), dict(self.copy.named_parameters()))
        assert_equal(dict(zeroshard.unwrap(model).named_parameters()), dict(self.master.named_parameters()))


# ------------------------------------------------------------------------------------------------------- 16 bits


# Not the fused kernels: on a CPU they round an element by whether it lies in a full vector or in the tail of its
# tensor, and runs have other tails than parameters. On a GPU they are compared too, in test_gpu.py.
@pytest.mark.guarantee("Masters in bf16")
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_bf16_on_one_rank_equals_the_reference_bit_for_bit(kind: str, max_norm: float | None) -> None:
    reference = Reference(net(), OPTIMIZERS[kind], torch.bfloat16)
    model, optimizer = sharded(net(), OPTIMIZERS[kind], precision="bf16")
    for batch in batches(STEPS):
        token_step(model, batch)
        gradients = [gradient.float() for gradient in reference.gradients(batch)]
        if max_norm is not None:
            norm = optimizer.clip_grad_norm_(max_norm)
            true_norm = torch.cat([gradient.double().flatten() for gradient in gradients]).norm().item()
            assert norm.item() == pytest.approx(true_norm, rel=1e-6)
            assert true_norm > max_norm
            coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # torch's own formula
            gradients = [gradient * coefficient for gradient in gradients]
        optimizer.step()
        optimizer.zero_grad()
        reference.step(gradients)
    reference.assert_equals(model)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_fp16_on_one_rank_equals_the_reference_bit_for_bit(kind: str) -> None:
    reference = Reference(net(), OPTIMIZERS[kind], torch.float16)
    model, optimizer = sharded(net(), OPTIMIZERS[kind], precision="fp16", loss_scale=256.0)
    for batch in batches(STEPS):
        take_step(optimizer, optimizer.scale(net_loss(model, batch)))
        reference.step([gradient.float() / 256 for gradient in reference.gradients(batch, 256.0)])
    assert optimizer.loss_scale.item() == 256.0
    reference.assert_equals(model)


@pytest.mark.parametrize("reduce_dtype", [None, "fp32", "bf16", torch.float64])
@every_stage
def test_gradients_are_summed_in_the_reduce_dtype(stage: int, reduce_dtype: Any) -> None:
    """Two ranks against a reference that sums by hand, bit for bit."""
    dtype = {None: torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}.get(reduce_dtype, torch.float64)
    reference = Reference(net(), adamw, torch.bfloat16)
    for batch in batches(STEPS):
        first, second = (reference.gradients(split(batch, rank, 2)) for rank in (0, 1))
        reference.step([(a.to(dtype) + b.to(dtype)) * 0.5 for a, b in zip(first, second, strict=True)])

    def body(rank: int) -> None:
        options = {"stage": stage, "precision": "bf16", "reduce_dtype": reduce_dtype, "bucket_size": 100}
        model, optimizer = sharded(net(), adamw, **options)
        train_steps(model, optimizer, shares(batches(STEPS), rank, 2))
        reference.assert_equals(model)

    run_threads(2, body)


@pytest.mark.parametrize("reduce_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("silent", [False, True])
def test_several_backwards_sum_in_the_reduce_dtype(silent: bool, reduce_dtype: str) -> None:
    dtype = torch.float32 if reduce_dtype == "fp32" else torch.bfloat16
    reference = Reference(net(), adamw, torch.bfloat16)
    model, optimizer = sharded(net(), adamw, precision="bf16", reduce_dtype=reduce_dtype)
    for batch in batches(STEPS):
        total = [torch.zeros_like(parameter, dtype=dtype) for parameter in reference.master.parameters()]
        for part in batch.chunk(4):
            if silent:
                with zeroshard.no_sync(model):
                    token_step(model, part)
            else:
                token_step(model, part)
            for sum_, gradient in zip(total, reference.gradients(part), strict=True):
                sum_ += gradient
        optimizer.step()
        optimizer.zero_grad()
        reference.step(total)
    reference.assert_equals(model)


def train(
    rank: int,
    world: int,
    precision: str,
    stage: int,
    max_norm: float | None = None,
    kind: str = "AdamW",
    **options: Any,
) -> Any:
    """Parameters in computation, the master's, the optimizer's states and the norms of a short run."""
    options |= {"stage": stage, "precision": precision, "bucket_size": 100}
    model, optimizer = sharded(net(), OPTIMIZERS[kind], **options)
    norms = []
    for batch in batches(STEPS):
        optimizer.scale(net_loss(model, split(batch, rank, world))).backward()
        if max_norm is not None:
            norms.append(optimizer.clip_grad_norm_(max_norm))
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()]
    states = {f"{name} {key}": value for name in names for key, value in zeroshard.full_state(optimizer, name).items()}
    norms_by_step = {f"norm {number}": norm for number, norm in enumerate(norms)}
    return full_parameters(model), dict(zeroshard.unwrap(model).named_parameters()), states, norms_by_step


@pytest.mark.guarantee("All stages alike")
@pytest.mark.parametrize(
    ("world", "max_norm", "precision"), [(2, None, "bf16"), (2, 0.1, "fp16"), (3, 0.1, "bf16"), (3, None, "fp16")]
)
def test_stages_1_2_and_3_are_bit_identical_in_16_bits(world: int, max_norm: float | None, precision: str) -> None:
    results = {}
    for stage in (1, 2, 3):
        first, *others = run_threads(
            world, partial(train, world=world, precision=precision, stage=stage, max_norm=max_norm)
        )
        for other in others:
            for ours, theirs in zip(other, first, strict=True):
                assert_equal(ours, theirs)
        results[stage] = first
    for stage in (2, 3):
        for ours, theirs in zip(results[stage], results[1], strict=True):
            assert_equal(ours, theirs)


def test_processes_over_gloo_are_bit_identical_in_bf16() -> None:
    results = {stage: run_processes(3, train, 3, "bf16", stage, 0.1)[0] for stage in (1, 2, 3)}
    for stage in (2, 3):
        for ours, theirs in zip(results[stage], results[1], strict=True):
            assert_equal(ours, theirs)


@every_stage
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_train_about_as_fp32(precision: str, stage: int) -> None:
    fp32 = train(0, 1, "fp32", stage, kind="SGD")[1]
    body = partial(train, world=2, precision=precision, stage=stage, kind="SGD", loss_scale=256.0)
    for _, half, _, _ in run_threads(2, body):
        assert_close(half, fp32, relative=0.02)


# --------------------------------------------------------------------------------------------------------- bytes


def memory(rank: int, stage: int, options: dict[str, Any]) -> dict[str, int]:
    """Bytes of each state at rest, after a step, before zero_grad."""
    model, optimizer = sharded(
        nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 128, bias=False)),
        partial(adamw, fused=True),
        stage=stage,
        **options,
    )
    optimizer.scale(model(torch.ones(2, 128)).float().square().mean()).backward()
    optimizer.step()
    kinds = ("parameters", "gradients", "master weights", "optimizer states")
    held = dict.fromkeys(kinds, 0) | {kind: held.now for (kind, _), held in zeroshard.report(model).memory.items()}
    return {kind: held[kind] for kind in kinds}


PSI = 2 * 128 * 64  # elements; they divide over two ranks without alignment


@pytest.mark.parametrize(
    ("options", "parameter", "gradient", "master"),
    [
        ({}, 4, 4, 0),
        ({"precision": "fp32"}, 4, 4, 0),
        ({"precision": "bf16"}, 2, 2, 4),
        ({"precision": "fp16"}, 2, 2, 4),
        ({"precision": "bf16", "reduce_dtype": "fp32"}, 2, 4, 4),
        ({"precision": "fp32", "reduce_dtype": "bf16"}, 4, 2, 0),
    ],
)
@every_stage
def test_bytes_of_each_state_follow_the_dtypes(
    stage: int, options: dict[str, Any], parameter: int, gradient: int, master: int
) -> None:
    """fp32 training has no second copy; 16 bits have one, in fp32, partitioned like the optimizer's states.

    Where parameters are partitioned, too, that is the only one.
    """
    shares = {0: (1, 1, 1), 1: (1, 1, 2), 2: (1, 2, 2), 3: (2, 2, 2)}[stage]
    parameter = 0 if stage == 3 and master else parameter
    wanted = {
        "parameters": PSI * parameter // shares[0],
        "gradients": PSI * gradient // shares[1],
        "master weights": PSI * master // shares[2],
    }
    for held in run_threads(2, partial(memory, stage=stage, options=options)):
        states = held.pop("optimizer states")
        assert held == wanted
        assert 0 <= states - 2 * PSI * 4 // shares[2] <= 64  # two moments in fp32 and a few step counts


# ------------------------------------------------------------------------------------------------------ keep_fp32


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in full_parameters(model).items()}


def is_norm(name: str) -> bool:
    return ".norm." in name


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), lambda name: False),
        (nn.LayerNorm, is_norm),
        ("blocks.*.norm", is_norm),
        (("blocks.1.norm", "temperature"), lambda name: name.startswith("blocks.1.norm.") or name == "temperature"),
        (("temper*",), lambda name: name == "temperature"),
        ((Block, "head"), lambda name: name.startswith(("blocks.", "head."))),
        (Net, lambda name: True),
    ],
)
@every_stage
def test_what_is_kept_in_fp32_is_and_the_rest_is_not(stage: int, keep: Any, kept: Callable[[str], bool]) -> None:
    def body(rank: int) -> dict[str, torch.dtype]:
        model, optimizer = sharded(net(), adamw, stage=stage, precision="bf16", keep_fp32=keep)
        token_step(model, ONE_BATCH)
        optimizer.step()
        return dtypes(model)

    for found in run_threads(2, body):
        assert found == {name: torch.float32 if kept(name) else torch.bfloat16 for name in found}


@pytest.mark.parametrize("keep", [nn.LayerNorm, "blocks.*.norm"])
def test_kept_modules_compute_in_fp32_bit_for_bit_as_by_hand(keep: Any) -> None:
    def prepare(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()
                module.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))
                module.register_forward_hook(lambda _, args, output: output.bfloat16())

    reference = Reference(net(), adamw, torch.bfloat16, prepare)
    model = copy.deepcopy(net())
    for name, parameter in reference.copy.named_parameters():
        with torch.no_grad():
            parameter.copy_(dict(model.named_parameters())[name])  # not by way of 16 bits
    model, optimizer = zeroshard.shard(model, adamw(model), precision="bf16", keep_fp32=keep)
    for batch in batches(STEPS):
        train_step(model, optimizer, batch)
        reference.step(reference.gradients(batch))
    reference.assert_equals(model)


def test_batch_norms_stay_in_fp32() -> None:
    base = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))

    def body(rank: int, stage: int) -> None:
        model, optimizer = sharded(base, adamw, stage=stage, precision="bf16")
        output = model(torch.linspace(-1, 1, 32).reshape(2, 1, 4, 4))
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
        optimizer.step()
        found = dtypes(model)
        assert {name for name, dtype in found.items() if dtype == torch.float32} == {"1.weight", "1.bias"}
        assert model[1].running_var.dtype == torch.float32

    for stage in (0, 1, 2, 3):
        run_threads(2, partial(body, stage=stage))


@pytest.mark.parametrize(("cast", "seen"), [(True, torch.bfloat16), (False, torch.float32)])
def test_floating_point_inputs_are_cast_unless_that_is_off(cast: bool, seen: torch.dtype) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, *, more: Tensors) -> torch.Tensor:
            self.seen = x.dtype, more["float"].dtype, more["int"].dtype
            return (x * self.weight).sum()

    model, _ = zeroshard.shard(Looks(), precision="bf16", cast_inputs=cast)
    model(torch.ones(2), more={"float": torch.ones(1), "int": torch.ones(1, dtype=torch.int32)})
    assert model.seen == (seen, seen, torch.int32)


class Widens(nn.Module):
    """Gives its second block and its head fp32, and its blocks a table in fp32."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)
            self.seen: list[torch.dtype] = []

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            self.seen.append(table.dtype)
            return x + torch.tanh(self.linear(self.norm(x))) * table.to(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Widens.Block(), Widens.Block(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.linspace(0, 1, 6)
        return self.head(self.second(self.first(x, table).float(), table=table).float())


@every_stage
@pytest.mark.parametrize(("precision", "cast"), [("bf16", True), ("fp16", True), ("bf16", "model")])
def test_layers_that_are_given_other_floats_inside_the_model_cast_them(
    stage: int, precision: str, cast: bool | str
) -> None:
    plain = Widens()

    def body(rank: int) -> Tensors:
        options = {"stage": stage, "precision": precision, "loss_scale": 64.0, "cast_inputs": cast}
        options["units"] = (Widens.Block,)
        model, optimizer = sharded(plain, partial(sgd, lr=0.01), **options)
        for _ in range(2):
            loss = model(torch.linspace(-1, 1, 12).view(2, 6)).float().square().sum()
            loss = loss + model.head(torch.ones(2, 6)).float().sum()  # by itself, with fp32
            take_step(optimizer, optimizer.scale(loss))
        table = torch.float32 if cast == "model" else getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])
        assert set(model.first.seen + model.second.seen) == {table}
        return {name: p.detach() for name, p in zeroshard.unwrap(model).named_parameters()}

    found = run_threads(2, body)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(2):
        take_step(
            optimizer, plain(torch.linspace(-1, 1, 12).view(2, 6)).square().sum() + plain.head(torch.ones(2, 6)).sum()
        )
    for values in found:
        wanted = copied(plain)
        torch.testing.assert_close(values, wanted, rtol=0, atol=1e-3)


class Timed(nn.Module):
    """Makes fp32 features and a table in its forward, and passes them to blocks that use no layers of torch's."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gain = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> torch.Tensor:
            return (
                x + nn.functional.linear(x * more["table"], self.weight) * self.gain + more["features"][0] * self.gain
            )

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 6))
        self.blocks = nn.ModuleList(Timed.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.time(torch.linspace(0.1, 1.3, 4).sin())
        more = {"features": (features.float() / 3, torch.arange(3)), "table": torch.linspace(0, 1, 6).cos()}
        for block in self.blocks:
            x = block(x.float(), more=more)
        return x


def timed_losses(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    losses = []
    for step in range(3):
        losses.append(
            take_step(optimizer, model(torch.linspace(-1, 1 + step + rank, 12).view(2, 6)).float().square().mean())
        )
    return losses


def beside_fsdp2(rank: int) -> None:
    model: Any = timed()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model.time, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    wanted = timed_losses(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    for stage in (0, 3):
        options: dict[str, Any] = {"stage": stage, "precision": "bf16", "reduce_dtype": "fp32"}
        options["units"] = (Timed.Block, "time")
        ours, optimizer = sharded(timed(), sgd, **options)
        assert timed_losses(ours, optimizer, rank) == wanted
        for name, value in zeroshard.state_dict(ours, None).items():
            torch.testing.assert_close(value, weights[name], rtol=1e-6, atol=1e-7)


def timed() -> nn.Module:
    return built(Timed, seed=3)


def test_blocks_get_their_inputs_as_from_fsdp2() -> None:
    run_processes(2, beside_fsdp2)


# -------------------------------------------------------------------------------------------------- several dtypes


class Mixed(nn.Module):
    """Branches in three dtypes that meet only in the loss, and a frozen table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.in32 = nn.Linear(6, 5)
        self.in16 = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.in64 = nn.Linear(6, 5, dtype=torch.float64)
        self.table = nn.Parameter(torch.tensor([3, 1, 2]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x[:, self.table].repeat(1, 2)
        branches = (self.in32(y), self.in16(y.bfloat16()), self.in64(y.double()))
        return sum(branch.double().square().mean() for branch in branches)  # type: ignore[return-value]


@functools.cache
def mixed() -> nn.Module:
    return built(Mixed, seed=6)


def train_mixed(model: nn.Module, optimizer: Any, rank: int, world: int, clip: bool = False) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        model(torch.randn(12, 6, generator=generator).chunk(world)[rank]).backward()
        if clip:
            optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        optimizer.zero_grad()


def trainable(kind: str) -> MakeOptimizer:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        return (
            torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
            if kind == "SGD"
            else torch.optim.AdamW(parameters, lr=1e-3)
        )

    return make


@pytest.mark.parametrize(("world", "kind", "clip"), pairwise([1, 2, 3], ["SGD", "AdamW"], [False, True]))
def test_parameters_of_several_dtypes_train_as_they_are(world: int, kind: str, clip: bool) -> None:
    plain = copy.deepcopy(mixed())
    train_mixed(plain, trainable(kind)(plain), 0, 1)

    def body(rank: int, stage: int) -> Tensors:
        model, optimizer = sharded(mixed(), trainable(kind), stage=stage)
        train_mixed(model, optimizer, rank, world, clip)
        return full_parameters(model)

    results = {stage: run_threads(world, partial(body, stage=stage))[0] for stage in (0, 1, 2, 3)}
    for result in results.values():
        for name, value in plain.named_parameters():
            relative = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.02, torch.int64: 0.0}[value.dtype]
            assert result[name].dtype == value.dtype
            if value.dtype == torch.int64:
                assert torch.equal(result[name], value)
            elif world == 1 and not clip and value.dtype != torch.bfloat16:  # some CPUs round bf16 tails differently
                assert torch.equal(result[name], value), name
            else:
                assert_close({name: result[name]}, {name: value.detach()}, relative)
    assert_equal(results[2], results[1])
    assert_equal(results[3], results[1])


@every_stage
def test_fp32_makes_one_dtype_of_several(stage: int) -> None:
    def body(rank: int) -> dict[str, torch.dtype]:
        model, _ = sharded(mixed(), stage=stage, precision="fp32")
        return dtypes(model)

    for found in run_threads(2, body):
        assert found.pop("table") == torch.int64
        assert set(found.values()) == {torch.float32}


# -------------------------------------------------------------------------------------------------- loss scale


@pytest.fixture
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Makes torch.empty() give NaN, so that a value nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def fp16_run(
    rank: int, kind: str, stage: int, overflow_at: tuple[int, ...], scale: float, **options: Any
) -> tuple[Tensors, dict[str, Any], list[float]]:
    """Three good steps; before those in ``overflow_at`` one step in which rank 1's gradients overflow."""
    model, optimizer = sharded(net(), OPTIMIZERS[kind], stage=stage, precision="fp16", loss_scale=scale, **options)
    scales = []
    for number, batch in enumerate(batches(3)):
        for bad in (True, False) if number in overflow_at else (False,):
            loss = optimizer.scale(net_loss(model, split(batch, rank, 2)))
            (loss * 1e30 if bad and rank == 1 else loss).backward()
            before = full_parameters(model)
            optimizer.step()
            optimizer.zero_grad()
            scales.append(optimizer.loss_scale.item())
            if bad:
                assert_equal(full_parameters(model), before)
    states = {}
    for name, _ in model.named_parameters():
        for key, value in zeroshard.full_state(optimizer, name).items():
            states[f"{name} {key}"] = torch.as_tensor(value)
    return full_parameters(model) | dict(zeroshard.unwrap(model).named_parameters()), states, scales


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
@pytest.mark.parametrize(
    ("stage", "reduce_dtype", "overflow_at", "kind"),  # the first step makes the states, a later one has them
    [
        (stage, reduce_dtype, (stage + number) % 2, kind)
        for stage, reduce_dtype in ((0, "fp32"), (1, None), (2, "fp32"), (3, None))
        for number, kind in enumerate(OPTIMIZERS)
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_leaves_no_trace(
    stage: int, reduce_dtype: str | None, overflow_at: int, kind: str
) -> None:
    """But for the halved scale: everything after is as if the step had never been tried."""
    run = partial(fp16_run, kind=kind, stage=stage, reduce_dtype=reduce_dtype)
    never = run_threads(2, partial(run, overflow_at=(), scale=128.0 if overflow_at == 0 else 256.0))[0]
    for parameters, states, scales in run_threads(2, partial(run, overflow_at=(overflow_at,), scale=256.0)):
        assert scales == [256.0] * overflow_at + [128.0] * (4 - overflow_at)
        assert all(value.isfinite().all() for value in (parameters | states).values())
        if overflow_at == 0:
            assert_equal(parameters, never[0])
            assert_equal(states, never[1])
        else:  # the scales differ: gradients underflow at other places
            assert_close(parameters, never[0], 1e-3)


@every_stage
def test_the_scale_doubles_after_a_streak_without_overflow(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale_module, "GROWTH_INTERVAL", 3)

    def body(rank: int) -> list[float]:
        model, optimizer = sharded(net(), adamw, stage=stage, precision="fp16", loss_scale=64.0)
        scales = []
        for number in range(8):
            loss = optimizer.scale(net_loss(model, split(ONE_BATCH, rank, 2)))
            take_step(optimizer, loss * 1e30 if number == 4 and rank == 0 else loss)
            scales.append(optimizer.loss_scale.item())
        return scales

    assert run_threads(2, body) == [[64.0, 64.0, 128.0, 128.0, 64.0, 64.0, 64.0, 128.0]] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_scaling_a_loss_of_any_dtype_loses_nothing(dtype: torch.dtype) -> None:
    _, optimizer = sharded(net(), adamw, precision="fp16", loss_scale=2.0**16)
    assert optimizer.scale(torch.tensor(3.0, dtype=dtype)).item() == 3.0 * 2**16


@pytest.mark.parametrize("precision", [None, "fp32", "bf16"])
def test_without_fp16_nothing_is_scaled(precision: str | None) -> None:
    _, optimizer = sharded(net(), adamw, precision=precision)
    loss = torch.tensor(3.0)
    assert optimizer.scale(loss) is loss
    assert optimizer.loss_scale is None


@every_stage
def test_under_fp16_the_norm_and_the_gradients_read_are_unscaled(stage: int) -> None:
    plain = copy.deepcopy(net())
    token_step(plain, ONE_BATCH)
    wanted = {name: p.grad for name, p in plain.named_parameters()}

    def body(rank: int) -> None:
        model, optimizer = sharded(net(), adamw, stage=stage, precision="fp16", loss_scale=512.0)
        optimizer.scale(net_loss(model, split(ONE_BATCH, rank, 2))).backward()
        norm = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
        assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(norm.item(), rel=1e-2)
        read = {name: zeroshard.full_gradient(model, name).float() for name in wanted}
        assert_close(read, wanted, 1e-2)

    run_threads(2, body)


@at_stages(1, 2)
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_scaled_loss_of_parameters_alone_is_added_as_it_is(stage: int, order: str) -> None:
    """Its backward passes no module, so no hook of the model tells of it."""

    def train(order: str) -> Tensors:
        torch.manual_seed(0)
        model, optimizer = sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), sgd, stage=stage, precision="fp16")
        for _ in range(20):  # the first find the loss scale
            loss = model(torch.ones(2, 4)).float().square().mean()
            penalty = 0.1 * sum(parameter.float().square().sum() for parameter in model.parameters())
            losses = {"together": [loss + penalty], "before": [penalty, loss], "after": [loss, penalty]}[order]
            for one in losses:
                optimizer.scale(one).backward()
            optimizer.step()
            optimizer.zero_grad()
        return masters(model)

    expected = train("together")
    for name, value in train(order).items():
        torch.testing.assert_close(value, expected[name], atol=2e-3, rtol=1e-2)

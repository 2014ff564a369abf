"""precision="fp8": the recipe against a reference of its own, every stage, and which layers compute in float8."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import at_stages
from plain import (
    Tensors,
    assert_close,
    assert_equal,
    full_parameters,
    mesh_of,
    run_stages,
    sharded,
    shares,
    split,
    token_step,
    train_steps,
)
from ranks import run_threads
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from zoo import Adapted, Block, TokenNet, built

import zeroshard
from zeroshard.config.config import Config
from zeroshard.float8 import E4M3, cast, check_float8_device, triton_cast
from zeroshard.float8.linear import float8_linear
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.tracing.trace_model import trace_model
from zeroshard.train.commands.train import read_options
from zeroshard.train.summary import dry_run

FP8 = {"precision": "fp8", "keep_bf16": ["head"]}
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def make_net(width: int = 16) -> TokenNet:
    """Build a net whose layers have sizes that float8 needs."""
    return built(lambda: TokenNet(width, hidden=2 * width))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-3)


def batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(11, (8, 5), generator=generator) for _ in range(steps)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# ------------------------------------------------------------------------------------------------------ the recipe


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values that a float8 tensor with one scale has, in fp64."""
    scale = torch.tensor(LIMITS[dtype] / x.double().abs().max().item(), dtype=torch.float32)
    return (x.float() * scale).to(dtype).double() / scale.double()


class Reference(torch.autograd.Function):
    """The recipe, written down again: torchao's "tensorwise"."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        x8, weight8 = rounded(x, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
        return (x8 @ weight8.T + bias.double()).bfloat16()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        x8, weight8 = rounded(x, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
        grad8 = rounded(gradient, torch.float8_e5m2)
        return (grad8 @ weight8).bfloat16(), (grad8.T @ x8).bfloat16(), gradient.float().sum(0).bfloat16()


def outputs_and_gradients(function: Any, **changes: torch.Tensor) -> list[torch.Tensor]:
    given = {"x": random(37, 32), "weight": random(48, 32, seed=1), "bias": random(48, seed=2), **changes}
    inputs = [tensor.clone().requires_grad_() for tensor in given.values()]
    output = function(*inputs)
    output.backward(random(*output.shape, seed=3))
    gradients = [tensor.grad for tensor in inputs if tensor.grad is not None]
    return [output.detach(), *gradients]


def test_a_layer_computes_the_recipe() -> None:
    results = zip(outputs_and_gradients(float8_linear), outputs_and_gradients(Reference.apply), strict=True)
    for found, expected in results:
        torch.testing.assert_close(found, expected, rtol=2**-8, atol=2**-8 * expected.abs().max().item())


def test_float8_is_visible() -> None:
    found, exact = outputs_and_gradients(float8_linear)[0], outputs_and_gradients(F.linear)[0]
    error = (found - exact).float().norm() / exact.float().norm()
    assert 0.01 < error < 0.06


def test_leading_dimensions_and_strides_do_not_matter() -> None:
    x = random(2, 5, 3, 32)
    weight, bias = random(16, 32, seed=1), random(16, seed=2)
    whole = float8_linear(x, weight, bias)
    assert whole.shape == (2, 5, 3, 16)
    assert torch.equal(whole.view(-1, 16), float8_linear(x.view(-1, 32), weight, bias))
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(whole, float8_linear(strided, weight.t().contiguous().t(), bias))


def test_special_values() -> None:
    weight = random(16, 16, seed=1)
    assert torch.equal(float8_linear(torch.zeros(4, 16).bfloat16(), weight, None), torch.zeros(4, 16).bfloat16())
    assert float8_linear(torch.zeros(0, 16).bfloat16(), weight, None).shape == (0, 16)
    for value in (float("inf"), float("nan")):
        x = random(4, 16)
        x[1, 2] = value
        assert float8_linear(x, weight, None)[1].isnan().all()


def test_a_gradient_of_a_gradient_raises() -> None:
    x = random(4, 16).requires_grad_()
    (gradient,) = torch.autograd.grad(float8_linear(x, random(16, 16), None).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_other_dtypes_raise_and_autocast_casts() -> None:
    x, weight = random(4, 16), random(16, 16, seed=1)
    with pytest.raises(RuntimeError, match="keep_bf16"):
        float8_linear(x.float(), weight, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(float8_linear(x.float(), weight, None), float8_linear(x, weight, None))
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="autocast"):
        float8_linear(x, weight, None)


def test_the_kernels_take_no_tensor_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_cast, "triton", SimpleNamespace(jit=lambda function: function))
    kernels = cast._build_kernels(torch.device("cpu"))
    matrices = random(16, 16), random(16, 16).to("meta")
    given = [cast.MatrixCast(matrix, torch.ones((), device=matrix.device), E4M3) for matrix in matrices]
    with pytest.raises(RuntimeError, match="on cpu and meta: move its input"):
        kernels.cast(given)


@pytest.mark.guarantee("Float8 layers")
def test_it_is_torchaos_recipe() -> None:
    """Without a bias, which torchao adds after the product is rounded."""
    torchao = pytest.importorskip("torchao.float8")
    layer = nn.Linear(64, 48, bias=False).bfloat16()
    config = torchao.Float8LinearConfig(emulate=True)
    theirs = torchao.convert_to_float8_training(nn.Sequential(copy.deepcopy(layer)), config=config)
    x, gradient = random(2, 20, 64), random(2, 20, 48, seed=1)
    found = []
    for weight, function in (
        (layer.weight, lambda x: float8_linear(x, layer.weight, None)),
        (next(theirs.parameters()), theirs),
    ):
        given = x.clone().requires_grad_()
        output = function(given)
        output.backward(gradient)
        found.append([output, given.grad, weight.grad])
    for ours, their in zip(*found, strict=True):
        torch.testing.assert_close(ours, their, rtol=2**-7, atol=2**-8)


# -------------------------------------------------------------------------------------------------------- training


def train_reference(model: nn.Module, data: list[torch.Tensor], ranks: int) -> Tensors:
    """Train in one process: bf16 copies of fp32 weights, the reference in the blocks, gradients summed in bf16."""
    optimizer = adamw(model)
    masters = dict(model.named_parameters())
    for batch in data:
        sums: Tensors = {}
        for rank in range(ranks):
            weights = {name: p.detach().bfloat16().requires_grad_() for name, p in masters.items()}
            tokens = split(batch, rank, ranks)
            x = F.embedding(tokens, weights["embedding.weight"])
            for number in range(3):
                own = {k.removeprefix(f"blocks.{number}."): w for k, w in weights.items() if f"blocks.{number}." in k}
                y = F.layer_norm(x, (16,), own["norm.weight"], own["norm.bias"]).view(-1, 16)
                y = torch.tanh(Reference.apply(y, own["up.weight"], own["up.bias"]))  # type: ignore[no-untyped-call]
                y = Reference.apply(y, own["down.weight"], torch.zeros(16))  # type: ignore[no-untyped-call]
                x = x + y.view_as(x)
            logits = F.linear(x, weights["head.weight"], weights["head.bias"])
            F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
            for name, weight in weights.items():
                gradient = weight.grad
                assert gradient is not None
                sums[name] = sums[name] + gradient / ranks if name in sums else gradient / ranks
        for name, master in masters.items():
            master.grad = sums[name].float()
        optimizer.step()
    return {name: p.detach().bfloat16() for name, p in masters.items()}


@pytest.mark.guarantee("Float8 layers")
@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_train_like_one_process(ranks: int) -> None:
    data = batches(4)
    found = run_stages(ranks, make_net(), adamw, data, **FP8)
    expected = train_reference(make_net(), data, ranks)
    for parameters in found.values():
        assert_close(parameters, expected, relative=0.01)
        assert_equal(parameters, found[0])
    in_bf16 = run_stages(ranks, make_net(), adamw, data, stages=(3,), precision="bf16")[3]
    assert not torch.equal(in_bf16["blocks.0.up.weight"], found[3]["blocks.0.up.weight"])


def accumulate(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:
        for number, part in enumerate(batch.chunk(2)):
            if number == 0:
                with zeroshard.no_sync(model):
                    token_step(model, part)
            else:
                token_step(model, part)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "options",
    [
        {"cast_on_gather": False},
        {"bucket_size": 200},
        {"prefetch": False},
        {"offload": "host"},
        {"offload": {"optimizer": "host", "parameters": "host"}},
    ],
    ids=str,
)
def test_options_that_change_no_number(options: dict[str, Any]) -> None:
    plain = run_stages(2, make_net(), adamw, batches(3), accumulate, stages=(3,), **FP8)[3]
    found = run_stages(2, make_net(), adamw, batches(3), accumulate, stages=(3,), **FP8, **options)[3]
    assert_equal(found, plain)


@pytest.mark.parametrize("gather_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("offload", ["host", {"parameters": "host"}], ids=str)
def test_offload_changes_no_number_if_parameters_are_gathered_in_8_bits(offload: Any, gather_dtype: str) -> None:
    options: dict[str, Any] = {**FP8, "stages": (3,), "gather_dtype": gather_dtype}
    plain = run_stages(2, make_net(), adamw, batches(3), **options)[3]
    assert_equal(run_stages(2, make_net(), adamw, batches(3), **options, offload=offload)[3], plain)


@pytest.mark.parametrize("partition", ["hybrid", "full", "hierarchical", "hierarchical-gradients", "inner-gradients"])
def test_meshes_of_two_data_axes(partition: str) -> None:
    options: dict[str, Any] = {**FP8, "reduce_dtype": "fp32"}
    expected = run_stages(4, make_net(), adamw, batches(3), stages=(0,), **options)[0]
    options |= {"mesh": (2, 2), "partition": partition}
    found = run_stages(4, make_net(), adamw, batches(3), stages=(2, 3), **options)
    for parameters in found.values():
        assert_close(parameters, expected, relative=0.01)


def recompute(rank: int, stage: int, when: str, blocks: Any) -> Tensors:
    model = make_net()
    if when == "before shard()":
        zeroshard.checkpoint_activations(model, blocks)
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=stage, **FP8)
    if when == "after shard()":
        zeroshard.checkpoint_activations(sharded, blocks)
    train_steps(sharded, optimizer, shares(batches(3), rank, 2))
    return full_parameters(sharded)


@pytest.mark.parametrize("blocks", [[Block], ["blocks.*.up"]], ids=["blocks", "layers"])
@at_stages(1, 3)
def test_recomputation_changes_no_number(stage: int, blocks: Any) -> None:
    plain, *recomputed = (
        run_threads(2, partial(recompute, stage=stage, when=when, blocks=blocks))[0]
        for when in ("never", "before shard()", "after shard()")
    )
    for parameters in recomputed:
        assert_equal(parameters, plain)


def resume(rank: int, path: Path) -> list[Tensors]:
    data = shares(batches(5), rank, 2)
    model = make_net()
    sharded, optimizer = zeroshard.shard(model, adamw(model), stage=3, **FP8)
    train_steps(sharded, optimizer, data[:2])
    zeroshard.save(path, sharded, optimizer)
    train_steps(sharded, optimizer, data[2:])
    other = make_net()
    again, optimizer = zeroshard.shard(other, adamw(other), stage=2, **FP8)
    zeroshard.load(path, again, optimizer)
    train_steps(again, optimizer, data[2:])
    return [full_parameters(sharded), full_parameters(again)]


def test_a_checkpoint_resumes_to_the_bit(tmp_path: Path) -> None:
    for found in run_threads(2, partial(resume, path=tmp_path / "checkpoint")):
        assert_equal(*found)


def test_values_between_steps_are_the_master_weights() -> None:
    base = make_net()
    plain = copy.deepcopy(base)
    sharded, _ = zeroshard.shard(plain, adamw(plain), stage=3, **FP8)
    assert torch.equal(zeroshard.full_parameter(sharded, "blocks.1.up.weight"), base.blocks[1].up.weight)
    assert zeroshard.state_dict(sharded).keys() == base.state_dict().keys()
    with zeroshard.gathered(sharded, write_rank=0):
        nn.init.ones_(sharded.blocks[1].up.weight)
        inside = sharded(batches(1)[0]).detach()
    assert torch.equal(sharded(batches(1)[0]), inside)


def test_frozen_weights_and_adapters() -> None:
    model, optimizer = sharded(
        built(lambda: nn.Sequential(*(Adapted(nn.Linear(32, 32), 8) for _ in range(2)))), adamw, precision="fp8"
    )
    layers = zeroshard.report(model).float8
    assert layers is not None
    assert layers.names == ("0.base", "1.base")
    assert layers.excluded["0.down"] == "8 outputs are not a multiple of 16"
    before = zeroshard.full_parameter(model, "0.down.weight")
    model(torch.randn(4, 32)).float().square().mean().backward()
    optimizer.step()
    assert not torch.equal(zeroshard.full_parameter(model, "0.down.weight"), before)


def test_a_parametrized_layer_computes_with_its_computed_weight() -> None:
    layer = built(lambda: parametrizations.weight_norm(nn.Linear(16, 16)))
    plain = copy.deepcopy(layer).bfloat16()
    x = random(4, 16)
    model, _ = zeroshard.shard(layer, precision="fp8")
    assert torch.equal(model(x), float8_linear(x, plain.weight, plain.bias))


def test_a_compiled_block_gives_the_same() -> None:
    results = []
    for compiled in (False, True):
        model = make_net()
        sharded, optimizer = zeroshard.shard(model, adamw(model), stage=3, **FP8)
        for block in sharded.blocks if compiled else ():
            block.compile(backend="aot_eager", fullgraph=False)
        train_steps(sharded, optimizer, batches(2))
        results.append(full_parameters(sharded))
    assert_close(results[1], results[0], relative=0.01)


# ------------------------------------------------------------------------------------------------ layers and errors


class OwnForward(nn.Linear):
    """A linear layer with its own forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Inherited(nn.Linear):
    """A linear layer whose forward is nn.Linear's."""


class Mixed(nn.Module):
    """Layers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.inherited, self.own = nn.Linear(32, 32), Inherited(32, 32), OwnForward(32, 32)
        self.narrow, self.odd, self.nothing = nn.Linear(32, 24), nn.Linear(20, 32), nn.Linear(32, 0)
        self.attention = nn.MultiheadAttention(32, 2)
        self.convolution, self.embedding = nn.Conv1d(32, 32, 1), nn.Embedding(4, 32)
        self.norm = nn.LayerNorm(32)
        self.exact, self.kept = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32))
        self.table = nn.Parameter(torch.zeros(32, 32))


@pytest.mark.guarantee("Float8 layers")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_the_report_lists_the_layers_that_do_not_compute_in_float8() -> None:
    model, _ = zeroshard.shard(Mixed(), precision="fp8", keep_fp32=["exact"], keep_bf16=["kept"])
    report = zeroshard.report(model)
    assert report.float8 is not None
    assert report.float8.names == ("plain", "inherited")
    assert report.float8.excluded == {
        "the model": "Mixed is not an nn.Linear",
        "own": "OwnForward has its own forward",
        "narrow": "24 outputs are not a multiple of 16",
        "odd": "20 inputs are not a multiple of 16",
        "nothing": "has no outputs",
        "attention": "MultiheadAttention is not an nn.Linear",
        "attention.out_proj": "nn.MultiheadAttention reads its weight",
        "convolution": "Conv1d is not an nn.Linear",
        "exact": "computes in float32",
        "kept.0": "in keep_bf16",
    }
    assert "float8: 2 layers; not the model (Mixed is not an nn.Linear); not own (" in str(report)


def test_unwrap_restores_the_layers() -> None:
    model = make_net()
    shown = str(model)
    sharded, _ = zeroshard.shard(model, precision="fp8", keep_bf16=["head"])
    assert str(sharded) == shown
    assert isinstance(sharded.blocks[0].up, nn.Linear)
    plain = zeroshard.unwrap(sharded)
    assert all(type(block.up) is nn.Linear for block in plain.blocks)
    assert plain(batches(1)[0]).dtype == torch.float32


def test_a_layer_that_is_the_model_is_freed_with_it() -> None:
    model, _ = zeroshard.shard(nn.Linear(16, 16), precision="fp8")
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_a_model_without_such_layers_raises() -> None:
    with pytest.raises(ValueError, match=r"no layer of Linear can compute in float8.*10 outputs") as error:
        zeroshard.shard(nn.Linear(16, 10), precision="fp8")
    assert 'precision="bf16"' in str(error.value)


def test_a_pattern_that_matches_no_module_raises() -> None:
    with pytest.raises(ValueError, match="keep_bf16: no module of TokenNet matches 'lm_head'"):
        zeroshard.shard(make_net(), precision="fp8", keep_bf16="lm_head")


def test_a_device_that_cannot_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    check_float8_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"8\.9 or higher.*A100 with 8\.0: use precision"):
        check_float8_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_float8_device(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(ValueError, match="an AMD GPU"):
        check_float8_device(torch.device("cuda"))
    with pytest.raises(ValueError, match="'mps'"):
        check_float8_device(torch.device("mps"))


def shard_over_tensor_axis(rank: int) -> str:
    from zeroshard.models import GPT, GPTConfig

    mesh = mesh_of((1, 2), "shard tensor")
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=32, context=8, layers=2, heads=2, width=32))
    try:
        zeroshard.shard(model, mesh=mesh, precision="fp8")
    except ValueError as error:
        return str(error)
    return ""


def test_tensor_parallel_layers_are_refused() -> None:
    for message in run_threads(2, shard_over_tensor_axis):
        assert "tensor-parallel" in message


def test_the_planner_prices_float8_products() -> None:
    model, tokens = make_net(), torch.zeros(1, 16, dtype=torch.long)
    flops = {}
    for precision in ("bf16", "fp8"):
        trace = trace_model(model, tokens, loss=lambda output: output.float().sum(), precision=precision)
        products = [op for op in trace.ops if op.kind == "matmul"]
        flops[precision] = sum(op.flops for op in products)
        in_float8 = [op for op in products if op.dtype == "fp8"]
        assert len(in_float8) == (0 if precision == "bf16" else 3 * 6)
    assert flops["fp8"] == flops["bf16"]
    h100 = Machine.resolve("h100")
    assert h100.matmul_seconds(1e12, "fp8") < 0.6 * h100.matmul_seconds(1e12, "bf16")
    with pytest.raises(ValueError, match="'a100' does not support fp8"):
        Machine.resolve("a100").peak_flops("fp8")


def test_zeroshard_train_keeps_the_head_in_bf16() -> None:
    text = dry_run(read_options(["--precision", "fp8", "--device", "cpu"]), ranks=2)
    assert "fp8" in text


def test_config() -> None:
    config = Config(precision="fp8", keep_bf16="head")
    assert config.keep_bf16 == ("head",)
    assert config.compute_dtype == torch.bfloat16
    assert config.has_master
    with pytest.raises(ValueError, match="reduce_dtype"):
        Config(reduce_dtype="fp8")

"""precision="fp8" on a GPU: the fused casts to the bit, products against the emulation on the CPU, and the stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_nccl

import zeroshard
from zeroshard.float8 import cast as casts
from zeroshard.float8.linear import float8_linear
from zeroshard.models import GPT, GPTConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPE = GPTConfig(vocab_size=64, context=16, layers=2, heads=4, width=64)


@pytest.fixture(autouse=True)
def gpu_with_float8() -> None:
    """Skip a GPU that cannot. (Not at import, which forked ranks do too: they cannot use CUDA then.)"""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that multiplies float8 matrices")


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 1, columns)
    return values.bfloat16()


def assert_cast_as_on_the_cpu(*given: casts.MatrixCast) -> None:
    on_gpu = [each._replace(matrix=each.matrix.cuda()) for each in given]
    on_gpu = [each._replace(largest=None if each.largest is None else casts.largest(each.matrix)) for each in on_gpu]
    for found, expected in zip(casts.cast(*on_gpu), casts.cast(*given), strict=True):
        for ours, other in zip(found, expected, strict=True):
            assert (ours is None) == (other is None)
            if ours is not None:
                assert ours.shape == other.shape and ours.stride() == other.stride()
                torch.testing.assert_close(ours.cpu().float(), other.float(), rtol=0, atol=0, equal_nan=True)


def to_cast(values: torch.Tensor, dtype: torch.dtype, *needed: bool) -> casts.MatrixCast:
    return casts.MatrixCast(values, casts.largest(values), dtype, *needed)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [casts.E4M3, casts.E5M2])
@pytest.mark.parametrize("shape", [(64, 128), (37, 48), (1, 16), (300, 1040)])
def test_the_fused_cast_is_bit_equal_to_the_cpus(
    shape: tuple[int, int], dtype: torch.dtype, needed: tuple[bool, bool]
) -> None:
    assert_cast_as_on_the_cpu(to_cast(matrix(*shape), dtype, *needed))


@pytest.mark.parametrize("tokens", [64, 37, 1, 300])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_one_launch_casts_all_that_backward_multiplies(tokens: int, is_gathered: bool) -> None:
    x, weight, gradient = matrix(tokens, 272), matrix(144, 272, seed=1), matrix(tokens, 144, seed=2)
    weight_cast = casts.MatrixCast(weight.to(casts.E4M3), None, casts.E4M3, False, True)
    assert_cast_as_on_the_cpu(
        to_cast(x, casts.E4M3, False, True),
        weight_cast if is_gathered else to_cast(weight, casts.E4M3, False, True),
        to_cast(gradient, casts.E5M2, True, True),
    )
    assert_cast_as_on_the_cpu(to_cast(x, casts.E4M3), to_cast(weight, casts.E4M3))
    assert_cast_as_on_the_cpu(to_cast(x.t().contiguous().t(), casts.E4M3, True, True))


@pytest.mark.parametrize("special", [0.0, float("inf"), float("nan")])
def test_special_values_are_cast_as_on_the_cpu(special: float) -> None:
    values = torch.zeros(16, 16, dtype=torch.bfloat16) if special == 0.0 else matrix(16, 16)
    values[3, 5] = special
    assert_cast_as_on_the_cpu(to_cast(values, casts.E4M3, True, True), to_cast(values, casts.E5M2, True, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numels", [[1], [77, 4096], [4096, 16, 10_000], [64_000, 4096]])
def test_shards_are_cast_as_on_the_cpu(numels: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [(3 * torch.randn(numel, generator=generator)).to(dtype) for numel in numels]
    largest = torch.linspace(10, 20, len(parts)).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        shards, offset = [], 16
        for index, part in enumerate(parts):
            shards.append(casts.ShardCast(part.to(device), index, offset))
            offset += part.numel() + 32
        target = torch.zeros(offset, dtype=torch.uint8, device=device).view(casts.E4M3)
        together = casts.ShardCasts(shards, largest.to(device), target)
        together.run()
        together.shards[0] = shards[0]._replace(values=shards[0].values.clone().neg_())  # moved, and changed
        together.run()
        results.append(target.cpu().view(torch.uint8))
    assert torch.equal(*results)


@pytest.mark.parametrize("shape", [(64, 128), (48, 80), (304, 1040)])
def test_a_float8_matrix_is_transposed(shape: tuple[int, int]) -> None:
    assert_cast_as_on_the_cpu(casts.MatrixCast(matrix(*shape).to(casts.E4M3), None, casts.E4M3, False, True))


def test_the_kernels_are_used_and_reused() -> None:
    kernels = casts.KERNEL_LOADER.load(torch.device("cuda"))
    assert kernels is not None
    values = matrix(64, 128).cuda()
    given = to_cast(values, casts.E4M3, True, True), to_cast(values, casts.E5M2, True, True)
    expected = casts.cast(*given)
    compiled = len(kernels._compiled)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = casts.cast(*given)
        torch.cuda.synchronize()
    assert sum(event.count for event in profile.key_averages() if event.key == "cast_kernel") == 1
    assert len(kernels._compiled) == compiled
    for ours, other in zip(found, expected, strict=True):
        for part, same in zip(ours, other, strict=True):
            assert torch.equal(part.float(), same.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_kernel_casts_no_view_at_an_odd_address(dtype: torch.dtype) -> None:
    """And it runs on the stream of each call: the values are written there, late."""
    numel = 64 * 128
    storage, shards = torch.zeros(numel + 1, dtype=torch.bfloat16).cuda(), torch.zeros(numel + 1, dtype=dtype).cuda()
    target = torch.zeros(numel, dtype=torch.uint8).cuda().view(casts.E4M3)
    torch.cuda.synchronize()
    for seed, start in enumerate((0, 0, 1, 0, 1)):
        values = matrix(64, 128, seed)
        given = to_cast(values, casts.E4M3, True, True)
        expected = casts.cast(given)[0]
        with torch.cuda.stream(torch.cuda.Stream()):
            place, shard = storage[start : start + numel].view(64, 128), shards[start : start + numel]
            new, bound = values.cuda(), given.largest.cuda() if given.largest is not None else None
            assert bound is not None
            torch.cuda._sleep(20_000_000)
            place.copy_(new)
            shard.copy_(new.flatten())
            found = casts.cast(given._replace(matrix=place, largest=bound))[0]
            casts.ShardCasts([casts.ShardCast(shard, 0, 0)], bound.view(1), target).run()
            for ours, other in zip((*found, target.view(64, 128)), (*expected, expected[0]), strict=True):
                assert torch.equal(ours.float().cpu(), other.float())


def outputs_and_gradients(device: str, tokens: int, function: Any = float8_linear) -> list[torch.Tensor]:
    x, weight = matrix(tokens, 96).to(device).view(1, tokens, 96), matrix(80, 96, seed=1).to(device)
    bias, gradient = matrix(1, 80, seed=2)[0].to(device), matrix(tokens, 80, seed=3).to(device).view(1, tokens, 80)
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    output = function(*inputs)
    output.backward(gradient)
    return [tensor.detach().float().cpu() for tensor in (output, x.grad, weight.grad, bias.grad)]


@pytest.mark.parametrize("tokens", [64, 37])
def test_products_are_the_emulations_to_rounding(tokens: int) -> None:
    for found, expected in zip(
        outputs_and_gradients("cuda", tokens), outputs_and_gradients("cpu", tokens), strict=True
    ):
        assert (found - expected).abs().max() <= 2**-7 * expected.abs().max()


def test_a_compiled_layer_gives_the_same() -> None:
    compiled = torch.compile(float8_linear)
    for found, expected in zip(
        outputs_and_gradients("cuda", 64, compiled), outputs_and_gradients("cuda", 64), strict=True
    ):
        assert (found - expected).abs().max() <= 2**-7 * expected.abs().max()


def train(rank: int, stage: int, steps: int = 4, precision: str = "fp8") -> list[float]:
    torch.manual_seed(0)
    model = GPT(SHAPE).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"keep_bf16": ["head"]} if precision == "fp8" else {}
    sharded, optimizer = zeroshard.shard(model, optimizer, stage=stage, precision=precision, **options)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(64, (4, 16), generator=generator).cuda()
        loss = sharded(tokens, tokens)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_single_rank_trains_alike_whether_it_gathers_bf16_or_float8() -> None:
    assert train(0, stage=3) == train(0, stage=0)


def test_stages_train_alike_on_two_ranks() -> None:
    expected = run_nccl(2, train, 0)
    assert expected != run_nccl(2, train, 0, 4, "bf16")
    for stage in (1, 2, 3):
        for found, losses in zip(run_nccl(2, train, stage), expected, strict=True):
            assert found == pytest.approx(losses, rel=2e-3)

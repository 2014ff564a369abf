"""8-bit payloads: the stated bounds, and what they never hide."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.comm import BLOCK_NUMEL, Quantizer, exchange_numel, payload_bytes
from zeroshard.sharding.layout import ALIGN_ELEMENTS

CPU = torch.device("cpu")
DTYPES = ["int8", "fp8"]
SMALLEST = 2.0**-126  # below it, steps are those of subnormal numbers


def restore(dtype: str, values: torch.Tensor, parts: int = 1, out: torch.dtype = torch.float32) -> torch.Tensor:
    quantizer = Quantizer(dtype, CPU)
    payloads = torch.zeros(parts, payload_bytes(values.numel() // parts), dtype=torch.uint8)
    quantizer.quantize(payloads, values)
    restored = torch.empty(values.numel(), dtype=out)
    quantizer.dequantize(restored, payloads)
    return restored


def bound(dtype: str, values: torch.Tensor) -> torch.Tensor:
    """The error that [Note: 8-bit payloads] allows for each element."""
    blocks = values.double().view(-1, BLOCK_NUMEL).abs()
    largest = blocks.amax(1, keepdim=True)
    steps = largest / 254 if dtype == "int8" else largest / 448 * 2**-10
    allowed = (steps * (1 + 2**-7)).expand_as(blocks)
    return (allowed if dtype == "int8" else torch.maximum(allowed, blocks / 16)).flatten() + SMALLEST


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Finite values of one to a few blocks, with magnitudes that differ between the blocks and inside them."""
    seed = draw(st.integers(0, 2**31))
    blocks, low, high = draw(st.integers(1, 9)), draw(st.integers(-120, 120)), draw(st.integers(0, 30))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(blocks * BLOCK_NUMEL, generator=generator)
    exponents = torch.randint(low, low + high + 1, values.shape, generator=generator).clamp(max=125)
    values = torch.ldexp(values, exponents).nan_to_num(posinf=3e38, neginf=-3e38)
    zeros = torch.rand(values.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    return values.masked_fill(zeros, 0.0)


@pytest.mark.guarantee("Collectives in 8 bits")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(values=tensors())
def test_every_element_is_within_its_bound(dtype: str, values: torch.Tensor) -> None:
    error = (restore(dtype, values).double() - values.double()).abs()
    assert (error <= bound(dtype, values)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_the_largest_numbers_of_16_bits_stay_finite(dtype: str, out: torch.dtype) -> None:
    values = torch.linspace(-1, 1, 64, dtype=torch.float64).mul(torch.finfo(out).max).to(out)
    restored = restore(dtype, values, out=out)
    assert restored.isfinite().all()
    assert (
        (restored.double() - values.double()).abs() <= bound(dtype, values) * 1.01 + values.double().abs() / 128
    ).all()


@pytest.mark.guarantee("Collectives in 8 bits")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_value_that_is_not_finite_becomes_nan(dtype: str, bad: float) -> None:
    values = torch.ones(3 * BLOCK_NUMEL)
    values[BLOCK_NUMEL + 5] = bad
    restored = restore(dtype, values).view(3, -1)
    assert restored[1].isnan().all()
    assert ((restored - 1).abs().flatten() <= bound(dtype, torch.ones(3 * BLOCK_NUMEL))).view(3, -1)[[0, 2]].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_tiny_values_and_no_values(dtype: str) -> None:
    assert torch.equal(restore(dtype, torch.zeros(128)), torch.zeros(128))
    assert restore(dtype, torch.full((64,), 1e-45)).abs().max() <= 1e-38
    assert restore(dtype, torch.empty(0)).numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_those_of_the_restored_parts_in_order(dtype: str) -> None:
    torch.manual_seed(0)
    parts, numel = 3, 5 * BLOCK_NUMEL
    values = torch.randn(parts, numel)
    quantizer, payloads = Quantizer(dtype, CPU), torch.empty(parts, payload_bytes(numel), dtype=torch.uint8)
    quantizer.quantize(payloads, values.flatten())
    restored, output = restore(dtype, values.flatten(), parts).view(parts, -1), torch.empty(numel)
    quantizer.sum(output, payloads, 0.5)
    assert torch.equal(output, (restored[0] + restored[1] + restored[2]) * 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_tensors_are_converted_in_chunks(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(40 * BLOCK_NUMEL, generator=torch.Generator().manual_seed(0))
    wanted = restore(dtype, values, 2)
    monkeypatch.setattr("zeroshard.comm.quantization._CHUNK_NUMEL", 3 * BLOCK_NUMEL)
    assert torch.equal(restore(dtype, values, 2), wanted)


def test_kernels_convert_what_they_can_index() -> None:
    """They have 32 bits for the index of a byte in a part; longer parts are converted by torch's operations."""
    quantizer, kernels = Quantizer("int8", torch.device("cpu")), object()
    quantizer._kernels = kernels
    for nbytes, chosen in ((2**31 - 1, kernels), (2**31, None)):
        assert quantizer._kernels_for(SimpleNamespace(is_cuda=True, shape=(2, nbytes))) is chosen  # type: ignore[arg-type]
    assert quantizer._kernels_for(torch.empty(2, 66)) is None


def test_parameters_and_shards_begin_with_a_block() -> None:
    assert ALIGN_ELEMENTS % BLOCK_NUMEL == 0


def test_a_buffer_has_room_for_what_is_sent_and_received() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for parts, numel in ((1, 64), (2, 128), (3, 192 * 5)):
            buffer = torch.empty(exchange_numel(numel, parts, dtype), dtype=dtype)
            sent, received = Quantizer("int8", CPU).exchange_buffers(buffer, numel, parts)
            assert sent.shape == received.shape == (parts, payload_bytes(numel // parts))
            assert sent.data_ptr() + sent.nbytes == received.data_ptr()

"""8-bit collectives on a GPU: the kernels give torch's values, and NCCL ranks the numbers of gloo ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain import adamw_in_groups, assert_close, assert_equal, batches, full_parameters, net_loss, split
from ranks import run_nccl, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zoo import make_net

import zeroshard
from zeroshard.comm import Quantizer, payload_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EIGHT_BITS = ["int8", "fp8"]


def values_of(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return values of many magnitudes, with zeros, NaN and infinity in some blocks."""
    torch.manual_seed(0)
    values = (torch.randn(numel) * torch.logspace(-3, 3, numel)).to(dtype)
    values[100:300] = 0
    values[700], values[900] = float("nan"), float("inf")
    return values


@pytest.mark.parametrize("eight_bits", EIGHT_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("parts", "blocks"), [(1, 16), (3, 77), (2, 5000)])
def test_kernels_give_the_values_of_torchs_operations(
    eight_bits: str, dtype: torch.dtype, parts: int, blocks: int
) -> None:
    values = values_of(dtype, parts * blocks * 64)
    results = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        quantizer, moved = Quantizer(eight_bits, device), values.to(device)
        payloads = torch.zeros(parts, payload_bytes(blocks * 64), dtype=torch.uint8, device=device)
        quantizer.quantize(payloads, moved)
        restored, total = torch.empty_like(moved), torch.empty(blocks * 64, dtype=dtype, device=device)
        quantizer.dequantize(restored, payloads)
        quantizer.sum(total, payloads, 0.5)
        results.append((restored.cpu(), total.cpu()))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected.isnan(), found.isnan())
        assert torch.equal(expected.nan_to_num(0), found.nan_to_num(0))


def train(rank: int, world: int, device: str, model: nn.Module, options: dict[str, Any], mesh: tuple[int, ...]) -> Any:
    model = copy.deepcopy(model).to(device)
    device_mesh = init_device_mesh(device, mesh) if mesh else None
    model, optimizer = zeroshard.shard(model, adamw_in_groups(model), mesh=device_mesh, **options)
    for batch in batches(3):
        net_loss(model, split(batch, rank, world).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in full_parameters(model).items()}


@pytest.mark.parametrize("sent", [{"gather_dtype": "int8"}, {"gather_dtype": "fp8", "reduce_wire": "int8"}], ids=str)
@pytest.mark.parametrize("bucket_size", [2**25, 256])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nccl_ranks_give_the_numbers_of_gloo_ranks(stage: int, bucket_size: int, sent: dict[str, str]) -> None:
    if stage < 3:
        sent = {"reduce_wire": "int8"}
    model, options = make_net(width=16), {"stage": stage, "bucket_size": bucket_size, **sent}
    wanted = run_threads(2, train, 2, "cpu", model, options, ())[0]
    found = run_nccl(2, train, 2, "cuda", model, options, ())
    assert_equal(found[0], found[1])
    assert_close(found[0], wanted, 3e-3)  # a value on the edge of two steps may fall to the other one


@pytest.mark.parametrize("partition", ["full", "hierarchical"])
def test_two_hops_over_nccl(partition: str) -> None:
    model = make_net(width=16)
    options = {"stage": 3, "partition": partition, "gather_dtype": "int8", "reduce_wire": "int8"}
    wanted = run_threads(4, train, 4, "cpu", model, options, (2, 2))[0]
    found = run_nccl(4, train, 4, "cuda", model, options, (2, 2))
    assert_equal(found[0], found[3])
    assert_close(found[0], wanted, 3e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stages_1_to_3_give_the_same_bits_in_16_bits(precision: str) -> None:
    model, options = make_net(width=16), {"precision": precision, "reduce_wire": "int8"}
    one, two, three = (run_nccl(2, train, 2, "cuda", model, {"stage": n, **options}, ())[0] for n in (1, 2, 3))
    assert_equal(one, two)
    assert_equal(one, three)

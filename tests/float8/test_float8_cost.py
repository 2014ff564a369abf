"""What a float8 layer costs the host: bounds for the operations and launches of a call, with empty kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_engine_cost import Operations
from test_float8 import FP8, adamw, make_net
from test_float8_gather import float8_flats

import zeroshard
from zeroshard.float8 import cast, linear, triton_cast
from zeroshard.float8.cast import E4M3, ShardCast, ShardCasts, TorchCast
from zeroshard.float8.linear import Float8Weight, float8_linear

# (operations of torch, the product of float8 matrices included; launches of Triton): not more
FORWARD = {"gathered": (5, 1), "bf16": (10, 1)}
BACKWARD = {"gathered": (12, 1), "bf16": (13, 1)}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have layers on the CPU call what they call on a GPU; return the grids of the kernels."""
    found: list[int] = []

    class Kernel:
        def __init__(self, _: Callable[..., None]) -> None:
            pass

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **options: found.append(grid[0])

    def product(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(triton_cast, "triton", SimpleNamespace(jit=Kernel))
    kernels = cast._build_kernels(torch.device("cpu"))
    monkeypatch.setattr(cast, "_casts_for", lambda tensor: kernels)
    monkeypatch.setattr(linear, "_product", product)
    return found


def inputs(kind: str) -> tuple[torch.Tensor, torch.Tensor, Float8Weight | None]:
    x = torch.ones(2, 100, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(272, 32, dtype=torch.bfloat16, requires_grad=True)
    return x, weight, Float8Weight(weight.detach().to(E4M3), torch.ones(())) if kind == "gathered" else None


@pytest.mark.parametrize("kind", ["gathered", "bf16"])
def test_a_call_makes_no_more_operations_and_launches_than_this(kind: str, launches: list[int]) -> None:
    x, weight, gathered = inputs(kind)
    with Operations() as forward:
        output = float8_linear(x, weight, None, gathered)
    forward_launches = len(launches)
    gradient = torch.ones_like(output)
    with Operations() as backward:
        torch.autograd.grad(output, (x, weight), gradient)
    for found, count, bound in (
        (forward.found, forward_launches, FORWARD[kind]),
        (backward.found, len(launches) - forward_launches, BACKWARD[kind]),
    ):
        assert found.total() <= bound[0], found
        assert count <= bound[1]
    tiles = {"x": 2 * 1, "weight": 3 * 1, "gradient": 2 * 3}  # of 128 by 128
    first = tiles["x"] + (tiles["weight"] if kind == "bf16" else 0)
    assert launches == [first, sum(tiles.values())]


@pytest.mark.parametrize("needed", ["x", "weight", "bias"])
def test_backward_casts_only_what_it_multiplies(needed: str, launches: list[int]) -> None:
    x, weight, _ = inputs("bf16")
    tensors = {"x": x, "weight": weight, "bias": torch.ones(272, dtype=torch.bfloat16)}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == needed)
    output = float8_linear(*tensors.values())
    launches.clear()
    output.backward(torch.ones_like(output))
    assert launches == {"x": [3 + 6], "weight": [2 + 6], "bias": []}[needed]


@pytest.mark.parametrize("kind", ["gathered", "bf16"])
def test_a_matrix_is_cast_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by torch's operations: the gradient is needed by rows and by columns."""
    found: list[tuple[int, ...]] = []

    class Counted(TorchCast):
        def _cast_one(self, cast: Any) -> Any:
            found.append(tuple(cast.matrix.shape))
            return super()._cast_one(cast)

    monkeypatch.setattr(cast, "_TORCH_CAST", Counted())
    x, weight, gathered = inputs(kind)
    float8_linear(x, weight, None, gathered).sum().backward()
    of_x, of_weight, of_gradient = (2, 100, 32), (272, 32), (2, 100, 272)
    expected = [of_x, of_weight] if kind == "bf16" else [of_x]
    assert found == [*expected, of_x, of_weight, of_gradient]


def test_one_launch_casts_the_weights_of_a_unit(launches: list[int]) -> None:
    model = make_net()
    sharded, _ = zeroshard.shard(model, adamw(model), stage=3, **FP8)
    flats = float8_flats(sharded)
    assert sum(len(flat.weights) for flat in flats) == 6
    launches.clear()
    for flat in flats * 2:
        with Operations() as operations:
            flat.all_gather_inputs()
    assert len(launches) == 2 * len(flats) < 2 * 6
    assert not operations.found
    assert all(flat._casts is not None and flat._casts.table.is_aligned for flat in flats)  # by vector loads


def test_a_table_of_shards_follows_their_addresses(launches: list[int]) -> None:
    target, values = torch.empty(20_000, dtype=E4M3), [torch.zeros(numel) for numel in (5000, 10_000, 16)]
    shards = [ShardCast(values[0], 1, 0), ShardCast(values[1], 0, 5008)]
    casts = ShardCasts(shards, torch.ones(2).bfloat16(), target)
    casts.run()
    rows = [[values[0].data_ptr(), 5000, 1, 0, 0], [values[1].data_ptr(), 10_000, 0, 5008, 2]]
    table = casts.table
    assert table.rows.tolist() == rows and table.blocks.tolist() == [0, 0, 1, 1, 1]
    assert not table.is_aligned and table.is_fp32
    casts.run()
    assert casts.table is table
    shards[:] = [ShardCast(values[2], 0, 16)]
    casts.run()
    assert casts.table.rows.tolist() == [[values[2].data_ptr(), 16, 0, 16, 0]] and casts.table.is_aligned
    shards.append(ShardCast(values[1].bfloat16(), 0, 32))
    with pytest.raises(ValueError, match="in float32 or in bfloat16"):
        casts.run()
    assert launches == [5, 5, 1]


class Compiled:
    """A compiled kernel that does nothing."""

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self.launched = launched

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self.launched.append((grid, *args))


def test_a_compiled_kernel_is_reused_for_arguments_that_it_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[tuple[Any, ...]] = []
    reused: list[tuple[Any, ...]] = []

    class Kernel:
        def __init__(self, _: Callable[..., None]) -> None:
            pass

        def __getitem__(self, grid: tuple[int]) -> Callable[..., Compiled]:
            def launch(*args: Any, num_warps: int) -> Compiled:
                looked_up.append(args)
                return Compiled(reused)

            return launch

    monkeypatch.setattr(triton_cast, "triton", SimpleNamespace(jit=Kernel))
    kernels = cast._build_kernels(torch.device("cpu"))

    def is_reused(matrix: torch.Tensor, *needed: bool, dtype: torch.dtype = E4M3) -> bool:
        before = len(looked_up), len(reused)
        largest = None if matrix.dtype == E4M3 else torch.ones((), dtype=torch.bfloat16)
        kernels.cast([cast.MatrixCast(matrix, largest, dtype, *needed)])
        assert len(looked_up) + len(reused) == sum(before) + 1
        return len(reused) > before[1]

    x = torch.zeros(300, 64, dtype=torch.bfloat16)
    assert not is_reused(x)
    assert is_reused(x) and is_reused(x[:290]) and is_reused(x.view(10, 30, 64))
    assert reused[-1][0] == (3, 1, 1)
    assert len(reused[-1]) == 1 + len(looked_up[-1])
    for other in (x[:288], x[:1], x.view(-1, 8), x.to(E4M3)):  # multiples of 16, one, columns, dtype
        needed = (False, True) if other.dtype == E4M3 else (True, False)
        assert not is_reused(other, *needed)
        assert is_reused(other, *needed)
    assert not is_reused(x, True, True) and not is_reused(x, False, True) and not is_reused(x, dtype=cast.E5M2)
    unaligned = torch.zeros(300 * 64 + 1, dtype=torch.bfloat16)[1:].view(300, 64)
    assert not is_reused(unaligned) and not is_reused(unaligned)

"""The native host updates: torch's numbers to the bit, whatever is read and written on the way, and how they are built.

Equality is asserted wherever torch rounds every element the same way, whatever its roundings are: see
[Note: detecting torch's rounding].
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_processes
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zeroshard.optim.cpu import build, kernels
from zeroshard.optim.cpu import rounding as rounding_module
from zeroshard.optim.cpu.apply import make_update_spec
from zeroshard.optim.cpu.kernels import (
    CpuKernels,
    Rounding,
    load_kernels,
)
from zeroshard.optim.cpu.rounding import detect_torch_rounding
from zeroshard.optim.hyperparams import AdamHyperparams, SGDHyperparams, hyperparams_from_group

LENGTHS = (1, 7, 37, 64, 1025, 40_003)  # within a vector, a block, several blocks, several threads
ADAMS = (
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"weight_decay": 0.0, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adam, {"betas": (0.3, 0.9), "eps": 0.0}),
    (torch.optim.Adam, {"betas": (0.5, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True}),
)
SGDS: tuple[dict[str, Any], ...] = (
    {"weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3, "maximize": True},
    {"momentum": 0.9, "nesterov": True},
)
WAYS: tuple[dict[str, Any], ...] = ({}, {"foreach": True}, {"fused": True})


def wild(numel: int) -> torch.Tensor:
    """Half of them any 32 bits, NaN, infinities and subnormals among them; half of many magnitudes."""
    bits = torch.randint(-(2**31), 2**31, (numel,)).to(torch.int32).view(torch.float32)
    plain = torch.randn(numel) * 10 ** (12 * torch.rand(numel) - 8)
    return torch.where(torch.rand(numel) < 0.5, plain, bits)


def differing(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """Where two tensors differ in a bit. A NaN is a NaN."""
    kind = torch.int32 if a.element_size() == 4 else torch.int16
    return ((a.view(kind) != b.view(kind)) & ~(a.isnan() & b.isnan())).nonzero().flatten().tolist()


# ------------------------------------------------------------------------------------------------ torch's numbers


def rounding_here(kind: Any, fused: bool) -> Rounding:
    """Return torch's rounding on this CPU. On Arm with 256-bit SVE it has none: its bits depend on the position."""
    rounding = detect_torch_rounding(kind, fused)
    if rounding is None and torch.backends.cpu.get_cpu_capability() == "SVE256":
        pytest.skip("torch rounds an element by its position in the tensor here: torch's own update is used")
    assert rounding is not None
    return rounding


@pytest.mark.guarantee("CPU updates")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way), "for-loop"))
@pytest.mark.parametrize(("kind", "chosen"), ADAMS)
def test_adam_gives_torchs_bits(
    native_kernels: CpuKernels, kind: Any, chosen: dict[str, Any], way: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    for values in (torch.randn, wild):
        for numel in LENGTHS:
            parameter = torch.nn.Parameter(values(numel))
            optimizer = kind([parameter], lr=1e-2, **chosen, **way)
            options = hyperparams_from_group(optimizer, optimizer.param_groups[0])
            assert isinstance(options, AdamHyperparams)
            rounding = rounding_here("adam", options.fused)
            ours = parameter.detach().clone(), torch.zeros(numel), torch.zeros(numel)
            for step in (1, 2, 3):
                parameter.grad = values(numel)
                threads = 1 + step % 2
                native_kernels.adam(
                    *ours, parameter.grad, options, out=ours, step=step, threads=threads, rounding=rounding
                )
                optimizer.step()
                state = optimizer.state[parameter]
                assert not differing(state["exp_avg"], ours[1])
                assert not differing(state["exp_avg_sq"], ours[2])
                assert not differing(parameter.detach(), ours[0])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way), "for-loop"))
@pytest.mark.parametrize("chosen", SGDS)
def test_sgd_gives_torchs_bits(native_kernels: CpuKernels, chosen: dict[str, Any], way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    for values in (torch.randn, wild):
        for numel in LENGTHS:
            parameter = torch.nn.Parameter(values(numel))
            optimizer = torch.optim.SGD([parameter], lr=1e-2, **chosen, **way)
            options = hyperparams_from_group(optimizer, optimizer.param_groups[0])
            assert isinstance(options, SGDHyperparams)
            rounding = rounding_here("sgd", options.fused)
            ours, momentum = parameter.detach().clone(), None
            for step in (1, 2, 3):
                parameter.grad = values(numel)
                new = torch.empty(numel) if options.momentum else None
                out, threads = (ours, new), 1 + step % 2
                native_kernels.sgd(ours, momentum, parameter.grad, options, out=out, threads=threads, rounding=rounding)
                momentum = new
                optimizer.step()
                assert not differing(parameter.detach(), ours)
                if momentum is not None:
                    assert not differing(optimizer.state[parameter]["momentum_buffer"], momentum)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way), "for-loop"))
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_torchs_own_bits_do_not_depend_on_where_an_element_is(kind: Any, way: dict[str, Any]) -> None:
    """Without this no update of a part of a tensor could give the bits of the whole: no promise would be ours."""
    torch.manual_seed(0)
    numel, chosen = 70_000, {"momentum": 0.9} if kind is torch.optim.SGD else {}
    values, gradients = wild(numel), [wild(numel) for _ in range(3)]

    def trained(pieces: list[int]) -> torch.Tensor:
        parameters = [torch.nn.Parameter(piece.clone()) for piece in values.split(pieces)]
        optimizer = kind(parameters, lr=0.3, weight_decay=0.1, **chosen, **way)
        for gradient in gradients:
            for parameter, piece in zip(parameters, gradient.split(pieces), strict=True):
                parameter.grad = piece.clone()
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in parameters])

    whole, at = trained([numel]), 16 if way.get("fused") else 1  # fused: in whole vectors
    cuts = [0, *(at * cut for cut in (1, 4, 8, 21, 34, 1000, 1031, 4000)), numel]
    assert not differing(trained([end - begin for begin, end in itertools.pairwise(cuts)]), whole)
    torch.set_num_threads(3)
    assert not differing(trained([numel]), whole)


@pytest.fixture
def tried_again() -> Iterator[None]:
    """A test tries the roundings itself, and so does what runs after it."""
    detect_torch_rounding.cache_clear()
    yield
    detect_torch_rounding.cache_clear()


@pytest.mark.guarantee("CPU updates")
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_where_no_rounding_is_torchs_the_update_is_left_to_torch(
    native_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch, tried_again: None, kind: Any
) -> None:
    rounding_here(kind, fused=False)
    right = rounding_module._run_torch

    def other(*arguments: Any) -> list[torch.Tensor]:
        """A torch whose last bit is one that nobody else has."""
        lines = right(*arguments)
        lines[0].view(torch.int32)[100] ^= 1
        return lines

    monkeypatch.setattr(rounding_module, "_run_torch", other)
    detect_torch_rounding.cache_clear()
    assert detect_torch_rounding(kind, fused=False) is None
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = (torch.optim.AdamW if kind == "adam" else torch.optim.SGD)([parameter], lr=0.1)
    dtypes = torch.float32, torch.bfloat16, torch.bfloat16
    assert make_update_spec(optimizer, optimizer.param_groups[0], {}, dtypes) is None


def test_the_trial_of_roundings_disturbs_nothing(native_kernels: CpuKernels, tried_again: None) -> None:
    seen: list[Any] = []
    hook = register_optimizer_step_pre_hook(lambda *arguments: seen.append(arguments))
    wanted, before = detect_torch_rounding("adam", fused=False), torch.get_rng_state()
    detect_torch_rounding.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert detect_torch_rounding("adam", fused=False) == wanted
    finally:
        torch.set_default_dtype(torch.float32)
        hook.remove()
    assert not seen
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------ reading and writing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_gradient_of_16_bits_is_read_and_multiplied_as_torch_does(
    native_kernels: CpuKernels, dtype: torch.dtype
) -> None:
    gradient = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype if dtype.itemsize == 2 else torch.float16)
    gradient = gradient.to(dtype)
    factors = 1 / 3, 0.7
    # Without momentum and at rate -1, SGD adds the gradient to the parameter, which is zero.
    zero, out = torch.zeros(2**16), torch.empty(2**16)
    native_kernels.sgd(zero, None, gradient, SGDHyperparams(lr=-1.0), out=(out, None), grad_factors=factors)
    scaled = gradient.float().mul_(torch.tensor(factors[0])).mul_(torch.tensor(factors[1]))
    assert not differing(scaled + 0.0, out)  # + 0.0: zero plus negative zero is positive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_copy_is_rounded_as_torch_rounds(native_kernels: CpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    halves = (
        torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype if dtype.itemsize == 2 else torch.bfloat16).float()
    )
    bits = halves.view(torch.int32)  # every value of 16 bits, what lies half-way to the next, and next to half-way
    ties = {torch.bfloat16: 1 << 15, torch.float16: 1 << 12, torch.float32: 0}[dtype]
    near = [(bits + ties + offset).view(torch.float32) for offset in (-1, 0, 1)]
    tiny = torch.linspace(-(2.0**-13), 2.0**-13, 2**17 + 1)  # fp16's subnormals, and half-way between them
    parameter = torch.cat([halves, *near, tiny, wild(100_001)])
    out, copy = torch.empty_like(parameter), torch.empty(parameter.numel(), dtype=dtype)
    still = torch.zeros_like(parameter)
    native_kernels.sgd(parameter, None, still, SGDHyperparams(lr=0.0), out=(out, None), copy=copy)
    assert not differing(out, parameter)
    assert not differing(copy, parameter.to(dtype))


@settings(max_examples=60, deadline=None)
@given(
    numel=st.one_of(st.integers(1, 3000), st.integers(30_000, 60_000)),  # a thread takes 8192 at least
    threads=st.integers(1, 9),
    shift=st.integers(0, 9),
    fused=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_threads_alignment_and_place_change_no_bit(
    numel: int, threads: int, shift: int, fused: bool, seed: int
) -> None:
    found = load_kernels()
    if found is None:
        pytest.skip("no C compiler here: only the fall-back can be tested")
    torch.manual_seed(seed)
    old = [torch.randn(numel), torch.randn(numel), torch.rand(numel)]
    gradient = torch.randn(numel).bfloat16()
    options = AdamHyperparams(lr=0.1, weight_decay=0.1, fused=fused)
    expected, first = [tensor.clone() for tensor in old], torch.empty(numel, dtype=torch.bfloat16)
    found.adam(*expected, gradient, options, out=tuple(expected), step=3, copy=first)
    beside = [torch.full((numel + shift + 1,), 7.0) for _ in old]
    parts = [tensor[shift : shift + numel] for tensor in beside]
    copy = torch.full((numel + shift + 1,), 7.0, dtype=torch.bfloat16)
    before = [tensor.clone() for tensor in old]
    found.adam(*old, gradient, options, out=tuple(parts), step=3, copy=copy[shift : shift + numel], threads=threads)
    assert all(torch.equal(a, b) for a, b in zip(old, before, strict=True))  # an update beside leaves them
    assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
    assert torch.equal(copy[shift : shift + numel], first)
    assert all((part[:shift] == 7).all() and part[shift + numel] == 7 for part in [*beside, copy])  # nothing else


def test_a_stretch_cut_in_two_is_the_whole(native_kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    old, options = (torch.randn(999), torch.randn(999), torch.rand(999)), AdamHyperparams(lr=0.1, fused=True)
    gradient, whole, halves = torch.randn(999), [torch.empty(999) for _ in old], [torch.empty(999) for _ in old]
    native_kernels.adam(*old, gradient, options, out=tuple(whole), step=1)
    for part in (slice(0, 496), slice(496, 999)):
        out = tuple(tensor[part] for tensor in halves)
        native_kernels.adam(*(tensor[part] for tensor in old), gradient[part], options, out=out, step=1)
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


# ------------------------------------------------------------------------------------------------ refused


def test_what_does_not_fit_is_refused(native_kernels: CpuKernels) -> None:
    good, half = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    adam, sgd = AdamHyperparams(lr=0.1), SGDHyperparams(lr=0.1, momentum=0.9)

    def run(**changed: Any) -> None:
        given = {"p": good, "m": good, "v": good, "g": good, "out": (good, good, good), "step": 1, **changed}
        p, m, v, g = (given.pop(key) for key in "pmvg")
        native_kernels.adam(p, m, v, g, adam, **given)

    run()
    for changed, words in (
        ({"m": torch.zeros(5)}, r"first must be \(4,\) torch.float32 on cpu.*; got \(5,\) torch.float32 on cpu"),
        ({"p": half, "m": half, "v": half}, "parameter must be .*got .*bfloat16"),
        ({"g": torch.zeros(4, dtype=torch.float64)}, "gradient must be .*got .*float64"),
        ({"g": torch.zeros(8)[::2]}, r"gradient must be .*strides \(2,\)"),
        ({"g": torch.zeros(2, 2)}, r"gradient must be .*got \(2, 2\)"),
        ({"g": torch.zeros(4, device="meta")}, "gradient must be .*got .* on meta"),
        ({"copy": torch.zeros(4, dtype=torch.int32)}, "copy must be .*got .*int32"),
        ({"out": (good, good)}, "out must have a tensor for each of 3 states, got 2"),
        ({"out": (good, good, half)}, "second_out must be .*got .*bfloat16"),
        ({"grad_factors": (1.0, 1.0, 1.0)}, "at most 2 gradient factors are supported, got 3"),
        ({"step": 0}, "step must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            run(**changed)
    with pytest.raises(ValueError, match=r"out\[1\] must be a tensor with momentum 0.9, got None"):
        native_kernels.sgd(good, None, good, sgd, out=(good, None))
    with pytest.raises(ValueError, match=r"out\[1\] must be None with momentum 0.0, got a tensor"):
        native_kernels.sgd(good, None, good, SGDHyperparams(lr=0.1), out=(good, good))
    with pytest.raises(ValueError, match="the momentum tensor must be None with momentum 0"):
        native_kernels.sgd(good, good, good, SGDHyperparams(lr=0.1), out=(good, None))


def test_which_groups_are_served() -> None:
    class Mine(torch.optim.AdamW):
        pass

    parameter = torch.nn.Parameter(torch.zeros(1))

    def found(kind: Any, **chosen: Any) -> AdamHyperparams | SGDHyperparams | None:
        optimizer = kind([parameter], **{"lr": 0.5, **chosen})
        return hyperparams_from_group(optimizer, optimizer.param_groups[0])

    assert found(torch.optim.AdamW, weight_decay=0.25) == AdamHyperparams(lr=0.5, weight_decay=0.25)
    assert found(torch.optim.Adam, fused=True) == AdamHyperparams(lr=0.5, decoupled_weight_decay=False, fused=True)
    assert found(torch.optim.SGD, lr=torch.tensor(0.5)) == SGDHyperparams(lr=0.5)
    fused = {"fused": True, "weight_decay": 0.0}
    assert found(torch.optim.AdamW, lr=torch.tensor(0.5), **fused) == AdamHyperparams(lr=0.5, fused=True)
    assert found(torch.optim.SGD, momentum=0.9, nesterov=True) == SGDHyperparams(lr=0.5, momentum=0.9, nesterov=True)
    assert found(torch.optim.SGD, maximize=True, fused=True) == SGDHyperparams(lr=0.5, maximize=True, fused=True)
    assert found(torch.optim.AdamW, lr=0.25) != AdamHyperparams(lr=0.5)
    for kind, chosen in (
        (Mine, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.5)}),
        (torch.optim.AdamW, {"capturable": True}),
        (torch.optim.Adam, {"differentiable": True}),
        (torch.optim.SGD, {"differentiable": True}),
    ):
        assert found(kind, **chosen) is None


# ------------------------------------------------------------------------------------------------ building


def built(cache: Path) -> list[Path]:
    return sorted((cache / "zeroshard").glob("*"))


def test_the_library_is_built_once_and_kept(
    native_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load_library(kernels.KERNELS_SOURCE)
    (file,) = built(tmp_path)
    assert file.suffix == ".so"
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    written = file.stat().st_mtime_ns
    build.load_library(kernels.KERNELS_SOURCE)
    assert [(found, found.stat().st_mtime_ns) for found in built(tmp_path)] == [(file, written)]
    monkeypatch.setattr(build, "cpu_description", lambda: "another machine, the same home")
    build.load_library(kernels.KERNELS_SOURCE)
    assert len(built(tmp_path)) == 2


def build_library(rank: int) -> None:
    dist.barrier()
    build.load_library(kernels.KERNELS_SOURCE)


def test_ranks_that_build_at_once_all_get_it(native_kernels: CpuKernels, tmp_path: Path) -> None:
    run_processes(3, build_library, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert len(built(tmp_path)) == 1  # and nothing half-made is left


@pytest.mark.parametrize("cause", ["a file in its place", "open to others"])
def test_without_a_cache_it_is_built_for_this_process(
    native_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if cause == "open to others":
        (tmp_path / "zeroshard").mkdir()
        (tmp_path / "zeroshard").chmod(0o777)
    else:
        (tmp_path / "zeroshard").write_text("")
    found = build.load_library(kernels.KERNELS_SOURCE)
    assert not Path(found._name).exists()  # loaded, and gone from the disk
    assert isinstance(found.zeroshard_adam, ctypes._CFuncPtr)
    assert not built(tmp_path)


def test_a_damaged_file_is_not_the_end(
    native_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "cpu_description", lambda: "this file is loaded once only")
    empty = b""
    monkeypatch.setattr(build, "_build", lambda source, compiler, target: target.write_bytes(empty))
    with pytest.raises(build.KernelBuildError):
        build.load_library(kernels.KERNELS_SOURCE)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "cpu_description", lambda: "this file is loaded once only")
    assert build.load_library(kernels.KERNELS_SOURCE).zeroshard_sgd


@pytest.mark.parametrize(
    ("path", "compiler", "words"),
    [("", "", "no C compiler was found"), (os.environ["PATH"], "false", "false: it exited with 1")],
)
def test_where_it_cannot_be_built_one_warning_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, compiler: str, words: str
) -> None:
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "COMPILERS", ("false",))
    monkeypatch.setattr(kernels, "_load_kernels", functools.cache(kernels._load_kernels.__wrapped__))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results: list[CpuKernels | None] = []
        ranks = [threading.Thread(target=lambda: results.append(load_kernels())) for _ in range(3)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert results == [None, None, None]
    (warning,) = caught
    assert words in str(warning.message)
    assert "torch's slower update" in str(warning.message)
    assert "Install a C compiler" in str(warning.message)


# ------------------------------------------------------------------------------------------------ the benchmark


def test_the_benchmark_measures_every_kind(native_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = importlib.import_module("benchmarks.suites.optimizer")
    for kind in optimizer.KINDS:
        if "DeepSpeed" not in kind:
            assert optimizer.measure_host_adam(kind, numel=100, threads=1, repeats=1)["ns"] > 0

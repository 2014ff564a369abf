"""Triton kernels are tested once for each device; torch's operations run if they fail, and a warning says why."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeroshard.comm import Quantizer, quantization
from zeroshard.float8 import cast, triton_cast
from zeroshard.float8.cast import TorchCast
from zeroshard.optim.fused_adam import fused_adam
from zeroshard.optim.sharded_muon import updater
from zeroshard.utils.kernel_loader import KernelLoader

CPU, GPU = torch.device("cpu"), torch.device("cuda", 100)  # there is none


@pytest.fixture(autouse=True)
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Double:
    """A kernel that multiplies by two, if it compiles."""

    def __init__(self, factor: float = 2.0, error: Exception | None = None) -> None:
        self.factor, self.error = factor, error
        self.built: list[torch.device] = []

    def build(self, device: torch.device) -> Double:
        self.built.append(device)
        return self

    def test(self, kernel: Double, device: torch.device) -> None:
        assert not torch.is_grad_enabled()
        if self.error is not None:
            raise self.error
        torch.testing.assert_close(torch.ones(2) * kernel.factor, torch.full((2,), 2.0))

    def loader(self) -> KernelLoader[Double]:
        return KernelLoader("doubling", self.build, self.test)


def test_kernels_are_loaded_once_for_each_device() -> None:
    kernel = Double()
    loader = kernel.loader()
    other = torch.device("cuda", 1)
    assert [loader.load(device) for device in (GPU, GPU, other, GPU)] == [kernel] * 4
    assert kernel.built == [GPU, other]


def test_threads_load_once() -> None:
    kernel, barrier = Double(), threading.Barrier(4)
    loader, found = kernel.loader(), []

    def body() -> None:
        barrier.wait()
        found.append(loader.load(GPU))

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [kernel] * 4
    assert kernel.built == [GPU]


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_other_devices_have_no_kernels(device: str) -> None:
    kernel = Double()
    assert kernel.loader().load(torch.device(device)) is None
    assert not kernel.built


def test_an_amd_gpu_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    kernel = Double()
    assert kernel.loader().load(GPU) is None
    assert not kernel.built


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (Double(error=ImportError("no Triton")), "ImportError: no Triton"),
        (Double(error=RuntimeError("Failed to find C compiler")), "RuntimeError: Failed to find C compiler"),
        (Double(factor=2.5), "AssertionError: Tensor-likes are not close"),
    ],
    ids=["missing", "compiler", "wrong"],
)
def test_one_warning_says_why_torch_runs(kernel: Double, reason: str) -> None:
    loader = kernel.loader()
    with pytest.warns(RuntimeWarning, match=f"doubling cannot be used.*on cuda:100: {reason}"):
        assert loader.load(GPU) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.load(GPU) is None
    assert kernel.built == [GPU]


@pytest.mark.parametrize("where", [(torch.compiler, "is_compiling"), (torch.cuda, "is_current_stream_capturing")])
def test_nothing_is_tested_while_a_graph_is_made(where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Double()
    loader = kernel.loader()
    with monkeypatch.context() as patched:
        patched.setattr(*where, lambda: True)
        assert loader.load(GPU) is None
        assert not kernel.built
    assert loader.load(GPU) is kernel
    with monkeypatch.context() as patched:
        patched.setattr(*where, lambda: True)
        assert loader.load(GPU) is kernel


LOADERS = [
    (fused_adam.KERNEL_LOADER, "fused Adam"),
    (updater.KERNEL_LOADER, "Muon"),
    (cast.KERNEL_LOADER, "float8 casts"),
    (quantization.KERNEL_LOADERS["int8"], "int8 collectives"),
    (quantization.KERNEL_LOADERS["fp8"], "fp8 collectives"),
]


@pytest.mark.parametrize(("loader", "purpose"), LOADERS, ids=[purpose for _, purpose in LOADERS])
def test_every_kernel_that_does_not_compile_leaves_its_work_to_torch(
    loader: Any, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it fails because there is no GPU, and where there is one, because there are not that many."""
    monkeypatch.setattr(loader, "_loaded", {})
    with pytest.warns(RuntimeWarning, match=f"kernels of {purpose} cannot be used, so torch's slower operations run"):
        assert loader.load(GPU) is None


class Wrong:
    """Another object whose method writes or returns a wrong value."""

    def __init__(self, right: Any, method: str) -> None:
        self._right, self._method = right, method

    def __getattr__(self, name: str) -> Any:
        right = getattr(self._right, name)
        return partial(self._call, right) if name == self._method else right

    def _call(self, right: Any, *args: Any) -> Any:
        found = right(*args)
        written = args[0].target if self._method == "cast_shards" else args[0]
        changed = written if found is None else next(part for part in found[0] if part is not None)
        changed.view(torch.uint8)[-20:].fill_(77)
        return found


SELF_TESTS = [
    (cast.KERNEL_LOADER, TorchCast(), ("cast", "cast_shards")),
    (quantization.KERNEL_LOADERS["int8"], Quantizer("int8", CPU), ("quantize", "dequantize", "sum")),
    (quantization.KERNEL_LOADERS["fp8"], Quantizer("fp8", CPU), ("quantize", "dequantize", "sum")),
]


@pytest.mark.parametrize(("loader", "right", "methods"), SELF_TESTS, ids=["float8", "int8", "fp8"])
def test_a_kernel_that_gives_other_values_fails_its_test(loader: Any, right: Any, methods: tuple[str, ...]) -> None:
    loader.self_test(right, CPU)
    for method in methods:
        with pytest.raises(AssertionError, match="not equal"):
            loader.self_test(Wrong(right, method), CPU)


def test_threads_that_launch_together_keep_their_own_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward on device 0's thread and a backward on device 1's, both of tensors on device 1."""
    current, inside, done = threading.local(), threading.Event(), threading.Event()

    def exchange(index: int) -> int:
        before: int = current.index
        current.index = index
        return before

    class Kernel:
        def __init__(self, _: Any) -> None:
            pass

        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                assert current.index == 1
                if not inside.is_set():
                    inside.set()
                    done.wait(10)

            return launch

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    monkeypatch.setattr(triton_cast, "triton", SimpleNamespace(jit=Kernel))
    kernels = cast._build_kernels(torch.device("cuda", 1))
    found: dict[int, int] = {}

    def body(own: int) -> None:
        current.index = own
        kernels._launch(kernels._cast, 1, [], ("cast",), 0)
        found[own] = current.index

    first, second = (threading.Thread(target=body, args=(own,)) for own in (0, 1))
    first.start()
    assert inside.wait(10)
    second.start()
    second.join()
    done.set()
    first.join()
    assert found == {0: 0, 1: 1}

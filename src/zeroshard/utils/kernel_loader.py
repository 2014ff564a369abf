"""KernelLoader: Triton kernels that have passed a test on a device; torch's operations run without them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

import torch

Kernels = TypeVar("Kernels")
# of a kernel that must give torch's bits: no fused multiply and add, and subnormal numbers are not flushed to zero
EXACT_FP_OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on a device.

    A new one for each launch: torch's object stores the device to return to, and threads launch at the same time.

    >>> with current_device(torch.device("cpu")):
    ...     pass
    """
    return nullcontext() if device.type != "cuda" else torch.cuda.device(device.index)


class KernelLoader(Generic[Kernels]):
    """Loads kernels once for each device, and compares them with torch's operations.

    Triton compiles when a kernel first runs. This needs a C compiler, Python's headers and a GPU that Triton knows. If
    one is missing, or a kernel gives other values than torch, there is one warning for each device.

    >>> loader = KernelLoader("a sum", lambda device: sum, lambda kernel, device: None)
    >>> loader.load(torch.device("cpu"))
    """

    def __init__(
        self,
        purpose: str,
        build: Callable[[torch.device], Kernels],
        self_test: Callable[[Kernels, torch.device], None],
    ) -> None:
        """``build`` imports the kernels; ``self_test`` runs them on small inputs, and raises if a value is wrong."""
        self._purpose, self._build, self.self_test = purpose, build, self_test
        self._loaded: dict[torch.device, Kernels | None] = {}
        self._lock = threading.Lock()  # backward runs on a thread of its own

    def load(self, device: torch.device) -> Kernels | None:
        """Return the kernels for a device, None if torch's operations must run there."""
        if device.type != "cuda" or torch.version.cuda is None:
            return None
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._loaded:
            # the test reads values, which is impossible here: torch runs this time, and a later call loads
            if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
                return None
            with self._lock:
                if device not in self._loaded:
                    self._loaded[device] = self._try_load(device)
        return self._loaded[device]

    def _try_load(self, device: torch.device) -> Kernels | None:
        try:
            kernels = self._build(device)
            with torch.no_grad():
                self.self_test(kernels, device)
            return kernels
        except Exception as error:  # Triton raises many types, its own and those of the C compiler it calls
            warnings.warn(
                f"the Triton kernels of {self._purpose} cannot be used, so torch's slower operations run on {device}: "
                f"{type(error).__name__}: {error}. Triton needs a C compiler, Python's headers and a GPU that it knows",
                RuntimeWarning,
                stacklevel=3,
            )
            return None

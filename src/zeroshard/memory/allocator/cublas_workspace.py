"""CublasWorkspace: one cuBLAS workspace on the device, shared by all threads.

[Note: one workspace]
PyTorch allocates a cuBLAS workspace for each thread that multiplies, 32 MiB on Hopper, and never frees it: one for the
forward thread, one for the autograd thread, which do not run at the same time. So when a forward or a backward starts
on another thread than the last one, all workspaces are cleared, and one is allocated for this thread, in the pool: if
the first multiplication allocated it, it would lie in the middle of the model's largest segments. Kernels that still
use a cleared workspace were launched on the same stream before those that reuse its memory.

This does not hold for threads that multiply on one stream at the same time, nor for a graph that was captured after a
workspace had been allocated: ``Config.defragment=False`` leaves the workspaces to PyTorch.
"""

from __future__ import annotations

import threading

import torch

from zeroshard.memory.pool import Pool


def clear_cublas_workspaces() -> None:
    """Free the workspaces of all threads. Each is allocated again when its thread multiplies."""
    torch._C._cuda_clearCublasWorkspaces()


def allocate_cublas_workspace() -> None:
    """Allocate the workspace of this thread, on the current device and stream, unless it exists."""
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]


class CublasWorkspace:
    """The workspace of the thread that is active: see [Note: one workspace]."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._thread_id = 0  # thread of the last allocation

    def acquire(self) -> None:
        """Make the workspace available to this thread."""
        thread = threading.get_ident()
        if thread != self._thread_id and not torch.cuda.is_current_stream_capturing():
            clear_cublas_workspaces()
            with self._pool, torch.cuda.device(self._pool.device):
                allocate_cublas_workspace()
            self._thread_id = thread

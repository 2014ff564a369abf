"""Workspace: the device memory that cuBLAS multiplies with, one for all threads.

[Note: one workspace]
For each thread that multiplies, PyTorch gives cuBLAS memory to work with, 32 MiB on Hopper, and never takes it back:
one for the thread of forward, one for autograd's, which are not at work at a time. So when a forward or a backward
begins on another thread than the last one, all of it is given back, and that thread's taken anew, from the pool: made
by the first multiplication it would stand in the middle of the model's largest segments. Kernels that still use what
was given back were launched before whatever gets that memory next, on the same stream.

That does not hold of threads that multiply on one stream at the same time, nor of a graph that was captured where such
memory had been taken before: ``Config.defragment=False`` leaves it all to PyTorch.
"""

from __future__ import annotations

import threading

import torch

from zeroshard.memory.pool import Pool


def clear_cublas_workspaces() -> None:
    """Give back what cuBLAS has, for all threads: each takes it anew when it multiplies."""
    torch._C._cuda_clearCublasWorkspaces()


def allocate_cublas_workspace() -> None:
    """Take it for this thread, on the current device and stream, unless it is there."""
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]


class CublasWorkspace:
    """cuBLAS's memory, for whichever thread is at work: see [Note: one workspace]."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._thread_id = 0  # that it was taken for last

    def acquire(self) -> None:
        """Have it for this thread."""
        thread = threading.get_ident()
        if thread != self._thread_id and not torch.cuda.is_current_stream_capturing():
            clear_cublas_workspaces()
            with self._pool, torch.cuda.device(self._pool.device):
                allocate_cublas_workspace()
            self._thread_id = thread

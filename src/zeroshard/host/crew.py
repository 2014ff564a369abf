"""Crew: the threads of native updates that are begun one after the other.

[Note: from one update to the next]
Updates wait in line, in the order in which they were begun. A thread takes the next chunk of the first that has one
left; so the threads go from the last chunk of one update to the first of the next without a pause, if that was begun in
time, and none waits for another to end. A thread that finds nothing leaves: between updates there is nobody to end, and
an update that is begun then starts as many as it wants. What nobody could be started for is done by the thread that
begins it, so that no update ever waits for one that is not worked on.

Crews know nothing of each other, and there is nothing in the process that they share: ranks that are threads have their
own. A process that was forked has none of its parent's threads: it can drop what it has of a model, not train it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch


class KernelThreads:
    """Threads that do updates in the order in which they are begun: see [Note: from one update to the next].

    ``library`` is that of ``kernels.c``; :meth:`CpuKernels.make_threads` makes one.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        library.zeroshard_crew.argtypes, library.zeroshard_crew.restype = (), ctypes.c_void_p
        for function in (library.zeroshard_end, library.zeroshard_dismiss):
            function.argtypes, function.restype = (ctypes.c_void_p,), None
        self.library, self._pid = library, os.getpid()
        self.handle: int | None = library.zeroshard_crew()
        if self.handle is None:
            raise MemoryError("no memory for the threads of the host's updates")

    def __del__(self) -> None:
        if self.handle is not None and self._pid == os.getpid():  # a fork does not have the threads
            self.library.zeroshard_dismiss(self.handle)


class KernelHandle:
    """An update that was begun, and the tensors that it reads and writes until :meth:`end` has returned.

    One that is dropped is ended, or it would write into memory that is another's by then.

    >>> KernelHandle().wait()  # over from the beginning
    """

    def __init__(
        self,
        kernel_threads: KernelThreads | None = None,
        call: int | None = None,
        tensors: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self._kernel_threads, self._call, self._tensors = kernel_threads, call, tensors
        self._pid = os.getpid()

    def wait(self) -> None:
        """Return when it is over."""
        crew, call, self._call = self._kernel_threads, self._call, None
        if crew is not None and call is not None and self._pid == os.getpid():  # a fork does not have the threads
            crew.library.zeroshard_end(call)
        self._kernel_threads, self._tensors = None, ()

    def __del__(self) -> None:
        self.wait()

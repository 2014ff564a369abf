"""OffloadFile: the unnamed file of the disk tier, its space, its mappings and its direct I/O.

[Note: an unlinked file]
The file is opened with ``O_TMPFILE``, or, if the file system does not support that, created and unlinked at once. So it
is in no directory, and the system removes it when the last descriptor and the last mapping are closed: on exit, after a
crash, after ``kill -9``. There is nothing to clean up, and nothing that another job could find.

[Note: maps and direct I/O]
The same bytes are accessed in two ways: through a shared mapping (page by page, through the page cache) and by direct
I/O (which bypasses the page cache). Linux keeps the two coherent as long as they do not access the same bytes at the
same time: a direct read first writes out the dirty cached pages of its range; a direct write does so and then drops
them, so that the next access through the mapping reads from disk. The caller must ensure that: no access to a tensor,
and no second transfer of it, between the start of a transfer and its ``wait()``. A page must belong to one tensor only,
so tensors start at multiples of 4096 bytes (or of the system's page size, if that is larger).

[Note: maps without descriptors]
Python's ``mmap`` keeps a descriptor for each mapping, and a process is often limited to 1024 of them; the states of a
model may be more tensors than that. So the C library creates the mapping, and it is removed when the last tensor over
it is deleted.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import tempfile
import weakref
from typing import Literal

from zeroshard.sharding import PAGE_BYTES
from zeroshard.utils.format import format_bytes

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2  # flags of fallocate(2), from <linux/falloc.h>
NO_TMPFILE_ERRNOS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)  # errors of systems without O_TMPFILE

ERRNO_ADVICE = {
    errno.ENOSPC: "Free some space there, choose another directory, or offload less",
    errno.EDQUOT: "The quota is used up: choose another directory, or offload less",
    errno.EFBIG: "Raise `ulimit -f`, or choose another file system",
    errno.EIO: "The device failed (see the kernel log): choose a directory on another device",
    errno.EBADF: "Other code closed this file descriptor: look for code that closes descriptors it did not open",
    errno.ESTALE: "The server of this file system lost the file: choose a local directory",
    errno.EMFILE: "Too many files are open: raise `ulimit -n`",
    errno.ENOMEM: "There is no address space left to map it: raise `ulimit -v`, or offload less",
    errno.EROFS: "The file system is read-only: choose another directory",
    errno.EACCES: "Choose a directory that this user may write to",
    errno.EPERM: "Choose a directory that this user may write to",
}


class DiskError(RuntimeError):
    """Creating, reading or writing the disk tier failed. The message says what, where and what to do."""

    @classmethod
    def from_os_error(cls, what: str, error: OSError) -> DiskError:
        """Return an error with the system's message and advice.

        >>> DiskError.from_os_error("cannot create a file in /scratch", OSError(errno.EROFS, "Read-only file system"))
        DiskError('cannot create a file in /scratch: Read-only file system. The file system is read-only: choose ...')
        """
        advice = ERRNO_ADVICE.get(error.errno or 0, "Choose another directory, or do not offload to disk")
        return cls(f"{what}: {error.strerror or error}. {advice}")


class OffloadFile:
    """An unnamed file. It is removed with the last reference to this object and to its mappings.

    >>> file = OffloadFile(tempfile.gettempdir())
    >>> file.reserve(0, PAGE_BYTES)
    >>> ones = bytearray(b"1" * PAGE_BYTES)
    >>> file.map(0, PAGE_BYTES)[:] = ones
    >>> file.transfer("read", twos := memoryview(mmap.mmap(-1, PAGE_BYTES)), 0)
    >>> twos == ones
    True
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.path.abspath(os.fspath(directory))
        if not os.path.isdir(self.directory):
            raise DiskError(f"{self.directory} is not a directory: create it, or pass one that exists")
        self.descriptor = _open_unnamed_file(self.directory)
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # at exit the system closes it
        self.is_direct_io = True  # whether I/O bypasses the page cache
        try:
            self._set_o_direct(os.O_DIRECT)
        except OSError:
            self.is_direct_io = False

    def _set_o_direct(self, flag: int) -> None:
        flags: int = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT | flag)

    def _disable_direct_io(self) -> None:
        """Disable direct I/O permanently: some file systems accept the flag and then reject every transfer."""
        self._set_o_direct(0)
        self.is_direct_io = False

    def reserve(self, offset: int, nbytes: int) -> None:
        """Reserve space. New space reads as zeros. If this fails, release() all of it."""
        try:
            os.posix_fallocate(self.descriptor, offset, nbytes)
        except OSError as error:
            if error.errno == errno.EINVAL and self.is_direct_io:  # glibc's fallback writes a byte to every page
                self._disable_direct_io()
                return self.reserve(offset, nbytes)
            filesystem = os.fstatvfs(self.descriptor)
            free = format_bytes(filesystem.f_bavail * filesystem.f_frsize)
            what = f"cannot allocate {format_bytes(nbytes)} on disk: {free} are free in {self.directory}"
            raise DiskError.from_os_error(what, error) from error

    def release(self, offset: int, nbytes: int) -> bool:
        """Release space and zero its bytes. Return False if the file system cannot: the bytes are then unchanged."""
        return bool(_libc().fallocate(self.descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes) == 0)

    def map(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Map an extent into memory for as long as the result is referenced, even after the file is closed."""
        libc = _libc()
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        address = libc.mmap(None, nbytes, protection, flags, self.descriptor, offset)
        if address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            what = f"cannot map {format_bytes(nbytes)} of the file in {self.directory}"
            raise DiskError.from_os_error(what, OSError(code, os.strerror(code)))
        array = (ctypes.c_char * nbytes).from_address(address)
        # Not at exit: threads that are still running may access it.
        weakref.finalize(array, libc.munmap, address, nbytes).atexit = False
        return array

    def transfer(self, direction: Literal["read", "write"], memory: memoryview, offset: int) -> None:
        """Read or write all of ``memory``. Its address, its length and the offset are multiples of the page size."""
        moved, nbytes = 0, len(memory)
        while moved < nbytes:
            is_direct = self.is_direct_io
            what = f"the {direction} of {nbytes} bytes at byte {offset} of the disk tier's file in {self.directory}"
            try:
                call = os.preadv if direction == "read" else os.pwritev
                count = call(self.descriptor, [memory[moved:]], offset + moved)
            except OSError as error:
                if error.errno == errno.EINVAL and is_direct:
                    self._disable_direct_io()
                    continue
                raise DiskError.from_os_error(f"{what} failed after {moved} bytes", error) from error
            advance = count - count % PAGE_BYTES if is_direct else count  # direct I/O resumes at a page boundary
            if advance == 0:
                raise DiskError(
                    f"{what} stopped after {moved + count} bytes: the file was truncated, or the device lost it. "
                    "Restart from the last checkpoint, with another directory"
                )
            moved += advance


def _open_unnamed_file(directory: str) -> int:
    """Open a file that is in no directory, accessible to this user only."""
    what = f"cannot create a file in {directory}"
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in NO_TMPFILE_ERRNOS:
            raise DiskError.from_os_error(what, error) from error
    try:
        descriptor, path = tempfile.mkstemp(prefix=".zeroshard-", dir=directory)  # mode 0600
        os.unlink(path)
    except OSError as error:
        raise DiskError.from_os_error(what, error) from error
    return descriptor


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    c_int64, c_int = ctypes.c_int64, ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, c_int, c_int, c_int, c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [c_int, c_int, c_int64, c_int64]
    return libc

"""The handle of a save, and the pending asynchronous save of this process."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from zeroshard.checkpoint.errors import CheckpointError


class Save:
    """The handle of a save, in progress or done.

    >>> import tempfile, torch, zeroshard
    >>> handle = zeroshard.save(tempfile.mkdtemp() + "/step-1", torch.nn.Linear(2, 1), wait=False)
    >>> handle.wait().name
    'step-1'
    """

    def __init__(self, path: Path, done: bool = False) -> None:
        self.path = path
        self.has_been_awaited = False  # whether a caller has received the result
        self._error: BaseException | None = None
        self._done = threading.Event()
        if done:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._done.is_set()

    def wait(self) -> Path:
        """Wait for the save and return its path; raise :class:`CheckpointError` if it failed."""
        self._done.wait()
        self.has_been_awaited = True
        if self._error is not None:
            raise CheckpointError(str(self._error)) from self._error
        return self.path

    def run(self, write: Callable[[], None]) -> None:
        """Call ``write`` on the current thread; keep its error for :meth:`wait`."""
        try:
            write()
        except BaseException as error:
            self._error = error
        self._done.set()

    def print_unseen_error(self) -> None:
        """Print the error if no caller has received it."""
        if self._error is not None and not self.has_been_awaited:
            print(f"zeroshard: {self._error}", file=sys.stderr)


pending_saves: list[Save] = []  # the last asynchronous save of this process


def wait_for_pending_save() -> None:
    """Wait for an earlier asynchronous save; raise if it failed."""
    while pending_saves:
        handle = pending_saves.pop()
        if not handle.has_been_awaited:
            handle.wait()


@atexit.register
def _print_unseen_errors() -> None:
    for handle in pending_saves:
        handle.print_unseen_error()

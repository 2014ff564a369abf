"""Launch: the ranks of this machine, and what is said when one of them fails.

The ranks of one machine need nobody outside it, so nothing here listens anywhere but on loopback.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from zeroshard.comm.consistency import RanksDisagreeError
from zeroshard.train.errors import TrainingError

ERROR_DIR_ENV = "ZEROSHARD_ACCOUNTS"  # environment of ranks started here: the directory where those that fail say why
SHUTDOWN_GRACE_SECONDS = 120  # seconds that ranks have for their last checkpoint once they are told to stop
POLL_SECONDS = 0.1  # seconds between two looks at the ranks
LOOPBACK = "127.0.0.1"
ERROR_GRACE_SECONDS = 3  # seconds that a rank has to write its record once another has failed
PEER_LOST_MESSAGES = (
    "Connection closed by peer",
    "remote worker",
)  # what gloo says of another rank, whatever it met of its end
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(ranks: int, argv: Sequence[str]) -> int:
    """Run `zeroshard train` on ``ranks`` processes of this machine, and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as accounts:
        store = local_store()
        environment = {**os.environ, **_local_environment(ranks, store.port), ERROR_DIR_ENV: accounts}
        started: list[subprocess.Popen[bytes]] = []
        received: list[int] = []
        with _collect_signals(received):
            try:
                for rank in range(ranks):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
                    command = [sys.executable, "-m", "zeroshard", "train", *argv]
                    # a session of its own: a Ctrl-C is forwarded once, not also sent to it by the terminal
                    started.append(subprocess.Popen(command, env={**environment, **place}, start_new_session=True))
                failed = _wait_ranks(started, received)
            finally:
                for process in started:
                    _send_signal(process, signal.SIGKILL)
                    process.wait()
        if failed or (received and any(not account["missed"] for account in _read_errors(Path(accounts)))):
            print("zeroshard train: " + describe_first_failure(Path(accounts), failed), file=sys.stderr)
            return 1
        return 128 + received[0] if received else 0


def local_store() -> TCPStore:
    """A store for the ranks of this machine, which listens on loopback alone.

    torch's own listens on every interface, whatever address it is given, and asks nobody who they are: so the socket is
    bound here. It lives in the launcher, so that it outlives a rank that dies.

    >>> store = local_store()
    >>> store.set("key", "value")
    >>> TCPStore("127.0.0.1", store.port, is_master=False).get("key")
    b'value'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store's, which closes it
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _local_environment(ranks: int, port: int) -> dict[str, str]:
    """What the ranks of this machine are told, but for their numbers; what the user has set stays."""
    told = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # to torch: the store is there, no rank has to open one
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    own = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # where gloo and NCCL listen for the other ranks
        own |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {**{name: value for name, value in own.items() if name not in os.environ}, **told}


@contextmanager
def _collect_signals(received_signals: list[int]) -> Iterator[None]:
    """Note the signals that end a run, instead of being ended by them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {
        number: signal.signal(number, lambda number, _: received_signals.append(number)) for number in STOP_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait_ranks(processes: Sequence[subprocess.Popen[bytes]], received_signals: list[int]) -> dict[int, int]:
    """Wait until all ranks have ended; return the exit statuses of those that failed first, by rank.

    Signals are forwarded. A rank that fails ends the others with SIGTERM. Either way those that are left after a grace
    period are killed; after a second signal, at once.
    """
    failed: dict[int, int] = {}
    deadline, heard = math.inf, 0
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if len(received_signals) > heard:
            deadline = now + (
                _shutdown_grace_seconds() if heard == 0 and len(received_signals) == 1 else ERROR_GRACE_SECONDS
            )
            for number in received_signals[heard:]:
                for process in processes:
                    _send_signal(process, number)
            heard = len(received_signals)
        elif not failed and not received_signals:
            failed = _failed_ranks(processes)
            if failed:
                deadline = now + _shutdown_grace_seconds()
                for process in processes:
                    _send_signal(process, signal.SIGTERM)
        if now > deadline:
            for process in processes:
                _send_signal(process, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return failed or (_failed_ranks(processes) if not received_signals else {})


def _failed_ranks(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """The exit statuses of the ranks that have failed so far."""
    statuses = {rank: process.poll() for rank, process in enumerate(processes)}
    return {rank: status for rank, status in statuses.items() if status}


def _send_signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a rank and what it has started, unless it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _shutdown_grace_seconds() -> float:
    """Seconds that ranks have for their last checkpoint."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_GRACE_SECONDS))


def describe_first_failure(error_dir: Path, exit_statuses: dict[int, int]) -> str:
    """Say which rank failed first, and why.

    Others fail because it is gone: they miss it in a collective, or are killed by the launcher. So an error of a rank's
    own goes first, then a rank that was killed and could say nothing, then what a rank missed.
    """
    told = sorted(_read_errors(error_dir), key=lambda account: float(account["moment"]))
    own = [account for account in told if not account["missed"]]
    if own:
        return str(own[0]["account"])
    for rank, status in exit_statuses.items():
        if status < 0 and status != -signal.SIGTERM:  # which the launcher sends to those that are left
            name = signal.Signals(-status).name
            return f"rank {rank} was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    if told:
        return str(told[0]["account"])
    return "; ".join(f"rank {rank} ended with status {status}" for rank, status in exit_statuses.items())


def report_failure(error: BaseException, rank: int) -> None:
    """Tell what ended this rank: to our own launcher, else to the terminal and to torchrun."""
    stack = "".join(traceback.format_exception(error)).rstrip()
    account = str(error) if isinstance(error, TrainingError) else f"rank {rank} failed\n{stack}"
    directory = os.environ.get(ERROR_DIR_ENV)
    if directory is not None:
        partial = Path(directory, f"{rank}.partial")
        missed = isinstance(error, (RanksDisagreeError, DistError)) or any(
            words in str(error) for words in PEER_LOST_MESSAGES
        )
        told = {"rank": rank, "moment": time.time(), "account": account, "missed": missed}
        partial.write_text(json.dumps(told))
        partial.rename(partial.with_suffix(".account.json"))
        return
    print(f"zeroshard train: {account}", file=sys.stderr)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        ErrorHandler().record_exception(error)


class StopRequest:
    """Whether this rank was told to stop: by Ctrl-C, a scheduler's SIGTERM, a closed terminal. A second signal ends it.

    [Note: ranks left waiting] When one rank fails, the launcher sends SIGTERM to the others, which may wait for it in a
    call that runs no Python, and so would never see their own handler run. The signal also writes a byte that a thread
    waits for: from then on it looks for another rank's account, and ends this one soon after it finds it.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        directory = os.environ.get(ERROR_DIR_ENV)
        if directory is not None:
            told, tells = os.pipe()
            os.set_blocking(tells, False)
            signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
            threading.Thread(target=self._exit_when_peer_failed, args=(told, Path(directory)), daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_DFL)

    @staticmethod
    def _exit_when_peer_failed(wakeup_fd: int, error_dir: Path) -> None:
        os.read(wakeup_fd, 1)
        while not _error_files(error_dir):
            time.sleep(0.2)
        time.sleep(ERROR_GRACE_SECONDS)
        os._exit(1)


def _error_files(error_dir: Path) -> list[Path]:
    """The accounts of ranks that failed."""
    return list(error_dir.glob("*.account.json"))


def _read_errors(error_dir: Path) -> list[dict[str, Any]]:
    """What ranks that failed have said."""
    return [json.loads(path.read_text()) for path in _error_files(error_dir)]


def default_ranks(device: str) -> int:
    """How many ranks to start here: one a GPU, or two on the CPU."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    if device == "cuda":
        raise TrainingError("--device cuda: torch finds no GPU here")
    return 2

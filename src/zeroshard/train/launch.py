"""run_training: run one rank if a launcher started this process; otherwise start the ranks on this machine.

The ranks of one machine need no other machine, so everything here listens only on loopback.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from zeroshard.train.options import TrainingError, TrainOptions
from zeroshard.train.rank import (
    ERROR_DIR_ENV,
    ERROR_GRACE_SECONDS,
    STOP_SIGNALS,
    RankInfo,
    StopRequest,
    launcher_environment,
    read_errors,
    report_failure,
)
from zeroshard.train.run_directory import RunDirectory
from zeroshard.train.trackers import check_trackers
from zeroshard.utils.lazy_import import uncollected_imports

REQUIRED_PACKAGES = ("numpy", "rich", "safetensors", "tokenizers")  # installed by the extra `train`
SHUTDOWN_GRACE_SECONDS = 120  # for the last checkpoint after a stop signal
POLL_SECONDS = 0.1  # between two polls of the ranks
LOOPBACK = "127.0.0.1"


def run_training(options: TrainOptions, argv: Sequence[str]) -> int:
    """Train as the options say and return the exit status. ``argv`` is the command line for the ranks to start."""
    try:
        environment = launcher_environment(os.environ)
        if environment is None:
            ranks = options.sharding.ranks or default_ranks(options.sharding.device)
        else:
            ranks = int(environment["WORLD_SIZE"])
        if options.run.dry_run:
            from zeroshard.train.summary import dry_run

            if environment is None or environment["RANK"] == "0":
                print(dry_run(options, ranks))
            return 0
        if environment is not None:
            _run_rank(options, int(environment["RANK"]))
        check_options(options, ranks)
        return launch(ranks, argv)
    except (TrainingError, ValueError, OSError, ImportError) as error:
        print(f"zeroshard train: {error}", file=sys.stderr)
        return 1


def _run_rank(options: TrainOptions, rank: int) -> NoReturn:
    """Run one rank and exit the process, with status 128 + the signal number if a signal stopped the run.

    A rank that fails exits immediately, so that the others do not wait for it.
    """
    with uncollected_imports():
        import_module("torch._dynamo")  # the first optimizer imports it in any case
        from zeroshard.train.trainer import Trainer  # the launcher does not need the imports of a rank
        from zeroshard.train.training_setup import prepare_training

    stop_request = StopRequest()
    try:
        rank_info = RankInfo.init(options.sharding.device, options.sharding.timeout)
        trainer = Trainer(prepare_training(options, rank_info), stop_request)
        trainer.run()
        trainer.setup.directory.unlock()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        report_failure(error, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(0 if trainer.is_finished else 128 + (stop_request.signal or signal.SIGTERM))


def default_ranks(device: str) -> int:
    """Return the number of ranks to start on this machine: one per GPU, or two on the CPU."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    if device == "cuda":
        raise TrainingError("--device cuda: torch finds no GPU on this machine")
    return 2


def check_options(options: TrainOptions, ranks: int) -> None:
    """Raise for errors that can be detected before the ranks start."""
    missing = [name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"training needs {', '.join(missing)}: pip install 'zeroshard[train]'")
    check_trackers(options.run.tracker)
    if options.sharding.device == "cuda":
        default_ranks("cuda")  # raises without a GPU
    options.batching(ranks)
    if options.run.out is not None:
        RunDirectory(Path(options.run.out)).check_available(options.run.resume)
    for path in (*options.data.data, *options.data.validation):
        if not Path(path).exists():
            raise FileNotFoundError(f"data file or directory {path} does not exist")


def launch(ranks: int, argv: Sequence[str]) -> int:
    """Run `zeroshard train` in ``ranks`` processes on this machine, and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as error_dir:
        command = [sys.executable, "-m", "zeroshard", "train", *argv]
        with local_ranks(ranks, command, {ERROR_DIR_ENV: error_dir}) as (processes, received_signals):
            failed = _wait_ranks(processes, received_signals)
        if failed or (received_signals and any(not report["is_peer_lost"] for report in read_errors(Path(error_dir)))):
            print("zeroshard train: " + describe_first_failure(Path(error_dir), failed), file=sys.stderr)
            return 1
        return 128 + received_signals[0] if received_signals else 0


@contextmanager
def local_ranks(
    ranks: int, command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[list[subprocess.Popen[bytes]], list[int]]]:
    """Start ``command`` once per rank, with torchrun's variables; kill what is left of the ranks at the end.

    Yields the processes, and a list of the stop signals that this process receives meanwhile.
    """
    store = local_store()
    shared = {**os.environ, **_local_environment(ranks, store.port), **environment}
    processes: list[subprocess.Popen[bytes]] = []
    received_signals: list[int] = []
    with _collect_signals(received_signals):
        try:
            for rank in range(ranks):
                rank_environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
                # in a new session: the launcher forwards Ctrl-C once, and the terminal does not send it too
                processes.append(subprocess.Popen(command, env={**shared, **rank_environment}, start_new_session=True))
            yield processes, received_signals
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also the children of a rank that has ended
                process.wait()


def local_store() -> TCPStore:
    """Return a store for the ranks of this machine that listens only on loopback.

    torch's own store listens on every interface, whatever its address, and has no authentication. So the socket is
    bound here. The store lives in the launcher, so it outlives a rank that dies.

    >>> store = local_store()
    >>> store.set("key", "value")
    >>> TCPStore("127.0.0.1", store.port, is_master=False).get("key")
    b'value'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # now owned by the store, which closes it
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _local_environment(ranks: int, port: int) -> dict[str, str]:
    """Return the ranks' environment without rank numbers. The user's thread and interface settings take precedence."""
    required = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # tells torch that the store exists: no rank opens one
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # the interface on which gloo and NCCL listen for other ranks
        defaults |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {**{name: value for name, value in defaults.items() if name not in os.environ}, **required}


@contextmanager
def _collect_signals(received_signals: list[int]) -> Iterator[None]:
    """Collect stop signals instead of being ended by them."""
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

    Signals are forwarded to the ranks. When a rank fails, the others get SIGTERM. In both cases the remaining ranks are
    killed after a grace period, which is shorter after a second signal.
    """
    failed: dict[int, int] = {}
    deadline, forwarded = math.inf, 0
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if len(received_signals) > forwarded:
            is_first = forwarded == 0 and len(received_signals) == 1
            deadline = now + (_shutdown_grace_seconds() if is_first else ERROR_GRACE_SECONDS)
            for number in received_signals[forwarded:]:
                for process in processes:
                    _send_signal(process, number)
            forwarded = len(received_signals)
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
    """Return the exit statuses of the ranks that have failed so far."""
    statuses = {rank: process.poll() for rank, process in enumerate(processes)}
    return {rank: status for rank, status in statuses.items() if status}


def _send_signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a rank and its child processes, unless it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _shutdown_grace_seconds() -> float:
    """Return the seconds that ranks have for their last checkpoint."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_GRACE_SECONDS))


def describe_first_failure(error_dir: Path, exit_statuses: dict[int, int]) -> str:
    """Return which rank failed first, and why.

    Other ranks fail as a consequence: a collective loses its peer, or the launcher kills them. So the order is: a
    rank's own error, then a rank that was killed without an error report, then a lost peer.
    """
    reports = sorted(read_errors(error_dir), key=lambda report: float(report["time"]))
    own_errors = [report for report in reports if not report["is_peer_lost"]]
    if own_errors:
        return str(own_errors[0]["message"])
    for rank, status in exit_statuses.items():
        if status < 0 and status != -signal.SIGTERM:  # the launcher sends SIGTERM to the remaining ranks
            name = signal.Signals(-status).name
            return f"rank {rank} was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    if reports:
        return str(reports[0]["message"])
    return "; ".join(f"rank {rank} ended with status {status}" for rank, status in exit_statuses.items())

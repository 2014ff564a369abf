"""run_training: run one rank if a launcher started this process; otherwise start the ranks on this machine.

[Note: who reaches the ranks of one machine]
The launcher's directory, mode 0700, has the options, the store (a file) in which ranks find each other, and the reports
of failed ranks. gloo and NCCL listen on loopback, which every user of the machine reaches, and gloo asks for no
password. So ranks read what they receive as data, never as a pickle: whoever connects in place of a rank can end the
run or change numbers, but no code of theirs runs in it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from zeroshard.train.metrics import check_trackers
from zeroshard.train.options import TrainingError, TrainOptions, describe_bug
from zeroshard.train.rank import (
    ERROR_DIR_ENV,
    STOP_SIGNALS,
    RankInfo,
    StopRequest,
    end_with_launcher,
    is_peer_lost,
    launcher_environment,
    read_errors,
    report_failure,
)
from zeroshard.train.run_directory import RunDirectory
from zeroshard.utils.command_line import check_local_ranks, make_echo, print_error
from zeroshard.utils.install_hint import install_hint
from zeroshard.utils.lazy_import import uncollected_imports

REQUIRED_PACKAGES = ("numpy", "rich", "safetensors", "tokenizers")  # installed by the extra `train`
OPTIONS_FILE = "options.json"
FAILURE_GRACE_SECONDS = 8  # for the other ranks to notice that one has failed, and why
ERROR_GRACE_SECONDS = 3  # after a second stop signal
SHUTDOWN_GRACE_SECONDS = 120  # for the last checkpoint after a stop signal
POLL_SECONDS = 0.1  # between two polls of the ranks


def run_training(options: TrainOptions) -> int:
    """Train as the options say and return the exit status; raise if options, files or the machine do not allow it."""
    environment = launcher_environment(os.environ)
    if environment is None:
        ranks = options.sharding.ranks or default_ranks(options.sharding.device)
    else:
        ranks = int(environment["WORLD_SIZE"])
    if options.run.dry_run:
        from zeroshard.train.summary import dry_run

        if environment is None or environment["RANK"] == "0":
            make_echo(sys.stdout)(dry_run(options, ranks))
        return 0
    if environment is not None:
        os.environ.update(environment)
        _run_rank(options)
    check_options(options, ranks)
    return launch(options, ranks)


def run_local_rank(directory: Path) -> NoReturn:
    """Run one of the ranks that :func:`launch` has started, with the options in its directory; exit the process."""
    end_with_launcher(directory)
    options = TrainOptions().with_values(json.loads((directory / OPTIONS_FILE).read_text()))
    _run_rank(options, FileStore(os.fspath(directory / "store"), int(os.environ["WORLD_SIZE"])))


def _run_rank(options: TrainOptions, store: FileStore | None = None) -> NoReturn:
    """Run one rank and exit the process, with status 128 + the signal number if a signal stopped the run.

    A rank that fails exits immediately, so that the others do not wait for it.
    """
    stop_request = StopRequest()
    run_path: Path | None = None
    try:
        with uncollected_imports():
            import_module("torch._dynamo")  # the first optimizer imports it in any case
            from zeroshard.train.trainer import Trainer  # the launcher does not need the imports of a rank
            from zeroshard.train.training_setup import prepare_training

        rank_info = RankInfo.init(options.sharding.device, options.sharding.timeout, store)
        setup = prepare_training(options, rank_info)
        run_path = setup.directory.path
        trainer = Trainer(setup, stop_request)
        trainer.run()
        setup.directory.unlock()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        rank = int(os.environ["RANK"])
        is_explained = isinstance(error, TrainingError) or is_peer_lost(error)
        report_failure(error, rank, str(error) if is_explained else f"rank {rank}: {describe_bug(error, run_path)}")
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
        raise ImportError(f"training needs {', '.join(missing)}: {install_hint('train')}")
    check_trackers(options.run.tracker)
    check_local_ranks(ranks)
    options.batching(ranks)
    if options.run.out is not None:
        directory = RunDirectory(Path(options.run.out))
        directory.check_available(options.run.resume)
        if directory.has_run():  # which has its own tokens: the texts may have gone
            return
    for path in (*options.data.data, *options.data.validation):
        if not Path(path).is_file():
            raise FileNotFoundError(f"data file {path} does not exist: pass text files, or one token file")


def launch(options: TrainOptions, ranks: int) -> int:
    """Train in ``ranks`` processes on this machine, and return the exit status.

    They find each other, and the options, in a directory that only this user can read: no port lets another one in.
    """
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as name:
        (Path(name) / OPTIONS_FILE).write_text(json.dumps(options.to_flat_dict()))
        command = [sys.executable, "-m", "zeroshard.train", name]
        with local_ranks(ranks, command, {ERROR_DIR_ENV: name}) as (processes, received_signals):
            failed = _wait_ranks(processes, received_signals)
        if received_signals and all(report["is_peer_lost"] for report in read_errors(Path(name))):
            return 128 + received_signals[0]
        if failed:
            print_error("train", describe_first_failure(Path(name), failed))
            return 1
    return min((process.returncode for process in processes if process.returncode), default=0)


@contextmanager
def local_ranks(
    ranks: int, command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[list[subprocess.Popen[bytes]], list[int]]]:
    """Start ``command`` once per rank, with torchrun's variables; kill what is left of the ranks at the end.

    Yields the processes, and a list of the stop signals that this process receives meanwhile. The standard input of a
    rank ends when this process does. ``environment`` says where the ranks meet.
    """
    shared = {**_local_environment(ranks), **environment}
    processes: list[subprocess.Popen[bytes]] = []
    received_signals: list[int] = []
    with _collect_signals(received_signals), ExitStack() as started:
        try:
            for rank in range(ranks):
                rank_environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
                # in a new session: the launcher forwards Ctrl-C once, and the terminal does not send it too
                process = subprocess.Popen(
                    command, env={**shared, **rank_environment}, stdin=subprocess.PIPE, start_new_session=True
                )
                processes.append(started.enter_context(process))
            yield processes, received_signals
        finally:
            _send_signal(processes, signal.SIGKILL)


def _local_environment(ranks: int) -> dict[str, str]:
    """Return the ranks' environment without rank numbers. The user's thread and interface settings take precedence."""
    required = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": "0"}
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # the interface on which gloo and NCCL listen for other ranks
        defaults |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {**defaults, **os.environ, **required}


@contextmanager
def _collect_signals(received_signals: list[int]) -> Iterator[None]:
    """Collect stop signals instead of being ended by them."""
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

    Signals are forwarded to the ranks. After a signal, or when a rank has failed, the others have some time to end by
    themselves: to save, or to report what they know of the failure.
    """
    failed: dict[int, int] = {}
    forwarded = 0
    deadline = math.inf
    shutdown_seconds = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_GRACE_SECONDS))
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        for number in received_signals[forwarded:]:
            forwarded += 1
            deadline = now + (shutdown_seconds if forwarded == 1 else ERROR_GRACE_SECONDS)
            _send_signal(processes, number)
        if not failed:
            failed = _failed_ranks(processes)
            deadline = min(deadline, now + FAILURE_GRACE_SECONDS) if failed else deadline
        if now > deadline:
            _send_signal(processes, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return failed or _failed_ranks(processes)


def _failed_ranks(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Return the exit statuses of the ranks that have failed so far. One that a signal has stopped has not failed."""
    statuses = {rank: process.poll() for rank, process in enumerate(processes)}
    return {rank: status for rank, status in statuses.items() if status and status - 128 not in STOP_SIGNALS}


def _send_signal(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to the ranks and their child processes, also those of a rank that has ended."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def describe_first_failure(error_dir: Path, exit_statuses: dict[int, int]) -> str:
    """Return which rank failed first, and why.

    Other ranks fail as a consequence: a collective loses its peer, or they are stopped. So the order is: a rank's own
    error, then a rank that was killed without an error report, then a lost peer.
    """
    reports = sorted(read_errors(error_dir), key=lambda report: (report["is_peer_lost"], report["time"]))
    killed = {rank: -status for rank, status in exit_statuses.items() if status < 0 and -status not in STOP_SIGNALS}
    if reports and not (killed and reports[0]["is_peer_lost"]):
        return str(reports[0]["message"])
    for rank, number in killed.items():
        name = signal.Signals(number).name
        return f"rank {rank} was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return "; ".join(f"rank {rank} ended with status {status}" for rank, status in exit_statuses.items())

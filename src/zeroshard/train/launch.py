"""Launch: the ranks of this machine through torch's elastic launcher, and what is said when one of them fails."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zeroshard.agreement import RanksDisagreeError
from zeroshard.train.errors import TrainingError

ACCOUNTS = "ZEROSHARD_ACCOUNTS"  # environment of ranks started here: the directory where those that fail say why
GRACE = 120  # seconds that ranks have for their last checkpoint once they are told to stop
LAST_WORDS = 3  # seconds that a rank has to write its record once another has failed
GONE = ("Connection closed by peer", "remote worker")  # what gloo says of another rank, whatever it met of its end
HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(ranks: int, argv: Sequence[str]) -> int:
    """Run `zeroshard train` on ``ranks`` processes of this machine, and return the exit status."""
    for name in logging.root.manager.loggerDict:  # what failed is told below, once
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    with tempfile.TemporaryDirectory(prefix="zeroshard-") as accounts:
        os.environ[ACCOUNTS] = accounts
        config.logs_specs = DefaultLogsSpecs(log_dir=accounts)  # torch's own would stay behind
        try:
            elastic_launch(config, sys.executable)("-m", "zeroshard", "train", *argv)
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            print("zeroshard train: " + first_failure(Path(accounts), exits), file=sys.stderr)
            return 1
        except SignalException as error:  # the ranks were told, and have written their last checkpoint
            return 128 + int(error.sigval)
    return 0


def first_failure(accounts: Path, exits: dict[int, int]) -> str:
    """Say which rank failed first, and why.

    Others fail because it is gone: they miss it in a collective, or are killed by the launcher. So an error of a rank's
    own goes first, then a rank that was killed and could say nothing, then what a rank missed.
    """
    told = sorted((json.loads(path.read_text()) for path in _told(accounts)), key=lambda t: float(t["moment"]))
    own = [account for account in told if not account["missed"]]
    if own:
        return str(own[0]["account"])
    for rank, status in exits.items():
        if status < 0 and status != -signal.SIGTERM:  # which the launcher sends to those that are left
            name = signal.Signals(-status).name
            return f"rank {rank} was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    if told:
        return str(told[0]["account"])
    return "; ".join(f"rank {rank} ended with status {status}" for rank, status in exits.items())


def report_failure(error: BaseException, rank: int) -> None:
    """Tell what ended this rank: to our own launcher, else to the terminal and to torchrun."""
    stack = "".join(traceback.format_exception(error)).rstrip()
    account = str(error) if isinstance(error, TrainingError) else f"rank {rank} failed\n{stack}"
    directory = os.environ.get(ACCOUNTS)
    if directory is not None:
        partial = Path(directory, f"{rank}.partial")
        missed = isinstance(error, (RanksDisagreeError, DistError)) or any(words in str(error) for words in GONE)
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
        for number in HEEDED:
            signal.signal(number, self._receive)
        directory = os.environ.get(ACCOUNTS)
        if directory is not None:
            told, tells = os.pipe()
            os.set_blocking(tells, False)
            signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
            threading.Thread(target=self._leave_the_lost, args=(told, Path(directory)), daemon=True).start()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for other in HEEDED:
            signal.signal(other, signal.SIG_DFL)

    @staticmethod
    def _leave_the_lost(told: int, accounts: Path) -> None:
        os.read(told, 1)
        while not _told(accounts):
            time.sleep(0.2)
        time.sleep(LAST_WORDS)
        os._exit(1)


def _told(accounts: Path) -> list[Path]:
    """The accounts of ranks that failed."""
    return list(accounts.glob("*.account.json"))


def default_ranks(device: str) -> int:
    """How many ranks to start here: one a GPU, or two on the CPU."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    if device == "cuda":
        raise TrainingError("--device cuda: torch finds no GPU here")
    return 2

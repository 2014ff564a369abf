"""run_training: run one rank if a launcher started this process; otherwise start the ranks, or describe the run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import torch.distributed as dist

from zeroshard.train.launch import StopRequest, check_options, default_ranks, launch, report_failure
from zeroshard.train.options import TrainingError, TrainOptions
from zeroshard.train.rank_info import RankInfo, launcher_environment


def run_training(options: TrainOptions, argv: Sequence[str]) -> int:
    """Train as the options say and return the exit status. ``argv`` is the command line for the ranks to start."""
    try:
        environment = launcher_environment(os.environ)
        if options.run.dry_run:
            return _print_dry_run(options, environment)
        if environment is not None:
            _run_rank(options, int(environment["RANK"]))
        ranks = options.sharding.ranks or default_ranks(options.sharding.device)
        check_options(options, ranks)
        return launch(ranks, argv)
    except (TrainingError, ValueError, OSError, ImportError) as error:
        print(f"zeroshard train: {error}", file=sys.stderr)
        return 1


def _print_dry_run(options: TrainOptions, environment: dict[str, str] | None) -> int:
    from zeroshard.train.summary import dry_run

    if environment is None:
        print(dry_run(options, options.sharding.ranks or default_ranks(options.sharding.device)))
    elif environment["RANK"] == "0":
        print(dry_run(options, int(environment["WORLD_SIZE"])))
    return 0


def _run_rank(options: TrainOptions, rank: int) -> None:
    """Run one rank and exit the process, with status 128 + the signal number if a signal stopped the run.

    A rank that fails exits immediately, so that the others do not wait for it.
    """
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

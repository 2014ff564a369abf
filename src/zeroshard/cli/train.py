"""The command `zeroshard train`: run one rank, or launch the ranks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from zeroshard.train.flags import read_options
from zeroshard.train.options import TrainingError, TrainOptions


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    options = read_options(argv)
    from zeroshard.train.launch import check_options, default_ranks, launch
    from zeroshard.train.rank_info import launcher_environment

    try:
        rank_environment = launcher_environment(os.environ)
        if rank_environment is not None and not options.run.dry_run:
            run_rank(options, int(rank_environment["RANK"]))
        ranks = options.sharding.ranks or default_ranks(options.sharding.device)
        if options.run.dry_run:
            from zeroshard.train.summary import dry_run

            if rank_environment is None or rank_environment["RANK"] == "0":
                print(dry_run(options, int(rank_environment["WORLD_SIZE"]) if rank_environment is not None else ranks))
            return 0
        check_options(options, ranks)
        return launch(ranks, argv)
    except (TrainingError, ValueError, OSError, ImportError) as error:
        print(f"zeroshard train: {error}", file=sys.stderr)
        return 1


def run_rank(options: TrainOptions, rank: int) -> None:
    """Run one rank and exit the process, with status 128 + the signal number if a signal stopped the run.

    A rank that fails exits immediately, so that the others do not wait for it.
    """
    import torch.distributed as dist

    from zeroshard.train.launch import StopRequest, report_failure
    from zeroshard.train.rank_info import RankInfo
    from zeroshard.train.trainer import Trainer
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

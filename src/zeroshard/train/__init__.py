"""The training program, `zeroshard train`. Names are imported on first use, so that `--help` does not import torch."""

from typing import TYPE_CHECKING

from zeroshard.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from zeroshard.train.data.corpus import shakespeare
    from zeroshard.train.generation import generate_text
    from zeroshard.train.launch import describe_first_failure, local_ranks, run_training
    from zeroshard.train.options import TrainingError, describe_bug
    from zeroshard.train.rank import ERROR_DIR_ENV, end_with_launcher, read_errors, report_failure
    from zeroshard.train.report import write_html_report

__all__ = [
    "ERROR_DIR_ENV",
    "TrainingError",
    "describe_bug",
    "describe_first_failure",
    "end_with_launcher",
    "generate_text",
    "local_ranks",
    "read_errors",
    "report_failure",
    "run_training",
    "shakespeare",
    "write_html_report",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "data.corpus": "shakespeare",
        "generation": "generate_text",
        "options": "TrainingError describe_bug",
        "report": "write_html_report",
        "launch": "describe_first_failure local_ranks run_training",
        "rank": "ERROR_DIR_ENV end_with_launcher read_errors report_failure",
    },
)

"""Check a run's options before its ranks start.

The launcher process needs only this module, so it has no heavy imports.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from zeroshard.train.batching import Batching
from zeroshard.train.errors import TrainingError
from zeroshard.train.options import TrainOptions
from zeroshard.train.run_directory import RunDirectory

REQUIRED_PACKAGES = ("jinja2", "numpy", "plotly", "rich", "safetensors", "tokenizers")  # installed by the extra `train`


def check_options(options: TrainOptions, ranks: int) -> None:
    """Raise for errors that can be detected before the ranks start."""
    missing = [name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"training needs {', '.join(missing)}: pip install 'zeroshard[train]'")
    if options.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ImportError("--tensorboard needs tensorboard: pip install 'zeroshard[tensorboard]'")
    if options.sharding.device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("--device cuda: torch finds no GPU here")
    resolve_batching(options, ranks)
    if options.run.out is not None:
        check_output_directory(options, Path(options.run.out))
    for path in (*options.data.data, *options.data.validation):
        if not Path(path).exists():
            raise FileNotFoundError(f"{path}, given as data, is not there")


def resolve_batching(options: TrainOptions, ranks: int) -> Batching:
    """Return how the batch is split over ranks and backwards."""
    training = options.training
    tensor = options.sharding.tensor
    return Batching.resolve(ranks, training.batch, training.micro_batch, training.accumulate, tensor)


def check_output_directory(options: TrainOptions, directory: Path) -> None:
    """Raise if the path is a file, or a directory with a run that is not to be resumed."""
    if directory.exists() and not directory.is_dir():
        raise TrainingError(f"{directory}, given as --out, is a file: give a directory")
    if RunDirectory(directory).has_run() and not options.run.resume:
        raise TrainingError(f"{directory} holds a run: add --resume to go on with it, or give another --out")

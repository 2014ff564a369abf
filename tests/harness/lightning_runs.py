"""Runs of Lightning's Trainer and Fabric in the processes of a test, and what they are compared by."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import zeroshard

pl = pytest.importorskip("lightning.pytorch")
pytest.importorskip("zeroshard.integrations.lightning")  # registers the strategies
STAGES = [f"zeroshard_stage_{stage}" for stage in (0, 1, 3)]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def data(samples: int, batch: int, seed: int = 0) -> DataLoader[Any]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=batch)


def be_rank(rank: int) -> None:
    """Let Lightning find this process as torchrun would have started it."""
    world = str(dist.get_world_size())
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world}
    os.environ |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": world}
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def trainer(strategy: Any, **options: Any) -> Any:
    return pl.Trainer(**{**QUIET, "strategy": strategy, "devices": dist.get_world_size(), **options})


def weights(model: Any) -> dict[str, torch.Tensor]:
    return zeroshard.state_dict(model, rank=None) if zeroshard.is_sharded(model) else dict(model.state_dict())


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

"""StepChecker on a GPU reads what ranks sent in the step before: here with its events replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeroshard.engine import NO_HISTORY
from zeroshard.optim import param_groups
from zeroshard.optim.param_groups import StepChecker


def test_a_difference_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    event: Any = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(param_groups, "record_blocking_event", lambda stream: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    checker = StepChecker(torch.device("cpu"))
    same, other = (checker.local_digest([{"lr": lr}], NO_HISTORY) for lr in (0.1, 0.2))
    checker._pinned = torch.empty_like(same)
    checker.compare(torch.maximum(same, other), rank=0)
    with pytest.raises(RuntimeError, match="hyper-parameters of the optimizer differ"):
        checker.compare(same, rank=0)
    checker.compare(same, rank=0)
    checker.compare(same, rank=0)

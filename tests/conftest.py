"""What all tests share: the path of the rank harness, one torch thread, and no process left at the end."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `from ranks import run_threads`, also in its worker processes
import ranks

torch.set_num_threads(1)  # the same sums in every run, and ranks that do not fight over cores


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A test that has taken more threads (a benchmark) leaves the next with one."""
    yield
    torch.set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    ranks.close_pool()

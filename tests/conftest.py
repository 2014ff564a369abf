"""What all tests share: the path of the rank harness, one torch thread, and no process left at the end."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `from ranks import run_threads`, also in its worker processes
import ranks

ranks.settle_torch()  # also while tests are collected; one thread, so that ranks do not fight over cores


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """Give every test the same sums, whatever ran before it."""
    ranks.settle_torch()
    yield


@pytest.fixture(scope="module")
def native_kernels() -> Any:
    """The host's native update."""
    from zeroshard.host.native import kernels  # late: most tests have no use for it

    found = kernels()
    if found is None:
        pytest.skip("no C compiler here: only the fall-back can be tested")
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    ranks.close_pool()

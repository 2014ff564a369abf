"""A rank that dies, raises, ends or leaves the order, over NCCL: all others get the error that they get over gloo.

NCCL's host does not wait for a collective, the device does. Without a GPU, ZEROSHARD_TEST_GLOO=1 runs the cases over
gloo, to debug them.
"""

from __future__ import annotations

import os

import pytest
import torch
from crash import Outcome
from test_rank_faults import CASES, HARMLESS, Case, assert_no_error, assert_others_are_told, run_cases

BACKEND = "gloo" if os.environ.get("ZEROSHARD_TEST_GLOO") == "1" else "nccl"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or BACKEND == "gloo"), reason="needs a GPU, which several NCCL ranks can share"
)


# A rank that waits alone in a barrier is named only if another waits on its host, which depends on how far that is.
CASES = [case for case in CASES if not case.what.startswith("barrier")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """All runs, made by one program."""
    return run_cases([*CASES, *HARMLESS], tmp_path_factory, BACKEND)


@pytest.mark.guarantee("After a failure")
@pytest.mark.guarantee("Failed ranks")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_other_ranks_learn_who_failed_and_why(case: Case, outcomes: dict[str, list[Outcome]]) -> None:
    assert_others_are_told(case, outcomes[case.name])


@pytest.mark.parametrize("case", HARMLESS, ids=lambda case: case.name)
def test_what_needs_no_other_rank_and_what_is_slow_is_not_an_error(
    case: Case, outcomes: dict[str, list[Outcome]]
) -> None:
    assert_no_error(outcomes[case.name])

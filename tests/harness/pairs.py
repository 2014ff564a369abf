"""Parameters of tests: every stage, and every pair of values of factors whose whole product need not run."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def at_stages(*stages: int) -> Any:
    """Run a test at each of these stages."""
    return pytest.mark.parametrize("stage", stages)


every_stage = at_stages(0, 1, 2, 3)


def pairwise(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Choose combinations in which every two values of two factors meet at least once.

    >>> pairwise("ab", (1, 2), "xy")
    [('a', 1, 'x'), ('a', 2, 'y'), ('b', 1, 'y'), ('b', 2, 'x')]
    """
    values = [list(factor) for factor in factors]
    product = list(itertools.product(*(range(len(each)) for each in values)))
    pairs = {numbers: set(itertools.combinations(enumerate(numbers), 2)) for numbers in product}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(product, key=lambda numbers: len(pairs[numbers] & missing)))
        missing -= pairs[chosen[-1]]
    return [tuple(each[number] for each, number in zip(values, numbers, strict=True)) for numbers in sorted(chosen)]

"""Pools of torch are freed only while no thread allocates from one: torch ends the process otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from zeroshard.memory.pool import _PoolReleases


class FakePool:
    """Calls a function when it is freed."""

    def __init__(self, on_free: Callable[[], object]) -> None:
        self._on_free = on_free

    def __del__(self) -> None:
        self._on_free()


class Releases:
    """Pools by name, and which of them are freed."""

    def __init__(self) -> None:
        self.releases, self.freed = _PoolReleases(), list[str]()

    def retire(self, name: str, then: Callable[[], object] = lambda: None) -> None:
        def on_free() -> None:
            self.freed.append(name)
            then()

        pools = [FakePool(on_free)]
        self.releases.retire(pools)
        assert not pools


@pytest.fixture
def is_capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    answers = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answers[0])
    return answers


def test_a_pool_is_freed_when_the_last_thread_has_left_all_pools(is_capturing: list[bool]) -> None:
    pools = Releases()
    pools.retire("at once")
    assert pools.freed == ["at once"]
    pools.releases.enter()
    pools.releases.enter()
    pools.retire("later")
    pools.releases.leave()
    assert pools.freed == ["at once"]
    pools.releases.leave()
    assert pools.freed == ["at once", "later"]


def test_no_pool_is_freed_while_a_graph_is_captured(is_capturing: list[bool]) -> None:
    pools = Releases()
    is_capturing[0] = True
    pools.retire("first")
    assert not pools.freed
    is_capturing[0] = False
    pools.retire("second")
    assert sorted(pools.freed) == ["first", "second"]


def test_a_pool_that_goes_while_another_is_freed_waits_for_its_turn(is_capturing: list[bool]) -> None:
    pools = Releases()
    pools.retire("first", then=lambda: pools.retire("second"))
    assert pools.freed == ["first"]
    pools.releases.enter()
    pools.releases.leave()
    assert pools.freed == ["first", "second"]

"""Imports without garbage collection, of the library and of the tests."""

from __future__ import annotations

import gc
import weakref

import conftest
import pytest

from zeroshard.utils.lazy_import import uncollected_imports


class Node:
    """An object in a cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_of_the_caller_is_freed_and_collections_go_on() -> None:
    gc.disable()  # for the cycle to be garbage until then
    try:
        garbage = weakref.ref(Node())
        assert garbage() is not None
    finally:
        gc.enable()
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), uncollected_imports():
        assert not gc.isenabled()
        raise ImportError
    assert garbage() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen


def test_a_program_without_collections_keeps_none() -> None:
    gc.disable()
    try:
        with uncollected_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_collections_are_enabled_after_the_tests_are_collected(error: BaseException | None) -> None:
    """Also in pytest-xdist's controller, which calls no pytest_collection_finish, and if an import raises."""
    assert gc.isenabled()
    collection = conftest.pytest_collection()
    next(collection)
    assert not gc.isenabled()
    with pytest.raises(StopIteration if error is None else KeyboardInterrupt):
        collection.send(None) if error is None else collection.throw(error)
    assert gc.isenabled()

"""Imports of a process that begins."""

from __future__ import annotations

import gc

import pytest

from shardwise.launch.rank import importing


def test_what_is_imported_is_not_looked_through_for_garbage() -> None:
    with importing():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    looked_at = {id(each) for each in gc.get_objects()}
    assert not any(id(each) in looked_at for each in made)
    later = [[]]
    assert id(later) in {id(each) for each in gc.get_objects()}


def test_a_failed_import_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(ModuleNotFoundError), importing():
        import nowhere  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

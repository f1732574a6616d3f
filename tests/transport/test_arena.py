"""Pages of a private window that this process has written to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from shardwise.base import libc
from shardwise.transport.shm.arena import Arena, PageMap, PrivatePages, Window, has_own_entry

PAGE = os.sysconf("SC_PAGE_SIZE")
LENGTH = 64 * PAGE
pytestmark = pytest.mark.skipif(not libc.has_futex(), reason="needs Linux on x86-64")


@pytest.fixture
def window() -> Iterator[Window]:
    fd = Arena.create()
    made = Window(LENGTH)
    made.open_private(fd, 0)
    yield made
    os.close(fd)


def _by_call(window: Window) -> Callable[[], bool]:
    return PrivatePages(PageMap(), window.address, LENGTH).exist


def _by_entries(window: Window) -> Callable[[], bool]:
    pagemap = PageMap()
    return lambda: has_own_entry(pagemap.entries(window.address, LENGTH), LENGTH)


@pytest.mark.parametrize("how", [_by_call, _by_entries])
def test_a_private_page_is_found_wherever_it_is(
    window: Window, how: Callable[[Window], Callable[[], bool]]
) -> None:
    finds = how(window)
    values = window.tensor(0, LENGTH, torch.uint8)
    for page in (0, 31, 63):
        assert values.sum() == 0
        assert not finds(), "pages that were only read"
        values[page * PAGE + 5] = 1
        assert finds()
        window.forget_writes()


def test_a_page_beyond_the_range_does_not_count(window: Window) -> None:
    half = LENGTH // 2
    look = PrivatePages(PageMap(), window.address, half)
    window.tensor(0, LENGTH, torch.uint8)[half] = 1
    assert not look.exist()


def test_older_systems_use_the_entries_of_pagemap(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> bool:
        raise OSError("inappropriate ioctl")

    monkeypatch.setattr(PageMap, "scan", unknown)
    look = PrivatePages(PageMap(), window.address, LENGTH)
    assert not look.exist()
    window.tensor(0, LENGTH, torch.uint8)[7] = 1
    assert look.exist()


def test_without_entries_pages_may_be_private() -> None:
    assert has_own_entry(b"", PAGE)


def test_memory_that_the_system_refuses_is_an_error_that_says_why() -> None:
    with pytest.raises(OSError, match=r"refuses to map \d+ bytes of shared memory: Bad file desc"):
        Window(LENGTH).open_private(-1, 0)

"""Fixtures that all tests share.

What takes long to import is imported where it is used: the process that hands tests out to workers
runs none, and they wait for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator
from typing import Any

import hypothesis
import pytest

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let workers be forked from one process that has imported the tests."""
    from tests import workers

    if workers.can_fork():
        config.add_cleanup(workers.fork_from_nursery(specs, config.args))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests, and what they import, without looking for garbage in it."""
    from shardwise.elastic.rank import importing

    with importing():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Compute references as the ranks do: on one thread, so that sums have one order."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _shapes_once() -> None:
    """Let ranks that are threads know what earlier ones have worked out."""
    from tests.shapes import remember_shapes

    remember_shapes()


@pytest.fixture
def memory_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that are threads allocate and free full parameters when they like."""
    from tests.transport.fake import FakeTransport

    monkeypatch.setattr(FakeTransport, "note_memory", lambda self, what: None)


@pytest.fixture(scope="session", autouse=True)
def _empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Hide what the user of this machine keeps, such as what ``calibrate`` measured, from tests."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_tree_of_commands() -> Generator[None]:
    """Build the tree of all commands once; a process of a user parses one command line."""
    import typer.main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="module", autouse=True)
def _worlds_of_a_file() -> Generator[None]:
    """End the ranks that waited for the next test of a file, and their store, with the file."""
    yield
    if "tests.harness" in sys.modules:
        sys.modules["tests.harness"].end_kept_worlds()


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(fn, world_size, *args)``: see :func:`tests.harness.run_ranks`."""
    from tests.harness import run_ranks

    return run_ranks


@pytest.fixture
def threads() -> Callable[..., list[Any]]:
    """``threads(fn, world_size, *args)``: see :func:`tests.threads.run_threads`."""
    from tests.threads import run_threads

    return run_threads


@pytest.fixture
def new_ranks() -> None:
    """Give a test ranks that have run nothing: it looks at what they hold, or at their start."""
    from tests.harness import end_kept_worlds

    end_kept_worlds()

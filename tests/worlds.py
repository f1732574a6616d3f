"""Tests that run on every rank: the body of the test is what one rank does.

    @on_threads(2)
    def test_gradients_are_averaged(rank: int, world_size: int) -> None: ...

    @pytest.mark.parametrize("world_size", [1, 2])
    @on_processes()
    def test_files_are_whole(rank: int, world_size: int, tmp_path: Path) -> None: ...

The other parameters are fixtures and what the test is parametrized with; every rank gets the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tests.harness import run_ranks
from tests.threads import run_threads

Test = Callable[..., None]
#: The fixtures ``ranks`` and ``threads``: called with a function, a number of ranks and arguments.
Ranks = Callable[..., list[Any]]


def on_threads(world_size: int | None = None) -> Callable[[Test], Test]:
    """Run a test on ranks that are threads: see :mod:`tests.threads`.

    Args:
        world_size: the number of ranks; ``None`` if the test is parametrized with it.
    """
    return functools.partial(_spread, world_size, _on_threads)


def on_processes(world_size: int | None = None, **options: Any) -> Callable[[Test], Test]:
    """Run a test on ranks that are processes; ``options`` are :func:`tests.harness.run_ranks`'."""
    return functools.partial(_spread, world_size, functools.partial(_on_processes, options))


def on_transport(world_size: int | None = None) -> Callable[[Test], Test]:
    """Run a test on ranks that are processes if its ``transport`` is of shared memory, or threads.

    Where parameters are gathered into memory that ranks share, ranks are processes. Elsewhere each
    has memory of its own.
    """
    return functools.partial(_spread, world_size, _on_transport)


def _spread(world_size: int | None, run: Callable[..., Any], fn: Test) -> Test:
    @functools.wraps(fn)
    def test(**given: Any) -> None:
        size = given.pop("world_size") if world_size is None else world_size
        run(test, size, given)

    hidden = ["rank", "world_size"] if world_size is not None else ["rank"]
    signature = inspect.signature(fn)
    assert list(signature.parameters)[:2] == ["rank", "world_size"], fn.__qualname__
    shown = [each for name, each in signature.parameters.items() if name not in hidden]
    test.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return test


def _on_threads(test: Any, world_size: int, given: dict[str, Any]) -> None:
    run_threads(test.__wrapped__, world_size, **given)


def _on_processes(
    options: dict[str, Any], test: Any, world_size: int, given: dict[str, Any]
) -> None:
    run_ranks(_be_rank, world_size, test, given, **options)


def _on_transport(test: Any, world_size: int, given: dict[str, Any]) -> None:
    run = functools.partial(_on_processes, {}) if given["transport"] == "shm" else _on_threads
    run(test, world_size, given)


def _be_rank(rank: int, world_size: int, test: Any, given: dict[str, Any]) -> None:
    test.__wrapped__(rank, world_size, **given)

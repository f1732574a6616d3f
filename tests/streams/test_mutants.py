"""The scenarios would report if a wait, an event, a reference or an allocation were not right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest

from shardwise.transport.memory import HeapBuffers
from tests.streams.device import OnRace
from tests.streams.mutants import HOST_ONLY, SEEN, UNSEEN
from tests.streams.mutation import SOURCE, Place, What, places
from tests.streams.scenarios import play

#: The files of the front doors that touch shards.
_DOORS = ("fsdp2.py", "meta.py", "module.py", "summon.py")
#: Mutants that are tried in one process.
_AT_A_TIME = 15
#: Mutants that `make test` tries. They show that scenarios see, not that the runtime is right.
ALWAYS = (
    "ParamGroup.use_now: wait_for_unshard",
    "Offload.grad_to_host: record_event",
    "Ledger.start: append",
    "contributions: flat_rows",
    "Offload.place: to",
)


@functools.cache
def _all_places() -> dict[str, Place]:
    doors = [SOURCE / "frontends" / name for name in _DOORS]
    base = ("activations.py", "devices.py", "offload.py")
    paths = [*(SOURCE / "base" / name for name in base), *doors]
    for folder in ("sharding", "transport", "checkpoint", "optim"):
        paths += sorted((SOURCE / folder).rglob("*.py"))
    files = (str(path.relative_to(SOURCE)) for path in paths)
    return places(
        file
        for file in files
        if not any(file == each or file.startswith(f"{each}/") for each in HOST_ONLY)
    )


def _listed(names: Iterable[str]) -> str:
    return "\n  ".join(["", *sorted(names)])


def test_the_table_lists_what_is_in_the_source() -> None:
    found, listed = set(_all_places()), {*SEEN, *UNSEEN}
    assert not found - listed, f"not in tests/streams/mutants.py: {_listed(found - listed)}"
    assert not listed - found, f"no longer in the source: {_listed(listed - found)}"
    assert not SEEN.keys() & UNSEEN.keys()


def test_files_of_the_host_exist() -> None:
    assert all((SOURCE / each).exists() for each in HOST_ONLY)


def _unreported(rank: int, world_size: int, taken_out: dict[str, Place]) -> list[str]:
    """Play each mutant's scenarios; return the mutants that one does not report."""
    return [
        f"{name} in {scenario}"
        for name, place in taken_out.items()
        for scenario in _scenarios(name)
        if not _is_reported(scenario, place)
    ]


def _scenarios(name: str) -> tuple[str, ...]:
    seen = SEEN[name]
    return (seen,) if isinstance(seen, str) else seen


def _is_reported(scenario: str, place: Place) -> bool:
    try:
        return bool(play(scenario, taken_out=place, on_race=OnRace.RAISE).races)
    except Exception:  # the runtime or the scenario sees it itself
        return True


def _batches() -> list[Any]:
    """One mutant of each kind, and all others in `make long`."""
    others = [name for name in SEEN if name not in ALWAYS]
    batches = [others[first : first + _AT_A_TIME] for first in range(0, len(others), _AT_A_TIME)]
    return [
        pytest.param(ALWAYS, id="of each kind"),
        *(pytest.param(names, marks=pytest.mark.long, id=names[0]) for names in batches),
    ]


def test_one_of_each_kind_is_always_tried() -> None:
    found = _all_places()
    assert sorted(found[name].what.name for name in ALWAYS) == sorted(What.__members__)


@pytest.mark.parametrize("names", _batches())
def test_each_is_reported_if_it_is_taken_out(
    ranks: Callable[..., list[Any]], names: Sequence[str]
) -> None:
    found = _all_places()
    [unreported] = ranks(_unreported, 1, {each: found[each] for each in names}, backend=None)
    assert not unreported, f"nothing is reported without {_listed(unreported)}"


def _abandoned(rank: int, world_size: int) -> list[list[str]]:
    def races() -> list[str]:
        return [str(race) for race in play("backward_raises_large").races]

    kept = races()
    with mock.patch.object(HeapBuffers, "abandon", HeapBuffers.free):
        return [kept, races()]


def test_memory_that_an_abandoned_gather_writes_to_is_not_freed(
    ranks: Callable[..., list[Any]],
) -> None:
    [(kept, freed)] = ranks(_abandoned, 1, backend=None)
    assert not kept, "nor does the next gather write to it too early"
    assert any("all-gather writes on NCCL" in race for race in freed)

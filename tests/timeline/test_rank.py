"""What one rank did, as a value and in a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.base import plain, strict
from shardwise.base.errors import CheckpointError
from shardwise.base.observe import Activity, Memory
from shardwise.base.spans import Span
from shardwise.timeline import recording
from shardwise.timeline.page import page, trace
from shardwise.timeline.rank import MemoryChange, RankTimeline, Step
from shardwise.timeline.recording import SPANS_OF_ALL, read, write
from shardwise.timeline.steps import Timeline, together
from tests.timeline.ranks import collective, rank, span, wait
from tests.timeline.test_trace import PREDICTION

FULL = RankTimeline(
    rank=3,
    world_size=8,
    host="höst",
    device="NVIDIA H100",
    begin=-0.5,
    end=20.25,
    spans=(
        collective(1.5, 2.25),
        Span(Activity.WAIT, "layers.0", 2.0, 2.25, dimension="dp", device=(2.125, 2.25)),
        span(Activity.FORWARD, 3.0, None),
    ),
    changes=(MemoryChange(1.0, Memory.GRADIENTS, "layers.0", -64),),
    held={Memory.PARAMETERS: 128},
    steps=(Step(5, 1.0, 4.0), Step(6, 4.0, 8.0)),
    dropped=7,
    error="PeerLostError: rank 1 is gone",
    uncertainty=0.00025,
)


def _values(timeline: Timeline) -> Any:
    """What a file has of a timeline."""
    return json.loads(plain.written(timeline))


def test_a_rank_reads_what_it_wrote() -> None:
    assert plain.read(RankTimeline, plain.written(FULL)) == FULL


def test_a_timeline_reads_what_it_wrote() -> None:
    for timeline in (Timeline((rank(0, []), FULL), PREDICTION), Timeline((FULL,))):
        assert Timeline.from_json(_values(timeline), "a file") == timeline


def test_as_many_spans_as_ranks_keep_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        strict, "FREE", 0
    )  # that much is free in any file, however few spans it has
    some = rank(0, [collective(at / 128, at / 128 + 1 / 256) for at in range(1000)])
    write(Timeline((some,)), tmp_path)
    assert read(tmp_path) == Timeline((some,))
    nbytes = (tmp_path / "timeline.json").stat().st_size
    assert nbytes * SPANS_OF_ALL / len(some.spans) < recording._MOST_BYTES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spans", [["forward", 99, 0.0, 1.0, "", 0, 0, "", 0, [], None]]),
        ("spans", [["forwards", "", 0.0, 1.0, "", 0, 0, "", 0, [], None]]),
        ("spans", [[0, 1]]),
        ("spans", 3),
        ("changes", [[0.0, "no", "", 2]]),
        ("held", {"luggage": 3}),
        ("held", []),
        ("steps", [["one", 0, 1]]),
        ("steps", [[1, 2.0, 1.0]]),
        ("rank", "first"),
        ("rank", 8),
        ("begin", None),
    ],
)
def test_a_damaged_file_is_refused_by_name(name: str, value: Any) -> None:
    damaged = _values(Timeline((FULL,)))
    damaged["ranks"][0][name] = value
    with pytest.raises(CheckpointError, match=r"timeline\.json"):
        Timeline.from_json(damaged, "timeline.json")


#: What may stand where something else is expected.
_ODD = (
    None,
    True,
    -1,
    0,
    1e300,
    -1e300,
    math.inf,
    10**400,
    2**62,
    "",
    "x",
    "\x1b[2J",
    [],
    {},
    [[]],
)


def _odd(value: Any) -> Iterator[Any]:
    """Return copies of plain values, each with something odd in one place."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield {name: inner for name, inner in value.items() if name != key}
            yield from ({**value, key: other} for other in _odd(each))
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in _odd(each))
    yield from _ODD


def test_whatever_is_read_can_be_shown_and_the_rest_is_refused_by_name() -> None:
    whole = _values(Timeline((rank(0, [], size=8), FULL), PREDICTION))
    read = 0
    for each in _odd(whole):
        refused = None
        try:
            found = Timeline.from_json(each, "timeline.json")
        except CheckpointError as error:
            refused = str(error)
        if refused is not None:
            assert "timeline.json" in refused
            assert refused.isprintable()
            continue
        read += 1
        assert len(found.missing) < 2**21
        assert found.summary().isprintable()
        assert json.loads(json.dumps(trace(found), allow_nan=False))
        assert page(found)
    assert read > 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"format": "shardwise timeline 1", "ranks": []}', "the format 'shardwise timeline 1'"),
        (b"[" + b"[]," * (1 << 22) + b"[]]", "in memory, expected at most"),
        (3 << 30, "at most"),
        (None, "expected a regular file"),
    ],
)
def test_hostile_files_are_refused_and_cost_little(
    tmp_path: Path, content: bytes | int | None, message: str
) -> None:
    file = tmp_path / "timeline.json"
    if content is None:
        os.mkfifo(file)
    elif isinstance(content, int):
        file.touch()
        os.truncate(file, content)
    else:
        file.write_bytes(content)
    for path in (tmp_path, file):
        with pytest.raises(CheckpointError, match=message) as refused:
            read(path)
        assert str(refused.value).isprintable()


def test_a_timeline_is_read_by_its_folder_or_its_file(tmp_path: Path) -> None:
    write(Timeline((FULL,)), tmp_path)
    assert read(tmp_path) == read(tmp_path / "timeline.json") == Timeline((FULL,))
    for path in (tmp_path / "none", tmp_path / "none" / "timeline.json"):
        with pytest.raises(CheckpointError, match=r"none.*expected a regular file"):
            read(path)


def test_files_of_another_kind_are_refused() -> None:
    with pytest.raises(CheckpointError, match="format"):
        Timeline.from_json({"format": "shardwise timeline 9", "ranks": []}, "a file")
    with pytest.raises(CheckpointError, match="prediction"):
        Timeline.from_json({**_values(Timeline((FULL,))), "prediction": {"seconds": 1}}, "a file")


def test_timelines_of_ranks_are_put_together_in_order() -> None:
    whole = together([Timeline((FULL,)), Timeline((rank(0, [], size=8),), PREDICTION)])
    assert [each.rank for each in whole.ranks] == [0, 3]
    assert whole.missing == [1, 2, 4, 5, 6, 7]
    assert whole.prediction == PREDICTION


def test_the_summary_says_what_matters() -> None:
    early = rank(0, [collective(1, 6), wait(2, 5.9)])
    late = rank(1, [collective(4, 6), wait(4.5, 5.9)])
    assert Timeline((early, late), PREDICTION).summary() == (
        "a step takes 10.0 s, 27% of it waiting, rank 1 is the slowest: others wait 2.00 s for "
        "it, 9.00 s were predicted"
    )
    assert Timeline((rank(0, []),)).summary() == "a step takes 10.0 s, 0% of it waiting"
    assert Timeline((rank(0, [], []),)).summary() == "no step was recorded"

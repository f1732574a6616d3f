"""What one rank did, as a value and in a file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.errors import CheckpointError
from shardwise.observe import Activity, Memory
from shardwise.timeline.merged import Timeline, packed, together, unpacked
from shardwise.timeline.rank import MemoryChange, RankTimeline, Span, Step
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


def test_a_rank_reads_what_it_wrote() -> None:
    value = json.loads(json.dumps(FULL.to_json()))
    assert RankTimeline.from_json(value, "a file") == FULL
    assert unpacked(packed(FULL), 3) == FULL


def test_a_timeline_reads_what_it_wrote() -> None:
    timeline = Timeline((rank(0, []), FULL), PREDICTION)
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json())), "a file") == timeline
    bare = Timeline((FULL,))
    assert Timeline.from_json(json.loads(json.dumps(bare.to_json())), "a file") == bare


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spans", [[0, 99, 0.0, 1.0, 0, 0, 0, 0, 0, [], None]]),
        ("spans", [[0, 1]]),
        ("spans", 3),
        ("changes", [[0.0, "no", 1, 2]]),
        ("held", {"luggage": 3}),
        ("held", []),
        ("steps", [["one", 0, 1]]),
        ("names", None),
        ("rank", "first"),
        ("begin", None),
    ],
)
def test_a_damaged_file_is_refused_by_name(name: str, value: Any) -> None:
    damaged = {**FULL.to_json(), name: value}
    with pytest.raises(CheckpointError, match=r"timeline\.json"):
        RankTimeline.from_json(damaged, "timeline.json")


def test_files_of_another_kind_are_refused() -> None:
    with pytest.raises(CheckpointError, match="format"):
        Timeline.from_json({"format": "shardwise timeline 9", "ranks": []}, "a file")
    with pytest.raises(CheckpointError, match="prediction"):
        Timeline.from_json({**Timeline((FULL,)).to_json(), "prediction": {"seconds": 1}}, "a file")


def test_timelines_of_ranks_are_put_together_in_order() -> None:
    whole = together([Timeline((FULL,)), Timeline((rank(0, [], size=8),), PREDICTION)])
    assert [each.rank for each in whole.ranks] == [0, 3]
    assert whole.missing == [1, 2, 4, 5, 6, 7]
    assert whole.prediction == PREDICTION


def test_the_summary_says_what_matters() -> None:
    early = rank(0, [collective(1, 6), wait(2, 5.9)])
    late = rank(1, [collective(4, 6), wait(4.5, 5.9)])
    assert Timeline((early, late), PREDICTION).summary() == (
        "a step takes 10.0 s, 27 % of it waiting, rank 1 is the slowest: others wait 2.00 s for "
        "it, 9.00 s were predicted"
    )
    assert Timeline((rank(0, []),)).summary() == "a step takes 10.0 s, 0 % of it waiting"
    assert Timeline((rank(0, [], []),)).summary() == "no step was recorded"

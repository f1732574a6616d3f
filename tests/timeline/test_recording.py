"""Recording real ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard, timeline
from shardwise.app.recipes.core.timeline_of_run import TimelineOfRun
from shardwise.base.errors import CheckpointError, PeerLostError
from shardwise.base.observe import Activity, Memory, is_observed
from shardwise.timeline.rank import COLLECTIVES
from shardwise.timeline.recorder import Recorder
from shardwise.timeline.steps import Part
from tests.timeline.test_trace import check_format

pytestmark = pytest.mark.usefixtures("new_ranks")

_SLOW = 0.3  # seconds that rank 1 takes longer


class _Trainer:
    def __init__(self, world_size: int, transport: str) -> None:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
        self.model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        for module in (self.model[1], self.model):
            fully_shard(module, mesh=mesh, transport=transport)
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)

    def step(self, pause: float = 0.0) -> None:
        time.sleep(pause)
        self.model(torch.ones(2, 16)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _train(rank: int, world_size: int, folder: Path, transport: str) -> timeline.Timeline:
    trainer = _Trainer(world_size, transport)
    trainer.step()
    with timeline.record(folder) as recording:
        for number in range(5, 8):
            with recording.step(number):
                trainer.step(_SLOW if rank == 1 else 0.0)
    assert recording.timeline is not None
    return recording.timeline


@pytest.mark.parametrize("transport", ["shm", "c10d", "collectives"])
def test_a_recording_has_what_every_rank_did(
    ranks: Callable[..., list[Any]], tmp_path: Path, transport: str
) -> None:
    whole, own = ranks(_train, 2, tmp_path, transport)
    assert [each.rank for each in whole.ranks] == [0, 1]
    assert [each.rank for each in own.ranks] == [1]
    assert timeline.read(tmp_path) == whole
    assert [step.number for step in whole.steps] == [5, 6, 7]
    for step in whole.steps:
        for mine in step.ranks:
            assert sum(mine.parts.values()) == pytest.approx(mine.step.seconds)
    # A busy machine may make the other rank late in one of the steps.
    clear = [
        step
        for step in whole.steps
        if step.slowest == 1
        and step.ranks[0].parts[Part.WAIT] > 0.5 * _SLOW
        and step.ranks[0].waited_for(1) > 0.5 * _SLOW
        and step.ranks[1].parts[Part.OTHER] > 0.5 * _SLOW
    ]
    assert len(clear) >= 2, whole.steps
    for each in whole.ranks:
        names = {(span.activity, span.name) for span in each.spans}
        groups = {"1", "the root group"}
        for activity in (Activity.FORWARD, Activity.BACKWARD, Activity.REDUCE_SCATTER):
            assert {name for found, name in names if found is activity} == groups
        assert {span.name for span in each.spans if span.activity is Activity.OPTIMIZER} == {"SGD"}
        assert all(span.end is not None for span in each.spans)
        assert {span.members for span in each.spans if span.activity in COLLECTIVES} == {(0, 1)}
        if transport != "shm":  # there the host's pool keeps the memory between steps
            full = [c.nbytes for c in each.changes if c.kind is Memory.FULL_PARAMETERS]
            assert sum(full) == 0
            assert max(full) == 4 * (16 * 16 + 16)
    check_format(json.loads((tmp_path / "trace.json").read_bytes()))
    assert "Timeline" in (tmp_path / "timeline.html").read_text()
    assert not list(tmp_path.glob("rank-*"))


def _lose_one(rank: int, world_size: int, folder: Path) -> str:
    trainer = _Trainer(world_size, "c10d")
    try:
        with timeline.record(folder):
            trainer.step()
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step()
    except PeerLostError as error:
        return str(error)
    raise AssertionError("nobody was lost")


def test_if_a_rank_dies_the_others_timelines_are_readable(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    outcomes = ranks(_lose_one, 3, tmp_path, expect_failures=True)
    assert [outcome.ok for outcome in outcomes] == [True, True, False]
    whole = timeline.read(tmp_path)
    assert [each.rank for each in whole.ranks] == [0, 1]
    assert whole.missing == [2]
    for each in whole.ranks:
        assert each.error.startswith("PeerLostError")
        assert [step.number for step in each.steps] == [1, 2]
        last = [
            span for span in each.spans if span.end is None and span.begin >= each.steps[1].begin
        ]
        assert last  # where it was when the other was lost
    check_format(json.loads((tmp_path / "trace.json").read_bytes()))
    assert "the ranks 2" in (tmp_path / "timeline.html").read_text()


def _lose_one_at_the_end(rank: int, world_size: int, folder: Path) -> str:
    recording = timeline.record(folder)
    recording.__enter__()
    with recording.step(1):
        torch.ones(1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        recording.__exit__(None, None, None)
    except PeerLostError as error:
        return str(error)
    raise AssertionError("nobody was lost")


def test_if_a_rank_dies_at_the_end_the_others_timelines_are_readable(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    ranks(_lose_one_at_the_end, 2, tmp_path, expect_failures=True)
    whole = timeline.read(tmp_path)
    assert whole.missing == [1]
    assert whole.ranks[0].error.startswith("PeerLostError")
    assert [step.number for step in whole.steps] == [1]


def _leave_the_group(rank: int, world_size: int, folder: Path) -> None:
    with timeline.record(folder) as recording, recording.step(1):
        dist.barrier()
        dist.destroy_process_group()


def test_ranks_that_leave_their_group_in_the_block_write_by_themselves(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    ranks(_leave_the_group, 2, tmp_path)
    whole = timeline.read(tmp_path)
    assert [(each.rank, each.world_size) for each in whole.ranks] == [(0, 2), (1, 2)]
    assert not whole.missing


def _cannot_begin(rank: int, world_size: int, folder: Path) -> list[str]:
    said: list[str] = []
    for problem in ("folder", "observer"):
        path = folder if problem == "folder" else None
        nested = problem == "observer" and rank == 1
        with Recorder(1).recording() if nested else contextlib.nullcontext():
            try:
                timeline.record(path).__enter__()
            except (OSError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    recorded = TimelineOfRun(range(1, 3), folder, said.append)
    with recorded:
        for number in (1, 2):
            with recorded.step(number):
                dist.barrier()  # the training goes on
    assert not is_observed()
    return said


def test_if_a_rank_cannot_begin_no_rank_waits_for_it(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    for said in ranks(_cannot_begin, 2, file):
        assert len(said) == 3
        assert said[0].startswith("FileExistsError")
        assert said[1].startswith("RuntimeError: a Recorder watches this process already")
        assert said[2].startswith(f"warning    --timeline: {file} cannot be written")


def _never_come(rank: int, world_size: int, folder: Path) -> timeline.Timeline | None:
    recorded = None
    if rank != 1:
        with timeline.record(folder, patience=1.0) as recording, recording.step(1):
            torch.ones(1)
        recorded = recording.timeline
    dist.barrier()  # nobody's collective was mistaken for another
    return recorded


def test_ranks_that_do_not_come_are_named_and_the_others_are_recorded(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, never, third = ranks(_never_come, 3, tmp_path)
    assert never is None
    assert [each.rank for each in first.ranks + third.ranks] == [0, 2]
    whole = timeline.read(tmp_path)
    assert [each.rank for each in whole.ranks] == [0, 2]
    assert whole.missing == [1]
    assert [len(step.ranks) for step in whole.steps] == [2], "by one clock"


def _come_without_rank_0(rank: int, world_size: int, folder: Path) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise.timeline.recording").addHandler(handler)
    if rank == 0:
        dist.barrier()  # until the other has lost patience and has been recorded
    with timeline.record(folder, patience=0.5) as recording:
        torch.ones(1)
    if rank == 1:
        dist.barrier()
    dist.barrier()
    assert recording.timeline is not None
    with timeline.record(folder / "next", patience=60.0) as recording:  # they meet again
        torch.ones(1)
    assert recording.timeline is not None
    return said


def test_a_rank_that_comes_late_is_told_so_and_the_next_recording_has_it(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    (tmp_path / "timeline.json").write_text("of an earlier recording")
    late, missed = ranks(_come_without_rank_0, 2, tmp_path)
    assert len(late) == len(missed) == 1
    assert late[0].startswith("rank 0 came to a recording when others had waited 0.5 s")
    assert missed[0].startswith(
        "ranks [0] did not come to the beginning of a recording within 0.5 s"
    )
    assert [each.rank for each in timeline.read(tmp_path).ranks] == [1]
    assert [each.rank for each in timeline.read(tmp_path / "next").ranks] == [0, 1]


def _never_end(rank: int, world_size: int, folder: Path, end: str) -> None:
    recording = timeline.record(folder, patience=60.0 if end == "error" else 0.5)
    recording.__enter__()
    dist.barrier()
    if rank == 0 or end == "error":
        error = KeyError("mine") if rank == 1 else None
        recording.__exit__(None if error is None else KeyError, error, None)
    dist.barrier()


@pytest.mark.parametrize("end", ["error", "never"])
def test_nobody_waits_at_the_end_for_a_rank_whose_block_ended_otherwise(
    ranks: Callable[..., list[Any]], tmp_path: Path, end: str
) -> None:
    ranks(_never_end, 2, tmp_path, end)
    whole = timeline.read(tmp_path)
    assert whole.ranks[0].error == ""
    if end == "error":
        assert whole.ranks[1].error == "KeyError: 'mine'"
    else:
        assert whole.missing == [1]


@pytest.mark.parametrize("patience", [0, -1.0, math.inf, math.nan])
def test_patience_is_a_time(patience: float) -> None:
    with pytest.raises(ValueError, match=r"patience: found .* expected seconds, a number above 0"):
        timeline.record(patience=patience)


def test_an_error_that_no_encoding_has_is_shown_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"), timeline.record(tmp_path):
        raise ValueError("boom \ud800 </script>")
    assert timeline.read(tmp_path).ranks[0].error == "ValueError: boom \ud800 </script>"
    assert "boom ? &lt;/script&gt;" in (tmp_path / "timeline.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", ["1", 1.5, True, None, -1])
def test_a_step_has_a_number(number: Any) -> None:
    with (
        timeline.record() as recording,
        pytest.raises(ValueError, match="expected the number of a step"),
        recording.step(number),
    ):
        pytest.fail("it is none")


def test_an_exception_in_the_block_is_the_programs_own(tmp_path: Path) -> None:
    (tmp_path / "rank-00007.json").write_text("of an earlier recording")
    with pytest.raises(KeyError, match="mine"), timeline.record(tmp_path) as recording:
        raise KeyError("mine")
    assert recording.timeline is not None
    assert timeline.read(tmp_path).ranks[0].error == "KeyError: 'mine'"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("rank-00000.json", "timeline.html", "timeline.json", "trace.json"),
    ]


def test_a_folder_that_cannot_be_written_does_not_hide_an_error(tmp_path: Path) -> None:
    recording = timeline.record(tmp_path / "folder")
    recording.__enter__()
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").touch()
    recording.__exit__(KeyError, KeyError("no step"), None)
    assert recording.timeline is not None
    assert recording.timeline.ranks[0].error == "KeyError: 'no step'"
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), timeline.record(tmp_path / "file"):
        pytest.fail("it can never be written")


def test_a_process_alone_can_be_recorded_again_and_again() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        with timeline.record() as recording:
            optimizer.step()
        assert recording.timeline is not None
        [span] = recording.timeline.ranks[0].spans
        assert span.activity is Activity.OPTIMIZER


def test_one_recording_at_a_time() -> None:
    with timeline.record(), pytest.raises(RuntimeError, match="watches"), timeline.record():
        pass
    with pytest.raises(RuntimeError, match="inside of the block"):
        timeline.record().step(1)


def test_a_folder_without_a_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no timeline"):
        timeline.read(tmp_path)
    (tmp_path / "timeline.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"timeline\.json"):
        timeline.read(tmp_path)

"""What torch's agent learns of a rank that fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardwise.elastic import rank as life
from shardwise.elastic.rank import STOP_SIGNALS, StopSignals
from shardwise.elastic.world import PARENT_PID

BODY = """
from shardwise.base.errors import PeerLostError
from shardwise.base.errors import UserError
from shardwise.elastic.errors import Stopped
from shardwise.elastic.rank import run_rank
from shardwise.elastic.world import World

def body(world, signals):
    {}

run_rank(World(1, 2, 1, 2), body)
"""


@pytest.mark.parametrize(
    ("body", "code", "shown", "said"),
    [
        ("raise UserError('--lr: found 0')", 2, "error: --lr: found 0", "error: --lr: found 0"),
        ("raise ValueError('why')", 1, "Traceback .*ValueError: why", "Traceback .*"),
        ("raise Stopped(15, 'saved')", 143, "saved", None),
        ("raise PeerLostError('x')", 1, "shardwise.base.errors.PeerLostError: x", "shardwise.*: x"),
    ],
)
def test_torchrun_shows_why_a_rank_ended(
    tmp_path: Path, body: str, code: int, shown: str, said: str | None
) -> None:
    """The file is read by torch's own classes, which also compose the summary."""
    file = tmp_path / "error.json"
    ended = subprocess.run(
        [sys.executable, "-c", BODY.format(body)],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == code
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=code, error_file=str(file))
    assert abs(failure.timestamp - time.time()) < 60
    summary = str(ChildFailedError("train", {1: failure}))
    assert re.search(f"traceback : {shown}\n", summary, re.DOTALL)
    assert re.fullmatch("" if said is None else rf"\[rank 1\] {said}\n", ended.stderr, re.DOTALL)


def test_the_file_of_a_lost_peer_has_the_traceback_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert life.record_failure("last line", "Traceback\nlast line", 1)
    assert "Traceback" in file.read_text()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path))
    assert not life.record_failure("line", "text", 1), "it cannot be written"
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert not life.record_failure("line", "text", 1), "there is no agent"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each sleep, in which the agent sends SIGTERM."""
    seconds: list[float] = []

    def sleep(how_long: float) -> None:
        seconds.append(how_long)
        signal.raise_signal(signal.SIGTERM)

    # Of this module alone: threads that other tests have left sleep, too.
    monkeypatch.setattr(life, "time", SimpleNamespace(sleep=sleep))
    return seconds


def test_a_rank_that_lost_a_peer_lets_the_agent_find_that_peer_first(
    monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        StopSignals().install()
        life.let_the_first_failure_be_named()
        assert not slept, "nobody would end this rank"
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
        life.let_the_first_failure_be_named()
        assert len(slept) == 1
        monkeypatch.setenv(PARENT_PID, "1")
        life.let_the_first_failure_be_named()
        assert len(slept) == 1, "our own launcher compares reports"
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

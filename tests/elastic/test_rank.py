"""One rank: its imports, the signals that stop it, and how it reports its end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.base import plain
from shardwise.elastic import rank as life
from shardwise.elastic.errors import Stopped
from shardwise.elastic.rank import (
    MAX_TEXT,
    MOVE_ON,
    MOVES_ON,
    STOP_SIGNALS,
    WORLD_FILE,
    Ending,
    RankReport,
    Stage,
    StopSignals,
    importing,
)
from shardwise.elastic.world import REPORT, STAYS


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


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stage]]:
    """What a rank reports to its launcher; the handlers of this process come back afterwards."""
    before = {signum: signal.getsignal(signum) for signum in (*STOP_SIGNALS, MOVES_ON)}
    found: list[Stage] = []
    monkeypatch.setattr(life, "report_stage", found.append)
    yield found
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_before_training_ends_the_rank_where_it_is(
    stages: list[Stage], signum: signal.Signals
) -> None:
    signals = StopSignals()
    signals.install()
    with pytest.raises(Stopped, match="there was nothing to save") as raised:
        signal.raise_signal(signum)
    assert raised.value.exit_code == 128 + signum
    assert signals.noted == signum


def test_a_signal_during_training_is_noted_once(stages: list[Stage]) -> None:
    signals = StopSignals()
    signals.install()
    with signals.deferred():
        signals.stepped()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # of one Ctrl-C, the launcher's comes second
        assert signals.noted == signal.SIGINT
        signals.stepped()
    assert stages == [Stage.TRAINING, Stage.ENDING], "each stage is reported once"


def test_a_rank_that_stops_with_another_is_not_interrupted_again(stages: list[Stage]) -> None:
    """torchrun sends SIGTERM to the ranks that still write when the first one has ended."""
    signals = StopSignals()
    signals.install()
    with signals.deferred():
        signals.agree(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    assert signals.noted == signal.SIGINT


@pytest.mark.parametrize("first", [signal.SIGTERM, MOVES_ON])
def test_a_request_to_stop_counts_more_than_one_to_move_on(
    stages: list[Stage], monkeypatch: pytest.MonkeyPatch, first: signal.Signals
) -> None:
    monkeypatch.setenv(STAYS, "1")
    signals = StopSignals()
    signals.install()
    with signals.deferred():
        for signum in (first, {signal.SIGTERM, MOVES_ON}.difference({first}).pop()):
            os.kill(os.getpid(), signum)
        assert signals.noted == signal.SIGTERM > MOVE_ON


def test_the_signal_to_move_on_is_the_programs_where_ranks_do_not_stay(stages: list[Stage]) -> None:
    before = signal.getsignal(MOVES_ON)
    StopSignals().install()
    assert signal.getsignal(MOVES_ON) is before


def test_a_rank_waits_for_its_next_world_whatever_asks_it_to_stop(
    stages: list[Stage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(REPORT, str(tmp_path / "report"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    signals = StopSignals()
    signals.install()
    signals.hold()

    def launch() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        beside = tmp_path / "beside"
        beside.write_text('{"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}')
        beside.replace(tmp_path / WORLD_FILE)

    launcher = threading.Thread(target=launch)
    launcher.start()
    world = signals.next_world()
    launcher.join()
    assert (world.rank, world.size) == (2, 3)
    assert stages == [Stage.WAITING, Stage.STARTING]
    assert signals.noted == signal.SIGINT, "which counts after the next step"
    assert not (tmp_path / WORLD_FILE).exists()


def test_signals_that_a_launcher_blocked_are_delivered(stages: list[Stage]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signals = StopSignals()
    signal.raise_signal(signal.SIGTERM)  # stays pending
    with pytest.raises(Stopped):
        signals.install()


# -- the end of a rank -----------------------------------------------------------------------------

BODY = """
import errno, os, sys
from shardwise.base.errors import OffloadError, PeerLostError
from shardwise.base.errors import UserError
from shardwise.elastic.errors import Stopped
from shardwise.elastic.rank import run_rank
from shardwise.elastic.world import World

class TryLaterError(UserError):
    passing = True

def body(world, signals):
    {}

run_rank(World(1, 2, 1, 2), body)
"""


@pytest.mark.parametrize(
    ("body", "code", "ending", "text"),
    [
        ("pass", 0, None, ""),
        ("raise UserError('--lr: found 0')", 2, Ending.USER, "error: --lr: found 0"),
        ("raise TryLaterError('no hub')", 2, Ending.FAILED, "no hub"),
        ("raise Stopped(15, 'saved')", 128 + 15, Ending.STOPPED, "saved"),
        ("raise ValueError('why')", 1, Ending.FAILED, "ValueError: why"),
        (
            "raise PeerLostError('rank 0')",
            1,
            Ending.PEER,
            "shardwise.base.errors.PeerLostError: rank 0",
        ),
        ("raise UserError('lost') from PeerLostError('x')", 1, Ending.PEER, "lost"),
        ("raise OSError(errno.ENOSPC, 'full')", 1, Ending.USER, "error: [Errno 28] full"),
        ("raise OffloadError('disk is full') from OSError()", 1, Ending.FAILED, "disk is full"),
        ("raise BrokenPipeError()", 1, Ending.USER, "error: standard output was closed"),
    ],
)
def test_a_rank_reports_why_it_ends(
    body: str, code: int, ending: Ending | None, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "report"
    file.touch()
    ended = subprocess.run(
        [sys.executable, "-c", BODY.format(body)],
        env={**os.environ, REPORT: str(file)},
        check=False,
        timeout=60,
    )
    lines = file.read_bytes().splitlines()
    assert ended.returncode == code
    if ending is None:
        assert lines == [b"starting"]
        return
    report = plain.read(RankReport, lines[-1])
    assert (report.rank, report.ending, report.exit_code) == (1, ending, code)
    assert report.text.splitlines()[-1] == text


# Python's own end would abort each of these processes: a thread returns to Python while that ends.
# They are forked, and not programs that start by themselves, to import torch once.
RACE = """
import atexit, ctypes, os, sys
atexit.register(ctypes.PyDLL(None).usleep, 1_500_000)  # the last thing; no other thread runs then
import threading
from datetime import timedelta
from torch.distributed import HashStore
from shardwise.elastic.program import run_program
from shardwise.elastic.rank import run_rank
from shardwise.elastic.world import World

def body(*_):
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    threading.Thread(target=store.get, args=("nothing",), daemon=True).start()

ends = (
    lambda: run_rank(World(0, 1, 0, 1), body),
    lambda: run_program(body),
    lambda: run_program(lambda: exit(body())),
)
children = []
for end in ends:
    children.append(os.fork())
    if not children[-1]:
        end()
        sys.exit()
os.write(1, repr([os.waitpid(child, 0)[1] for child in children]).encode())
os._exit(0)
"""


def test_a_thread_that_needs_python_at_the_end_does_not_abort_the_rank() -> None:
    """Neither of ours, nor of a program that returns, nor of one that exits."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-c", RACE]
    ended = subprocess.run(
        command, env={**os.environ, **world}, capture_output=True, check=False, timeout=120
    )
    assert ended.stdout == b"[0, 0, 0]", ended.stderr


# A thread that is no daemon, and that sends a signal once the rank waits for it.
WAITS = """
import threading, time
def wait():
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "_shutdown":
        time.sleep(0.01)
    os.kill(os.getpid(), 15)
    time.sleep(600)
threading.Thread(target=wait).start()
"""


def test_a_signal_ends_the_wait_for_threads_and_is_no_failure() -> None:
    command = [sys.executable, "-c", BODY.format(WAITS.strip().replace("\n", "\n    "))]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def test_a_rank_that_cannot_tell_where_it_is_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()  # where a file would be
    file = tmp_path / "report"
    file.touch()
    command = [sys.executable, "-c", BODY.format("pass")]
    subprocess.run(command, env={**os.environ, REPORT: str(file)}, check=True, timeout=60)
    assert file.read_bytes() == b"", "to ask would end it"


def test_without_a_launcher_every_rank_shows_its_own_error() -> None:
    command = [sys.executable, "-c", BODY.format("raise UserError('--lr: found 0')")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, "[rank 1] error: --lr: found 0\n")


def test_a_stage_is_told_from_a_report() -> None:
    assert [Stage.from_line(stage.value.encode()) for stage in Stage] == list(Stage)
    assert Stage.from_line(RankReport(0, Ending.USER, 2, "training").to_json().encode()) is None


def test_a_report_is_read_as_it_was_written() -> None:
    report = RankReport(2, Ending.FAILED, 1, "Traceback\n  naïve 汉字 \udcff", time=12.5)
    assert plain.read(RankReport, report.to_json().encode()) == report


def test_a_report_is_short_however_long_the_traceback() -> None:
    report = RankReport(0, Ending.FAILED, 1, "first\n" + "汉" * 10 * MAX_TEXT + "\nlast")
    line = report.to_json().encode()
    assert len(line) < 7 * MAX_TEXT
    text = plain.read(RankReport, line).text
    assert text.startswith("first")
    assert text.endswith("last")

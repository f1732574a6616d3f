"""Loops that save before they stop: on one rank, on ranks that agree, and for a host that joins."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise import GracefulStop
from shardwise.elastic.errors import Stopped
from shardwise.elastic.network import listening
from shardwise.elastic.world import PARENT_PID
from tests.programs import Program, shell_environment, start_program
from tests.waiting import wait_until

WAIT = 60.0  # seconds that anything may take on a busy machine


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is no rank."""
    for name in ("RANK", PARENT_PID):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_the_loop_has_saved(
    signum: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop() -> None:
        with GracefulStop() as stop:
            assert not stop.requested()
            signal.raise_signal(signum)
            assert stop.requested()
            assert stop.requested(), "it stays so"
            stop.exit("Stopped after step 2.")

    before = signal.getsignal(signum)
    with pytest.raises(SystemExit) as ended:
        loop()
    assert ended.value.code == 128 + signum
    assert capsys.readouterr().err == "Stopped after step 2.\n"
    assert signal.getsignal(signum) is before


def test_under_a_launcher_a_generation_may_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop() -> None:
        with GracefulStop() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested()
            stop.exit()

    monkeypatch.setenv(PARENT_PID, "1")
    with pytest.raises(Stopped) as ended:
        loop()
    assert (ended.value.signum, str(ended.value)) == (signal.SIGTERM, "Stopped by SIGTERM.")


@pytest.mark.usefixtures("alone")
def test_a_signal_after_the_last_step_lets_the_program_end() -> None:
    stop = GracefulStop()
    with stop:
        assert not stop.requested()
        signal.raise_signal(signal.SIGTERM)
    with stop:  # of two loops the second one stops
        assert stop.requested()


def test_a_rank_that_was_not_asked_does_not_exit() -> None:
    with GracefulStop() as stop, pytest.raises(RuntimeError, match="found no request to stop"):
        stop.exit()


def _steps(rank: int, world_size: int) -> tuple[int, str]:
    with GracefulStop() as stop:
        for step in range(1, 100):
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.requested():
                try:
                    stop.exit()
                except SystemExit as ended:
                    return step, str(ended.code)
    return 0, ""


def test_all_ranks_stop_after_the_same_step(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(_steps, 3, env={PARENT_PID: None}) == [(3, "143")] * 3


SCRIPT = """
import os, sys, time
from pathlib import Path
import shardwise

rank, size = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
folder, last = Path(sys.argv[1]), int(sys.argv[2])
saved, log = folder / f"saved-{rank}", folder / f"log-{rank}"
first = int(saved.read_text()) + 1 if saved.exists() else 1
with shardwise.GracefulStop() as stop:
    for step in range(first, last + 1):
        time.sleep(0.01)
        with log.open("a") as file:
            print(step, size, file=file)
        stopping = stop.requested()
        if stopping:
            saved.write_text(str(step))
            stop.exit(f"Stopped after step {step}, which is saved.")
        if size == "2" and (folder / "enough").exists():
            break
"""


def _start(folder: Path, *options: str) -> Program:
    (folder / "script.py").write_text(SCRIPT)
    words = ["-m", "shardwise", "run", *options, "script.py", str(folder), "100000"]
    return start_program(words, folder=folder, env=shell_environment())


def _logged(folder: Path) -> list[list[int]]:
    """The steps of rank 0, and over how many ranks each was made."""
    log = folder / "log-0"
    if not log.exists():
        return []
    return [[int(word) for word in line.split()] for line in log.read_text().splitlines()]


def test_a_script_saves_before_its_launcher_ends(tmp_path: Path) -> None:
    program = _start(tmp_path)
    wait_until(lambda: len(_logged(tmp_path)) > 2)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=WAIT)
    last = _logged(tmp_path)[-1][0]
    assert (program.returncode, out) == (128 + signal.SIGINT, "")
    assert err == f"Stopped after step {last}, which is saved.\n"
    assert (tmp_path / "saved-0").read_text() == str(last)


def test_processes_that_a_script_forks_end_when_it_terminates_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        """
import os, signal, time
import shardwise

def end_one():
    mine, its = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(its, b"up")
        time.sleep(10)
        os._exit(1)
    os.read(mine, 2)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

end_one()
with shardwise.GracefulStop():
    end_one()
"""
    )
    words = ["-m", "shardwise", "run", "script.py"]
    program = start_program(words, folder=tmp_path, env=shell_environment())
    out, err = program.communicate(timeout=WAIT)
    assert (program.returncode, out, err) == (0, "-15\n-15\n", "")


def test_a_host_joins_a_script_without_a_step_lost_or_made_twice(tmp_path: Path) -> None:
    with listening("127.0.0.1") as free:
        port = free.getsockname()[1]
    where = ["--nnodes", "1:2", "--rdzv", f"127.0.0.1:{port}", "--rdzv-timeout", "30"]
    first = _start(tmp_path, "--node-rank", "0", *where)
    wait_until(lambda: len(_logged(tmp_path)) > 2)
    second = _start(tmp_path, *where)
    wait_until(lambda: [2] in [line[1:] for line in _logged(tmp_path)])
    (tmp_path / "enough").touch()
    for host in (first, second):
        _, err = host.communicate(timeout=WAIT)
        assert host.returncode == 0, err
    steps = [step for step, _ in _logged(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    assert [size for _, size in _logged(tmp_path)] == sorted(size for _, size in _logged(tmp_path))

"""Functions as ranks: their values, their errors, and how they are interrupted."""

from __future__ import annotations

import enum
import io
import json
import linecache
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardwise
from shardwise import RankFailedError
from shardwise.elastic import call
from tests.programs import forked_agents, shell_environment, start_program
from tests.waiting import wait_until

WAIT = 60.0  # seconds that anything may take on a busy machine


@pytest.fixture
def _forked() -> Iterator[None]:
    """Fork agents and ranks. A test without this fixture shows what really starts."""
    with forked_agents():
        yield


forked = pytest.mark.usefixtures("_forked")


class Ends(enum.Enum):
    """How a rank ends."""

    BY_ERROR = "by an error"
    BY_ITSELF = "by itself"


def test_every_rank_returns_a_value_and_rank_0_prints(capsys: pytest.CaptureFixture[str]) -> None:
    class Found:  # nobody else can import it, as in a notebook
        def __init__(self, value: tuple[int, ...]) -> None:
            self.value = value

    def each_rank(offset: int) -> Found:
        rank = int(os.environ["RANK"])
        print("from rank", rank)
        return Found((rank + offset, int(os.environ["WORLD_SIZE"]), os.getppid()))

    found = shardwise.launch(each_rank, (10,), nproc=3)
    assert [type(each) for each in found] == [Found] * 3
    assert [each.value[:2] for each in found] == [(10, 3), (11, 3), (12, 3)]
    assert os.getpid() not in {each.value[2] for each in found}, "ranks belong to the agent"
    assert capsys.readouterr() == ("from rank 0\n", "")


@forked
def test_an_exception_is_raised_as_it_was_with_the_traceback_of_its_rank() -> None:
    class OwnError(ValueError):
        pass

    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise OwnError("why", 7)
        time.sleep(60)

    with pytest.raises(OwnError) as raised:
        shardwise.launch(fail, nproc=2)
    assert raised.value.args == ("why", 7)
    shown = "".join(traceback.format_exception(raised.value))
    assert "rank 1 of 2 failed:\nTraceback (most recent call last):\n" in shown
    assert f'File "{__file__}", line {fail.__code__.co_firstlineno + 2}, in fail' in shown
    assert "elastic/program.py" not in shown


@forked
def test_the_traceback_shows_lines_of_a_notebooks_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "def fail():\n    raise ValueError('why')\n"
    entry = (len(cell), None, cell.splitlines(keepends=True), "<cell 1>")
    monkeypatch.setitem(linecache.cache, "<cell 1>", entry)  # as IPython does
    defined: dict[str, Any] = {}
    exec(compile(cell, "<cell 1>", "exec"), defined)
    with pytest.raises(ValueError, match="why") as raised:
        shardwise.launch(defined["fail"])
    assert '"<cell 1>", line 2, in fail\n    raise ValueError' in str(raised.value.__cause__)


@forked
@pytest.mark.parametrize(
    ("signum", "message"),
    [
        (0, r"^rank 1 of 2 failed:\nTraceback.*TwoArgumentsError: 3$"),
        (signal.SIGKILL, r"^rank 1 of 2 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_ends_in_another_way_is_named(signum: int, message: str) -> None:
    class TwoArgumentsError(Exception):
        """It pickles, and cannot be unpickled."""

        def __init__(self, one: int, two: int) -> None:
            super().__init__(one + two)

    def each_rank() -> None:  # with nothing of this module, or each rank would import torch
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signum)
            raise TwoArgumentsError(1, 2)
        time.sleep(60)

    with pytest.raises(RankFailedError, match=f"(?s){message}"):
        shardwise.launch(each_rank, nproc=2)


@forked
def test_a_rank_without_a_value_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"^rank 0 of 1 ended without returning, with exit"):
        shardwise.launch(os._exit, (0,))


PATIENT = f"""
if sys.argv[1] == "agent":
    from shardwise.elastic import agent
    agent.SECONDARY = {WAIT}
"""


@forked
@pytest.mark.parametrize("ends", [Ends.BY_ERROR, Ends.BY_ITSELF])
def test_the_first_error_is_raised_not_its_consequence(
    tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 1 may start later than rank 0 fails, on a busy machine much later.
    *before, last = call._START.splitlines(keepends=True)
    monkeypatch.setattr(call, "_START", "".join([*before, PATIENT, last]))

    end = KeyError("the reason") if ends is Ends.BY_ERROR else SystemExit("the reason")

    def fail() -> None:
        if os.environ["RANK"] == "0":
            (tmp_path / "lost").touch()
            raise shardwise.PeerLostError("rank 1 is gone")
        while not (tmp_path / "lost").exists():
            time.sleep(0.01)
        raise end

    error = KeyError if ends is Ends.BY_ERROR else RankFailedError  # which rank 0 did not raise
    with pytest.raises(error, match="the reason"):
        shardwise.launch(fail, nproc=2)


@forked
def test_a_value_that_cannot_be_pickled_is_named() -> None:
    def each_rank() -> object:
        return {"losses": [1.0, (step for step in range(3))]}

    expected = r"rank 0 of 1 cannot return its value: value\['losses'\]\[1\], a generator: "
    with pytest.raises(TypeError, match=expected):
        shardwise.launch(each_rank)


@forked
def test_a_function_is_called_again_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def each_rank() -> tuple[int, str]:
        with (tmp_path / "attempts").open("a") as attempts:
            attempts.write("x")
        attempt = (tmp_path / "attempts").stat().st_size
        if attempt == 1:
            raise ValueError("once")
        return attempt, os.environ["SHARDWISE_LOST"]

    lost = "rank 0 failed: ValueError: once"
    assert shardwise.launch(each_rank, max_restarts=1) == [(2, lost)]
    err = capsys.readouterr().err
    assert "ValueError: once\n" in err
    assert err.endswith("restart    1 of 1, from what is saved\n")


def test_what_cannot_be_pickled_is_named_before_anything_starts() -> None:
    lock = threading.Lock()

    def uses() -> object:
        return lock

    for function, args, found in (
        (print, ({"a": [1, lock]},), r"args\[0\]\['a'\]\[1\], a _thread.lock"),
        (uses, (), "function's lock, a _thread.lock"),
        (print, (threading.Thread(),), r"args\[0\]\._started\._cond\._lock, a _thread"),
    ):
        with pytest.raises(TypeError, match=f"launch: ranks cannot have {found}"):
            call._pickled(function, args)


def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="function: found 3, expected a function"):
        shardwise.launch(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="args: found 'ab', expected a list or tuple"):
        shardwise.launch(print, "ab")
    with pytest.raises(ValueError, match="nproc: found 0, expected a whole number, 1 or more"):
        shardwise.launch(print, nproc=0)
    with pytest.raises(ValueError, match=r"nproc: found 100000, expected at most .*_MOST_RANKS"):
        shardwise.launch(print, nproc=100_000)
    with pytest.raises(ValueError, match="max_restarts: found -1"):
        shardwise.launch(print, max_restarts=-1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match=r"found RANK=0 .* if __name__ == \"__main__\""):
        shardwise.launch(print)


PROGRAM = """
import os, sys, time
import shardwise

def each_rank(folder):
    rank = os.environ["RANK"]
    try:
        with open(f"{folder}/up-{rank}", "w") as file:
            print(os.getpid(), file=file, flush=True)
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        open(f"{folder}/interrupted-{rank}", "w").close()
        raise

try:
    shardwise.launch(each_rank, (sys.argv[1],), nproc=2)
except KeyboardInterrupt:
    print("interrupted")
"""


def _ranks_of(folder: Path) -> list[psutil.Process]:
    wait_until(lambda: all((folder / f"up-{rank}").exists() for rank in range(2)))
    time.sleep(0.1)
    return [psutil.Process(int((folder / f"up-{rank}").read_text())) for rank in range(2)]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_caller(tmp_path: Path, signum: signal.Signals) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    words = [str(tmp_path / "program.py"), str(tmp_path)]
    program = start_program(words, folder=tmp_path, env=shell_environment())
    ranks = _ranks_of(tmp_path)
    program.send_signal(signum)
    out, _ = program.communicate(timeout=WAIT)
    gone, alive = psutil.wait_procs(ranks, timeout=WAIT)
    assert (len(gone), alive) == (2, [])
    if signum == signal.SIGINT:
        assert (program.returncode, out) == (0, "interrupted\n")
        assert (tmp_path / "interrupted-0").exists() and (tmp_path / "interrupted-1").exists()


def test_an_interrupt_while_the_agent_imports_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(call._START)
    (tmp_path / "path.json").write_text(json.dumps([str(tmp_path), *sys.path]))
    module = tmp_path / "shardwise" / "elastic" / "call.py"
    module.parent.mkdir(parents=True)
    (tmp_path / "shardwise" / "__init__.py").touch()
    module.write_text("import signal; signal.raise_signal(signal.SIGINT)")
    words = [*call._command(tmp_path), "agent"]
    ended = subprocess.run(words, capture_output=True, check=False, timeout=WAIT)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")


@forked
def test_a_notebook_sees_what_rank_0_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel has streams of its own, and calls launch in a thread if it likes."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    def each_rank() -> str:
        os.write(1, "größer\n".encode())
        os.write(2, b"50%\r")
        return "done"

    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(shardwise.launch(each_rank)))
    thread.start()
    thread.join(WAIT)
    assert (found, out.getvalue(), err.getvalue()) == ([["done"]], "größer\n", "50%\r")

"""``shardwise run``: scripts as ranks, how they end, and what their launcher reports."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.app.cli.run import ScriptConfig
from shardwise.elastic.network import listening
from shardwise.elastic.output import RankOutput, Shown
from shardwise.insight.schema.option import OptionError
from tests.cli.shell import call, refused
from tests.programs import Program, shell_environment, start_program
from tests.waiting import wait_until

Capture = pytest.CaptureFixture[str]
WAIT = 60.0  # seconds that anything may take on a busy machine


class Script:
    """A script of the user's in a folder of its own, run by ``shardwise run``."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder = folder
        self.file = folder / "my_script.py"
        head = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
        self.file.write_text(head + textwrap.dedent(source))

    def start(self, *options: str, arguments: tuple[str, ...] = ()) -> Program:
        words = ["-m", "shardwise", "run", *options, str(self.file), *arguments]
        return start_program(words, folder=self.folder, env=shell_environment())

    def run(self, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int | None, str, str]:
        """Return exit code, stdout and stderr."""
        program = self.start(*options, arguments=arguments)
        out, err = program.communicate(timeout=WAIT)
        return program.returncode, out, err

    def wait_for(self, *names: str) -> None:
        """Wait until the script has made these files."""
        wait_until(lambda: all((self.folder / name).exists() for name in names))


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Script]:
    """``script(source)`` makes one."""
    return lambda source: Script(tmp_path, source)


def test_a_script_finds_what_python_and_torchrun_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "my_script.py").write_text(
        """
import os, sys
from beside import NAME
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
if os.environ["RANK"] == "0":
    print(__name__, sys.argv, NAME, sys.modules["__main__"].NAME, "torch" in sys.modules)
with open(os.environ["RANK"], "w") as file:
    print(*(os.environ[name] for name in names), int(os.environ["MASTER_PORT"]) > 0, file=file)
"""
    )
    words = ["my_script.py", "--nproc", "3", "--", "-x", "a b"]
    ended = subprocess.run(  # as a shell does, with interpreters that have imported nothing
        [sys.executable, "-m", "shardwise", "run", "--nproc", "2", *words],
        cwd=tmp_path,
        env=shell_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"[rank 0] __main__ {words} beside beside False\n"
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert found == [
        [str(rank), "2", str(rank), "2", "0", "127.0.0.1", "True"] for rank in range(2)
    ]


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys; print(__name__, __package__, sys.argv)")
    words = ["-m", "shardwise", "run", "-m", "package.train", "--lr", "1"]
    program = start_program(words, folder=tmp_path, env=shell_environment())
    out, err = program.communicate(timeout=WAIT)
    argv = [str(package / "train.py"), "--lr", "1"]
    assert (program.returncode, out, err) == (0, f"__main__ package {argv}\n", "")


def test_what_each_rank_writes_is_shown_behind_its_number(
    script: Callable[[str], Script], tmp_path: Path
) -> None:
    mine = script(
        """
        print(f"out {rank}")
        print(f"without an end {rank}", end="")
        print(f"err {rank}", file=sys.stderr)
        """
    )
    code, out, err = mine.run("--nproc", "2", "--log-dir", "logs")
    assert code == 0
    lines = [
        f"[rank {rank}] {text} {rank}" for rank in range(2) for text in ("out", "without an end")
    ]
    assert (sorted(out.splitlines()), sorted(err.splitlines())) == (
        sorted(lines),
        ["[rank 0] err 0", "[rank 1] err 1"],
    )
    [job] = (mine.folder / "logs").iterdir()
    kept = {str(file.relative_to(job)): file.read_text() for file in job.rglob("*.log")}
    assert kept["attempt_0/1/stdout.log"] == "out 1\nwithout an end 1"
    assert kept["attempt_0/0/stderr.log"] == "err 0\n"


@pytest.mark.parametrize(
    ("tee", "local_rank", "shown"),
    [
        ("3", 5, ["stdout", "stderr"]),
        ("1", 0, ["stdout"]),
        ("0", 0, []),
        ("0:3,2:2", 0, ["stdout", "stderr"]),
        ("0:3,2:2", 1, []),
        ("0:3,2:2", 2, ["stderr"]),
    ],
)
def test_tee_says_which_streams_are_shown(tee: str, local_rank: int, shown: list[str]) -> None:
    assert Shown(tee).streams(local_rank) == shown


@pytest.mark.parametrize("tee", ["2:3", "0:1,0:2", "4", ""])
def test_what_tee_cannot_show_is_refused(tee: str) -> None:
    """A rank that is not here, or twice, would leave out what somebody waits for."""
    with pytest.raises(OptionError, match=f"--tee: found '{tee}', expected "):
        ScriptConfig(tee=tee).shown(processes=2)


def test_a_progress_bar_is_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    output = RankOutput(1, tmp_path, ["stderr"])
    for step in range(5):
        with (tmp_path / "stderr.log").open("a") as file:
            file.write(f"\rstep {step}")
        output.show()
        now += 1.5
    output.show_rest()
    output.close()
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"[rank 1] step {step}" for step in (1, 3, 4)]


SLEEP = "\nwhile True: time.sleep(0.05)\n"


def test_an_error_is_shown_from_where_the_script_begins(script: Callable[[str], Script]) -> None:
    mine = script("def fail():\n    raise ValueError('why')\nif rank == 1: fail()" + SLEEP)
    code, out, err = mine.run("--nproc", "2")
    assert (code, out) == (1, "")
    frames = [line.strip() for line in err.splitlines() if line.startswith("  File")]
    assert err.startswith("error: rank 1 of 2 failed:\nTraceback (most recent call last):\n")
    assert frames == [
        f'File "{mine.file}", line 5, in <module>',
        f'File "{mine.file}", line 4, in fail',
    ]
    assert err.endswith("ValueError: why\n")


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("sys.exit(3)", 3, "error: rank 1 of 2 failed:\nended with exit code 3\n"),
        ("sys.exit(2)", 2, "error: rank 1 of 2 ended with exit code 2\n"),
        ("sys.exit('no data')", 1, "error: rank 1 of 2 failed:\nno data\n"),
        ("os._exit(7)", 7, "error: rank 1 of 2 ended with exit code 7\n"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            128 + 9,
            "error: rank 1 of 2 was killed by SIGKILL (the system may have run out of memory)\n",
        ),
    ],
)
def test_a_rank_that_ends_otherwise_is_named(
    script: Callable[[str], Script], end: str, code: int, message: str
) -> None:
    assert script(f"if rank == 1: {end}" + SLEEP).run("--nproc", "2") == (code, "", message)


def test_sys_exit_of_0_is_no_failure_and_atexit_runs(script: Callable[[str], Script]) -> None:
    source = "import atexit\natexit.register(print, 'the end')\nsys.exit(0)"
    assert script(source).run() == (0, "the end\n", "")


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(3)", "1 / 0"])
def test_what_a_script_has_not_closed_is_written_and_its_threads_are_waited_for(
    script: Callable[[str], Script], end: str
) -> None:
    source = """
        import atexit, gzip, threading
        def write(name, seconds=0.0):
            time.sleep(seconds)
            sys.kept.append(open(name, "w"))
            sys.kept[-1].write("all of it")
        sys.kept = []
        write("plain")
        sys.kept.append(gzip.open("packed", "wt"))
        sys.kept[-1].write("all of it")
        threading.Thread(target=write, args=("thread", 0.4)).start()
        threading.Thread(target=sys.stdin.buffer.read, daemon=True).start()  # holds its lock
        atexit.register(write, "atexit")
    """
    mine = script(textwrap.dedent(source) + end)
    code, _, err = mine.run()
    assert code == {"sys.exit(3)": 3, "1 / 0": 1}.get(end, 0), err
    for name in ("plain", "thread", "atexit"):
        assert (mine.folder / name).read_text() == "all of it"
    assert gzip.decompress((mine.folder / "packed").read_bytes()) == b"all of it"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_output_that_cannot_be_written_has_pythons_exit_code(
    script: Callable[[str], Script],
) -> None:
    mine = script("sys.stdout = open('/dev/full', 'w')\nprint('lost')")
    code, _, err = mine.run()
    assert (code, err) == (120, "error: rank 0 of 1 ended with exit code 120\n")


def test_a_script_is_restarted_unless_its_command_line_is_wrong(
    script: Callable[[str], Script],
) -> None:
    mine = script(
        """
        with open(f"attempts-{rank}", "a") as attempts:
            attempts.write("x")
        if os.path.getsize(f"attempts-{rank}") == 1:
            sys.exit(int(sys.argv[1]))
        """
    )
    code, _, err = mine.run("--max-restarts", "2", arguments=("5",))
    assert (code, (mine.folder / "attempts-0").read_text()) == (0, "xx"), err
    assert "ended with exit code 5" in err
    assert "restart    1 of 2" in err
    (mine.folder / "attempts-0").unlink()
    code, _, err = mine.run("--max-restarts", "2", arguments=("2",))
    assert (code, (mine.folder / "attempts-0").read_text()) == (2, "x"), err


@pytest.mark.parametrize(
    ("signum", "caught"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "BaseException")]
)
def test_a_signal_is_what_python_makes_of_it(
    script: Callable[[str], Script], signum: signal.Signals, caught: str
) -> None:
    mine = script(
        f"""
        try:
            open(f"up-{{rank}}", "w").close()
            while True: time.sleep(0.01)
        except {caught}:
            open(f"caught-{{rank}}", "w").close()
            raise
        finally:
            open(f"finally-{{rank}}", "w").close()
        """
    )
    program = mine.start("--nproc", "2")
    mine.wait_for("up-0", "up-1")
    program.send_signal(signum)
    out, err = program.communicate(timeout=WAIT)
    assert (program.returncode, out, err) == (128 + signum, "", f"Stopped by {signum.name}.\n")
    mine.wait_for("caught-0", "caught-1", "finally-0", "finally-1")


def test_a_script_may_handle_signals_by_itself(script: Callable[[str], Script]) -> None:
    mine = script(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        open(f"up-{rank}", "w").close()
        while True: time.sleep(0.01)
        """
    )
    program = mine.start()
    mine.wait_for("up-0")
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=WAIT)
    assert (program.returncode, out, err) == (0, "", "")


def test_a_script_may_be_a_rank_as_recipes_are(script: Callable[[str], Script]) -> None:
    mine = script(
        """
        from shardwise.base.errors import UserError
        from shardwise.elastic.rank import run_rank
        from shardwise.elastic.world import find_world

        def body(world, signals):
            if world.rank == 1:
                raise UserError("--data: found none")
            while True: time.sleep(0.01)

        run_rank(find_world(), body)
        """
    )
    assert mine.run("--nproc", "2") == (2, "", "error: --data: found none\n")


def test_a_script_may_use_record_of_torch(script: Callable[[str], Script]) -> None:
    mine = script(
        """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            if rank == 1:
                raise ValueError("why")
            while True: time.sleep(0.01)

        main()
        """
    )
    code, _, err = mine.run("--nproc", "2")
    assert code == 1
    assert err.count("ValueError: why") == 1
    assert err.startswith("error: rank 1 of 2 failed:\nTraceback")


def test_a_plain_script_of_torch_meets_and_its_first_failure_is_named(
    script: Callable[[str], Script],
) -> None:
    """A rank notices a lost peer before its launcher has seen why that one was lost."""
    mine = script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        ones = torch.ones(())
        dist.all_reduce(ones)
        print(int(ones), flush=True)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        """
    )
    code, out, err = mine.run("--nproc", "3")
    assert (code, sorted(out.splitlines())) == (
        128 + signal.SIGKILL,
        [f"[rank {rank}] 3" for rank in range(3)],
    ), err
    assert "error: rank 1 of 3 was killed by SIGKILL" in err


def test_hosts_whose_scripts_differ_are_told(tmp_path: Path) -> None:
    with listening("127.0.0.1") as free:
        port = free.getsockname()[1]
    where = ["--nnodes", "1:2", "--rdzv", f"127.0.0.1:{port}", "--rdzv-timeout", "30"]
    hosts = []
    for name, source in (("a", "print(1, flush=True)\nimport time; time.sleep(60)"), ("b", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_script.py").write_text(source)
        own = ["--node-rank", "0"] if name == "a" else []
        words = ["-m", "shardwise", "run", *where, *own, "my_script.py"]
        hosts.append(start_program(words, folder=tmp_path / name, env=shell_environment()))
        if name == "a":
            assert hosts[0].stdout is not None
            assert hosts[0].stdout.readline() == "1\n"
    _, err = hosts[1].communicate(timeout=WAIT)
    assert hosts[1].returncode == 2
    assert "SCRIPT: found my_script.py with SHA-256 d4735e3a265e, expected my_script.py with" in err
    hosts[0].send_signal(signal.SIGTERM)
    _, err = hosts[0].communicate(timeout=WAIT)
    assert (
        err.count(f"warning: no token, so anyone who reaches 127.0.0.1:{port} may take part") == 1
    )
    assert hosts[0].returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing argument 'SCRIPT"),
        ("nowhere.py", "SCRIPT: found nowhere.py, which does not exist, expected a Python file"),
        (".", "SCRIPT: found ., which is not a file, expected a Python file"),
        ("--nprc 2 there.py", "No such option: --nprc"),
        ("--nproc 0 there.py", "--nproc: found 0, expected 1 or more"),
        ("-m there.py/x", "--module: found there.py/x, expected the name of a module"),
    ],
)
def test_mistakes_are_one_line(
    capsys: Capture, no_world: Path, arguments: str, message: str
) -> None:
    (no_world / "there.py").write_text("raise AssertionError('it was started')")
    assert refused(capsys, "run", *arguments.split()).startswith(f"error: {message}")


def test_a_script_that_cannot_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, no_world: Path
) -> None:
    (no_world / "there.py").write_text("")
    # An administrator may read every file.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)
    assert call("run", "there.py") == 2
    assert capsys.readouterr().err == (
        "error: SCRIPT: found there.py, which is not readable, expected a Python file\n"
    )


def test_a_rank_of_another_launcher_starts_no_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, no_world: Path
) -> None:
    (no_world / "there.py").write_text("")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "a")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert call("run", "there.py") == 2
    assert "found rank 1 of 2, expected no RANK" in capsys.readouterr().err


def test_a_module_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    words = ["-m", "shardwise", "run", "-m", "no.where"]
    program = start_program(words, folder=tmp_path, env=shell_environment())
    _, err = program.communicate(timeout=WAIT)
    assert program.returncode == 2
    assert err == "error: --module: found no.where, expected a module that Python can import\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("there.py --nproc 2", "note       --nproc is passed to there.py, and one process is"),
        ("there.py --nproc_per_node=2", "note       --nproc_per_node=2 is passed to there.py"),
        ("--nproc 2 there.py --nproc 2", ""),
        ("there.py --steps 2", ""),
    ],
)
def test_a_number_of_processes_that_the_script_gets_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, no_world: Path, words: str, told: str
) -> None:
    monkeypatch.setattr("shardwise.app.cli.run.run_job", lambda *job: 0)
    (no_world / "there.py").touch()
    assert call("run", *words.split()) == 0
    assert capsys.readouterr().err.startswith(told) if told else not capsys.readouterr().err

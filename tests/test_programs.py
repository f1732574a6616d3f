"""Programs of the tests behave like those of an interpreter of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.programs import Program, start_program

PROGRAM = """
import os, subprocess, sys, time
print(sys.argv[1:], os.environ.get("COLOR"), os.getcwd(), __name__)
print("to stderr", file=sys.stderr)
if sys.argv[1] == "children":
    command = [sys.executable, __file__, *sys.argv[2:]]
    print(subprocess.run(command, env={"COLOR": "blue"}, capture_output=True, text=True))
if sys.argv[1] == "raise":
    raise ValueError("as asked")
if sys.argv[1] == "wait":
    child = subprocess.Popen([sys.executable, __file__, "sleep"])
    print(child.pid, flush=True)
    sys.exit(child.wait() & 127)
if sys.argv[1] == "sleep":
    time.sleep(60)
sys.exit(int(sys.argv[1]) if sys.argv[1].isdecimal() else sys.argv[1])
"""


def started(folder: Path, *arguments: str) -> Program:
    (folder / "program.py").write_text(PROGRAM)
    return start_program(
        [str(folder / "program.py"), *arguments], folder=folder, env={"COLOR": "red"}
    )


@pytest.mark.parametrize("arguments", [("0",), ("3",), ("why",), ("raise",), ("children", "5")])
def test_it_prints_and_ends_as_in_an_interpreter(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    program = started(tmp_path, *arguments)
    found = *program.communicate(timeout=60), program.returncode
    real = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), *arguments],
        cwd=tmp_path,
        env={"COLOR": "red"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found[0], found[2]) == (real.stdout, real.returncode)
    assert found[1].splitlines()[0] == "to stderr"
    assert found[1].splitlines()[-1] == real.stderr.splitlines()[-1]


def test_its_children_are_its_own_and_signals_reach_them(tmp_path: Path) -> None:
    program = started(tmp_path, "wait")
    assert program.stdout is not None
    told = [program.stdout.readline() for _ in range(2)]
    [child] = psutil.Process(program.pid).children()
    assert child.pid == int(told[1])
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.05)
    os.kill(child.pid, signal.SIGTERM)
    assert program.wait(60) == -signal.SIGTERM & 127
    program.kill()  # which has ended
    program.close()


def test_killed_it_says_so(tmp_path: Path) -> None:
    program = started(tmp_path, "sleep")
    assert program.stdout is not None
    program.kill()
    assert program.wait(60) == -signal.SIGKILL
    program.close()


SIGNING = """
import hmac, ssl, subprocess, sys, threading

def sign():
    while True:
        hmac.digest(b"key", b"message", "sha256")

if len(sys.argv) > 1:
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    sys.exit()
for _ in range(2):
    threading.Thread(target=sign, daemon=True).start()
for _ in range(12):
    subprocess.run([sys.executable, __file__, "connect"], check=True, timeout=30)
"""


def test_what_is_forked_beside_threads_that_sign_can_connect_by_tls(tmp_path: Path) -> None:
    (tmp_path / "signing.py").write_text(SIGNING)
    program = start_program([str(tmp_path / "signing.py")], folder=tmp_path)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 0, err

"""A process that trains keeps what its steps free."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise.base.devices import MALLOC_VARIABLES, keep_freed_memory

# Takes and frees 60 MiB in pieces, as a step does, and prints the page faults of the later steps.
_STEPS = """
import resource, sys
from shardwise.base.devices import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
def step():
    pieces = [bytearray(size << 20) for size in (1, 4, 5, 20, 30)]
for _ in range(2):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _run(how: str, **env: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", _STEPS, how],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(sys.platform != "linux", reason="is about glibc")
def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    kept, faults = _run("keep")
    if kept == "False":
        pytest.skip("the C library is another")
    _, usual = _run("leave")
    assert faults < usual / 10, f"{faults} page faults, {usual} without"


@pytest.mark.parametrize("name", MALLOC_VARIABLES)
def test_what_the_user_has_set_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    assert keep_freed_memory() is False

"""A process that trains keeps what its steps free."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise.base.devices import MALLOC_VARIABLES, keep_freed_memory

# Takes and frees 60 MiB in pieces, as a step does, and prints the page faults of the later steps.
_STEPS = """
import resource
from shardwise.base.devices import keep_freed_memory
def step():
    pieces = [bytearray(size << 20) for size in (1, 4, 5, 20, 30)]
def faults():
    for _ in range(2):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), keep_freed_memory(), faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="is about glibc")
def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    clean = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", _STEPS], env=clean, capture_output=True, text=True, check=True
    )
    usual, kept, faults = done.stdout.split()
    if kept == "False":
        pytest.skip("the C library is another")
    assert int(faults) < int(usual) / 10, f"{faults} page faults, {usual} without"


@pytest.mark.parametrize("name", MALLOC_VARIABLES)
def test_what_the_user_has_set_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    assert keep_freed_memory() is False

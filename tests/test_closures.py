"""What a reader of each front door has to load, and could have to read: it only ever gets less."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

#: By front door: what a program does with it, and the lines and files of the package that are
#: loaded then. Lower them when they fall; a feature that needs more has to remove something.
DOORS = {
    "fully_shard": ("shardwise.fully_shard", 13659, 51),
    "FullyShardedDataParallel": ("shardwise.FullyShardedDataParallel", 16899, 61),
    "checkpoint.save": ("shardwise.fully_shard, shardwise.checkpoint.save", 19143, 74),
    "simulate": ("shardwise.simulate(print, 2)", 7409, 36),
    "timeline.record": ("shardwise.timeline.record", 7366, 33),
    "a training of a recipe": (
        "import shardwise.app.recipes.core.training, shardwise.app.recipes.lm",
        42950,
        177,
    ),
}

COUNT = """
import sys
files = {
    module.__file__
    for name, module in list(sys.modules.items())
    if name.partition(".")[0] == "shardwise" and module.__file__
}
print("LOADED", sum(len(open(file).read().splitlines()) for file in files), len(files))
sys.stdout.flush()
"""

#: Runs each in a process of its own that has loaded torch, which takes longest, and nothing else.
FORK = """
import json, os, sys, torch
for code in json.loads(sys.argv[1]).values():
    child = os.fork()
    if not child:
        exec(code, {})
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, tuple[int, int]]:
    """By front door: the lines and files that it loads, in a process that has only torch."""
    codes = {door: f"import shardwise\n{code}\n{COUNT}" for door, (code, *_) in DOORS.items()}
    result = subprocess.run(
        [sys.executable, "-c", FORK, json.dumps(codes)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = [line.split() for line in result.stdout.splitlines() if line.startswith("LOADED")]
    assert len(found) == len(DOORS), result.stderr
    return {
        door: (int(lines), int(files)) for door, (_, lines, files) in zip(DOORS, found, strict=True)
    }


@pytest.mark.parametrize("door", DOORS)
def test_a_front_door_loads_no_more_than_it_did(
    loaded: dict[str, tuple[int, int]], door: str
) -> None:
    _, most_lines, most_files = DOORS[door]
    lines, files = loaded[door]
    print(f"{door}: {lines} lines in {files} files, of {most_lines} in {most_files}")
    assert lines <= most_lines
    assert files <= most_files

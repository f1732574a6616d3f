"""What a reader of each front door has to load, and could have to read: it only ever gets less."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: By front door: what a program does with it, and the lines and files of the package that are
#: loaded then. Lower them when they fall; a feature that needs more has to remove something.
DOORS = {
    "fully_shard": ("shardwise.fully_shard", 13659, 51),
    "FullyShardedDataParallel": ("shardwise.FullyShardedDataParallel", 16899, 61),
    "checkpoint.save": ("shardwise.fully_shard, shardwise.checkpoint.save", 18875, 74),
    "checkpoint.load": ("shardwise.fully_shard, shardwise.checkpoint.load", 21181, 85),
    "simulate": ("shardwise.simulate(print, 2)", 7409, 36),
    "timeline.record": ("shardwise.timeline.record", 7366, 33),
    "a training of a recipe": (
        "import shardwise.app.recipes.core.training, shardwise.app.recipes.lm",
        42950,
        177,
    ),
}

_FORMATS = "shardwise.checkpoint.formats"
_READERS = tuple(f"{_FORMATS}.{name}" for name in ("archive", "dcp", "pickles", "rank_files"))
#: What is never loaded: checkpoints know no optimizer, and no format before there is a file of it.
NEVER = {
    "checkpoint.save": ("shardwise.optim", _FORMATS),
    "checkpoint.load": ("shardwise.optim", *_READERS),
}

COUNT = """
import sys
files = {
    module.__file__
    for name, module in list(sys.modules.items())
    if name.partition(".")[0] == "shardwise" and module.__file__
}
print("LOADED", sum(len(open(file).read().splitlines()) for file in files), len(files))
print("NAMES", *(name for name in sys.modules if name.partition(".")[0] == "shardwise"))
"""


@pytest.mark.parametrize("door", DOORS)
def test_a_front_door_loads_no_more_than_it_did(door: str) -> None:
    code, most_lines, most_files = DOORS[door]
    result = subprocess.run(
        [sys.executable, "-c", f"import shardwise\n{code}\n{COUNT}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    counts, _, names = result.stdout.rpartition("LOADED")[2].partition("NAMES")
    lines, files = map(int, counts.split())
    print(f"{door}: {lines} lines in {files} files, of {most_lines} in {most_files}")
    assert lines <= most_lines
    assert files <= most_files
    assert not [name for name in names.split() if name.startswith(NEVER.get(door, ()))]

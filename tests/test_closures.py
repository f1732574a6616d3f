"""What a reader of each front door has to load, and could have to read: it only ever gets less."""

from __future__ import annotations

import json
import subprocess
import sys

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

# Importing torch takes seconds: one process does, and every door opens in a fork of it.
OPEN = """
import json, os, sys, torch, transformers
for name, (code, *_) in json.loads(sys.argv[1]).items():
    if os.fork():
        assert os.wait()[1] == 0, name
        continue
    exec(f"import shardwise\\n{code}")
    files = {
        module.__file__
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "shardwise" and module.__file__
    }
    lines = sum(len(open(file).read().splitlines()) for file in files)
    print("LOADED", json.dumps([name, lines, len(files)]), flush=True)
    os._exit(0)
"""


def test_a_front_door_loads_no_more_than_it_did() -> None:
    result = subprocess.run(
        [sys.executable, "-c", OPEN, json.dumps(DOORS)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    said = [line for line in result.stdout.splitlines() if line.startswith("LOADED")]
    loaded = {name: found for name, *found in map(json.loads, (s[7:] for s in said))}
    assert loaded.keys() == DOORS.keys()
    for door, (_, most_lines, most_files) in DOORS.items():
        lines, files = loaded[door]
        print(f"{door}: {lines} lines in {files} files, of {most_lines} in {most_files}")
        assert lines <= most_lines, door
        assert files <= most_files, door

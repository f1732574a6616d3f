"""What programs load: each is a fork of one new process, which has imported torch and no more.

    loaded_after({"mine": "import shardwise; shardwise.fully_shard"})["mine"]["shardwise"]

Importing torch takes seconds, and programs that are started one by one each do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

_FORKS = """
import json, os, sys, torch
for name, code in json.loads(sys.argv[1]).items():
    if os.fork():
        if os.wait()[1]:
            sys.exit(f"{name} has failed")
        continue
    exec(code, {"__name__": "__main__"})
    found = {each: getattr(module, "__file__", None) for each, module in sys.modules.items()}
    print("LOADED", json.dumps([name, found]), flush=True)
    os._exit(0)
"""


def loaded_after(programs: Mapping[str, str]) -> dict[str, dict[str, str | None]]:
    """Run programs, and return the modules that each has loaded, with their files.

    Args:
        programs: what they are, by names of the caller's.
    """
    ended = subprocess.run(
        [sys.executable, "-c", _FORKS, json.dumps(programs)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stdout.splitlines() if line.startswith("LOADED ")]
    found = dict(json.loads(line.removeprefix("LOADED ")) for line in said)
    assert found.keys() == programs.keys()
    return found

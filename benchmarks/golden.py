"""The losses of each release, by version of torch: whether an upgrade changes what is computed.

    python benchmarks/golden.py            compare this source with the newest release
    python benchmarks/golden.py --write    keep its losses, as those of its version

Each training is one of ``shardwise train lm`` on two processes, on text that is the same
everywhere. Processors and versions of torch round differently, so losses are compared to one part
in a thousand, with those of the same version of torch if they are kept, else with any.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from shardwise import __version__

FOLDER = Path(__file__).with_name("golden")
STEPS, EVERY = 60, 10
TOLERANCE = 1e-3
TRAININGS = {
    "fp32": (),
    "bf16": ("--param-dtype", "bf16"),
    "zero2, accumulated": ("--strategy", "grad-op", "--accumulate", "2"),
    "muon": ("--optimizer", "muon"),
    "adamw8bit in backward": ("--optimizer", "adamw8bit", "--step-in-backward"),
}


def losses(options: tuple[str, ...]) -> list[float]:
    """Train, and return the loss of every tenth step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["shard", "unshard", "reshard", "gather", "reduce", "scatter", "rank", "mesh"]
        text = " ".join(random.Random(0).choices(words, k=20_000))
        (folder / "text.txt").write_text(text)
        command = ("train", "lm", "--nproc", "2", "--data", str(folder / "text.txt"))
        size = ("--steps", str(STEPS), "--seq-length", "64", "--lr", "1e-3")
        where = ("--out", str(folder / "run"), "--log-every", str(EVERY))
        line = (sys.executable, "-m", "shardwise", *command, *size, *where, *options)
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        metrics = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    found = {each["step"]: each["loss"] for each in map(json.loads, metrics) if "loss" in each}
    return [round(found[step], 6) for step in range(EVERY, STEPS + 1, EVERY)]


def differences(found: dict[str, list[float]], kept: dict[str, list[float]]) -> dict[str, float]:
    """Return the largest difference of each training, as a share of the loss that was kept."""
    return {
        name: max(abs(a / b - 1) for a, b in zip(found[name], kept[name], strict=True))
        for name in kept
    }


def main() -> int:
    """Compare or keep losses; return the exit code."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--write", action="store_true", help="keep the losses")
    writes = options.parse_args().write
    torchs = torch.__version__.partition("+")[0]
    found = {name: losses(each) for name, each in TRAININGS.items()}
    if writes:
        path = FOLDER / f"{__version__}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**kept, torchs: found}, indent=1, sort_keys=True) + "\n")
        return 0
    path = max(FOLDER.glob("*.json"), key=lambda each: tuple(map(int, each.stem.split("."))))
    releases = json.loads(path.read_text())
    other = torchs if torchs in releases else next(iter(releases))
    failed = 0
    for name, off in differences(found, releases[other]).items():
        failed += (is_off := not off <= TOLERANCE)
        print(f"{name:24} {off:.1e} from {path.stem} on torch {other}{'  FAILS' * is_off}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

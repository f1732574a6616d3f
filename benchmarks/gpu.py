"""The first ten minutes on a machine with GPUs: tests, speed, memory and checks, part by part.

    python benchmarks/gpu.py                  # or make gpu
    python benchmarks/gpu.py --only tests,steps
    python benchmarks/gpu.py --dry            # every part on CPUs, at sizes that say nothing

Every part is a process of its own with a time limit. It writes ``PART.log`` into the folder
``--out`` and, when a case ends, a line of ``PART.jsonl``. A part that fails, hangs or dies leaves
these, and the next part begins. ``report.json`` in the same folder has all parts, in the form that
``report.py`` puts into the documentation.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from _gpu_parts import PARTS, Cases, Part, Setup, environment, shortened
from _gpu_tables import gpu_tables, last_line
from _options import end, one_of, positive_int
from _report import ROOT, document, save, wide_console

#: A part writes its results before its limit kills it, if it can.
MARGIN_S = 15
#: No part begins with less time than that left.
SHORTEST_S = 20


def watch(command: list[str], part: str, seconds: float, out: Path) -> dict[str, Any]:
    """Run a part as a process, and end it after its time; return its results.

    Args:
        command: the process.
        part: the name of the part.
        seconds: after which it is killed, with all processes that it has started.
        out: the folder of its files, which are made anew.
    """
    path, log = out / f"{part}.jsonl", out / f"{part}.log"
    path.write_text("")
    begun = time.monotonic()
    status, error = "timed out", f"not over after {seconds:.0f} s"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            said = log.read_text(errors="replace")
            status, error = "died", shortened(f"it ended with exit code {code}:\n{said}")
            if code == 0:
                status, error = "done", ""
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    whole = path.read_text().split("\n")[:-1]  # what is behind the last line was cut off
    cases = [json.loads(line) for line in whole]
    failed = [case["key"] for case in cases if case["error"] is not None]
    if status == "done" and failed:
        status, error = "failed", f"cases failed: {', '.join(failed)}"
    took = time.monotonic() - begun
    return {"part": part, "status": status, "seconds": took, "error": error or None, "cases": cases}


def run_all(
    parts: list[Part],
    budget: float,
    watched: Callable[[Part, float], dict[str, Any]],
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Run parts, one after the other; yield their results.

    Args:
        parts: in this order.
        budget: seconds for all of them.
        watched: runs a part that may take some seconds.
        say: tells people how each part ended.
    """
    begun = time.monotonic()
    for part in parts:
        seconds = min(part.seconds, budget - (time.monotonic() - begun))
        if seconds < min(SHORTEST_S, part.seconds):
            over = "the time of all parts was over"
            found: dict[str, Any] = {"part": part.name, "status": "not begun", "seconds": 0.0}
            found |= {"error": over, "cases": []}
        else:
            found = watched(part, seconds)
        said = "" if found["status"] == "done" else f": {last_line(found['error'])}"
        say(f"{part.name:12} {found['status']}, {found['seconds']:.0f} s{said}")
        yield found


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="parts: " + "; ".join(f"{p.name}: {p.question}" for p in PARTS.values()),
    )
    add = made.add_argument
    add("--only", type=one_of(*PARTS), default=list(PARTS), help="some of the parts: a,b")
    add("--out", type=Path, help="folder of the results (runs/gpu; dry: runs/gpu-dry)")
    add("--dry", action="store_true", help="on CPUs: show that every part starts")
    add("--budget", type=positive_int, default=600, help="seconds for all parts (600)")
    add("--part", choices=PARTS, help="measure one part in this process")
    add("--seconds", type=float, default=600, help="with --part: how long it may take")
    return made.parse_args()


def main() -> int:
    options = _options()
    if not options.dry and not torch.cuda.is_available():
        print(
            "gpu.py measures on GPUs, and torch finds none here. To try all parts on CPUs, at "
            "sizes that say nothing: make gpu DRY=1",
            file=sys.stderr,
        )
        return 2
    out: Path = options.out or ROOT / "runs" / ("gpu-dry" if options.dry else "gpu")
    out.mkdir(parents=True, exist_ok=True)
    if options.part:
        setup = Setup.dry() if options.dry else Setup.of_gpus()
        deadline = time.monotonic() + options.seconds - MARGIN_S
        PARTS[options.part].measure(setup, Cases(out / f"{options.part}.jsonl", deadline))
        return 0

    def watched(part: Part, seconds: float) -> dict[str, Any]:
        made = [sys.executable, str(Path(__file__).resolve()), "--part", part.name]
        made += ["--out", str(out), "--seconds", str(seconds), *(["--dry"] if options.dry else [])]
        return watch(made, part.name, seconds, out)

    facts = environment("cpu" if options.dry else "cuda")
    missing = [name for name, version in facts["packages"].items() if version is None]
    print(f"{facts['gpu'] or 'CPUs'}, torch {facts['torch']}; results in {out}", flush=True)
    if not options.dry:
        print(f"NCCL {facts['nccl']}; ranks share a GPU by {facts['sharing']}", flush=True)
    if missing:
        print(f"not installed: {', '.join(missing)}", flush=True)
    content = document("gpu", [])
    content = {**content, "machine": {**content["machine"], **facts}, "parts": []}
    chosen = [PARTS[name] for name in PARTS if name in options.only]
    for found in run_all(chosen, options.budget, watched, lambda text: print(text, flush=True)):
        content["parts"].append(found)
        save(out / "report.json", content)  # whatever comes next
    tables = gpu_tables(content)
    content["tables"] = [dataclasses.asdict(table) for table in tables]
    save(out / "report.json", content)
    console = wide_console() if find_spec("rich") else None
    for table in tables:
        print(f"{table.markdown()}\n") if console is None else table.show(console)
    return 0 if all(part["status"] == "done" for part in content["parts"]) else 1


if __name__ == "__main__":
    end(main)

"""The first ten minutes on a machine with GPUs: tests, speed, memory and checks, part by part.

    python benchmarks/gpu.py                  # or make gpu
    python benchmarks/gpu.py --only tests,steps
    python benchmarks/gpu.py --dry            # every part on CPUs, at sizes that say nothing

Every part is a process of its own with a time limit, and writes a JSON file of its name into the
folder ``--out`` as it goes. A part that fails, hangs or dies says so in its file, and the next part
begins. The same command again measures what is missing: parts that are done are left alone, and of
the others only the cases that failed or are missing run again. ``report.json`` in the same folder
has all parts, in the form that ``report.py`` puts into the documentation.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _gpu_journal import Journal, end_badly, read
from _gpu_parts import PARTS, Part, Setup, environment
from _gpu_tables import gpu_tables, last_line
from _options import one_of, positive_int
from _report import ROOT, document, save, wide_console
from _worlds import stop_server

#: A part writes its results before its limit kills it, if it can.
MARGIN_S = 15
#: No part begins with less time than that left.
SHORTEST_S = 20
#: What must not differ between the parts of a folder.
SAME = ("device", "gpu", "torch")


def run_part(part: Part, setup: Setup, out: Path, seconds: float) -> int:
    """Measure one part in this process; return the exit code."""
    journal = Journal(
        *(_file(out, part.name), part.name, environment(setup.device)),
        deadline=time.monotonic() + seconds - MARGIN_S,
    )
    part.measure(setup, journal)
    return 0 if journal.end() else 1


def watch(command: list[str], seconds: float, path: Path, part: str) -> None:
    """Run a part as a process, end it after its time, and note how it ended.

    Args:
        command: the process.
        seconds: after which it is killed, with all processes that it has started.
        path: the JSON file of the part.
        part: the name of the part.
    """
    log = path.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            end_badly(path, part, "timed out", f"not over after {seconds:.0f} s")
            return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = read(path)
    if found is None or found["status"] == "running":
        said = log.read_text(errors="replace")
        end_badly(path, part, "died", f"it ended with exit code {code}:\n{said}")


def run_all(
    parts: list[Part],
    out: Path,
    budget: float,
    command: Callable[[Part, float], list[str]],
    say: Callable[[str], None],
) -> bool:
    """Run the parts that are not done, one after the other.

    Args:
        parts: in this order.
        out: the folder of their results.
        budget: seconds for all of them.
        command: the process of a part that may take some seconds.
        say: tells people how each part ended.

    Returns:
        Whether all parts are done.
    """
    begun = time.monotonic()
    complete = True
    for part in parts:
        path = _file(out, part.name)
        if _status(path) == "done":
            say(f"{part.name:12} done before")
            continue
        seconds = min(part.seconds, budget - (time.monotonic() - begun))
        if seconds < min(SHORTEST_S, part.seconds):
            say(f"{part.name:12} not begun: the time is over; the same command goes on from here")
            complete = False
            continue
        watch(command(part, seconds), seconds, path, part.name)
        status = _status(path)
        content = read(path) or {}
        complete &= status == "done"
        took = content.get("seconds", 0.0)
        said = "" if status == "done" else f": {last_line(content.get('error'))}"
        say(f"{part.name:12} {status}, {took:.0f} s{said}")
    return complete


def collect(out: Path) -> dict[str, Any]:
    """Return the results of all parts as one document."""
    found = [content for name in PARTS if (content := read(_file(out, name))) is not None]
    content = document("gpu", [])
    facts: dict[str, Any] = next((p["environment"] for p in found if p["environment"]), {})
    return {**content, "machine": {**content["machine"], **facts}, "parts": found}


def check_folder(out: Path, facts: dict[str, Any]) -> None:
    """Check that a folder holds results of this machine only.

    Raises:
        ValueError: it holds others.
    """
    for name in PARTS:
        content = read(_file(out, name)) or {}
        environment_before = content.get("environment") or facts
        for what in SAME:
            before, now = environment_before.get(what), facts.get(what)
            if before != now:
                raise ValueError(
                    f"{out} holds results of another {what}: found {before}, expected {now}; "
                    "choose another folder with --out"
                )


def _file(out: Path, name: str) -> Path:
    return out / f"{name}.json"


def _status(path: Path) -> str:
    content = read(path)
    return "missing" if content is None else str(content["status"])


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
    add("--again", action="store_true", help="measure parts again that are done")
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
    setup = Setup.dry() if options.dry else Setup.of_gpus()
    if options.part:
        return run_part(PARTS[options.part], setup, out, options.seconds)
    out.mkdir(parents=True, exist_ok=True)
    facts = environment(setup.device)
    try:
        check_folder(out, facts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = [PARTS[name] for name in options.only]
    if options.again:
        for part in chosen:
            _file(out, part.name).unlink(missing_ok=True)

    def command(part: Part, seconds: float) -> list[str]:
        made = [sys.executable, str(Path(__file__).resolve()), "--part", part.name]
        made += ["--out", str(out), "--seconds", str(seconds)]
        return [*made, "--dry"] if options.dry else made

    missing = [name for name, version in facts["packages"].items() if version is None]
    print(f"{facts['gpu'] or 'CPUs'}, torch {facts['torch']}; results in {out}", flush=True)
    if not options.dry:
        print(f"NCCL {facts['nccl']}; ranks share a GPU by {facts['sharing']}", flush=True)
    if missing:
        print(f"not installed: {', '.join(missing)}", flush=True)
    complete = run_all(chosen, out, options.budget, command, lambda text: print(text, flush=True))
    content = collect(out)
    save(out / "report.json", content)
    show(content)
    return 0 if complete else 1


def show(content: dict[str, Any]) -> None:
    """Print the tables: drawn where rich is installed, as Markdown elsewhere."""
    tables = gpu_tables(content)
    try:
        console = wide_console()
    except ImportError:
        print("\n\n".join(table.markdown() for table in tables))
        return
    for table in tables:
        table.show(console)


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()

"""The parts of ``gpu.py``: what each asks, how long it may take, and how it finds out."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from _contenders import Case
from _devices import Sharing, nccl_version
from _gpu_checks import GraphWorker, LossWorker, ProbeWorker, SanitizedWorker
from _models import numel
from _report import ROOT, machine
from _turns import Pace, mean_losses, play_steps, transposed
from _worlds import World, WorldError
from shardwise.frontends.strategies import Strategy
from shardwise.insight.planning.memory import memory

#: Bytes of a parameter at rest and of its gradient, in bf16 with fp32 masters and AdamW.
_BYTES = {"ours": 16, "fsdp2": 16, "ddp": 22}
#: Of a process: CUDA's context and its libraries' workspaces; activations and logits.
_ACTIVATIONS = 4 * 2**30
#: A median of fewer says too little: such a case counts as failed.
FEWEST_ROUNDS = 5
#: Of the text of an error.
_LONGEST = 4000
_PACE = Pace(rounds=7, steps=5, warmup=5)
PEERS = ["ours", "fsdp2", "ddp"]
TESTS = (
    "tests/gpu/test_memory.py",
    "tests/gpu/test_training.py",
    "tests/gpu/test_around.py",
    "tests/gpu/test_transport.py",
)
#: Packages that a part uses, beside torch.
PACKAGES = ("transformers", "pytest", "pytest_timeout", "rich", "xxhash", "triton")


@dataclass(frozen=True)
class Setup:
    """Where a run measures, and at what size; by default on the GPUs of this machine.

    Attributes:
        gpus: the number of GPUs, over which ranks are dealt; a dry run acts as if there were one.
        memory: bytes of one; 0 on CPUs, where models are small.
        device: ``"cuda"``, or ``"cpu"`` for a dry run.
        pace: of training steps.
        small: the model, a key of ``_models.PRESETS``, whose step is short.
        large: the model that fills a GPU's units.
        ladder: models from small to large, of which the largest that fits is measured.
        tokens: of a sequence; each rank trains on one in each step.
        compiler: backend of ``torch.compile``.
        host_memory: where offloaded shards are: ``"pinned"`` or ``"pageable"``.
        groups: tiny groups of the model that shows host overhead.
        long: steps of the training whose losses are compared.
    """

    gpus: int
    memory: int
    device: str = "cuda"
    pace: Pace = _PACE
    small: str = "34m"
    large: str = "400m"
    ladder: tuple[str, ...] = ("150m", "400m", "1b", "3b", "6b")
    tokens: int = 2048
    compiler: str = "inductor"
    host_memory: str = "pinned"
    groups: int = 64
    long: int = 1000

    @classmethod
    def of_gpus(cls) -> Setup:
        """Measure on the GPUs of this machine."""
        return cls(torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory)

    @classmethod
    def dry(cls) -> Setup:
        """Start every part on CPUs, at sizes that say nothing."""
        return cls(
            gpus=1,
            memory=0,
            device="cpu",
            pace=Pace(rounds=2, steps=1, warmup=1),
            small="tiny",
            large="tiny",
            ladder=("tiny",),
            tokens=16,
            compiler="aot_eager",
            host_memory="pageable",
            groups=3,
            long=10,
        )

    @property
    def is_dry(self) -> bool:
        """Whether nothing that is measured says anything."""
        return self.device == "cpu"

    def case(self, **changes: Any) -> Case:
        """Return a training in bf16 over all GPUs, with some settings changed."""
        case = Case(self.gpus, self.small, "bf16", 3, self.tokens, self.device)
        return dataclasses.replace(case, **changes)

    def holds(self, case: Case, names: list[str]) -> bool:
        """Whether contenders fit beside each other."""
        ranks = -(-case.ranks // self.gpus)  # on one GPU
        shares = {name: 1 if name == "ddp" else case.ranks for name in names}
        state = sum(_BYTES[name] * case.numel / shares[name] for name in names)
        needs = ranks * (state + len(names) * _ACTIVATIONS)
        return not self.memory or needs < 0.8 * self.memory

    def largest(self) -> str:
        """Return the largest model that a sharded contender can train on one GPU, alone."""
        room = (self.memory or math.inf) - _ACTIVATIONS
        fit = [name for name in self.ladder if _BYTES["ours"] * numel(name) < room]
        return fit[-1] if fit else self.ladder[0]


class Cases:
    """What a part has found so far, a line of a file for each case, written when it ends.

    So a part that is killed leaves what it has measured.

    Args:
        path: the file.
        deadline: when to stop measuring, as ``time.monotonic()`` counts.
    """

    def __init__(self, path: Path, deadline: float) -> None:
        self.deadline = deadline
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}

    def case(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measure a case, once. An error is a result, too.

        Args:
            key: the name of the case, unique in its part.
            measure: returns plain data; an entry ``"error"`` says that the case has failed.

        Returns:
            What is known of the case.
        """
        if key in self._found:
            return self._found[key]
        begun = time.monotonic()
        found: dict[str, Any] = {"key": key, "error": None}
        if begun > self.deadline:
            found["error"] = "not begun: the time of this part was over"
        else:
            try:
                found |= measure()
            except Exception:
                found["error"] = shortened(traceback.format_exc())
        self._found[key] = found | {"case_seconds": time.monotonic() - begun}
        with self._path.open("a") as file:
            file.write(json.dumps(self._found[key]) + "\n")
        return self._found[key]


def shortened(text: str) -> str:
    """Return the end of a long text, which says most."""
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST:]}"


@dataclass(frozen=True)
class Part:
    """One of the questions of ``gpu.py``.

    Attributes:
        name: as the command line and the JSON call it.
        question: what it finds out.
        seconds: how long it may take on one GPU.
        measure: finds out, case by case.
    """

    name: str
    question: str
    seconds: int
    measure: Callable[[Setup, Cases], None]


# -- environment ----------------------------------------------------------------------------------


def environment(device: str) -> dict[str, Any]:
    """Describe what the figures depend on."""
    facts: dict[str, Any] = machine() | {"device": device}
    facts["revision"] = _line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    facts["packages"] = {name: _version(name) for name in PACKAGES}
    if device == "cuda":
        facts["gpus"] = torch.cuda.device_count()
        facts["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, nccl_version())) or None
        facts["sharing"] = Sharing.of(nccl_version()).value
        facts["driver"] = _line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return None


def _line(*command: str) -> str | None:
    """Return the first line that a program prints; ``None`` if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None


def _environment(setup: Setup, cases: Cases) -> None:
    cases.case("machine", lambda: environment(setup.device))
    cases.case("one rank", lambda: _probe(setup, ranks=1))


def _probe(setup: Setup, ranks: int, backend: str | None = None) -> dict[str, Any]:
    """Start some ranks, and let them sum something on the device."""
    where: dict[str, Any] = {"device": setup.device, "backend": backend, "timeout": 60}
    with World("probe", ranks, ProbeWorker, setup.device, **where) as world:
        found = world.call("summed")
    if found != [ranks] * ranks:
        raise WorldError(f"the sum of {ranks} ones is {found}")
    return {"ranks": ranks, "backend": backend}


# -- tests ----------------------------------------------------------------------------------------


def _tests(setup: Setup, cases: Cases) -> None:
    if setup.is_dry:
        # One that is skipped without a GPU. `make test` runs the others on CPUs.
        cases.case("pytest", lambda: _pytest(TESTS[0], "-k", "no_step_synchronizes"))
        return
    for path in TESTS:
        cases.case(path, partial(_pytest, path))


def _pytest(*chosen: str) -> dict[str, Any]:
    """Run tests in a process of their own.

    What this project asks of its own environment, such as plugins, does not hold here: warnings do
    not fail a test, and no plugin is needed. Tests run beside each other where pytest-xdist is.
    """
    parallel = ["-n", str(min(4, os.cpu_count() or 1))] if _version("pytest_xdist") else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=", "-o", "filterwarnings=", *parallel, *chosen]
        done = subprocess.run(
            [*command, f"--junitxml={report}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}")
        return read_report(report) | {
            "command": " ".join(command[1:]),
            "output": done.stdout[-4000:],
        }


def read_report(path: Path) -> dict[str, Any]:
    """Count the outcomes of tests, from a file in JUnit's format, and name those that failed."""
    found: dict[str, Any] = {"passed": 0, "skipped": 0, "failures": {}}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        bad = next((each for each in case if each.tag in ("failure", "error")), None)
        if bad is not None:
            name = f"{case.get('classname')}.{case.get('name')}"
            found["failures"][name] = (bad.text or bad.get("message") or "")[-2000:]
        elif case.find("skipped") is not None:
            found["skipped"] += 1
        else:
            found["passed"] += 1
    return found


# -- steps ----------------------------------------------------------------------------------------


def planned_peak(case: Case) -> int | None:
    """Return the bytes at the peak of a step that ``shardwise plan`` expects on a rank of ours.

    ``None`` where plans do not say it: for compiled blocks, and for shards on the host.
    """
    if case.compiler or case.offload:
        return None
    strategy = Strategy.FULL_SHARD if case.zero == 3 else Strategy.SHARD_GRAD_OP
    return memory(case.rehearsed(f"dp={case.ranks}", strategy)).peak


def _turns(
    setup: Setup,
    cases: Cases,
    case: Case,
    names: list[str] | None = None,
    backend: str | None = None,
) -> None:
    names = names or PEERS

    def play() -> dict[str, Any]:
        found = play_steps(
            *(case, names, setup.pace),
            is_resident=setup.holds(case, names),
            backend=backend,
            timeout=120,
            deadline=cases.deadline,
        )
        rounds = len(next(iter(found["contenders"].values())))
        error = found["errors"].get("ours")
        if error is None and rounds < min(FEWEST_ROUNDS, setup.pace.rounds):
            error = f"only {rounds} rounds: the time of this part was over"
        moved_by = backend or ("nccl" if case.device == "cuda" else "gloo")
        return {**found, "backend": moved_by, "error": error, "planned_peak": planned_peak(case)}

    cases.case(case.label(), play)


def _steps(setup: Setup, cases: Cases) -> None:
    compiled: dict[str, Any] = {"compiler": setup.compiler}
    large, recomputed = {"params": setup.large}, {"recomputes": True}
    asked = [{}, {"zero": 2}, compiled | recomputed]
    if not setup.is_dry:
        asked += [large, compiled, recomputed, large | compiled, large | recomputed]
    for changes in asked:
        _turns(setup, cases, setup.case(**changes))


def _largest(setup: Setup, cases: Cases) -> None:
    # Every turn starts its processes anew, so there are few steps in one.
    pace = dataclasses.replace(setup.pace, rounds=min(setup.pace.rounds, 5), warmup=2)
    case = setup.case(params=setup.largest(), recomputes=True)
    _turns(dataclasses.replace(setup, pace=pace), cases, case)


def _overhead(setup: Setup, cases: Cases) -> None:
    from overhead import play

    options = argparse.Namespace(
        transport="auto",
        groups=setup.groups,
        build=4 * setup.groups,
        rounds=setup.pace.rounds,
        steps=4 * setup.pace.steps,
    )
    cases.case("1 rank", lambda: play(1, options, setup.device))
    if setup.gpus > 1:
        cases.case(f"{setup.gpus} ranks", lambda: play(setup.gpus, options, setup.device))


def _losses(setup: Setup, cases: Cases) -> None:
    short = min(setup.tokens, 256)
    for ranks, params, tokens, steps in (
        (1, "tiny", short, setup.long),
        (1, setup.large, setup.tokens, setup.long // 10),
        (2, "tiny", short, setup.long),
        (4, "tiny", short, setup.long),
    ):
        case = setup.case(ranks=ranks, params=params, tokens=tokens)
        backend = _backend(setup, cases, ranks)
        cases.case(case.label(), partial(_trained, case, steps, backend))


def _trained(case: Case, steps: int, backend: str | None) -> dict[str, Any]:
    """Train a while, one contender after the other; return the losses of every step."""
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    found = {}
    for name in ("ours", "fsdp2"):
        by_rank = _asked(name, case, LossWorker, "steps", steps, backend, env)
        found[name] = mean_losses(transposed(by_rank))
    return {"losses": found}


def _asked(
    name: str,
    case: Case,
    worker: type,
    method: str,
    steps: int,
    backend: str | None = None,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Start a contender, and return what a method of its ranks returns."""
    where: dict[str, Any] = {"device": case.device, "backend": backend, "env": env}
    with World(name, case.ranks, worker, name, case, **where) as world:
        return world.call(method, steps)


def _ranks(setup: Setup, cases: Cases) -> None:
    for ranks, zero in ((2, 3), (2, 2), (4, 3)):
        case = setup.case(ranks=ranks, zero=zero)
        _turns(setup, cases, case, backend=_backend(setup, cases, ranks))
        if setup.is_dry:
            break


def _backend(setup: Setup, cases: Cases, ranks: int) -> str | None:
    """Return the backend: gloo where the ranks share a GPU and NCCL refuses that."""
    if ranks <= setup.gpus or setup.is_dry:
        return None
    key = "NCCL with several ranks on a GPU"
    tried = cases.case(key, lambda: _share(setup, setup.gpus + 1))
    return "gloo" if "refused" in tried else None


def _share(setup: Setup, ranks: int) -> dict[str, Any]:
    """Find out which backend lets ranks share a GPU."""
    try:
        return _probe(setup, ranks)
    except WorldError as error:
        return {"refused": shortened(str(error)), **_probe(setup, ranks, "gloo")}


def _offload(setup: Setup, cases: Cases) -> None:
    case = setup.case(offload=setup.host_memory)
    _turns(setup, cases, case, ["ours", "fsdp2"])


# -- checks ---------------------------------------------------------------------------------------


def _sanitizer(setup: Setup, cases: Cases) -> None:
    offload = {"offload": setup.host_memory}
    for name in ("ours", "fsdp2"):
        for changes in ({}, {"zero": 2}, offload):
            case = setup.case(params="tiny", tokens=64, **changes)
            if name == "fsdp2" and (changes or setup.is_dry):
                continue  # one, to know what the sanitizer says of a mature runtime
            _by_rank(cases, name, case, SanitizedWorker)


def _by_rank(cases: Cases, name: str, case: Case, worker: type) -> None:
    def measure() -> dict[str, Any]:
        return {"ranks": _asked(name, case, worker, "check", steps=4), "contender": name}

    cases.case(f"{name}: {case.label()}", measure)


def _graph(setup: Setup, cases: Cases) -> None:
    for name in ("ours", "fsdp2"):
        _by_rank(cases, name, setup.case(zero=2, tokens=min(setup.tokens, 512)), GraphWorker)


PARTS = {
    part.name: part
    for part in (
        Part(
            "environment", "What is this machine, and do processes start on it?", 60, _environment
        ),
        Part("tests", "Do the tests pass that need a GPU?", 180, _tests),
        Part("losses", "Does a training have the losses of torch's FSDP2?", 360, _losses),
        Part("steps", "How long is a step, how much memory does it take?", 360, _steps),
        Part("overhead", "What does the host do where there is nothing to move?", 120, _overhead),
        Part("graph", "Can a whole step under ZeRO-2 be one CUDA graph?", 60, _graph),
        Part("sanitizer", "Does CUDA's sanitizer find races between streams?", 90, _sanitizer),
        Part("ranks", "What do two ranks and four take, if need be on one GPU?", 120, _ranks),
        Part("offload", "What does a step cost with shards on the host?", 60, _offload),
        Part("largest", "The largest model that fits", 240, _largest),
    )
}

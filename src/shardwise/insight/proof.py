"""A proof: one training on one process, by torch's FSDP2 and by Shardwise, side by side.

    one process     the microbatches of all ranks, one after the other
    torch           torch's own fully_shard
    shardwise       ours

Every way begins with the same values and draws the same batches, so losses and gradients are equal
but for rounding. Each is a job of its own, and goes on from a checkpoint that it wrote in the
middle. In further jobs, a rank skips a backward, or is killed.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import platform
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.text import Text
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from shardwise._torch import dtensor
from shardwise.base import devices
from shardwise.base.errors import RankFailedError, RanksDivergedError
from shardwise.base.files import replace_file
from shardwise.base.html import document, escape
from shardwise.base.ordering import nan_last
from shardwise.base.units import binary_size, seconds, version_of
from shardwise.checkpoint.ranks.loading import load
from shardwise.checkpoint.ranks.saving import save
from shardwise.elastic.call import launch
from shardwise.elastic.world import environment
from shardwise.frontends.meta import materialize
from shardwise.frontends.strategies import Runtime
from shardwise.frontends.watch_ranks import watch_ranks
from shardwise.insight.inspect.text import Cells, rendered
from shardwise.insight.planning.api import make_plan, with_functions, with_sequence
from shardwise.insight.planning.models import find_model
from shardwise.insight.planning.rehearsal import make_batch, program_of
from shardwise.insight.planning.settings import Settings, UntraceableError
from shardwise.insight.program import TrainingStep
from shardwise.insight.schema.sharding import PrecisionName
from shardwise.sharding.tree import every_tensor_in

#: The largest difference of gradients from one process, as a share of the largest value. Rounding
#: alone makes some, and more in bf16, in which one process does not compute.
GRADIENTS = {None: 1e-4, PrecisionName.FP32: 1e-4, PrecisionName.BF16: 0.05}
#: The same of losses, of which each step adds to the differences of the one before.
LOSSES = {None: 1e-3, PrecisionName.FP32: 1e-3, PrecisionName.BF16: 0.05}
#: Gradients below this share of the largest one of the model are compared with that share, and so
#: are losses, which may cross zero: what is zero but for rounding has no difference of its own.
_SMALLEST = 1e-3
_WARMUP = 2  # steps that are not timed
_TROUBLE = 1  # the step in which a rank does something else, and the steps after it
_AFTER = 2
#: For a job behind one that has said Python's warnings.
_SAID = {"PYTHONWARNINGS": "ignore"}
#: Seconds after which a collective without its peers fails, and in which a job has to end.
_PATIENCE = 60.0

_SHARDED = (Runtime.TORCH, Runtime.SHARDWISE)
_WAYS = (None, *_SHARDED)


class Trouble(enum.Enum):
    """What goes wrong on the last rank."""

    NONE = "nothing"
    SKIPPED = "a rank skips a backward"
    KILLED = "a rank is killed"

    @property
    def error(self) -> type[Exception]:
        """What the caller of the job gets."""
        return RanksDivergedError if self is Trouble.SKIPPED else RankFailedError

    @property
    def promise(self) -> str:
        """What happens, and the error that follows."""
        return f"{self.value}: {self.error.__name__}"


_TROUBLES = (Trouble.SKIPPED, Trouble.KILLED)
#: What is done one after the other: plans, trainings, resuming, and what goes wrong.
JOBS = len(_SHARDED) + len(_WAYS) + 1 + len(_TROUBLES) * len(_SHARDED)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training that every rank of a job runs.

    Attributes:
        model: its name, as for :func:`~shardwise.insight.planning.models.find_model`.
        settings: how it is sharded and stepped; functions by their names.
        runtime: what shards it; ``None``: nothing, on one process.
        steps: how many.
        folder: what jobs leave for each other.
        trouble: what goes wrong.
    """

    model: str
    settings: Settings
    runtime: Runtime | None
    steps: int
    folder: Path
    trouble: Trouble = Trouble.NONE

    @property
    def name(self) -> str:
        """The name of the way."""
        return "one process" if self.runtime is None else self.runtime.value

    def checkpoint(self, runtime: Runtime | None) -> Path:
        """Return the folder of the checkpoint that a way writes in the middle."""
        return self.folder / f"checkpoint-{'one' if runtime is None else runtime.value}"


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """What a rank found.

    Attributes:
        losses: of each step.
        resumed: of the steps after the checkpoint, once more.
        seconds: of a step, the median.
        peak: bytes of tensors, at most.
        differences: of the first gradients from those of one process, by parameter, as shares.
    """

    losses: Sequence[float]
    resumed: Sequence[float]
    seconds: float
    peak: int
    differences: Mapping[str, float] = field(default_factory=dict)


# -- on a rank -------------------------------------------------------------------------------------


class _Training:
    """A model, its optimizer and its steps.

    Args:
        trial: what to train, and how.
        device: where.
    """

    def __init__(self, trial: Trial, device: torch.device) -> None:
        self._device = device
        settings = with_functions(trial.settings)
        torch.manual_seed(0)
        blueprint = find_model(trial.model, device)
        self._settings = with_sequence(blueprint, settings)
        self._name = type(blueprint.model).__name__
        self.model = materialize(blueprint.model, device=device).to(device).train()
        way = replace(self._settings, runtime=trial.runtime or Runtime.SHARDWISE)
        program = program_of(blueprint, way)
        program.prepare()
        self._first, self._ranks = 0, settings.mesh.size
        if trial.runtime is not None:
            world = settings.world
            program.shard(init_device_mesh(device.type, world.shape, mesh_dim_names=world.names))
            self._first, self._ranks = dist.get_rank(), 1
        self.optimizer = program.make_optimizer()
        self._one = TrainingStep(program=program, optimizer=self.optimizer)

    def backward(self, step: int) -> float:
        """Run the microbatches of this process, and return their mean loss."""
        count = self._ranks * self._settings.accumulate
        losses = self._one.backward((self._batch(step, at) for at in range(count)), count, count)
        return statistics.fmean(loss.item() for loss in losses)

    def forward(self, step: int, at: int) -> torch.Tensor:
        """Run the forward of a microbatch alone."""
        return self._one.program.loss(self.model, self._batch(step, at))

    def _batch(self, step: int, at: int) -> Any:
        """Make a microbatch. What it and its forward draw depends on its number alone."""
        number = self._first * self._settings.accumulate + at
        torch.manual_seed((step << 20) + number + 1)
        with self._device:
            return make_batch(self._settings, self.model, self._name)

    def update(self) -> None:
        """Step with the gradients, and drop them."""
        self._one.norm()
        self._one.update()

    def step(self, step: int) -> float:
        """Take a step, and return the mean loss of this process."""
        loss = self.backward(step)
        self.update()
        return loss

    def peak(self, step: int) -> tuple[float, int]:
        """Take a step, and return its loss, and the most bytes of tensors in it.

        On CPUs, without what ranks share.
        """
        if self._device.type != devices.CPU.type:
            devices.reset_peak_memory(self._device)
            return self.step(step), devices.peak_memory(self._device)
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        held = (*self.model.parameters(), *self.model.buffers(), *every_tensor_in(states))
        before = sum(dtensor.plain(each).nbytes for each in held)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            loss = self.step(step)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        now = most = 0
        for event in sorted(events, key=lambda event: event.get("ts", 0)):
            if event["name"] == "[memory]":
                now += event["args"]["Bytes"]
                most = max(most, now)
        return loss, before + most


def run(trial: Trial) -> TrialOutcome:
    """Run a trial as one rank of its job.

    Raises:
        Exception: what the model raises, or the runtime where something goes wrong.
    """
    device = devices.of_rank()
    with contextlib.ExitStack() as stack:
        if trial.runtime is not None:
            patience = timedelta(seconds=_PATIENCE)
            dist.init_process_group(devices.backends_for(device), timeout=patience)
            if trial.trouble is Trouble.NONE:
                stack.callback(dist.destroy_process_group)
        if trial.trouble is not Trouble.NONE:
            training = _Training(trial, device)
            if trial.runtime is Runtime.TORCH:
                stack.enter_context(watch_ranks(training.model, seconds=_PATIENCE / 4))
            _get_into_trouble(trial, training)
        return _train(trial, device)


def _get_into_trouble(trial: Trial, training: _Training) -> None:
    """Train until the last rank does something else, and until all notice.

    Raises:
        Exception: as the runtime reports it.
    """
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for step in range(_TROUBLE + _AFTER):
        if step == _TROUBLE:
            (trial.folder / "trouble").touch()
            if is_last and trial.trouble is Trouble.KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if is_last:
                training.forward(step, 0)
                continue
        training.step(step)
    time.sleep(_PATIENCE)  # the others still wait for this rank, and notice it


def _train(trial: Trial, device: torch.device) -> TrialOutcome:
    """Train, and once more from the checkpoint in the middle."""
    training = _Training(trial, device)
    losses, times, peak = [], [], 0
    differences: dict[str, float] = {}
    middle = trial.steps // 2
    for step in range(trial.steps):
        if step == middle:
            save(trial.checkpoint(trial.runtime), training.model, training.optimizer)
        began = time.perf_counter()
        if step == 0:
            losses.append(training.backward(step))
            differences = _compare(trial, training.model)
            training.update()
        elif step == trial.steps - 1:
            loss, peak = training.peak(step)
            losses.append(loss)
        else:
            losses.append(training.step(step))
            devices.synchronize(device)
            times.append(time.perf_counter() - began)
    del training  # two models at once may not fit
    again = _Training(trial, device)
    load(trial.checkpoint(trial.runtime), again.model, again.optimizer)
    return TrialOutcome(
        losses=losses,
        resumed=[again.step(step) for step in range(middle, trial.steps)],
        seconds=statistics.median(times[_WARMUP - 1 :] or times),
        peak=peak,
        differences=differences,
    )


def go_on(trial: Trial) -> dict[Runtime, list[float]]:
    """Train on one process from the checkpoint of each other way, and return the losses."""
    found = {}
    for each in _SHARDED:
        training = _Training(trial, devices.of_rank())
        load(trial.checkpoint(each), training.model, training.optimizer)
        found[each] = [training.step(step) for step in range(trial.steps // 2, trial.steps)]
    return found


def _compare(trial: Trial, model: nn.Module) -> dict[str, float]:
    """Compare gradients with those of one process, which writes its own."""
    path = trial.folder / "gradients.pt"
    grads = {name: param.grad for name, param in model.named_parameters()}
    if trial.runtime is None:
        torch.save({name: grad for name, grad in grads.items() if grad is not None}, path)
        return {}
    expected = torch.load(path, mmap=True, weights_only=True)
    largest = {name: each.abs().max().item() for name, each in expected.items() if each.numel()}
    least = _SMALLEST * max(filter(math.isfinite, largest.values()), default=0.0) or 1.0
    found = {}
    for name, grad in grads.items():
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        if (full is None) != (name not in expected):
            found[name] = float("inf")  # a gradient on one side alone
        elif full is not None and full.numel():
            off = (full.cpu() - expected[name].cpu()).abs().max().item()
            found[name] = off / max(largest[name], least, key=nan_last)
    return found


# -- the proof -------------------------------------------------------------------------------------


class Holds(enum.Enum):
    """What a cell says of the promise of its row."""

    YES = "holds"
    NO = "FAILS"
    SHOWN = "shown"  # for comparison


@dataclass(frozen=True)
class ProofCell:
    """What was found of one way.

    Attributes:
        text: in words.
        holds: whether it is as promised.
    """

    text: str
    holds: Holds = Holds.SHOWN

    @classmethod
    def check(cls, text: str, condition: object) -> ProofCell:
        """Return what was found, and whether it is as promised."""
        return cls(text, Holds.YES if condition else Holds.NO)

    def __str__(self) -> str:
        return f"{self.text} !" if self.holds is Holds.NO else self.text


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was promised and found.

    Attributes:
        model: its name.
        ranks: how many.
        steps: how many each way took.
        rows: what was found of each way, in their order, by what was looked at.
        differences: of gradients, by parameter, for torch and Shardwise.
        bounds: what is promised, by what was looked at.
        made: when, and with which versions.
        lacks: what had not been done when this was written; empty: nothing.
    """

    model: str
    ranks: int
    steps: int
    rows: Mapping[str, Sequence[ProofCell]]
    differences: Mapping[str, Sequence[float]]
    bounds: Mapping[str, str] = field(default_factory=dict)
    made: str = ""
    lacks: str = ""

    @property
    def failures(self) -> int:
        """The number of cells that are not as promised."""
        return sum(each.holds is Holds.NO for row in self.rows.values() for each in row)

    def to_json(self) -> dict[str, Any]:
        """Convert the proof to values that ``json`` can write; NaN and infinities are text."""
        rows = {
            name: [{"found": each.text, "holds": each.holds.value} for each in row]
            for name, row in self.rows.items()
        }
        differences = {
            name: [value if math.isfinite(value) else str(value) for value in found]
            for name, found in self.differences.items()
        }
        return {
            **asdict(self),
            "rows": rows,
            "differences": differences,
            "failures": self.failures,
        }

    def __str__(self) -> str:
        lines = [Text(self._verdict), Text(self.made), Text()]
        return rendered([*lines, self._table.for_terminal()])

    def to_html(self, path: Path) -> None:
        """Write the proof as a page that loads nothing else.

        Raises:
            OSError: the file cannot be written.
        """
        heads = ("parameter", *(each.value for each in _SHARDED))
        worst = sorted(
            self.differences.items(), key=lambda item: nan_last(_largest(item[1])), reverse=True
        )
        rows = [(name, *map(_share, each)) for name, each in worst]
        grads = Cells(heads[: len(rows[0])] if rows else heads, rows)  # not all, if not finished
        body = (
            f"<header><h1>Proof</h1><p>{escape(self._verdict)}</p>"
            f"<p>{escape(self.made)}</p></header>",
            self._table.for_page(),
            "<h2>Gradients</h2>",
            "<p>The largest difference of a first gradient from that of one process, as a share of "
            "its largest element.</p>",
            grads.for_page(),
        )
        replace_file(path, document(f"Proof of {self.model}", body).encode())

    @property
    def _verdict(self) -> str:
        said = f"{self.failures} FAIL" if self.failures else "all that is promised holds"
        if self.lacks:
            said = f"not finished, without {self.lacks}; {self.failures} FAIL so far"
        return f"{self.model}, {self.steps} steps on {self.ranks} ranks: {said}"

    @property
    def _table(self) -> Cells:
        rows = []
        for name, row in self.rows.items():
            said = {each.holds for each in row} - {Holds.SHOWN}
            verdict = "FAILS" if Holds.NO in said else "ok" if said else ""
            promised = f"{verdict} {self.bounds.get(name, '')}".strip()
            rows.append((name.partition(":")[0], *map(str, row), promised))
        return Cells(("", "one process", *(each.value for each in _SHARDED), "promised"), rows)


def prove(
    model: str,
    settings: Settings,
    steps: int,
    say: Callable[[str], object] = lambda _: None,
    keep: Callable[[Proof], object] = lambda _: None,
) -> Proof:
    """Train a model in all ways, and compare.

    Args:
        model: its name, as for ``shardwise plan``.
        settings: how it is sharded and stepped; functions by their names.
        steps: of each training.
        say: called with what is done next.
        keep: called with what there is after each training.

    Raises:
        ModelError, SettingsError, RehearsalError: as for plans.
        Exception: what the model raises.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler of ranks says nothing then
    planned: dict[Runtime, int] = {}
    # Modules whose shapes depend on values have no plan. Warnings come again with the training.
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(UntraceableError):
        blueprint, with_code = find_model(model), with_functions(settings)
        for runtime in _SHARDED:
            say(f"planning: {runtime.value}")
            plan = make_plan(blueprint, replace(with_code, runtime=runtime))
            planned[runtime] = plan.needed
    found: dict[Runtime | None, list[TrialOutcome]] = {}
    resumed: dict[Runtime, list[float]] = {}
    troubles: dict[str, list[ProofCell]] = {}
    made = (
        f"{time.strftime('%Y-%m-%d %H:%M')}, shardwise {version_of('shardwise') or 'of a clone'}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )

    def so_far(lacks: str) -> Proof:
        ours = [found[each][0].differences for each in _SHARDED if each in found]
        return Proof(
            model=model,
            ranks=settings.mesh.size,
            steps=steps,
            rows={**dict(compared(found, resumed, planned, settings)), **troubles},
            differences={name: [each[name] for each in ours] for name in (ours or [{}])[0]},
            bounds=bounds_of(settings),
            made=made,
            lacks=lacks,
        )

    with tempfile.TemporaryDirectory(prefix="shardwise-prove-") as name:
        folder = Path(name)
        trial = Trial(model=model, settings=settings, runtime=None, steps=steps, folder=folder)
        for each in _WAYS:
            way = replace(trial, runtime=each)
            say(f"training: {way.name}")
            with environment(**(_SAID if found else {})):
                found[each] = launch(run, (way,), nproc=1 if each is None else settings.mesh.size)
            keep(so_far(f"what follows the training by {way.name}"))
        say("resuming on one process")
        with environment(**_SAID):
            (resumed,) = launch(go_on, (trial,))
        for trouble in _TROUBLES:
            keep(so_far(trouble.value))
            cells = [ProofCell("")]
            for each in _SHARDED:
                say(f"{trouble.value}: {each.value}")
                with environment(**_SAID):
                    cells.append(_in_trouble(replace(trial, runtime=each, trouble=trouble)))
            troubles[trouble.promise] = cells
    return so_far("")


def compared(
    found: Mapping[Runtime | None, Sequence[TrialOutcome]],
    resumed: Mapping[Runtime, Sequence[float]],
    planned: Mapping[Runtime, int],
    settings: Settings,
) -> Iterator[tuple[str, list[ProofCell]]]:
    """Compare what all ways found, row by row."""
    tolerance = LOSSES[settings.compute_dtype]

    def row(cells: Mapping[Runtime | None, ProofCell]) -> list[ProofCell]:
        return [cells.get(each, ProofCell("")) for each in _WAYS]

    def shares(values: Mapping[Runtime, float], most: float = tolerance) -> list[ProofCell]:
        return row({way: ProofCell.check(_share(off), off <= most) for way, off in values.items()})

    losses = {
        each: [statistics.fmean(step) for step in zip(*(r.losses for r in ranks), strict=True)]
        for each, ranks in found.items()
    }
    one, sharded = losses[None], [each for each in _SHARDED if each in found]
    for step in (0, -1):
        cells = {each: ProofCell(f"{own[step]:.6f}") for each, own in losses.items()}
        yield f"loss of step {1 + step % len(one)}", row(cells)
    yield "losses differ by", shares({each: _apart(losses[each], one) for each in sharded})
    grads = {each: _largest(found[each][0].differences.values()) for each in sharded}
    yield "gradients differ by", shares(grads, GRADIENTS[settings.compute_dtype])
    same = {
        each: all(_apart(rank.resumed, rank.losses[-len(rank.resumed) :]) == 0 for rank in ranks)
        for each, ranks in found.items()
    }
    words = {True: "same bits", False: "other losses"}
    cells = {each: ProofCell.check(words[alike], alike) for each, alike in same.items()}
    yield "resumed from a checkpoint", row(cells)
    off = {each: _apart(again, one[-len(again) :]) for each, again in resumed.items()}
    yield "resumed on one, off by", shares(off)
    peaks = {each: max(rank.peak for rank in ranks) for each, ranks in found.items()}
    cells = {each: ProofCell(binary_size(peak)) for each, peak in peaks.items()}
    yield "memory of tensors at most", row(cells)
    if planned:
        needed = {each: planned[each] for each in sharded}
        checks = {each: (binary_size(n), peaks[each] <= n) for each, n in needed.items()}
        yield "planned, with slack", row({e: ProofCell.check(*each) for e, each in checks.items()})
    times = {each: max(rank.seconds for rank in ranks) for each, ranks in found.items()}
    yield "a step", row({each: ProofCell(seconds(took)) for each, took in times.items()})
    if (torchs := times.get(Runtime.TORCH)) is not None:
        cells = {each: ProofCell(f"{took / torchs:.2f}") for each, took in times.items()}
        yield "of torch's step", row(cells)


def bounds_of(settings: Settings) -> dict[str, str]:
    """Return what is promised of each row that can fail."""
    dtype = settings.compute_dtype
    losses, in_time = f"≤ {LOSSES[dtype]:g}", f"< {_PATIENCE:g} s"
    return {
        "losses differ by": losses,
        "gradients differ by": f"≤ {GRADIENTS[dtype]:g}",
        "resumed from a checkpoint": "same bits",
        "resumed on one, off by": losses,
        "planned, with slack": "≥ it",
        **{trouble.promise: in_time for trouble in _TROUBLES},
    }


def _apart(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference of losses, as a share."""
    least = _SMALLEST * max(map(abs, filter(math.isfinite, expected)), default=0.0) or 1.0
    pairs = zip(found, expected, strict=True)
    return _largest(abs(a - b) / max(abs(b), least, key=nan_last) for a, b in pairs)


def _largest(differences: Iterable[float]) -> float:
    """Return the largest difference; NaN if there is one."""
    return max(differences, key=nan_last, default=0.0)


def _share(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _in_trouble(trial: Trial) -> ProofCell:
    """Run a trial in which a rank does something else, and return how it ends."""
    try:
        launch(run, (trial,), nproc=trial.settings.mesh.size)
    except Exception as error:
        took = time.time() - (trial.folder / "trouble").stat().st_mtime
        if isinstance(error, trial.trouble.error):
            return ProofCell.check(seconds(took), took < _PATIENCE)
        return ProofCell(type(error).__name__, Holds.NO)
    return ProofCell("no error", Holds.NO)

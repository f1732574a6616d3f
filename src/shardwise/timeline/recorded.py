"""What work costs, read from small trainings that are recorded: calls, products, bytes.

A few steps of small Llamas are recorded by :mod:`shardwise.timeline`, as those of any training.
Where a group begins its forward or its backward, and where the optimizer begins, a step is divided
into parts. The rehearsal of the same step has the same parts, and knows the work of each. So each
part is an equation for the costs of its work, and the costs are those that solve all of them best.

Where each process has one thread on CPUs, its processor time is recorded, which other programs
hardly change. Where it has several, and on accelerators, it is the time on the clock.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.base import devices, observe
from shardwise.base.observe import Activity
from shardwise.elastic.call import launch
from shardwise.elastic.world import usable_cores
from shardwise.frontends.meta import materialize
from shardwise.frontends.strategies import WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.calibrate import Calibration, processor
from shardwise.insight.planning.clock import CALLS, WORK, amount_of, calls_of, sent
from shardwise.insight.planning.events import Log, Mark, Op, Start, StepPhase
from shardwise.insight.planning.models import build, of_module
from shardwise.insight.planning.presets import llama_settings
from shardwise.insight.planning.rehearsal import make_batch, program_of, rehearse
from shardwise.insight.planning.settings import Settings
from shardwise.insight.program import TrainingStep
from shardwise.insight.schema.sharding import PrecisionName, TransportName
from shardwise.timeline.rank import RankTimeline
from shardwise.timeline.recording import PATIENCE, Recording

#: Width and tokens: calls cost most of the first, bytes of the second, products of the last.
SHAPES = ((64, 128), (128, 1024), (256, 256), (512, 256))
#: On accelerators, the host is the slower one in the first, and the device in the others.
DEVICE_SHAPES = ((64, 128), (1024, 16384), (2048, 8192), (4096, 4096))
_MOST_PROCESSES = 16  # at once
STEPS = 8  # of each training that are recorded
_WARMUP = 2  # and that are not
_LAYERS, _VOCABULARY = 3, 2048
#: From how many times the time of its host on a step shows what the device takes for its work.
_AHEAD = 1.2
#: How much more an equation counts if its part takes longer: between 0.5, which fits noise that
#: grows with the root of the time, and 1, with which only the longest parts count.
_WEIGHT = 0.75


#: What a part of a step did, in units of work, and the seconds that it took.
Equation = tuple[Mapping[str, float], float]


@dataclass(frozen=True)
class SmallTraining:
    """A small Llama, its batch, and how it is sharded over all ranks of a host.

    Attributes:
        width: of the residual stream; a multiple of 64.
        tokens: in its one sequence.
        param_dtype: of forward and backward: ``None`` for float32.
        transport: as for ``fully_shard``.
    """

    width: int
    tokens: int
    param_dtype: PrecisionName | None = None
    transport: TransportName = TransportName.AUTO

    def blueprint(self) -> Blueprint:
        """Return the model on the meta device, and how it is sharded."""
        settings = llama_settings(
            hidden=self.width,
            intermediate=3 * self.width,
            layers=_LAYERS,
            heads=self.width // 64,
            positions=self.tokens,
            vocabulary=_VOCABULARY,
        )
        return of_module(build(settings), "small")

    def settings(self, ranks: int) -> Settings:
        """Return what to plan for."""
        return Settings(
            mesh=WantedMesh.parse(f"dp={ranks}"),
            seq_length=self.tokens,
            param_dtype=self.param_dtype,
            transport=self.transport,
            ranks_per_host=ranks,
            device_type=devices.default_type(),
        )


def measure_machine(say: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measure this machine, and call ``say`` with what is measured next.

    Takes about a minute if nothing else runs. Starts one process, and then one for each accelerator
    or processor (at most 16).

    Raises:
        RankFailedError: a process was killed.
    """
    costs = {}
    for ranks in sorted({1, min(_MOST_PROCESSES, devices.count() or max(2, usable_cores()))}):
        say(f"{ranks} at once" if ranks > 1 else "one process alone")
        costs[ranks] = costs_of_ranks(ranks)
    return Calibration(
        device=devices.default_type(),
        processor=processor(),
        cores=usable_cores(),
        torch=torch.__version__,
        costs=costs,
    )


def costs_of_ranks(ranks: int) -> dict[str, float]:
    """Return what work costs in n processes at once.

    Returns:
        Seconds by unit; see :mod:`shardwise.insight.planning.clock`. Collectives have units by
        transport: ``"launch.shm"`` for each, and ``"sent.shm"`` for each byte that a rank sends.
        With an accelerator, ``"host"`` is what its host takes for each operation.

    Raises:
        RankFailedError: a process was killed.
    """
    on_cpus = devices.accelerator() is None
    shapes = SHAPES if on_cpus else DEVICE_SHAPES
    trainings = [
        SmallTraining(*shape, dtype) for shape in shapes for dtype in (None, PrecisionName.BF16)
    ]
    if ranks > 1 and on_cpus:  # those are over shared memory
        trainings += [
            SmallTraining(*shape, transport=TransportName.C10D) for shape in (SHAPES[0], SHAPES[-1])
        ]
    logs = [rehearse(each.blueprint(), each.settings(ranks)) for each in trainings]
    pairs = list(zip(logs, launch(_record, (trainings, STEPS), nproc=ranks)[0], strict=True))
    if on_cpus:
        return solve([each for pair in pairs for each in equations(*pair)])
    return costs_on_device(pairs)


def _record(trainings: Sequence[SmallTraining], steps: int) -> list[Sequence[RankTimeline]]:
    """Record steps of each training on one rank; return what all ranks recorded, on rank 0."""
    devices.keep_freed_memory()
    device, now = devices.of_rank(), time.perf_counter_ns
    if device == devices.CPU and torch.get_num_threads() == 1:
        now = time.process_time_ns
    found: list[Sequence[RankTimeline]] = []
    dist.init_process_group(devices.backends_for(device))
    try:
        for training in trainings:
            step = _stepper(training, device)
            for _ in range(_WARMUP):
                step()
            with Recording(None, None, PATIENCE, now) as recording:
                for number in range(steps):
                    dist.barrier()
                    with recording.step(number):
                        step()
            found.append(recording.timeline.ranks if recording.timeline else ())
    finally:
        dist.destroy_process_group()
    return found


def _stepper(training: SmallTraining, device: torch.device) -> Callable[[], None]:
    """Return what takes a step, as trainings do."""
    torch.manual_seed(0)
    blueprint, settings = training.blueprint(), training.settings(dist.get_world_size())
    program, world = program_of(blueprint, settings), settings.world
    program.prepare()
    program.shard(init_device_mesh(device.type, world.shape, mesh_dim_names=world.names))
    materialize(program.model.train(), device=device)
    with device:
        batch = make_batch(settings, program.model, blueprint.name)
    one = TrainingStep(program=program, optimizer=program.make_optimizer())

    def step() -> None:
        list(one.backward([batch], 1, 1))
        with observe.during(Activity.OPTIMIZER, "clipping"):
            one.norm()
        one.update()

    return step


def equations(log: Log, ranks: Sequence[RankTimeline]) -> list[Equation]:
    """Return an equation for each kind of part of a step, as ranks recorded it.

    Parts that do the same work are of one kind. It takes the median of their seconds.
    """
    took: dict[tuple[tuple[str, float], ...], list[float]] = defaultdict(list)
    works = [tuple(sorted(work.items())) for work in work_of_parts(log)]
    for rank in ranks:
        for times in _times_of_parts(rank):
            for work, (begin, end) in zip(works, pairwise(times), strict=True):
                took[work].append(end - begin)
    return [(dict(work), statistics.median(each)) for work, each in took.items()]


def work_of_parts(log: Log) -> list[Mapping[str, float]]:
    """Return the work of each part of a step, in order."""
    parts: list[Counter[str]] = []
    phase = StepPhase.FORWARD
    for event in log.events:
        if isinstance(event, Mark) and event.activity is not Activity.OPTIMIZER:
            parts.append(Counter())
        elif isinstance(event, Start) and event.ranks > 1:
            parts[-1][f"launch.{event.transport}"] += 1
            parts[-1][f"sent.{event.transport}"] += sent(event)
        elif isinstance(event, Op):
            if event.phase is StepPhase.OPTIMIZER and phase is not event.phase:
                parts.append(Counter())
            phase = event.phase
            for unit, amount in (calls_of(event), amount_of(event)):
                parts[-1][unit] += round(amount)
    return [{unit: amount for unit, amount in part.items() if amount} for part in parts]


def _times_of_parts(rank: RankTimeline) -> Iterator[list[float]]:
    """Yield when parts begin, and the last one ends, by step: on the device, if that is known."""
    for step in rank.steps:
        spans = rank.of(step)
        begins = [s for s in spans if s.activity in (Activity.FORWARD, Activity.BACKWARD)]
        stepping = [s for s in spans if s.activity is Activity.OPTIMIZER]
        on_device = [s.device for s in (*begins, *stepping) if s.device is not None]
        if len(on_device) == len(begins) + len(stepping):
            yield [*(begin for begin, _ in on_device[: len(begins) + 1]), on_device[-1][1]]
        else:
            yield [*(span.begin for span in (*begins, stepping[0])), step.end]


def costs_on_device(pairs: Sequence[tuple[Log, Sequence[RankTimeline]]]) -> dict[str, float]:
    """Return what work costs an accelerator, and what each operation costs its host.

    The host sets the time of the step with the least work. Of the others, those that took longer
    for each operation kept the device busy; all of them do if the host is fast.
    """
    each_op = [seconds_of_op(*pair) for pair in pairs]
    host = min(each_op)
    busy = [pair for pair, took in zip(pairs, each_op, strict=True) if took > _AHEAD * host]
    return {"host": host, **solve([each for pair in busy or pairs for each in equations(*pair)])}


def seconds_of_op(log: Log, ranks: Sequence[RankTimeline]) -> float:
    """Return the seconds of a step of median length, for each of its operations."""
    took = statistics.median(step.seconds for rank in ranks for step in rank.steps)
    return took / sum(isinstance(event, Op) for event in log.events)


def solve(parts: Sequence[Equation]) -> dict[str, float]:
    """Return the cost of each unit of work in seconds, none below 0, by least squares."""
    units = sorted({*CALLS, *WORK}.union(*(work for work, _ in parts)))
    seconds = torch.tensor([took for _, took in parts], dtype=torch.float64)
    rows = [[work.get(unit, 0.0) for unit in units] for work, _ in parts]
    work = torch.tensor(rows, dtype=torch.float64) * seconds.pow(_WEIGHT - 1)[:, None]
    scale = work.amax(0)
    left = [at for at in range(len(units)) if work[:, at].any()]
    while True:
        each = work[:, left] / scale[left]
        costs = torch.linalg.lstsq(each, seconds.pow(_WEIGHT), driver="gelsd").solution
        if costs.min() >= 0:
            found = zip(left, (costs / scale[left]).tolist(), strict=True)
            return dict.fromkeys(units, 0.0) | {units[at]: cost for at, cost in found}
        left.pop(int(costs.argmin()))

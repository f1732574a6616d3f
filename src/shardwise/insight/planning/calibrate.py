"""What this machine can do, measured in under a minute, and kept in a file for plans.

Ranks share a machine: its memory, and its processors if there are more of them. So everything is
measured in as many processes at once as a training has ranks, each with its part of the processors.

Where each process has one thread, its processor time is measured, which other programs hardly
change. Where it has several, and for links, it is the time on the clock, so the machine should have
nothing else to do.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import re
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from shardwise.base import devices
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.files import Links, read_small
from shardwise.checkpoint.disk.strict import Fields, parse, refuse
from shardwise.elastic.call import launch
from shardwise.insight.planning import probes
from shardwise.insight.planning.costs import FAMILIES
from shardwise.insight.planning.events import StepPhase
from shardwise.insight.planning.machine import (
    GROUP,
    Curve,
    Device,
    Execution,
    Link,
    Machine,
    MachineError,
    Progress,
    SharedBy,
    link_named,
)
from shardwise.insight.planning.probe_steps import (
    Sizes,
    corrected,
    group_overhead,
    overheads,
    with_costs,
)

GLOO = devices.GLOO.name
_VERSION = 2
_DTYPES = (torch.float32, torch.bfloat16)
_MOST = 1 << 20  # bytes of the file
#: How much more a byte costs the host through a network than on this machine, where packets are 40
#: times as long. Fitted on one row of docs/plan.md: two hosts, 10 Gbit/s.
_THROUGH_A_NETWORK = 1.5
_PHASES = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: for a probe.
        steps: of small models as a whole.
        timed_steps: of those whose operations are timed one by one, and of the large model.
        sizes: of those models.
    """

    seconds: float = 0.008
    steps: int = 16
    timed_steps: int = 6
    sizes: Sizes = field(default_factory=Sizes)


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """What n processes at once can do, each with its part of the processors.

    Attributes:
        ranks: how many there were.
        curves: as in :class:`~shardwise.insight.planning.machine.Device`.
        overheads: seconds beside each operation by phase: of Python, and of autograd. In the
            optimizer, beside each tensor that an operation reads or writes. And beside each
            ``"group"`` in forward or backward.
        links: by transport.
    """

    ranks: int
    curves: Mapping[str, Curve]
    overheads: Mapping[str, float]
    links: Mapping[str, Link]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Everything that was measured on this machine.

    Attributes:
        processor: what it calls itself.
        cores: how many of them this process may use.
        torch: version.
        measured: by ascending number of ranks.
    """

    processor: str
    cores: int
    torch: str
    measured: tuple[MeasuredRates, ...]

    def machine(self, ranks_per_host: int, link: str | None = None) -> Machine:
        """Return this machine, as n ranks at once find it.

        Args:
            ranks_per_host: how many.
            link: name of the link between hosts; by default, messages on this machine.

        Raises:
            MachineError: the link is not known.
        """
        enough = [each for each in self.measured if each.ranks >= ranks_per_host]
        found = enough[0] if enough else self.measured[-1]
        slower = max(1.0, ranks_per_host / found.ranks)
        curves = {name: curve.scaled(slower) for name, curve in found.curves.items()}
        links = {name: _slowed(each, slower) for name, each in found.links.items()}
        messages = links.get(GLOO) or _slowed(self.measured[-1].links[GLOO], slower)
        between = messages
        if link is not None:
            known = link_named(link)
            between = dataclasses.replace(
                messages,
                name=link,
                bandwidth=min(messages.bandwidth, known.bandwidth),
                host_cost=_THROUGH_A_NETWORK * messages.host_cost,
                latency=known.latency,
                shared_by=known.shared_by,
            )
        return Machine(
            device=Device(
                name="cpu",
                memory=devices.free_memory(devices.CPU) // ranks_per_host,
                memory_bandwidth=_rate(curves["copy.float32"]),
                flops={name: _rate(curves[f"product.{name}"]) for name in ("float32", "bfloat16")},
                execution=Execution.DIRECT,
                overheads={name: slower * each for name, each in found.overheads.items()},
                curves=curves,
            ),
            inside=links.get("shm", messages),
            between=between,
            ranks_per_host=ranks_per_host,
            links=links,
        )

    def summary(self) -> list[tuple[str, list[str]]]:
        """Return what was measured in words: a name, and a value for each number of ranks."""

        def rates(name: str, unit: float, words: str) -> list[str]:
            return [f"{_rate(each.curves[name]) / unit:,.0f} {words}" for each in self.measured]

        def links(name: str) -> list[str]:
            found = [each.links.get(name) for each in self.measured]
            return ["" if each is None else _words_of(each) for each in found]

        return [
            ("matrix products in float32", rates("product.float32", 1e9, "GFLOP/s")),
            ("matrix products in bfloat16", rates("product.bfloat16", 1e9, "GFLOP/s")),
            ("attention in float32", rates("attention.float32", 1e9, "GFLOP/s")),
            ("arithmetic in float32", rates("arithmetic.float32", 1e9, "GB/s")),
            ("AdamW in float32", rates("adamw.float32", 1e9, "GB/s")),
            (
                "host, each operation of forward",
                [f"{1e6 * each.overheads['forward']:.1f} µs" for each in self.measured],
            ),
            ("messages (gloo)", links(GLOO)),
            ("shared memory", links("shm")),
        ]

    def to_json(self) -> dict[str, Any]:
        """Convert to values that ``json`` can write."""
        return {"version": _VERSION, **dataclasses.asdict(self)} | {
            "measured": [_json_of(each) for each in self.measured]
        }

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        part = _part_of(path)
        try:
            part.write_text(json.dumps(self.to_json()), encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file.

        Raises:
            MachineError: it is damaged, of another version, or cannot be read.
        """
        try:
            content = read_small(path, _MOST, Links.FOLLOW)
            fields = Fields(parse(content, path.name), path.name)
            version = fields.number("version", 1)
            if version != _VERSION:
                expected = f"version {_VERSION}: run `shardwise calibrate` again"
                raise MachineError(str(path), f"version {version}", expected)
            return cls._of(fields)
        except CheckpointError as error:
            expected = "what `shardwise calibrate` writes: run it again"
            raise MachineError(str(path), f"a damaged file ({error})", expected) from None

    @classmethod
    def _of(cls, fields: Fields) -> Self:
        measured = tuple(
            _measured_of(Fields(each, f"{fields.where}, measured"))
            for each in fields.items("measured", 100)
        )
        if not measured:
            refuse(fields.where, "no measurements", "some")
        if GLOO not in measured[-1].links:
            refuse(fields.where, "no messages", f"the link {GLOO} between the most ranks")
        return cls(
            processor=fields.text("processor"),
            cores=fields.number("cores", 1),
            torch=fields.text("torch"),
            measured=measured,
        )


def _words_of(link: Link) -> str:
    each = f"{1e6 * link.launch:,.0f} µs a collective"
    if link.progress is Progress.WAITING:
        return each
    return f"{link.bandwidth / 1e9:.2f} GB/s, {each}"


def _slowed(link: Link, slower: float) -> Link:
    return dataclasses.replace(
        link,
        bandwidth=link.bandwidth / slower,
        launch=link.launch * slower,
        host_cost=link.host_cost * slower,
    )


def _rate(curve: Curve) -> float:
    """Return the size by second where it is highest."""
    return max(size / took for size, took in zip(curve.sizes, curve.seconds, strict=True))


def _json_of(measured: MeasuredRates) -> dict[str, Any]:
    values = dataclasses.asdict(measured)
    for link in values["links"].values():
        link["shared_by"], link["progress"] = link["shared_by"].value, link["progress"].value
    return values


def _measured_of(fields: Fields) -> MeasuredRates:
    known = {f"{family}.{dtype}" for family in FAMILIES for dtype in ("float32", "bfloat16")}
    for name, needed in (
        ("curves", known),
        ("overheads", {GROUP, *(phase.value for phase in _PHASES)}),
    ):
        missing = sorted(needed - fields.object(name).keys())
        if missing:
            refuse(f"{fields.where}, {name!r}", f"none of {missing[0]}", "all that plans need")
    return MeasuredRates(
        ranks=fields.number("ranks", 1, 1 << 20),
        curves={
            name: _curve_of(Fields(each, f"{fields.where}, {name}"))
            for name, each in fields.object("curves").items()
        },
        overheads={
            name: Fields(fields.object("overheads"), fields.where).real(name)
            for name in fields.object("overheads")
        },
        links={
            name: _link_of(Fields(each, f"{fields.where}, {name}"))
            for name, each in fields.object("links").items()
        },
    )


def _curve_of(fields: Fields) -> Curve:
    columns = [fields.items(name, 1000) for name in ("sizes", "seconds")]
    for column in columns:
        if not all(type(each) in (int, float) and 0 < each < 1e30 for each in column):
            refuse(fields.where, "numbers out of range", "positive ones")
    sizes, seconds = (tuple(map(float, column)) for column in columns)
    if not sizes or len(sizes) != len(seconds) or sorted(set(sizes)) != list(sizes):
        refuse(fields.where, "no curve", "as many seconds as ascending sizes")
    return Curve(sizes, seconds)


def _link_of(fields: Fields) -> Link:
    bandwidth = fields.real("bandwidth")
    if not bandwidth:
        refuse(fields.where, 0, "a bandwidth above 0")
    by, progress = fields.text("shared_by"), fields.text("progress")
    if by not in [each.value for each in SharedBy] or progress not in [p.value for p in Progress]:
        refuse(fields.where, f"{by}, {progress}", "known words")
    return Link(
        name=fields.text("name"),
        bandwidth=bandwidth,
        latency=fields.real("latency"),
        shared_by=SharedBy(by),
        progress=Progress(progress),
        launch=fields.real("launch"),
        host_cost=fields.real("host_cost"),
    )


# -- the file --------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Return where the calibration of this machine is kept: in the user's cache folder.

    Raises:
        MachineError: that place is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:  # no HOME, and the system does not know the user
        raise MachineError("HOME", "no home folder", "one, or XDG_CACHE_HOME") from None
    # A host may be called anything.
    host = re.sub(r"[^\w.-]", "_", platform.node(), flags=re.ASCII)[:64]
    return folder / "shardwise" / f"machine-{host or 'here'}.json"


def check_writable(path: Path) -> None:
    """Check that a calibration can be written, before half a minute is spent on it.

    Raises:
        OSError: it cannot.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    part = _part_of(path)
    part.touch()
    part.unlink()


def _part_of(path: Path) -> Path:
    """Make the folder; return the file that becomes ``path`` once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}")


def stored() -> Calibration | None:
    """Return what ``shardwise calibrate`` measured here; ``None`` if it never has.

    Raises:
        MachineError: the file is damaged, or was written for another torch or other processors.
    """
    path = cache_file()
    if not os.path.lexists(path):
        return None
    found = Calibration.load(path)
    now = (processor(), cores(), torch.__version__)
    then = (found.processor, found.cores, found.torch)
    if now != then:
        was, is_now = (
            f"{name}, {count} core{'' if count == 1 else 's'}, torch {v}"
            for name, count, v in (then, now)
        )
        raise MachineError(str(path), was, f"{is_now}: run `shardwise calibrate` again")
    return found


def processor() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- measuring -------------------------------------------------------------------------------------


def seconds_of_others() -> float:
    """Return how long processors have worked for other programs; 0 where that is unknown.

    Counted are all programs but this process and its children that have ended, in seconds of a
    processor since the machine was started.

    Source: ``proc_stat(5)``.
    """
    try:
        with open("/proc/stat") as stat:
            ticks = [int(word) for word in stat.readline().split()[1:8]]
    except (OSError, ValueError):
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq = ticks
    every = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return every - sum(each.ru_utime + each.ru_stime for each in used)


def measure_machine(
    say: Callable[[str], None] = lambda _: None, effort: Effort | None = None
) -> Calibration:
    """Measure this machine.

    Takes about a minute if nothing else runs. Starts one process, and then one on each processor
    (at most 16).

    Args:
        say: is called with what is measured next.
        effort: how long to measure; less of it is for tests.

    Raises:
        RankFailedError: a process was killed.
    """
    found = []
    for ranks in sorted({1, min(16, max(2, cores()))}):
        say(f"{ranks} at once" if ranks > 1 else "one process alone")
        found.append(_mean(launch(_measure, (effort or Effort(),), nproc=ranks)))
    return Calibration(
        processor=processor(), cores=cores(), torch=torch.__version__, measured=tuple(found)
    )


def _mean(measured: Sequence[MeasuredRates]) -> MeasuredRates:
    """Return the mean over ranks."""
    first = measured[0]

    curves = {
        name: Curve(
            curve.sizes,
            tuple(
                statistics.fmean(each.curves[name].seconds[at] for each in measured)
                for at in range(len(curve.sizes))
            ),
        )
        for name, curve in first.curves.items()
    }
    overheads = {
        name: statistics.fmean(each.overheads[name] for each in measured)
        for name in first.overheads
    }
    return dataclasses.replace(first, curves=curves, overheads=overheads)


def _measure(effort: Effort) -> MeasuredRates:
    """Measure on one rank of a job."""
    devices.keep_freed_memory()
    dist.init_process_group(GLOO)
    try:
        ranks = dist.get_world_size()
        alone = torch.get_num_threads() == 1
        clock = time.thread_time if alone else time.perf_counter
        curves: dict[str, Curve] = {}
        for dtype in _DTYPES:
            found = probes.measure(dtype, effort.seconds, dist.barrier, clock)
            name = str(dtype).removeprefix("torch.")
            curves |= {f"{family}.{name}": curve for family, curve in found.items()}
        for dtype in _DTYPES:
            curves = corrected(curves, dtype, effort.sizes, effort.timed_steps, clock)
        beside = {GROUP: 0.0, **overheads(curves, effort.sizes.middle, effort.steps, clock)}
        steps = effort.steps, effort.timed_steps
        if ranks == 1:
            beside |= {GROUP: group_overhead(effort.sizes.middle, effort.steps, clock)}
            return MeasuredRates(ranks=ranks, curves=curves, overheads=beside, links={})
        links = {GLOO: _gloo(), "shm": _SHM}
        links = {
            name: with_costs(
                link, transport, curves, beside, effort.sizes, steps, time.perf_counter
            )
            for (name, link), transport in zip(links.items(), ("c10d", "shm"), strict=True)
        }
        return MeasuredRates(ranks=ranks, curves=curves, overheads=beside, links=links)
    finally:
        dist.destroy_process_group()


#: Copies are operations of the log; what is left is to wait for each other.
_SHM = Link(name="shm", bandwidth=1e15, latency=0.0, progress=Progress.WAITING, launch=0.0)


def _gloo(nbytes: int = 8 * 2**20, times: int = 12) -> Link:
    """Measure messages that all ranks send to their neighbors at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    leaving, arriving = (
        torch.ones(nbytes, dtype=torch.uint8),
        torch.empty(nbytes, dtype=torch.uint8),
    )
    walls, costs = [], []
    for _ in range(times):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        works = [
            dist.isend(leaving, (rank + 1) % ranks),
            dist.irecv(arriving, (rank - 1) % ranks),
        ]
        for work in works:
            assert work is not None
            work.wait()
        walls.append(time.perf_counter() - wall)
        costs.append(time.process_time() - cpu)
    slowest = torch.tensor(statistics.quantiles(walls, n=4)[0])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Link(
        name=GLOO,
        bandwidth=nbytes / slowest.item(),
        latency=0.0,
        launch=0.0,
        host_cost=min(statistics.median(costs), slowest.item()) / nbytes,
    )

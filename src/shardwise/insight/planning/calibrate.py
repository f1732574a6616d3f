"""What this machine can do, read from recorded steps, and kept in a file for plans.

Ranks share a machine: its memory, and its processors if there are more of them. So steps are
recorded in one process, and then in as many at once as there are accelerators or processors.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch

from shardwise.base import devices
from shardwise.base.caches import cache_folder
from shardwise.base.errors import CheckpointError
from shardwise.base.files import Links, read_small, replace_file
from shardwise.base.strict import Fields, parse, refuse
from shardwise.elastic.world import usable_cores
from shardwise.insight.planning.clock import CALLS, WORK
from shardwise.insight.planning.machine import (
    LINKS,
    Device,
    Execution,
    Link,
    Machine,
    MachineError,
    Progress,
    device_reported_as,
    link_named,
)

_VERSION = 3
_MOST = 1 << 20  # bytes of the file
#: How much more a byte costs the host through a network than on this machine, where packets are 40
#: times as long. Fitted on one row of docs/benchmarks.md: two hosts, 10 Gbit/s.
_THROUGH_A_NETWORK = 1.5
_FREE = 1e15  # bytes a second, where bytes cost the processor's time and nothing else

#: Seconds by unit; see :func:`shardwise.timeline.recorded.costs_of_ranks`.
Costs = Mapping[str, float]


def rate(costs: Costs, unit: str) -> float:
    """Return how much of a unit is done in a second; much, if no time of it was seen."""
    return 1 / max(costs[unit], 1 / _FREE)


def links_of(costs: Costs) -> dict[str, Link]:
    """Return what collectives cost inside a host, by transport."""
    names = [unit.partition(".")[2] for unit in costs if unit.startswith("launch.")]
    return {
        name: Link(
            name=name,
            bandwidth=_FREE,
            latency=0.0,
            progress=Progress.WAITING,
            launch=costs[f"launch.{name}"],
            host_cost=costs.get(f"sent.{name}", 0.0),
        )
        for name in names
    }


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Everything that was measured on this machine.

    Attributes:
        device: the type that was measured, such as ``"cpu"``.
        processor: what it calls itself.
        cores: how many processors this process may use.
        torch: version.
        costs: what n processes at once take, each with its part of the processors, by ascending n.
    """

    device: str
    processor: str
    cores: int
    torch: str
    costs: Mapping[int, Costs]

    def machine(self, ranks_per_host: int, link: str | None = None) -> Machine:
        """Return this machine, as n ranks at once find it.

        Args:
            ranks_per_host: how many.
            link: name of the link between hosts; by default, messages on this machine.

        Raises:
            MachineError: the link is not known.
        """
        ranks = next((n for n in self.costs if n >= ranks_per_host), max(self.costs))
        on_cpus = self.device == devices.CPU.type
        slower = max(1.0, ranks_per_host / ranks) if on_cpus else 1.0  # they take turns
        costs = {unit: slower * cost for unit, cost in self.costs[ranks].items()}
        links = links_of(costs)
        between = LINKS["ib-400"] if link is None else link_named(link)
        messages = links_of(self.costs[max(self.costs)]).get(devices.GLOO.name)
        if messages is not None:
            cost = slower * messages.host_cost
            through = replace(between, launch=messages.launch, host_cost=_THROUGH_A_NETWORK * cost)
            between = replace(messages, host_cost=cost) if link is None else through
        device = self._device(costs, ranks_per_host)
        return Machine(
            device=device,
            inside=links.get("shm") or messages or LINKS[device.host_link],
            between=between,
            ranks_per_host=ranks_per_host,
            links=links,
        )

    def _device(self, costs: Costs, ranks_per_host: int) -> Device:
        on_cpus = self.device == devices.CPU.type
        known = None if on_cpus else device_reported_as(self.processor)
        if known is None:
            memory = devices.free_memory(devices.current(self.device))
            known = Device(
                name=self.device,
                memory=memory // ranks_per_host if on_cpus else memory,
                memory_bandwidth=rate(costs, "bytes.float32"),
                flops={name: rate(costs, f"product.{name}") for name in ("float32", "bfloat16")},
            )
        execution = Execution.DIRECT if on_cpus else Execution.QUEUED
        return replace(known, execution=execution, costs=costs, op_overhead=costs.get("host", 0.0))

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"version": _VERSION, **asdict(self)}).encode())

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
            by_ranks = Fields(fields.object("costs"), f"{path.name}, 'costs'")
            if not by_ranks.all() or not all(ranks.isdecimal() for ranks in by_ranks.all()):
                refuse(by_ranks.where, list(by_ranks.all()), "costs by number of ranks")
            found = {int(n): _costs(Fields(by_ranks.object(n), path.name)) for n in by_ranks.all()}
            return cls(
                device=fields.text("device"),
                processor=fields.text("processor"),
                cores=fields.number("cores", 1),
                torch=fields.text("torch"),
                costs=dict(sorted(found.items())),
            )
        except CheckpointError as error:
            expected = "what `shardwise calibrate` writes: run it again"
            raise MachineError(str(path), f"a damaged file ({error})", expected) from None


def _costs(fields: Fields) -> Costs:
    for missing in sorted({*CALLS, *WORK} - fields.all().keys()):
        refuse(fields.where, f"no cost of {missing}", "all that plans need")
    return {unit: fields.real(unit) for unit in fields.all()}


# -- the file --------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Return where the calibration of this machine is kept: in the user's cache folder.

    Raises:
        MachineError: that place is not set.
    """
    try:
        folder = cache_folder()
    except RuntimeError:  # no HOME, and the system does not know the user
        raise MachineError("HOME", "no home folder", "one, or XDG_CACHE_HOME") from None
    # A host may be called anything.
    host = re.sub(r"[^\w.-]", "_", platform.node(), flags=re.ASCII)[:64]
    return folder / f"machine-{host or 'here'}.json"


def check_writable(path: Path) -> None:
    """Check that a calibration can be written, before a minute is spent on it.

    Raises:
        OSError: it cannot.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


def stored() -> Calibration | None:
    """Return what ``shardwise calibrate`` measured here; ``None`` if it never has.

    Raises:
        MachineError: the file is damaged, or was written for another torch or other processors.
    """
    path = cache_file()
    if not os.path.lexists(path):
        return None
    found = Calibration.load(path)
    was = f"{found.processor}, torch {found.torch}, cores: {found.cores}"
    now = f"{processor()}, torch {torch.__version__}, cores: {usable_cores()}"
    if was != now:
        raise MachineError(str(path), was, f"{now}: run `shardwise calibrate` again")
    return found


def processor() -> str:
    """Return what the accelerator calls itself, or the processor if there is none."""
    if (device := devices.accelerator()) is not None:
        return devices.name(device)
    known = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*: (.+)", known, re.MULTILINE)
    return found[1].strip() if found else platform.machine()

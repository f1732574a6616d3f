"""What a step is timed for: devices, the links between them, and how many ranks share a host.

Devices and links are known by name, from data sheets; read from a file; or measured on this machine
by ``shardwise calibrate``. Torch is not imported.

A file is TOML:

    ranks_per_host = 8

    [device]
    name = "my-gpu"
    memory = 85_899_345_920        # bytes
    memory_bandwidth = 2.0e12      # bytes a second
    matmul_efficiency = 0.7        # optional, as all that follow but flops
    attention_efficiency = 0.45
    memory_efficiency = 0.8
    op_overhead = 8e-6             # seconds of the host for each operation
    flops.bfloat16 = 312e12        # operations a second of dense matrix products, by dtype
    flops.float32 = 19.5e12

    [link]                         # inside a host
    name = "nvlink3"               # a known link, or a new one with the fields below
    bandwidth = 230e9              # bytes a second that a collective reaches, in one direction
    latency = 3e-6                 # seconds from rank to rank

    [link_between_hosts]
    name = "my-fabric"
    bandwidth = 23e9
    latency = 6e-6
    shared_by = "rank"             # or "host": all ranks of a host share the bandwidth
"""

from __future__ import annotations

import difflib
import enum
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from shardwise.base.errors import CheckpointError, NotPossibleError
from shardwise.base.files import Links, read_small
from shardwise.base.units import printable

T = TypeVar("T")

_GIB = 2**30
_MAX_BYTES = 1 << 16  # of a file that describes a machine


class MachineError(NotPossibleError):
    """A device, a link or a file of them that cannot be used."""

    def __init__(self, where: str, found: object, expected: str) -> None:
        super().__init__(printable(where), printable(str(found))[:200], expected)


class Execution(enum.Enum):
    """How operations of a program come to run."""

    QUEUED = "queued"  # the host issues them, and runs ahead of the device
    DIRECT = "direct"  # the program runs them itself, one after the other


class Progress(enum.Enum):
    """Who moves the bytes of a collective that is under way."""

    ASYNCHRONOUS = "asynchronous"  # somebody else, while the program computes
    WAITING = "waiting"  # the thread that waits for it


class SharedBy(enum.Enum):
    """Whose bandwidth the bandwidth of a link is."""

    RANK = "rank"  # each rank has a link of its own
    HOST = "host"  # the ranks of a host share one


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank computes on.

    Attributes:
        name: as users give it, such as ``"h100"``.
        memory: bytes that torch can allocate on it.
        memory_bandwidth: bytes a second, of the data sheet.
        flops: operations a second of dense matrix products by dtype, as torch names it; of the
            data sheet, without sparsity.
        matmul_efficiency: share of ``flops`` that large matrix products reach.
        attention_efficiency: share of ``flops`` that fused attention reaches.
        memory_efficiency: share of ``memory_bandwidth`` that other operations reach.
        op_overhead: seconds that the host takes for each operation.
        reported_as: words of the name that the device reports to torch, such as ``"H100 HBM3"``.
        host_link: name of the link between devices of a host.
        execution: whether the host runs ahead of the device.
        costs: measured seconds by unit of work; see :mod:`shardwise.insight.planning.clock`. Empty
            if it was not measured.
    """

    name: str
    memory: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    matmul_efficiency: float = 0.7
    attention_efficiency: float = 0.45
    memory_efficiency: float = 0.8
    op_overhead: float = 8e-6
    reported_as: str = ""
    host_link: str = "pcie4"
    execution: Execution = Execution.QUEUED
    costs: Mapping[str, float] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Return operations a second in a dtype; in an unknown one, those of the next wider."""
        for each in (dtype, "bfloat16", "float32"):
            if each in self.flops:
                return self.flops[each]
        return max(self.flops.values())


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects ranks.

    Attributes:
        name: as users give it, such as ``"ib-400"``.
        bandwidth: bytes a second in one direction that large collectives reach.
        latency: seconds from one rank to the next.
        shared_by: whether each rank has that bandwidth, or all ranks of a host together.
        progress: who moves the bytes.
        launch: seconds of the host for each collective.
        host_cost: seconds of the host for each byte.
    """

    name: str
    bandwidth: float
    latency: float
    shared_by: SharedBy = SharedBy.RANK
    progress: Progress = Progress.ASYNCHRONOUS
    launch: float = 15e-6
    host_cost: float = 0.0


#: From the makers' data sheets; where a sheet has numbers with sparsity, half of them. Memory is
#: what torch reports. Only devices on which a plan has been held against a run (benchmarks/gpu.md)
#: or a published training (benchmarks/plan_published.py). Any other needs a file, or is measured.
_DEVICES = (
    # nvidia.com: H200 data sheet, SXM (1,979 TFLOPS with sparsity)
    ("h200", "H200", 139.8, 4.8e12, (989.4e12, 67e12, 1978.9e12), "nvlink4"),
    # nvidia.com: H100 data sheet, SXM
    ("h100", "H100 HBM3", 79.2, 3.35e12, (989.4e12, 67e12, 1978.9e12), "nvlink4"),
    # the one of torchtitan's tables: 96 GB of HBM2e, 500 W
    ("h100-hbm2e", "", 95.0, 2.4e12, (989.4e12, 67e12, 1978.9e12), "nvlink4"),
    # nvidia.com: A100 data sheet, 80 GB
    ("a100", "A100 80GB", 79.2, 2.039e12, (312e12, 19.5e12), "nvlink3"),
)
#: Words by which variants with other figures than the devices above report themselves.
_VARIANTS = frozenset({"NVL"})
#: Share of the peak that matrix products reach: fitted on one published row each, by
#: benchmarks/plan_published.py. The others are not fitted.
FITTED = {"a100": 0.75, "h100-hbm2e": 0.48}
_DTYPES = ("bfloat16", "float32", "float8_e4m3fn")

DEVICES: Mapping[str, Device] = {
    name: Device(
        name=name,
        memory=int(gib * _GIB),
        memory_bandwidth=bandwidth,
        flops=dict(zip(_DTYPES, peaks, strict=False)) | {"float16": peaks[0]},
        reported_as=reported_as,
        host_link=host_link,
        matmul_efficiency=FITTED.get(name, 0.7),
    )
    for name, reported_as, gib, bandwidth, peaks, host_link in _DEVICES
}

#: The links between a device and its host, by the link between devices, if they are not the same.
_TO_HOST = {
    "nvlink3": "pcie4",
    "nvlink4": "pcie5",
    "nvlink5": "pcie5",
    "infinity-fabric": "pcie5",
}

#: Bandwidth is what nccl-tests reach with large messages: about four fifths of what NVLink and PCIe
#: have in one direction, and 95 % of a network.
LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link(name="nvlink3", bandwidth=235e9, latency=2.5e-6),  # 300 GB/s: A100
        Link(name="nvlink4", bandwidth=360e9, latency=2.5e-6),  # 450 GB/s: H100, H200
        Link(name="nvlink5", bandwidth=720e9, latency=2.5e-6),  # 900 GB/s: B200
        Link(name="infinity-fabric", bandwidth=320e9, latency=3e-6),  # 448 GB/s: MI300X
        Link(name="pcie4", bandwidth=22e9, latency=4e-6),  # 32 GB/s
        Link(name="pcie5", bandwidth=44e9, latency=4e-6),  # 64 GB/s
        *(
            Link(name=f"ib-{gbit}", bandwidth=0.95 * gbit / 8 * 1e9, latency=5e-6)
            for gbit in (100, 200, 400, 800)
        ),
        *(
            Link(
                name=f"ethernet-{gbit}",
                bandwidth=0.95 * gbit / 8 * 1e9,
                latency=25e-6,
                shared_by=SharedBy.HOST,
            )
            for gbit in (1, 10, 25, 40, 100, 200, 400)
        ),
    )
}


def device_reported_as(name: str) -> Device | None:
    """Return the device that reports a name to torch, such as ``"NVIDIA H100 80GB HBM3"``.

    Returns:
        ``None`` if no known device does.
    """
    words = name.replace("-", " ").split()  # CUDA joins some with hyphens
    for device in DEVICES.values():
        parts = device.reported_as.split()
        # Word by word, so that no "H200" is found in "GH200".
        if parts and all(part in words for part in parts) and not _VARIANTS.intersection(words):
            return device
    return None


def link_named(name: str) -> Link:
    """Return a known link.

    Raises:
        MachineError: it is not known.
    """
    return _named("link", name, LINKS)


def _named(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    names = ", ".join(known)
    models = "the model of an accelerator: " if kind == "device" else ""
    raise MachineError(f"--{kind}", f"{name}{hint}", f"{models}one of {names}, or a --device-file")


def link_to_host(device: Device) -> Link:
    """Return the link between a device and the memory of its host."""
    return LINKS[_TO_HOST.get(device.host_link, device.host_link)]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices, and what connects them.

    Attributes:
        device: of every rank.
        inside: the link between ranks of one host.
        between: the link between hosts.
        ranks_per_host: ranks that share a host.
        links: the link of a transport inside a host, by its name; ``inside`` for all others.
    """

    device: Device
    inside: Link
    between: Link
    ranks_per_host: int = 8
    links: Mapping[str, Link] = field(default_factory=dict)

    @classmethod
    def named(cls, device: str) -> Self:
        """Return hosts of a known device, with the link between them that is usual.

        Raises:
            MachineError: the device is not known.
        """
        found = _named("device", device, DEVICES)
        return cls(device=found, inside=LINKS[found.host_link], between=LINKS["ib-400"])

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a machine from a TOML file; this module's docstring has an example.

        Raises:
            MachineError: the file cannot be read, or does not describe a machine.
        """
        rest, where = _toml(path), str(path)
        tables = {name: _table(rest, name, where) for name in ("device", *_FILE_LINKS)}
        device = _device(*tables["device"])
        defaults = (LINKS[device.host_link], LINKS["ib-400"])
        inside, between = (
            _link(*tables[name], default)
            for name, default in zip(_FILE_LINKS, defaults, strict=True)
        )
        ranks = int(_read(rest, where, ["ranks_per_host"], {}).get("ranks_per_host", 8))
        return cls(device=device, inside=inside, between=between, ranks_per_host=ranks)


# -- files ----------------------------------------------------------------------------------------


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(path, _MAX_BYTES, Links.FOLLOW).decode())
    except CheckpointError as error:  # also for a pipe, which would be waited for
        reason = str(error).removeprefix(f"{path}: ")
        raise MachineError(str(path), f"no file to read: {reason}", "a TOML file") from None
    except (ValueError, RecursionError) as error:
        raise MachineError(str(path), f"no TOML ({error})", "a TOML file") from None


_FILE_LINKS = ("link", "link_between_hosts")
#: The least and the most of numbers in a file; of all others, 1 and 1e30.
_LIMITS = {
    "matmul_efficiency": (1e-3, 1.0),
    "attention_efficiency": (1e-3, 1.0),
    "memory_efficiency": (1e-3, 1.0),
    "op_overhead": (0.0, 1.0),
    "latency": (0.0, 10.0),
}


def _table(values: dict[str, Any], name: str, where: str) -> tuple[dict[str, Any], str]:
    """Take a table out of another, and say where it is; an empty one if it is not there."""
    found, where = values.pop(name, {}), f"{where}, [{name}]"
    if not isinstance(found, dict):
        raise MachineError(where, type(found).__name__, "a table")
    return found, where


def _read(
    table: dict[str, Any],
    where: str,
    numbers: Iterable[str],
    texts: Mapping[str, Iterable[str]],
    needed: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the fields of a table, checked.

    Args:
        table: the table.
        where: the file and the table, for error messages.
        numbers: names of the numbers that it may have.
        texts: names of the texts that it may have, each with what it may be; nothing: anything.
        needed: the names of those that have to be there.
    """
    for name in needed:
        if name not in table:
            raise MachineError(where, f"no {name}", f"a field {name}")
    for name, value in table.items():
        if name in texts:
            names = list(texts[name])
            expected = f"one of {', '.join(names)}" if names else "up to 100 printable characters"
            fits = isinstance(value, str) and value.isprintable() and 0 < len(value) <= 100
            fits = fits and (not names or value in names)
        elif name in numbers:
            least, most = _LIMITS.get(name, (1.0, 1e30))
            expected = f"a number from {least:g} to {most:g}"
            fits = type(value) in (int, float) and least <= value <= most
        else:
            raise MachineError(where, f"the unknown field {name}", "others")
        if not fits:
            raise MachineError(f"{where}, {name}", value, expected)
    return table


def _device(table: dict[str, Any], where: str) -> Device:
    flops, at = _table(table, "flops", where)
    if not _read(flops, at, flops, {}):
        raise MachineError(at, "no dtype", "such as bfloat16 = 312e12")
    shares = ("matmul_efficiency", "attention_efficiency", "memory_efficiency")
    needed = ("name", "memory", "memory_bandwidth")
    numbers = (*needed[1:], *shares, "op_overhead")
    found = _read(table, where, numbers, {"name": (), "host_link": LINKS}, needed)
    return Device(**{**found, "memory": int(found["memory"]), "flops": flops})


def _link(table: dict[str, Any], where: str, default: Link) -> Link:
    shared_by = [each.value for each in SharedBy]
    texts: dict[str, Iterable[str]] = {"name": (), "shared_by": shared_by}
    needed = () if str(table.get("name", default.name)) in LINKS else ("bandwidth",)
    found = _read(table, where, ("bandwidth", "latency"), texts, needed)
    if "shared_by" in found:
        found["shared_by"] = SharedBy(found["shared_by"])
    return replace(LINKS.get(found.get("name", default.name), default), **found)

"""A job over several hosts as its user describes it, and the command lines that start it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwise.launch.errors import UserError
from shardwise.launch.network import format_endpoint, is_ipv6, parse_endpoint

UNNUMBERED = -1  # rank of a host to which host 0 assigns one
_NAME = re.compile(r"[\w.:-]+", re.ASCII)  # of a host, or its address
_OVER_HOSTS = ("train", "doctor")  # commands that take the options for several hosts


@dataclass(frozen=True)
class Nodes:
    """A job over several hosts, as its user describes it on each of them.

    Attributes:
        count: number of hosts; the largest number if ``least`` is given.
        rank: of this host, 0 .. count - 1; host 0 is the one at ``address``. :data:`UNNUMBERED`
            lets host 0 choose, if ``least`` is given.
        address: of host 0, a name or a number.
        port: of the rendezvous on host 0.
        timeout: seconds to wait for all hosts, or for ``least`` of them.
        least: the smallest number of hosts that the job runs on, in an elastic job, which hosts may
            join and leave. None if exactly ``count`` hosts take part from start to end.
    """

    count: int
    rank: int
    address: str
    port: int
    timeout: float = 300.0
    least: int | None = None

    @classmethod
    def of(
        cls, nnodes: int | str | None, rank: int | None, rdzv: str | None, timeout: float
    ) -> Nodes | None:
        """Read ``--nnodes``, ``--node-rank``, ``--rdzv`` and ``--rdzv-timeout``.

        Returns:
            The job, or None if none of them asks for several hosts.

        Raises:
            UserError: one of them is missing or out of range.
        """
        if nnodes is None:
            for option, found in (("--node-rank", rank), ("--rdzv", rdzv)):
                if found is not None:
                    raise UserError(
                        f"{option}: found without --nnodes, expected --nnodes N as well"
                    )
            return None
        least, count = numbers_of_hosts(str(nnodes))
        if rank is None and least is not None:
            rank = UNNUMBERED
        elif rank is None or not 0 <= rank < count:
            raise UserError(f"--node-rank: found {rank}, expected 0 to {count - 1}")
        where = parse_endpoint(rdzv or "")
        if where is None:
            raise UserError(
                f"--rdzv: found {rdzv}, expected HOST:PORT of the host with --node-rank 0; an "
                "IPv6 address in brackets, as [2001:db8::1]:29400"
            )
        if not timeout > 0:
            raise UserError(f"--rdzv-timeout: found {timeout}, expected a number above 0")
        return cls(count, rank, *where, timeout, least)

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may join and leave while the job runs."""
        return self.least is not None

    @property
    def where(self) -> str:
        """The rendezvous as ``HOST:PORT``."""
        return format_endpoint(self.address, self.port)

    @property
    def nnodes(self) -> str:
        """The number of hosts as users write it: ``2``, or ``1:4``."""
        return str(self.count) if self.least is None else f"{self.least}:{self.count}"


def numbers_of_hosts(nnodes: str) -> tuple[int | None, int]:
    """Read ``N`` or ``MIN:MAX``: the smallest number of hosts, None for ``N``, and the largest.

    Raises:
        UserError: it is neither.
    """
    least, colon, most = nnodes.rpartition(":")
    numbers = [int(n) for n in ([least, most] if colon else [most]) if n.isdecimal() and len(n) < 7]
    if len(numbers) != 1 + len(colon) or not 1 <= numbers[0] <= numbers[-1]:
        expected = "1 or more, or MIN:MAX with 1 <= MIN <= MAX"
        raise UserError(f"--nnodes: found {nnodes}, expected {expected}")
    return (numbers[0] if colon else None), numbers[-1]


@dataclass(frozen=True)
class Terms:
    """What hosts that join later have to agree on.

    Attributes:
        options: the options that must be the same on all hosts, by name.
        why_not: given a number of hosts, returns why the job cannot run over them, or None if it
            can.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    why_not: Callable[[int], str | None] = lambda hosts: None


def spans_hosts(nodes: Nodes | None) -> bool:
    """Whether the user asked for a job over several hosts."""
    return nodes is not None and nodes.count > 1


@dataclass(frozen=True)
class Share:
    """The ranks of one host among all ranks of a generation.

    Attributes:
        first: rank of its first process.
        world_size: ranks of all hosts.
        address: of the host of rank 0, which serves the store.
        port: of the store.
        interface: the network interface to the other hosts; None if it was not found.
        generation: how many generations the job has had before.
    """

    first: int
    world_size: int
    address: str
    port: int
    interface: str | None
    generation: int = 0


@dataclass(frozen=True)
class Layout:
    """Where a job runs.

    Attributes:
        hosts: their names; the rendezvous is on the first.
        nproc: ranks of each.
        port: of the rendezvous.
        arguments: of ``shardwise``: ``train lm --model llama-150m``.
        nnodes: ``MIN:MAX`` for an elastic job, which hosts may join and leave.
    """

    hosts: tuple[str, ...]
    nproc: int
    port: int
    arguments: tuple[str, ...]
    nnodes: str | None = None

    def check(self) -> None:
        """Check that the job can be started.

        Raises:
            UserError: names what is wrong.
        """
        if not self.arguments:
            raise UserError("launch-lines: found no command, expected one after --: -- train lm")
        if self.arguments[0] not in _OVER_HOSTS:
            expected = "options of its own, then --, then train or doctor: -- train lm"
            raise UserError(f"launch-lines: found {self.arguments[0]}, expected {expected}")
        if self.arguments[0] == "train" and (*self.arguments, "")[1][:1] in ("", "-"):
            raise UserError(
                "launch-lines: found train, expected a recipe to train as well: -- train lm"
            )
        if len(set(self.hosts)) < len(self.hosts) or not all(map(_NAME.fullmatch, self.hosts)):
            raise UserError(f"--hosts: found {','.join(self.hosts)}, expected names, each once")
        for host in self.hosts:
            if ":" in host and not is_ipv6(host):
                expected = "names without ports; the port goes into --rdzv-port"
                raise UserError(f"--hosts: found {host}, expected {expected}")
        if self.nproc < 1:
            raise UserError(f"--nproc: found {self.nproc}, expected 1 or more")
        if not 0 < self.port < 65536:
            raise UserError(f"--rdzv-port: found {self.port}, expected 1 to 65535")
        if self.nnodes is not None:
            least, most = numbers_of_hosts(self.nnodes)
            if least is None or most < len(self.hosts):
                expected = f"MIN:MAX, with MAX {len(self.hosts)}, the hosts of --hosts, or more"
                raise UserError(f"--nnodes: found {self.nnodes}, expected {expected}")
        ours = {"--nnodes", "--node-rank", "--rdzv", "--nproc"}
        for argument in self.arguments:
            if argument.partition("=")[0] in ours:
                raise UserError(
                    f"launch-lines: found {argument} after --, expected none: launch-lines adds it"
                )


def own_lines(layout: Layout) -> list[tuple[str, str]]:
    """Return each host with its command line for our own launcher, and one for hosts that join."""
    lines = []
    places = [(host, ["--node-rank", str(rank)]) for rank, host in enumerate(layout.hosts)]
    if layout.nnodes is not None:
        places.append(("every host that joins later", []))
    for host, own in places:
        words = ["shardwise", *layout.arguments, "--nproc", str(layout.nproc)]
        if len(places) > 1:
            words += ["--nnodes", layout.nnodes or str(len(layout.hosts)), *own]
            words += ["--rdzv", format_endpoint(layout.hosts[0], layout.port)]
        lines.append((host, shlex.join(words)))
    return lines


def torchrun_lines(layout: Layout) -> list[tuple[str, str]]:
    """Return each host with its command line for torchrun.

    Raises:
        UserError: the command asks for restarts of our own launcher, or torchrun cannot start it.
    """
    command, *options = layout.arguments
    ours = [o for o in options if o.partition("=")[0] == "--max-restarts"]
    if ours or command == "doctor":
        found = ours[0] if ours else command
        raise UserError(f"--torchrun: found {found} after --, expected train without it")
    lines = []
    for rank, host in enumerate(layout.hosts):
        words = ["torchrun", f"--nnodes={len(layout.hosts)}", f"--node-rank={rank}"]
        words += [f"--nproc-per-node={layout.nproc}", "--master-addr", layout.hosts[0]]
        words += ["--master-port", str(layout.port), "-m", "shardwise", *layout.arguments]
        lines.append((host, shlex.join(words)))
    return lines


def slurm_script(layout: Layout, nodes: int) -> str:
    """Return a script for ``sbatch`` over ``nodes`` nodes, whichever Slurm assigns."""
    command = shlex.join(["shardwise", *layout.arguments, "--nproc", str(layout.nproc)])
    doctor = f"shardwise doctor --nproc {layout.nproc}"
    where = '--nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rdzv "$MEET"'
    return f"""#!/bin/bash
#SBATCH --job-name=shardwise
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Slurm asks ranks to save and stop, five minutes before the time is over; --auto-resume continues.
#SBATCH --signal=TERM@300
set -euo pipefail

# The rendezvous is on the first host of the job.
MEET="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{layout.port}"
export MEET

# Find problems between the hosts before training starts.
srun bash -c {shlex.quote(f"exec {doctor} {where}")}

srun --kill-on-bad-exit=1 bash -c {shlex.quote(f"exec {command} {where}")}
"""

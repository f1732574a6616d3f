"""Which hosts may take part in a job, and how many of them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.launch.hosts import UNNUMBERED, Nodes, Terms
from shardwise.launch.wire import Line

REST = 600.0  # seconds for which a host that failed while it joined is not let in again


class Host:
    """A host, as the meeting knows it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.heard = time.monotonic()
        self.rank = UNNUMBERED
        self.hello: Mapping[str, Any] = {}  # what it said of itself when it came
        self.ready: Mapping[str, Any] | None = None
        self.training = False  # its ranks have made a step in this round
        self.ended: Mapping[str, Any] | None = None
        self.on_trial = False  # it joined for this round, and not all hosts have made a step
        self.why_lost = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"host {self.rank} ({self.line.peer})"

    @property
    def failed(self) -> bool:
        """Whether its ranks ended badly."""
        return self.ended is not None and bool(self.ended["failed"])

    @property
    def is_echo(self) -> bool:
        """Whether they did so only because ranks of other hosts went first."""
        return self.ended is not None and bool(self.ended["echo"])

    @property
    def signalled(self) -> bool:
        """Whether a signal asked its launcher to stop."""
        return self.ended is not None and bool(self.ended["signalled"])


def names(hosts: Sequence[Host]) -> str:
    """Hosts for people."""
    return " and ".join(host.name for host in hosts)


def counted(hosts: int) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{hosts} {'host' if hosts == 1 else 'hosts'}"


class Admission:
    """The rules for hosts that want to take part.

    Args:
        nodes: the job, as host 0 was told of it.
        terms: what hosts have to agree with, and how many fit.
    """

    def __init__(self, nodes: Nodes, terms: Terms) -> None:
        self._nodes = nodes
        self._terms = terms
        # As they come from other hosts.
        self._options: dict[str, Any] = json.loads(json.dumps(dict(terms.options)))
        self._failed: dict[str, float] = {}

    def number(self, asked: int, here: Sequence[Host]) -> int:
        """The rank of a host: its own, or the first that is free."""
        if asked != UNNUMBERED:
            return asked
        taken = {0, *(host.rank for host in here)}
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)

    def remember(self, host: Host) -> None:
        """Note that a host failed while it joined."""
        self._failed[host.line.peer] = time.monotonic()

    def most(self, hosts: int) -> tuple[int, str]:
        """How many of so many hosts can take part together; 0: too few.

        Returns:
            The number, and why it is not larger.
        """
        least = self._nodes.least
        if least is None:
            return hosts, ""
        why = ""
        for count in range(min(hosts, self._nodes.count), least - 1, -1):
            trouble = self._terms.why_not(count)
            if trouble is None:
                return count, why
            why = why or f"the job cannot run over {counted(count)}: {trouble}"
        return 0, why

    def trouble(
        self, rank: int, message: Mapping[str, Any], here: Sequence[Host], *, begun: bool
    ) -> str | None:
        """Why a host may not take part.

        Args:
            rank: its number.
            message: what it says of itself.
            here: the hosts that take part.
            begun: whether the job has begun.
        """
        nodes = self._nodes
        later = nodes.least is not None
        if begun and not later:
            return (
                f"--rdzv: the job at {nodes.where} has begun without this host; where hosts may "
                "come later, --nnodes is MIN:MAX"
            )
        if str(message["nnodes"]) != nodes.nnodes:
            return f"--nnodes: found {message['nnodes']}, expected {nodes.nnodes}, as host 0 has"
        twin = next((host for host in here if host.rank == rank), None)
        if twin is not None:
            return (
                f"--node-rank: found {rank}, which the host {twin.line.peer} has too; expected "
                f"one of its own for every host{', or none' if later else ''}"
            )
        for other in here:
            found, expected = message["nproc"], other.hello["nproc"]
            if found != expected:
                return f"--nproc: found {found}, expected {expected}, as {other.name} has"
            trouble = _difference(message["versions"], other.hello["versions"], other.name)
            if trouble is not None:
                return trouble
        trouble = _difference(message["options"], self._options, "host 0") if later else None
        if trouble is not None:
            return trouble
        if len(here) >= nodes.count:
            return f"--nnodes: the job at {nodes.where} has its {counted(nodes.count)} already"
        return None

    def too_soon(self, host: Host) -> str | None:
        """Why a host that failed while it joined may not try again yet."""
        since = time.monotonic() - self._failed.get(host.line.peer, -REST)
        if since >= REST:
            return None
        return (
            f"--rdzv: this host failed {since:.0f} s ago while it joined the job at "
            f"{self._nodes.where}; look for the reason there, and try again after "
            f"{REST - since:.0f} s"
        )


def _difference(told: Mapping[str, Any], expected: Mapping[str, Any], whose: str) -> str | None:
    """The first thing that one host says of itself and another does not."""
    for name in {**told, **expected}:
        if told.get(name) != expected.get(name):
            return f"{name}: found {told.get(name)}, expected {expected.get(name)}, as {whose} has"
    return None

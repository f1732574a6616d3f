"""The rules of a job over several hosts: who may take part, how a generation ends, what follows."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.launch.hosts import UNNUMBERED, Nodes, Terms
from shardwise.launch.network import Line

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
        # Host 0 has a place, even where another was quicker.
        if rank and len({0, *(host.rank for host in here)}) >= nodes.count:
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


HOSTS, RESTART, ERROR = "hosts", "restart", "error:"  # what a line begins with
_ECHO = 3.0  # seconds for the host to speak whose rank, or which, went first


@dataclass(frozen=True)
class Ruling:
    """What follows a round.

    Attributes:
        again: whether another round does.
        counted: whether that is one of ``--max-restarts``.
        label: what a line with the reason begins with.
        why: the reason; empty where all is as it should be.
        leave: hosts that take no part in another round, and what each is told.
    """

    again: bool
    counted: bool
    label: str
    why: str
    leave: tuple[tuple[Host, str], ...] = ()


class Round:
    """A round that runs.

    Args:
        hosts: that take part; the caller takes away those that are lost.
        later: whether hosts may come and leave while the job goes on.
        grace: seconds for the others to stop after the first has.
    """

    def __init__(self, hosts: list[Host], *, later: bool, grace: float) -> None:
        self._hosts = hosts
        self._later = later
        self._grace = grace
        self._lost: list[Host] = []
        self._echoed = 0.0  # when ranks were the first to notice that others are gone
        self._stopped: tuple[float, str] | None = None  # when a signal stopped a host, and which
        self._first_end = 0.0  # when the first host had stopped
        self.regrouping = False  # hosts were asked to save and stop, since others join

    def step(self, host: Host) -> None:
        """All ranks of a host have made a step."""
        host.training = True
        if all(each.training for each in self._hosts):
            for each in self._hosts:
                each.on_trial = False

    def end(self, host: Host, message: Mapping[str, Any]) -> None:
        """The ranks of a host have ended."""
        host.ended = message
        if message["stopped"]:
            self._first_end = self._first_end or host.heard
        # Where hosts may leave, host 0 stops the job, another itself; ranks stop for both reasons.
        first = message["signalled"] and host.rank == 0
        if self._stopped is None and (first if self._later else message["stopped"]):
            self._stopped = (host.heard, host.name)

    def lose(self, host: Host) -> None:
        """A host is gone. One that had ended well already is no loss."""
        if host.ended is None or host.failed:
            self._lost.append(host)

    @property
    def is_ending(self) -> bool:
        """Whether ranks of a host have ended."""
        return bool(self._lost) or any(host.ended is not None for host in self._hosts)

    def ruling(self, restarts: int) -> Ruling | None:
        """Whether the round is over, and what follows.

        Args:
            restarts: how often the job may still begin again after a failure.
        """
        now = time.monotonic()
        leaving = [host for host in self._hosts if self._later and host.signalled and host.rank]
        failed = [host for host in self._hosts if host.failed and host not in leaving]
        own = [host for host in failed if not host.is_echo]
        ended = all(host.ended is not None for host in self._hosts)
        waits = self._stopped is None or now - self._stopped[0] < self._grace
        orderly = not (self._lost or own) and (bool(leaving) or not failed)
        if orderly and (waits or ended):
            over = ended or self._is_late(leaving, now)
            return self._after_order(leaving, failed) if over else None
        if waits and not (self._lost or own or ended):
            # Ranks that lost a peer say so at once; why, is told a moment later.
            self._echoed = self._echoed or now
            if now - self._echoed < _ECHO:
                return None
        return self._after_failure(leaving, failed, own, restarts)

    def _is_late(self, leaving: list[Host], now: float) -> bool:
        """Whether there is no use in waiting for ranks that shall stop and have not."""
        if any(not host.training for host in leaving):
            return True  # they made no step that would have told the others
        asked = self.regrouping or bool(leaving)
        return asked and bool(self._first_end) and now - self._first_end > self._grace

    def _after_order(self, leaving: list[Host], failed: list[Host]) -> Ruling:
        rest = [host for host in self._hosts if host not in leaving]
        done = not failed and all(h.ended is not None and not h.ended["stopped"] for h in rest)
        asked = self.regrouping or bool(leaving)
        again = asked and self._stopped is None and not done
        why = f"{names(leaving)} left" if leaving and again else ""
        return Ruling(again, False, HOSTS, why, _farewell(leaving))

    def _after_failure(
        self, leaving: list[Host], failed: list[Host], own: list[Host], restarts: int
    ) -> Ruling:
        reasons = [f"{host.name} was lost: {host.why_lost}" for host in self._lost]
        reasons = reasons or [f"a rank of {host.name} failed" for host in own]
        if not reasons and self._stopped is not None:
            reasons = [f"{self._stopped[1]} was stopped"]
        why = "; ".join(reasons or [f"a rank of {host.name} failed" for host in failed])
        guests = self._guests_at_fault(own)
        if guests:
            text = "this host failed while it joined; the job goes on without it"
            parted = tuple((host, text) for host in guests)
            return Ruling(True, False, RESTART, why, (*parted, *_farewell(leaving)))
        fatal = any(host.ended is not None and not host.ended["may_restart"] for host in failed)
        if restarts > 0 and not fatal and self._stopped is None:
            return Ruling(True, True, RESTART, why, _farewell(leaving))
        return Ruling(False, False, ERROR, why)

    def _guests_at_fault(self, own: list[Host]) -> list[Host]:
        """Hosts on trial for whose sake, or by whose fault, the round has failed."""
        guests = [host for host in (*self._hosts, *self._lost) if host.on_trial]
        if self._stopped is not None or not all(host.on_trial for host in self._lost):
            return []
        return [host for host in guests if host in own or host in self._lost] or guests


def _farewell(leaving: list[Host]) -> tuple[tuple[Host, str], ...]:
    return tuple((host, "this host leaves; the job goes on without it") for host in leaving)

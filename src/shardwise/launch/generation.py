"""The rules of a job over several hosts: who may take part, how a generation ends, what follows.

A *generation* is one world of the job: a set of hosts, the ranks on them, a store. It ends when
ranks end or hosts are lost, and another one begins with the hosts that remain or have come since.

``rendezvous.py`` talks to the hosts; here are the decisions, without sockets and threads.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.launch.hosts import UNNUMBERED, Nodes, Terms
from shardwise.launch.launcher import Result, StoppedBy
from shardwise.launch.network import Connection

REST = 600.0  # seconds before a host that failed while it joined may try again
_SECONDARY = 3.0  # seconds to wait for the host that failed first, when others report its loss


class Host:
    """A host, as the rendezvous server knows it.

    Attributes:
        connection: the connection to it.
        heard: when it was heard from last, in seconds on the monotonic clock.
        rank: its number among the hosts.
        hello: what it reported about itself when it came.
        ready: what it reported for the next generation; None until it is ready for it.
        training: whether all its ranks have completed a step in this generation.
        on_probation: whether it joined for this generation, in which some host has not completed a
            step yet.
        result: how its ranks ended; None while they run.
        stopped_by: what asked them to stop.
        why_lost: why the connection ended.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.heard = time.monotonic()
        self.rank = UNNUMBERED
        self.hello: Mapping[str, Any] = {}
        self.ready: Mapping[str, Any] | None = None
        self.training = False
        self.on_probation = False
        self.result: Result | None = None
        self.stopped_by = StoppedBy.NOTHING
        self.why_lost = ""

    @property
    def name(self) -> str:
        """The host, for messages."""
        return f"host {self.rank} ({self.connection.peer})"

    @property
    def failed(self) -> bool:
        """Whether its ranks have failed."""
        return self.result is not None and self.result.is_failure

    @property
    def left(self) -> bool:
        """Whether a signal to its launcher stopped its ranks."""
        return self.result is not None and self.stopped_by is StoppedBy.LAUNCHER


def names(hosts: Sequence[Host]) -> str:
    """Join the names of hosts, for messages."""
    return " and ".join(host.name for host in hosts)


def counted(hosts: int) -> str:
    """Return ``1 host``, ``2 hosts``."""
    return f"{hosts} {'host' if hosts == 1 else 'hosts'}"


class Admission:
    """The rules for hosts that want to take part.

    Args:
        nodes: the job, as host 0 was given it.
        terms: what hosts have to agree on, and how many the job can run over.
    """

    def __init__(self, nodes: Nodes, terms: Terms) -> None:
        self._nodes = nodes
        self._terms = terms
        # As they arrive from other hosts.
        self._options: dict[str, Any] = json.loads(json.dumps(dict(terms.options)))
        self._failed: dict[str, float] = {}

    def number(self, requested: int, present: Sequence[Host]) -> int:
        """Return the rank of a host: the one it requested, or the first that is free."""
        if requested != UNNUMBERED:
            return requested
        taken = {0, *(host.rank for host in present)}
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)

    def note_failure(self, host: Host) -> None:
        """Remember that a host failed while it joined."""
        self._failed[host.connection.peer] = time.monotonic()

    def most(self, hosts: int) -> tuple[int, str]:
        """Return how many of ``hosts`` hosts can take part together, 0 if too few.

        Returns:
            The number, and why it is not larger.
        """
        least = self._nodes.least
        if least is None:
            return hosts, ""
        why = ""
        for count in range(min(hosts, self._nodes.count), least - 1, -1):
            problem = self._terms.why_not(count)
            if problem is None:
                return count, why
            why = why or f"the job cannot run over {counted(count)}: {problem}"
        return 0, why

    def refusal(
        self, host: Host, message: Mapping[str, Any], present: Sequence[Host], generation: int
    ) -> str | None:
        """Return why a host may not take part, or None if it may.

        Args:
            host: the host, with its rank.
            message: what it reported about itself.
            present: the hosts that take part already.
            generation: the current one; -1 before the first.
        """
        nodes = self._nodes
        if generation >= 0 and not nodes.is_elastic:
            return (
                f"--rdzv: the job at {nodes.where} has started without this host; for hosts to "
                "join later, pass --nnodes MIN:MAX"
            )
        if str(message["nnodes"]) != nodes.nnodes:
            return f"--nnodes: found {message['nnodes']}, expected {nodes.nnodes}, as host 0 has"
        twin = next((other for other in present if other.rank == host.rank), None)
        if twin is not None:
            return (
                f"--node-rank: found {host.rank}, which the host {twin.connection.peer} has too; "
                f"expected a different one for every host{', or none' if nodes.is_elastic else ''}"
            )
        for other in present:
            found, expected = message["nproc"], other.hello["nproc"]
            if found != expected:
                return f"--nproc: found {found}, expected {expected}, as {other.name} has"
            difference = _difference(message["versions"], other.hello["versions"], other.name)
            if difference is not None:
                return difference
        if nodes.is_elastic:
            difference = _difference(message["options"], self._options, "host 0")
            if difference is not None:
                return difference
        # A place is kept for host 0, even if others were faster.
        if host.rank and len({0, *(other.rank for other in present)}) >= nodes.count:
            return f"--nnodes: the job at {nodes.where} has its {counted(nodes.count)} already"
        return self._too_soon(host) if generation >= 0 else None

    def _too_soon(self, host: Host) -> str | None:
        """Return why a host that failed while it joined may not try again yet."""
        since = time.monotonic() - self._failed.get(host.connection.peer, -REST)
        if since >= REST:
            return None
        return (
            f"--rdzv: this host failed {since:.0f} s ago while it joined the job at "
            f"{self._nodes.where}; find the reason in its output, and try again in "
            f"{REST - since:.0f} s"
        )


def _difference(found: Mapping[str, Any], expected: Mapping[str, Any], whose: str) -> str | None:
    """Describe the first item in which two hosts differ."""
    for name in {**found, **expected}:
        if found.get(name) != expected.get(name):
            return f"{name}: found {found.get(name)}, expected {expected.get(name)}, as {whose} has"
    return None


class Next(enum.Enum):
    """What follows a generation."""

    END = "end"  # nothing: all ranks completed, or the job was stopped
    FAIL = "fail"  # nothing: the job has failed
    REGROUP = "regroup"  # a generation with hosts that join, or without hosts that leave
    EXPEL = "expel"  # a generation without the hosts that failed while they joined
    RESTART = "restart"  # a generation after a failure; counts as one of --max-restarts
    LEAVE = "leave"  # for one host only: nothing; the job continues without it

    @property
    def begins_again(self) -> bool:
        """Whether another generation follows."""
        return self in (Next.REGROUP, Next.EXPEL, Next.RESTART)

    @property
    def label(self) -> str:
        """The word at the start of a line that reports it."""
        return {Next.FAIL: "error:", Next.EXPEL: "restart", Next.RESTART: "restart"}.get(
            self, "hosts"
        )


@dataclass(frozen=True)
class Decision:
    """What follows a generation, and why.

    Attributes:
        next: what follows.
        why: the reason; empty if everything is as it should be.
        leaving: the hosts that take no part in what follows, each with the message it is sent.
    """

    next: Next
    why: str
    leaving: tuple[tuple[Host, str], ...] = ()


class Generation:
    """A running generation.

    Args:
        hosts: the hosts that take part; the caller removes those that are lost.
        nodes: the job.
        grace: seconds for the other hosts to stop after the first one has.

    Attributes:
        regrouping: whether the hosts were asked to save and stop, since others join.
    """

    def __init__(self, hosts: list[Host], nodes: Nodes, grace: float) -> None:
        self._hosts = hosts
        self._nodes = nodes
        self._grace = grace
        self._lost: list[Host] = []
        self._secondary_since = 0.0  # when ranks first reported that others are gone
        self._stopped: tuple[float, str] | None = None  # when a signal stopped a host, and which
        self._first_end = 0.0  # when the first host had stopped
        self.regrouping = False

    def note_step(self, host: Host) -> None:
        """Note that all ranks of a host have completed a step."""
        host.training = True
        if all(each.training for each in self._hosts):
            for each in self._hosts:
                each.on_probation = False

    def note_end(self, host: Host, result: Result, stopped_by: StoppedBy) -> None:
        """Note that the ranks of a host have ended."""
        host.result, host.stopped_by = result, stopped_by
        if stopped_by is not StoppedBy.NOTHING:
            self._first_end = self._first_end or host.heard
        if self._nodes.is_elastic:
            # A signal to host 0 stops the job; to another host, only that one. Ranks stop for
            # either reason.
            stops_the_job = host.left and host.rank == 0
        else:
            stops_the_job = stopped_by is not StoppedBy.NOTHING
        if self._stopped is None and stops_the_job:
            self._stopped = (host.heard, host.name)

    def note_lost(self, host: Host) -> None:
        """Note that a host is gone, which is no loss if its ranks had ended well."""
        if host.result is None or host.failed:
            self._lost.append(host)

    @property
    def is_ending(self) -> bool:
        """Whether ranks of a host have ended."""
        return bool(self._lost) or any(host.result is not None for host in self._hosts)

    def decide(self, restarts: int) -> Decision | None:
        """Decide what follows; None while the generation is not over.

        Args:
            restarts: how often the job may still be restarted after a failure.
        """
        now = time.monotonic()
        leaving = [
            host for host in self._hosts if self._nodes.is_elastic and host.left and host.rank
        ]
        failed = [host for host in self._hosts if host.failed and host not in leaving]
        causes = [host for host in failed if host.result is not Result.SECONDARY]
        ended = all(host.result is not None for host in self._hosts)
        in_time = self._stopped is None or now - self._stopped[0] < self._grace
        orderly = not (self._lost or causes) and (bool(leaving) or not failed)
        if orderly and (in_time or ended):
            over = ended or self._is_late(leaving, now)
            return self._after_order(leaving, failed) if over else None
        if in_time and not (self._lost or causes or ended):
            # Ranks that lost a peer report it at once; the host that failed first, a moment later.
            self._secondary_since = self._secondary_since or now
            if now - self._secondary_since < _SECONDARY:
                return None
        return self._after_failure(leaving, failed, causes, restarts)

    def _is_late(self, leaving: list[Host], now: float) -> bool:
        """Whether it is useless to wait for ranks that should stop and have not."""
        if any(not host.training for host in leaving):
            return True  # they completed no step in which the others would have learned of it
        asked = self.regrouping or bool(leaving)
        return asked and bool(self._first_end) and now - self._first_end > self._grace

    def _after_order(self, leaving: list[Host], failed: list[Host]) -> Decision:
        staying = [host for host in self._hosts if host not in leaving]
        completed = not failed and all(
            host.result is not None and host.stopped_by is StoppedBy.NOTHING for host in staying
        )
        asked = self.regrouping or bool(leaving)
        if not asked or self._stopped is not None or completed:
            return Decision(Next.END, "")
        why = f"{names(leaving)} left" if leaving else ""
        return Decision(Next.REGROUP, why, _farewell(leaving))

    def _after_failure(
        self, leaving: list[Host], failed: list[Host], causes: list[Host], restarts: int
    ) -> Decision:
        reasons = [f"{host.name} was lost: {host.why_lost}" for host in self._lost]
        reasons = reasons or [f"a rank of {host.name} failed" for host in causes]
        if not reasons and self._stopped is not None:
            reasons = [f"{self._stopped[1]} was stopped"]
        why = "; ".join(reasons or [f"a rank of {host.name} failed" for host in failed])
        expelled = self._joining_at_fault(causes)
        if expelled:
            text = "this host failed while it joined; the job continues without it"
            parted = tuple((host, text) for host in expelled)
            return Decision(Next.EXPEL, why, (*parted, *_farewell(leaving)))
        final = any(host.result is not None and not host.result.may_restart for host in failed)
        if restarts > 0 and not final and self._stopped is None:
            return Decision(Next.RESTART, why, _farewell(leaving))
        return Decision(Next.FAIL, why)

    def _joining_at_fault(self, causes: list[Host]) -> list[Host]:
        """Return the hosts on probation because of which the generation has failed."""
        joining = [host for host in (*self._hosts, *self._lost) if host.on_probation]
        if self._stopped is not None or not all(host.on_probation for host in self._lost):
            return []
        return [host for host in joining if host in causes or host in self._lost] or joining


def _farewell(leaving: list[Host]) -> tuple[tuple[Host, str], ...]:
    return tuple((host, "this host leaves; the job continues without it") for host in leaving)

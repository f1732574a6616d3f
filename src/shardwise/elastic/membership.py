"""The rules of a job: which hosts take part, how a generation of it ends, and what follows.

A *generation* is one world of the job: a set of hosts, and the ranks on them. It ends when ranks
end or hosts are lost, and another one begins with the hosts that remain or have come since.

    gathering ──> running ──> verdict ──┬─> gathering (regroup, expel, restart)
                                        └─> over (end, fail)

Every host reports what it does (:class:`HostReport`). From all reports, and from who is gone, one
host derives what is to be done: the :class:`JobState`, which all of them read. Reports are facts,
not requests: one may be read twice, late, or not at all, and the next one makes up for it. Here are
the decisions, without sockets, threads and stores: see ``rendezvous.py`` for these.
"""

from __future__ import annotations

import enum
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.base.units import counted
from shardwise.elastic.clock import Timers
from shardwise.elastic.hosts import UNNUMBERED, Nodes
from shardwise.elastic.outcome import STOP_GRACE, Result, StoppedBy

LAST_CALL = 5.0  # seconds to wait for more hosts after one has come, before starting without them
REST = 600.0  # seconds before a host that failed while it joined may try again
SECONDARY = 3.0  # seconds to wait for the host that failed first, when others report its loss
_OUTNUMBERED = (
    "the hosts that are silent are more than those that are left, and may continue. Start the job "
    "again with --auto-resume"
)
_NOTICES = 16  # that are kept for hosts that have not read them
_KEPT = 64  # hosts that no longer take part, of which something is kept


class Standing(enum.Enum):
    """How a host takes part."""

    JOINING = "joining"  # it waits for the next generation
    PROBATION = "probation"  # it joined for this one, and not every rank has completed a step yet
    MEMBER = "member"


class HostLoss(enum.Enum):
    """What is known of a host that is gone."""

    NONE = "none"  # it is there
    DEAD = "dead"  # its process has ended
    SILENT = "silent"  # it may be running where the others cannot reach it


@dataclass(frozen=True)
class HostReport:
    """What a host reports of itself.

    Attributes:
        number: its place among the hosts; ``--node-rank``.
        address: where the other hosts reach it.
        port: where it would serve the rendezvous.
        terms: what it expects to be the same on all hosts, by name.
        awaits: the number of the generation after which it waits for another; None if it does not.
        store_port: where it would serve the store of the ranks, if it is first in that one.
        stepped: the number of the last generation in which all its ranks have completed a step.
        ended: the number of the last generation whose ranks have ended there.
        result: how they ended.
        stopped_by: what asked them to stop.
        leaves: whether its command ends.
    """

    number: int
    address: str
    port: int = 0
    terms: dict[str, Any] = field(default_factory=dict)
    awaits: int | None = None
    store_port: int = 0
    stepped: int = -1
    ended: int = -1
    result: Result = Result.COMPLETED
    stopped_by: StoppedBy = StoppedBy.NOTHING
    leaves: bool = False


@dataclass
class Host:
    """A host that takes part, as it is known now.

    Attributes:
        id: tells it from every other one, also from an earlier one at the same address.
        number: its place among the hosts; ``--node-rank``.
        address: where the other hosts reach it.
        port: where it would serve the rendezvous.
        store_port: where it would serve the store of the ranks, if it is first in the next
            generation.
        standing: how it takes part.
        ready: whether it waits for the next generation.
        stepped: whether all its ranks have completed a step in this generation.
        result: how its ranks ended; None while they run.
        stopped_by: what asked them to stop.
        loss: whether it is gone.
        why_lost: how that showed.
    """

    id: str
    number: int
    address: str
    port: int = 0
    store_port: int = 0
    standing: Standing = Standing.MEMBER
    ready: bool = False
    stepped: bool = False
    result: Result | None = None
    stopped_by: StoppedBy = StoppedBy.NOTHING
    loss: HostLoss = HostLoss.NONE
    why_lost: str = ""

    @property
    def name(self) -> str:
        """The host, for messages."""
        return f"host {self.number} ({self.address})"

    @property
    def failed(self) -> bool:
        """Whether its ranks have failed."""
        return self.result is not None and self.result.is_failure

    @property
    def is_missed(self) -> bool:
        """Whether it is gone, and its ranks had not ended well before."""
        return self.loss is not HostLoss.NONE and (self.result is None or self.failed)


def names(hosts: Sequence[Host]) -> str:
    """Join the names of hosts, for messages."""
    return " and ".join(host.name for host in hosts)


class Next(enum.Enum):
    """What follows a generation."""

    END = "end"  # nothing: all ranks completed, or the job was stopped
    FAIL = "fail"  # nothing: the job has failed
    REGROUP = "regroup"  # a generation with hosts that join, or without hosts that leave
    EXPEL = "expel"  # a generation without the hosts that failed while they joined
    RESTART = "restart"  # a generation after a failure; counts as one of --max-restarts
    LEAVE = "leave"  # for one host only: nothing; the job continues without it
    EXPELLED = "expelled"  # the same, for one of the hosts that failed while they joined
    REFUSE = "refuse"  # for one host, or before the first generation: it does not take part

    @property
    def begins_again(self) -> bool:
        """Whether another generation follows."""
        return self in (Next.REGROUP, Next.EXPEL, Next.RESTART)

    @property
    def label(self) -> str:
        """The word at the start of a line that reports it."""
        if self is Next.FAIL:
            return "error:"
        return "restart" if self in (Next.EXPEL, Next.EXPELLED, Next.RESTART) else "hosts"


@dataclass(frozen=True)
class Verdict:
    """What follows a generation, and why.

    Attributes:
        next: what follows.
        text: why the generation ended, if not well, and what follows; empty if there is nothing to
            say.
    """

    next: Next
    text: str = ""


@dataclass
class JobState:
    """What is to be done: the hosts of a job, and how far it is.

    Attributes:
        job: tells the job from every other one; the same after a restart, and on all hosts.
        terms: what hosts have to agree on, by name.
        restarts: how often it may still be restarted after a failure.
        generation: the number of the current or last one; -1 before the first.
        hosts: the hosts, in the order of their numbers while a generation runs.
        verdict: what follows the generation, once that is decided; None while it runs.
        parted: what was decided for the last hosts that no longer take part, by id.
        regrouping: whether the hosts were asked to save and stop, since others join.
        stopped: the host whose signal stopped the job.
        silent: how many hosts of the last generation went silent.
        failed: addresses of the last hosts that failed while they joined, with the time of day in
            seconds.
        notices: the last lines for the users of all hosts.
        noticed: how many lines there have been.
        server: id of the host that serves the rendezvous.
        moves: how often the rendezvous has moved to another host.
    """

    job: str = field(default_factory=lambda: uuid.uuid4().hex)
    terms: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    generation: int = -1
    hosts: list[Host] = field(default_factory=list)
    verdict: Verdict | None = field(default_factory=lambda: Verdict(Next.REGROUP))
    parted: dict[str, Verdict] = field(default_factory=dict)
    regrouping: bool = False
    stopped: str = ""
    silent: int = 0
    failed: dict[str, float] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    noticed: int = 0
    server: str = ""
    moves: int = 0

    # -- what hosts report -------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a generation runs."""
        return self.verdict is None

    @property
    def is_over(self) -> bool:
        """Whether no other generation follows."""
        return self.verdict is not None and not self.verdict.next.begins_again

    @property
    def members(self) -> list[Host]:
        """The hosts of the current generation."""
        return [host for host in self.hosts if host.standing is not Standing.JOINING]

    @property
    def _joining(self) -> list[Host]:
        return [host for host in self.hosts if host.standing is Standing.JOINING]

    def host(self, id_: str) -> Host | None:
        """Return the host with this id, or None if it does not take part."""
        return next((host for host in self.hosts if host.id == id_), None)

    def look(
        self,
        reports: Mapping[str, HostReport],
        losses: Mapping[str, tuple[HostLoss, str]],
        nodes: Nodes,
        timers: Timers,
    ) -> None:
        """Take note of what hosts report and of those that are gone, and do what is due by now.

        Args:
            reports: by id of the host.
            losses: hosts that are gone and how that showed, by id.
            nodes: the job.
            timers: of the host that looks.
        """
        for id_, report in reports.items():
            is_known = self.host(id_) is not None or id_ in self.parted
            if not is_known and id_ not in losses and not report.leaves:
                self._admit(id_, report, nodes)
        for host in list(self.hosts):
            own = reports.get(host.id)
            if own is not None:
                self._note(host, own, nodes)
            if host.id in losses:
                self.note_lost(host.id, *losses[host.id])
            elif own is not None and own.leaves and not self.is_over:
                self.note_lost(host.id, HostLoss.DEAD, "its command has ended")
        self._advance(nodes, timers)

    def _admit(self, id_: str, report: HostReport, nodes: Nodes) -> None:
        """Let a host take part, or note in ``parted`` why it may not."""
        host = Host(id_, report.number, report.address, report.port)
        if host.number == UNNUMBERED:
            taken = {0, *(other.number for other in self.hosts)}
            host.number = next(n for n in range(len(taken) + 1) if n not in taken)
        refusal = self._difference(report) or self._refusal(host, nodes)
        if refusal is not None:
            self._note_parted(host, Verdict(Next.REFUSE, refusal))
            return
        host.standing = Standing.MEMBER if self.generation < 0 else Standing.JOINING
        self.hosts.append(host)
        if self.generation < 0 and nodes.is_elastic:
            self._notify(f"{host.name} is here")

    def _difference(self, report: HostReport) -> str | None:
        """Return what a host has that differs from what all have to agree on, if anything does."""
        for name in {**report.terms, **self.terms}:
            found, expected = report.terms.get(name), self.terms.get(name)
            if found != expected:
                return f"{name}: found {found}, expected {expected}, as host 0 has"
        return None

    def _refusal(self, host: Host, nodes: Nodes) -> str | None:
        if self.is_over:
            return f"--rdzv: the job at {nodes.where} ended before this host could join it"
        if self.generation >= 0 and not nodes.is_elastic:
            return (
                f"--rdzv: the job at {nodes.where} has started without this host; for hosts to "
                "join later, pass --nnodes MIN:MAX"
            )
        twin = next((other for other in self.hosts if other.number == host.number), None)
        if twin is not None:
            return (
                f"--node-rank: found {host.number}, which the host {twin.address} has too; "
                f"expected a different one for every host{', or none' if nodes.is_elastic else ''}"
            )
        # A place is kept for host 0 at first, even if others were faster.
        kept = {0} if self.generation < 0 else set()
        places = kept | {other.number for other in self.hosts}
        if host.number not in kept and len(places) >= nodes.count:
            return (
                f"--nnodes: the job at {nodes.where} has its {counted(nodes.count, 'host')} already"
            )
        # Another host may have noted it, and clocks differ, or are set.
        since = time.time() - self.failed.get(host.address, -REST)
        if self.generation < 0 or abs(since) >= REST:
            return None
        since = max(0.0, since)
        return (
            f"--rdzv: this host failed {since:.0f} s ago while it joined the job at {nodes.where}; "
            f"find the reason in its output, and try again in {REST - since:.0f} s"
        )

    def _note(self, host: Host, report: HostReport, nodes: Nodes) -> None:
        """Note what a host reports, as far as it is about this generation."""
        if host.standing is Standing.JOINING or not self.is_running:
            joins = host.standing is Standing.JOINING and report.awaits is not None
            if joins or report.awaits == self.generation:
                host.ready, host.store_port = True, report.store_port
            return
        if report.stepped == self.generation:
            host.stepped = True
            if all(each.stepped for each in self.members):
                for each in self.members:
                    each.standing = Standing.MEMBER
        if report.ended == self.generation and host.result is None:
            host.result, host.stopped_by = report.result, report.stopped_by
            if nodes.is_elastic:
                # Ctrl-C on host 0 stops the job. Any other signal to a host stops only that one.
                stops_the_job = host.stopped_by is StoppedBy.INTERRUPT and host.number == 0
            else:
                stops_the_job = host.stopped_by is not StoppedBy.NOTHING
            if stops_the_job:
                self.stopped = self.stopped or host.name

    def note_lost(self, id_: str, loss: HostLoss, why: str) -> None:
        """Note that a host is gone. While a generation runs, its members stay the same."""
        host = self.host(id_)
        if host is None or host.loss is HostLoss.DEAD:
            return
        if not self.is_running or host.standing is Standing.JOINING:
            self.hosts.remove(host)
            if host.standing is not Standing.JOINING:
                self.silent += loss is HostLoss.SILENT
            if not self.is_running and not self.is_over and self.generation >= 0:
                self._notify(f"{host.name} was lost: {why}")
        else:
            host.loss, host.why_lost = loss, host.why_lost or why

    # -- what follows ------------------------------------------------------------------------------

    def _advance(self, nodes: Nodes, timers: Timers) -> None:
        """Do what is due by now: end a generation, or start one."""
        if self.is_over:
            return
        if not self.is_running:
            self._gather(nodes, timers)
            return
        self._invite(nodes, timers)
        self._decide(nodes, timers)

    def _gather(self, nodes: Nodes, timers: Timers) -> None:
        present = len(self.hosts)
        if self.generation >= 0 and self._is_outnumbered(len(self.members)):
            last = self.notices[-1:]  # which names the host that was lost just now
            self._conclude(Next.FAIL, "; ".join([*last, _OUTNUMBERED]), {}, nodes)
            return
        last_call = timers.elapsed("hosts", sorted(host.id for host in self.hosts))
        waited = timers.elapsed("gathering", self.generation)
        fitting, why = nodes.most(present)
        # Before the first generation it waits for all hosts there may be, in an elastic job only
        # for as long as more of them come.
        missing = self.generation < 0 and present < nodes.count
        if not fitting or not present or (missing and not nodes.is_elastic):
            if waited > nodes.timeout:
                self._give_up(nodes, why)
            return
        if missing and last_call <= LAST_CALL:
            return
        # Host 0 says how the job starts. Later it may be gone.
        led = self.generation >= 0 or any(host.number == 0 for host in self.hosts)
        if led and all(host.ready for host in self.hosts):
            self._start(fitting, why)

    def _give_up(self, nodes: Nodes, why: str) -> None:
        present = sorted(host.number for host in self.hosts)
        missing = sorted(set(range(nodes.count)) - set(present))
        expected = f"{missing} too" if nodes.least is None else f"{nodes.least} of them or more"
        text = f"found hosts {present} within {nodes.timeout:.0f} s, expected {expected}"
        if why:
            text += f"; {why}"
        self.verdict = Verdict(Next.REFUSE, f"--rdzv: {text}; is the command running there?")

    def _start(self, fitting: int, why: str) -> None:
        # Hosts that were there before stay, if not all of them fit.
        by_number = sorted(
            self.hosts, key=lambda host: (host.standing is Standing.JOINING, host.number)
        )
        for host in by_number[fitting:]:
            self._part_with(host, Verdict(Next.REFUSE, why))
        self.hosts.sort(key=lambda host: host.number)
        self.generation += 1
        self.verdict, self.regrouping, self.stopped, self.silent = None, False, "", 0
        for host in self.hosts:
            joins = host.standing is Standing.JOINING
            host.standing = Standing.PROBATION if joins else Standing.MEMBER
            host.ready, host.stepped = False, False
            host.result, host.stopped_by = None, StoppedBy.NOTHING

    def _invite(self, nodes: Nodes, timers: Timers) -> None:
        """Ask all hosts to save and stop, once for all that have come, if more can take part."""
        joining = self._joining
        last_call = timers.elapsed("joining", sorted(host.id for host in joining))
        is_ending = any(host.loss is not HostLoss.NONE or host.result for host in self.members)
        due = len(self.hosts) == nodes.count or last_call > LAST_CALL
        due = due and all(host.ready for host in joining)  # else the others would wait for it
        if not joining or self.regrouping or is_ending or not due:
            return
        fitting, why = nodes.most(len(self.hosts))
        for host in joining[max(0, fitting - len(self.members)) :]:
            self._part_with(host, Verdict(Next.REFUSE, why))
        joining = self._joining
        if joining:
            self.regrouping = True
            join = "joins" if len(joining) == 1 else "join"
            count = counted(fitting, "host")
            self._notify(f"{names(joining)} {join}; finishing a step, to continue with {count}")

    def _decide(self, nodes: Nodes, timers: Timers) -> None:
        members = self.members
        lost = [host for host in members if host.is_missed]
        present = [host for host in members if host.loss is HostLoss.NONE]
        leaving = [host for host in present if self._leaves(host, nodes)]
        failed = [host for host in present if host.failed and host not in leaving]
        causes = [host for host in failed if host.result is not Result.SECONDARY]
        ended = all(host.result is not None for host in present)
        in_time = not self.stopped or timers.elapsed("stopped", self.generation) < STOP_GRACE
        if not (lost or causes) and (leaving or not failed) and (in_time or ended):
            if ended or self._is_late(leaving, timers):
                self._conclude_order(leaving, failed, nodes)
            return
        # Ranks that lost a peer report it at once; the host that failed first, a moment later.
        waits = in_time and not (lost or causes or ended)
        if not waits or timers.elapsed("secondary", self.generation) > SECONDARY:
            self._conclude_failure(lost, leaving, failed, causes, nodes)

    def _leaves(self, host: Host, nodes: Nodes) -> bool:
        signaled = host.stopped_by in (StoppedBy.INTERRUPT, StoppedBy.TERMINATE)
        return nodes.is_elastic and signaled and not self.stopped

    def _is_late(self, leaving: list[Host], timers: Timers) -> bool:
        """Whether it is useless to wait for ranks that should stop and have not."""
        if any(not host.stepped for host in leaving):
            return True  # they completed no step in which the others would have learned of it
        if not (self.regrouping or leaving):
            return False
        stopped = any(host.stopped_by is not StoppedBy.NOTHING for host in self.members)
        return stopped and timers.elapsed("first end", self.generation) > STOP_GRACE

    def _conclude_order(self, leaving: list[Host], failed: list[Host], nodes: Nodes) -> None:
        staying = [host for host in self.members if host not in leaving]
        completed = not failed and all(
            host.result is not None and host.stopped_by is StoppedBy.NOTHING for host in staying
        )
        asked = self.regrouping or bool(leaving)
        if not asked or self.stopped or completed:
            self._conclude(Next.END, "", {}, nodes)
            return
        why = f"{names(leaving)} left" if leaving else ""
        self._conclude(Next.REGROUP, why, _farewells(leaving), nodes)

    def _conclude_failure(
        self,
        lost: list[Host],
        leaving: list[Host],
        failed: list[Host],
        causes: list[Host],
        nodes: Nodes,
    ) -> None:
        reasons = [f"{host.name} was lost: {host.why_lost}" for host in lost]
        reasons = reasons or [f"a rank of {host.name} failed" for host in causes]
        if not reasons and self.stopped:
            reasons = [f"{self.stopped} was stopped"]
        why = "; ".join(reasons or [f"a rank of {host.name} failed" for host in failed])
        self.silent = sum(host.loss is HostLoss.SILENT for host in lost)
        left = sum(host.loss is HostLoss.NONE for host in self.members)
        if self._is_outnumbered(left):
            self._conclude(Next.FAIL, f"{why}; {_OUTNUMBERED}", {}, nodes)
            return
        expelled = self._joined_at_fault(lost, causes)
        if expelled:
            text = "this host failed while it joined; the job continues without it"
            for host in causes:
                if host in expelled:
                    self._note_failed(host)
            farewells = {host.id: Verdict(Next.EXPELLED, text) for host in expelled}
            self._conclude(Next.EXPEL, why, {**farewells, **_farewells(leaving)}, nodes)
            return
        final = any(host.result is not None and not host.result.may_restart for host in failed)
        if self.restarts > 0 and not final and not self.stopped:
            self.restarts -= 1
            self._conclude(Next.RESTART, why, _farewells(leaving), nodes)
            return
        self._conclude(Next.FAIL, why, {}, nodes)

    def _is_outnumbered(self, left: int) -> bool:
        """Whether hosts that are silent may continue on their own, as more than half of all."""
        return self.silent > left

    def _joined_at_fault(self, lost: list[Host], causes: list[Host]) -> list[Host]:
        """Return the hosts on probation because of which the generation has failed."""
        joined = [host for host in self.members if host.standing is Standing.PROBATION]
        if self.stopped or any(host not in joined for host in lost):
            return []
        return [host for host in joined if host in causes or host in lost] or joined

    def _conclude(self, next_: Next, why: str, leaving: dict[str, Verdict], nodes: Nodes) -> None:
        for host in list(self.members):
            if host.id in leaving:
                self._part_with(host, leaving[host.id])
            elif host.loss is not HostLoss.NONE:
                self.hosts.remove(host)
        text = why
        if next_.begins_again:
            fitting, _ = nodes.most(len(self.hosts))
            follows = f"continuing with {counted(fitting, 'host')}"
            if not fitting:
                follows = f"waiting for more hosts than {len(self.hosts)}"
            text += ("; " if text else "") + follows
        else:
            ended = f"--rdzv: the job at {nodes.where} ended before this host could join it"
            for host in self._joining:
                self._part_with(host, Verdict(Next.REFUSE, ended))
        self.verdict = Verdict(next_, text)

    def _part_with(self, host: Host, verdict: Verdict) -> None:
        self.hosts.remove(host)
        self._note_parted(host, verdict)

    def _note_parted(self, host: Host, verdict: Verdict) -> None:
        self.parted = dict([*self.parted.items(), (host.id, verdict)][-_KEPT:])

    def _note_failed(self, host: Host) -> None:
        now = time.time()
        recent = {at: when for at, when in self.failed.items() if abs(now - when) < REST}
        recent.pop(host.address, None)
        self.failed = dict([*recent.items(), (host.address, now)][-_KEPT:])

    def _notify(self, text: str) -> None:
        self.notices = [*self.notices, text][-_NOTICES:]
        self.noticed += 1


def _farewells(leaving: list[Host]) -> dict[str, Verdict]:
    text = "this host leaves; the job continues without it"
    return {host.id: Verdict(Next.LEAVE, text) for host in leaving}

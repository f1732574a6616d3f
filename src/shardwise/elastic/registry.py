"""Report, plan, silence: how processes that come and go agree on what is to be done.

    member  ── what it does ──>  registry  ── reports, silence ──>  a rule of the user's
            <── what is to be done ──      <── plan ──────────────

One process serves the registry. Each member reports what it does, under a key of its own. Reports
are facts, not requests: one may be read twice, late, or not at all, and the next one makes up for
it. From what all report, and from who is silent, the process that serves derives a plan by a rule
without sockets, threads and clocks, and publishes it where no member can write. Members read it
several times a second, so one that asks for nothing is silent.

No clock of another host counts: silence is measured where the registry is served, and the time for
which that process was suspended does not count.

The hosts of a job (``rendezvous.py``), those that run the doctor, and the replicas of a quorum
(:mod:`shardwise.diloco`) meet so. Whatever else they share is in the same store.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwise.base import plain
from shardwise.elastic.clock import Clock
from shardwise.elastic.store import CLOSED, SERVER, GuardedStore, StoreServer

R = TypeVar("R")  # a report
P = TypeVar("P")  # a plan

REPORT = "report/"  # before the key of a member
_PLAN = f"{SERVER}plan"


@dataclass(frozen=True)
class Presence(Generic[R]):
    """Who is there at one look, and what they report.

    A connection that is neither in ``silence`` nor in ``closed`` has said goodbye. What a member
    reported before its connection ended is in ``reports``.

    Attributes:
        reports: by the key of the member.
        silence: seconds for which each connection has asked for nothing, by its name.
        closed: why each connection was lost that is, by its name.
    """

    reports: dict[str, R]
    silence: dict[str, float]
    closed: dict[str, str]


class Registry(Generic[R]):
    """The end that serves.

    Args:
        listener: the listening socket, which this closes.
        token: what members must hold.
        report: the class of reports.
        clock: by which members are silent; by default that of this process.

    Attributes:
        store: the store, for what else they share.
    """

    def __init__(
        self, listener: socket.socket, token: bytes, report: type[R], clock: Clock | None = None
    ) -> None:
        self._report = report
        self._plan = b""
        self._read: dict[str, tuple[bytes, R]] = {}  # reports by key, and what they were read from
        self.store = StoreServer(listener, token, clock)  # last: Ctrl-C after it leaves it open

    def look(self) -> Presence[R]:
        """Return who is there, and what they report. What is no report is left out."""
        silence = self.store.silence()  # first: who is missing here has reported its last
        closed = self.store.values(CLOSED)
        before, self._read = self._read, {}
        for key, text in self.store.values(REPORT).items():
            if key in before and before[key][0] is text:
                self._read[key] = before[key]
                continue
            with contextlib.suppress(ValueError):  # not by a member of ours
                self._read[key] = text, plain.read(self._report, text)
        reports = {key: report for key, (_, report) in self._read.items()}
        return Presence(reports, silence, {name: why.decode() for name, why in closed.items()})

    def publish(self, plan: object) -> bool:
        """Tell all members what is to be done; return whether that has changed."""
        text = plain.written(plan)
        is_new, self._plan = text != self._plan, text
        if is_new:
            self.store.put(_PLAN, text)
        return is_new

    def forget_all_but(self, kept: Collection[str]) -> None:
        """Forget what members reported that are not connected any more, except some.

        Args:
            kept: keys, which here are names of connections.
        """
        reports = self.store.values(REPORT)
        for key in reports.keys() - kept - self.store.clients().keys():
            self.store.forget(f"{REPORT}{key}")

    def close(self) -> None:
        """End all connections."""
        self.store.close()


class RegistryClient(Generic[R, P]):
    """The end of a member.

    All methods raise what a :class:`~shardwise.elastic.store.GuardedStore` raises.

    Args:
        store: a connection to the store of the registry.
        key: under which this member reports.
        plan: the class of plans.

    Attributes:
        store: as passed.
        reported: what the registry has got; ``None``: nothing.
    """

    def __init__(self, store: GuardedStore, key: str, plan: type[P]) -> None:
        self.store = store
        self.reported: R | None = None
        self._key, self._kind = key, plan
        self._plan = b""

    def report(self, report: R | None) -> None:
        """Report what this member does, unless that is what it has reported last."""
        if report is not None and report != self.reported:
            self.store.set(f"{REPORT}{self._key}", plain.written(report))
            self.reported = report

    def news(self) -> P | None:
        """Return what is to be done, if that has changed since the last call.

        Raises:
            ValueError: what serves there is no registry of this kind.
        """
        text = self.store.get(_PLAN)
        if text == self._plan:
            return None
        plan = plain.read(self._kind, text)
        self._plan = text
        return plan

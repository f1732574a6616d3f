"""One round of a job, as host 0 knows it: how its hosts end, and what follows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.launch.admission import Host, names

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

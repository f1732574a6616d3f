"""Where the hosts of a job meet: a thread beside the launcher of host 0.

    ready     from every host: its rank, its processes, versions     ┐
    start     to every host: its first rank, the world size, store   │
    training  from a host: all its ranks have made a step            │  a round
    regroup   to every host: save and stop, more hosts join          │
    ended     from a host: its ranks are done, or one failed         │
    verdict   to every host: over, or again with those that remain   ┘

Every host says "here" once a second, and is answered. A host that has been silent for
:data:`SILENCE` seconds, or whose connection closed, is lost: the others are told its name, end
their ranks, and begin another round without it if restarts are left. With host 0 the meeting itself
is lost; each of the others notices that in the same time. A host that a signal stopped stops the
job: the others have ``STOP_GRACE`` seconds to stop in order.

Where hosts may come later (``--nnodes MIN:MAX``), those that do wait here until the others have
saved, and take part in the next round. Until all have made a step in it, they are on trial: what
fails then is blamed on them, costs no restart, and the job goes on without them.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from shardwise.launch.admission import Admission, Host, counted, names
from shardwise.launch.errors import UserError
from shardwise.launch.hosts import Nodes, Terms, listening
from shardwise.launch.launcher import STOP_GRACE
from shardwise.launch.wire import ClosedError, Line

SILENCE = 10.0  # seconds without a sign of life after which a host counts as lost
BEAT = 1.0  # seconds between signs of life
LAST_CALL = 5.0  # seconds after a host has come for more to come, before hosts begin with it
_POLL = 0.1
_HOSTS, _RESTART, _ERROR = "hosts", "restart", "error:"  # what a line begins with
_ECHO = 3.0  # seconds for the host to speak whose rank, or which, went first
_FAREWELL = 5.0  # seconds that hosts have to read how it ended


class Meeting:
    """Serves the hosts of a job until it is over.

    Args:
        nodes: the job.
        restarts: how often to begin again with the hosts that remain.
        terms: what hosts have to agree with that come later.

    Raises:
        UserError: the address is none of this host's, or the port is taken.
    """

    def __init__(self, nodes: Nodes, restarts: int, terms: Terms | None = None) -> None:
        self._nodes = nodes
        self._restarts = restarts
        self._rules = Admission(nodes, terms or Terms())
        self._listener = _listen(nodes)
        self._hosts: list[Host] = []
        self._newcomers: list[Host] = []  # they wait for the next round
        self._strangers: list[Host] = []
        self._round = -1
        self._running = False
        self._regrouping = False  # hosts were asked to save and stop
        self._first_end = 0.0  # when the first of them had
        self._echoed = 0.0  # when ranks were the first to notice that others are gone
        self._stopped: tuple[float, str] | None = None  # when a signal stopped a host, and which
        self._over = threading.Event()  # all is said
        self._closed = threading.Event()
        self._lost: list[Host] = []
        self._began = time.monotonic()
        self._last_came = self._began
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """End. Hosts that have a verdict to read may do so; others are told by the silence."""
        deadline = time.monotonic() + _FAREWELL
        while self._over.is_set() and self._hosts and time.monotonic() < deadline:
            time.sleep(_POLL)
        self._closed.set()
        self._thread.join()
        for host in self._everyone():
            host.line.close()
        self._listener.close()

    def _everyone(self) -> list[Host]:
        return [*self._hosts, *self._newcomers, *self._strangers]

    def _serve(self) -> None:
        while not self._closed.is_set():
            waiting: list[Any] = [self._listener, *(host.line for host in self._everyone())]
            readable, _, _ = select.select(waiting, [], [], _POLL)
            if self._listener in readable:
                with contextlib.suppress(OSError):
                    self._strangers.append(Host(Line(self._listener.accept()[0])))
            for host in self._everyone():
                if host.line in readable:
                    self._hear(host)
            self._look()

    def _hear(self, host: Host) -> None:
        try:
            for message in host.line.receive():
                host.heard = time.monotonic()
                self._take(host, message)
        except (ClosedError, AttributeError, KeyError, TypeError, ValueError) as error:
            self._drop(host, str(error))

    def _take(self, host: Host, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "here":
                host.line.send({"kind": "here"})
            case "ready" if host in self._strangers:
                self._admit(host, message)
            case "ready":
                host.ready, host.ended = message, None
            case "training":
                host.training = True
                if all(each.training for each in self._hosts):
                    for each in self._hosts:
                        each.on_trial = False
            case "ended":
                host.ended = message
                # Where hosts regroup, ranks stop since they were asked to, and not the job.
                meant = message["signalled"] if self._regrouping else message["stopped"]
                if message["stopped"]:
                    self._first_end = self._first_end or host.heard
                if meant and self._stopped is None:
                    self._stopped = (host.heard, host.name)

    def _admit(self, host: Host, message: Mapping[str, Any]) -> None:
        here = [*self._hosts, *self._newcomers]
        begun = self._round >= 0
        host.rank = self._rules.number(int(message["rank"]), here)
        trouble = self._rules.trouble(host.rank, message, here, begun=begun)
        trouble = trouble or (self._rules.too_soon(host) if begun else None)
        self._strangers.remove(host)
        if trouble is None and self._over.is_set():
            trouble = self._ended()
        if trouble is not None:
            _send_away(host, trouble)
            return
        host.hello = host.ready = message
        self._last_came = time.monotonic()
        later = self._nodes.least is not None
        if not begun:
            if later:
                self._tell_all("news", text=f"{host.name} is here")
            self._hosts.append(host)
            return
        host.on_trial = True
        self._newcomers.append(host)
        host.line.send({"kind": "news", "text": "the others save first, and go on with this host"})

    def _ended(self) -> str:
        return f"--rdzv: the job at {self._nodes.where} ended before this host could join it"

    def _look(self) -> None:
        now = time.monotonic()
        for host in self._everyone():
            if now - host.heard > SILENCE:
                self._drop(host, f"no sign of life for {SILENCE:.0f} s")
        if self._over.is_set():
            return
        if self._running:
            self._judge()
            if self._running:
                self._invite(now)
            return
        fitting, why = self._rules.most(len(self._hosts) + len(self._newcomers))
        if not fitting or (self._nodes.least is None and self._are_missing()):
            if now - self._began > self._nodes.timeout:
                self._give_up(why)
            return
        late = self._round >= 0 or now - self._last_came > LAST_CALL
        if self._are_missing() and not late:
            return
        if self._hosts and all(host.ready is not None for host in self._hosts):
            self._start(fitting, why)

    def _are_missing(self) -> bool:
        """Whether not all hosts have come that there may be, to begin with."""
        return self._round < 0 and len(self._hosts) < self._nodes.count

    def _give_up(self, why: str) -> None:
        nodes = self._nodes
        here = sorted(host.rank for host in (*self._hosts, *self._newcomers))
        missing = sorted(set(range(nodes.count)) - set(here))
        expected = f"{missing} too" if nodes.least is None else f"{nodes.least} of them or more"
        text = f"found hosts {here} within {nodes.timeout:.0f} s, expected {expected}"
        if why:
            text += f"; {why}"
        self._over.set()
        self._tell_all("refused", text=f"--rdzv: {text}; is the command running there?")
        self._dismiss(0, self._ended())

    def _invite(self, now: float) -> None:
        """Ask all to save and stop, once for all that have come, if more hosts can take part."""
        present = len(self._hosts) + len(self._newcomers)
        due = present == self._nodes.count or now - self._last_came > LAST_CALL
        ending = any(host.ended is not None for host in self._hosts)
        if not self._newcomers or self._regrouping or ending or not due:
            return
        fitting, why = self._rules.most(present)
        self._dismiss(max(0, fitting - len(self._hosts)), why)
        if self._newcomers:
            self._regrouping = True
            self._first_end = 0.0
            joining = "joins" if len(self._newcomers) == 1 else "join"
            text = f"{names(self._newcomers)} {joining}; saving, to go on with {counted(fitting)}"
            self._tell_all("regroup", text=text)

    def _dismiss(self, keep: int, why: str) -> None:
        """Send newcomers away but for the first so many."""
        for host in self._newcomers[keep:]:
            self._newcomers.remove(host)
            _send_away(host, why)

    def _start(self, fitting: int, why: str) -> None:
        self._hosts.sort(key=lambda host: host.rank)
        self._hosts += self._newcomers
        self._newcomers.clear()
        for host in self._hosts[fitting:]:
            _send_away(host, why)
        self._hosts = sorted(self._hosts[:fitting], key=lambda host: host.rank)
        shares = [int(host.ready["nproc"]) for host in self._hosts if host.ready is not None]
        store = self._hosts[0].ready
        assert store is not None
        self._round += 1
        self._running = True
        self._regrouping = False
        self._echoed = 0.0
        self._lost.clear()
        first = 0
        for host, share in zip(self._hosts, shares, strict=True):
            host.ready, host.training = None, False
            start = {"kind": "start", "round": self._round, "first": first, "port": store["port"]}
            with contextlib.suppress(ClosedError):
                host.line.send({**start, "world_size": sum(shares)})
            first += share

    def _judge(self) -> None:
        """Whether the round is over, and what follows."""
        now = time.monotonic()
        failed = [host for host in self._hosts if host.failed]
        waits = self._stopped is None or now - self._stopped[0] < STOP_GRACE
        if not self._lost and not failed and (waits or self._all_ended()):
            late = self._regrouping and self._first_end and now - self._first_end > STOP_GRACE
            if self._all_ended() or late:
                self._end_well()
            return
        own = [host for host in failed if host.ended is not None and not host.ended["echo"]]
        if waits and not (self._lost or own or self._all_ended()):
            # Ranks that lost a peer say so at once; why, is told a moment later.
            self._echoed = self._echoed or now
            if now - self._echoed < _ECHO:
                return
        reasons = [f"{host.name} was lost: {host.why_lost}" for host in self._lost]
        reasons = reasons or [f"a rank of {host.name} failed" for host in own]
        if not reasons and self._stopped is not None:
            reasons = [f"{self._stopped[1]} was stopped"]
        reasons = reasons or [f"a rank of {host.name} failed" for host in failed]
        guests = self._guests_at_fault(own)
        fatal = any(h.ended is not None and not h.ended["may_restart"] for h in failed)
        again = bool(guests)
        if not guests and self._restarts > 0 and not fatal and self._stopped is None:
            again = True
            self._restarts -= 1
        for host in guests:
            self._part_with(host)
        text = "; ".join(reasons)
        if again:
            text += "; " + self._what_follows()
        self._end_round(again, text, _RESTART if again else _ERROR)

    def _end_well(self) -> None:
        """All hosts have ended as they should: for good, or to begin again with more of them."""
        stopped = any(host.ended is not None and host.ended["stopped"] for host in self._hosts)
        again = self._regrouping and self._stopped is None and stopped
        self._end_round(again, self._what_follows() if again else "", _HOSTS)

    def _end_round(self, again: bool, text: str, label: str) -> None:
        self._running = False
        self._regrouping = False
        self._began = time.monotonic()
        self._tell_all("verdict", again=again, text=text, label=label)
        if not again:
            self._over.set()
            self._dismiss(0, self._ended())

    def _what_follows(self) -> str:
        left = len(self._hosts) + len(self._newcomers)
        fitting, _ = self._rules.most(left)
        if not fitting:
            return f"waiting for more hosts than {left}"
        return f"beginning again with {counted(fitting)}"

    def _guests_at_fault(self, own: list[Host]) -> list[Host]:
        """Hosts on trial for whose sake, or by whose fault, the round has failed."""
        guests = [host for host in (*self._hosts, *self._lost) if host.on_trial]
        if self._stopped is not None or not all(host.on_trial for host in self._lost):
            return []
        return [host for host in guests if host in own or host in self._lost] or guests

    def _part_with(self, host: Host) -> None:
        """Go on without a host that failed while it joined."""
        if host.failed and host.ended is not None and not host.ended["echo"]:
            self._rules.remember(host)
        if host in self._hosts:
            self._hosts.remove(host)
            text = "this host failed while it joined; the job goes on without it"
            with contextlib.suppress(ClosedError):
                host.line.send({"kind": "verdict", "again": False, "text": text, "label": _ERROR})
            host.line.close()

    def _all_ended(self) -> bool:
        return all(host.ended is not None for host in self._hosts)

    def _drop(self, host: Host, why: str) -> None:
        host.why_lost = why
        for apart in (self._strangers, self._newcomers):
            if host in apart:
                apart.remove(host)
        if host in self._hosts:
            self._hosts.remove(host)
            finished = host.ended is not None and not host.failed
            if not (self._running and finished):
                self._lost.append(host)
        host.line.close()

    def _tell_all(self, kind: str, **more: Any) -> None:
        for host in list(self._hosts):
            host.heard = time.monotonic()
            with contextlib.suppress(ClosedError):
                host.line.send({"kind": kind, **more})


def _send_away(host: Host, why: str) -> None:
    with contextlib.suppress(ClosedError):
        host.line.send({"kind": "refused", "text": why})
    host.line.close()


def _listen(nodes: Nodes) -> socket.socket:
    try:
        listener = listening(nodes.address, nodes.port)
    except OSError as error:
        raise UserError(
            f"--rdzv: host 0 cannot listen at {nodes.where} ({error.strerror or error}); expected "
            "an address of the host with --node-rank 0, and a free port"
        ) from None
    listener.setblocking(False)
    return listener

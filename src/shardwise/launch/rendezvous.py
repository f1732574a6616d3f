"""Where the hosts of a job meet: a thread beside the launcher of host 0.

    ready    from every host: its rank, its processes, versions     ┐
    start    to every host: its first rank, the world size, store   │  a round
    ended    from a host: its ranks are done, or one failed         │
    verdict  to every host: over, or again with those that remain   ┘

Every host says "here" once a second, and is answered. A host that has been silent for
:data:`SILENCE` seconds, or whose connection closed, is lost: the others are told its name, end
their ranks, and begin another round without it if restarts are left. With host 0 the meeting itself
is lost; each of the others notices that in the same time. A host that a signal stopped stops the
job: the others have ``STOP_GRACE`` seconds to stop in order.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from shardwise.launch.addresses import listening
from shardwise.launch.errors import UserError
from shardwise.launch.hosts import Nodes
from shardwise.launch.launcher import STOP_GRACE
from shardwise.launch.wire import ClosedError, Line

SILENCE = 10.0  # seconds without a sign of life after which a host counts as lost
BEAT = 1.0  # seconds between signs of life
_POLL = 0.1
_ECHO = 3.0  # seconds for the host to speak whose rank, or which, went first
_FAREWELL = 5.0  # seconds that hosts have to read how it ended


class Host:
    """A host, as the meeting knows it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.heard = time.monotonic()
        self.ready: Mapping[str, Any] | None = None
        self.ended: Mapping[str, Any] | None = None
        self.rank = -1

    @property
    def name(self) -> str:
        """For people."""
        return f"host {self.rank} ({self.line.peer})"


class Meeting:
    """Serves the hosts of a job until it is over.

    Args:
        nodes: the job.
        restarts: how often to begin again with the hosts that remain.

    Raises:
        UserError: the address is none of this host's, or the port is taken.
    """

    def __init__(self, nodes: Nodes, restarts: int) -> None:
        self._nodes = nodes
        self._restarts = restarts
        self._listener = _listen(nodes)
        self._hosts: list[Host] = []
        self._strangers: list[Host] = []
        self._round = -1
        self._running = False
        self._echoed = 0.0  # when ranks were the first to notice that others are gone
        self._stopped: tuple[float, str] | None = None  # when a signal stopped a host, and which
        self._over = threading.Event()  # all is said
        self._closed = threading.Event()
        self._lost: list[str] = []
        self._began = time.monotonic()
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
        for host in (*self._hosts, *self._strangers):
            host.line.close()
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            lines = [host.line for host in (*self._hosts, *self._strangers)]
            waiting: list[Any] = [self._listener, *lines]
            readable, _, _ = select.select(waiting, [], [], _POLL)
            if self._listener in readable:
                with contextlib.suppress(OSError):
                    self._strangers.append(Host(Line(self._listener.accept()[0])))
            for host in [*self._hosts, *self._strangers]:
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
            case "ended":
                host.ended = message
                if message["stopped"] and self._stopped is None:
                    self._stopped = (host.heard, host.name)

    def _admit(self, host: Host, message: Mapping[str, Any]) -> None:
        host.rank = int(message["rank"])
        trouble = self._trouble(host.rank, message)
        self._strangers.remove(host)
        if trouble is not None:
            with contextlib.suppress(ClosedError):
                host.line.send({"kind": "refused", "text": trouble})
            host.line.close()
            return
        host.ready = message
        self._hosts.append(host)

    def _trouble(self, rank: int, message: Mapping[str, Any]) -> str | None:
        if self._round >= 0:
            return f"--rdzv: the job at {self._nodes.where} has begun without this host"
        if int(message["nnodes"]) != self._nodes.count:
            return (
                f"--nnodes: found {message['nnodes']}, expected {self._nodes.count}, as host 0 has"
            )
        twin = next((host for host in self._hosts if host.rank == rank), None)
        if twin is not None:
            return (
                f"--node-rank: found {rank}, which the host {twin.line.peer} has too; expected "
                "one of its own for every host"
            )
        for other in self._hosts:
            assert other.ready is not None
            if message["nproc"] != other.ready["nproc"]:
                expected = f"{other.ready['nproc']}, as {other.name} has"
                return f"--nproc: found {message['nproc']}, expected {expected}"
            for name, version in message["versions"].items():
                found = other.ready["versions"].get(name)
                if found != version:
                    return f"{name}: found {version}, expected {found}, as {other.name} has"
        return None

    def _look(self) -> None:
        now = time.monotonic()
        for host in [*self._hosts, *self._strangers]:
            if now - host.heard > SILENCE:
                self._drop(host, f"no sign of life for {SILENCE:.0f} s")
        if self._over.is_set():
            return
        if self._running:
            self._judge()
            return
        if self._round < 0 and len(self._hosts) < self._nodes.count:
            if now - self._began > self._nodes.timeout:
                here = sorted(host.rank for host in self._hosts)
                missing = sorted(set(range(self._nodes.count)) - set(here))
                self._over.set()
                self._tell_all(
                    "refused",
                    text=f"--rdzv: found hosts {here} within {self._nodes.timeout:.0f} s, "
                    f"expected {missing} too; is the command running there?",
                )
            return
        if self._hosts and all(host.ready is not None for host in self._hosts):
            self._start()

    def _start(self) -> None:
        self._hosts.sort(key=lambda host: host.rank)
        shares = [int(host.ready["nproc"]) for host in self._hosts if host.ready is not None]
        store = self._hosts[0].ready
        assert store is not None
        self._round += 1
        self._running = True
        self._echoed = 0.0
        self._lost.clear()
        first = 0
        for host, share in zip(self._hosts, shares, strict=True):
            host.ready = None
            start = {"kind": "start", "round": self._round, "first": first, "port": store["port"]}
            with contextlib.suppress(ClosedError):
                host.line.send({**start, "world_size": sum(shares)})
            first += share

    def _judge(self) -> None:
        """Whether the round is over, and what follows."""
        failed = [h for h in self._hosts if h.ended is not None and h.ended["failed"]]
        waits = self._stopped is None or time.monotonic() - self._stopped[0] < STOP_GRACE
        if not self._lost and not failed and (waits or self._all_ended()):
            if self._all_ended():
                self._tell_all("verdict", again=False, text="")
                self._running = False
                self._over.set()
            return
        own = [host for host in failed if host.ended is not None and not host.ended["echo"]]
        if waits and not (self._lost or own or self._all_ended()):
            # Ranks that lost a peer say so at once; why, is told a moment later.
            self._echoed = self._echoed or time.monotonic()
            if time.monotonic() - self._echoed < _ECHO:
                return
        reasons = self._lost or [f"a rank of {host.name} failed" for host in own]
        if not reasons and self._stopped is not None:
            reasons = [f"{self._stopped[1]} was stopped"]
        reasons = reasons or [f"a rank of {host.name} failed" for host in failed]
        fatal = any(h.ended is not None and not h.ended["may_restart"] for h in failed)
        again = self._restarts > 0 and not fatal and self._stopped is None
        self._restarts -= again
        self._running = False
        left = len(self._hosts)
        text = "; ".join(reasons)
        if again:
            text += f"; beginning again with {left} {'host' if left == 1 else 'hosts'}"
        self._tell_all("verdict", again=again, text=text)
        if not again:
            self._over.set()

    def _all_ended(self) -> bool:
        return all(host.ended is not None for host in self._hosts)

    def _drop(self, host: Host, why: str) -> None:
        if host in self._strangers:
            self._strangers.remove(host)
        elif host in self._hosts:
            self._hosts.remove(host)
            finished = host.ended is not None and not host.ended["failed"]
            if not (self._running and finished):
                self._lost.append(f"{host.name} was lost: {why}")
        host.line.close()

    def _tell_all(self, kind: str, **more: Any) -> None:
        for host in list(self._hosts):
            host.heard = time.monotonic()
            with contextlib.suppress(ClosedError):
                host.line.send({"kind": kind, **more})


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

"""How the hosts of a job find each other and stay in touch: a server on host 0, a client on each.

    ready     client: its rank, its processes, versions                ┐
    start     server: the client's first rank, the world size, store   │
    training  client: all its ranks have completed a step              │  a generation
    regroup   server: save and stop, more hosts join                   │
    ended     client: its ranks have ended, and how                    │
    verdict   server: what follows                                     ┘

Messages are lines of JSON over one TCP connection per host. Every client sends "here" once a
second, and is answered. A host that has been silent for :data:`SILENCE` seconds, or whose
connection closed, is lost: the others are sent its name, end their ranks, and begin another
generation without it if restarts are left. If host 0 is lost, so is the job; each of the others
notices it in the same time. A host that a signal stopped stops the job: the others have
``STOP_GRACE`` seconds to stop in order.

In an elastic job (``--nnodes MIN:MAX``), hosts that come later wait until the others have saved,
and take part in the next generation. Until all hosts have completed a step in it, those that joined
are on probation: a failure is attributed to them, costs no restart, and the job continues without
them. In such a job a signal stops the job on host 0 only; any other host leaves.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from shardwise.launch.errors import UserError
from shardwise.launch.generation import Admission, Decision, Generation, Host, Next, counted, names
from shardwise.launch.hosts import Nodes, Share, Terms
from shardwise.launch.launcher import STOP_GRACE, Order, Outcome, Result, StoppedBy
from shardwise.launch.network import ClosedError, Connection, connect, interface_towards, listening

SILENCE = 10.0  # seconds without a message after which a host counts as lost
BEAT = 1.0  # seconds between heartbeats
LAST_CALL = 5.0  # seconds to wait for more hosts after one has come, before starting without them
_POLL = 0.1  # seconds
_LINGER = 5.0  # seconds for hosts to read the last verdict


class LostError(UserError):
    """Host 0 is gone, or cannot be reached any more."""

    exit_code = 1


class RendezvousServer:
    """Serves the hosts of a job until it is over, in a thread beside the launcher of host 0.

    Hosts are *unregistered* from their connection to their first message, then take part, or are
    *joining*: they wait for the next generation.

    Args:
        nodes: the job.
        restarts: how often to restart after a failure, with the hosts that remain.
        terms: what hosts that join have to agree on.

    Raises:
        UserError: the address is not one of this host's, or the port is taken.
    """

    def __init__(self, nodes: Nodes, restarts: int, terms: Terms | None = None) -> None:
        self._nodes = nodes
        self._restarts = restarts
        self._rules = Admission(nodes, terms or Terms())
        self._listener = _listen(nodes)
        self._hosts: list[Host] = []
        self._joining: list[Host] = []
        self._unregistered: list[Host] = []
        self._number = -1  # of the current generation
        self._current: Generation | None = None  # None while hosts are awaited
        self._over = threading.Event()  # the last verdict is sent
        self._closed = threading.Event()
        self._waiting_since = time.monotonic()
        self._last_came = self._waiting_since
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving, once the hosts have had time to read their verdict."""
        deadline = time.monotonic() + _LINGER
        while self._over.is_set() and self._hosts and time.monotonic() < deadline:
            time.sleep(_POLL)
        self._closed.set()
        self._thread.join()
        for host in self._connected():
            host.connection.close()
        self._listener.close()

    def _connected(self) -> list[Host]:
        return [*self._hosts, *self._joining, *self._unregistered]

    def _serve(self) -> None:
        while not self._closed.is_set():
            waiting: list[Any] = [self._listener, *(host.connection for host in self._connected())]
            readable, _, _ = select.select(waiting, [], [], _POLL)
            if self._listener in readable:
                with contextlib.suppress(OSError):
                    self._unregistered.append(Host(Connection(self._listener.accept()[0])))
            for host in self._connected():
                if host.connection in readable:
                    self._receive(host)
            self._advance()

    # -- messages ----------------------------------------------------------------------------------

    def _receive(self, host: Host) -> None:
        try:
            for message in host.connection.receive():
                host.heard = time.monotonic()
                self._handle(host, message)
        except (ClosedError, AttributeError, KeyError, TypeError, ValueError) as error:
            self._drop(host, str(error))

    def _handle(self, host: Host, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "here":
                host.connection.send({"kind": "here"})
            case "ready" if host in self._unregistered:
                self._register(host, message)
            case "ready":
                host.ready, host.result = message, None
            case "training" if self._current is not None:
                self._current.note_step(host)
            case "ended" if self._current is not None:
                how = Result(message["result"]), StoppedBy(message["stopped_by"])
                self._current.note_end(host, *how)

    def _register(self, host: Host, message: Mapping[str, Any]) -> None:
        present = [*self._hosts, *self._joining]
        host.rank = self._rules.number(int(message["rank"]), present)
        refusal = self._rules.refusal(host, message, present, self._number)
        self._unregistered.remove(host)
        if refusal is None and self._over.is_set():
            refusal = self._ended_before()
        if refusal is not None:
            _refuse(host, refusal)
            return
        host.hello = host.ready = message
        self._last_came = time.monotonic()
        if self._number < 0:
            if self._nodes.is_elastic:
                self._broadcast("news", text=f"{host.name} is here")
            self._hosts.append(host)
            return
        host.on_probation = True
        self._joining.append(host)
        text = "the other hosts save first, and continue with this host"
        host.connection.send({"kind": "news", "text": text})

    def _ended_before(self) -> str:
        return f"--rdzv: the job at {self._nodes.where} ended before this host could join it"

    def _broadcast(self, kind: str, **more: Any) -> None:
        for host in list(self._hosts):
            host.heard = time.monotonic()
            with contextlib.suppress(ClosedError):
                host.connection.send({"kind": kind, **more})

    # -- generations -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Do what is due by now: lose silent hosts, start a generation, or end one."""
        now = time.monotonic()
        for host in self._connected():
            if now - host.heard > SILENCE:
                self._drop(host, f"no sign of life for {SILENCE:.0f} s")
        if self._over.is_set():
            return
        if self._current is not None:
            self._invite(self._current, now)
            decision = self._current.decide(self._restarts)
            if decision is not None:
                self._conclude(decision)
            return
        fitting, why = self._rules.most(len(self._hosts) + len(self._joining))
        # Before the first generation it waits for all hosts there may be, in an elastic job only
        # for as long as more of them come.
        missing = self._number < 0 and len(self._hosts) < self._nodes.count
        if not fitting or (missing and not self._nodes.is_elastic):
            if now - self._waiting_since > self._nodes.timeout:
                self._give_up(why)
            return
        if missing and now - self._last_came <= LAST_CALL:
            return
        has_first = any(host.rank == 0 for host in self._hosts)
        if has_first and all(host.ready is not None for host in self._hosts):
            self._start(fitting, why)

    def _give_up(self, why: str) -> None:
        nodes = self._nodes
        present = sorted(host.rank for host in (*self._hosts, *self._joining))
        missing = sorted(set(range(nodes.count)) - set(present))
        expected = f"{missing} too" if nodes.least is None else f"{nodes.least} of them or more"
        text = f"found hosts {present} within {nodes.timeout:.0f} s, expected {expected}"
        if why:
            text += f"; {why}"
        self._over.set()
        self._broadcast("refused", text=f"--rdzv: {text}; is the command running there?")
        self._dismiss(0, self._ended_before())

    def _start(self, fitting: int, why: str) -> None:
        self._hosts.sort(key=lambda host: host.rank)
        self._hosts += self._joining
        self._joining.clear()
        for host in self._hosts[fitting:]:
            _refuse(host, why)
        self._hosts = sorted(self._hosts[:fitting], key=lambda host: host.rank)
        shares = [int(host.ready["nproc"]) for host in self._hosts if host.ready is not None]
        assert self._hosts[0].ready is not None
        port = self._hosts[0].ready["port"]  # of the store
        self._number += 1
        self._current = Generation(self._hosts, self._nodes, STOP_GRACE)
        first = 0
        for host, share in zip(self._hosts, shares, strict=True):
            host.ready, host.training = None, False
            start = {"kind": "start", "generation": self._number, "first": first, "port": port}
            with contextlib.suppress(ClosedError):
                host.connection.send({**start, "world_size": sum(shares)})
            first += share

    def _invite(self, current: Generation, now: float) -> None:
        """Ask all hosts to save and stop, once for all that have come, if more can take part."""
        present = len(self._hosts) + len(self._joining)
        due = present == self._nodes.count or now - self._last_came > LAST_CALL
        if not self._joining or current.regrouping or current.is_ending or not due:
            return
        fitting, why = self._rules.most(present)
        self._dismiss(max(0, fitting - len(self._hosts)), why)
        if self._joining:
            current.regrouping = True
            join = "joins" if len(self._joining) == 1 else "join"
            text = f"{names(self._joining)} {join}; saving, to continue with {counted(fitting)}"
            self._broadcast("regroup", text=text)

    def _conclude(self, decision: Decision) -> None:
        """End the generation: send every host what follows."""
        self._current = None
        self._waiting_since = time.monotonic()
        self._restarts -= decision.next is Next.RESTART
        label, text = decision.next.label, decision.why
        if decision.next.begins_again:
            for host, farewell in decision.leaving:
                self._part_with(host, farewell, label)
            text += ("; " if text else "") + self._what_follows()
        self._broadcast("verdict", next=decision.next.value, text=text, label=label)
        if not decision.next.begins_again:
            self._over.set()
            self._dismiss(0, self._ended_before())

    def _what_follows(self) -> str:
        left = len(self._hosts) + len(self._joining)
        fitting, _ = self._rules.most(left)
        if not fitting:
            return f"waiting for more hosts than {left}"
        return f"continuing with {counted(fitting)}"

    # -- hosts that go -----------------------------------------------------------------------------

    def _dismiss(self, keep: int, why: str) -> None:
        """Refuse the hosts that are joining, except the first ``keep``."""
        for host in self._joining[keep:]:
            self._joining.remove(host)
            _refuse(host, why)

    def _part_with(self, host: Host, text: str, label: str) -> None:
        """Continue without a host that leaves, or that failed while it joined."""
        if host.failed and host.result is not Result.SECONDARY and not host.left:
            self._rules.note_failure(host)
        if host in self._hosts:
            self._hosts.remove(host)
            verdict = {"kind": "verdict", "next": Next.LEAVE.value, "text": text, "label": label}
            with contextlib.suppress(ClosedError):
                host.connection.send(verdict)
            host.connection.close()

    def _drop(self, host: Host, why: str) -> None:
        """Note that a host is lost, in the generation too if it takes part."""
        host.why_lost = why
        for waiting in (self._unregistered, self._joining):
            if host in waiting:
                waiting.remove(host)
        if host in self._hosts:
            self._hosts.remove(host)
            if self._current is not None:
                self._current.note_lost(host)
        host.connection.close()


def _refuse(host: Host, why: str) -> None:
    with contextlib.suppress(ClosedError):
        host.connection.send({"kind": "refused", "text": why})
    host.connection.close()


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


@dataclass(frozen=True)
class Verdict:
    """What follows a generation, for this host.

    Attributes:
        next: what follows.
        text: why the generation ended, if not well, or what follows.
        label: the word at the start of a line with the text.
    """

    next: Next
    text: str
    label: str = ""


class RendezvousClient:
    """This host's connection to the server.

    Args:
        nodes: the job.
        nproc: ranks of this host.
        options: the options that must be the same on all hosts, by name.
        say: shows a line of news.

    Raises:
        UserError: host 0 cannot be reached in time.
    """

    def __init__(
        self,
        nodes: Nodes,
        nproc: int,
        options: Mapping[str, object] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._nodes = nodes
        self._nproc = nproc
        self._options = dict(options or {})
        self._say = say
        self._order = Order.CONTINUE
        self._verdict: Verdict | None = None
        self._training = False  # reported in this generation
        self._connection = _connect(nodes)
        self._beaten = 0.0  # when the last heartbeat was sent
        self._heard = time.monotonic()
        self._answered = False  # by host 0, so it is one

    def begin(self, port: int, stopped: Callable[[], bool]) -> Share | None:
        """Wait for all hosts of the next generation.

        Args:
            port: where this host would serve the store, if it is host 0.
            stopped: whether a signal asked to stop.

        Returns:
            Which ranks are this host's; None if a signal asked to stop.

        Raises:
            UserError: this host is refused, not all hosts came in time, or what listens at the
                address is not host 0.
            LostError: host 0 is gone.
        """
        nodes = self._nodes
        self._verdict, self._order, self._training = None, Order.CONTINUE, False
        self._send(
            kind="ready",
            rank=nodes.rank,
            nnodes=nodes.nnodes,
            options=self._options,
            nproc=self._nproc,
            port=port,
            versions={name: metadata.version(name) for name in ("shardwise", "torch")},
        )
        while not stopped():
            for message in self._exchange(0.1):
                match message["kind"]:
                    case "refused":
                        raise UserError(str(message["text"]))
                    case "start":
                        return Share(
                            int(message["first"]),
                            int(message["world_size"]),
                            nodes.address,
                            int(message["port"]),
                            interface_towards(nodes.address),
                            int(message["generation"]),
                        )
                    case "news":
                        self._say(str(message["text"]))
        return None

    def order(self) -> Order:
        """Return what the job asks of this host's ranks.

        Call it often: it also sends the heartbeat.

        Raises:
            LostError: host 0 is gone.
        """
        for message in self._exchange(0.0):
            match message["kind"]:
                case "verdict":
                    text, label = str(message["text"]), str(message["label"])
                    self._verdict = Verdict(Next(message["next"]), text, label)
                    self._order = Order.ABORT
                case "regroup":
                    self._order = Order.SAVE_AND_STOP
                    self._say(str(message["text"]))
        return self._order

    def report_training(self) -> None:
        """Report, once per generation, that all ranks of this host have completed a step."""
        if not self._training:
            self._training = True
            self._send(kind="training")

    def end(self, outcome: Outcome, stopped: Callable[[], bool]) -> Verdict:
        """Report how this host's ranks ended, and wait for what follows.

        Args:
            outcome: how they ended.
            stopped: whether a signal asked to stop waiting.

        Raises:
            LostError: host 0 is gone.
        """
        if self._verdict is None:
            result, stopped_by = outcome.result.value, outcome.stopped_by.value
            self._send(kind="ended", result=result, stopped_by=stopped_by)
        while self._verdict is None and self.order() is not Order.ABORT:
            if stopped():
                return Verdict(Next.END, "")
            time.sleep(0.02)
        assert self._verdict is not None
        return self._verdict

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _exchange(self, seconds: float) -> list[dict[str, Any]]:
        now = time.monotonic()
        if now - self._beaten > 3 * SILENCE and self._beaten:
            # It is this host that was suspended; the others have continued without it.
            raise LostError(self._lost("this host was suspended, and counts as lost"))
        if now - self._beaten > BEAT:
            self._beaten = now
            self._send(kind="here")
        try:
            messages = self._connection.receive(seconds)
        except ClosedError as error:
            if not self._answered:
                raise UserError(
                    f"--rdzv: what listens at {self._nodes.where} does not answer as host 0 does "
                    f"({error}); is its command running there, with this port?"
                ) from None
            raise LostError(self._lost(str(error))) from None
        if messages:
            self._heard, self._answered = now, True
        elif now - self._heard > SILENCE:
            raise LostError(self._lost(f"no sign of life for {SILENCE:.0f} s"))
        return messages

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(ClosedError):  # the next receive raises it, after what has come
            self._connection.send(message)

    def _lost(self, why: str) -> str:
        return (
            f"host 0 ({self._nodes.where}) was lost: {why}; the job ends here. Start it again on "
            "all hosts with --auto-resume"
        )


def _connect(nodes: Nodes) -> Connection:
    try:
        return connect(nodes.address, nodes.port, nodes.timeout)
    except OSError as error:
        raise UserError(
            f"--rdzv: host 0 cannot be reached at {nodes.where} for {nodes.timeout:.0f} s "
            f"({error.strerror or error}); is the command running there, and the port open? "
            "`shardwise doctor` checks further"
        ) from None

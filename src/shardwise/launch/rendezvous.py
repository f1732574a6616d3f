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
fails then is blamed on them, costs no restart, and the job goes on without them. There a signal
stops the job on host 0 only; another host leaves.

One host's side of the meeting in ``rendezvous.py``.
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
from shardwise.launch.generation import Admission, Host, Round, counted, names
from shardwise.launch.hosts import Nodes, Share, Terms
from shardwise.launch.launcher import STOP_GRACE
from shardwise.launch.network import ClosedError, Line, interface_towards, listening, reach

SILENCE = 10.0  # seconds without a sign of life after which a host counts as lost
BEAT = 1.0  # seconds between signs of life
LAST_CALL = 5.0  # seconds after a host has come for more to come, before hosts begin with it
_POLL = 0.1
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
        self._current: Round | None = None  # None: hosts are waited for
        self._over = threading.Event()  # all is said
        self._closed = threading.Event()
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
            case "training" if self._current is not None:
                self._current.step(host)
            case "ended" if self._current is not None:
                self._current.end(host, message)

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
        if self._current is not None:
            self._invite(self._current, now)
            self._judge(self._current)
            return
        fitting, why = self._rules.most(len(self._hosts) + len(self._newcomers))
        if not fitting or (self._nodes.least is None and self._are_missing()):
            if now - self._began > self._nodes.timeout:
                self._give_up(why)
            return
        late = self._round >= 0 or now - self._last_came > LAST_CALL
        if self._are_missing() and not late:
            return
        is_met = any(host.rank == 0 for host in self._hosts)
        if is_met and all(host.ready is not None for host in self._hosts):
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

    def _invite(self, current: Round, now: float) -> None:
        """Ask all to save and stop, once for all that have come, if more hosts can take part."""
        present = len(self._hosts) + len(self._newcomers)
        due = present == self._nodes.count or now - self._last_came > LAST_CALL
        if not self._newcomers or current.regrouping or current.is_ending or not due:
            return
        fitting, why = self._rules.most(present)
        self._dismiss(max(0, fitting - len(self._hosts)), why)
        if self._newcomers:
            current.regrouping = True
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
        assert self._hosts[0].ready is not None
        port = self._hosts[0].ready["port"]  # of the store
        self._round += 1
        later = self._nodes.least is not None
        self._current = Round(self._hosts, later=later, grace=STOP_GRACE)
        first = 0
        for host, share in zip(self._hosts, shares, strict=True):
            host.ready, host.training = None, False
            start = {"kind": "start", "round": self._round, "first": first, "port": port}
            with contextlib.suppress(ClosedError):
                host.line.send({**start, "world_size": sum(shares)})
            first += share

    def _judge(self, current: Round) -> None:
        """Tell all hosts what follows, if the round is over."""
        ruling = current.ruling(self._restarts)
        if ruling is None:
            return
        self._current = None
        self._began = time.monotonic()
        self._restarts -= ruling.counted
        if ruling.again:
            for host, text in ruling.leave:
                self._part_with(host, text, ruling.label)
        text = ruling.why
        if ruling.again:
            text += ("; " if text else "") + self._what_follows()
        how = {"again": ruling.again, "over": not ruling.again}
        self._tell_all("verdict", **how, text=text, label=ruling.label)
        if not ruling.again:
            self._over.set()
            self._dismiss(0, self._ended())

    def _what_follows(self) -> str:
        left = len(self._hosts) + len(self._newcomers)
        fitting, _ = self._rules.most(left)
        if not fitting:
            return f"waiting for more hosts than {left}"
        return f"beginning again with {counted(fitting)}"

    def _part_with(self, host: Host, text: str, label: str) -> None:
        """Go on without a host that leaves, or failed while it joined."""
        if host.failed and not host.is_echo and not host.signalled:
            self._rules.remember(host)
        if host in self._hosts:
            self._hosts.remove(host)
            how = {"again": False, "over": False, "label": label}
            with contextlib.suppress(ClosedError):
                host.line.send({"kind": "verdict", **how, "text": text})
            host.line.close()

    def _drop(self, host: Host, why: str) -> None:
        host.why_lost = why
        for apart in (self._strangers, self._newcomers):
            if host in apart:
                apart.remove(host)
        if host in self._hosts:
            self._hosts.remove(host)
            if self._current is not None:
                self._current.lose(host)
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


class LostError(UserError):
    """Host 0 is gone, or cannot be reached any more."""

    exit_code = 1


@dataclass(frozen=True)
class Verdict:
    """What follows a round.

    Attributes:
        again: this host begins another round.
        over: the job is over.
        text: why the round ended, where it did not end well, or begins again.
        label: what a line with the text begins with.
    """

    again: bool
    over: bool
    text: str
    label: str = ""


class Attendance:
    """This host's connection to the meeting.

    Args:
        nodes: the job.
        nproc: ranks of this host.
        options: what all hosts have to be asked for alike, by the names of the options.
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
        self._regroups = False
        self._training = False
        self._line = _connect(nodes)
        self._verdict: Verdict | None = None
        self._beaten = 0.0
        self._heard = time.monotonic()
        self._met = False  # host 0 has answered

    def begin(self, port: int, stopped: Callable[[], bool]) -> Share | None:
        """Wait for all hosts, and learn which ranks are this host's.

        Args:
            port: where this host would serve the store, if it is host 0.
            stopped: whether a signal asked to stop; then None is returned.

        Raises:
            UserError: this host is refused, not all hosts came in time, or it is no host 0 that
                listens at the address.
            LostError: host 0 is gone.
        """
        nodes = self._nodes
        self._verdict, self._regroups, self._training = None, False, False
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
                            int(message["round"]),
                        )
                    case "news":
                        self._say(str(message["text"]))
        return None

    def is_over(self) -> bool:
        """Whether the round has ended elsewhere. Ask often: it is this host's sign of life."""
        for message in self._exchange(0.0):
            match message["kind"]:
                case "verdict":
                    text, label = str(message["text"]), str(message["label"])
                    again, over = bool(message["again"]), bool(message["over"])
                    self._verdict = Verdict(again, over, text, label)
                case "regroup":
                    self._regroups = True
                    self._say(str(message["text"]))
        return self._verdict is not None

    def regroups(self) -> bool:
        """Whether ranks shall save and stop, since more hosts join."""
        return self._regroups

    def train(self) -> None:
        """Tell, once a round, that all ranks of this host have made a step."""
        if not self._training:
            self._training = True
            self._send(kind="training")

    def end(
        self,
        *,
        failed: bool,
        echo: bool,
        may_restart: bool,
        by_signal: bool,
        signalled: bool,
        stopped: Callable[[], bool],
    ) -> Verdict:
        """Tell how this host's ranks ended, and wait for what follows.

        Args:
            failed: whether one ended badly.
            echo: whether only because ranks of other hosts went first.
            may_restart: whether another attempt could end better.
            by_signal: whether a signal asked them to stop.
            signalled: whether one asked their launcher.
            stopped: whether a signal asked to stop waiting.
        """
        if self._verdict is None:
            how = {"failed": failed, "echo": echo, "may_restart": may_restart}
            self._send(kind="ended", stopped=by_signal, signalled=signalled, **how)
        while not self.is_over():
            if stopped():
                return Verdict(again=False, over=True, text="")
            time.sleep(0.02)
        assert self._verdict is not None
        return self._verdict

    def close(self) -> None:
        """Leave."""
        self._line.close()

    def _exchange(self, seconds: float) -> list[dict[str, Any]]:
        now = time.monotonic()
        if now - self._beaten > 3 * SILENCE and self._beaten:
            # It is this host that stood still; the others have gone on without it.
            raise LostError(self._lost("this host did nothing for long, and counts as lost"))
        if now - self._beaten > BEAT:
            self._beaten = now
            self._send(kind="here")
        try:
            messages = self._line.receive(seconds)
        except ClosedError as error:
            if not self._met:
                raise UserError(
                    f"--rdzv: what listens at {self._nodes.where} does not answer as host 0 does "
                    f"({error}); is its command running there, with this port?"
                ) from None
            raise LostError(self._lost(str(error))) from None
        if messages:
            self._heard, self._met = now, True
        elif now - self._heard > SILENCE:
            raise LostError(self._lost(f"no sign of life for {SILENCE:.0f} s"))
        return messages

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(ClosedError):  # which the next receive tells, with what came
            self._line.send(message)

    def _lost(self, why: str) -> str:
        return (
            f"host 0 ({self._nodes.where}) was lost: {why}; the job ends here. Start it again on "
            "all hosts with --auto-resume"
        )


def _connect(nodes: Nodes) -> Line:
    try:
        return reach(nodes.address, nodes.port, nodes.timeout)
    except OSError as error:
        raise UserError(
            f"--rdzv: host 0 cannot be reached at {nodes.where} for {nodes.timeout:.0f} s "
            f"({error.strerror or error}); is the command running there, and the port open? "
            "`shardwise doctor` looks closer"
        ) from None

"""One host's side of the meeting in ``rendezvous.py``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from shardwise.launch import rendezvous
from shardwise.launch.addresses import interface_towards
from shardwise.launch.errors import UserError
from shardwise.launch.hosts import Nodes, Share
from shardwise.launch.wire import ClosedError, Line, reach


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
        if now - self._beaten > 3 * rendezvous.SILENCE and self._beaten:
            # It is this host that stood still; the others have gone on without it.
            raise LostError(self._lost("this host did nothing for long, and counts as lost"))
        if now - self._beaten > rendezvous.BEAT:
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
        elif now - self._heard > rendezvous.SILENCE:
            raise LostError(self._lost(f"no sign of life for {rendezvous.SILENCE:.0f} s"))
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

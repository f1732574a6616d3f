"""The server at which replicas that come and go on their own meet.

It holds what they report and what they get, in a store of its own, and the addresses by which
members of an exchange find each other. Parameters do not pass through it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing

from shardwise.base import plain
from shardwise.base.arguments import check_arguments, check_seconds
from shardwise.diloco.coordinator import NUMBERS_PER_SERVER, Coordinator, Event, EventKind
from shardwise.elastic.clock import process_clock
from shardwise.elastic.network import listening
from shardwise.elastic.store import SERVER, StoreServer

#: The keys: what replicas get, which attempt committed a round, and what replicas report.
PLAN = f"{SERVER}quorum"
COMMIT = f"{SERVER}commit/"
REPORT = "report/"
#: What members of an attempt, and both ends of a fetch, find each other by.
MEETING = "meeting/"

_TICK = 0.02  # seconds between two looks at the reports
_MEETINGS_KEPT = 64  # attempts for which addresses are kept

_log = logging.getLogger(__name__)


class QuorumServer(AbstractContextManager["QuorumServer"]):
    """A server for replicas that come and go on their own; :class:`Quorum` is the other end.

    Use it as a context, or call :meth:`close`.

    Args:
        replicas: how many are expected at the start. Later there may be more or fewer.
        deadline: seconds that a round waits for a replica that is late, once another one is ready;
            and seconds without a sign of life after which a replica is left out. More than a step
            takes, and more than an exchange that fills the link.
        address: where to listen; by default on this host only.
        port: where to listen; 0: any that is free.
        token: what replicas must hold; empty: any that reaches the port may take part.
        start_timeout: seconds that the first replica waits for the others, at the start and after
            all were lost.
        report: called with everything that happens, by the server's thread.

    Attributes:
        port: where it listens.

    Raises:
        ValueError: an argument is out of range.
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        replicas: int,
        *,
        deadline: float,
        address: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        start_timeout: float = 60.0,
        report: Callable[[Event], object] = lambda event: None,
    ) -> None:
        check_arguments(QuorumServer.__init__, locals())
        if replicas < 1:
            raise ValueError(f"replicas: found {replicas}, expected 1 or more")
        for name, seconds in (("deadline", deadline), ("start_timeout", start_timeout)):
            check_seconds(name, seconds)
        first = secrets.randbelow(2**29) * NUMBERS_PER_SERVER
        self._coordinator = Coordinator(
            replicas, deadline, start_timeout, process_clock().now, first
        )
        self._report = report
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shardwise quorum", daemon=True)
        with ExitStack() as undo:  # Ctrl-C leaves no thread, nor an open socket
            listener = undo.enter_context(listening(address, port))
            self.port = int(listener.getsockname()[1])
            self._store = undo.enter_context(closing(StoreServer(listener, token.encode())))
            self._store.put(PLAN, plain.written(self._coordinator.plan))
            undo.callback(self.close)
            self._thread.start()
            undo.pop_all()

    def __exit__(self, *_: object) -> None:
        """Close the server."""
        self.close()

    def close(self) -> None:
        """End all connections. Replicas go on training, and look for the server for a while."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._store.close()

    def _watch(self) -> None:
        while not self._over.wait(_TICK):
            try:
                self._look()
            except Exception:  # replicas train on meanwhile
                _log.exception("the quorum server could not look at its replicas")

    def _look(self) -> None:
        before, silence = self._coordinator.plan, self._store.silence()  # who is gone has said why
        reports = {
            int(replica): text
            for replica, text in self._store.values(REPORT).items()
            if replica.isdecimal() and len(replica) < 10
        }
        events = self._coordinator.look(reports, silence)
        for event in events:  # before replicas learn that an attempt has committed a round
            if event.kind is EventKind.ROUND and event.attempt is not None:
                number = event.attempt.number
                self._store.put(f"{COMMIT}{event.round}", str(number).encode())
                self._store.forget(f"{MEETING}{number - _MEETINGS_KEPT}/")
        if self._coordinator.plan != before:
            self._store.put(PLAN, plain.written(self._coordinator.plan))
        for event in events:
            self._report(event)

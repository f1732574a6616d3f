"""The server at which replicas that come and go on their own meet.

It holds what they report and what they get, in a store of its own, and the addresses by which
members of an exchange find each other. Parameters do not pass through it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing

from shardwise.base.arguments import check_arguments, check_seconds
from shardwise.base.repeated import Repeated
from shardwise.diloco.coordinator import (
    NUMBERS_PER_SERVER,
    Coordinator,
    Event,
    EventKind,
    ReplicaReport,
)
from shardwise.elastic.clock import process_clock
from shardwise.elastic.network import listening
from shardwise.elastic.registry import Registry
from shardwise.elastic.store import SERVER

#: The keys of the store: which attempt committed a round, and by what members of an attempt, and
#: both ends of a fetch, find each other.
COMMIT = f"{SERVER}commit/"
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
        self._watch = Repeated(self._look, lambda: _TICK, "shardwise quorum")
        held = token.encode()
        with ExitStack() as undo:  # Ctrl-C leaves no thread, nor an open socket
            listener = undo.enter_context(listening(address, port))
            self.port = int(listener.getsockname()[1])
            self._registry = undo.enter_context(closing(Registry(listener, held, ReplicaReport)))
            undo.callback(self.close)
            self._registry.publish(self._coordinator.plan)
            self._watch.start()
            undo.pop_all()

    def __exit__(self, *_: object) -> None:
        """Close the server."""
        self.close()

    def close(self) -> None:
        """End all connections. Replicas go on training, and look for the server for a while."""
        self._watch.close()
        self._registry.close()

    def _look(self) -> None:
        try:
            self._decide()
        except Exception:  # replicas train on meanwhile
            _log.exception("the quorum server could not look at its replicas")

    def _decide(self) -> None:
        events = self._coordinator.look(self._registry.look())
        for event in events:  # before replicas learn that an attempt has committed a round
            if event.kind is EventKind.ROUND and event.attempt is not None:
                number, store = event.attempt.number, self._registry.store
                store.put(f"{COMMIT}{event.round}", str(number).encode())
                store.forget(f"{MEETING}{number - _MEETINGS_KEPT}/")
        self._registry.publish(self._coordinator.plan)
        for event in events:
            self._report(event)

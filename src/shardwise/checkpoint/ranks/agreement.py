"""How ranks agree while they save or load: they exchange plans and results, and fail together.

If one rank fails, every rank raises the same error, which names it. Objects are sent between the
processes of one job only, by torch's own functions, in a process group that training does not use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from shardwise.base import devices
from shardwise.base.arguments import check_arguments
from shardwise.base.devices import GLOO
from shardwise.base.errors import CheckpointError, PeerLostError, lost_peer_behind
from shardwise.transport.peers import Notice, Peers, new_group
from shardwise.transport.select import all_to_all

if TYPE_CHECKING:
    from shardwise.transport.all_to_all import AllToAll

T = TypeVar("T")
R = TypeVar("R")


def group_for(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A process group of the same ranks on gloo, for checkpoints alone. All ranks must call this.

    Args:
        group: the ranks; the default process group if ``None``.

    Returns:
        The group, which is made once for each ``group``; ``None`` if there are no process groups.

    Raises:
        TypeError: the group is no process group.
    """
    check_arguments(group_for, locals())
    return Peers(group).once(_own_group) if dist.is_initialized() else None


def _own_group(peers: Peers) -> dist.ProcessGroup:
    return new_group(peers.members, timeout=timedelta(seconds=peers.timeout), backend=GLOO.name)


@dataclass(frozen=True)
class _Failure:
    """Why a rank could not do its part."""

    rank: int
    reason: str


class _Lost(_Failure):
    """A rank that was lost, or that failed because it lost another one."""


class _Unreachable(_Lost):
    """A rank that the coordinator found lost, so that it gets no answer."""


class Ranks:
    """The ranks that save or load together. The first of them coordinates.

    Args:
        group: a process group on the CPU that nothing else uses at the same time; ``None`` for a
            single process.

    Attributes:
        rank: this process's rank in the group.
        size: number of ranks in the group.
        names: the number of each rank in the job, which users know.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.names = [0] if group is None else dist.get_process_group_ranks(group)

    @property
    def coordinates(self) -> bool:
        """Whether this rank coordinates."""
        return self.rank == 0

    def together(
        self, doing: str, part: Callable[[], T], answer: Callable[[list[T]], list[R]]
    ) -> R:
        """Let every rank do its part, and the first rank make an answer for each from all results.

        If a rank fails or is lost, ``answer`` is not called, and every remaining rank raises the
        same error. One that is interrupted tells the others, and raises what interrupted it.

        Args:
            doing: what the ranks do, for error messages.
            part: called on every rank; returns its result.
            answer: called on the first rank with the results in the order of ranks; returns an
                answer for each rank.

        Returns:
            This rank's answer.

        Raises:
            CheckpointError: a rank failed; the message names it and says why. If a rank was lost,
                the cause is a :class:`PeerLostError`, on every remaining rank.
        """
        mine, error = self._attempt(part)
        try:
            if self.coordinates:
                parts = [mine, *(self._receive(peer) for peer in range(1, self.size))]
                answers, error = self._answers(parts, answer, error)
                gone = [each.rank for each in parts if isinstance(each, _Unreachable)]
                for peer in range(1, self.size):
                    if self.names[peer] not in gone:
                        self._send(answers[peer], peer)
                reply = answers[0]
            else:
                reply = self._answered(mine)
        finally:
            if error is not None and not isinstance(error, Exception):
                try:
                    raise error  # Ctrl-C, of which the other ranks know now
                finally:
                    del error  # in a cycle with this frame, it would keep what was locked
        if isinstance(reply, _Failure):
            if isinstance(reply, _Lost) and (error is None or lost_peer_behind(error) is None):
                error = PeerLostError(f"rank {reply.rank}: {reply.reason}")
            raise CheckpointError(f"{doing}: rank {reply.rank}: {reply.reason}") from error
        return reply  # type: ignore[no-any-return]

    def agree(self, doing: str, part: Callable[[], T], answer: Callable[[list[T]], R]) -> R:
        """As :meth:`together`, with one answer for all ranks."""
        return self.together(doing, part, lambda parts: [answer(parts)] * len(parts))

    def all(self, doing: str, part: Callable[[], T]) -> T:
        """As :meth:`together`, but each rank returns its own result if none failed."""
        done: list[T] = []
        self.together(doing, lambda: done.append(part()), lambda parts: [None] * len(parts))
        return done[0]

    def begin(self, doing: str, part: Callable[[], T]) -> T:
        """Let every rank check what it was asked for; each returns its own result if all could.

        Args:
            doing: what the ranks do, for error messages.
            part: called on every rank.

        Raises:
            Exception: what ``part`` raises on this rank.
            CheckpointError: another rank failed; the message names it and says why.
        """
        own: list[Exception] = []

        def attempt() -> T:
            try:
                return part()
            except Exception as error:
                own.append(error)
                raise

        try:
            return self.all(doing, attempt)
        except CheckpointError:
            if own:
                raise own[0] from None
            raise

    def first(
        self, doing: str, part: Callable[[], T], after: Callable[[], None] = lambda: None
    ) -> T:
        """Let the first rank do something, and return its result on every rank.

        Args:
            doing: what it does, for error messages.
            part: called on the first rank.
            after: called on every rank before that.

        Raises:
            CheckpointError: a rank failed; the message says why.
        """
        return self.agree(doing, after, lambda _: part())

    def all_to_all(self) -> AllToAll:
        """What moves tensors on the host between these ranks."""
        assert self._group is not None
        return all_to_all(self._group, devices.CPU)

    def _attempt(self, part: Callable[[], T]) -> tuple[T | _Failure, BaseException | None]:
        try:
            return part(), None
        except BaseException as error:  # the other ranks wait, whatever it is
            kind = _Failure if lost_peer_behind(error) is None else _Lost
            return kind(self.names[self.rank], _reason(error)), error

    def _answers(
        self, parts: list[Any], answer: Callable[[list[T]], list[R]], error: BaseException | None
    ) -> tuple[list[Any], BaseException | None]:
        failures = [each for each in parts if isinstance(each, _Failure)]
        try:
            if not failures:
                answers, error = self._attempt(lambda: answer(parts))
                if not isinstance(answers, _Failure):
                    return answers, None
                failures = [answers]
            # A lost rank may be the consequence of another rank's failure: failures come first.
            first = min(failures, key=lambda each: (isinstance(each, _Lost), each.rank))
            return [type(first)(first.rank, first.reason)] * self.size, error
        finally:
            del error  # or the frame that it came from would lead to it

    def _answered(self, mine: Any) -> Any:
        """Send a result to the first rank, and return its answer: one wait for both."""
        first, found = self.names[0], [None]

        def exchange() -> None:
            dist.send_object_list([mine], dst=first, group=self._group)
            dist.recv_object_list(found, src=first, group=self._group)

        try:
            self._call(exchange, 0)
        except PeerLostError as error:
            raise CheckpointError(
                f"rank {self.names[self.rank]}: rank {first}, which coordinates checkpoints, was "
                f"lost ({_first_line(error)})"
            ) from error
        return found[0]

    def _send(self, what: Any, peer: int) -> None:
        # The next receive reports a loss. First the other ranks need their answers.
        with contextlib.suppress(PeerLostError):
            self._call(
                lambda: dist.send_object_list([what], dst=self.names[peer], group=self._group),
                peer,
            )

    def _receive(self, peer: int) -> Any:
        found: list[Any] = [None]
        try:
            self._call(
                lambda: dist.recv_object_list(found, src=self.names[peer], group=self._group),
                peer,
            )
        except PeerLostError as error:
            return _Unreachable(self.names[peer], f"was lost ({_first_line(error)})")
        return found[0]

    def _call(self, call: Callable[[], object], peer: int) -> None:
        assert self._group is not None
        # A rank that writes much, or verifies it, is waited for as long as that takes.
        Peers(self._group).call(call, "a checkpoint", [peer], Notice.NOTHING)


def checked(
    function: Callable[..., object],
    group: dist.ProcessGroup | None,
    given: Mapping[str, Any],
    also: Callable[[], object] = lambda: None,
) -> Ranks:
    """The ranks that call a function together, once all of them have checked its arguments.

    Args:
        function: what was called.
        group: the ranks; the default process group if ``None``.
        given: its arguments by name: ``locals()``, in the first line.
        also: checks more.

    Raises:
        TypeError: an argument has another type. Other ranks raise a ``CheckpointError``.
        CheckpointError: another rank found that; the message names it.
    """
    ranks = Ranks(group_for(group))

    def check() -> None:
        check_arguments(function, given)
        also()

    ranks.begin(function.__name__, check)
    return ranks


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]

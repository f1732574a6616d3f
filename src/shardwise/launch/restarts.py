"""A job from its first round to its last, on one host: launch, and launch again after a failure."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from shardwise.launch.errors import say
from shardwise.launch.generation import counted
from shardwise.launch.hosts import Nodes, Share, Terms
from shardwise.launch.launcher import Launcher
from shardwise.launch.network import listening
from shardwise.launch.rank import STOP_SIGNALS
from shardwise.launch.rendezvous import Attendance, Meeting

Command = Callable[[int], Sequence[str]]


def run_here(command: Command, nproc: int, restarts: int) -> int:
    """Run a job on this host alone.

    Args:
        command: gives the command of a round, 0 for the first.
        nproc: ranks.
        restarts: how often to begin again after a rank was killed or crashed.

    Returns:
        The exit code of the last round; see :meth:`Launcher.run`.
    """
    attempt = 0
    while True:
        launcher = Launcher(command(attempt), nproc)
        code = launcher.run()
        if code == 0 or not launcher.may_restart or attempt == restarts:
            return code
        attempt += 1
        say(f"restart    {attempt} of {restarts}, from the last checkpoint")


def run_over_hosts(
    command: Command, nproc: int, nodes: Nodes, restarts: int, terms: Terms | None = None
) -> int:
    """Run this host's part of a job.

    Args:
        command: gives the command of a round, 0 for the first of the job.
        nproc: ranks of this host.
        nodes: the job.
        restarts: how often to begin again after a rank or a host was lost.
        terms: what hosts have to agree with that come later.

    Raises:
        UserError: the hosts did not come together, or host 0 was lost.
    """
    with contextlib.ExitStack() as stack:
        if nodes.rank == 0:
            meeting = Meeting(nodes, restarts, terms)
            stack.callback(meeting.close)
            meeting.start()
        options = None if terms is None else terms.options
        attendance = Attendance(nodes, nproc, options, lambda text: say(f"hosts      {text}"))
        stack.callback(attendance.close)
        while True:
            code, again = _round(command, nproc, nodes, attendance)
            if not again:
                return code


def _round(command: Command, nproc: int, nodes: Nodes, attendance: Attendance) -> tuple[int, bool]:
    listener = listening(nodes.address) if nodes.rank == 0 else None
    port = 0 if listener is None else listener.getsockname()[1]
    with _noting_signals() as noted:
        share = attendance.begin(port, lambda: bool(noted))
    if share is None:
        say("Stopped while waiting for the other hosts.")
        return 128 + noted[0], False
    if nodes.least is not None:
        say(_described(share, nproc))

    def is_over() -> bool:
        if launcher.stepped:
            attendance.train()
        return attendance.is_over()

    launcher = Launcher(
        command(share.round),
        nproc,
        share=share,
        listener=listener,
        is_over=is_over,
        regroups=attendance.regroups,
    )
    code = launcher.run()
    if launcher.stepped:
        attendance.train()
    over = True
    try:
        with _noting_signals() as noted:
            verdict = attendance.end(
                failed=launcher.failed,
                echo=launcher.echo,
                may_restart=launcher.may_restart,
                by_signal=launcher.stopped,
                signalled=launcher.signalled,
                stopped=lambda: bool(noted),
            )
        over = verdict.over
    finally:
        if launcher.farewell and over:
            say(launcher.farewell)
    if verdict.text:
        say(f"{verdict.label:<11}{verdict.text}")
    again = verdict.again and not (launcher.signalled or noted)
    return (code or (1 if verdict.text else 0)), again


def _described(share: Share, nproc: int) -> str:
    last = share.first + nproc - 1
    ranks = f"rank {last}" if nproc == 1 else f"ranks {share.first} to {last}"
    hosts = counted(share.world_size // nproc)
    return f"hosts      {hosts}; {ranks} of {share.world_size} here"


@contextlib.contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Note stop signals instead of dying of them, while no rank of this host runs."""
    noted: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        del frame
        noted.append(signum)

    before = {signum: signal.signal(signum, note) for signum in STOP_SIGNALS}
    try:
        yield noted
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

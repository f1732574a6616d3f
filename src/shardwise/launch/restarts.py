"""A job from its first generation to its last, on one host."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from shardwise.launch.errors import say
from shardwise.launch.generation import Next, counted
from shardwise.launch.hosts import Nodes, Share, Terms
from shardwise.launch.launcher import Launcher, Order, StoppedBy
from shardwise.launch.network import listening
from shardwise.launch.rank import STOP_SIGNALS
from shardwise.launch.rendezvous import RendezvousClient, RendezvousServer

#: Gives the program and arguments of a generation, 0 for the first.
Command = Callable[[int], Sequence[str]]


def run_here(command: Command, nproc: int, restarts: int) -> int:
    """Run a job on this host alone.

    Args:
        command: gives the command of a generation.
        nproc: ranks.
        restarts: how often to restart after a rank was killed or crashed.

    Returns:
        The exit code of the last generation.
    """
    attempt = 0
    while True:
        outcome = Launcher(command(attempt), nproc).run()
        if not outcome.result.may_restart or attempt == restarts:
            return outcome.exit_code
        attempt += 1
        say(f"restart    {attempt} of {restarts}, from the last checkpoint")


def run_over_hosts(
    command: Command, nproc: int, nodes: Nodes, restarts: int, terms: Terms | None = None
) -> int:
    """Run this host's part of a job.

    Args:
        command: gives the command of a generation.
        nproc: ranks of this host.
        nodes: the job.
        restarts: how often to restart after a rank or a host was lost.
        terms: what hosts that join later have to agree on.

    Returns:
        The exit code of this host's last generation.

    Raises:
        UserError: the hosts did not come together, or host 0 was lost.
    """
    with contextlib.ExitStack() as stack:
        if nodes.rank == 0:
            server = RendezvousServer(nodes, restarts, terms)
            stack.callback(server.close)
            server.start()
        options = None if terms is None else terms.options
        client = RendezvousClient(nodes, nproc, options, lambda text: say(f"hosts      {text}"))
        stack.callback(client.close)
        while True:
            code, follows = _run_generation(command, nproc, nodes, client)
            if not follows.begins_again:
                return code


def _run_generation(
    command: Command, nproc: int, nodes: Nodes, client: RendezvousClient
) -> tuple[int, Next]:
    """Run this host's ranks of one generation; return an exit code, and what follows here."""
    listener = listening(nodes.address) if nodes.rank == 0 else None
    port = 0 if listener is None else listener.getsockname()[1]
    with _noting_signals() as noted:
        share = client.begin(port, lambda: bool(noted))
    if share is None:
        say("Stopped while waiting for the other hosts.")
        return 128 + noted[0], Next.END
    if nodes.is_elastic:
        say(_description(share, nproc))

    def order() -> Order:
        if launcher.has_stepped:
            client.report_training()
        return client.order()

    launcher = Launcher(
        command(share.generation), nproc, share=share, listener=listener, order=order
    )
    outcome = launcher.run()
    if launcher.has_stepped:
        client.report_training()
    follows = Next.END
    try:
        with _noting_signals() as noted:
            verdict = client.end(outcome, lambda: bool(noted))
        follows = verdict.next
    finally:
        # A rank says that the job has stopped; say so only if it has.
        if outcome.farewell and follows in (Next.END, Next.FAIL):
            say(outcome.farewell)
    if verdict.text:
        say(f"{verdict.label:<11}{verdict.text}")
    if outcome.stopped_by is StoppedBy.LAUNCHER or noted:
        follows = Next.END
    return (outcome.exit_code or (1 if verdict.text else 0)), follows


def _description(share: Share, nproc: int) -> str:
    last = share.first + nproc - 1
    ranks = f"rank {last}" if nproc == 1 else f"ranks {share.first} to {last}"
    hosts = counted(share.world_size // nproc)
    return f"hosts      {hosts}; {ranks} of {share.world_size} here"


@contextlib.contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Note stop signals instead of ending the process, while no rank of this host runs."""
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

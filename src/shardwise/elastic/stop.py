"""Stopping in order: a loop of the user's saves and ends when a signal or its launcher asks it to.

Ranks are asked to stop by a signal: Ctrl-C, Slurm before the time is over, ``torchrun`` before it
starts the ranks again, or our launcher when hosts join or leave. The signal reaches ranks at
different steps. They agree with one small collective after every step, and stop after the same one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from shardwise.base.arguments import check_arguments
from shardwise.base.say import say
from shardwise.elastic.errors import Stopped, signal_name
from shardwise.elastic.rank import STOP_SIGNALS, StopSignals
from shardwise.elastic.world import launched_here

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GracefulStop:
    """A block in which signals that ask to stop wait until the loop has saved.

    ::

        with shardwise.GracefulStop() as stop:
            for step in range(first, last + 1):
                train(step)
                stopping = stop.requested()  # the same answer on every rank
                if stopping or step % 100 == 0:
                    save(step)
                if stopping:
                    stop.exit(f"Stopped after step {step}, which is saved.")

    Inside, SIGINT and SIGTERM are only noted. A launcher that starts the ranks again, because a
    host has joined, asks in the same way, once every rank has completed a step; so no step is lost.
    A signal that comes after the last call of :meth:`requested` does not keep the program from
    ending as it would without it. On leaving the block, signals have the effect that they had
    before it.

    Enter it in the main thread, on every rank.

    Args:
        group: the ranks that agree, by default all of the default process group. On a group
            without a backend for CPU tensors, such as NCCL alone, :meth:`requested` waits for the
            device.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        check_arguments(GracefulStop.__init__, locals())
        self._group = group
        self._signals = StopSignals()
        self._signum = 0  # the signal that the ranks agreed on
        self._block = contextlib.ExitStack()

    def __enter__(self) -> GracefulStop:
        with contextlib.ExitStack() as block:
            for signum in STOP_SIGNALS:
                block.callback(signal.signal, signum, signal.getsignal(signum))
            block.enter_context(self._signals.deferred())
            self._signals.install()
            self._block = block.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()

    def requested(self) -> bool:
        """Return whether the ranks should save and stop now.

        Call it once after every step, on all ranks of the group: it is a collective, and reports to
        the launcher that a step was completed. Keep the answer, since another call may have
        another one. Without a process group, each rank answers for itself.

        Returns:
            True if any rank was asked to stop.

        Raises:
            PeerLostError: another rank died.
        """
        self._signals.stepped()
        self._signum = self._agree(self._signals.noted)
        return self._signum != 0

    def exit(self, message: str = "") -> NoReturn:
        """End this rank in order, once everything is saved.

        The process ends with exit code 128 + signal. Under our launcher, the script may be started
        again, over other hosts.

        Args:
            message: what to tell the user, if the job ends; by default the name of the signal.

        Raises:
            Stopped: under our launcher, which reports it. It is no ``Exception``.
            SystemExit: anywhere else.
            RuntimeError: no rank was asked to stop.
        """
        if not self._signum:
            raise RuntimeError("exit: found no request to stop, expected requested() to be true")
        message = message or f"Stopped by {signal_name(self._signum)}."
        if launched_here():
            raise Stopped(self._signum, message)
        if os.environ.get("RANK", "0") == "0":
            say(message)
        sys.exit(128 + self._signum)

    def _agree(self, signum: int) -> int:
        """Return the signal that any rank of the group has noted, or 0."""
        if "torch" not in sys.modules:
            return signum
        import torch
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return signum
        from shardwise.base import devices
        from shardwise.transport.peers import Peers

        device = devices.CPU
        try:
            Peers(self._group).backend(device)
        except ValueError:  # of accelerators alone
            device = devices.current(devices.default_type())
        asked = torch.tensor(signum, dtype=torch.int32, device=device)
        with Peers(self._group).collective("the agreement on whether to stop"):
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        return int(asked.item())

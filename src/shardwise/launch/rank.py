"""The life of one rank: tied to its launcher, connected to its peers, reporting how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

from shardwise.errors import PeerLostError, lost_peer_behind
from shardwise.launch.errors import Stopped, UserError
from shardwise.launch.report import Ending, Report, Stage
from shardwise.launch.signals import StopSignals
from shardwise.launch.world import PARENT_PID, REPORT_FD, STORE_FD, World, launched_here

# A disk that takes no more: nothing that a traceback would help with.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run_rank(world: World, body: Callable[[World, StopSignals], None]) -> NoReturn:
    """Run ``body`` as one rank and end the process with its exit code.

    Exit codes: 0 when ``body`` returns, 2 for a :class:`UserError` (unless it says another), 128 +
    signal for :class:`Stopped`, 1 for every other error. What was raised from the loss of a peer is
    an error of that kind, whatever it became: the same command may succeed later.
    """
    signals = StopSignals(_tell)
    try:
        signals.install()
        faulthandler.enable()
        _die_with_parent()
        body(world, signals)
    except BaseException as error:  # whatever it is, the launcher must hear of it
        _report(_ending(world, error), world)
        code = _exit_code(error)
    else:
        code = 0
    _leave(code)


@contextlib.contextmanager
def connected(world: World, backend: str, timeout: float | None = None) -> Iterator[None]:
    """Be a member of the default process group of ``torch.distributed``.

    Under our launcher rank 0 serves the store on a socket that the launcher has bound already, so
    no port can be lost to another program; otherwise MASTER_ADDR and MASTER_PORT say where it is.

    Args:
        world: this rank.
        backend: for ``init_process_group``, e.g. ``gloo``.
        timeout: seconds that a collective may take; None: torch's default.
    """
    import torch.distributed as dist

    from shardwise.transport.peers import naming_lost_peer, tells_of_lost_peer

    try:
        _connect(world, backend, None if timeout is None else timedelta(seconds=timeout))
    except RuntimeError as error:
        if tells_of_lost_peer(error):
            raise PeerLostError(
                f"rank {world.rank} could not connect to the other {world.size - 1} ranks: one of "
                f"them died, or never started; look for the first error in its output ({error})"
            ) from error
        raise
    yield
    # Only after success: with a peer gone, tearing down may wait for it. The barrier keeps rank
    # 0's store alive until no rank needs it.
    with naming_lost_peer(None, "the barrier at the end"):
        dist.barrier()
    dist.destroy_process_group()


def _connect(world: World, backend: str, timeout: timedelta | None) -> None:
    """Make the default process group."""
    import torch.distributed as dist

    if not launched_here():
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout)
        return
    fd = os.environ.get(STORE_FD)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world.size,
        is_master=world.rank == 0,
        master_listen_fd=None if fd is None else int(fd),
    )
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )


def _die_with_parent() -> None:
    """Have the kernel kill this process when its launcher dies, however that happens."""
    parent = os.environ.get(PARENT_PID)
    if parent is None or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)


def _ending(world: World, error: BaseException) -> Report:
    code = _exit_code(error)
    if isinstance(error, Stopped):
        return Report(world.rank, Ending.STOPPED, code, error.message)
    if lost_peer_behind(error) is not None:
        text = str(error) if isinstance(error, UserError) else _traceback(error)
        return Report(world.rank, Ending.PEER, code, text)
    if isinstance(error, UserError):
        if error.passing:
            return Report(world.rank, Ending.FAILED, code, str(error))
        return Report(world.rank, Ending.USER, code, f"error: {error}")
    if isinstance(error, BrokenPipeError):
        return Report(world.rank, Ending.USER, code, "error: standard output was closed")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return Report(world.rank, Ending.USER, code, f"error: {error}")
    return Report(world.rank, Ending.FAILED, code, _traceback(error))


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _exit_code(error: BaseException) -> int:
    if isinstance(error, Stopped):
        return error.exit_code
    if isinstance(error, UserError) and lost_peer_behind(error) is None:
        return error.exit_code
    return 1


def _tell(stage: Stage) -> None:
    fd = os.environ.get(REPORT_FD)
    if fd is not None:
        stage.send(int(fd))


def _report(report: Report, world: World) -> None:
    fd = os.environ.get(REPORT_FD)
    if fd is not None:
        report.send(int(fd))
        return
    # No launcher of ours to choose among the reports: every rank shows its own failure.
    if report.ending is Ending.STOPPED and report.rank != 0:
        return
    prefix = f"[rank {report.rank}] " if world.size > 1 else ""
    print(f"{prefix}{report.text}", file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code:
        # Skips destructors that could wait for peers which are gone.
        os._exit(code)
    sys.exit(0)

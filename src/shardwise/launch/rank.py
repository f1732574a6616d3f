"""The life of one rank: tied to its launcher, connected to its peers, reporting how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

from shardwise.errors import PeerLostError
from shardwise.launch.errors import Stopped, UserError
from shardwise.launch.report import Ending, Report, Stage
from shardwise.launch.signals import StopSignals
from shardwise.launch.world import PARENT_PID, REPORT_FD, STORE_FD, World, launched_here

# A disk that takes no more: nothing that a traceback would help with.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# How the backends of torch.distributed word that a peer went away. They raise RuntimeError (gloo)
# or DistBackendError, DistNetworkError, ... (NCCL, stores).
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|gloo|broken pipe|remote process exited"
    r"|socket (closed|error)|failed to (recv|send)|NCCL.*(abort|remote)",
    re.IGNORECASE,
)


def run_rank(world: World, body: Callable[[World, StopSignals], None]) -> NoReturn:
    """Run ``body`` as one rank and end the process with its exit code.

    Exit codes: 0 when ``body`` returns, 2 for a :class:`UserError` (unless it says another), 128 +
    signal for :class:`Stopped`, 1 for every other error.
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
    limit = None if timeout is None else timedelta(seconds=timeout)
    import torch.distributed as dist

    fd = os.environ.get(STORE_FD)
    if launched_here():
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world.size,
            is_master=world.rank == 0,
            master_listen_fd=None if fd is None else int(fd),
        )
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=limit
        )
    else:
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=limit)
    yield
    # Only after success: with a peer gone, tearing down may wait for it. The barrier keeps rank
    # 0's store alive until no rank needs it.
    dist.barrier()
    dist.destroy_process_group()


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
    if isinstance(error, UserError):
        if error.passing:
            return Report(world.rank, Ending.FAILED, code, str(error))
        return Report(world.rank, Ending.USER, code, f"error: {error}")
    if isinstance(error, BrokenPipeError):
        return Report(world.rank, Ending.USER, code, "error: standard output was closed")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return Report(world.rank, Ending.USER, code, f"error: {error}")
    kind = Ending.PEER if _means_peer_gone(error) else Ending.FAILED
    text = "".join(traceback.format_exception(error)).rstrip()
    return Report(world.rank, kind, code, text)


def _exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, Stopped | UserError) else 1


def _means_peer_gone(error: BaseException) -> bool:
    if isinstance(error, PeerLostError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and _PEER_GONE.search(str(error)) is not None


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

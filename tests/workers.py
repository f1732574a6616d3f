"""Fork the workers that run tests, and the servers of their ranks, from one process.

Importing all tests, and what they test, takes ten seconds of a processor. Without this module each
worker of pytest-xdist would do it, and so would the fork server of each worker's ranks: see
:mod:`tests.harness`. Here one process, the nursery, collects the tests, computes nothing, and forks
whenever xdist starts a worker. In between stands :mod:`tests.join`, which xdist starts in place of
Python: it hands its pipes over to the fork, and waits until that ends.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def ranks_env() -> dict[str, str]:
    """Return the variables of a process from which ranks are forked, beside those of this one."""
    return {
        # Libraries read these as they are imported.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # as launchers set it for ranks
        # A process that has asked CUDA itself for its devices cannot be forked: ask the driver.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # It does not get this process's sys.path.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
    }


def can_fork() -> bool:
    """Whether this Python's fork server can be one that was forked, as of Python 3.11 to 3.13."""
    return sys.platform == "linux" and sys.version_info < (3, 14)


def fork_from_nursery(specs: Sequence[Any], tests: Sequence[str]) -> Callable[[], None]:
    """Start the nursery, and let xdist's ``specs`` of workers join it.

    Args:
        specs: execnet's, changed in place.
        tests: what is to be collected: paths, as on pytest's command line.

    Returns:
        What ends the nursery.
    """
    folder = tempfile.TemporaryDirectory(prefix="nursery-")
    address = str(Path(folder.name) / "socket")
    join = Path(__file__).with_name("join.py")
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-S", str(join), address])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.workers", str(listener.fileno()), *tests],
            cwd=_ROOT,
            env=os.environ | ranks_env(),
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def end() -> None:
        nursery.communicate()  # which closes its stdin
        folder.cleanup()

    return end


def _collect(paths: Sequence[str]) -> None:
    """Import all tests as pytest does. What fails is reported by the workers, which try again."""
    import pytest

    pytest.main(
        [*paths, "--collect-only", "-p", "no:terminal", "-p", "no:xdist", "-s", "-o", "addopts="]
    )
    from tests import preload  # noqa: F401

    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # to look for garbage as usual takes 4% of all tests
    _collapse_pages()


def _collapse_pages() -> None:
    """Move what is in memory to huge pages, where Linux can (6.1 and newer).

    To fork and to end a process with 330 MiB in small pages takes 22 ms of a processor; in huge
    pages, 9 ms. A run of all tests forks some thousand ranks.
    """
    huge, collapse = 2 << 20, 25  # MADV_COLLAPSE
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        first, end = (int(address, 16) for address in addresses.split("-"))
        start = -(-first // huge) * huge
        nbytes = end // huge * huge - start
        if access == "rw-p" and inode == "0" and nbytes > 0:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), collapse)


def _forks(listener: socket.socket) -> Iterator[socket.socket]:
    """Fork for each one that joins; yield its connection in the fork. Return when stdin closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks here
    while True:
        if sys.stdin.fileno() in connection.wait([sys.stdin.fileno(), listener]):
            return
        joined, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            yield joined
            return
        joined.close()


def _serve_ranks(joined: socket.socket) -> None:
    """Fork the server from which ranks are forked, and make it that of this process."""
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    alive, lives = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if not pid:
            os.close(lives)
            joined.close()
            with suppress(SystemExit):
                forkserver.main(listener.fileno(), alive, [])
            os._exit(0)
    os.close(alive)
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, lives
    server._forkserver_pid = pid


def _become_worker(joined: socket.socket) -> None:
    """Be the process that xdist believes to have started."""
    _serve_ranks(joined)
    message, descriptors, _, _ = socket.recv_fds(joined, 1 << 20, 3)
    for descriptor, standard in zip(descriptors, range(3), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    folder, *variables = os.fsdecode(message).split("\0")
    os.environ.clear()
    os.environ.update(
        {name: value for name, _, value in (each.partition("=") for each in variables)}
    )
    os.chdir(folder)
    sys.argv[:] = ["-c"]
    main: Any = types.ModuleType("__main__")  # which processes that are spawned import nothing of
    sys.modules["__main__"] = main
    exec(eval(sys.stdin.readline()), vars(main))


if __name__ == "__main__":
    _collect(sys.argv[2:])
    for _joined in _forks(socket.socket(fileno=int(sys.argv[1]))):
        with _joined:
            _become_worker(_joined)

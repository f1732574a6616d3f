"""The handshake in which ranks find out that they share a host, and come to share memory.

Host names prove nothing. What proves it is that a file descriptor can be passed: every two ranks
connect by a Unix socket in the abstract namespace, which leaves nothing in the file system and
ends at the border of a network namespace, and the first rank passes a file without a name to all
others. A rank accepts only processes of the same user that know a token from the store of the
process group.

The sockets stay open: one that closes tells at once that its rank is gone. So does a descriptor of
the process itself, which matters if a child of it (a data loader's worker, say) holds the socket.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwise.base import libc
from shardwise.base.units import binary_size
from shardwise.transport.peers import Peers
from shardwise.transport.shm.arena import Arena

_DOING = "the handshake of shared memory"
_KEY = "shardwise/handshake/"  # in the store of the group
#: Seconds within which a rank that has come answers.
_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.05
_HELLO = struct.Struct("<I32s")
_CREDENTIALS = struct.Struct("3i")
#: Bytes of addresses that are enough for the windows of a process. Few of them have memory.
_ADDRESSES = 2**40


class SharedMemoryUnavailableError(Exception):
    """The ranks of a group cannot share memory; the message says why."""


@dataclass
class Connections:
    """The connections to the other ranks of a group, and the memory that all of them share.

    Attributes:
        sockets: by rank in the group; there is none to this rank itself.
        fd: the descriptor of the file that is the shared memory.
        processes: by rank, descriptors that tell when a process has ended, as far as there are any.
    """

    sockets: dict[int, socket.socket]
    fd: int
    processes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, each in self.sockets.items():
            process, _ = _credentials(each)
            with contextlib.suppress(OSError):  # it may belong to another namespace
                self.processes[rank] = os.pidfd_open(process)

    def gone(self) -> list[int]:
        """Find the ranks whose sockets are closed or whose processes have ended."""
        poll = select.poll()
        ranks = {}
        for rank, each in self.sockets.items():
            ranks[each.fileno()] = rank
            poll.register(each, select.POLLRDHUP)
        for rank, process in self.processes.items():
            ranks[process] = rank
            poll.register(process, select.POLLIN)
        return sorted({ranks[fd] for fd, _ in poll.poll(0)})

    def close(self) -> None:
        """Leave: all others see that this rank is gone."""
        _close(self.sockets)
        for fd in (self.fd, *self.processes.values()):
            os.close(fd)


def shake_hands(peers: Peers) -> Connections:
    """Connect to the other ranks of a group and share memory; each of them calls this too, once.

    Raises:
        SharedMemoryUnavailableError: they cannot share memory. Then no rank can.
        PeerLostError: one of them is gone, or did not come within the timeout of the group.
    """
    with peers.collective(_DOING):  # the store may go with the rank that keeps it
        return _shake_hands(peers)


def address_limit() -> int | None:
    """Return the limit of this process's address space in bytes, if it is too low to share memory.

    Windows on shared memory reserve addresses ahead, which ``ulimit -v`` counts like memory.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY or limit >= _ADDRESSES else limit


def _shake_hands(peers: Peers) -> Connections:
    rank, size = peers.rank, peers.size
    sockets: dict[int, socket.socket] = {}
    fd = -1
    trouble = ""
    try:
        if not libc.has_futex():
            _post(peers, "address", "")
            raise OSError("shared memory is for Linux on x86-64")
        if (limit := address_limit()) is not None:
            raise OSError(
                f"ulimit -v limits its address space to {binary_size(limit)}, and shared memory "
                f"reserves addresses (not memory) of up to {binary_size(_ADDRESSES)}"
            )
        with _listen() as (listener, name):
            token = secrets.token_hex(16)
            _post(peers, "address", f"{name} {token}")
            for peer in range(rank):
                sockets[peer] = _connect(rank, _read(peers, "address", peer))
            _accept(listener, token, sockets, peers)
        fd = _share(sockets, peers)
    except (OSError, ValueError) as error:
        trouble = f"rank {peers.members[rank]}: {error}"
        _close(sockets)  # a rank that waits at the other end has to notice
    except BaseException:
        _close(sockets)
        raise
    try:
        _post(peers, "verdict", trouble)
        verdicts = [_read(peers, "verdict", each) for each in range(size)]
        if any(verdicts):
            raise SharedMemoryUnavailableError("; ".join(filter(None, verdicts)))
    except BaseException:
        _close(sockets)
        if fd >= 0:
            os.close(fd)
        raise
    return Connections(sockets, fd)


def _close(sockets: dict[int, socket.socket]) -> None:
    for each in sockets.values():
        each.close()


def _post(peers: Peers, what: str, text: str) -> None:
    """Announce something to the others, in the store of the group."""
    peers.store.set(f"{_KEY}{what} {peers.rank}", text or "-")


def _read(peers: Peers, what: str, rank: int) -> str:
    """Return what another rank posts, once it has.

    Raises:
        PeerLostError: it never will.
    """
    text = peers.read({rank: f"{_KEY}{what} {rank}"}, _DOING)[rank]
    return "" if text == "-" else text


@contextlib.contextmanager
def _listen() -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"shardwise-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(64)
        yield listener, name


def _connect(rank: int, address: str) -> socket.socket:
    if not address:
        raise OSError("another rank cannot be reached by a Unix socket")
    name, token = address.split()
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(_ANSWER_SECONDS)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                peer.connect(f"\0{name}")
                break
            except BlockingIOError:  # its queue is full, of many ranks or of strangers
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
        _check_user(peer)
        peer.sendall(_HELLO.pack(rank, token.encode()))
    except OSError:
        peer.close()
        raise
    return peer


def _accept(
    listener: socket.socket, token: str, sockets: dict[int, socket.socket], peers: Peers
) -> None:
    """Accept the connections of the ranks that follow this one into ``sockets``."""

    def missing() -> list[int]:
        return [rank for rank in range(peers.rank + 1, peers.size) if rank not in sockets]

    def accept(seconds: float) -> bool:
        if not missing():
            return True
        listener.settimeout(min(seconds, _POLL_SECONDS))
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            # One that has posted a verdict will not connect any more.
            if any(peers.store.check([f"{_KEY}verdict {rank}"]) for rank in missing()):
                raise OSError("another rank cannot be reached by a Unix socket") from None
            return False
        try:
            peer.settimeout(_ANSWER_SECONDS)
            _check_user(peer)
            rank, found = _HELLO.unpack(peer.recv(_HELLO.size, socket.MSG_WAITALL))
            if rank not in missing() or not secrets.compare_digest(found, token.encode()):
                raise OSError("an unexpected process")
        except (OSError, struct.error):
            peer.close()  # not one of this group: wait for those
        else:
            sockets[rank] = peer
        return not missing()

    peers.watch(_DOING).wait(accept, missing)


def _credentials(peer: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the kernel knows them."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(found)
    return process, user


def _check_user(peer: socket.socket) -> None:
    _, user = _credentials(peer)
    if user != os.geteuid():
        raise OSError(f"the process at the other end belongs to user {user}, not {os.geteuid()}")


def _share(sockets: dict[int, socket.socket], peers: Peers) -> int:
    """Pass the file from the first rank to all others; return this rank's descriptor."""
    if peers.rank == 0:
        fd = Arena.create()
        for peer in sockets.values():
            socket.send_fds(peer, [b"f"], [fd])
    else:
        readable = select.poll()  # select() accepts no descriptor above 1023
        readable.register(sockets[0], select.POLLIN)
        peers.watch(_DOING).wait(
            lambda seconds: bool(readable.poll(1000 * seconds)),
            lambda: [0],  # which waits for the others
        )
        message, fds, _, _ = socket.recv_fds(sockets[0], 1, 1)
        if message != b"f" or len(fds) != 1:
            raise OSError("the first rank passed no shared memory")
        fd = fds[0]
        os.set_inheritable(fd, False)
    return fd

"""How ranks find out that they share a host, and come to share memory.

Host names prove nothing. What proves it is that a descriptor can be passed: every two ranks connect
by a Unix socket in the abstract namespace, which leaves nothing in the file system and ends at the
border of a network namespace, and the first rank passes a file without a name to all others. Who
connects has to be of the same user, and to know a token from the store of the process group.

The sockets stay open: one that closes tells at once that its rank has gone. So does the process
itself, which matters where a child of it (a data loader's worker, say) still holds the socket.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from shardwise._torch import c10d
from shardwise.transport import peers
from shardwise.transport.peers import PeerWatch, naming_lost_peer, pauses
from shardwise.transport.shm import futex
from shardwise.transport.shm.arena import Arena
from shardwise.units import brief_size

_DOING = "the meeting in shared memory"
_SECONDS = 60.0  # for what a rank that has come answers at once
_POLL_SECONDS = 0.05
_HELLO = struct.Struct("<I32s")
_CREDENTIALS = struct.Struct("3i")


# So many bytes of addresses are enough for the windows of a process. Few of them have memory.
_ADDRESSES = 2**40


class NotTogetherError(Exception):
    """The ranks of a group cannot share memory; the message says why."""


@dataclass
class Meeting:
    """The ranks of one group, met.

    Attributes:
        sockets: by rank in the group; there is none to this rank itself.
        fd: of the file that all of them have.
        processes: descriptors that tell when a rank's process has ended, where there are any.
    """

    sockets: dict[int, socket.socket]
    fd: int
    processes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, each in self.sockets.items():
            process, _ = _credentials(each)
            with contextlib.suppress(OSError):  # it may be of another namespace
                self.processes[rank] = os.pidfd_open(process)

    def gone(self) -> list[int]:
        """The ranks whose sockets are closed."""
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
        """Leave; all others see that this rank is gone."""
        for each in self.sockets.values():
            each.close()
        for fd in (self.fd, *self.processes.values()):
            os.close(fd)


def meet(group: dist.ProcessGroup) -> Meeting:
    """Meet the other ranks of ``group``; each of them calls this too, once.

    Raises:
        NotTogetherError: they cannot share memory. Then no rank can.
        PeerLostError: one of them is gone, or did not come within the timeout of the group.
    """
    with naming_lost_peer(group, _DOING):  # the store may go with the rank that keeps it
        return _meet(group)


def _meet(group: dist.ProcessGroup) -> Meeting:
    rank, size = group.rank(), group.size()
    store = _Board(group)
    sockets: dict[int, socket.socket] = {}
    fd = -1
    trouble = ""
    try:
        if not futex.is_available():
            store.post(f"address {rank}", "")
            raise OSError("shared memory is for Linux on x86-64")
        if (limit := address_limit()) is not None:
            raise OSError(
                f"ulimit -v limits its address space to {brief_size(limit)}, and shared memory "
                f"reserves addresses (not memory) of up to {brief_size(_ADDRESSES)}"
            )
        with _listen() as (listener, name):
            token = secrets.token_hex(16)
            store.post(f"address {rank}", f"{name} {token}")
            for peer in range(rank):
                sockets[peer] = _connect(rank, store.read("address", peer))
            _accept(listener, token, range(rank + 1, size), sockets, store)
        fd = _share(rank, sockets, store)
    except (OSError, ValueError) as error:
        trouble = f"rank {dist.get_process_group_ranks(group)[rank]}: {error}"
        _close(sockets)  # who waits at the other end shall not
    except BaseException:
        _close(sockets)
        raise
    try:
        store.post(f"verdict {rank}", trouble)
        verdicts = [store.read("verdict", each) for each in range(size)]
    except BaseException:
        _close(sockets)
        if fd >= 0:
            os.close(fd)
        raise
    if any(verdicts):
        _close(sockets)
        if fd >= 0:
            os.close(fd)
        raise NotTogetherError("; ".join(filter(None, verdicts)))
    return Meeting(sockets, fd)


def address_limit() -> int | None:
    """How many bytes of addresses this process may have, where those are too few to share memory.

    Windows on shared memory reserve addresses ahead, which ``ulimit -v`` counts as if they were
    memory.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY or limit >= _ADDRESSES else limit


def _close(sockets: dict[int, socket.socket]) -> None:
    for each in sockets.values():
        each.close()


class _Board:
    """The store of the group, under names of the meeting's own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store = c10d.store_of(group)
        self._group = group
        self._prefix = "shardwise/meeting/"

    def post(self, name: str, text: str) -> None:
        self._store.set(self._prefix + name, text or "-")

    def read(self, what: str, peer: int) -> str:
        """What another rank posts, once it has.

        Raises:
            PeerLostError: it never will.
        """
        key = self._prefix + f"{what} {peer}"
        watch = self.watch()
        for _ in pauses():
            if self._store.check([key]):
                break
            watch.look([peer])
        text: str = self._store.get(key).decode()
        return "" if text == "-" else text

    def watch(self) -> PeerWatch:
        """Looks after the ranks that are waited for."""
        return PeerWatch(self._group, _DOING, peers.PATIENCE_SECONDS)

    def refused(self, ranks: list[int]) -> bool:
        """Whether one of ``ranks`` has posted a verdict: it comes no more."""
        return any(self._store.check([self._prefix + f"verdict {rank}"]) for rank in ranks)


@contextlib.contextmanager
def _listen() -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"shardwise-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(64)
        listener.settimeout(_POLL_SECONDS)
        yield listener, name


def _connect(rank: int, address: str) -> socket.socket:
    if not address:
        raise OSError("another rank cannot be reached by a Unix socket")
    name, token = address.split()
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(_SECONDS)
        peer.connect(f"\0{name}")
        _check_user(peer)
        peer.sendall(_HELLO.pack(rank, token.encode()))
    except OSError:
        peer.close()
        raise
    return peer


def _accept(
    listener: socket.socket,
    token: str,
    expected: range,
    sockets: dict[int, socket.socket],
    store: _Board,
) -> None:
    watch = store.watch()
    while missing := [rank for rank in expected if rank not in sockets]:
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            if store.refused(missing):
                raise OSError("another rank cannot be reached by a Unix socket") from None
            watch.look(missing)
            continue
        try:
            peer.settimeout(_SECONDS)
            _check_user(peer)
            rank, said = _HELLO.unpack(peer.recv(_HELLO.size, socket.MSG_WAITALL))
            if rank not in missing or not secrets.compare_digest(said, token.encode()):
                raise OSError("a stranger")
        except (OSError, struct.error):
            peer.close()  # not one of us: wait on
            continue
        sockets[rank] = peer


def _credentials(peer: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as the kernel knows them."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(found)
    return process, user


def _check_user(peer: socket.socket) -> None:
    _, user = _credentials(peer)
    if user != os.geteuid():
        raise OSError(f"the process at the other end belongs to user {user}, not {os.geteuid()}")


def _share(rank: int, sockets: dict[int, socket.socket], store: _Board) -> int:
    """Pass the file from the first rank to all others; return this rank's descriptor."""
    if rank == 0:
        fd = Arena.create()
        for peer in sockets.values():
            socket.send_fds(peer, [b"f"], [fd])
    else:
        watch = store.watch()
        readable = select.poll()  # select() knows no descriptor above 1023
        readable.register(sockets[0], select.POLLIN)
        while not readable.poll(1000 * _POLL_SECONDS):
            watch.look([0])  # which waits for the others
        message, fds, _, _ = socket.recv_fds(sockets[0], 1, 1)
        if message != b"f" or len(fds) != 1:
            raise OSError("the first rank passed no shared memory")
        fd = fds[0]
        os.set_inheritable(fd, False)
    return fd

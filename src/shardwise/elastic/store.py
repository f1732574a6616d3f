"""Keys and values that the hosts of a job share, served to the holders of a token only.

Both ends prove with HMAC-SHA256 over fresh nonces that they hold the token, and sign every message
that follows. The server parses nothing that others send. Messages are signed, not encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from shardwise.elastic.clock import Clock, process_clock
from shardwise.elastic.network import format_endpoint

CLOSED = "closed/"  # the server sets this key plus a client's name when it loses the client
SERVER = "server/"  # only the server's own process sets the keys that begin with it
MAX_MESSAGE = 2**20  # bytes

_MAGIC = b"shardwise-store1"  # names the protocol and its version
_NONCE = 32  # bytes
_MAC = 32  # bytes of HMAC-SHA256
_REFUSED = bytes(_MAC)  # in place of the server's proof
_HANDSHAKE = 5.0  # seconds for a client to prove that it holds the token
_MAX_STRANGERS = 256  # connections that have not; the oldest gives way to the next
_TICK = 0.01  # seconds
# So that a flood takes little time from the ranks of this host, and so that a client has at least
# _TICK * _MAX_STRANGERS / _ACCEPTS_PER_TICK = 0.25 s until others push it out.
_ACCEPTS_PER_TICK = 10
_POLLS = 0.01, 0.2  # seconds between two looks for a key: at first, and later
_UNASKED = bytes(8)  # number of a message that answers no request


class StoreTimeoutError(DistStoreError, TimeoutError):
    """A key was not set in time. The server answers."""


class StoreSilentError(DistNetworkError, TimeoutError):
    """The server does not answer: its host hangs or cannot be reached."""


class StoreClosedError(DistNetworkError, ConnectionError):
    """The connection to the server has ended."""


class StoreDroppedError(StoreClosedError):
    """The server dropped this client on purpose."""


class StoreRefusedError(StoreClosedError):
    """The other end is no store, or it has another token."""


class _ProtocolError(ConnectionError):
    """What arrived is not a message of this protocol, or is not signed with the token."""


class _Session:
    """Messages between two holders of a token. Each is valid once, and in its place.

    Args:
        token: the shared secret.
        nonces: of the client and of the server, fresh for this connection.
        own: this end, ``b"client"`` or ``b"server"``.
        other: the other end.
    """

    def __init__(self, token: bytes, nonces: bytes, own: bytes, other: bytes) -> None:
        self.proof, self._others_proof, self._sending, self._receiving = (
            hmac.digest(token, purpose + end + nonces, "sha256")
            for purpose in (b"proof of ", b"messages of ")
            for end in (own, other)
        )
        self._sent = self._received = 0

    def is_proof(self, proof: bytes) -> bool:
        """Whether the other end holds the token."""
        return hmac.compare_digest(proof, self._others_proof)

    def seal(self, *fields: bytes) -> bytes:
        """Return the message of these fields, as it is sent.

        Raises:
            ValueError: it is too long.
        """
        payload = b"".join(len(field).to_bytes(4) + field for field in fields)
        if len(payload) > MAX_MESSAGE:
            raise ValueError(f"found {len(payload)} bytes, expected at most {MAX_MESSAGE}")
        mac = hmac.digest(self._sending, self._sent.to_bytes(8) + payload, "sha256")
        self._sent += 1
        return len(payload).to_bytes(4) + mac + payload

    @staticmethod
    def rest(head: bytes) -> int:
        """Return how many bytes of a message follow the first 4."""
        length = int.from_bytes(head)
        if length > MAX_MESSAGE:
            raise _ProtocolError("what arrived is not a message of this protocol")
        return _MAC + length

    def open(self, rest: bytes) -> list[bytes]:
        """Return the fields of the next message, given all but its first 4 bytes."""
        payload = rest[_MAC:]
        mac = hmac.digest(self._receiving, self._received.to_bytes(8) + payload, "sha256")
        if not hmac.compare_digest(rest[:_MAC], mac):
            raise _ProtocolError("what arrived is not signed with the token")
        self._received += 1
        fields, at = [], 0
        while at < len(payload):
            start, at = at + 4, at + 4 + int.from_bytes(payload[at : at + 4])
            fields.append(payload[start:at])
        return fields


def _carry_out(values: dict[bytes, bytes], request: bytes, arguments: list[bytes]) -> list[bytes]:
    """Carry out a request of a client, and return the answer.

    Raises:
        ValueError: it makes no sense, or it changes a key of the server.
    """
    changed = arguments[0] if request in (b"set", b"add", b"delete_key") and arguments else b""
    if changed.startswith(SERVER.encode()):
        raise ValueError(f"found the key {changed!r}, expected none that begins with {SERVER}")
    match request, arguments:
        case b"set", [key, value]:
            values[key] = value
            return [b"done"]
        case b"get", [key]:
            return [b"done", values[key]] if key in values else [b"missing"]
        case b"check", keys:
            return [b"done" if all(key in values for key in keys) else b"missing"]
        case b"add", [key, amount]:
            values[key] = b"%d" % (int(values.get(key, b"0")) + int(amount))
            return [b"done", values[key]]
        case b"delete_key", [key]:
            return [b"missing" if values.pop(key, None) is None else b"done"]
    raise ValueError(f"found request {request!r} with {len(arguments)} arguments")


@dataclass
class _Client:
    """A connection whose other end has proven that it holds the token."""

    name: bytes
    address: str
    connection: socket.socket
    session: _Session
    task: asyncio.Task[None]
    heard: float  # when it sent its last message

    def end(self, how: bytes, reason: str) -> None:
        """Say why the connection ends, and end it."""
        with contextlib.suppress(OSError):
            self.connection.send(self.session.seal(_UNASKED, how, reason.encode()))
        self.task.cancel()


class StoreServer:
    """Keys and values in this process, served by a thread of its own.

    When the connection to a client ends without a goodbye, the server sets the key ``closed/NAME``
    to the reason.

    Args:
        listener: the listening socket, which this closes.
        token: what clients must hold. An empty one keeps out other programs, not enemies.
        clock: by which clients are silent; by default that of this process.
    """

    def __init__(self, listener: socket.socket, token: bytes, clock: Clock | None = None) -> None:
        with contextlib.ExitStack() as undo:  # Ctrl-C leaves no thread, nor an open socket
            self._listener = undo.enter_context(listener)
            self._listener.setblocking(False)
            self._token = token
            self._clock = clock or process_clock()
            # Other threads change single values, and look at copies: the interpreter does each at
            # once.
            self._values: dict[bytes, bytes] = {}
            self._clients: dict[bytes, _Client] = {}
            self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest first
            self._closed = asyncio.Event()
            self._loop = undo.enter_context(contextlib.closing(asyncio.new_event_loop()))
            self._thread = threading.Thread(target=self._run, name="shardwise store", daemon=True)
            undo.callback(self.close)
            self._thread.start()
            undo.pop_all()

    def close(self) -> None:
        """End all connections and the thread. Clients raise :class:`StoreClosedError`."""
        self._call(self._closed.set)
        if self._thread.ident is not None:
            self._thread.join()
        self._loop.close()
        self._listener.close()

    def put(self, key: str, value: bytes) -> None:
        """Set a key. Clients cannot change those that begin with ``server/``."""
        self._values[key.encode()] = value

    def clients(self) -> dict[str, str]:
        """Return the address that each client comes from, by name, in the order they came."""
        clients = list(self._clients.values())
        return {client.name.decode(errors="replace"): client.address for client in clients}

    def silence(self) -> dict[str, float]:
        """Return how long each client that is connected has sent nothing, in seconds.

        The time for which this process was suspended does not count.
        """
        now, clients = self._clock.now(), list(self._clients.values())
        return {client.name.decode(errors="replace"): now - client.heard for client in clients}

    def values(self, prefix: str) -> dict[str, bytes]:
        """Return all values whose keys begin with a prefix, by the rest of the key.

        The reason for which a client was lost is among them once :meth:`clients` lacks that client.
        """
        start, values = prefix.encode(), dict(self._values)
        found = {key: value for key, value in values.items() if key.startswith(start)}
        return {key[len(start) :].decode(errors="replace"): found[key] for key in found}

    def forget(self, prefix: str) -> None:
        """Delete all keys that begin with a prefix."""
        for key in list(self._values):
            if key.startswith(prefix.encode()):
                self._values.pop(key, None)

    def drop(self, name: str, reason: str) -> None:
        """End the connection to a client on purpose. It raises :class:`StoreDroppedError`."""
        self._call(lambda: self._drop(name.encode(), reason))

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(function)

    def _drop(self, name: bytes, reason: str) -> None:
        client = self._clients.get(name)
        if client is not None:
            self._lose(client, reason)
            client.end(b"dropped", reason)

    def _lose(self, client: _Client, reason: str) -> None:
        self._values[CLOSED.encode() + client.name] = reason.encode()
        del self._clients[client.name]  # whoever does not find it finds the reason

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._listen()
        await self._closed.wait()
        self._loop.remove_reader(self._listener)
        for client in self._clients.values():
            client.end(b"closed", "the store was closed")

    def _listen(self) -> None:
        self._accepts = _ACCEPTS_PER_TICK
        if not self._closed.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept a connection; a task of asyncio's would leak one that comes as it is canceled."""
        self._accepts -= 1
        try:
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            while len(self._strangers) >= _MAX_STRANGERS:
                self._evict()
            task = asyncio.create_task(self._attend(connection))
            task.add_done_callback(lambda _: connection.close())  # even if it never begins
            self._strangers[task] = None
        except OSError:  # no descriptor is left, or the other end is gone already
            self._evict()
            self._accepts = 0
        if self._accepts == 0:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_TICK, self._listen)

    def _evict(self) -> None:
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            del self._strangers[oldest]
            oldest.cancel()

    async def _attend(self, connection: socket.socket) -> None:
        """Attend to a connection from its first byte to its last."""
        task = asyncio.current_task()
        assert task is not None
        try:
            with contextlib.suppress(OSError, ValueError):
                async with asyncio.timeout(_HANDSHAKE):
                    session = await self._shake_hands(connection)
                    (name,) = await self._message(connection, session)
                self._strangers.pop(task, None)
                address = str(connection.getpeername()[0])
                now = self._clock.now()
                await self._serve_client(_Client(name, address, connection, session, task, now))
        finally:
            self._strangers.pop(task, None)

    async def _shake_hands(self, connection: socket.socket) -> _Session:
        """Let the other end prove that it holds the token, and prove the same to it.

        Raises:
            OSError: it does not, or it is gone.
        """
        hello = await self._receive(connection, len(_MAGIC) + _NONCE)
        if not hello.startswith(_MAGIC):
            raise _ProtocolError
        nonce = secrets.token_bytes(_NONCE)
        await self._loop.sock_sendall(connection, _MAGIC + nonce)
        session = _Session(self._token, hello[len(_MAGIC) :] + nonce, b"server", b"client")
        is_proven = session.is_proof(await self._receive(connection, _MAC))
        await self._loop.sock_sendall(connection, session.proof if is_proven else _REFUSED)
        if not is_proven:
            raise _ProtocolError
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Notice within half a minute that a host is gone without a word.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
        return session

    async def _serve_client(self, client: _Client) -> None:
        earlier = self._clients.get(client.name)
        self._clients[client.name] = client  # at once: other threads always find one
        if earlier is not None:
            earlier.end(b"dropped", "another connection has its name")
        reason: str | None = "the connection was closed"
        try:
            await self._answer(client)
            reason = None
        except ConnectionResetError:
            pass
        except Exception as error:  # what goes wrong with one client ends that client alone
            reason = getattr(error, "strerror", None) or str(error)
        finally:
            if self._clients.get(client.name) is client:
                if reason is not None:
                    self._lose(client, reason)
                else:
                    del self._clients[client.name]

    async def _answer(self, client: _Client) -> None:
        """Answer the requests of a client until its goodbye."""
        while True:
            number, request, *arguments = await self._message(client.connection, client.session)
            client.heard = self._clock.now()
            if request == b"goodbye":
                return
            try:
                answer = _carry_out(self._values, request, arguments)
            except ValueError as error:
                answer = [b"error", str(error).encode()[:1000]]
            await self._loop.sock_sendall(client.connection, client.session.seal(number, *answer))

    async def _message(self, connection: socket.socket, session: _Session) -> list[bytes]:
        rest = session.rest(await self._receive(connection, 4))
        return session.open(await self._receive(connection, rest))

    async def _receive(self, connection: socket.socket, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            arrived = await self._loop.sock_recv(connection, count - len(received))
            if not arrived:
                raise ConnectionResetError
            received += arrived
        return bytes(received)


class GuardedStore(Store):
    """A client of a :class:`StoreServer`, with the methods of torch's ``TCPStore``.

    Its queues, ``append``, ``compare_set`` and ``num_keys`` are left out; ``multi_get`` and
    ``multi_set`` take one key after the other. Unlike there, a value is set when ``set`` returns.

    It makes one attempt to connect, and does not connect again: when the connection has ended, all
    methods raise. Several threads may use it at once; one that waits for a key does not hold up the
    others. After an error it is unknown whether the server has carried out the request.

    Args:
        address: of the server, a name or a number.
        port: of the server.
        token: the shared secret. The server must prove that it holds it, too.
        name: of this client. A later connection with the same name replaces this one.
        seconds: limit for connecting, and for the server's answer to each request; the time for
            which this process is suspended does not count. It is also the first value of
            ``timeout``, how long ``get`` and ``wait`` wait for keys.

    Attributes:
        peer: the address at which this client has reached the server.

    Raises:
        StoreRefusedError: another program is at the port, or the server has another token.
        StoreSilentError: nothing answers in time.
        OSError: there is no connection, or it has ended, as :mod:`socket` raises it.
    """

    timeout: timedelta  # an attribute of torch's class

    def __init__(self, address: str, port: int, token: bytes, name: str, seconds: float) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=seconds))
        self._at = f"store at {format_endpoint(address, port)}"
        self._seconds, self._clock = seconds, process_clock()
        self._numbers = itertools.count(1)
        self._turn = threading.Lock()
        self._received = bytearray()
        self._end: tuple[type[StoreClosedError], str] | None = None
        try:
            self._socket = socket.create_connection((address, port), timeout=seconds)
            try:
                self.peer = str(self._socket.getpeername()[0])
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._session = self._shake_hands(token, self._clock.waits(seconds))
                self._socket.sendall(self._session.seal(name.encode()))
            except BaseException:
                self._socket.close()
                raise
        except TimeoutError:
            raise self._silent() from None

    def _shake_hands(self, token: bytes, limit: Iterator[float]) -> _Session:
        """Prove that this end holds the token, and let the other end prove the same."""
        nonce = secrets.token_bytes(_NONCE)
        self._socket.sendall(_MAGIC + nonce)
        for count in range(1, len(_MAGIC) + 1):  # another program may say less than that
            if self._first(count, limit) != _MAGIC[:count]:
                raise StoreRefusedError(
                    f"{self._at}: found another program at this port, expected Shardwise; choose "
                    "another port, or end that program"
                )
        hello = self._first(len(_MAGIC) + _NONCE, limit)
        session = _Session(token, nonce + hello[len(_MAGIC) :], b"client", b"server")
        self._socket.sendall(session.proof)
        everything = self._first(len(hello) + _MAC, limit)
        if not session.is_proof(everything[len(hello) :]):
            raise StoreRefusedError(
                f"{self._at}: found another token, expected that of this host; give all hosts the "
                "same --rdzv-token-file or SHARDWISE_RDZV_TOKEN"
            )
        self._received.clear()
        return session

    def close(self) -> None:
        """Say goodbye, and close the connection."""
        with self._turn:
            if self._end is None:
                self._end = StoreClosedError, "it was closed here"
                with contextlib.suppress(OSError):
                    self._socket.sendall(self._session.seal(_UNASKED, b"goodbye"))
            self._socket.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask(b"set", key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until there is one."""
        (value,) = self._wait(b"get", [key], self.timeout)
        return value

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 if there is none yet, and return the sum."""
        return int(self._ask(b"add", key, b"%d" % value)[1])

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""
        return self._ask(b"check", *keys) == [b"done"]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._wait(b"check", keys, self.timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it had a value."""
        return self._ask(b"delete_key", key) == [b"done"]

    deleteKey = delete_key  # noqa: N815  # how torch's C++ code, such as PrefixStore, calls it

    def _wait(self, request: bytes, keys: list[str], timeout: timedelta) -> list[bytes]:
        """Ask for keys until they are there.

        Polling keeps the server free of requests that wait, and notices when it falls silent.
        """
        limit = timeout.total_seconds()
        deadline = self._clock.now() + limit
        pause, longest = _POLLS
        while (answer := self._ask(request, *keys)) == [b"missing"]:
            left = deadline - self._clock.now()
            if left <= 0:
                raise StoreTimeoutError(
                    f"{self._at}: found no value of {', '.join(keys)} within {limit:g} s, "
                    "expected one"
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)
        return answer[1:]

    def _ask(self, request: bytes, *arguments: str | bytes) -> list[bytes]:
        """Send a request, and return the answer to it."""
        fields = [part.encode() if isinstance(part, str) else part for part in arguments]
        self._take_turn()
        try:
            if self._end is None:
                answer = self._exchange(request, *fields)
        except TimeoutError:
            raise self._silent() from None
        except OSError as error:
            self._end = self._end or (StoreClosedError, error.strerror or str(error))
        finally:
            self._turn.release()
        if self._end is not None:
            kind, reason = self._end
            raise kind(f"{self._at}: {reason}")
        if answer[0] == b"error":
            raise ValueError(f"{self._at}: {answer[1].decode()}")
        return answer

    def _take_turn(self) -> None:
        try:
            for seconds in self._clock.waits(self._seconds):
                if self._turn.acquire(timeout=seconds):
                    return
        except TimeoutError:
            raise self._silent() from None

    def _exchange(self, *fields: bytes) -> list[bytes]:
        limit = self._clock.waits(self._seconds)
        number = next(self._numbers).to_bytes(len(_UNASKED))
        message = self._session.seal(number, *fields)
        self._socket.settimeout(self._seconds)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(message)  # if that fails, the server may have said why it left
        while True:
            rest = self._session.rest(self._first(4, limit))
            message = self._first(4 + rest, limit)
            del self._received[: len(message)]
            answered, *answer = self._session.open(message[4:])
            if answered == number:  # else the answer to an earlier request, which came too late
                return answer
            if answered == _UNASKED:
                kind = StoreDroppedError if answer[0] == b"dropped" else StoreClosedError
                self._end = kind, answer[1].decode()
                raise ConnectionError

    def _first(self, count: int, limit: Iterator[float]) -> bytes:
        """Return the first bytes that have arrived, and keep them, so that no error loses any."""
        while len(self._received) < count:
            self._socket.settimeout(next(limit))
            with contextlib.suppress(TimeoutError):
                arrived = self._socket.recv(2**16)
                if not arrived:
                    raise ConnectionError("the connection was closed")
                self._received += arrived
        return bytes(self._received[:count])

    def _silent(self) -> StoreSilentError:
        return StoreSilentError(
            f"{self._at}: found no answer within {self._seconds:g} s, expected one; its host hangs "
            "or cannot be reached"
        )


def serve_ranks(address: str, listener: socket.socket) -> TCPStore:
    """Serve torch's store for ranks, at a listening socket, which this closes.

    Given no socket, torch's would listen at all addresses of this host, for all that come.
    """
    port = listener.getsockname()[1]
    handle = listener.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=handle)


def connect(
    attempt: Callable[[], GuardedStore],
    *,
    patience: float,
    pause: float,
    look: Callable[[], object] = lambda: None,
) -> GuardedStore:
    """Connect to a store whose server may start later.

    Args:
        attempt: connects once.
        patience: seconds to try.
        pause: seconds between two attempts.
        look: called after each attempt that fails; what it raises ends the wait.

    Raises:
        StoreRefusedError: another program is there, or it has another token: that will not change.
        OSError: of the last attempt.
    """
    deadline = process_clock().now() + patience
    while True:
        try:
            return attempt()
        except StoreRefusedError:
            raise
        except OSError:
            if process_clock().now() > deadline:
                raise
        look()
        time.sleep(pause)

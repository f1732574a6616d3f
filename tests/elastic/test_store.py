"""The store that hosts share: what torch's store does, and nothing for those without the token."""

from __future__ import annotations

import contextlib
import functools
import gc
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier

from shardwise.elastic import store as module
from shardwise.elastic.network import listening
from shardwise.elastic.store import (
    CLOSED,
    MAX_MESSAGE,
    GuardedStore,
    StoreClosedError,
    StoreDroppedError,
    StoreRefusedError,
    StoreServer,
    StoreSilentError,
    StoreTimeoutError,
)
from tests.elastic.strangers import HELLO, HERE, knock, server_of
from tests.programs import Program, start_program
from tests.waiting import wait_until

TOKEN = b"a token that only this test knows"
WAIT = 30.0  # seconds that anything may take on a busy machine
SHORT = timedelta(milliseconds=50)

Stores = Callable[[int], list[dist.Store]]


class Served:
    """A server, and the clients that tests make."""

    def __init__(self, token: bytes = TOKEN) -> None:
        listener = listening(HERE)
        self.port: int = listener.getsockname()[1]
        self.server = StoreServer(listener, token)
        self._clients: list[GuardedStore] = []

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Let the server's thread do nothing."""
        hanging, going_on = threading.Event(), threading.Event()
        self.server._loop.call_soon_threadsafe(lambda: (hanging.set(), going_on.wait()))
        hanging.wait()
        try:
            yield
        finally:
            going_on.set()

    def client(
        self, name: str = "client", *, token: bytes = TOKEN, port: int = 0, seconds: float = WAIT
    ) -> GuardedStore:
        client = GuardedStore(HERE, port or self.port, token, name, seconds)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with contextlib.closing(Served()) as served:
        yield served


@pytest.fixture(params=["guarded", "tcp", "prefix"])
def stores(request: pytest.FixtureRequest, served: Served) -> Stores:
    """Make several clients of one store: torch's own, ours, and ours behind a prefix."""

    def make(count: int) -> list[dist.Store]:
        if request.param == "tcp":
            limit = timedelta(seconds=WAIT)
            first = dist.TCPStore(HERE, 0, is_master=True, timeout=limit, wait_for_workers=False)
            port = first.port
            others = [dist.TCPStore(HERE, port, timeout=limit) for _ in range(count - 1)]
            return [first, *others]
        clients: list[dist.Store] = [served.client(f"client {i}") for i in range(count)]
        if request.param == "prefix":
            return [dist.PrefixStore("prefix", client) for client in clients]
        return clients

    return make


def later(function: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.1, function)
    timer.start()
    return timer


def set_now(store: dist.Store, key: str, value: str | bytes) -> None:
    """Set a key, and wait until other clients see it: torch's store acknowledges no ``set``."""
    store.set(key, value)
    store.check([key])


def test_values_are_bytes_that_all_clients_see(stores: Stores) -> None:
    one, other = stores(2)
    value = bytes(range(256))
    set_now(one, "key", value)
    assert other.get("key") == value
    set_now(one, "key", "text, ü")
    assert other.get("key") == "text, ü".encode()
    set_now(one, "empty", "")
    assert other.get("empty") == b""


def test_numbers_are_added_to(stores: Stores) -> None:
    one, other = stores(2)
    assert one.add("number", 5) == 5
    assert other.add("number", -7) == -2
    assert one.get("number") == b"-2"
    set_now(one, "set", "40")
    assert other.add("set", 2) == 42


def test_keys_are_deleted(stores: Stores) -> None:
    (store,) = stores(1)
    store.multi_set(["a", "b"], ["1", b"\xff"])  # type: ignore[attr-defined]
    assert store.multi_get(["b", "a"]) == [b"\xff", b"1"]
    assert store.check(["a", "b"])
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a", "b"])
    assert store.check(["b"])


def test_a_key_is_waited_for(stores: Stores) -> None:
    one, other = stores(2)
    setting = later(lambda: (one.set("a", "1"), one.set("b", "2")))
    other.wait(["a", "b"])
    assert other.multi_get(["a", "b"]) == [b"1", b"2"]
    setting.join()
    setting = later(lambda: one.add("c", 3))
    assert other.get("c") == b"3"
    setting.join()


def test_a_key_that_is_not_set_is_waited_for_no_longer_than_asked(stores: Stores) -> None:
    (store,) = stores(1)
    store.set("there", "1")
    with pytest.raises(dist.DistStoreError):
        store.wait(["there", "missing"], SHORT)
    store.set_timeout(SHORT)
    for ask in (
        lambda: store.get("missing"),
        lambda: store.wait(["missing"]),
        lambda: store.multi_get(["there", "missing"]),
    ):
        with pytest.raises(dist.DistStoreError):
            ask()
    assert store.get("there") == b"1"


def test_torchs_barrier_waits_for_all_and_names_the_missing(stores: Stores) -> None:
    together = stores(3)
    threads = [
        threading.Thread(target=barrier, args=(store, 3, "all"), kwargs={"barrier_timeout": WAIT})
        for store in together[1:]
    ]
    for thread in threads:
        thread.start()
    barrier(together[0], 3, "all", barrier_timeout=WAIT)
    for thread in threads:
        thread.join()
    with pytest.raises(dist.DistStoreError, match=r"missing_ranks=.*host-b"):
        barrier(
            together[0],
            2,
            "one",
            0.05,
            rank=0,
            trace_timeout=0.05,
            rank_tracing_decoder=lambda rank: f"host-{'ab'[rank]}",
        )


def test_a_value_that_is_too_long_is_refused_and_many_long_ones_are_not(served: Served) -> None:
    store = served.client()
    with pytest.raises(ValueError, match=f"expected at most {MAX_MESSAGE}"):
        store.set("key", bytes(MAX_MESSAGE))
    values = [bytes([i]) * (MAX_MESSAGE // 3) for i in range(8)]
    for i, value in enumerate(values):
        store.set(f"{i}", value)
    assert store.multi_get([f"{i}" for i in range(8)]) == values


def test_a_request_that_makes_no_sense_ends_nothing(served: Served) -> None:
    store = served.client()
    store.set("text", "no number")
    with pytest.raises(ValueError, match="no number"):
        store.add("text", 1)
    assert store.get("text") == b"no number"


def test_an_answer_without_values_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may be anything where there is no token."""
    client = served.client()
    monkeypatch.setattr(module, "_carry_out", lambda *_: [b"done"])
    with pytest.raises(ValueError, match="not enough values"):
        client.multi_get(["key", "another"])


def test_clients_read_what_only_the_server_may_set(served: Served) -> None:
    client = served.client()
    served.server.put("server/addresses", b"[]")
    assert client.get("server/addresses") == b"[]"
    for change in (
        lambda: client.set("server/addresses", "mine"),
        lambda: client.add("server/number", 1),
        lambda: client.delete_key("server/addresses"),
    ):
        with pytest.raises(ValueError, match="expected none that begins with server/"):
            change()
    assert client.get("server/addresses") == b"[]"


def test_a_server_knows_its_clients_and_where_they_come_from(served: Served) -> None:
    for name in ("second", "first"):
        client = served.client(name)
        assert client.check([])
        assert client.peer == HERE
    assert list(served.server.clients().items()) == [("second", HERE), ("first", HERE)]
    client.close()
    wait_until(lambda: served.server.clients() == {"second": HERE})


def test_a_server_reads_and_deletes_keys_by_their_beginning(served: Served) -> None:
    client = served.client()
    client.multi_set(["report/0", "report/12", "reports"], [b"a", b"b", b"c"])
    assert served.server.values("report/") == {"0": b"a", "12": b"b"}
    served.server.forget("report/")
    assert served.server.values("report") == {"s": b"c"}
    with served.hanging():
        served.server.put("report/1", b"d")
        assert served.server.values("report") == {"s": b"c", "/1": b"d"}, "nobody waits"


def test_a_server_knows_how_long_a_client_has_been_silent(served: Served) -> None:
    quiet, other = served.client("quiet"), served.client("other")
    quiet.set("key", "value")
    before = served.server.silence()
    assert before.keys() == {"quiet", "other"}
    other.set("key", "value")
    after = served.server.silence()
    assert after["quiet"] > before["quiet"]
    assert after["other"] < after["quiet"]
    quiet.close()
    other.check([])
    wait_until(lambda: served.server.silence().keys() == {"other"})


def test_a_client_that_is_no_longer_there_has_its_reason_already(served: Served) -> None:
    """Else it would be taken for one that has said goodbye, or is silent."""
    left: list[bool] = []

    class Values(dict[bytes, bytes]):
        def __setitem__(self, key: bytes, value: bytes) -> None:
            if key.startswith(CLOSED.encode()):
                left.append(key.removeprefix(CLOSED.encode()).decode() in served.server.clients())
            super().__setitem__(key, value)

    served.server._values = Values()
    lost, dropped = served.client("lost"), served.client("dropped")
    for client in (lost, dropped):
        client.set("key", "value")
    lost._socket.close()
    served.server.drop("dropped", "it is of no use")
    served.client("other").wait([f"{CLOSED}lost", f"{CLOSED}dropped"])
    assert left == [True, True]


def test_threads_share_a_client_and_one_that_waits_does_not_hold_up_the_others(
    served: Served,
) -> None:
    store = served.client()
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(store.get("last")))
    waiting.start()

    def count() -> None:
        for _ in range(200):
            store.add("number", 1)

    counting = [threading.Thread(target=count) for _ in range(8)]
    for thread in counting:
        thread.start()
    for thread in counting:
        thread.join()
    assert store.get("number") == b"1600"
    assert not found
    store.set("last", "now")
    waiting.join()
    assert found == [b"now"]


def test_a_client_that_ends_without_a_goodbye_is_noted(served: Served) -> None:
    watching, polite, lost = (served.client(name) for name in ("watching", "polite", "lost"))
    polite.close()
    lost._socket.shutdown(socket.SHUT_RDWR)
    assert watching.get(CLOSED + "lost") == b"the connection was closed"
    assert not watching.check([CLOSED + "polite"])
    with pytest.raises(StoreClosedError, match="the connection was closed"):
        lost.get("key")


def test_a_dropped_client_is_told_why(served: Served) -> None:
    watching, dropped = served.client("watching"), served.client("dropped")
    dropped.set("other", "value")  # the server knows it by now
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            dropped.get("key")
        except StoreDroppedError as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    served.server.drop("dropped", "no sign of life")
    thread.join(WAIT)
    assert "no sign of life" in str(waiting[0])
    assert watching.get(CLOSED + "dropped") == b"no sign of life"
    with pytest.raises(StoreDroppedError, match="no sign of life"):
        dropped.set("key", "value")


def test_the_end_of_the_server_ends_what_waits(served: Served) -> None:
    store = served.client()
    closing = later(served.server.close)
    with pytest.raises(StoreClosedError, match="the store was closed"):
        store.get("key")
    closing.join()


def test_a_connection_that_comes_as_the_server_ends_is_closed(served: Served) -> None:
    with socket.socket() as late:
        with served.hanging():
            late.connect((HERE, served.port))
            served.server._call(served.server._closed.set)
        late.settimeout(WAIT)
        with contextlib.suppress(ConnectionResetError):
            assert late.recv(1) == b""
    served.server.close()
    gc.collect()  # a socket that nobody closed would warn


@pytest.mark.parametrize("token", [b"another token", b""])
def test_a_client_with_another_token_is_refused(served: Served, token: bytes) -> None:
    with pytest.raises(StoreRefusedError, match=f"{HERE}:{served.port}.*--rdzv-token-file"):
        served.client(token=token)
    assert served.client().check([]) and not served.server.values("")


def test_hosts_without_a_token_meet_too() -> None:
    with contextlib.closing(Served(b"")) as served:
        served.client(token=b"").set("key", "value")
        with pytest.raises(StoreRefusedError):
            served.client()


def test_another_program_at_the_port_is_named_as_such(served: Served) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with server_of(answer) as port, pytest.raises(StoreRefusedError, match="another program"):
        served.client(port=port)


def test_a_port_that_accepts_and_never_answers_is_silent(served: Served) -> None:
    with (
        socket.create_server((HERE, 0)) as other,
        pytest.raises(StoreSilentError, match=r"no answer within 0\.2 s"),
    ):
        served.client(port=other.getsockname()[1], seconds=0.2)


def test_a_missing_key_is_told_from_a_silent_server(served: Served) -> None:
    with pytest.raises(StoreTimeoutError, match=r"no value of a, b within 0\.05 s"):
        served.client().wait(["a", "b"], SHORT)


class Tap:
    """A port that passes a connection on to a server, and records what both ends send.

    Attributes:
        sent: by the client, in pieces as they came.
        answered: by the server.
        flip: for each direction (0 to the server, 1 to the client), whether to flip a bit of what
            comes next.
    """

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server((HERE, 0))
        self.port: int = self._listener.getsockname()[1]
        self._to = port
        self.sent: list[bytes] = []
        self.answered: list[bytes] = []
        self.flip = [False, False]
        self._thread = threading.Thread(target=self._pass_on)
        self._thread.start()

    def _pass_on(self) -> None:
        client = self._listener.accept()[0]
        self.server = server = socket.create_connection((HERE, self._to))
        ways = {client: (server, self.sent, 0), server: (client, self.answered, 1)}
        with client, server, contextlib.suppress(OSError):
            while True:
                for end in select.select(list(ways), [], [])[0]:
                    to, record, way = ways[end]
                    piece = end.recv(2**20)
                    if not piece:
                        return
                    record.append(piece)
                    if self.flip[way]:
                        piece = piece[:-1] + bytes([piece[-1] ^ 1])
                    to.sendall(piece)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


@pytest.fixture
def tap(served: Served) -> Iterator[Tap]:
    tap = Tap(served.port)
    yield tap
    for client in served._clients:
        client.close()
    tap.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes a connection before long."""
    connection.settimeout(WAIT)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(2**16):
            pass
    return True


def test_strangers_of_all_kinds_change_nothing_and_leave_nothing_behind(served: Served) -> None:
    with (
        contextlib.closing(Tap(served.port)) as tap,
        contextlib.closing(served.client("recorded", port=tap.port)) as recorded,
    ):
        recorded.add("number", 1)
    store = served.client()
    strangers = threading.Thread(
        target=knock, args=(HERE, served.port, 600), kwargs={"replayed": b"".join(tap.sent)}
    )
    strangers.start()
    for i in range(100):
        store.set("key", f"{i}")
        assert store.get("key") == f"{i}".encode()
    served.client("joins meanwhile").add("number", 1)
    strangers.join()
    served.client("joins afterwards").add("number", 1)
    assert store.get("number") == b"3"
    assert served.server.values("").keys() == {"key", "number"}
    wait_until(lambda: not served.server._strangers)


def test_nothing_of_a_stranger_is_parsed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []
    monkeypatch.setattr(module._Session, "open", lambda *message: parsed.append(message))
    monkeypatch.setattr(module._Session, "rest", parsed.append)
    knock(HERE, served.port, 70)
    with socket.create_connection((HERE, served.port)) as last:
        last.sendall(HELLO + bytes(100))
        assert is_closed(last)
    assert parsed == []


def test_the_oldest_stranger_gives_way_to_the_next_and_no_client_does(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE", 2 * WAIT)
    store = served.client()
    with contextlib.ExitStack() as opened:
        strangers = [
            opened.enter_context(socket.create_connection((HERE, served.port)))
            for _ in range(module._MAX_STRANGERS + 20)
        ]
        assert all(is_closed(stranger) for stranger in strangers[:20])
        assert served.client("another").check([]) and store.check([])
        assert not served.server.values("")
        assert len(served.server._strangers) <= module._MAX_STRANGERS
        assert not select.select(strangers[-100:], [], [], 0)[0]  # these are still waited for


@pytest.mark.parametrize("said", [b"", HELLO[:20], HELLO, HELLO + b"x"])
def test_a_stranger_that_is_slow_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE", 0.1)
    with socket.create_connection((HERE, served.port)) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(OSError):  # as soon as it has been closed
            for byte in said[-1:] * 20:
                time.sleep(0.02)
                stranger.sendall(bytes([byte]))
        assert is_closed(stranger)


def test_a_recorded_session_is_worth_nothing_to_a_client_either(served: Served, tap: Tap) -> None:
    served.client(port=tap.port).add("number", 1)

    def replay(connection: socket.socket) -> None:
        connection.sendall(b"".join(tap.answered))
        is_closed(connection)

    with server_of(replay) as port, pytest.raises(StoreRefusedError, match="another token"):
        served.client(port=port)


def test_an_echo_proves_nothing(served: Served) -> None:
    def echo(connection: socket.socket) -> None:
        while said := connection.recv(2**16):
            connection.sendall(said)

    with server_of(echo) as port, pytest.raises(StoreRefusedError, match="another token"):
        served.client(port=port)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 3, b"shardwise-store0" + bytes(32)])
def test_another_protocol_gets_no_word_from_the_server(served: Served, said: bytes) -> None:
    with socket.create_connection((HERE, served.port)) as stranger:
        stranger.sendall(said)
        stranger.settimeout(WAIT)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_message_that_is_sent_again_ends_the_connection_and_is_not_carried_out(
    served: Served, tap: Tap
) -> None:
    watching, tapped = served.client("watching"), served.client("tapped", port=tap.port)
    tapped.add("number", 1)
    tap.server.sendall(tap.sent[-1])
    assert watching.get(CLOSED + "tapped") == b"what arrived is not signed with the token"
    assert watching.get("number") == b"1"
    with pytest.raises(StoreClosedError):
        tapped.get("number")


@pytest.mark.parametrize("way", [0, 1])
def test_a_message_that_is_changed_on_its_way_is_noticed(
    served: Served, tap: Tap, way: int
) -> None:
    watching, tapped = served.client("watching"), served.client("tapped", port=tap.port)
    tapped.set("key", "1")
    tap.flip[way] = True
    with pytest.raises(StoreClosedError, match="not signed" if way else "closed"):
        tapped.set("key", "2")
    assert watching.get("key") == (b"2" if way else b"1")
    if not way:
        assert watching.get(CLOSED + "tapped") == b"what arrived is not signed with the token"


@pytest.mark.parametrize("garbage", [b"\xff" * 4, b"\x00\x10\x00\x01", bytes(100)])
def test_a_client_that_sends_no_messages_is_lost(served: Served, garbage: bytes) -> None:
    watching, broken = served.client("watching"), served.client("broken")
    broken._socket.sendall(garbage)
    assert watching.get(CLOSED + "broken").startswith(b"what arrived is not ")


def test_a_later_connection_takes_over_a_name(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching, first = served.client("watching"), served.client("name")
    end, there = module._Client.end, []

    def look_and_end(client: module._Client, how: bytes, reason: str) -> None:
        there.append("name" in served.server.clients())
        end(client, how, reason)

    monkeypatch.setattr(module._Client, "end", look_and_end)
    second = served.client("name")
    second.set("key", "value")
    assert there == [True], "for other threads, it would be gone without a reason"
    with pytest.raises(StoreDroppedError, match="another connection has its name"):
        first.get("key")
    assert not watching.check([CLOSED + "name"])
    second._socket.shutdown(socket.SHUT_RDWR)
    assert watching.get(CLOSED + "name") == b"the connection was closed"


@contextlib.contextmanager
def of_short_patience(store: GuardedStore) -> Iterator[None]:
    """Let a client wait for answers for 0.2 s."""
    before, store._seconds = store._seconds, 0.2
    yield
    store._seconds = before


def test_a_server_that_hangs_is_silent_and_the_next_answer_is_the_right_one(
    served: Served,
) -> None:
    store = served.client()
    store.multi_set(["a", "b"], ["1", "2"])
    with served.hanging(), of_short_patience(store):
        for ask in (lambda: store.get("a"), lambda: store.wait(["a"], timedelta(seconds=WAIT))):
            with pytest.raises(StoreSilentError, match=r"no answer within 0\.2 s"):
                ask()
    assert store.get("b") == b"2"


class InterruptError(Exception):
    pass


def test_a_request_that_a_signal_interrupts_does_not_spoil_the_next(served: Served) -> None:
    def interrupt(*_: object) -> None:
        raise InterruptError

    store = served.client()
    store.multi_set(["a", "b"], ["1", "2"])
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with served.hanging():
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(InterruptError):
                store.get("a")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert store.get("b") == b"2"


def test_the_end_of_the_server_ends_the_requests_of_all_threads(served: Served) -> None:
    clients = [served.client(f"{i}") for i in range(4)]
    ended: list[Exception] = []

    def ask(client: GuardedStore) -> None:
        try:
            while True:
                client.add("number", 1)
        except Exception as error:
            ended.append(error)

    threads = [threading.Thread(target=ask, args=(client,)) for client in clients * 2]
    for thread in threads:
        thread.start()
    clients[0].wait(["number"])
    served.server.close()
    for thread in threads:
        thread.join(WAIT)
    assert len(ended) == 8
    assert {type(error) for error in ended} == {StoreClosedError}


def test_hundreds_of_clients_are_served(served: Served) -> None:
    clients = [served.client(f"{i}") for i in range(200)]
    for client in clients:
        client.add("number", 1)
    for client in clients[::2]:
        client._socket.close()
    assert clients[1].get("number") == b"200"
    clients[1].wait([f"{CLOSED}{i}" for i in range(0, 200, 2)])
    assert not clients[1].check([f"{CLOSED}3"])


PROGRAM = """
import os
import sys
import time
from shardwise.elastic.network import listening
from shardwise.elastic.store import GuardedStore, StoreServer

def hang(file):
    while not os.path.exists(file):
        time.sleep(0.01)

TOKEN = b"a token that only this test knows"
if sys.argv[1] == "serve":
    listener = listening("127.0.0.1")
    StoreServer(listener, TOKEN)
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
    time.sleep(1000)
else:
    seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 1000.0
    store = GuardedStore("127.0.0.1", int(sys.argv[2]), TOKEN, "killed", seconds)
    print("asks", flush=True)
    if len(sys.argv) > 5:
        hang(sys.argv[5])
    print(store.get(sys.argv[3]).decode(), flush=True)
"""

Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the program with arguments, and with a first call of its process."""
    started: list[Program] = []
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(*words: str, enter: Callable[[], object] | None = None) -> Program:
        program = start_program(["program.py", *words], folder=tmp_path, enter=enter)
        started.append(program)
        return program

    yield start
    for program in started:
        program.kill()
        program.close()
        program.wait(WAIT)


def line(program: Program) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def test_a_client_that_is_killed_while_it_waits_is_noted(served: Served, start: Start) -> None:
    watching = served.client("watching")
    killed = start("ask", str(served.port), "missing")
    assert line(killed) == "asks"
    assert not watching.check([CLOSED + "killed"])
    killed.kill()
    assert watching.get(CLOSED + "killed") == b"the connection was closed"


def suspend(program: Program) -> None:
    """Suspend a program, and wait until none of it runs."""
    program.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def test_the_time_for_which_a_client_is_suspended_does_not_count(
    served: Served, start: Start, tmp_path: Path
) -> None:
    limit = 3.0
    served.client("setting").set("key", "value")
    asking = start("ask", str(served.port), "key", str(limit), "hanging")
    assert line(asking) == "asks"
    with served.hanging():
        (tmp_path / "hanging").touch()
        time.sleep(0.1)  # for its request
        suspend(asking)
        time.sleep(limit)
        asking.send_signal(signal.SIGCONT)
        time.sleep(0.1)  # for what it does first
    assert line(asking) == "value"


def test_a_key_is_not_waited_for_while_the_process_is_suspended(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, setting = served.client(), served.client("setting")
    clock, asked, jumped = time.monotonic, threading.Event(), threading.Event()
    ask = waiting._ask

    def ask_and_be_suspended(request: bytes, *arguments: str | bytes) -> list[bytes]:
        answer = ask(request, *arguments)
        if jumped.is_set():
            asked.set()
        else:
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600.0)
            jumped.set()
        return answer

    monkeypatch.setattr(waiting, "_ask", ask_and_be_suspended)
    setter = threading.Thread(target=lambda: (asked.wait(WAIT), setting.set("key", "value")))
    setter.start()
    assert waiting.get("key") == b"value"
    setter.join()


def test_a_server_is_not_looked_for_while_the_process_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening(HERE) as listener:
        port = listener.getsockname()[1]
    clock, looks = time.monotonic, 0

    def look() -> None:
        nonlocal looks
        looks += 1
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600.0)
        if looks == 3:
            raise KeyError("it still looks")

    with pytest.raises(KeyError):
        module.connect(
            lambda: GuardedStore(HERE, port, TOKEN, "a", 1.0), patience=WAIT, pause=0.01, look=look
        )


def test_a_server_may_be_paused_and_killed(served: Served, start: Start) -> None:
    server = start("serve")
    port = int(line(server))
    store = served.client(port=port)
    store.set("key", "value")
    suspend(server)
    with of_short_patience(store), pytest.raises(StoreSilentError):
        store.get("key")
    with pytest.raises(StoreSilentError):
        served.client("another", port=port, seconds=0.2)
    server.send_signal(signal.SIGCONT)
    assert store.get("key") == b"value"
    server.kill()
    with pytest.raises(StoreClosedError):
        store.get("key")


def test_a_server_without_descriptors_serves_its_clients_and_recovers(
    served: Served, start: Start
) -> None:
    few = 40
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (few, few))
    port = int(line(start("serve", enter=limit)))
    store = served.client(port=port)
    with contextlib.ExitStack() as opened:
        strangers = [
            opened.enter_context(socket.create_connection((HERE, port))) for _ in range(3 * few)
        ]
        assert all(is_closed(stranger) for stranger in strangers[:few])  # others took their place
        for i in range(20):
            store.set("key", f"{i}")
            assert store.get("key") == f"{i}".encode()
        assert served.client("another", port=port).get("key") == b"19"
    assert served.client("a third one", port=port).get("key") == b"19"

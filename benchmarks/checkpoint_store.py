"""Time and bytes to save to an object store and to load from it: ours, and torch's DCP on fsspec.

    pip install obstore s3fs 'moto[s3]' flask flask-cors
    python benchmarks/checkpoint_store.py --params 10m --ranks 2

The store is moto's S3 server, in a process of its own on the same machine, which counts the bytes
of requests and answers. Both contenders hold the same shards, with the state of AdamW, and take
turns.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import urllib.request
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import set_state_dict

from _contenders import Case
from _options import end, parser, run, step_cases
from _report import Table, compared, mib, ratio
from _turns import Turns
from _worlds import World
from checkpoint import CheckpointWorker, measured, state_for_dcp

TITLES = {"ours": "shardwise", "dcp": "torch DCP, FsspecWriter and FsspecReader"}


class StoreWorker(CheckpointWorker):
    """One rank of a contender."""

    def save_to(self, url: str) -> tuple[float, int]:
        """Save; return the seconds, and the bytes of memory that it took beside the shards."""
        ways = {"ours": self._save_ours, "dcp": self._save_with_fsspec}
        return measured(lambda: ways[self._name](url))  # type: ignore[operator]

    def load_from(self, url: str) -> tuple[float, int]:
        """Load what was saved; return the same."""
        ways = {"ours": self._load_ours, "dcp": self._load_with_fsspec}
        return measured(lambda: ways[self._name](url))  # type: ignore[operator]

    def _save_with_fsspec(self, url: str) -> None:
        dcp.save(state_for_dcp(self._model, self._optimizer), storage_writer=FsspecWriter(url))  # type: ignore[attr-defined]

    def _load_with_fsspec(self, url: str) -> None:
        state = state_for_dcp(self._model, self._optimizer)
        dcp.load(state, storage_reader=FsspecReader(url))  # type: ignore[attr-defined]
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self._model, self._optimizer, **loaded)


class Counting:
    """moto's application, and the bytes that go in and out."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self._app = DomainDispatcherApplication(create_backend_app)
        self.sent = self.got = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request."""
        if environ["PATH_INFO"] == "/counted":
            start_response("200 OK", [])
            return [f"{self.sent} {self.got}".encode()]
        self.sent += int(environ.get("CONTENT_LENGTH") or 0)
        answer = list(self._app(environ, start_response))
        self.got += sum(map(len, answer)) if environ["REQUEST_METHOD"] == "GET" else 0
        return answer


def serve(port: Connection) -> None:
    """Serve until this process is ended."""
    import logging

    os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(2 << 30)  # it keeps objects in memory
    from moto.s3.models import FakeKey
    from werkzeug.serving import make_server

    # moto reads all of an object for each range of it, which no store does; so it reads it once.
    read = FakeKey.value.fget
    content = functools.lru_cache(8)(lambda key, version: read(key))
    FakeKey.value = property(lambda key: content(key, key.etag), FakeKey.value.fset)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, Counting(), threaded=True)
    port.send(server.server_port)
    server.serve_forever()


def _ask(path: str, method: str = "GET") -> str:
    request = urllib.request.Request(os.environ["AWS_ENDPOINT_URL"] + path, method=method)
    with urllib.request.urlopen(request) as answer:
        text: str = answer.read().decode()
    return text


def play(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Let both contenders take turns; return the raw numbers.

    Raises:
        ValueError: a contender did not load what it had saved.
    """
    mine, its = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(its,), daemon=True)
    server.start()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{mine.recv()}",
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="us-east-1",
    )

    def start(name: str) -> World:
        return World(name, case.ranks, StoreWorker, name, case)

    def turn(name: str, world: World, is_new: bool) -> dict[str, Any]:
        if is_new:  # to warm up
            _turn(world)
        return _turn(world)

    try:
        with Turns(TITLES, start) as turns:
            found = turns.play(options.rounds, turn)
            nbytes = sum(turns.worlds["ours"].call("nbytes"))
    finally:
        server.terminate()
        server.join()
    return {**case.facts(), "nbytes": nbytes, "turns": found}


_turns = iter(range(10**9))


def _turn(world: World) -> dict[str, Any]:
    """Save and load; the figures of all ranks, and the bytes of both."""
    _ask("/moto-api/reset", "POST")
    _ask("/bucket", "PUT")
    url = f"s3://bucket/{world.name}-{next(_turns)}/a"  # s3fs remembers what it has listed
    counted = [_counted()]
    saved = world.call("save_to", url)
    counted.append(_counted())
    before = world.call("digest")
    loaded = world.call("load_from", url)
    counted.append(_counted())
    if world.call("digest") != before:
        raise ValueError(f"{world.name} did not load what it had saved")
    world.call("load_from", url)  # since the digest spoils it
    found: dict[str, Any] = {
        "save_bytes": counted[1][0] - counted[0][0],
        "load_bytes": counted[2][1] - counted[1][1],
    }
    for what, by_rank in (("save", saved), ("load", loaded)):
        found[f"{what}_s"], found[f"{what}_extra"] = map(list, zip(*by_rank, strict=True))
    return found


def _counted() -> tuple[int, int]:
    sent, got = _ask("/counted").split()
    return int(sent), int(got)


def table(case: dict[str, Any]) -> Table:
    """Show a case."""
    rows = [f"{name} {what}" for what in ("save", "load") for name in TITLES]

    def figures(row: str, what: str) -> list[Any]:
        name, action = row.split()
        return [turn[f"{action}_{what}"] for turn in case["turns"][name]]

    seconds = {row: [*map(max, figures(row, "s"))] for row in rows}
    of_dcp: Callable[[str], str] = lambda row: ratio(  # noqa: E731
        seconds[row], seconds[f"dcp {row.split()[1]}"]
    )
    return compared(
        f"{case['params']} parameters with AdamW, {case['ranks']} ranks, "
        f"{case['nbytes'] / 1e9:.2f} GB, moto's S3 server",
        ("contender", "s", 2),
        seconds,
        {row: f"{TITLES[row.split()[0]]}, {row.split()[1]}" for row in rows},
        peers={},
        beside={
            "of DCP's time": of_dcp,
            "bytes moved, of the tensors'": lambda row: (
                f"{median(figures(row, 'bytes')) / case['nbytes']:.4f}"
            ),
            "extra MiB a rank": lambda row: mib(max(map(max, figures(row, "extra"))), 0),
        },
        notes=[f"{len(case['turns']['ours'])} rounds, the slowest rank of each"],
    )


def main() -> int:
    made = parser(__doc__, ranks="2", params="10m", rounds=5, folder=None, seed=0)
    options = made.parse_args()
    cases = (play(case, options) for case in step_cases(options))
    return run("checkpoint-store", options, lambda say: cases, lambda cases: [*map(table, cases)])


if __name__ == "__main__":
    end(main)

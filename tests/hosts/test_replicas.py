"""Replicas of DiLoCo that are independent of each other, a host each, and a link that goes away."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._hosts import two_hosts
from tests.hosts.network import needs_hosts, start
from tests.programs import Program

pytestmark = needs_hosts

_WAIT = 90.0  # seconds that anything may take on a busy machine

# The server is in the process of replica 0. Each line is a step: its round, and the outer state.
_REPLICA = """
import hashlib, json, sys, time
from pathlib import Path

import torch
from torch import nn

from shardwise.diloco import DiLoCo, Quorum, QuorumServer
from shardwise.diloco.coordinator import EventKind

number, folder = int(sys.argv[1]), Path(sys.argv[2])
where = "10.77.0.1", 29420

def record(event):
    if event.kind is EventKind.ROUND:
        with (folder / "rounds").open("a") as file:
            file.write(json.dumps(sorted(event.attempt.members)) + "\\n")

if number == 0:
    server = QuorumServer(2, deadline=2.0, address=where[0], port=where[1], report=record)
    (folder / "rounds").touch()
torch.manual_seed(number)
model = nn.Linear(8, 8)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
quorum = Quorum(server="%s:%d" % where, replica=number)
optimizer = DiLoCo(model, inner, every=50, group=quorum)
optimizer.join()
with (folder / f"steps-{number}").open("w", buffering=1) as steps:
    while not (folder / "end").exists():
        model(torch.randn(4, 8)).sub(number).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.outer_parameters():
            bits = model.weight.detach().numpy().tobytes()
        print(json.dumps([optimizer.rounds[0], hashlib.sha256(bits).hexdigest()]), file=steps)
        time.sleep(0.02)
optimizer.leave()
if number == 0:
    server.close()
"""


def _lines(file: Path) -> list[Any]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if "\n" in line]


def test_a_host_whose_link_goes_away_trains_on_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "replica.py").write_text(_REPLICA)
    # The name of a host often resolves to 127.0.0.1, and no variable says what gloo is to use.
    env = {"PYTHONPATH": str(tmp_path), "GLOO_SOCKET_IFNAME": ""}
    errors = [tmp_path / f"err-{number}" for number in range(2)]
    replicas: list[Program] = []

    def wait_until(happens: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _WAIT
        while not happens():
            told = [error.read_text() for error in errors if error.exists()]
            runs = all(replica.poll() is None for replica in replicas)
            assert runs and time.monotonic() < deadline, f"no {what}: {told}"
            time.sleep(0.05)

    def wait_for_round(members: list[int]) -> None:
        before = len(_lines(tmp_path / "rounds"))
        wait_until(lambda: members in _lines(tmp_path / "rounds")[before:], f"round of {members}")

    with two_hosts() as hosts:
        for number, host in enumerate(hosts):
            words = (str(number), str(tmp_path))
            with errors[number].open("w") as err:
                replicas.append(start(host, "replica", *words, env=env, out=err, err=err))
            wait_until((tmp_path / "rounds").exists, "server")
        wait_for_round([0, 1])
        # Not while replica 1 waits to be told how a round has ended: then it trains no further.
        made = len(_lines(tmp_path / "rounds"))
        wait_until(lambda: _lines(tmp_path / "steps-1")[-1][0] >= made, "result of a round")
        hosts[1].ip("link", "set", "eth0", "down")
        wait_for_round([0])
        wait_until(lambda: "lost the quorum" in errors[1].read_text(), "word of the loss")
        steps = len(_lines(tmp_path / "steps-1"))
        wait_until(lambda: len(_lines(tmp_path / "steps-1")) > steps + 60, "steps alone")
        hosts[1].ip("link", "set", "eth0", "up")
        wait_for_round([0, 1])
        (tmp_path / "end").touch()
        assert [replica.wait(timeout=_WAIT) for replica in replicas] == [0, 0]
    first, second = ({(at, bits) for at, bits in _lines(tmp_path / f"steps-{n}")} for n in (0, 1))
    rounds = {at for at, _ in first} & {at for at, _ in second}
    assert rounds
    for at in rounds:
        assert len({found for found in first | second if found[0] == at}) == 1

"""Trainings that a host joins, leaves, and is lost from, as their users start them."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks._hosts import Host, two_hosts
from shardwise.runs.metrics_file import read_metrics
from tests.hosts.jobs import IMPATIENT, WAIT, Job, kill_host
from tests.hosts.network import needs_hosts
from tests.programs import Program, ranks_of
from tests.recipes.corpora import texts, write_jsonl
from tests.recipes.small import losses, small_config, write_model

pytestmark = needs_hosts

Pair = tuple[Host, Host]
PORT = 29413


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pair]:
    with two_hosts() as pair:
        yield pair


class Training(Job):
    """A training on host 0, which others may join.

    Args:
        hosts: where.
        folder: of the job.
        port: where the hosts meet.
        options: of ``train lm``, beside those that all have here.
    """

    def __init__(self, hosts: Pair, folder: Path, port: int, options: str) -> None:
        write_model(folder, attention_dropout=0.0)
        write_jsonl(folder / "corpus.jsonl", texts(300))
        (folder / "training.py").write_text(IMPATIENT)
        self.config = small_config(folder, "job")
        arguments = (
            "train lm --model config.json --data corpus.jsonl --seq-length 16 --steps 1000000 "
            "--batch-size 2 --lr 0.01 --warmup 2 --eval-every 0 --device cpu --sample-tokens 0 "
            f"--nproc 1 --out job --max-restarts 1 --nnodes 1:2 --rdzv 10.77.0.1:{port} {options} "
        )
        env = {"PYTHONPATH": str(folder)}
        super().__init__(hosts[:1], folder, "job", "training", f"{arguments} RANK", env)
        self.hosts = hosts

    def start(self, host: Host, rank: str) -> None:
        """Start the command on one more host; only host 0 says which one it is."""
        super().start(host, "--node-rank 0" if rank == "0" else "")

    def come(self) -> Program:
        """Start the command on host 1."""
        self.start(self.hosts[1], "none")
        return self.commands[1]

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """What the run says of each world that it was in."""
        found: list[dict[str, Any]] = self.config.files.read()["sessions"]
        return found

    def wait_for_session(self, count: int, steps: int) -> None:
        """Wait until this is the n-th session, and has completed so many steps."""
        self.wait_until(lambda: self.steps() > 0 and len(self.sessions) == count, f"world {count}")
        self.wait_for_step(self.sessions[-1]["from_step"] + steps)

    @property
    def said(self) -> str:
        """What host 0 has shown so far."""
        return self.file(0, "out").read_text()

    def stop(self) -> None:
        """Stop the job by Ctrl-C on host 0."""
        self.commands[0].send_signal(signal.SIGINT)
        assert self.commands[0].wait(timeout=WAIT) == 128 + signal.SIGINT, self.told(0)

    def assert_goes_on_at(self, *steps: int) -> None:
        """No step is missing or made twice, and the loss goes on from where it was at these."""
        history = losses(self.config)
        assert [step for step, _, _ in history] == list(range(1, len(history) + 1))
        by_step = {step: loss for step, loss, _ in history}
        for at in steps:
            before = statistics.mean(by_step[step] for step in range(at - 19, at + 1))
            after = statistics.mean(by_step[step] for step in range(at + 1, at + 21))
            assert abs(after - before) < 0.3 * by_step[1], (at, before, after)


def test_diloco_goes_on_with_a_host_that_joins_and_without_it(hosts: Pair, tmp_path: Path) -> None:
    options = "--strategy diloco --local-steps 7 --checkpoint-every 25"
    job = Training(hosts, tmp_path, PORT, options)
    job.wait_for_session(1, 22)
    alone = read_metrics(job.config.files.metrics)[:22]
    job.come()
    job.wait_for_session(2, 30)
    kill_host(job)
    # More steps than between checkpoints: those that are repeated do not count.
    job.wait_for_session(3, 50)
    job.stop()
    assert "host 1 (10.77.0.2) joins; finishing a step, to continue with 2 hosts" in job.told(0)
    assert "host 1 (10.77.0.2) was lost" in job.told(0)
    assert [(s["world_size"], s["hosts"]) for s in job.sessions] == [(1, 1), (2, 2), (1, 1)]
    joined, left = job.sessions[1]["from_step"], job.sessions[2]["from_step"]
    # What was saved is neither lost nor trained again; what was not saved is trained again.
    assert f"checkpoint step={joined} " in job.said
    assert read_metrics(job.config.files.metrics)[:22] == alone
    assert joined < left
    assert left % 25 == 0
    job.assert_goes_on_at(joined, left)


def test_ranks_stay_when_a_host_joins_and_when_it_leaves(hosts: Pair, tmp_path: Path) -> None:
    job = Training(hosts, tmp_path, PORT + 1, "--checkpoint-every 0")
    job.wait_for_session(1, 22)
    [rank] = ranks_of(job.commands[0].pid)
    second = job.come()
    job.wait_for_session(2, 22)
    assert rank.is_running()
    assert not job.config.files.checkpoints.exists(), "nothing was saved"
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=WAIT) == 128 + signal.SIGTERM
    job.wait_for_session(3, 22)
    assert "hosts      host 1 (10.77.0.2) left; continuing with 1 host\n" in job.told(0)
    assert "hosts      this host leaves; the job continues without it\n" in job.told(1)
    assert rank.is_running()
    assert f"checkpoint step={job.sessions[2]['from_step']} " in job.said, "those that leave save"
    job.stop()
    assert [session["world_size"] for session in job.sessions] == [1, 2, 1]
    job.assert_goes_on_at(*(session["from_step"] for session in job.sessions[1:]))


@pytest.mark.parametrize(
    "moment",
    [
        "continuing",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("joins", "2 hosts; rank")),
    ],
)
def test_what_ranks_hold_in_memory_is_saved_when_a_signal_stops_them_meanwhile(
    hosts: Pair, tmp_path: Path, moment: str
) -> None:
    job = Training(hosts, tmp_path, PORT + 2, "--checkpoint-every 0")
    job.wait_for_session(1, 5)
    second = job.come()
    job.wait_until_told(0, moment)
    job.stop()
    second.wait(timeout=WAIT)
    [saved] = job.config.files.checkpoints.iterdir()
    assert saved.name == f"step-{job.steps():08}"
    assert job.steps() > job.sessions[-1]["from_step"]

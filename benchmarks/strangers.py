"""Step time of a training over two hosts while strangers call at the port where they meet.

    PYTHONPATH=src:. python -m benchmarks.strangers

Hosts and strangers share the processors of this machine, which nothing else should use.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.hosts.jobs import Job
from tests.hosts.network import start
from tests.recipes.corpora import texts, write_jsonl
from tests.recipes.small import write_model

from benchmarks._hosts import two_hosts

TOKEN = {"SHARDWISE_RDZV_TOKEN": "a token that strangers do not have"}
TRAINING = (
    "train lm --model config.json --data corpus.jsonl --seq-length 16 --batch-size 2 --lr 0.01 "
    "--warmup 2 --checkpoint-every 0 --eval-every 0 --device cpu --sample-tokens 0 --nproc 1 "
    "--strategy hybrid --steps 1000000 --out run --nnodes 2 --rdzv 10.77.0.1:29412 --node-rank RANK"
)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="strangers (10,000)")
    parser.add_argument("--gbit", type=float, default=0.02, help="speed of the link (0.02)")
    parser.add_argument("--quiet", type=float, default=15.0, help="seconds without, twice (15)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, two_hosts(options.gbit) as hosts:
        folder = Path(name)
        write_model(folder, attention_dropout=0.0)
        write_jsonl(folder / "corpus.jsonl", texts(300))
        with Job(hosts, folder, "run", "shardwise", TRAINING, TOKEN) as job:
            job.wait_for_step(20)
            first = _rate(job, lambda: time.sleep(options.quiet))
            where = ("10.77.0.1", "29412", str(options.count))
            strangers = start(hosts[0], "tests.hosts.flood", *where, env=TOKEN)
            flooded = _rate(job, lambda: strangers.wait(600))
            last = _rate(job, lambda: time.sleep(options.quiet))
            runs = all(command.poll() is None for command in job.commands)
            said, told = strangers.communicate()
    quiet = (first + last) / 2
    print(f"{said}{told}the job runs on: {runs}")
    print(f"a step takes {1e3 / quiet:.1f} ms without strangers, {1e3 / flooded:.1f} ms with them")
    print(
        f"ratio {quiet / flooded:.2f}; the two times without them differ by {first / last - 1:+.1%}"
    )


def _rate(job: Job, meanwhile: Callable[[], object]) -> float:
    """Return how many steps a second are completed meanwhile."""
    before, began = job.steps(), time.monotonic()
    meanwhile()
    return (job.steps() - before) / (time.monotonic() - began)


if __name__ == "__main__":
    main()

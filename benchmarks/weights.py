"""Publish weights from ranks to a reader: how long it takes beside one copy, and what changes take.

    python benchmarks/weights.py [--megabytes 1200] [--rounds 9]

In every round, two ranks publish a version of a model in memory, and a reader maps it, and then
looks at every page. Beside it, as many threads copy as many bytes from one tensor to another. Then
a share of the elements in bf16 changes, and the ranks publish to a folder: the bytes of that
version are beside those of the model.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.checkpoint.ranks.loading import own_part

RANKS, WIDTH = 2, 4096
SHARES = (0.01, 0.02, 0.03)
RATIO = "(publish + map) / copy"


def _model(nbytes: int) -> nn.Sequential:
    layers = max(1, nbytes // (4 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model)
    return model


def _in_memory(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """The seconds that each part of each round took, on the first rank."""
    model = _model(nbytes)
    total = sum(param.numel() for param in model.parameters())
    found: dict[str, list[float]] = {}

    def note(**seconds: float) -> None:
        for name, each in seconds.items():
            found.setdefault(name.replace("_", " "), []).append(each)

    with shardwise.publish(model, "benchmark of weights") as weights:
        weights.update()
        weights.update()  # all buffers have their pages now
        source, target = (torch.ones(total) if dist.get_rank() == 0 else None for _ in range(2))
        for _ in range(rounds):
            dist.barrier()
            begin = time.perf_counter()
            weights.update()
            published = time.perf_counter() - begin
            if source is not None and target is not None:
                begin = time.perf_counter()
                tensors = dict(shardwise.subscribe("benchmark of weights"))
                mapped = time.perf_counter() - begin
                for each in tensors.values():
                    each.view(-1)[::1024].sum()
                looked = time.perf_counter() - begin - mapped
                del tensors, each
                torch.set_num_threads(RANKS)
                begin = time.perf_counter()
                target.copy_(source)
                copied = time.perf_counter() - begin
                torch.set_num_threads(1)
                note(publish=published, map=mapped, look_at_every_page=looked, one_copy=copied)
                found.setdefault(RATIO, []).append((published + mapped) / copied)
            dist.barrier()
    return found


def _changes(nbytes: int, folder: str) -> dict[str, float]:
    """The bytes of a version, as a share of the model's, by the share of elements that changed."""
    model = _model(nbytes).to(torch.bfloat16)
    whole = sum(param.numel() for param in model.parameters()) * 2
    found = {}
    with shardwise.publish(model, "changes", to=folder) as weights:
        for share in SHARES:
            with torch.no_grad():
                for param in model.parameters():
                    local = own_part(param)[1]
                    local[torch.rand(local.shape) < share] += 1
            version = Path(folder) / "changes" / f"version-{weights.update():08}"
            size = sum(file.stat().st_size for file in version.iterdir())
            found[f"version, {share:.0%} changed"] = size / whole
    return found


def main() -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    nbytes = arguments.megabytes * 10**6
    found = shardwise.launch(_in_memory, (nbytes, arguments.rounds), nproc=RANKS)[0]
    for what, values in found.items():
        unit = "" if what == RATIO else " s"
        print(f"{what:24} {statistics.median(values):8.3f}{unit}")
    with tempfile.TemporaryDirectory() as folder:
        shares = shardwise.launch(_changes, (nbytes // 8, folder), nproc=RANKS)[0]
        for what, share in shares.items():
            print(f"{what:24} {share:8.2%}")


if __name__ == "__main__":
    main()

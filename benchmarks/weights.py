"""Publish weights from ranks to a reader: how long it takes beside one copy.

    python benchmarks/weights.py [--megabytes 1200] [--rounds 9]

In every round, two ranks publish a version of a model in memory, and a reader maps it, and then
looks at every page. Beside it, as many threads copy as many bytes from one tensor to another.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise

RANKS, WIDTH = 2, 4096
RATIO = "(publish + map) / copy"
COPIES, PEAK = "relayout / one copy", "relayout, largest peak"


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


def _layouts(rounds: int) -> dict[str, list[float]]:
    """The seconds and the largest peak of each round, from two ranks to four."""
    dist.init_process_group()
    rank = dist.get_rank()
    two, others, four = (
        DeviceMesh("cpu", list(ranks), mesh_dim_names=("shard",))
        for ranks in (range(2), range(2, 4), range(4))
    )
    idle = _anonymous()
    with torch.device("meta"):
        layers = (nn.Linear(1024, 12288, bias=False) for _ in range(13))
        model = nn.Sequential(nn.Embedding(50257, 1024), *layers)
        for layer in model:
            shardwise.fully_shard(layer, mesh=two if rank < 2 else others)
        shardwise.fully_shard(model, mesh=two if rank < 2 else others)
    if rank < 2:
        shardwise.materialize(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for param in model.parameters() if rank < 2 else ():
        moments = {name: torch.ones_like(param) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    nbytes = 12 * sum(param.numel() for param in model.parameters())
    found: dict[str, list[float]] = {"relayout": [], COPIES: [], PEAK: []}
    for _ in range(rounds):
        dist.barrier()
        seen, ends = [0], threading.Event()
        watch = threading.Thread(target=_watch, args=(seen, ends))
        watch.start()
        begin = time.perf_counter()
        shardwise.relayout(model, optimizer, mesh=four)
        dist.barrier()
        seconds = time.perf_counter() - begin
        ends.set()
        watch.join()
        peaks = [0.0] * 4
        dist.all_gather_object(peaks, (max(seen) - idle) / (nbytes / (2 if rank < 2 else 4)))
        shardwise.relayout(model, optimizer, mesh=two)
        if rank == 0:
            source = torch.ones(nbytes // 4)
            begin = time.perf_counter()
            source.clone()
            found[COPIES].append(seconds / (time.perf_counter() - begin))
            del source
        found["relayout"].append(seconds)
        found[PEAK].append(max(peaks))
    return found


def _anonymous() -> int:
    """The bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _watch(seen: list[int], ends: threading.Event) -> None:
    while not ends.wait(0.003):
        seen.append(_anonymous())


def main() -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    nbytes = arguments.megabytes * 10**6
    found = shardwise.launch(_in_memory, (nbytes, arguments.rounds), nproc=RANKS)[0]
    found |= shardwise.launch(_layouts, (5,), nproc=4)[0]
    for what, values in found.items():
        unit = "" if what in (RATIO, COPIES, PEAK) else " s"
        print(f"{what:24} {statistics.median(values):8.3f}{unit}")


if __name__ == "__main__":
    main()

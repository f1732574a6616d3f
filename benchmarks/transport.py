"""How long the collectives of a group take on gloo: ours, packed, and torch's bare ones.

    python benchmarks/transport.py --ranks 2,4 --mib 1,64

"one" is a single tensor; "block" is cut like a Llama block: seven large tensors and two tiny ones.
Sizes are those of the full tensors, which every rank gathers and reduces. "packed" is what torch
FSDP2 does: copy the shards of a group into one flat buffer, one collective, copy out. "bare" is the
collective alone, on a flat buffer that nobody has to fill or empty. All three reduce to the same
values, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _options import one_of, positive_int, positive_ints
from _report import announce, document, save
from _transport_tables import transport_tables
from _worlds import World

CONTENDERS = ("ours", "packed", "bare")
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
# Parts of a block: four attention matrices, three of the perceptron (their sizes as 4 : 11).
_LARGE = [4, 4, 4, 4, 11, 11, 11]
_TINY_ELEMENTS = 512


class TransportWorker:
    """One rank of a contender, with the tensors of one case at a time."""

    def __init__(self, name: str) -> None:
        self._name = name

    def prepare(self, operation: str, kind: str, nbytes: int) -> float:
        """Make the tensors of a case; return a checksum of one collective's result."""
        world_size = dist.get_world_size()
        chunks = _chunks(kind, nbytes // 4, world_size)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._shards = [torch.randn(n, generator=generator) for n in chunks]
        self._fulls = [torch.randn(n * world_size, generator=generator) for n in chunks]
        self._call: Callable[[], None] = (
            self._bare(operation) if self._name == "bare" else self._of_transport(operation)
        )
        before = [tensor.clone() for tensor in self._written(operation)]
        self._call()
        found = sum(float(tensor.double().abs().sum()) for tensor in self._written(operation))
        for tensor, values in zip(self._written(operation), before, strict=True):
            tensor.copy_(values)
        return found

    def measure(self, count: int) -> list[float]:
        """Return the seconds that each of some collectives takes on this rank."""
        taken = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            self._call()
            taken.append(time.perf_counter() - start)
        return taken

    def _of_transport(self, operation: str) -> Callable[[], None]:
        from shardwise.transport.base import Reduce
        from shardwise.transport.select import select_transport

        choice = "collectives" if self._name == "packed" else "c10d"
        transport = select_transport(dist.group.WORLD, torch.device("cpu"), choice)
        shards, fulls = self._shards, self._fulls
        return {
            "all_gather": lambda: transport.all_gather(shards, fulls).wait(),
            "reduce_scatter": lambda: transport.reduce_scatter(fulls, shards, Reduce.SUM).wait(),
            "all_reduce": lambda: transport.all_reduce(fulls, Reduce.SUM).wait(),
        }[operation]

    def _bare(self, operation: str) -> Callable[[], None]:
        world_size = dist.get_world_size()
        rows = torch.cat([full.view(world_size, -1) for full in self._fulls], dim=1)
        full, shard = rows.view(-1), torch.cat(self._shards)
        self._fulls, self._shards = [full], [shard]
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return {
            "all_gather": lambda: gather(full, shard),
            "reduce_scatter": lambda: scatter(shard, full),
            "all_reduce": lambda: dist.all_reduce(full),
        }[operation]

    def _written(self, operation: str) -> list[torch.Tensor]:
        return self._shards if operation == "reduce_scatter" else self._fulls


def _chunks(kind: str, numel: int, world_size: int) -> list[int]:
    """Elements a rank of the tensors of a case, together about ``numel`` over all ranks."""
    if kind == "one":
        return [numel // world_size]
    large = [numel * part // sum(_LARGE) // world_size for part in _LARGE]
    return [*large, *[_TINY_ELEMENTS // world_size] * 2]


def _count(nbytes: int) -> int:
    """How many collectives a turn has: about as long for every size."""
    return max(1, min(30, 2**25 // nbytes))


def _play(ranks: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        worlds = {
            name: stack.enter_context(World(name, ranks, TransportWorker, name))
            for name in CONTENDERS
        }
        for operation, kind, mib in product(options.operations, options.kinds, options.mib):
            yield _case(worlds, ranks, operation, kind, mib, options.rounds)


def _case(
    worlds: dict[str, World], ranks: int, operation: str, kind: str, mib: float, rounds: int
) -> dict[str, Any]:
    nbytes = int(mib * 2**20)
    count = _count(nbytes)
    checksums = {
        name: world.call("prepare", operation, kind, nbytes) for name, world in worlds.items()
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in worlds}
    for world in worlds.values():
        world.call("measure", 2)  # warm up
    for _ in range(rounds):
        for name, world in worlds.items():  # one works, the others sleep
            by_rank = world.call("measure", count)
            seconds[name].append([max(each) for each in zip(*by_rank, strict=True)])
    return {
        "ranks": ranks,
        "operation": operation,
        "kind": kind,
        "bytes": nbytes,
        "checksums": checksums,
        "seconds": seconds,
    }


def _agree(case: dict[str, Any]) -> bool:
    """Whether the contenders computed the same, but for the order of additions."""
    first, *others = case["checksums"].values()
    return all(
        math.isclose(mine, theirs, rel_tol=1e-5)
        for other in others
        for mine, theirs in zip(first, other, strict=True)
    )


def _sizes(text: str) -> list[float]:
    try:
        sizes = [float(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0.01 <= size <= 4096 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes in MiB (0.0625,1,64)")
    return sizes


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--ranks", type=positive_ints, default=[2, 4], help="world sizes (2,4)")
    add(
        "--mib",
        type=_sizes,
        default=[0.0625, 1, 4, 16, 64, 256],
        help="sizes of the full tensors (0.0625,1,4,16,64,256)",
    )
    add("--kinds", type=one_of("one", "block"), default=["one", "block"], help="one, block or both")
    add("--operations", type=one_of(*OPERATIONS), default=list(OPERATIONS), help="which (all)")
    add("--rounds", type=positive_int, default=7, help="turns of a contender (7)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    return made.parse_args()


def main() -> int:
    options = _options()
    console = announce()
    played: list[dict[str, Any]] = []
    for ranks in options.ranks:
        for case in _play(ranks, options):
            played.append(case)
            content = document("transport", played)
            if options.json:
                save(options.json, content)
    for table in transport_tables(content):
        table.show(console)
    console.print(content["command"], highlight=False, soft_wrap=True)
    wrong = [case for case in played if not _agree(case)]
    for case in wrong:
        console.print(f"[red]results differ:[/red] {case['checksums']}", soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

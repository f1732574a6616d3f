"""What a timeline costs: a step that is recorded, and one that is not.

    python benchmarks/timeline.py --params 5m,34m --transports shm,c10d

Every rank takes turns: some steps while ``shardwise.timeline.record`` records, some without, in the
same process, so that whatever else the machine does hits both alike. The ratio is that of the two
turns of a round; its median and quartiles over all rounds count. CPU seconds are those of all
threads of a rank: they do not grow while others use the machine.

On a machine where others work, ratios are noise. So the last columns count: the number of reports
in a step, times the price of one. A tensor is reported twice, when it is allocated and when it is
freed. A step that is not recorded asks at every such point whether anybody watches.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import timeit
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _models import PRESETS, batches, build, groups
from _options import contender_env, one_of, positive_int
from _report import announce, document, publish
from _timeline_tables import timeline_tables
from _worlds import World, stop_server


class TimelineWorker:
    """One rank, which takes steps of a sharded Llama with or without a recording."""

    def __init__(self, preset: str, tokens: int) -> None:
        from shardwise import clip_grad_norm_, fully_shard

        self._model = build(preset, seed=0)
        for modules in groups(self._model):
            fully_shard(modules if len(modules) > 1 else modules[0])
        fully_shard(self._model)
        self._clip = clip_grad_norm_
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batches = batches(preset, tokens, dist.get_rank(), seed=0)

    def steps(self, count: int, recorded: bool) -> dict[str, Any]:
        """Take steps; return the seconds and the CPU seconds of each, and what was recorded."""
        from shardwise import timeline

        found: dict[str, Any] = {"seconds": [], "cpu": []}
        began = time.perf_counter()
        with timeline.record() if recorded else contextlib.nullcontext() as recording:
            found["begin"] = time.perf_counter() - began
            for _ in range(count):
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                self._step()
                found["seconds"].append(time.perf_counter() - start)
                found["cpu"].append(time.process_time() - cpu)
            ended = time.perf_counter()
        found["end"] = time.perf_counter() - ended
        if recording is not None:
            own = next(r for r in recording.timeline.ranks if r.rank == dist.get_rank())
            found["spans"] = len(own.spans) / count
            found["changes"] = len(own.changes) / count
            found["bytes"] = len(str(own.to_json())) / count
        return found

    def price(self) -> dict[str, float]:
        """Return the seconds of a question whether anybody watches, of a span, and of a tensor."""
        from shardwise import timeline
        from shardwise.base import observe
        from shardwise.base.observe import Activity, Memory

        def span() -> None:
            observe.end(observe.begin(Activity.COPY, "layers.0"))

        def tensor() -> None:
            observe.memory_of(Memory.OTHER, "layers.0", torch.empty(8))

        number = 20_000
        question = timeit.timeit(lambda: observe.end(0), number=number) / number
        bare = timeit.timeit(lambda: torch.empty(8), number=number)
        with timeline.record():
            price = {"span": timeit.timeit(span, number=number) / number, "question": question}
            price["tensor"] = (timeit.timeit(tensor, number=number) - bare) / number
        return price

    def _step(self) -> None:
        tokens = self._batches[0]
        self._model(input_ids=tokens, labels=tokens).loss.backward()
        self._clip(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def play(preset: str, transport: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let recorded and other steps take turns; return the raw numbers of all ranks."""
    world = World(
        *("ours", options.ranks, TimelineWorker, preset, options.tokens),
        env=contender_env("ours", transport),
    )
    turns: list[dict[str, Any]] = []
    try:
        world.call("steps", 3, True)
        for number in range(options.rounds):
            order = (True, False) if number % 2 else (False, True)
            found = {recorded: world.call("steps", options.steps, recorded) for recorded in order}
            turns.append({"on": found[True], "off": found[False]})
        price = world.call("price")[0]
    finally:
        world.close()
    return {
        "params": preset,
        "transport": transport,
        "ranks": options.ranks,
        "tokens": options.tokens,
        "turns": turns,
        "price": price,
    }


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--params", type=one_of(*PRESETS), default=["5m", "34m"], help="models (5m,34m)")
    add("--transports", type=one_of("shm", "c10d"), default=["shm", "c10d"], help="(shm,c10d)")
    add("--ranks", type=positive_int, default=2, help="ranks (2)")
    add("--tokens", type=positive_int, default=256, help="tokens of a rank and step (256)")
    add("--rounds", type=positive_int, default=20, help="turns of each (20)")
    add("--steps", type=positive_int, default=5, help="steps in a turn (5)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    return made.parse_args()


def main() -> int:
    options = _options()
    console = announce()
    cases = [play(name, each, options) for name in options.params for each in options.transports]
    content = document("timeline", cases)
    publish(console, content, timeline_tables(content), options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()

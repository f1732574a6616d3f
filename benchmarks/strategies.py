"""Every strategy over two hosts and a link of a chosen speed, with torch's FSDP2 beside them.

    python benchmarks/strategies.py --gbit 1 --json 1.json
    python benchmarks/strategies.py --stored 10.json,1.json,0.1.json --picture strategies.svg

The hosts are namespaces of this machine, the link is shaped with ``tc tbf`` (see ``_hosts.py``; it
needs root). All contenders train the same model on the same tokens in one run and take turns, as
in ``step_time.py``: where gradients cross hosts, losses must agree to four decimals, or the exit
code is 1. Bytes are what the hosts' interfaces have counted. DiLoCo's inner steps and its exchange
are timed each for itself; its step is an inner step and ``1/H`` of an exchange.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from rich.console import Console

from _contenders import ByModule, Case, Contender
from _hosts import Host, HostsError, two_hosts
from _measured import disagreement
from _memory import PssSampler
from _models import BATCHES, PRESETS
from _options import one_of, positive_int
from _report import document, machine, machine_line, save, wide_console
from _steps import StepWorker, transposed
from _strategies_picture import draw
from _strategy_contenders import ACCUMULATED, STRATEGIES, Apart
from _tables import STRATEGY
from _worlds import World, stop_server
from shardwise.base.devices import keep_freed_memory

_FIRST_PORT = 29500


class StrategyWorker(StepWorker):
    """One rank of a contender on a host."""

    contenders: ClassVar[Mapping[str, type[Contender]]] = STRATEGIES

    def __init__(self, name: str, case: Case) -> None:
        keep_freed_memory()  # all contenders alike, as ``shardwise train`` does
        super().__init__(name, case)

    def meet(self) -> float:
        """End a round of DiLoCo; return the seconds that it took."""
        assert isinstance(self._contender, Apart)
        dist.barrier()
        start = time.perf_counter()
        self._contender.meet()
        return time.perf_counter() - start

    def accumulate(self, microbatches: int) -> float:
        """Take one step of several microbatches, whose gradients cross hosts with the last.

        Returns:
            The seconds that it took.
        """
        contender = self._contender
        assert isinstance(contender, ByModule)
        model: Any = contender.model
        dist.barrier()
        start = time.perf_counter()
        for i in range(microbatches):
            model.set_requires_all_reduce(i == microbatches - 1)
            contender.backward(contender.forward(self._batches[i % BATCHES]) / microbatches)
        contender.update()
        return time.perf_counter() - start


class Tournament:
    """All contenders over one link, taking turns.

    Args:
        case: what they train.
        hosts: where.
        options: of the command line.
        say: tells people what happens.
    """

    def __init__(
        self,
        case: Case,
        hosts: Sequence[Host],
        options: argparse.Namespace,
        say: Callable[[str], None],
    ) -> None:
        self._case, self._hosts, self._options, self._say = case, hosts, options, say
        self._names: list[str] = options.contenders
        self._worlds: dict[str, World] = {}
        self._found: dict[str, dict[str, Any]] = {}

    def play(self) -> dict[str, Any]:
        """Run all rounds; return the raw numbers of the case."""
        with ExitStack() as stack:
            for port, name in enumerate(self._names, _FIRST_PORT):
                self._say(f"starting {name}")
                world = World(
                    name,
                    self._case.ranks,
                    StrategyWorker,
                    name,
                    self._case,
                    hosts=self._hosts,
                    port=port,
                    env={"GLOO_SOCKET_IFNAME": "eth0"},
                )
                self._worlds[name] = stack.enter_context(world)
                self._found[name] = self._warm(name)
            for index in range(self._options.rounds):
                shift = index % len(self._names)
                for name in self._names[shift:] + self._names[:shift]:
                    self._say(f"round {index + 1} of {self._options.rounds}: {name}")
                    self._turn(name)
            for name in self._names:
                if name in ACCUMULATED:
                    self._accumulate(name)
        return {
            **asdict(self._case),
            "gbit": self._options.gbit,
            "hosts": len(self._hosts),
            "local_steps": self._options.local_steps,
            "numel": PRESETS[self._case.params].numel,
            "contenders": {name: found["turns"] for name, found in self._found.items()},
            "beside": self._found,
        }

    def _warm(self, name: str) -> dict[str, Any]:
        """Take the first steps, which nobody times, and watch memory meanwhile."""
        world = self._worlds[name]
        with PssSampler(world.pids, every=0.02) as sampler:
            warm = world.call("steps", self._options.warmup)
            if self._meets(name):
                world.call("meet")
        return {"turns": [], "memory": sampler.peaks, "warmup": transposed(warm)}

    def _turn(self, name: str) -> None:
        world, found = self._worlds[name], self._found[name]
        count = self._options.steps
        with self._counted(count) as sent:
            steps = transposed(world.call("steps", count))
        warm = [] if found["turns"] else found.pop("warmup")
        found["turns"].append({"warmup": warm, "steps": steps, "sent": sent})
        if self._meets(name):
            with self._counted(1) as sent:
                seconds = max(world.call("meet"))
            found.setdefault("meetings", []).append({"seconds": seconds, "sent": sent})

    def _accumulate(self, name: str) -> None:
        """Show what crosses in a step of one microbatch and in a step of several."""
        found = []
        for microbatches in (1, self._options.microbatches):
            with self._counted(1) as sent:
                seconds = max(self._worlds[name].call("accumulate", microbatches))
            found.append({"microbatches": microbatches, "seconds": seconds, "sent": sent})
        self._found[name]["accumulated"] = found

    @contextmanager
    def _counted(self, steps: int) -> Iterator[list[float]]:
        """Fill in the bytes that each host has sent meanwhile, per step."""
        sent: list[float] = []
        before = [host.sent() for host in self._hosts]
        yield sent
        sent += [(host.sent() - b) / steps for host, b in zip(self._hosts, before, strict=True)]

    def _meets(self, name: str) -> bool:
        return issubclass(STRATEGIES[name], Apart)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure over one link; return the document."""
    case = Case(options.ranks, options.params, tokens=options.tokens, seed=options.seed)

    def say(text: str) -> None:
        if console.is_terminal:
            console.print(f"  {options.gbit:g} Gbit/s, {text}", end="\r", soft_wrap=True)

    with two_hosts(options.gbit) as hosts:
        return document("strategies", [Tournament(case, hosts, options, say).play()])


def _files(text: str) -> list[Path]:
    paths = [Path(word) for word in text.split(",")]
    for path in paths:
        if not path.is_file():
            raise argparse.ArgumentTypeError(f"there is no file {str(path)!r}")
    return paths


def _speed(text: str) -> float:
    try:
        gbit = float(text)
    except ValueError:
        gbit = 0.0
    if not 0.001 <= gbit <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed in Gbit/s from 0.001 to 1000")
    return gbit


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    names = ", ".join(STRATEGIES)
    add("--gbit", type=_speed, default=1.0, help="speed of the link in Gbit/s (1)")
    add("--params", choices=tuple(PRESETS), default="5m", help="the model (5m)")
    add("--ranks", type=positive_int, default=4, help="on both hosts together, even (4)")
    add("--tokens", type=positive_int, default=256, help="tokens a rank and step (256)")
    add("--contenders", type=one_of(*STRATEGIES), default=[*STRATEGIES], help=names)
    add("--rounds", type=positive_int, default=5, help="turns of a contender (5)")
    add("--steps", type=positive_int, default=2, help="steps in a turn (2)")
    add("--warmup", type=positive_int, default=2, help="steps before (2)")
    add("--local-steps", type=positive_int, default=50, help="of a round of DiLoCo, H (50)")
    add("--microbatches", type=positive_int, default=4, help="of a step that accumulates (4)")
    add("--seed", type=int, default=0, help="of weights and tokens (0)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    add("--picture", type=Path, metavar="FILE", help="draw the picture here, as SVG or PNG")
    add(
        "--stored", type=_files, metavar="FILES", help="measure nothing: show these (a.json,b.json)"
    )
    options = made.parse_args()
    if options.ranks % 2:
        made.error(f"argument --ranks: {options.ranks} is not even")
    return options


def main() -> int:
    options = _options()
    console = wide_console()
    if options.stored:
        loaded = [json.loads(path.read_text()) for path in options.stored]
        content = {**loaded[0], "cases": [case for each in loaded for case in each["cases"]]}
    else:
        console.print(f"[bold]{machine_line(machine())}[/bold]", highlight=False, soft_wrap=True)
        try:
            content = measure(options, console)
        except HostsError as error:
            console.print(str(error), style="red")
            return 2
        if options.json:
            save(options.json, content)
    for table in STRATEGY.of_cases(content):
        table.show(console)
    if options.picture:
        draw(content, options.picture)
    return 1 if any(disagreement(case, STRATEGIES) for case in content["cases"]) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch.distributed as dist

from _contenders import ByModule, Case, Contender
from _hosts import Host, HostsError, two_hosts
from _measured import disagreement
from _memory import PssSampler
from _models import BATCHES, PRESETS
from _options import end, number, one_of, parser, positive_int, run
from _strategy_contenders import ACCUMULATED, STRATEGIES, Apart
from _turns import Pace, StepWorker, Turns, transposed
from _worlds import World
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


class Tournament(Turns):
    """All contenders over one link, taking turns."""

    def __init__(
        self, hosts: Sequence[Host], options: argparse.Namespace, say: Callable[[str], None]
    ) -> None:
        case = Case(options.ranks, options.params, tokens=options.tokens, seed=options.seed)
        pace = Pace(options.rounds, options.steps, options.warmup)
        super().__init__(case, options.contenders, pace, is_resident=True, say=say)
        self._hosts, self._microbatches = hosts, options.microbatches
        self.beside: dict[str, dict[str, Any]] = {}

    def start(self, name: str) -> World:
        """Start the processes of a contender on both hosts."""
        return World(
            *(name, self.case.ranks, StrategyWorker, name, self.case),
            hosts=self._hosts,
            port=_FIRST_PORT + self.names.index(name),
            env={"GLOO_SOCKET_IFNAME": "eth0"},
        )

    def turn(self, name: str, world: World, warmup: int) -> dict[str, Any]:
        """Let one contender take its steps of a round; watch memory in the first ones."""
        meets = issubclass(STRATEGIES[name], Apart)
        warm: list[list[dict[str, float]]] = []
        if warmup:
            with PssSampler(world.pids, every=0.02) as sampler:
                warm = transposed(world.call("steps", warmup))
                if meets:
                    world.call("meet")
            self.beside[name] = {"memory": sampler.peaks}
        with self._counted(self.pace.steps) as sent:
            steps = transposed(world.call("steps", self.pace.steps))
        if meets:
            with self._counted(1) as met:
                seconds = max(world.call("meet"))
            meeting = {"seconds": seconds, "sent": met}
            self.beside[name].setdefault("meetings", []).append(meeting)
        return {"warmup": warm, "steps": steps, "sent": sent}

    def end(self) -> None:
        """Show what crosses in a step of one microbatch and in a step of several."""
        for name in (name for name in self.names if name in ACCUMULATED):
            found = self.beside[name]["accumulated"] = []
            for microbatches in (1, self._microbatches):
                with self._counted(1) as sent:
                    seconds = max(self.worlds[name].call("accumulate", microbatches))
                found.append({"microbatches": microbatches, "seconds": seconds, "sent": sent})

    @contextmanager
    def _counted(self, steps: int) -> Iterator[list[float]]:
        """Fill in the bytes that each host has sent meanwhile, per step."""
        sent: list[float] = []
        before = [host.sent() for host in self._hosts]
        yield sent
        sent += [(host.sent() - b) / steps for host, b in zip(self._hosts, before, strict=True)]


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure over one link."""
    with two_hosts(options.gbit) as hosts:
        turns = Tournament(hosts, options, lambda text: say(f"{options.gbit:g} Gbit/s, {text}"))
        yield {
            **turns.play(),
            "gbit": options.gbit,
            "hosts": len(hosts),
            "local_steps": options.local_steps,
            "beside": turns.beside,
        }


def main() -> int:
    made = parser(__doc__, tokens=256, rounds=5, steps=2, warmup=2, seed=0)
    add = made.add_argument
    speed = number(0.001, 1000, "a speed in Gbit/s from 0.001 to 1000")
    add("--gbit", type=speed, default=1.0, help="speed of the link in Gbit/s (1)")
    add("--params", choices=tuple(PRESETS), default="5m", help="the model (5m)")
    add("--ranks", type=positive_int, default=4, help="on both hosts together, even (4)")
    names = ", ".join(STRATEGIES)
    add("--contenders", type=one_of(*STRATEGIES), default=[*STRATEGIES], help=names)
    add("--local-steps", type=positive_int, default=50, help="of a round of DiLoCo, H (50)")
    add("--microbatches", type=positive_int, default=4, help="of a step that accumulates (4)")
    options = made.parse_args()
    if options.ranks % 2:
        made.error(f"argument --ranks: {options.ranks} is not even")
    try:
        return run(
            *("strategies", options, lambda say: measure(options, say)),
            lambda case: disagreement(case, STRATEGIES),
        )
    except HostsError as error:
        print(error)
        return 2


if __name__ == "__main__":
    end(main)

"""Every strategy over two hosts and a link of a chosen speed, with torch's FSDP2 beside them.

    python benchmarks/strategies.py --gbit 1 --json 1.json

The hosts are namespaces of this machine, the link is shaped with ``tc tbf`` (see ``_hosts.py``; it
needs root). All contenders train the same model on the same tokens in one run and take turns, as
in ``step_time.py``: where gradients cross hosts, losses must agree to four decimals, or the exit
code is 1. Bytes are what the hosts' interfaces have counted. DiLoCo's inner steps and its exchange
are timed each for itself; its step is an inner step and ``1/H`` of an exchange.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from _charts import OURS, PEER, draw_bars
from _contenders import FSDP2, ByModule, Case, Contender, Floor, Ours, OursAhead
from _hosts import Host, HostsError, two_hosts
from _memory import PssSampler
from _models import BATCHES, PRESETS
from _options import Content, end, number, one_of, parser, positive_int, run
from _report import Table, compared
from _turns import StepWorker, Turns, disagreement, step_seconds, transposed, verdict
from _worlds import World
from shardwise import Wire
from shardwise.base.devices import keep_freed_memory
from shardwise.diloco import DiLoCo, WireFormat
from shardwise.frontends.strategies import REPLICATE, SHARD, ShardingPlan, Strategy, resolve

_FIRST_PORT = 29500
HOSTS = 2
#: Whose steps are also measured with accumulation.
ACCUMULATED = ("hybrid", "fsdp2-hybrid")
#: By how much losses may differ in the first steps if values are encoded.
NEAR = 0.05


class Spread(OursAhead):
    """As ``shardwise train`` shards by a strategy, a replica on each host if there are several.

    Attributes:
        strategy: how models are sharded.
        wire: of the link between hosts.
        kept_on_host: whether parameters stay cut over the ranks of a host between forward and
            backward.
        transport: a name, for one that was not chosen by itself.
    """

    strategy: ClassVar[Strategy]
    wire: ClassVar[Wire] = Wire()
    transport: ClassVar[str | None] = None
    kept_on_host: ClassVar[bool] = False

    def __init__(self, case: Case) -> None:
        self._plan: ShardingPlan = resolve(self.strategy, case.ranks, hosts=HOSTS)
        zero = 3 if self._plan.reshard_after_forward else 2
        super().__init__(dataclasses.replace(case, zero=zero))

    def mesh(self, case: Case) -> DeviceMesh:
        """Make the strategy's mesh."""
        self.whole = self._plan.make_mesh(case.device)
        return self._plan.sharding_mesh(self.whole)

    def options(self) -> dict[str, Any]:
        """Return the wire, and the transport."""
        wire = {} if self.wire.is_plain else {"wire": self.wire}
        return wire | {"transport": self.transport}

    def reshard(self, case: Case) -> bool | int:
        """Keep parameters on the host, or free them as the strategy says."""
        return case.ranks // HOSTS if self.kept_on_host else super().reshard(case)


class Apart(Spread):
    """DiLoCo: each host a replica that trains by itself."""

    strategy = Strategy.DILOCO
    exchanges = False
    exchange: ClassVar[WireFormat]

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        # Rounds end when they are asked to: what an exchange takes is measured by itself.
        self.diloco = self.optimizer = DiLoCo(
            self.model,
            self.optimizer,
            every=2**31,
            group=self.whole.get_group(REPLICATE),
            wire=self.exchange,
        )

    def meet(self) -> None:
        """End the round: exchange pseudo-gradients and take the outer step."""
        self.diloco.flush()


class OwnLoop(Ours):
    """``shardwise.fully_shard`` in a user's own loop, which gathers nothing ahead in forward."""

    name = "full-own-loop"
    title = "FULL_SHARD, own loop"


class FSDP2Hybrid(FSDP2):
    """Torch's, on a mesh of two dimensions."""

    name = "fsdp2-hybrid"
    title = "torch FSDP2, hybrid"

    def mesh(self, case: Case) -> DeviceMesh:
        """Replicate over hosts, shard inside."""
        shape = (HOSTS, case.ranks // HOSTS)
        return init_device_mesh(case.device, shape, mesh_dim_names=(REPLICATE, SHARD))


class FSDP2Full(FSDP2):
    """Torch's, over all ranks."""

    name = "fsdp2-full"
    title = "torch FSDP2, full"


def _spread(name: str, title: str, by: Strategy, **settings: Any) -> type[Contender]:
    """Make a contender that shards by a strategy."""
    return type(title, (Spread,), {"name": name, "title": title, "strategy": by, **settings})


def _apart(name: str, title: str, kind: WireFormat) -> type[Contender]:
    """Make a contender whose exchanges are in a format."""
    return type(title, (Apart,), {"name": name, "title": title, "exchange": kind})


#: What losses are with a wire is shown over many steps elsewhere: here they must be near others.
_BF16: dict[str, Any] = {"wire": Wire(gather="bf16", reduce="bf16"), "tolerance": NEAR}
_INT8: dict[str, Any] = {
    "wire": Wire(gather="int8", reduce="int8", error_feedback=True),
    "tolerance": NEAR,
}
_KEPT = {"kept_on_host": True}
FULL, HYBRID = Strategy.FULL_SHARD, Strategy.HYBRID_SHARD
STRATEGIES: dict[str, type[Contender]] = {
    contender.name: contender
    for contender in (
        _spread("no-shard", "NO_SHARD", Strategy.NO_SHARD),
        _spread("grad-op", "SHARD_GRAD_OP", Strategy.SHARD_GRAD_OP),
        _spread("full", "FULL_SHARD", FULL),
        _spread("full-direct", "FULL_SHARD, each rank to each", FULL, transport="c10d"),
        _spread("hybrid", "HYBRID_SHARD", HYBRID),
        _spread("hybrid-zero2", "_HYBRID_SHARD_ZERO2", Strategy.HYBRID_SHARD_ZERO2),
        _spread("full-kept", "FULL_SHARD, kept on host", FULL, **_KEPT),
        _spread("full-int8", "FULL_SHARD, int8, kept", FULL, **_INT8, **_KEPT),
        _spread("hybrid-bf16", "HYBRID_SHARD, bf16", HYBRID, **_BF16),
        _spread("hybrid-int8", "HYBRID_SHARD, int8", HYBRID, **_INT8),
        _apart("diloco", "DiLoCo, fp32", WireFormat.FP32),
        _apart("diloco-int8", "DiLoCo, int8", WireFormat.INT8),
        OwnLoop,
        FSDP2Full,
        FSDP2Hybrid,
        Floor,
    )
}


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


def play(
    hosts: Sequence[Host], options: argparse.Namespace, say: Callable[[str], None]
) -> dict[str, Any]:
    """Let all contenders take turns over the link between two hosts; return the raw numbers."""
    case = Case(options.ranks, options.params, tokens=options.tokens, seed=options.seed)
    beside: dict[str, dict[str, Any]] = {name: {} for name in options.contenders}

    def start(name: str) -> World:
        return World(
            *(name, case.ranks, StrategyWorker, name, case),
            hosts=hosts,
            port=_FIRST_PORT + options.contenders.index(name),
            env={"GLOO_SOCKET_IFNAME": "eth0"},
        )

    def counted(world: World, method: str, *arguments: Any) -> tuple[Any, list[float]]:
        """Call a method; return what it did and the bytes that each host has sent meanwhile."""
        before = [host.sent() for host in hosts]
        found = world.call(method, *arguments)
        return found, [host.sent() - b for host, b in zip(hosts, before, strict=True)]

    def turn(name: str, world: World, is_new: bool) -> dict[str, Any]:
        meets = issubclass(STRATEGIES[name], Apart)
        warm: list[list[dict[str, float]]] = []
        if is_new:
            with PssSampler(world.pids, every=0.02) as sampler:
                warm = transposed(world.call("steps", options.warmup))
                if meets:
                    world.call("meet")
            beside[name]["memory"] = sampler.peaks
        steps, sent = counted(world, "steps", options.steps)
        if meets:
            seconds, met = counted(world, "meet")
            meeting = {"seconds": max(seconds), "sent": met}
            beside[name].setdefault("meetings", []).append(meeting)
        each = [nbytes / options.steps for nbytes in sent]
        return {"warmup": warm, "steps": transposed(steps), "sent": each}

    def show(text: str) -> None:
        say(f"{options.gbit:g} Gbit/s, {text}")

    with Turns(options.contenders, start, say=show) as turns:
        found = turns.play(options.rounds, turn)
        for name in (name for name in options.contenders if name in ACCUMULATED):
            beside[name]["accumulated"] = []
            for microbatches in (1, options.microbatches):
                seconds, sent = counted(turns.worlds[name], "accumulate", microbatches)
                step = {"microbatches": microbatches, "seconds": max(seconds), "sent": sent}
                beside[name]["accumulated"].append(step)
    return {
        **case.facts(),
        "contenders": found,
        "gbit": options.gbit,
        "hosts": len(hosts),
        "local_steps": options.local_steps,
        "beside": beside,
    }


def seconds_by_round(case: Content, name: str) -> list[float]:
    """Return a contender's step time in each round, with DiLoCo's share of an exchange."""
    own = step_seconds(case, name)
    met = case["beside"][name].get("meetings", [{"seconds": 0.0}] * len(own))
    pairs = zip(own, met, strict=True)
    return [inner + each["seconds"] / case["local_steps"] for inner, each in pairs]


def wire_bytes(case: Content, name: str) -> float:
    """Return the bytes that a host sends in a step, DiLoCo's share of an exchange included."""
    own = median(max(turn["sent"]) for turn in case["contenders"][name])
    if meetings := case["beside"][name].get("meetings"):
        own += median(max(each["sent"]) for each in meetings) / case["local_steps"]
    return float(own)


def table(case: Content) -> Table:
    """Show a case."""
    seconds = {name: seconds_by_round(case, name) for name in case["contenders"]}

    def utilization(name: str) -> str:
        if "floor" not in seconds:
            return ""
        pairs = zip(seconds[name], seconds["floor"], strict=True)
        return f"{100 * median(floor / mine for mine, floor in pairs):.0f} %"

    tokens = case["ranks"] * case["tokens"]
    return compared(
        f"{case['gbit']:g} Gbit/s, {case['hosts']} hosts of {case['ranks'] // case['hosts']} "
        f"ranks, {case['numel'] / 1e6:.1f} M parameters, {case['dtype']}, {case['tokens']} tokens "
        "a rank",
        ("strategy", "step s", 3),
        seconds,
        {name: STRATEGIES[name].title for name in seconds},
        peers={"x FSDP2 full": "fsdp2-full", "x FSDP2 hybrid": "fsdp2-hybrid"},
        beside={
            "tokens/s": lambda name: f"{tokens / median(seconds[name]):.0f}",
            "utilization": utilization,
            "MB/step": lambda name: f"{wire_bytes(case, name) / 1e6:.2f}",
            "memory MB": lambda name: f"{max(case['beside'][name]['memory']) / 1e6:.0f}",
        },
        notes=[
            f"{verdict(case, STRATEGIES)} (DiLoCo and compute only: the first; with int8 and bf16 "
            "to 0.05)",
            f"{len(next(iter(seconds.values())))} rounds; utilization: step of compute only over "
            "this step; MB: sent by the busier host, as its interface counts; memory: highest PSS "
            "of a rank",
            *(note for name in seconds for note in _notes(case, name)),
        ],
    )


def _notes(case: Content, name: str) -> Iterator[str]:
    if met := case["beside"][name].get("meetings"):
        seconds = median(each["seconds"] for each in met)
        sent = median(max(each["sent"]) for each in met)
        yield (
            f"{STRATEGIES[name].title}: an inner step {median(step_seconds(case, name)):.3f} s, "
            f"an exchange {seconds:.3f} s and {sent / 1e6:.2f} MB, shared by H = "
            f"{case['local_steps']} steps"
        )
    if steps := case["beside"][name].get("accumulated"):
        sizes = (f"{max(s['sent']) / 1e6:.2f} MB with {s['microbatches']}" for s in steps)
        yield f"{STRATEGIES[name].title}, a step of several microbatches: {', '.join(sizes)}"


def draw_strategies(documents: Sequence[Content], path: Path) -> None:
    """Draw the steps of strategies, each link in a panel."""
    panels = []
    cases = [case for content in documents for case in content["cases"]]
    for case in sorted(cases, key=lambda case: -case["gbit"]):
        middles = {n: median(seconds_by_round(case, n)) for n in case["contenders"]}
        floor = middles.pop("floor", 0.0)
        bars = {
            STRATEGIES[name].title: (middle, PEER if name.startswith("fsdp2") else OURS)
            for name, middle in middles.items()
        }
        panels.append((f"{case['gbit']:g} Gbit/s, {case['tokens']:,} tokens a rank", bars, floor))
    draw_bars(path, "Training step over two hosts, seconds (dashed: compute only)", panels)


def main() -> int:
    made = parser(__doc__, tokens=256, rounds=5, steps=2, warmup=2, seed=0, picture=None)
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
        with two_hosts(options.gbit) as hosts:
            return run(
                *("strategies", options, lambda say: [play(hosts, options, say)]),
                lambda cases: [*map(table, cases)],
                lambda case: disagreement(case, STRATEGIES),
                draw_strategies,
            )
    except HostsError as error:
        print(error)
        return 2


if __name__ == "__main__":
    end(main)

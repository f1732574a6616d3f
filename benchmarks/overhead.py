"""What sharding costs where there is nothing to move: microseconds a group and step.

    python benchmarks/overhead.py --ranks 1,2

The model is 64 linear layers of 8 x 8, a group each, so its arithmetic and its bytes are next to
nothing, and what remains is the runtime: hooks, Python, and the fixed price of a collective. The
same forward and backward without sharding is taken off. No optimizer: it is not the runtime's.

A second table has the seconds that ``fully_shard`` takes for a model of many such groups.

On one rank, a third has the processor time of a group, its layer included, with all contenders in
turns in one process, and of the least that any such runtime asks of torch. On several, a third has
the calls of Python functions of the runtime in a step of three groups, and the files that they are
in, from building on.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from _options import contender_env, end, parser, positive_int, run
from _report import Table, compared
from _turns import Turns, transposed
from _worlds import World
from shardwise.base.devices import synchronize

TITLES = {"ours": "shardwise", "fsdp2": "torch FSDP2"}
CONTENDERS = (*TITLES, "floor")
#: Contenders in one process, and what runs beside them.
BESIDE = {**TITLES, "least": "what torch is asked for", "floor": "unsharded"}
#: Where the files of a runtime are.
FILES = {"ours": "/shardwise/", "fsdp2": "/torch/distributed/fsdp/_fully_shard/"}
WIDTH = 8


class OverheadWorker:
    """One rank of a contender, taking steps of a model of tiny groups."""

    def __init__(self, name: str, groups: int, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self._name, self._device = name, torch.device(device)
        self._model = self._layers(groups)
        self._shard(self._model)
        self._input = torch.ones(2, WIDTH, device=device)

    def build(self, groups: int) -> float:
        """Shard a new model of ``groups`` layers; return the seconds that takes."""
        model = self._layers(groups)
        gc.collect()  # what the last one left
        dist.barrier()
        start = time.perf_counter()
        self._shard(model)
        return time.perf_counter() - start

    def steps(self, count: int) -> list[float]:
        """Take steps; return the seconds of each."""
        seconds = []
        for _ in range(count):
            dist.barrier()
            synchronize(self._device)
            start = time.perf_counter()
            self._model(self._input).sum().backward()
            synchronize(self._device)
            seconds.append(time.perf_counter() - start)
            self._model.zero_grad()
        return seconds

    def calls(self) -> dict[str, int]:
        """Count the calls of functions in files of the runtime, and those files.

        A generator counts each time that it goes on, and so does a comprehension, once.
        """
        files: set[str] = set()
        counts = {}

        def count(part: str, run: Callable[[], Any]) -> Any:
            counts[part] = 0

            def see(frame: FrameType, event: str, _: object) -> None:
                code = frame.f_code
                if event == "call" and code.co_name != "<module>":
                    is_its_own = FILES[self._name] in code.co_filename
                    counts[part] += is_its_own
                    files.update([code.co_filename] * is_its_own)

            sys.setprofile(see)
            try:
                return run()
            finally:
                sys.setprofile(None)

        model = self._layers(3, bias=False)
        count("build", lambda: self._shard(model))
        for _ in range(4):  # the last one counts; files of all do
            loss = count("forward", lambda: model(self._input).sum())
            count("backward", loss.backward)
            model.zero_grad()
        return {**counts, "files": len(files)}

    def _layers(self, count: int, bias: bool = True) -> nn.Sequential:
        options: dict[str, Any] = {"bias": bias, "device": self._device}
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, **options) for _ in range(count)))

    def _shard(self, model: nn.Sequential) -> None:
        shard(self._name, model)


class TogetherWorker:
    """One rank with the models of all contenders, for ZeRO-3 and ZeRO-2."""

    def __init__(self, groups: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self._input = torch.ones(2, WIDTH)
        self._models = {}
        for zero in (3, 2):
            for name in BESIDE:
                model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(groups)))
                shard(name, model, reshard_after_forward=zero == 3)
                self._models[f"{name} {zero}"] = model

    def rounds(self, count: int) -> dict[str, list[float]]:
        """Let all take turns of three steps; return the processor seconds of their median steps."""
        found: dict[str, list[float]] = {name: [] for name in self._models}
        for _ in range(count):
            for name, model in self._models.items():
                found[name].append(median(self._step(model) for _ in range(3)))
        return found

    def _step(self, model: nn.Module) -> float:
        start = time.process_time()
        model(self._input).sum().backward()
        seconds = time.process_time() - start
        model.zero_grad()
        return seconds


def shard(name: str, model: nn.Sequential, **options: Any) -> None:
    """Shard each layer of a model as a contender does."""
    if name == "floor":
        return
    if name == "least":
        for layer in model:
            _ask_torch(layer, **options)
        return
    package = "shardwise" if name == "ours" else "torch.distributed.fsdp"
    fully_shard = importlib.import_module(package).fully_shard
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model)


def _ask_torch(layer: nn.Module, reshard_after_forward: bool) -> None:
    """Do to a layer what no runtime like this does without, on one rank, and check nothing.

    Two hooks of the module, a view of its input and two hooks in the graph; full parameters and
    ``DTensor``s in turns; gradients wrapped as ``DTensor``s.
    """
    parameters = layer._parameters
    mesh = init_device_mesh("cpu", (1,))
    shards: dict[str, Any] = {
        name: nn.Parameter(distribute_tensor(each.detach(), mesh, [Shard(0)]))
        for name, each in layer.named_parameters()
    }
    fulls = {name: nn.Parameter(each.to_local().detach()) for name, each in shards.items()}
    put_shards, put_fulls = partial(parameters.update, shards), partial(parameters.update, fulls)

    def end_backward(grads: object) -> None:
        with torch.no_grad():
            for name, full in fulls.items():
                local: Any = full.grad
                spec = shards[name]._spec
                full.grad = None
                shards[name].grad = DTensor.__new__(DTensor, local, spec, requires_grad=False)
        put_shards()

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        put_fulls()
        marked = args[0].view_as(args[0])
        if marked.grad_fn is not None:
            marked.grad_fn.register_prehook(end_backward)
        return (marked,), kwargs

    def after_forward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if reshard_after_forward:
            put_shards()
        output.register_hook(lambda grad: put_fulls())  # type: ignore[no-untyped-call]

    layer.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True)
    layer.register_forward_hook(after_forward, always_call=True)


def play(ranks: int, options: argparse.Namespace, device: str = "cpu") -> dict[str, Any]:
    """Let all contenders of one world size take turns; return the raw numbers."""
    builds: dict[str, list[float]] = {name: [] for name in TITLES}

    def start(name: str) -> World:
        arguments = (name, ranks, OverheadWorker, name, options.groups, device)
        return World(*arguments, device=device, env=contender_env(name, options.transport))

    def turn(name: str, world: World, is_new: bool) -> list[float]:
        if is_new:
            world.call("steps", 5)
        return [max(step) for step in transposed(world.call("steps", options.steps))]

    with Turns(CONTENDERS, start) as turns:
        seconds = turns.play(options.rounds, turn)
        for _ in range(options.rounds):  # last, since what they leave slows steps down
            for name in builds:
                builds[name].append(max(turns.worlds[name].call("build", options.build)))
        calls = {name: turns.worlds[name].call("calls")[0] for name in TITLES}
    together: dict[str, Any] = {}
    if ranks == 1 and device == "cpu":
        with World("together", ranks, TogetherWorker, options.groups) as world:
            world.call("rounds", 2)
            (together,) = world.call("rounds", 6 * options.rounds - 1)
    return {
        "ranks": ranks,
        "groups": options.groups,
        "seconds": seconds,
        "build": {"groups": options.build, "seconds": builds},
        "calls": calls,
        "together": together,
    }


def overheads(case: dict[str, Any], name: str) -> list[float]:
    """Return the microseconds per group beyond the floor, for each round."""
    return [
        1e6 * (median(turn) - median(floor)) / case["groups"]
        for turn, floor in zip(case["seconds"][name], case["seconds"]["floor"], strict=True)
    ]


def tables(cases: list[dict[str, Any]]) -> list[Table]:
    """Make a table of steps and one of building, with rows for each world size and contender."""
    if not cases:
        return []
    steps, builds = {}, {}
    for case in cases:
        for name in TITLES:
            row = f"{name} {case['ranks']}"
            steps[row] = overheads(case, name)
            builds[row] = case["build"]["seconds"][name]
    shown = (
        (
            f"Overhead of a group and step, {cases[0]['groups']} tiny groups (µs, over the "
            "unsharded step)",
            *("µs a group", 0, steps),
        ),
        (f"fully_shard of {cases[0]['build']['groups']} tiny groups (s)", "s", 2, builds),
    )
    found = [
        compared(
            title,
            ("contender", unit, digits),
            values,
            {row: TITLES[row.split()[0]] for row in values},
            peers={"x FSDP2": lambda row: f"fsdp2 {row.split()[1]}"},
            beside={"ranks": lambda row: row.split()[1]},
        )
        for title, unit, digits, values in shown
    ]
    return found + _together(cases) + _calls(cases)


def _together(cases: list[dict[str, Any]]) -> list[Table]:
    """Make a table of the processor time of a group where all take turns in one process."""
    return [
        compared(
            f"A group and its layer on one rank, {case['groups']} tiny groups, all in one process",
            ("contender", "µs of the processor", 0),
            {
                name: [1e6 * each / case["groups"] for each in seconds]
                for name, seconds in case["together"].items()
            },
            {name: BESIDE[name.split()[0]] for name in case["together"]},
            peers={"x FSDP2": lambda row: f"fsdp2 {row.split()[1]}"},
            beside={"ZeRO": lambda row: row.split()[1]},
        )
        for case in cases
        if case.get("together")
    ]


def _calls(cases: list[dict[str, Any]]) -> list[Table]:
    """Make a table of the calls of Python functions in a step, and of the files they are in."""
    parts = ("files", "build", "forward", "backward")
    table = Table("Files of the runtime, and calls in them, three groups", ["contender", "ranks"])
    table.columns += parts
    for case in cases:
        for name, counts in case.get("calls", {}).items():
            found = (str(counts[part]) for part in parts)
            table.rows.append([TITLES[name], str(case["ranks"]), *found])
    return [table] if table.rows else []


def main() -> int:
    made = parser(__doc__, ranks="1,2", rounds=7, steps=20, transport="auto")
    add = made.add_argument
    add("--groups", type=positive_int, default=64, help="tiny groups in the model (64)")
    add("--build", type=positive_int, default=1000, help="groups of the model to shard (1000)")
    options = made.parse_args()
    cases = (play(ranks, options) for ranks in options.ranks)
    return run("overhead", options, lambda say: cases, tables)


if __name__ == "__main__":
    end(main)

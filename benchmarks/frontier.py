"""Compare what wires and DiLoCo cost in loss, and save in bytes: the frontier of both.

    python benchmarks/frontier.py --json FILE --picture docs/images/frontier.svg

Four hosts train the small decoder of ``diloco_sweep.py`` for every seed, from random weights, on
the same text: synchronously over every wire, and with DiLoCo. Gradients and parameters pass through
the codecs and sums of the library, between hosts that take turns in this process. Beside them,
torch's DistributedDataParallel trains in processes of its own, without a hook and with its bf16
compression hook. Without, it adds up the same numbers in another order: how far it ends from the
first contender tells what a difference between losses means.

Bytes are those that a host sends per step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from _ddp_lm import train_in_ddp
from _frontier_picture import draw
from _frontier_tables import frontier_tables
from _loopback import Loopback
from _options import positive_int
from _report import announce, document, save
from diloco_sweep import Contender, Settings, Training, play
from shardwise import Wire
from shardwise.app.recipes.text.data import load_text
from shardwise.diloco.average import Average
from shardwise.insight.schema.sharding import parse_wires
from shardwise.transport.base import Call, Kind, Label, Reduce
from shardwise.transport.codecs import Room, codec_of, decode, encode
from shardwise.transport.encoded import EncodedSums, Encoding, Tally, chunks_of
from shardwise.transport.memory import Blocks
from shardwise.transport.runner import SteppedWork
from shardwise.transport.wire import WireFormat

#: Synchronous trainings: hybrid sharding, whose gradients are all-reduced between hosts, and full.
HYBRID, FULL, DDP = "hybrid", "full", "ddp"
WIRES = (
    f"{HYBRID}:fp32",
    f"{DDP}:fp32",
    f"{HYBRID}:reduce=int8,error-feedback",
    f"{FULL}:gather=int8,reduce=int8,error-feedback",
    f"{HYBRID}:reduce=bf16",
    f"{DDP}:bf16",
    f"{HYBRID}:reduce=fp8,error-feedback",
    f"{HYBRID}:reduce=int8",
)
_ROUNDS = {50: "outer_lr=0.8,warmup=30", 20: "outer_lr=0.8,every=20,warmup=75"}
_ROUNDS[10] = "outer_lr=0.8,every=10,warmup=150"
DILOCO = (
    _ROUNDS[50],
    f"{_ROUNDS[50]},wire=int8",
    f"{_ROUNDS[50]},wire=int4",
    f"{_ROUNDS[50]},wire=ternary",
    f"{_ROUNDS[20]},wire=int8",
    f"{_ROUNDS[10]},wire=int8",
    f"{_ROUNDS[10]},wire=ternary",
)


class Hosts:
    """Hosts that train one model together for every seed, with a wire between them.

    Args:
        strategy: ``hybrid``: a host keeps all parameters, and gradients are all-reduced; ``full``:
            each keeps a shard, which is gathered once a step, and gradients are reduce-scattered.
        wire: what is sent.
        settings: of the training.
        elements: of one model.
    """

    def __init__(self, strategy: str, wire: Wire, settings: Settings, elements: int) -> None:
        self._strategy, self._wire = strategy, wire
        self._ranks = settings.replicas
        self._sides = [Loopback.among(self._ranks) for _ in range(settings.seeds)]
        self._room = Room(torch.device("cpu"))
        self._gathered = 0
        self._errors: torch.Tensor | None = None
        if wire.error_feedback:
            self._errors = torch.zeros(settings.seeds, self._ranks, elements)

    @property
    def bytes_sent(self) -> int:
        """The bytes that a host has sent for one seed."""
        return self._sides[0][0].bytes_sent + self._gathered

    def gather(self, parameters: torch.Tensor) -> torch.Tensor:
        """Return what hosts compute with: parameters as they arrive, ``(models, elements)``."""
        if self._strategy == HYBRID:
            return parameters
        codec = codec_of(WireFormat(self._wire.gather))
        shard = -(-parameters.shape[1] // self._ranks)
        row = torch.empty(codec.nbytes(shard), dtype=torch.uint8)
        self._gathered += (self._ranks - 1) * row.numel()
        found = torch.empty_like(parameters)
        for values, out in zip(parameters, found, strict=True):
            for part, part_out in zip(values.split(shard), out.split(shard), strict=True):
                piece = codec.piece(row, part.numel())
                encode(codec, part, piece, self._room)
                decode(codec, piece, part_out, self._room)
        return found

    def reduce(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the mean gradients of each seed.

        Args:
            gradients: ``(seeds, hosts, elements)``.

        Returns:
            ``(seeds, elements)``.
        """
        errors = [None] * len(gradients) if self._errors is None else list(self._errors)
        reduce = self._all_reduce if self._strategy == HYBRID else self._reduce_scatter
        return torch.stack(
            [
                reduce(each, sides, [None] * self._ranks if error is None else list(error))
                for each, sides, error in zip(gradients, self._sides, errors, strict=True)
            ]
        )

    def _all_reduce(
        self,
        gradients: torch.Tensor,
        sides: Sequence[Loopback],
        errors: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        wire = WireFormat(self._wire.reduce)
        begun = [
            Average(each, side, wire, "the gradient", error)
            for each, side, error in zip(gradients, sides, errors, strict=True)
        ]
        for average in begun:
            average.advance()
        means = [average.wait() for average in begun]
        return means[0]  # equal; each also keeps what it has lost

    def _reduce_scatter(
        self,
        gradients: torch.Tensor,
        sides: Sequence[Loopback],
        errors: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        encoding = Encoding(codec_of(WireFormat(self._wire.reduce)), self._wire.reduce, Tally())
        numel = gradients.shape[1]
        (chunk,) = chunks_of(encoding, [numel], self._ranks)
        mean, blocks = torch.empty(self._ranks * chunk), Blocks(torch.device("cpu"))
        label = Label("the gradient")
        runs = []
        for gradient, side, error in zip(gradients, sides, errors, strict=True):
            own = [mean[side.rank * chunk :][:chunk]]
            call = Call(Kind.REDUCE_SCATTER, [gradient], own, Reduce.AVG, label)
            sums = EncodedSums(encoding, side, call, self._room, blocks, [error])
            runs.append(SteppedWork(sums.steps()))
        for run in runs:
            run.wait()
        return mean[:numel]


def play_with_wire(
    contender: Contender, strategy: str, wire: Wire, settings: Settings, text: Any
) -> dict[str, Any]:
    """Train synchronously over a wire; return the figures."""
    began = time.perf_counter()
    training = Training(contender, settings, settings.replicas, text)
    model = training.model
    hosts = Hosts(strategy, wire, settings, model.read().shape[1])
    for step in range(settings.steps):
        parameters = model.read()
        model.write(hosts.gather(parameters))
        training.backward(step)
        model.write(parameters)
        gradients = model.read_gradients()
        means = hosts.reduce(gradients.view(settings.seeds, settings.replicas, -1))
        model.write_gradients(means.repeat_interleave(settings.replicas, dim=0))
        training.update(step)
    return {
        "losses": training.judge()[:: settings.replicas],
        "sent": hosts.bytes_sent / settings.steps,
        "seconds": time.perf_counter() - began,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train all contenders; return the case."""
    console = announce()
    settings = Settings(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    )
    text = load_text((), settings.length)
    contender = Contender(lr=options.lr)
    case: dict[str, Any] = {
        "settings": dataclasses.asdict(settings) | {"lr": options.lr},
        "contenders": {},
    }
    for name in (*options.wires, *options.diloco):
        strategy, _, wire = name.partition(":")
        if strategy == DDP:
            found = train_in_ddp(contender, settings, wire)
        elif strategy in (HYBRID, FULL):
            found = play_with_wire(contender, strategy, parse_wires(wire).common, settings, text)
        else:
            found = play(Contender.parse(f"lr={options.lr},{name}"), settings, text)
            found["sent"] /= settings.replicas * settings.steps
        case["contenders"][name] = found
        console.print(f"{name}: {found}", highlight=False, soft_wrap=True)
        if options.json:
            save(options.json, document("frontier", [case]))
    return case


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--replicas", type=positive_int, default=4, help="hosts (4)")
    add("--seeds", type=positive_int, default=3, help="of weights and text (3)")
    add("--steps", type=positive_int, default=1500, help="of each host (1500)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (2e-3)")
    add("--batch", type=positive_int, default=2, help="sequences of a host and step (2)")
    add("--length", type=positive_int, default=64, help="tokens of a sequence (64)")
    add("--wires", nargs="*", default=WIRES, help="strategy:wire of synchronous trainings")
    add("--diloco", nargs="*", default=DILOCO, help="contenders, as for diloco_sweep.py")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    add("--stored", type=Path, metavar="FILE", help="show these raw numbers, and train nothing")
    add("--picture", type=Path, metavar="FILE", help="draw the frontier here, .svg or .png")
    return made.parse_args()


def main() -> int:
    options = _options()
    torch.set_num_threads(1)  # what is computed is small
    if options.stored:
        content = json.loads(options.stored.read_text())
    else:
        content = document("frontier", [measure(options)])
    console = announce()
    for table in frontier_tables(content):
        table.show(console)
    if options.picture:
        draw(content, options.picture)
    console.print(content["command"], highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare settings of DiLoCo in one process, on models small enough to train a dozen at once.

    python benchmarks/diloco_sweep.py --contenders wire=fp32 wire=int8,momentum=0

Every contender trains four replicas of a small decoder (133,000 parameters in two layers) for every
seed, from random weights, on the text of ``make train``; all at once, as stacks of matrices. Beside
it the same optimizer trains synchronously on the same sequences. Exchanges are those of
:class:`shardwise.diloco.DiLoCo`, among replicas that take turns. The loss is of the outer
parameters after the last round, on text that was held out.

A contender is what differs from :class:`Contender`, such as ``momentum=0.5,warmup=30``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from _diloco_tables import sweep_tables
from _loopback import Loopback
from _options import positive_int
from _report import announce, document, save
from _stacked_lm import Shape, StackedLM
from shardwise.app.recipes.core.build import learning_rate
from shardwise.app.recipes.text.data import VOCAB_SIZE, Sequences, load_text
from shardwise.diloco import OuterSGD
from shardwise.diloco.average import Average
from shardwise.diloco.settings import keeps_errors
from shardwise.insight.schema.training import OptimizerConfig
from shardwise.optim import Muon
from shardwise.transport.wire import WireFormat

JUDGED = 256  # sequences
CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Contender:
    """What can differ between contenders.

    Attributes:
        inner: the inner optimizer, ``adamw`` or ``muon``.
        lr: its peak learning rate.
        inner_warmup: steps over which that rises.
        wire: the format of pseudo-gradients.
        every: inner steps of a round.
        outer_lr: of the outer steps.
        momentum: of the outer steps.
        nesterov: 1 for Nesterov momentum, or 0.
        warmup: rounds over which the momentum rises.
        fade: rounds at the end over which it falls to 0.
        start: steps at the beginning after which replicas average their parameters each time.
        ramp: rounds begin short: each is as long as all steps before it, divided by this, but at
            least a step, and at most ``every``; 0 for rounds of one length.
        late: 1 to apply each average a round late, while training continues, or 0.
    """

    inner: str = "adamw"
    lr: float = 4e-3
    inner_warmup: int = 20
    wire: str = "fp32"
    every: int = 50
    outer_lr: float = 0.7
    momentum: float = 0.9
    nesterov: int = 1
    warmup: int = 0
    fade: int = 0
    start: int = 0
    ramp: int = 0
    late: int = 0

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Read ``name=value`` separated by commas."""
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(kinds)}")
            given[name] = kinds[name](value)
        made = cls(**given)
        _ = made.outer, WireFormat(made.wire)
        return made

    @property
    def outer(self) -> OuterSGD:
        """The outer optimizer."""
        return OuterSGD(
            lr=self.outer_lr,
            momentum=self.momentum,
            nesterov=bool(self.nesterov),
            warmup=self.warmup,
        )

    def __str__(self) -> str:
        return ",".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all contenders have in common.

    Attributes:
        replicas: that meet.
        seeds: so many of weights and text, from 0.
        steps: of each replica.
        batch: sequences of a replica and step.
        length: tokens of a sequence.
    """

    replicas: int
    seeds: int
    steps: int
    batch: int
    length: int


class Training:
    """Models of all seeds, ``copies`` of each, and their inner optimizer.

    Args:
        contender: settings of the inner optimizer.
        settings: of all.
        copies: models of each seed; together they see the sequences of all replicas.
        text: where they come from.
        part: with one copy only, the replica whose sequences it sees; by default all of them.

    Attributes:
        model: all models.
        forward: returns their losses; by default the model.
    """

    def __init__(
        self,
        contender: Contender,
        settings: Settings,
        copies: int,
        text: Any,
        part: int | None = None,
    ) -> None:
        self._settings, self._copies, self._part = settings, copies, part
        self._batch = settings.batch
        if part is None:
            self._batch *= settings.replicas // copies
        seeds = [seed for seed in range(settings.seeds) for _ in range(copies)]
        self.model = StackedLM(Shape(VOCAB_SIZE, settings.length), seeds)
        self.forward: Callable[[torch.Tensor], torch.Tensor] = self.model
        config = OptimizerConfig(lr=contender.lr, warmup=contender.inner_warmup)
        self._lr = learning_rate(config, settings.steps)
        self._optimizer = _optimizer(contender, self.model)
        self._data = [Sequences(text.train, settings.length, s) for s in range(settings.seeds)]
        self._held_out = text.validation

    def step(self, step: int) -> None:
        """Take an inner step; the first is 0."""
        self.backward(step)
        self.update(step)

    def backward(self, step: int) -> None:
        """Compute the gradients of an inner step; the first is 0."""
        settings = self._settings
        first = (step * settings.replicas + (self._part or 0)) * settings.batch
        rows = [
            torch.from_numpy(each.read(first + copy * self._batch, self._batch))
            for each in self._data
            for copy in range(self._copies)
        ]
        self.forward(torch.stack(rows)).sum().backward()

    def update(self, step: int) -> None:
        """Clip the gradients of an inner step, and let the optimizer use them."""
        self.model.clip_(CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr(step + 1)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def judge(self) -> list[float]:
        """Return the loss of each model on text that was held out."""
        length = self._settings.length
        room = len(self._held_out) - length - 1
        total = torch.zeros(self.model.count)
        for first in range(0, JUDGED, 16):
            starts = [room * each // (JUDGED - 1) for each in range(first, first + 16)]
            rows = torch.stack(
                [torch.from_numpy(self._held_out.read(start, length + 1)) for start in starts]
            )
            total += self.model(rows.expand(self.model.count, -1, -1))
        return [float(each) * 16 / JUDGED for each in total]


class Replicas:
    """The outer optimization of all seeds.

    Args:
        contender: its settings.
        settings: of all.
        model: the replicas of all seeds.
    """

    def __init__(self, contender: Contender, settings: Settings, model: StackedLM) -> None:
        self._contender, self._settings, self._model = contender, settings, model
        self._wire = WireFormat(contender.wire)
        self._rounds = len(list(meetings(contender, settings.steps)))
        self._round = 0
        self.outer = self._inner()[:, 0].clone()
        self._momentum = torch.zeros_like(self.outer)
        self._errors = None
        if keeps_errors(self._wire, None):
            self._errors = torch.zeros_like(self._inner())
        self._sides = [Loopback.among(settings.replicas) for _ in range(settings.seeds)]
        self._pending: torch.Tensor | None = None
        self._begun = self._inner()

    @property
    def bytes_sent(self) -> int:
        """The bytes that the replicas of one seed have sent."""
        return sum(side.bytes_sent for side in self._sides[0])

    def average_inner(self) -> None:
        """Start at the mean of the inner parameters."""
        self.outer = self._inner().mean(1)
        self._write(self.outer.unsqueeze(1).expand_as(self._begun))
        self._begun = self._inner()

    def meet(self) -> None:
        """End a round."""
        moved = self._begun - self._inner()
        if not self._contender.late:
            self._step(self._average(moved))
            self._write(self.outer.unsqueeze(1).expand_as(moved))
        else:
            if self._pending is not None:
                self._step(self._pending)
            self._pending = self._average(moved)
            self._write(self.outer.unsqueeze(1) - moved)
        self._begun = self._inner()

    def end(self) -> None:
        """Let all models have the outer parameters."""
        if self._pending is not None:
            self._step(self._pending)
        self._write(self.outer.unsqueeze(1).expand_as(self._begun))

    def _step(self, mean: torch.Tensor) -> None:
        self._round += 1
        momentum = self._contender.outer.momentum_of(self._round)
        if self._contender.fade:
            momentum *= min(1.0, (self._rounds - self._round) / self._contender.fade)
        self._momentum.mul_(momentum).add_(mean)
        moved = self._momentum
        if self._contender.nesterov:
            moved = mean.add(self._momentum, alpha=momentum)
        self.outer.sub_(moved, alpha=self._contender.outer_lr)

    def _average(self, moved: torch.Tensor) -> torch.Tensor:
        """Return the averages over replicas, ``(seeds, elements)``."""
        found = []
        for seed, sides in enumerate(self._sides):
            errors = [None] * len(sides) if self._errors is None else self._errors[seed]
            begun = [
                Average(each, side, self._wire, "the pseudo-gradient", error)
                for each, side, error in zip(moved[seed], sides, errors, strict=True)
            ]
            for each in begun:
                each.advance()
            means = [each.wait() for each in begun]  # equal; each also keeps what it has lost
            found.append(means[0])
        return torch.stack(found)

    def _inner(self) -> torch.Tensor:
        return self._model.read().view(self._settings.seeds, self._settings.replicas, -1)

    def _write(self, values: torch.Tensor) -> None:
        self._model.write(values.flatten(0, 1))


def meetings(contender: Contender, steps: int) -> Iterator[int]:
    """Yield the number of steps after which replicas meet, in order."""
    step = contender.start
    while True:
        ramp = contender.ramp
        step += min(contender.every, max(1, step // ramp)) if ramp else contender.every
        if step > steps:
            return
        yield step


def play(contender: Contender, settings: Settings, text: Any) -> dict[str, Any]:
    """Train a contender; return its figures."""
    began = time.perf_counter()
    training = Training(contender, settings, settings.replicas, text)
    replicas = Replicas(contender, settings, training.model)
    ends = set(meetings(contender, settings.steps))
    for step in range(settings.steps):
        training.step(step)
        if step < contender.start:
            replicas.average_inner()
        elif step + 1 in ends:
            replicas.meet()
    replicas.end()
    return {
        "losses": training.judge()[:: settings.replicas],
        "sent": replicas.bytes_sent,
        "seconds": time.perf_counter() - began,
    }


def play_synchronously(contender: Contender, settings: Settings, text: Any) -> dict[str, Any]:
    """Train with the gradients of all replicas at every step; return its figures."""
    began = time.perf_counter()
    training = Training(contender, settings, 1, text)
    for step in range(settings.steps):
        training.step(step)
    return {"losses": training.judge(), "seconds": time.perf_counter() - began}


def _optimizer(contender: Contender, model: StackedLM) -> torch.optim.Optimizer:
    betas, decay = (0.9, 0.95), 0.1
    if contender.inner == "adamw":
        return torch.optim.AdamW(
            model.parameters(), lr=contender.lr, betas=betas, weight_decay=decay, fused=True
        )
    if contender.inner != "muon":
        raise ValueError(f"inner: found {contender.inner!r}, expected adamw or muon")
    hidden = model.hidden
    rest = [each for each in model.parameters() if all(each is not other for other in hidden)]
    return Muon(
        [
            {"params": hidden, "adjust_lr_fn": "match_rms_adamw"},
            {"params": rest, "algorithm": "adamw", "betas": betas},
        ],
        lr=contender.lr,
        weight_decay=decay,
    )


def _synchronous(contender: Contender) -> Contender:
    """Return the settings that a synchronous training has in common with a contender."""
    return Contender(inner=contender.inner, lr=contender.lr, inner_warmup=contender.inner_warmup)


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--replicas", type=positive_int, default=4, help="that meet (4)")
    add("--seeds", type=positive_int, default=3, help="of weights and text (3)")
    add("--steps", type=positive_int, default=1500, help="of each replica (1500)")
    add("--batch", type=positive_int, default=2, help="sequences of a replica and step (2)")
    add("--length", type=positive_int, default=64, help="tokens of a sequence (64)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    names = ", ".join(field.name for field in dataclasses.fields(Contender))
    add(
        "--contenders",
        type=Contender.parse,
        nargs="+",
        default=[Contender()],
        help=f"each a list of name=value, of {names}",
    )
    return made.parse_args()


def main() -> int:
    options = _options()
    console = announce()
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(options, name) for name in names})
    text = load_text((), settings.length)
    case: dict[str, Any] = {
        "settings": dataclasses.asdict(settings),
        "synchronous": {},
        "contenders": {},
    }
    for contender in options.contenders:
        beside = str(_synchronous(contender))
        if beside not in case["synchronous"]:
            found = play_synchronously(contender, settings, text)
            case["synchronous"][beside] = found
            console.print(f"synchronous {beside}: {found}", highlight=False, soft_wrap=True)
        found = play(contender, settings, text) | {"beside": beside}
        case["contenders"][str(contender)] = found
        console.print(f"{contender}: {found}", highlight=False, soft_wrap=True)
        if options.json:
            save(options.json, document("diloco_sweep", [case]))
    content = document("diloco_sweep", [case])
    for table in sweep_tables(content):
        table.show(console)
    console.print(content["command"], highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

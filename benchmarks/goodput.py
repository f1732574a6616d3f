"""Useful tokens per second of trainings whose processes are killed at random.

    python benchmarks/goodput.py --rates 0,1,2,3 --json goodput.json --picture goodput.svg

All train the same model with the same number of processes, started as a user starts them:

    sync:K      shardwise train lm --max-restarts N --async-checkpoint --checkpoint-every K
    memory:K    the same with --checkpoint-every 100 --replicate-every K
    diloco:H    shardwise train lm --max-restarts N --strategy diloco --local-steps H
                    --diloco-deadline S, each process a replica and a world of its own

Processes are killed at random times, as many as the rate says. Useful are tokens
whose steps are in the history at the end (steps that a restart repeats count once), or whose inner
steps went into an outer step. Goodput is their number per second, divided by that of the same
contender without faults. Steps are stretched to a fixed duration, see
``stretched/sitecustomize.py``: processes sleep for most of it, so that several trainings can run
at once. Exit code 1 where a training ended early, or DiLoCo's goodput is below 88 % at a rate at
which that of a synchronous training is below 40 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from _charts import OURS, PEER, draw
from _goodput_run import (
    GoodputError,
    RoundsWatched,
    StepsWatched,
    Training,
    disturb,
    schedule,
    speed,
    useful,
)
from _options import Content, end, listed, number, parser, plain, positive_int, run
from _report import Table
from _worlds import World
from diloco import summed_loss
from shardwise import checkpoint, fully_shard
from shardwise.app.recipes.core.model import build, initialize
from shardwise.app.recipes.text.data import SEPARATOR, VOCAB_SIZE, load_text
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.diloco import DiLoCo
from shardwise.insight.optimizers import make_optimizer
from shardwise.insight.planning.presets import LLAMAS
from shardwise.insight.schema.training import OptimizerConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RESTARTS = "1000000"
_STEPS = 1_000_000  # more than any measurement makes
#: DiLoCo keeps so much of its speed at the rates that leave a synchronous training less than that.
KEPT, LOST = 0.88, 0.40
SYNCHRONOUS, MEMORY, DILOCO = "sync", "memory", "diloco"
#: The kinds of contenders, with the number of steps that each has.
TITLES = {
    SYNCHRONOUS: "synchronous, saves every {}",
    MEMORY: "synchronous, in memory every {}",
    DILOCO: "DiLoCo, H = {}",
}
JUDGED = 1024  # sequences
_POINTS = 8  # checkpoints of a curve of losses


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        contender: such as ``sync:20``.
        per_minute: kills.
        settings: of all: the options of the command line.
        folder: for its files.
    """

    contender: str
    per_minute: float
    settings: argparse.Namespace
    folder: Path

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return self.folder / "run"

    @property
    def every(self) -> int:
        """Steps between checkpoints, or between exchanges."""
        return int(self.contender.partition(":")[2])

    def measure(self) -> dict[str, Any]:
        """Train, disturb, and return the raw numbers.

        Raises:
            GoodputError: the training ended, or makes no progress.
        """
        settings = self.settings
        per_step = settings.ranks * settings.batch * settings.length
        # Of its own, so that trainings that run at once do not start processes at the same moments.
        seed = f"{settings.seed} {self.contender} {self.per_minute}"
        faults = schedule(self.per_minute, settings.seconds, settings.ranks, seed)
        rounds = RoundsWatched(self.out) if is_diloco(self.contender) else None
        watched = rounds or StepsWatched(self.out, per_step)
        # At first an exchange each, which is slower than those that follow.
        warm = 2 * self.every * per_step if rounds else 4 * per_step
        psutil.cpu_percent()  # from here on
        with Training(self._arguments(), self.folder / "told", settings.step) as training:
            progress, hit = disturb(training, watched, faults, settings.seconds, warm)
            busy = psutil.cpu_percent() / 100
            training.stop()
        measured = useful(progress, settings.seconds)
        assert measured is not None
        first, last = measured
        learned = {"tokens": last[1] - first[1], "seconds": last[0] - first[0]}
        return {**learned, "busy": busy, "faults": hit, "progress": progress}

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return some of its checkpoints, by the tokens that they have learned from."""
        per_step = self.settings.ranks * self.settings.batch * self.settings.length
        found = sorted(self.out.glob("checkpoints/step-*"))
        if self.per_minute:
            found = found[-1:]
        elif len(found) > _POINTS:
            found = [found[round(i * (len(found) - 1) / (_POINTS - 1))] for i in range(_POINTS)]
        if not is_diloco(self.contender):
            return [(int(path.name.removeprefix("step-")) * per_step, path) for path in found]
        # Of a replica's checkpoint it is the outer parameters that are judged.
        rounds = RoundsWatched(self.out)
        rounds.tokens()
        learned = [0, *itertools.accumulate(rounds.by_round.values())]
        return [(learned[rounds_of(path)], path) for path in found]

    def _arguments(self) -> list[str]:
        settings = self.settings
        options: dict[str, object] = {
            "--nproc": settings.ranks,
            "--model": settings.model,
            "--batch-size": settings.batch,
            "--seq-length": settings.length,
            "--steps": _STEPS,
            "--schedule": "constant",
            "--eval-every": 0,
            "--sample-tokens": 0,
            "--device": "cpu",
            "--out": self.out,
            "--max-restarts": _RESTARTS,
            # Undisturbed, all are kept that a curve of losses needs.
            "--keep-last": 2 if self.per_minute else 1000,
            "--checkpoint-every": self.every,
        }
        if kind_of(self.contender) == MEMORY:
            options |= {"--checkpoint-every": 100, "--replicate-every": self.every}
        if is_diloco(self.contender):
            options |= {
                "--strategy": "diloco",
                "--replicas": settings.ranks,
                "--local-steps": self.every,
                "--diloco-deadline": settings.deadline,
                # As docs/diloco.md advises from random weights: momentum rises over all rounds.
                "--outer-lr": 0.8,
                "--outer-warmup": math.ceil(settings.seconds / (settings.step * self.every)),
            }
        words = [str(word) for option in options.items() for word in option]
        return ["train", "lm", *words, "--async-checkpoint"]


class Judge:
    """One process that evaluates models of one shape.

    Args:
        model: a preset of the recipes.
        length: tokens of a sequence.
    """

    def __init__(self, model: str, length: int) -> None:
        self._model: Any = build(LLAMAS[model], VOCAB_SIZE, SEPARATOR)
        fully_shard(self._model)
        initialize(self._model, 0)
        self._length = length
        self._text = load_text((), length).validation

    def loss(self, path: Path, replicas: bool) -> float:
        """Return the loss of a checkpoint, in nats per token.

        Args:
            path: of the checkpoint.
            replicas: whether it is that of a replica, of which the outer parameters count.
        """
        if not replicas:
            checkpoint.load(path, self._model)
            return self._evaluated()
        inner = make_optimizer(self._model, OptimizerConfig(lr=0.0))
        diloco = DiLoCo(self._model, inner, every=1, group=None)
        checkpoint.load(path, self._model, diloco)
        with diloco.outer_parameters():
            return self._evaluated()

    def _evaluated(self) -> float:
        each = range(JUDGED)
        return summed_loss(self._model, self._text, self._length, each, JUDGED) / JUDGED


def rounds_of(path: Path) -> int:
    """Return the outer steps behind the outer parameters of a replica's checkpoint."""
    where = ("optimizer", "diloco", "rounds")
    found = (value.value for value in read_manifest(path).values if value.path == where)
    return int(next(found)[0])


def order(contenders: list[str], rates: list[float]) -> list[tuple[str, float]]:
    """Return all runs so that few of those that follow each other start many processes."""
    return [
        (name, rates[-1 - number] if is_diloco(name) else rates[number])
        for number, name in itertools.product(range(len(rates)), contenders)
    ]


def measure(settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all contenders at all rates; return the raw numbers of the case."""
    runs = [
        Run(name, rate, settings, folder / f"{name.replace(':', '-')}-{rate:g}")
        for name, rate in order(settings.contenders, settings.rates)
    ]

    def play(run: Run) -> dict[str, Any]:
        found = {"contender": run.contender, "per_minute": run.per_minute}
        try:
            found |= run.measure()
            said = f"{speed(found):,.0f} tokens/s"
        except GoodputError as error:
            found["ended"] = said = str(error)
        print(f"  {run.contender}, {run.per_minute:g} kills a minute: {said}", flush=True)
        return found

    with ThreadPoolExecutor(settings.at_once) as pool:
        found = list(pool.map(play, runs))
    with World("judge", 1, Judge, settings.model, settings.length) as world:
        for run, each in zip(runs, found, strict=True):
            each["losses"] = [
                [tokens, *world.call("loss", path, is_diloco(run.contender))]
                for tokens, path in run.checkpoints()
            ]
    return {"settings": plain(settings), "runs": found}


def _contender(name: str) -> str:
    kind, _, number = name.partition(":")
    if kind not in TITLES or not number.isdecimal() or int(number) < 1:
        expected = ", ".join(f"{each}:STEPS" for each in TITLES)
        raise argparse.ArgumentTypeError(f"{name!r} is none of {expected}")
    return name


def title(contender: str) -> str:
    """Name a contender, such as ``sync:20``."""
    return TITLES[kind_of(contender)].format(contender.partition(":")[2])


def kind_of(contender: str) -> str:
    """Return what a contender is: a key of :data:`TITLES`."""
    return contender.partition(":")[0]


def is_diloco(contender: str) -> bool:
    """Whether a contender trains with DiLoCo."""
    return kind_of(contender) == DILOCO


def runs_of(case: dict[str, Any], contender: str) -> dict[float, dict[str, Any]]:
    """Return a contender's runs that came to their end, by the rate of faults."""
    return {
        one["per_minute"]: one
        for one in sorted(case["runs"], key=lambda one: float(one["per_minute"]))
        if one["contender"] == contender and "ended" not in one
    }


def goodputs(case: dict[str, Any], contender: str) -> dict[float, float]:
    """Return a contender's speed at each rate, divided by its speed without faults."""
    runs = runs_of(case, contender)
    return {rate: speed(one) / speed(runs[0]) for rate, one in runs.items() if 0 in runs}


def keeps_promise(case: dict[str, Any]) -> bool:
    """Whether DiLoCo loses little wherever a synchronous training loses most."""
    if any("ended" in one for one in case["runs"]):
        return False
    kept = {name: goodputs(case, name) for name in case["settings"]["contenders"]}
    ours = [found for name, found in kept.items() if is_diloco(name)]
    theirs = [found for name, found in kept.items() if not is_diloco(name)]
    lost = {rate for found in theirs for rate, share in found.items() if share < LOST}
    return all(found.get(rate, 1.0) >= KEPT for found in ours for rate in lost)


def table(case: dict[str, Any]) -> Table:
    """Show a case."""
    settings = case["settings"]
    shown = Table(
        f"Useful tokens per second; kills at random; {settings['model']}, "
        f"{settings['ranks']} processes, steps of {settings['step']:g} s",
        ["contender", "a minute", "seen", "tokens/s", "goodput", "tokens", "loss", "as many, calm"],
        notes=[
            "goodput: tokens per second, divided by those of the same contender without faults",
            "loss: nats per token on 1,024 sequences that were held out, of the last checkpoint, "
            "and the tokens that it has learned from; as many, calm: the loss of the same "
            "contender without faults after as many tokens, interpolated",
        ],
    )
    for name in settings["contenders"]:
        runs, kept = runs_of(case, name), goodputs(case, name)
        calm = runs[0]["losses"] if 0 in runs else []
        for rate, one in runs.items():
            cells = [title(name), f"{rate:g}", str(len(one["faults"])), f"{speed(one):,.0f}"]
            cells.append(f"{100 * kept[rate]:.1f} %" if kept else "-")
            tokens, loss = one["losses"][-1] if one["losses"] else (-1, 0.0)
            cells += [f"{tokens:,}", f"{loss:.4f}"] if one["losses"] else ["-", "-"]
            shown.rows.append([*cells, interpolated(calm, tokens) if rate else ""])
    busy = [one["busy"] for one in case["runs"] if "ended" not in one]
    if busy:
        shown.notes.append(
            f"{settings['seconds']:g} s and more each, {settings['at_once']} trainings at once; "
            f"processors were busy for {100 * median(busy):.0f} % of the time (median), "
            f"{100 * max(busy):.0f} % at most"
        )
    for one in (one for one in case["runs"] if "ended" in one):
        where = f"{title(one['contender'])}, {one['per_minute']:g} a minute"
        shown.notes.append(f"{where}: {one['ended'].splitlines()[0]}")
    return shown


def interpolated(points: list[tuple[int, float]], tokens: int) -> str:
    """Show the loss after so many tokens, between two checkpoints."""
    for (before, high), (after, low) in itertools.pairwise(points):
        if before <= tokens <= after:
            share = (tokens - before) / (after - before)
            return f"{high + share * (low - high):.4f}"
    return "-"


def draw_goodput(documents: Sequence[Content], path: Path) -> None:
    """Draw what trainings keep, and their losses."""
    case = documents[0]["cases"][0]
    dashes = {color: itertools.cycle(("-", "--", ":", "-.")) for color in (OURS, PEER)}
    styles: dict[str, dict[str, Any]] = {}
    for name in case["settings"]["contenders"]:
        color = OURS if is_diloco(name) else PEER
        styles[name] = {"color": color, "ls": next(dashes[color]), "lw": 2}

    def kept(axes: Axes) -> None:
        for name, style in styles.items():
            if found := goodputs(case, name):
                shares = [100 * share for share in found.values()]
                axes.plot(list(found), shares, label=title(name), marker="o", ms=5, **style)
        axes.set_ylim(bottom=0)
        axes.set_title("Useful tokens per second, % of undisturbed", loc="left", fontsize=11)
        axes.set_xlabel(f"kills a minute, {case['settings']['ranks']} processes")

    def losses(axes: Axes) -> None:
        for name, style in styles.items():
            for rate, one in runs_of(case, name).items():
                x = [tokens / 1000 for tokens, _ in one["losses"]]
                y = [loss for _, loss in one["losses"]]
                if rate:
                    axes.plot(x[-1:], y[-1:], color=style["color"], ls="none", marker="o", ms=5)
                else:
                    axes.plot(x, y, **style)
        axes.set_title("Loss (lines: undisturbed, dots: disturbed)", loc="left", fontsize=11)
        axes.set_xlabel("useful tokens, thousands")

    draw(path, "Training on while processes are killed", [kept, losses], (8.8, 4.0))


def main() -> int:
    made = parser(__doc__, picture=None)
    add = made.add_argument
    contenders = ["sync:20", "diloco:10"]
    names = f"{', '.join(f'{each}:STEPS' for each in TITLES)} ({','.join(contenders)})"
    seconds = number(1e-3, 86400, "a number of seconds")
    add("--contenders", type=listed(_contender), default=contenders, help=names)
    rates = [0.0, 0.5, 1.0, 2.0, 3.0]
    rate = number(0, 1000, "a number of kills")
    add("--rates", type=listed(rate), default=rates, help="kills a minute (0,0.5,1,2,3)")
    add("--model", default="llama-tiny", help="of the recipes (llama-tiny)")
    add("--ranks", type=positive_int, default=4, help="processes of a training (4)")
    add("--batch", type=positive_int, default=2, help="sequences of a process and step (2)")
    add("--length", type=positive_int, default=64, help="tokens of a sequence (64)")
    add("--step", type=seconds, default=0.5, help="seconds of forward and backward (0.5)")
    add("--seconds", type=seconds, default=180.0, help="that a training is watched (180)")
    add("--deadline", type=seconds, default=2.0, help="of a round of DiLoCo, in seconds (2)")
    add("--at-once", type=positive_int, default=2, help="trainings at the same time (2)")
    add("--seed", type=int, default=0, help="of the faults (0)")
    options = made.parse_args()
    options.rates = sorted({0.0, *options.rates})
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        return run(
            *("goodput", options, lambda say: [measure(options, Path(folder))]),
            lambda cases: [*map(table, cases)],
            lambda case: not keeps_promise(case),
            draw_goodput,
        )


if __name__ == "__main__":
    end(main)

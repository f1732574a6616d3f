"""What replicas that meet seldom learn and send, beside ones that meet at every step.

    python benchmarks/diloco.py --start 1500 --steps 1500 --every 50

All train the model of ``make train`` on the text of ``make train``, two replicas, on the same
sequences, by the same schedule: "synchronous" as hybrid sharding, which all-reduces gradients at
every step, the others as DiLoCo. As in section 3 of the paper all go on from one model, which was
trained synchronously for ``--start`` steps. After as many tokens the loss on text that was held
back is compared, and the bytes that have crossed between replicas since the start. Exit code 1
where DiLoCo's loss is more than 2 % above, or bytes fall by less than ``LEAST_RATIOS`` says.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _options import Content, end, listed, parser, plain, positive_int, run, whole
from _report import Table
from _worlds import World
from shardwise import checkpoint, clip_grad_norm_
from shardwise.app.recipes.core.model import next_token_loss
from shardwise.app.recipes.core.position import Position
from shardwise.app.recipes.core.replicas import replicas_of
from shardwise.app.recipes.core.training import place_for
from shardwise.app.recipes.text.config import PRESETS, LmConfig, LmInputs
from shardwise.app.recipes.text.data import load_text
from shardwise.base.observe import Activity, Memory, Route, observing
from shardwise.diloco import DiLoCo, OuterSGD, WireFormat
from shardwise.elastic.world import World as Ranks
from shardwise.frontends.strategies import Strategy
from shardwise.insight.optimizers import set_lr
from shardwise.insight.schema.sharding import ShardingConfig, TransportName
from shardwise.insight.schema.training import DilocoConfig, OptimizerConfig, OptimizerName

SYNCHRONOUS = "synchronous"
#: Contenders beside it, and how they exchange.
CONTENDERS = {
    **{
        wire: DilocoConfig(wire=WireFormat(wire))
        for wire in ("fp32", "bf16", "int8", "int4", "ternary")
    },
    "streaming-int8": DilocoConfig(wire=WireFormat.INT8, fragments=2, overlap=5, alpha=0.5),
}
#: The largest loss beside synchronous training's.
MOST_LOSS = 1.02
#: By how much bytes have to fall with 50 steps in a round.
LEAST_RATIOS = {
    "fp32": 40,
    "bf16": 40,
    "int8": 150,
    "streaming-int8": 150,
    "int4": 300,
    "ternary": 16 * 45,
}
JUDGED = 512  # sequences


class Meter:
    """Counts what this rank sends in all-reduces over gloo.

    An all-reduce is a ring: each rank sends ``2 (R - 1) / R`` of the tensor.

    Attributes:
        sent: bytes so far.
    """

    def __init__(self) -> None:
        self.sent = 0

    def begin(self, activity: Activity, name: str, dimension: str, nbytes: int) -> int:
        """Count nothing."""
        return 1

    def collective(
        self, activity: Activity, name: str, wire: Route, nbytes: int, launches: int
    ) -> int:
        """Count an all-reduce."""
        if activity is Activity.ALL_REDUCE:
            self.sent += round(2 * (wire.ranks - 1) * nbytes / wire.ranks)
        return 1

    def end(self, number: int) -> None:
        """Count nothing."""

    def memory(self, kind: Memory, name: str, nbytes: int) -> None:
        """Count nothing."""


class DilocoWorker:
    """One rank of a contender.

    Args:
        name: of the contender.
        settings: of all.
        start: the checkpoint to go on from.
    """

    def __init__(self, name: str, settings: argparse.Namespace, start: Path | None) -> None:
        self._settings = settings
        rank, length = dist.get_rank(), settings.length
        world = Ranks(rank, settings.ranks, rank, settings.ranks)
        usual = LmConfig.for_model(settings.model)
        train = replace(
            usual.train,
            steps=settings.start + settings.steps,
            batch_size=settings.batch,
            seed=settings.seed,
            optimizer=OptimizerConfig(lr=settings.lr, algorithm=OptimizerName(settings.optimizer)),
            sharding=ShardingConfig(
                strategy=Strategy.HYBRID_SHARD if name == SYNCHRONOUS else Strategy.DILOCO,
                replicas=settings.replicas,
                # Messages between replicas, as between hosts; here ranks would share memory.
                transport=TransportName.C10D,
            ),
        )
        config = replace(usual, seq_length=length, train=train)
        place = place_for(train, world, torch.device("cpu"))
        text = load_text((), length)
        self._task = config.assemble()(LmInputs(config, config.settings(), text), place)
        self._model: Any = self._task.module
        self._optimizer = self._task.optimizer
        self._clip, self._held_back = train.optimizer.clip_grad, text.validation
        if start is not None:
            checkpoint.load(start, self._model, self._optimizer)
        self._diloco: DiLoCo | None = None
        if name != SYNCHRONOUS:
            exchange = replace(
                _exchange(name),
                local_steps=settings.every,
                outer_lr=settings.outer_lr,
                outer_warmup=settings.outer_warmup,
            )
            self._diloco, _ = replicas_of(
                self._model,
                self._optimizer,
                place.mesh,
                None,
                replace(train, diloco=exchange),
                length,
            )
            self._optimizer = self._diloco

    def train(self, begin: int, end: int) -> dict[str, Any]:
        """Make steps ``begin`` .. ``end``; return bytes, seconds and losses."""
        task, settings, losses = self._task, self._settings, []
        started = time.perf_counter()
        meter = Meter()
        with observing(meter):
            for step in range(begin, end):
                set_lr(self._optimizer, task.schedule(Position(step + 1, 0)), settings.lr)
                first = (step * settings.ranks + dist.get_rank()) * settings.batch
                loss = task.program.loss(self._model, task.data.batch(first, settings.batch))
                loss.backward()  # type: ignore[no-untyped-call]
                clip_grad_norm_(list(self._model.parameters()), self._clip)
                self._optimizer.step()
                self._optimizer.zero_grad()
                losses.append(loss.item())
        in_rounds = meter.sent
        if self._diloco is not None:
            in_rounds = self._diloco.bytes_sent
            self._diloco.flush()
        return {
            "sent": in_rounds,
            "sent_at_end": 0 if self._diloco is None else self._diloco.bytes_sent - in_rounds,
            "seconds": time.perf_counter() - started,
            "losses": losses,
            "judged": self._judge(),
        }

    def save(self, path: Path) -> None:
        """Save what all contenders go on from."""
        checkpoint.save(path, self._model, self._optimizer)

    def _judge(self) -> float:
        """The mean loss of all ranks on text that was held back."""
        mine = range(dist.get_rank(), JUDGED, self._settings.ranks)
        length = self._settings.length
        total = torch.tensor(
            summed_loss(self._model, self._held_back, length, mine, JUDGED), dtype=torch.float64
        )
        dist.all_reduce(total)
        return total.item() / JUDGED


@torch.no_grad()
def summed_loss(model: Any, text: Any, length: int, chosen: Sequence[int], count: int) -> float:
    """Return the sum of a model's losses on sequences that are spread evenly over a text.

    Args:
        model: evaluated from here on.
        text: that was held back.
        length: tokens of a sequence.
        chosen: the numbers of the sequences.
        count: how many there are.
    """
    model.eval()
    room, total = len(text) - length - 1, 0.0
    for first in range(0, len(chosen), 16):
        starts = [room * number // (count - 1) for number in chosen[first : first + 16]]
        rows = [text.read(start, length + 1) for start in starts]
        batch = torch.stack([torch.from_numpy(row) for row in rows])
        total += next_token_loss(model, batch).item() * len(rows)
    return total


def play(name: str, settings: argparse.Namespace, start: Path | None) -> dict[str, Any]:
    """Train a contender; return its figures."""
    with World(name, settings.ranks, DilocoWorker, name, settings, start) as world:
        by_rank = world.call("train", settings.start, settings.start + settings.steps)
    steps = list(zip(*(each["losses"] for each in by_rank), strict=True))
    tenth = max(1, len(steps) // 10)
    return {
        **{what: sum(each[what] for each in by_rank) for what in ("sent", "sent_at_end")},
        "seconds": max(each["seconds"] for each in by_rank),
        "judged": by_rank[0]["judged"],
        "last_losses": sum(map(sum, steps[-tenth:])) / (tenth * settings.ranks),
    }


def loss_ratio(case: Content, name: str) -> float:
    """A contender's loss on text that was held out, beside that of synchronous training."""
    found = case["contenders"]
    return float(found[name]["judged"] / found[SYNCHRONOUS]["judged"])


def crossed(case: Content, name: str) -> int:
    """Return the bytes that have crossed between replicas, the flush at the end included."""
    found = case["contenders"][name]
    return int(found["sent"] + found["sent_at_end"])


def bytes_ratio(case: Content, name: str) -> float:
    """How many times fewer bytes have crossed than in synchronous training."""
    return crossed(case, SYNCHRONOUS) / crossed(case, name)


def table(case: Content) -> Table:
    """Show a case."""
    settings = case["settings"]
    tokens = settings["steps"] * settings["ranks"] * settings["batch"] * settings["length"]
    warmup, start = settings["outer_warmup"], settings["start"]
    risen = f", momentum rises over {warmup} rounds" if warmup else ""
    shown = Table(
        f"{settings['model']}, {settings['replicas']} replicas on {settings['ranks']} ranks, "
        f"{settings['steps']} steps, {tokens / 1e6:.2f} M tokens; outer rate "
        f"{settings['outer_lr']}{risen}",
        ["contender", "loss", "x synchronous", "MB between replicas", "fewer bytes"],
    )
    for name, found in case["contenders"].items():
        kind, _, momentum = name.partition(":")
        title = f"DiLoCo, H = {settings['every']}, {kind}, momentum {momentum or 0.9}"
        cells = [name if name == SYNCHRONOUS else title, f"{found['judged']:.4f}"]
        cells += [f"{loss_ratio(case, name):.4f}", f"{crossed(case, name) / 1e6:.2f}"]
        shown.rows.append([*cells, f"{bytes_ratio(case, name):.1f} x"])
    shown.notes.append(
        "loss: nats per token on 512 sequences that were held out, of the outer parameters; bytes: "
        "payload of all ranks"
    )
    if start:
        shown.notes.append(f"all start from one model, trained synchronously for {start} steps")
    return shown


def breaks_promises(case: Content) -> bool:
    """Whether losses or bytes are other than the first lines of this file say."""
    return any(
        loss_ratio(case, name) > MOST_LOSS
        or bytes_ratio(case, name) < LEAST_RATIOS[name.partition(":")[0]]
        for name in case["contenders"]
        if name != SYNCHRONOUS
    )


def _exchange(name: str) -> DilocoConfig:
    """What ``int8:0.5`` means: a format, and an outer momentum."""
    kind, _, momentum = name.partition(":")
    return replace(CONTENDERS[kind], outer_momentum=float(momentum or OuterSGD.momentum))


def _contender(name: str) -> str:
    try:
        _exchange(name)
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} is no contender ({error})") from None
    return name


def measure(settings: argparse.Namespace, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Train all contenders from one start; return the case."""
    found, start = {}, None
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        if settings.start:
            start = Path(folder, "start")
            with World("start", settings.ranks, DilocoWorker, SYNCHRONOUS, settings, None) as world:
                world.call("train", 0, settings.start)
                world.call("save", start)
        for name in (SYNCHRONOUS, *settings.contenders):
            say(name)
            found[name] = play(name, settings, start)
    yield {"settings": plain(settings), "contenders": found}


def main() -> int:
    made = parser(__doc__)
    add = made.add_argument
    add("--model", choices=tuple(PRESETS), default="llama-tiny", help="of the recipes (llama-tiny)")
    add("--ranks", type=positive_int, default=2, help="processes (2)")
    add("--replicas", type=positive_int, default=2, help="that meet (2)")
    add("--start", type=whole(0), default=1500, help="synchronous steps before (1500; 0: none)")
    add("--steps", type=positive_int, default=1500, help="of each replica (1500)")
    add("--every", type=positive_int, default=50, help="inner steps of a round (50)")
    add("--batch", type=positive_int, default=2, help="sequences of a rank and step (2)")
    add("--length", type=positive_int, default=64, help="tokens of a sequence (64)")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="inner one (adamw)")
    add("--lr", type=float, default=2e-3, help="its peak learning rate (2e-3)")
    add("--outer-lr", type=float, default=OuterSGD.lr, help="of the outer steps (0.7)")
    add("--outer-warmup", type=whole(0), default=0, help="rounds in which momentum rises (0)")
    add("--seed", type=int, default=0, help="of weights and order of text (0)")
    names = f"{', '.join(CONTENDERS)}, each with an outer momentum behind a colon or 0.9"
    add("--contenders", type=listed(_contender), default=["fp32", "int8"], help=names)
    options = made.parse_args()
    return run(
        *("diloco", options, lambda say: measure(options, say)),
        lambda cases: [*map(table, cases)],
        breaks_promises,
    )


if __name__ == "__main__":
    end(main)

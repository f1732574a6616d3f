"""Which programs are generated, and how often what is in them.

Made from a random number generator and not from strategies of hypothesis: that follows an example
with others that repeat parts of it, which finds the same thing ten times, and takes longer to make
a program than a rank takes to run it. What it would be good at, making an example smaller, works
on the values here: see ``shrink.py``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tests.fuzz.program import (
    ROOT,
    At,
    Backward,
    Block,
    ChannelsLast,
    Clip,
    Copy,
    Ema,
    Forward,
    Gather,
    Grads,
    Keep,
    Load,
    Program,
    Raise,
    Read,
    Sleep,
    Step,
    Swap,
    Sync,
    Write,
    ZeroGrad,
    features,
)

# torch's FSDP2 refuses scalars, and then there is less to compare with.
_KINDS = ["scalar"] + [kind for kind in Block.KINDS if kind != "scalar"] * 2

#: In one program of so many, one rank alone raises: the others wait for seconds.
_PARTS_IN = 60


def generate(count: int, seed: int, world: int) -> Iterator[Program]:
    """Generate so many programs, the same ones for the same seed."""
    for number in range(count):
        yield _Dice(random.Random(f"{seed} {number}"), world).program()


def covering(programs: Iterable[Program], count: int) -> list[Program]:
    """Choose programs that together hold as many pairs of features as so many can.

    Faults show where two things meet, so few programs with many pairs find what many with few do.
    """
    numbers: dict[tuple[str, str], int] = {}
    left = []
    for program in programs:
        pairs = itertools.combinations(sorted(features(program)), 2)
        held = sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs)
        left.append((program, held))
    chosen, covered = [], 0
    while left and len(chosen) < count:
        at = max(range(len(left)), key=lambda at: (left[at][1] & ~covered).bit_count())
        program, held = left.pop(at)
        chosen.append(program)
        covered |= held
    return chosen


class _Dice:
    """Throws what is in one program."""

    def __init__(self, source: random.Random, world: int) -> None:
        self._source = source
        self._world = world
        self._parts = source.randrange(_PARTS_IN) == 0

    # -- throws --------------------------------------------------------------------------------

    def _mostly(self, usual: Any, others: Sequence[Any], share: float = 0.7) -> Any:
        """Take ``usual``, but now and then one of ``others``, which may have it too."""
        if self._source.random() < share:
            return usual
        return self._source.choice([each for each in others if each != usual])

    def _some(self, values: Sequence[str], share: float) -> tuple[str, ...]:
        """Take none, usually, or one or two of ``values``."""
        if self._source.random() < share:
            return ()
        return tuple(self._source.sample(values, self._source.randint(1, 2)))

    def _weighted(self, *choices: tuple[int, Callable[[], Any]]) -> Any:
        weights = [weight for weight, _ in choices]
        [(_, make)] = self._source.choices(choices, weights)
        return make()

    def _index(self) -> int:
        return self._source.randint(0, 3)

    def _target(self) -> int:
        return self._mostly(self._index(), [ROOT], 0.85)

    def _rank(self) -> int:
        return self._source.randrange(self._world)

    # -- actions -------------------------------------------------------------------------------

    def _write(self) -> Write:
        form = self._mostly("no_grad", Write.FORMS, 0.4)
        return Write(self._target(), form, rank=self._mostly(None, range(self._world), 0.75))

    def _ema(self) -> Ema:
        return Ema(self._index(), self._index(), self._mostly("no_grad", Ema.FORMS))

    def _read(self) -> Read:
        return Read(self._target(), self._mostly("rows", Read.FORMS, 0.5))

    def _sleep(self) -> Sleep:
        return Sleep(self._rank(), self._source.choice([1, 3]))

    def _raise(self) -> Raise:
        return Raise(self._rank() if self._parts else None)

    def _keep(self) -> Keep:
        return Keep(self._mostly("state", Keep.WHAT))

    def _load(self) -> Load:
        return Load(self._mostly("scaled", Load.SOURCES), self._source.choice(Load.HOWS))

    def _gather(self) -> Gather:
        return Gather(self._target(), self._source.choice(Gather.CALLS))

    def _grads(self) -> Grads:
        return Grads(self._target(), self._mostly("off", Grads.TOS))

    def _swap(self) -> Swap:
        return Swap(self._target())

    # -- steps ---------------------------------------------------------------------------------

    def _moment(self) -> At:
        """Something that is done inside of a forward, or of its backward."""
        action = self._weighted(
            (8, self._write),
            (4, self._ema),
            (2, self._read),
            (5, self._sleep),
            (2, self._raise),
            (1, self._keep),
            (1, self._load),
            (1, self._gather),
            (1, self._grads),
        )
        return At(self._source.choice(At.WHENS), self._index(), action)

    def _forward(self, how: str) -> Forward:
        count = self._source.choice([0, 0, 0, 1, 1, 2, 3])
        at = tuple(self._moment() for _ in range(count))
        return Forward(how, at, self._mostly(0, [1], 0.85))

    def _train(self) -> Forward:
        return self._forward("train")

    def _evaluate(self) -> Forward:
        return self._forward(self._source.choice(Forward.HOWS[1:]))

    def _zero(self) -> ZeroGrad:
        return ZeroGrad(self._mostly("none", ZeroGrad.TOS))

    def _phrase(self) -> tuple[Any, ...]:
        """A few steps that belong together, as programs have them, or a single one."""
        train, evaluate, zero, back = self._train, self._evaluate, self._zero, Backward

        def row(*parts: Any) -> Callable[[], tuple[Any, ...]]:
            return lambda: tuple(part() if callable(part) else part for part in parts)

        kept, loaded = Load("kept", "assign"), Load(how="assign")
        return self._weighted(
            (6, row(train, back, Step, zero)),
            (2, row(train, back, Clip, Step, zero)),
            (6, row(evaluate)),
            (1, row(train, train, back, Step, zero)),
            (1, row(train, Backward(graph="retain"), back, Step)),
            (1, row(train, train, Backward("last"), back, Step, zero)),
            (1, row(train, train, Backward("first"), back, Step, zero)),
            (1, row(Sync("off"), train, back, Sync("on"), train, back, Step, zero)),
            (1, row(Sync("off"), train, back, evaluate, train, back, Sync("on"))),
            (1, row(Keep(), loaded, evaluate, kept)),
            (1, row(self._keep, self._load, train, self._load)),
            (1, row(Copy, evaluate, evaluate)),
            (1, row(ChannelsLast, evaluate)),
            (3, row(self._write)),
            (1, row(self._ema)),
            (1, row(self._load)),
            (1, row(self._keep)),
            (1, row(self._read)),
            (1, row(self._gather)),
            (1, row(self._grads)),
            (1, row(self._swap)),
            (2, row(self._sleep)),
            (2, row(train)),
            (2, row(back)),
            (1, row(Step)),
        )

    # -- models --------------------------------------------------------------------------------

    def _block(self) -> Block:
        return Block(
            kind=self._mostly("linear", _KINDS, 0.45),
            shard=self._mostly("own", Block.SHARDS, 0.75),
            returns=self._mostly("tensor", Block.RETURNS, 0.75),
            beside=self._mostly("", Block.BESIDE, 0.92),
            tied_to=self._mostly(None, [ROOT, 0, 1], 0.93),
            traits=self._some(Block.TRAITS, 0.7),
        )

    def program(self) -> Program:
        """Throw a whole program."""
        dtype = self._mostly("float32", Program.DTYPES, 0.8)
        precise = dtype != "float32"
        blocks = tuple(self._block() for _ in range(self._source.randint(1, 4)))
        phrases = [self._phrase() for _ in range(self._source.randint(1, 4))]
        return Program(
            world=self._world,
            width=self._mostly(4, Program.WIDTHS, 0.4),
            dtype=dtype,
            precision="" if precise else self._mostly("", Program.PRECISIONS, 0.85),
            blocks=blocks,
            root=self._some(Program.ROOTS, 0.3),
            returns=self._mostly("tensor", Block.RETURNS, 0.93),
            reshard=self._mostly("none", Program.RESHARDS, 0.6),
            root_reshard=self._mostly("none", Program.RESHARDS[:3]),
            mesh=self._mostly("1d", Program.MESHES, 0.6) if self._world == 4 else "1d",
            optimizer=self._mostly("sgd", Program.OPTIMIZERS, 0.4),
            traits=self._some(Program.TRAITS, 0.7),
            steps=tuple(step for phrase in phrases for step in phrase),
        )

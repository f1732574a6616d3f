"""Which programs are generated, and how often what is in them."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

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
)

_Steps = tuple[Any, ...]


def _mostly(usual: Any, others: Any, share: float = 0.7) -> st.SearchStrategy[Any]:
    """Take ``usual``, but now and then one of ``others``, in which it may be."""
    others = [each for each in others if each != usual]
    count = max(1, round(share / (1 - share) * len(others)))
    return st.sampled_from([usual] * count + others)


def _weighted(*choices: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    return st.sampled_from([each for weight, each in choices for _ in range(weight)]).flatmap(
        lambda chosen: chosen
    )


def _some(values: Any, most: int = 2, share: float = 0.6) -> st.SearchStrategy[tuple[Any, ...]]:
    """Take none, usually, or a few of ``values``."""
    few = st.lists(st.sampled_from(values), min_size=1, max_size=most, unique=True).map(tuple)
    none = round(share * 10)
    return _weighted((none, st.just(())), (10 - none, few))


_INDEX = st.integers(0, 3)
_TARGET = _weighted((6, _INDEX), (1, st.just(ROOT)))

# torch's FSDP2 refuses scalars, and then there is less to compare with.
_KINDS = ["scalar"] + [kind for kind in Block.KINDS if kind != "scalar"] * 2

_BLOCKS = st.builds(
    Block,
    kind=_mostly("linear", _KINDS, 0.45),
    shard=_mostly("own", Block.SHARDS, 0.75),
    returns=_mostly("tensor", Block.RETURNS, 0.75),
    beside=_mostly("", Block.BESIDE, 0.92),
    tied_to=_mostly(None, [ROOT, 0, 1], 0.9),
    traits=_some(Block.TRAITS, share=0.7),
)


def _writes(world: int) -> st.SearchStrategy[Write]:
    return st.builds(
        Write,
        block=_TARGET,
        form=_mostly("no_grad", Write.FORMS, 0.4),
        rank=_mostly(None, range(world), 0.75),
    )


_LOADS = st.builds(
    Load, source=_mostly("scaled", Load.SOURCES, 0.7), how=_mostly("copy", Load.HOWS, 0.5)
)
_EMAS = st.builds(Ema, source=_INDEX, target=_INDEX, form=_mostly("no_grad", Ema.FORMS, 0.7))
_READS = st.builds(Read, block=_TARGET, form=_mostly("rows", Read.FORMS, 0.5))
_KEEPS = st.builds(Keep, what=_mostly("state", Keep.WHAT, 0.7))
_GATHERS = st.builds(Gather, block=_TARGET, call=st.sampled_from(Gather.CALLS))
_GRADS = st.builds(Grads, block=_TARGET, to=_mostly("off", Grads.TOS, 0.7))


@functools.cache
def _moments(world: int, parts: str) -> st.SearchStrategy[tuple[At, ...]]:
    """What is done inside of a forward."""
    sleeps = st.builds(Sleep, rank=st.integers(0, world - 1), ms=st.sampled_from([1, 3]))
    alone = st.integers(0, world - 1) if parts == "parts" else st.none()
    raises = st.builds(Raise, rank=alone)
    action = _weighted(
        (8, _writes(world)),
        (4, _EMAS),
        (2, _READS),
        (5, sleeps),
        (2, raises),
        (1, _KEEPS),
        (1, _LOADS),
        (1, _GATHERS),
        (1, _GRADS),
    )
    moment = st.builds(At, when=st.sampled_from(At.WHENS), block=_INDEX, do=action)
    several = st.lists(moment, min_size=1, max_size=3).map(tuple)
    return _weighted((5, st.just(())), (6, several))


@functools.cache
def _phrases(world: int, parts: str) -> st.SearchStrategy[_Steps]:
    """A few steps that belong together, as programs have them."""
    at = _moments(world, parts)
    model = _mostly(0, [1], 0.85)
    train = st.builds(Forward, at=at, model=model)
    evaluate = st.builds(Forward, how=st.sampled_from(Forward.HOWS[1:]), at=at, model=model)
    back = st.builds(Backward)
    zero = st.builds(ZeroGrad, to=_mostly("none", ZeroGrad.TOS))
    sleeps = st.builds(Sleep, rank=st.integers(0, world - 1), ms=st.sampled_from([1, 3]))

    def one(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[_Steps]:
        return strategy.map(lambda step: (step,))

    def row(*parts: Any) -> st.SearchStrategy[_Steps]:
        return st.tuples(*[p if isinstance(p, st.SearchStrategy) else st.just(p) for p in parts])

    return _weighted(
        (6, row(train, back, Step(), zero)),
        (2, row(train, back, Clip(), Step(), zero)),
        (6, one(evaluate)),
        (1, row(train, train, back, Step(), zero)),
        (1, row(train, Backward(graph="retain"), Backward(), Step())),
        (1, row(train, train, Backward(which="last"), Backward(), Step(), zero)),
        (1, row(Sync("off"), train, back, Sync("on"), train, back, Step(), zero)),
        (1, row(Sync("off"), train, back, evaluate, train, back, Sync("on"))),
        (1, row(Keep(), Load(how="assign"), evaluate, Load("kept", "assign"))),
        (1, row(_KEEPS, _LOADS, train, _LOADS)),
        (1, row(Copy(), evaluate, evaluate)),
        (1, row(ChannelsLast(), evaluate)),
        (3, one(_writes(world))),
        (1, one(_EMAS)),
        (1, one(_LOADS)),
        (1, one(_KEEPS)),
        (1, one(_READS)),
        (1, one(_GATHERS)),
        (1, one(_GRADS)),
        (1, one(st.builds(Swap, block=_TARGET))),
        (2, one(sleeps)),
        (2, one(train)),
        (2, one(back)),
        (1, one(st.just(Step()))),
    )


@st.composite
def programs(draw: st.DrawFn, world: int = 2) -> Program:
    """Generate programs for so many ranks."""
    dtype = draw(_mostly("float32", Program.DTYPES, 0.8))
    precisions = Program.PRECISIONS if dtype == "float32" else ("",)
    # Rarely does one rank alone raise: the others wait for seconds.
    parts = draw(st.sampled_from(["stays"] * 39 + ["parts"]))
    steps = draw(st.lists(_phrases(world, parts), min_size=1, max_size=4))
    return Program(
        world=world,
        width=draw(_mostly(4, Program.WIDTHS, 0.4)),
        dtype=dtype,
        precision=draw(_mostly("", precisions, 0.85)),
        blocks=tuple(draw(st.lists(_BLOCKS, min_size=1, max_size=4))),
        root=draw(_some(Program.ROOTS, share=0.3)),
        returns=draw(_mostly("tensor", Block.RETURNS, 0.9)),
        reshard=draw(_mostly("none", Program.RESHARDS, 0.6)),
        root_reshard=draw(_mostly("none", Program.RESHARDS[:3], 0.7)),
        mesh=draw(_mostly("1d", Program.MESHES, 0.6)) if world == 4 else "1d",
        optimizer=draw(_mostly("sgd", Program.OPTIMIZERS, 0.4)),
        traits=draw(_some(Program.TRAITS, share=0.7)),
        steps=tuple(step for phrase in steps for step in phrase),
    )


def generate(count: int, seed: int, world: int) -> list[Program]:
    """Generate so many different programs, the same ones for the same seed."""
    made: dict[Program, None] = {}
    while len(made) < count:
        _generate(made, count, seed, world)
        seed += 1
    return list(made)[:count]


def _generate(made: dict[Program, None], count: int, seed: int, world: int) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(programs(world))
    def collect(program: Program) -> None:
        made.setdefault(program)

    collect()

"""Programs that write, raise and load at odd moments compute what one process does, or raise.

They are in the language of the random ones, ``tests/fuzz/program.py``, and run on its oracles. What
that language has no words for is in ``test_any_moment.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Any

import pytest

from tests.fuzz.execution import Execution
from tests.fuzz.program import (
    ROOT,
    At,
    Backward,
    Block,
    ChannelsLast,
    Clip,
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
from tests.fuzz.runtimes import Gathered, Runtime, forget_meshes, runtime
from tests.fuzz.trace import Trace, first_difference, tolerance_of
from tests.threads import run_threads
from tests.worlds import Ranks

NET = Program(width=5, blocks=(Block("mlp"), Block("mlp"), Block("mlp")), root=("last",))
#: The first two of three blocks are one group.
TOGETHER = dataclasses.replace(
    NET, blocks=(Block("mlp"), Block("mlp", shard="with_previous"), Block("mlp"))
)
#: A block is gathered when the forward of the one before it begins.
AHEAD = dataclasses.replace(NET, traits=("forward_prefetch",))
#: One group, whose backward is under way wherever a hook runs.
ONE_GROUP = dataclasses.replace(NET, blocks=(Block(shard="root"),) * 3)
#: Backward does not need the values of these parameters, and those of the others it does.
ADDS = dataclasses.replace(NET, blocks=(Block("position"), Block("position")), root=("first",))
MULTIPLIES = dataclasses.replace(NET, blocks=(Block(), Block()), root=("first",))
CONVOLVES = dataclasses.replace(NET, blocks=(Block("conv"), Block("conv")))
TIED = dataclasses.replace(
    NET, blocks=(Block(), Block("mlp", traits=("twice",)), Block(tied_to=0)), root=()
)
KEEPS = {"reshard": "false", "traits": ("keep_after_backward",)}


def of(net: Program, *steps: Any, **options: Any) -> Program:
    """What is done with a model."""
    return dataclasses.replace(net, steps=steps, **options)


def each(*programs: Program, **choices: Iterable[Any]) -> list[Program]:
    """Every program with every combination of options."""
    combined = [
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    ]
    return [dataclasses.replace(one, **more) for one in programs for more in combined]


def under_strategies(program: Program) -> list[Program]:
    """A program with each ``reshard_after_forward`` of all groups."""
    return [
        dataclasses.replace(program, reshard=each, root_reshard=each)
        for each in ("none", "true", "false")
    ]


def forward(*at: At, how: str = "train") -> Forward:
    """A forward, with what is done in it."""
    return Forward(how, at)


EVALUATION = forward(how="no_grad")
WRITES_TO_ALL = tuple(Write(block, factor=0.8) for block in (0, 1, 2, ROOT))
#: When the second block is gathered, but has yet to run.
BEFORE_IT_RUNS = [At(when, 0, Write(1)) for when in ("pre", "inside", "post")]
#: Writes to the first block between its forward and its backward.
BEFORE_BACKWARD = (
    (forward(), Write(), Backward()),
    (forward(), Write(), forward(how="unused"), Backward()),
    (forward(At("backward", 1, Write())), Backward()),
)
STEPS_WHILE_A_BACKWARD_IS_TO_COME = (forward(), forward(), Backward("last"), Backward())

#: These compute what the unsharded program does.
COMPUTED: dict[str, list[Program]] = {
    "an encoder follows another by momentum inside of forward": under_strategies(
        of(NET, *(forward(At("body", 1, Ema(0, 1))), Backward(), Step()) * 3)
    ),
    "a hook writes to the next block": under_strategies(
        of(NET, *(forward(At("post", 0, Write(1)), how="unused"),) * 3)
    ),
    "hooks write to the blocks that have run": under_strategies(
        of(NET, *(forward(*(At("post", n, Write(n)) for n in range(3)), how="no_grad"),) * 3)
    ),
    "modules write to their own full parameters": under_strategies(
        of(
            NET,
            *(forward(*(At("inside", n, Write(n, "live")) for n in range(3))),) * 2,
            Backward("last"),
        )
    ),
    "a block is resharded between a write to it and its forward": each(
        of(TOGETHER, forward(BEFORE_IT_RUNS[-1], At("post", 0, Gather(1, "reshard"))), Backward()),
        of(AHEAD, forward(BEFORE_IT_RUNS[-1], At("post", 0, Gather(1, "reshard"))), Backward()),
    ),
    "a block is written to while another one of its group has yet to run": [
        of(net, *(forward(At("post", 0, Write(0)), how="no_grad"),) * 3)
        for net in (TOGETHER, AHEAD)
    ],
    "on one rank a block is written to before it runs, where full parameters are the shards": [
        of(net, forward(at), world=1) for net in (TOGETHER, AHEAD) for at in BEFORE_IT_RUNS
    ],
    "weights are written to after forwards without a backward": under_strategies(
        of(
            NET,
            *(forward(how="unused"), *(Write(n, "data") for n in (0, 1, 2, ROOT))) * 3,
            forward(),
            Backward(),
        )
    ),
    "one rank alone writes to its rows after an evaluation": under_strategies(
        of(NET, EVALUATION, Write(ROOT, rank=0), EVALUATION)
    ),
    "a state dict is put aside, another one assigned, and the first one assigned again": [
        of(
            NET,
            EVALUATION,
            Keep(),
            Load(how="assign", factor=0.0),
            EVALUATION,
            Load("kept", "assign"),
            EVALUATION,
        )
    ],
    "weights are written to after forwards that raised": under_strategies(
        of(NET, *(forward(At("inside", 1, Raise()), how="no_grad"), *WRITES_TO_ALL) * 3, EVALUATION)
    ),
    "optimizers step in backward, once with the whole gradient": each(
        of(TIED, *(forward(), Backward()) * 2, optimizer="in_backward"), reshard=("true", "false")
    ),
    "a backward needs no value of before a step in another backward": each(
        of(ADDS, *STEPS_WHILE_A_BACKWARD_IS_TO_COME, optimizer="in_backward"),
        reshard=("true", "false"),
    ),
    "on one rank a backward needs no value that was written to": each(
        *(of(ADDS, *steps, world=1) for steps in BEFORE_BACKWARD),
        reshard=("true", "false"),
    ),
    "one rank alone reads its state dict after an evaluation": [
        of(
            NET,
            *(EVALUATION, Read(form="state_dict", rank=n), forward(), Backward()),
            reshard="false",
        )
        for n in (0, 1)
    ],
    "a root that is kept is resharded in its own forward": [
        of(NET, forward(At("post", 0, Gather(ROOT, "reshard"))), Backward())
    ],
    "shards are put into another memory format": each(
        of(CONVOLVES, ChannelsLast(), *(forward(), Backward()) * 2),
        of(CONVOLVES, ChannelsLast(), forward(), ChannelsLast(), Backward()),
        world=(1, 2),
    ),
    "blocks are frozen after they have accumulated": [
        of(
            NET,
            *(Sync(), forward(), Backward(), Sync("on")),
            *(Grads(0), Grads(1), Grads(2), forward(), Backward()),
        )
    ],
    "gradients are cleared between forward and backward, and clipped after an evaluation": [
        of(
            NET,
            *(EVALUATION, Grads(ROOT)),
            *(forward(), ZeroGrad(), Backward(), EVALUATION, Clip(), Step()),
            *(forward(), ZeroGrad("zero"), Backward(), EVALUATION, Clip(), Step()),
            optimizer="adamw",
        )
    ],
    "gradients accumulate over full parameters that stay": [
        of(
            NET,
            *(Sync(), forward(), Backward(), Sync("on"), forward(), Backward(), Step(), ZeroGrad())
            * 3,
            **KEEPS,
        )
    ],
    "what was written to full parameters that stay is read from shards": [
        of(NET, forward(At("inside", 0, Write(0, "live")), At("pre", 1, Read(0, "full"))), **KEEPS),
        of(NET, forward(At("post", 0, Write(0, "live"))), Read(0, "full"), **KEEPS),
        of(NET, forward(At("backward", 0, Write(1, "live"))), Backward(), Read(1, "full"), **KEEPS),
    ],
}

#: These compute what the unsharded program does with values as they are gathered.
COMPUTED_AS_GATHERED: dict[str, list[Program]] = {
    "no step writes to what is computed in another dtype": each(
        of(NET, *STEPS_WHILE_A_BACKWARD_IS_TO_COME, optimizer="in_backward", precision="bf16"),
        reshard=("true", "false"),
    ),
    "a block that ran twice is gathered for each backward, also of outputs written to in place": [
        of(
            NET,
            *(forward(At("backward", 1, Write())), Backward()),
            blocks=(Block("view", traits=("in_place", "twice")), Block()),
            root=("first",),
        )
    ],
    "what is written to a scalar after its gather is for the next": [
        of(
            NET,
            forward(At("backward", 1, Write(1))),
            Backward(),
            forward(),
            blocks=(Block(), Block("scalar")),
        )
    ],
}

#: These raise, by what their error says, and have computed with values as gathered until then.
REFUSED: dict[str, tuple[str, list[Program]]] = {
    "a block that was gathered is written to before it runs": (
        r"blocks\.1\..* was written to while group",
        [
            *each(
                *(of(net, forward(at)) for net in (TOGETHER, AHEAD) for at in BEFORE_IT_RUNS),
                precision=("", "bf16"),
            ),
            *each(
                *(of(net, forward(at)) for net in (TOGETHER, AHEAD) for at in BEFORE_IT_RUNS),
                world=(3,),
                reshard=("false",),
            ),
            *(
                of(net, forward(At("inside", 0, Write(1, form))))
                for net in (TOGETHER, AHEAD)
                for form in ("copy", "local")
            ),
            of(TOGETHER, forward(BEFORE_IT_RUNS[0]), world=1, precision="bf16"),
        ],
    ),
    "what was unsharded is written to before its forward": (
        "was written to while group",
        [
            of(NET, Gather(0), forward(), Gather(0), change, forward())
            for change in (Write(0), Swap(0))
        ],
    ),
    "the root is written to in a forward that keeps it for the next": (
        "was written to while group",
        [
            of(
                NET,
                *(Sync(), forward(At("post", 1, Write(ROOT)), how="unused"), forward()),
                traits=("keep_after_backward",),
            )
        ],
    ),
    "a shard and its full parameter are written to at once": (
        "both its full parameter, which its module holds while",
        [
            of(
                NET,
                forward(At("inside", 0, Write(0, "live")), At("inside", 0, Write(0))),
                reshard="true",
            )
        ],
    ),
    "a backward needs values of before a step in another backward": (
        "modified by an inplace operation",
        each(
            of(MULTIPLIES, *STEPS_WHILE_A_BACKWARD_IS_TO_COME, optimizer="in_backward"),
            reshard=("true", "false"),
        ),
    ),
    "on one rank a backward needs values that were written to": (
        "modified by an inplace operation",
        each(
            *(of(MULTIPLIES, *steps, world=1) for steps in BEFORE_BACKWARD),
            reshard=("true", "false"),
        ),
    ),
    "a state dict is loaded while backward runs": (
        "would have replaced values that its running|modified by an inplace operation",
        each(
            of(ONE_GROUP, forward(At("backward", 1, Load())), Backward()),
            root_reshard=("true", "false"),
            world=(1, 2),
        ),
    ),
    "parameters are replaced between forward and backward": (
        "were replaced .* between a forward and the end of its backward",
        [of(NET, forward(), Load(how="assign"), Backward())],
    ),
}


def _run(program: Program, on: Runtime) -> Trace:
    return Execution(program, on).run()


def _compare(program: Program, transport: str, oracle: Runtime) -> str | None:
    """Return what the sharded program raises; up to there it computes what the oracle does."""
    found = _run(program, runtime(transport))
    tolerance = tolerance_of([program.dtype, program.precision])
    differs = first_difference(found, _run(program, oracle), tolerance)
    assert differs is None, f"{differs} in {program} on {transport}"
    return found.raised


def _computes(rank: int, world_size: int, transport: str, program: Program, oracle: str) -> None:
    on = Gathered() if oracle == "gathered" else runtime(oracle)
    raised = _compare(program, transport, on)
    assert raised is None, f"{raised} in {program} on {transport}"


def _refuses(rank: int, world_size: int, transport: str, program: Program, said: str) -> None:
    raised = _compare(program, transport, Gathered())
    assert raised is not None, f"nothing raised in {program} on {transport}"
    assert re.search(said, raised), f"{raised} in {program} on {transport}"


def _on_threads(check: Any, programs: Iterable[Program], *args: str) -> None:
    for program in programs:
        run_threads(check, program.world, "c10d", program, *args)
    forget_meshes()


@pytest.mark.parametrize("name", COMPUTED)
def test_it_computes_what_one_process_does_where(name: str) -> None:
    _on_threads(_computes, COMPUTED[name], "unsharded")


@pytest.mark.parametrize("name", COMPUTED_AS_GATHERED)
def test_it_computes_with_what_was_gathered_where(name: str) -> None:
    _on_threads(_computes, COMPUTED_AS_GATHERED[name], "gathered")


@pytest.mark.parametrize("name", REFUSED)
def test_it_raises_where(name: str) -> None:
    said, programs = REFUSED[name]
    _on_threads(_refuses, programs, said)


def _late(program: Program) -> Program:
    """The same program, in whose forwards one rank is late before whatever is done."""
    steps = [
        dataclasses.replace(
            step,
            at=tuple(
                each for at in step.at for each in (dataclasses.replace(at, do=Sleep(1, 5)), at)
            ),
        )
        if isinstance(step, Forward)
        else step
        for step in program.steps
    ]
    return dataclasses.replace(program, steps=tuple(steps))


def _in_processes(rank: int, world_size: int, transport: str) -> None:
    """Run all programs of two ranks, and one of each kind that is refused."""

    def run(check: Any, programs: Iterable[Program], expected: str) -> None:
        for program in programs:
            if program.world == world_size:
                check(rank, world_size, transport, _late(program), expected)

    run(_computes, itertools.chain(*COMPUTED.values()), "unsharded")
    run(_computes, itertools.chain(*COMPUTED_AS_GATHERED.values()), "gathered")
    for said, programs in REFUSED.values():
        run(_refuses, programs[:1], said)


def test_so_do_processes_of_which_one_is_late(ranks: Ranks) -> None:
    """A value that is read too early or too late would show."""
    ranks(_in_processes, 2, "shm")

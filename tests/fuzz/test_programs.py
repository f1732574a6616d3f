"""Generated programs compute what they do without sharding, and the fuzzer notices if not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import pytest
import torch

from tests.fuzz import program as p
from tests.fuzz.campaign import run_all, run_campaign
from tests.fuzz.generator import covering, generate
from tests.fuzz.pool import Pool
from tests.fuzz.program import Block, Forward, Keep, Load, Program, Step, parse
from tests.fuzz.programs import main
from tests.fuzz.runtimes import TRANSPORTS
from tests.fuzz.shrink import shrink, simpler
from tests.fuzz.trace import Trace, first_difference

#: Seconds that a rank waits in a collective where another one is known to be gone.
WAIT = 4.0

#: Both ranks raise while the gather for a backward is under way, and begin with it again.
_RAISES = parse(
    "Program(blocks=(Block(kind='scalar', beside='parameter'), Block(), Block()), reshard='true', "
    "steps=(Forward(at=(At(when='backward', block=1, do=Raise()),)), Backward(), "
    "Forward(), Forward(), Forward()))"
)

_TRAINS = parse(
    "Program(blocks=(Block(), Block()), optimizer='adamw', steps=("
    "Forward(), Backward(), Step(), Forward(), Backward(), Step(), ZeroGrad(), Forward()))"
)

#: Its recomputed block misses a write, which the docs say, and torch's does not.
_MISSES = parse(
    "Program(blocks=(Block(returns='object', traits=('checkpoint',)),), reshard='true', steps=("
    "Forward(at=(At(when='backward', do=Write()),)), Backward(), Step(), Forward(), Forward()))"
)

#: Whose differences the docs tell, or which have no meaning without sharding.
_TOLD = [
    _MISSES,
    *map(
        parse,
        (
            "Program(blocks=(Block(),), traits=('keep_after_backward',), steps=(Sync(), Forward(at="
            "(At(when='backward', do=Write(form='foreach')),)), Backward(), Sync(to='on'), "
            "Forward(), Backward(), Step(), Forward()))",
            "Program(steps=(Copy(), Forward(), Swap(), Backward()))",
            "Program(blocks=(Block(returns='object'),), steps=(Forward(at=("
            "At(when='backward', do=Write(form='live', rank=1)),)), Backward()))",
            "Program(width=7, blocks=(Block(), Block(shard='root')), steps=(Forward(at=("
            "At(when='backward', do=Grads(block=1)),)), Backward()))",
            "Program(blocks=(Block(),), root=('scale',), steps=(Forward(), Load(), Forward(at=("
            "At(do=Raise(rank=1)),)), Backward()))",
            "Program(blocks=(Block(),), steps=(Forward(at=(At(when='backward', do=Load()),)), "
            "Backward()))",
            "Program(blocks=(Block(), Block()), optimizer='in_backward', steps=(Forward(at=("
            "At(when='backward', do=Write(block=1)),)), Backward(), Forward()))",
            "Program(blocks=(Block(), Block()), precision='bf16', traits=('forward_prefetch',), "
            "steps=(Forward(at=(At(when='inside', do=Write(block=1)),)),))",
            "Program(blocks=(Block(), Block()), reshard='true', steps=(Forward(at=("
            "At(when='backward', block=1, do=Write(block=1)),)), Backward()))",
            "Program(precision='bf16-fp32', blocks=(Block(kind='view'), Block(kind='norm')), "
            "root=('first',), reshard='false', steps=(Forward(at=(At(do=Ema(target=0)),)), "
            "Forward(), Backward(which='first')))",
            "Program(blocks=(Block(),), root=('last_tied',), optimizer='in_backward', "
            "steps=(Sync(), Forward(), Backward(), Sync(to='on'), "
            "Forward(at=(At(do=Grads(block=-1)),)), Backward()))",
            "Program(blocks=(Block(traits=('frozen',)),), root=('last_tied',), "
            "precision='bf16', steps=(Sync(), Forward(), Backward(), Sync(to='on'), "
            "Forward(at=(At(do=Grads(block=-1)),)), Backward()))",
            "Program(blocks=(Block(shard='root'),), steps=(Forward(at=(At(when='pre', "
            "do=Grads()),)), Backward()))",
            "Program(blocks=(Block(), Block(tied_to=0), Block(shard='root', tied_to=0)), "
            "steps=(Forward(at=(At(do=Write(block=2, form='live')),)),))",
            "Program(blocks=(Block(), Block(shard='with_previous')), root=('last',), "
            "steps=(Gather(), Forward(at=(At(when='inside', do=Write()),))))",
            "Program(blocks=(Block(),), root=('last_tied',), optimizer='in_backward', "
            "steps=(Forward(at=(At(when='inside', do=Grads()),)), Forward(), "
            "Backward(which='last'), Backward()))",
            "Program(blocks=(Block(kind='scalar', traits=('in_place', 'twice')), "
            "Block(kind='norm')), steps=(Forward(), Backward(), Step(), Forward(), Backward()))",
            "Program(blocks=(Block(),), steps=(Forward(at=(At(when='pre', block=1, do=Grads()),)), "
            "Backward(), Swap()))",
            "Program(blocks=(Block(),), steps=(Sync(), Forward(), Backward(), Sync(to='on'), "
            "Keep(), Load(source='kept', how='assign'), Forward(at=(At(do=Write()),)), "
            "Backward()))",
            "Program(blocks=(Block(beside='parameter', traits=('twice',)),), "
            "steps=(Forward(at=(At(do=Write()),)),))",
            "Program(blocks=(Block(traits=('checkpoint',)),), root=('last',), reshard='false', "
            "steps=(Forward(at=(At(do=Write(form='live')),)), Backward(), "
            "Forward(at=(At(do=Write(block=-1)),))))",
            "Program(width=5, dtype='bfloat16', blocks=(Block(), Block(shard='with_previous', "
            "beside='parameter', traits=('twice', 'frozen'))), steps=(Forward(at=("
            "At(when='pre', block=1, do=Write(block=1)),)), Forward()))",
            "Program(blocks=(Block(), Block(shard='with_previous')), precision='bf16', steps=("
            "Forward(at=(At(do=Write(block=1)),)), Backward()))",
            "Program(blocks=(Block(), Block(shard='with_previous')), steps=("
            "Forward('no_grad', at=(At(do=Write()),)), Forward()))",
            "Program(blocks=(Block(returns='object', beside='parameter'),), "
            "steps=(Forward(at=(At(do=Raise()),)),))",
            "Program(blocks=(Block(), Block(shard='with_previous')), "
            "traits=('keep_after_backward',), steps=(Sync(), Forward(at=(At(when='backward', "
            "do=Write(form='live')),)), Backward(), "
            "Forward(at=(At(when='body', block=1, do=Ema()),))))",
            "Program(blocks=(Block(), Block()), steps=(Forward(at=(At(when='inside', do=Grads()), "
            "At(block=1, do=Write(block=1)))), Backward()))",
            "Program(blocks=(Block(), Block()), reshard='false', steps=(Forward(at=("
            "At(do=Write(form='live')), At(when='body', block=1, do=Ema()))), Forward()))",
            "Program(blocks=(Block(),), steps=(Copy(), Forward(at=(At(do=Write()),)), "
            "Forward(model=1), Forward(at=(At(when='body', do=Raise(rank=0)),)), Backward()))",
        ),
    ),
]


@pytest.mark.timeout(600)
def test_programs_compute_what_they_do_without_sharding() -> None:
    # They hold more pairs of features than the first 100 do.
    programs = covering(generate(1500, seed=0, world=2), 24)
    finds = [judged for judged in run_campaign(programs, 2, TRANSPORTS, pools=1) if judged.finds]
    said = [f"{judged.program}\n{judged.finds}" for judged in finds]
    assert not said, f"{len(said)} finds, among them:\n\n" + "\n\n".join(said[:5])


# -- what is known to be wrong is found ------------------------------------------------------------


@pytest.mark.parametrize(
    ("sabotage", "transport", "program", "kind"),
    [
        ("stale values", "collectives", _MISSES, "differs (torch equal)"),
        ("skip gathers", "collectives", _TRAINS, "differs (torch equal)"),
        ("stale values", "collectives", _TRAINS, "differs (torch equal)"),
        (
            "write to what users hold",
            "c10d",
            Program(blocks=(Block(),), steps=(Keep(), Load(how="assign"), Forward())),
            "differs (torch equal)",
        ),
        ("raise", "shm", _TRAINS, "raises (torch equal)"),
    ],
)
def test_a_broken_runtime_is_found(
    sabotage: str, transport: str, program: Program, kind: str
) -> None:
    with Pool(2, sabotage, collective_seconds=WAIT) as pool:
        [judged] = run_all(pool, [program], [transport])
    assert judged.finds[transport].kind == kind


def test_ranks_that_hang_are_found() -> None:
    with Pool(2, "hang", hang_seconds=6) as pool:
        [judged] = run_all(pool, [Program(steps=(Forward(),))], ["c10d"])
    assert judged.finds["c10d"].kind.startswith("hangs")
    assert "in wait" in judged.finds["c10d"].detail, "the stack says where"


def test_what_is_not_broken_is_no_find() -> None:
    with Pool(2) as pool:
        judged, *others = run_all(pool, [_TRAINS, *[_RAISES] * 3])
    assert not judged.finds
    assert judged.torch == "equal"
    assert not [each for each in others if each.finds], "freed memory is not written to"


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_what_the_docs_tell_is_no_find(world: int) -> None:
    programs = [dataclasses.replace(each, world=world) for each in _TOLD]
    with Pool(world, collective_seconds=WAIT) as pool:
        judged = run_all(pool, programs, ["shm"])  # each transport is judged by itself
    assert not [each for each in judged if each.finds]


def test_ranks_run_on_after_a_program_that_killed_them() -> None:
    with Pool(2, "die", collective_seconds=WAIT) as pool:
        judged = run_all(pool, [Program(steps=(Forward(),)), _TRAINS], ["shm"])
    assert [each.torch for each in judged] == ["equal"] * 2
    assert [each.finds["shm"].kind for each in judged] == ["dies (torch equal)"] * 2


# -- programs as values ----------------------------------------------------------------------------


def test_programs_print_as_what_makes_them() -> None:
    for program in generate(200, seed=3, world=2):
        assert parse(repr(program)) == program


def test_the_same_seed_makes_the_same_programs() -> None:
    assert list(generate(50, seed=5, world=3)) == list(generate(50, seed=5, world=3))


@pytest.mark.parametrize("text", ["Programm()", "Block()", "__import__('os')", "Program("])
def test_what_is_not_a_program_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a printed Program"):
        parse(text)


def test_everything_that_a_program_may_have_is_generated() -> None:
    made = set().union(*(p.features(program) for program in generate(1500, seed=1, world=4)))
    wanted = {each.__name__ for each in (*p.ACTIONS, *p.STEPS)} - {"Raise"}
    wanted |= {f"block {each}" for each in (*Block.KINDS, *Block.TRAITS)}
    wanted |= {f"returns {each}" for each in Block.RETURNS}
    wanted |= {f"shard {each}" for each in Block.SHARDS}
    wanted |= {f"at {each}" for each in p.At.WHENS}
    wanted |= {f"Write {each}" for each in p.Write.FORMS} | {"Write on one rank"}
    wanted |= {f"width {each}" for each in Program.WIDTHS} | set(Program.TRAITS)
    wanted |= {f"optimizer {each}" for each in Program.OPTIMIZERS} | set(Program.DTYPES)
    wanted |= {"Raise in a forward", "Raise on one rank", "mesh hybrid", "tied"}
    assert wanted <= made


def test_programs_are_chosen_for_the_pairs_of_features_that_they_hold() -> None:
    def pairs(programs: Iterable[Program]) -> set[tuple[str, str]]:
        each = (itertools.combinations(sorted(p.features(one)), 2) for one in programs)
        return set(itertools.chain.from_iterable(each))

    programs = list(generate(200, seed=0, world=2))
    chosen = covering(programs, 30)
    assert len(chosen) == 30
    assert len(pairs(chosen)) > len(pairs(programs[:70]))  # of twice as many and more


def test_shrinking_keeps_what_shows_and_takes_away_the_rest() -> None:
    [program] = [
        each
        for each in generate(300, seed=9, world=2)
        if len(each.steps) > 6 and len(each.blocks) > 2 and Step() in each.steps
    ][:1]
    small = shrink(program, lambda programs: [Step() in each.steps for each in programs])
    assert small == Program(steps=(Step(),))


def test_what_is_simpler_is_smaller() -> None:
    for program in generate(30, seed=2, world=2):
        assert all(len(repr(each)) < len(repr(program)) for each in simpler(program))


def test_a_program_can_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", "Program(steps=(Forward(),))"]) == 0
    assert "shm: equal (torch equal)" in capsys.readouterr().out
    assert main(["--replay", "Program(steps=(Forwards(),))"]) == 2


# -- traces ----------------------------------------------------------------------------------------


def _trace(*values: torch.Tensor | None) -> Trace:
    trace = Trace()
    for index, value in enumerate(values):
        trace.note(str(index), value)
    return trace


def test_one_element_is_a_difference() -> None:
    other = torch.ones(3, 3)
    other[1, 2] += 1e-4
    assert first_difference(_trace(torch.ones(3, 3)), _trace(other), 1e-5) is not None
    assert first_difference(_trace(torch.ones(3, 3)), _trace(torch.ones(3, 3)), 1e-5) is None


def test_a_missing_gradient_and_a_missing_entry_are_differences() -> None:
    one = torch.ones(2)
    assert "nothing in place" in str(first_difference(_trace(None), _trace(one), 1e-5))
    assert "an empty tensor" in str(first_difference(_trace(one[:0]), _trace(None), 1e-5))
    assert "nothing after 1" in str(first_difference(_trace(one), _trace(one, one), 1e-5))
    assert "not there" in str(first_difference(_trace(one, one), _trace(one), 1e-5))


def test_what_raised_is_compared_as_far_as_it_came() -> None:
    one = torch.ones(2)
    short = dataclasses.replace(_trace(one), raised="RuntimeError")
    assert first_difference(short, _trace(one, one), 1e-5) is None
    assert first_difference(short, _trace(2 * one, one), 1e-5) is not None

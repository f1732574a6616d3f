"""``simulate`` as a user meets it: what ranks return, print, share and raise."""

from __future__ import annotations

import io
import os
import pdb
import re
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.base.errors import PeerLostError, RanksDivergedError, ShardwiseError
from shardwise.schedules import Exhaustive, FixedOrder, Random
from shardwise.timeline import record


def _build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    for layer in (model[0], model[2]):
        shardwise.fully_shard(layer)
    return shardwise.fully_shard(model)


def _train(model: nn.Module, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    for step in range(steps):
        seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 5, generator=seed)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_ranks_return_live_models_with_their_shards() -> None:
    ranks = shardwise.simulate(_build, 4)
    shapes = []
    for rank in ranks:
        weight = rank.value[0].weight
        assert isinstance(weight, DTensor)
        shapes.append(tuple(weight.to_local().shape))
    assert shapes == [(2, 5)] * 4


def test_closures_arguments_and_what_is_printed() -> None:
    factor = 3

    def each(offset: int) -> int:
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}")
        return factor * dist.get_rank() + offset

    ranks = shardwise.simulate(each, 3, 100)
    assert [rank.value for rank in ranks] == [100, 103, 106]
    assert [rank.output for rank in ranks] == [f"rank {r} of 3\n" for r in range(3)]
    assert len(ranks) == 3


def test_a_simulation_keeps_its_ranks_over_several_functions() -> None:
    models: dict[int, nn.Module] = {}
    threads = set(threading.enumerate())

    def build() -> None:
        models[dist.get_rank()] = _build()
        torch.manual_seed(dist.get_rank())

    def train() -> tuple[float, float]:
        return _train(models[dist.get_rank()], 2), torch.rand(()).item()

    with shardwise.simulation(2) as world:
        world.run(build)
        world.run(train)
        found = [world[rank].value for rank in range(2)]
    torch.manual_seed(1)
    assert found[1][1] == torch.rand(()).item(), "random numbers go on where they were"
    assert found[0][0] != found[1][0]
    assert set(threading.enumerate()) <= threads


def test_ranks_find_their_variables_and_have_as_many_threads_as_before() -> None:
    def each() -> tuple[str, str, int]:
        return os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads()

    expected = [("0", "2", torch.get_num_threads()), ("1", "2", torch.get_num_threads())]
    assert [rank.value for rank in shardwise.simulate(each, 2)] == expected


def test_ranks_run_one_at_a_time_and_in_the_same_order_each_time() -> None:
    def each() -> list[int]:
        for _ in range(3):
            seen.append(dist.get_rank())
            dist.barrier()
        return seen

    orders = []
    for _ in range(2):
        seen: list[int] = []
        shardwise.simulate(each, 3)
        orders.append(seen)
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


# -- failures --------------------------------------------------------------------------------------


def _fails_on_one() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        raise KeyError("layers.3.weight")
    dist.all_reduce(torch.ones(2))


def test_a_failure_names_its_rank_and_what_the_others_were_about_to_do() -> None:
    with pytest.raises(KeyError, match=r"layers\.3\.weight") as failure:
        shardwise.simulate(_fails_on_one, 3)
    (note,) = failure.value.__notes__
    assert note.startswith("On rank 1 of 3. ")
    assert "rank 0" in note
    assert "rank 2 waits in all-reduce SUM, collective number 1" in note
    # Behind the line that called simulate(), and those of simulate(), the user's come first.
    frames = traceback.extract_tb(failure.value.__traceback__)
    ours = ("shardwise/simulated", "shardwise/_torch/threads.py")
    behind = [each.name for each in frames if not any(part in each.filename for part in ours)]
    assert behind[1] == "_fails_on_one"


def _in_another_collective() -> None:
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(2), 0)
    else:
        dist.all_reduce(torch.ones(2))


def _of_another_size() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def _of_another_shape() -> None:
    """As many elements, in as many rows for each rank."""
    shape = (4, 2) if dist.get_rank() else (2, 4)
    shardwise.fully_shard(nn.Linear(*shape, bias=False))(torch.ones(shape[0]))


def _in_two_groups() -> None:
    """Each rank waits for the other one in another group."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    dist.barrier(groups[dist.get_rank()])


@pytest.mark.parametrize(
    "part", [_in_another_collective, _of_another_size, _of_another_shape, _in_two_groups]
)
def test_ranks_that_part_fail_at_once(part: Any) -> None:
    with pytest.raises(RanksDivergedError, match=r"rank 1 (calls|waits)"):
        shardwise.simulate(part, 2)


def test_a_rank_that_has_ended_is_named() -> None:
    with pytest.raises(PeerLostError, match="rank 0 has ended"):
        shardwise.simulate(lambda: dist.barrier() if dist.get_rank() else None, 2)


def test_ranks_may_catch_the_loss_of_another() -> None:
    def each() -> str:
        if dist.get_rank() == 0:
            return "early"
        with pytest.raises(PeerLostError):
            dist.barrier()
        return "went on"

    assert [rank.value for rank in shardwise.simulate(each, 2)] == ["early", "went on"]


def test_bad_use_is_told() -> None:
    with pytest.raises(RuntimeError, match="this process is rank 0 of a world of 2"):
        shardwise.simulate(lambda: shardwise.simulate(_build, 2), 2)
    with pytest.raises(ValueError, match="world_size: found 0"):
        shardwise.simulate(_build, 0)
    with pytest.raises(TypeError, match="function: found 3"):
        shardwise.simulate(3, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hosts: found 1 names"):
        shardwise.simulate(_build, 2, hosts=["one"])
    group = shardwise.simulate(lambda: dist.group.WORLD, 2)[0].value
    with pytest.raises(RuntimeError, match="is no rank of this simulated world"):
        group.allreduce([torch.ones(1)]).wait()
    ranks = shardwise.simulate(_build, 2)
    with pytest.raises(RuntimeError, match="its simulation has ended: make the model"):
        shardwise.simulate(lambda: ranks[dist.get_rank()].value(torch.ones(1, 5)), 2)


def test_a_process_group_that_exists_is_told(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="this process is rank 0 of a world of 1"):
            shardwise.simulate(_build, 2)
    finally:
        dist.destroy_process_group()


def test_a_breakpoint_stops_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step over a collective: the others run meanwhile, and come back."""
    values: list[int] = []
    said = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("p value\nnext\np value.item()\ncontinue\n"), stdout=said)
    debugger.use_rawinput = False

    def each() -> int:
        value = torch.tensor(dist.get_rank() + 1)
        if dist.get_rank() == 1:
            debugger.set_trace()
        dist.all_reduce(value)
        values.append(dist.get_rank())
        return int(value)

    assert [rank.value for rank in shardwise.simulate(each, 3)] == [6, 6, 6]
    assert "tensor(2)" in said.getvalue()
    assert "(Pdb) 6" in said.getvalue()
    assert sorted(values) == [0, 1, 2]


# -- schedules -------------------------------------------------------------------------------------


def _losses() -> float:
    return _train(_build(), 2)


def test_a_program_that_depends_on_the_order_is_found() -> None:
    def each() -> int:
        dist.barrier()
        shared.append(dist.get_rank())
        dist.barrier()
        return shared[-1] if len(shared) > 2 else shared[0]

    shared: list[int] = []
    with pytest.raises(ShardwiseError, match=r"other values with schedule=FixedOrder\(\["):
        shardwise.simulate(each, 2, schedule=Exhaustive(100))


def test_all_orders_of_a_small_program_are_tried_and_no_more() -> None:
    def each() -> float:
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    ranks = shardwise.simulate(each, 2, schedule=Exhaustive(1000))
    assert 2 < ranks.orders < 1000
    assert shardwise.simulate(each, 2, schedule=Exhaustive(3)).orders == 3


def test_a_failure_prints_the_order_that_repeats_it() -> None:
    def each() -> None:
        shared.clear()
        dist.barrier()
        shared.append(dist.get_rank())
        if shared[0] == 1:
            raise ArithmeticError("rank 1 came first")
        dist.barrier()

    shared: list[int] = []
    fails = []
    for seed in range(20):
        try:
            shardwise.simulate(each, 2, schedule=Random(seed))
        except ArithmeticError:
            fails.append(seed)
    assert 0 < len(fails) < 20
    for _ in range(2):
        with pytest.raises(ArithmeticError) as found:
            shardwise.simulate(each, 2, schedule=Random(fails[0]))
        assert f"schedule=Random({fails[0]})" in found.value.__notes__[-1]
    with pytest.raises((ArithmeticError, ShardwiseError)) as failure:
        shardwise.simulate(each, 2, schedule=Exhaustive(1000))
    assert "FixedOrder([" in failure.value.__notes__[-1]
    order = eval(failure.value.__notes__[-1].partition("schedule=")[2], {"FixedOrder": FixedOrder})
    with pytest.raises(ArithmeticError):
        shardwise.simulate(each, 2, schedule=order)


# -- what can be seen ------------------------------------------------------------------------------


def test_inspect_shows_the_rows_of_each_rank() -> None:
    def build() -> nn.Module:
        model = nn.Linear(1, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0], [2.0], [3.0]]))
        return shardwise.fully_shard(model)

    report = shardwise.inspect(shardwise.simulate(build, 2))
    assert report.values == {"weight": {0: [[1.0], [2.0]], 1: [[3.0]]}}
    assert "<iframe" in report._repr_html_()
    with pytest.raises(TypeError, match="found a value of type int, expected each rank"):
        shardwise.inspect(shardwise.simulate(lambda: 3, 2))


def test_the_timeline_says_what_each_rank_did_in_order() -> None:
    timeline = shardwise.simulate(_losses, 2).timeline()
    assert re.fullmatch(r"a step is \d+ events of all ranks; no time was taken", timeline.summary())
    one, two = timeline.ranks
    assert len(one.steps) == 2
    names = [(span.activity, span.name) for span in one.spans]
    assert names == [(span.activity, span.name) for span in two.spans]
    assert [span.begin for span in one.spans] == sorted({span.begin for span in one.spans})
    assert any(span.activity.value == "reduce-scatter" for span in one.spans)


def test_a_program_may_record_itself() -> None:
    def each() -> int:
        if dist.get_rank():
            return _train(_build(), 1) != 0
        with record() as recording:
            _train(_build(), 1)
        assert recording.timeline is not None
        return len(recording.timeline.ranks[0].spans)

    assert shardwise.simulate(each, 2)[0].value > 3


# -- the rest of the world -------------------------------------------------------------------------


def test_wires_between_hosts_encode() -> None:
    def each() -> float:
        model = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(1.0, 2.0, 64 * 64).view(64, 64))
        shardwise.fully_shard(model, wire=shardwise.Wire(gather="fp8"))
        return model(torch.eye(64)).sum().item()

    one = shardwise.simulate(each, 2)
    two = shardwise.simulate(each, 2, hosts=["here", "there"])
    assert one[0].value == pytest.approx(64 * 64 * 1.5)
    assert two[0].value == two[1].value != one[0].value

"""Transports with wires: the contract of all transports, within the error of the format."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import PeerLostError, RanksDivergedError
from shardwise.insight.schema.sharding import parse_wires
from shardwise.transport import carrier
from shardwise.transport.base import Call, Kind, Label, LocalTransport, Reduce
from shardwise.transport.codecs import BLOCK
from shardwise.transport.encoded import EncodedTransport
from shardwise.transport.select import ChannelOptions, compose, select_transport
from shardwise.transport.shm import handshake
from shardwise.transport.wire import PLAIN, Wire, WireError, Wires
from tests.harness import Processes, run_ranks
from tests.threads import on_hosts, run_threads
from tests.transport.encoded import (
    CPU,
    FEEDBACK,
    INT8,
    MIXED,
    SHARE,
    EncodedChecks,
    Source,
    check_contract,
    over_world,
    same_bits,
    through,
    values_of,
)
from tests.transport.streams import fuzz
from tests.worlds import on_processes

pytestmark = pytest.mark.usefixtures("new_ranks")

RANDOM = Wire(reduce="int8", rounding="stochastic", seed=5)
WIRES = [
    Wire(gather="bf16", reduce="bf16"),
    Wire(gather="fp8", reduce="fp8"),
    INT8,
    Wire(gather="int8"),
    FEEDBACK,
]


# -- the contract ----------------------------------------------------------------------------------


def _contract(rank: int, world_size: int, wire: Wire, rounds: int) -> None:
    check_contract(over_world(wire), rounds)


@pytest.mark.parametrize(
    ("hosts", "wire"),  # by rank: of one rank each, or of several, where there are two levels
    [
        *(("abc", wire) for wire in WIRES),
        *(("ab", wire) for wire in (INT8, FEEDBACK)),
        *(("aabb", wire) for wire in (INT8, MIXED, WIRES[3])),
        *(pytest.param("ab", wire, marks=pytest.mark.long) for wire in WIRES[:2] + WIRES[3:4]),
        *(pytest.param("aabbcc", wire, marks=pytest.mark.long) for wire in (INT8, MIXED)),
        *(pytest.param("aaabbb", wire, marks=pytest.mark.long) for wire in (INT8, MIXED)),
    ],
    ids=str,
)
def test_results_are_within_the_error_of_the_format(hosts: str, wire: Wire) -> None:
    with on_hosts(hosts):
        run_threads(_contract, len(hosts), wire, 8)


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.long)])
@on_processes()
def test_messages_of_real_processes_keep_the_contract(rank: int, world_size: int) -> None:
    for wire in (INT8, MIXED):
        _contract(rank, world_size, wire, 20)
    checks = EncodedChecks(over_world(INT8, "collectives"))
    fuzz(checks, 10, seed=4, largest=3000)
    _nobody_waits(rank, world_size)


def _nobody_waits(rank: int, world_size: int) -> None:
    """A reduction that is dropped harms none that follows."""
    transport = over_world(INT8)
    for _ in range(3):
        tensor = torch.full((5000,), 1.0 + rank)
        work = transport.all_reduce([tensor], Reduce.SUM, Label("dropped"))
        del work
        gc.collect()
    transport.all_reduce([tensor], Reduce.SUM, Label("kept")).wait()
    expected = world_size * (world_size + 1) / 2
    torch.testing.assert_close(tensor, torch.full((5000,), expected), rtol=0.01, atol=0)


# -- the same bits ---------------------------------------------------------------------------------


def _reduced(rank: int, world_size: int, wire: Wire, steps: int) -> list[torch.Tensor]:
    transport = over_world(wire)
    sources = [Source() for _ in range(4)]
    found = []
    for step in range(steps):
        tensors = [values_of(rank, numel, step) for numel in (1, 3, 701, 4 * BLOCK)]
        if rank == 1 and step == 1:
            tensors[2][3] = float("nan")
        transport.start(
            Call(Kind.ALL_REDUCE, tensors, tensors, Reduce.AVG, Label("group"), of=sources)
        ).wait()
        shard, full = values_of(rank, 300, step), torch.empty(300 * world_size)
        transport.all_gather([shard], [full], Label("group")).wait()
        own = full[rank * 300 : (rank + 1) * 300]
        assert torch.equal(own, through(shard, wire.gather)), "what the others decode"
        assert torch.equal(shard, values_of(rank, 300, step)), "which changes no shard"
        found += [*tensors, full]
    return found


@pytest.mark.parametrize("wire", [*WIRES[:3], FEEDBACK, MIXED, RANDOM], ids=str)
@pytest.mark.parametrize("hosts", ["ab", "abc", "abcd", "aabb"])
def test_all_ranks_end_with_the_same_bits(wire: Wire, hosts: str) -> None:
    with on_hosts(hosts):
        first, *others = run_threads(_reduced, len(hosts), wire, 3)
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("wire", [INT8, RANDOM], ids=str)
def test_a_repeated_training_has_the_same_bits(wire: Wire) -> None:
    once, again = (run_threads(_reduced, 2, wire, 3)[0] for _ in range(2))
    assert same_bits(once, again)


def test_another_seed_rounds_otherwise() -> None:
    other = Wire(reduce="int8", rounding="stochastic", seed=6)
    once, again = (run_threads(_reduced, 2, wire, 1)[0] for wire in (RANDOM, other))
    assert not same_bits(once, again)


# -- errors ----------------------------------------------------------------------------------------


def _error_of_an_average(rank: int, world_size: int, wire: Wire) -> float:
    tensor = values_of(rank, 64 * BLOCK)
    over_world(wire).all_reduce([tensor], Reduce.AVG, Label("group")).wait()
    exact = torch.stack([values_of(each, 64 * BLOCK) for each in range(world_size)]).mean(0)
    return float((tensor - exact).abs().max())


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8"])
def test_the_error_does_not_grow_with_the_ranks(name: str) -> None:
    largest = max(float(values_of(rank, 64 * BLOCK).abs().max()) for rank in range(6))
    for world_size in (2, 6):
        wire = Wire(reduce=name)  # type: ignore[arg-type]
        error = run_threads(_error_of_an_average, world_size, wire)[0]
        assert error <= 2 * SHARE[name] * largest


def _fed_back(rank: int, world_size: int, wire: Wire, steps: int, numel: int) -> float:
    """How far the sum over steps is from the exact one, in units of one step's value."""
    transport, source = over_world(wire), Source()
    total, exact = torch.zeros(2, numel, dtype=torch.float64)
    for step in range(steps):
        values = [values_of(each, numel, step) for each in range(world_size)]
        exact += torch.stack(values).double().mean(0)
        own = values[rank]
        transport.start(
            Call(Kind.ALL_REDUCE, [own], [own], Reduce.AVG, Label("group"), of=[source])
        ).wait()
        total += own
    return float((total - exact).abs().max())


@settings(max_examples=4)
@given(world_size=st.integers(2, 3), numel=st.integers(1, 900))
@pytest.mark.parametrize("name", ["bf16", "fp8", "int8"])
def test_with_feedback_the_sum_over_steps_is_off_by_one_error(
    name: str, world_size: int, numel: int
) -> None:
    wire = Wire(reduce=name, error_feedback=True)  # type: ignore[arg-type]
    short, long = (run_threads(_fed_back, world_size, wire, n, numel)[0] for n in (3, 12))
    # What is kept back is at most half a step of each encoding, of values up to about 5.
    bound = 2 * SHARE[name] * 6
    assert short <= bound
    assert long <= bound


def _beside_another(rank: int, world_size: int) -> float:
    """As above, beside a gradient that is larger, and is there in every second step only."""
    transport, source, other = over_world(FEEDBACK), Source(), Source()
    total, exact = torch.zeros(2, 300, dtype=torch.float64)
    for step in range(12):
        values = [values_of(each, 300, step) for each in range(world_size)]
        exact += torch.stack(values).double().mean(0)
        own = values[rank]
        tensors, of = [own], [source]
        if step % 2 == 0:
            tensors, of = [100 * own, own], [other, source]
        call = Call(Kind.ALL_REDUCE, tensors, tensors, Reduce.AVG, Label("group"), of=of)
        transport.start(call).wait()
        total += own
    return float((total - exact).abs().max())


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_what_was_lost_belongs_to_its_parameter_whichever_others_get_a_gradient(hosts: str) -> None:
    with on_hosts(hosts):
        assert max(run_threads(_beside_another, len(hosts))) <= 2 * SHARE["int8"] * 6


def _scattered_back(rank: int, world_size: int) -> tuple[float, float]:
    numel, chunk = 1000, 400
    found = []
    for wire in (Wire(reduce="int8"), FEEDBACK):
        transport, source = over_world(wire), Source()
        total, exact = torch.zeros(2, chunk, dtype=torch.float64)
        for step in range(30):
            values = [values_of(each, numel, step) + 0.03 for each in range(world_size)]
            mine = slice(rank * chunk, (rank + 1) * chunk)
            expected = torch.stack(values).double().mean(0)[mine]
            exact[: len(expected)] += expected
            shard = torch.zeros(chunk)
            transport.start(
                Call(
                    Kind.REDUCE_SCATTER,
                    [values[rank]],
                    [shard],
                    Reduce.AVG,
                    Label("group"),
                    of=[source],
                )
            ).wait()
            total[: len(expected)] += shard[: len(expected)]
        found.append(float((total - exact)[: len(expected)].abs().mean()))
    return found[0], found[1]


def test_feedback_of_a_reduce_scatter_beats_none() -> None:
    for without, fed_back in run_threads(_scattered_back, 3):
        assert fed_back < without / 3


def _spoil(rank: int, world_size: int, bad: float) -> Any:
    transport, source = over_world(FEEDBACK), Source()
    tensor = torch.full((6 * BLOCK,), 0.3)
    if rank == 0:
        tensor[2 * BLOCK + 5] = bad
    transport.start(
        Call(Kind.ALL_REDUCE, [tensor], [tensor], Reduce.AVG, Label("group"), of=[source])
    ).wait()
    again = torch.full((6 * BLOCK,), 0.3)
    transport.start(
        Call(Kind.ALL_REDUCE, [again], [again], Reduce.AVG, Label("group"), of=[source])
    ).wait()
    return tensor, again, transport.overflows


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_passes_as_such_and_is_counted_and_not_kept(bad: float) -> None:
    results = run_threads(_spoil, 2, bad)
    for tensor, again, _ in results:
        finite = tensor.isfinite()
        assert not finite[2 * BLOCK : 3 * BLOCK].any()
        rest = tensor[finite]
        assert len(rest) == 5 * BLOCK
        torch.testing.assert_close(rest, torch.full_like(rest, 0.3), rtol=0.01, atol=0)
        torch.testing.assert_close(again, torch.full_like(again, 0.3), rtol=0.01, atol=0)
    # Rank 0 owns the first half: its own contribution is never encoded, and its sums are, once.
    assert [overflows for *_, overflows in results] == [1, 0]


# -- which tensors ---------------------------------------------------------------------------------


def _bytes(rank: int, world_size: int, wire: Wire, dtype: torch.dtype) -> tuple[int, bool]:
    transport = over_world(wire)
    tensor = torch.ones(64 * BLOCK).to(dtype)
    transport.all_reduce([tensor], Reduce.AVG, Label("group")).wait()
    return transport.all_to_all.bytes_sent, torch.equal(tensor, torch.ones_like(tensor))


@pytest.mark.parametrize(
    ("name", "dtype", "bytes_per_element"),
    [
        ("int8", torch.float32, 1 + 4 / BLOCK),
        ("int8", torch.bfloat16, 1 + 4 / BLOCK),
        ("fp8", torch.float16, 1 + 4 / BLOCK),
        ("bf16", torch.float32, 2),
        ("bf16", torch.bfloat16, 0),  # it is what would be sent anyway
        ("int8", torch.float64, 0),
        ("int8", torch.complex64, 0),
    ],
)
def test_what_gets_smaller_is_encoded_and_the_rest_left_alone(
    name: str, dtype: torch.dtype, bytes_per_element: float
) -> None:
    wire = Wire(reduce=name)  # type: ignore[arg-type]
    for sent, is_right in run_threads(_bytes, 2, wire, dtype):
        assert is_right
        # Of two ranks, each sends half of the contributions, and half of the sums.
        assert sent == 64 * BLOCK * bytes_per_element


# -- which dimensions ------------------------------------------------------------------------------


@on_processes(2)
def test_what_stays_on_the_host_is_not_encoded(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    for requested in ("auto", "shm"):
        found = compose(group, CPU, ChannelOptions(requested, INT8))
        assert found is select_transport(group, CPU, requested), "it does not leave the host"
    assert compose(group, CPU, ChannelOptions("c10d", PLAIN.common)).name == "gloo"
    one = compose(group, CPU, ChannelOptions("c10d", INT8))
    assert isinstance(one, EncodedTransport)
    assert one is compose(group, CPU, ChannelOptions("c10d", Wire(gather="int8", reduce="int8")))
    assert one is not compose(group, CPU, ChannelOptions("c10d", FEEDBACK))
    assert isinstance(compose(None, CPU, ChannelOptions("c10d", INT8)), LocalTransport)


@pytest.mark.parametrize("names", [["one", "one"], ["one", "another"]], ids=" ".join)
@on_processes(2, processes=Processes.NEW)
def test_messages_are_encoded_where_they_leave_the_host(
    rank: int, world_size: int, names: list[str]
) -> None:
    """Ranks that cannot share memory: on one host, and as if they were on two."""
    handshake.libc.has_futex = lambda: False  # type: ignore[assignment]
    carrier._name = lambda: names[rank]
    found = compose(dist.group.WORLD, CPU, ChannelOptions(wire=INT8))
    assert isinstance(found, EncodedTransport) == (names[0] != names[1])


# -- ranks that go, and ranks that disagree --------------------------------------------------------


def _alone(rank: int, world_size: int) -> str:
    transport = over_world(INT8)
    tensor = torch.ones(5000)
    transport.all_reduce([tensor], Reduce.AVG, Label("model.layers.3")).wait()
    if rank == 1:
        os._exit(0)
    with pytest.raises(PeerLostError) as caught:
        transport.all_reduce([tensor], Reduce.AVG, Label("model.layers.3")).wait()
    return str(caught.value)


def test_a_lost_peer_is_named() -> None:
    # Nobody waits for the timeout: that would be too late for the test.
    outcome = run_ranks(_alone, 2, pg_timeout=600, expect_failures=True)[0]
    assert outcome.ok, outcome.error
    assert "lost rank 1 during the all-" in outcome.result
    assert "of model.layers.3" in outcome.result


def _disagree(rank: int, world_size: int, wires: list[Wire], collective: str) -> str:
    transport = compose(dist.group.WORLD, CPU, ChannelOptions("c10d", wires[rank]))
    tensor, full = torch.ones(5000), torch.empty(10000)

    def call() -> None:
        if collective == "gather":
            transport.all_gather([tensor], [full], Label("model.layers.3")).wait()
        else:
            transport.all_reduce([tensor], Reduce.AVG, Label("model.layers.3")).wait()

    with pytest.raises(RanksDivergedError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("wires", "collective", "expected"),
    [
        ([INT8, Wire(gather="bf16", reduce="bf16")], "reduce", ["wire int8", "wire bf16"]),
        pytest.param([INT8, PLAIN.common], "gather", ["wire int8"], marks=pytest.mark.long),
    ],
)
def test_ranks_that_disagree_about_wires_are_told(
    wires: list[Wire], collective: str, expected: list[str]
) -> None:
    for message in run_ranks(_disagree, 2, wires, collective, pg_timeout=600):
        assert "rank 0 called" in message
        assert "of model.layers.3" in message
        assert "parameters, dtypes and wires" in message
        for part in expected:
            assert part in message


# -- what a user writes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Wire(gather="int4"), "gather='int4', expected one of fp32, bf16, fp8, int8"),  # type: ignore[arg-type]
        (lambda: Wire(reduce="fp16"), "reduce='fp16', expected one of"),  # type: ignore[arg-type]
        (lambda: Wire(error_feedback=True), "which loses nothing"),
        (lambda: Wire(reduce="bf16", rounding="stochastic"), "expected reduce='int8'"),
        (lambda: Wire(seed=-1), "seed=-1"),
        (lambda: parse_wires("int9"), "'int9', expected fp32, bf16, fp8, int8, or gather=FORMAT"),
        (lambda: parse_wires("gather=int8,gather=fp8"), "gather twice"),
        (lambda: parse_wires("int8;dp_shard:fp8"), "one wire for all dimensions, or"),
        (lambda: parse_wires("dp:int8;dp:fp8"), "each dimension by its name, once"),
        (lambda: parse_wires("a:int8").check_names(["b"], "here"), "'a' (here), expected one of"),
    ],
)
def test_a_wire_that_makes_no_sense_is_refused(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(WireError) as caught:
        make()
    assert expected in str(caught.value)


def test_a_mapping_has_to_be_one_of_wires() -> None:
    with pytest.raises(TypeError, match="expected a Wire, or a mapping from names"):
        Wires.of({"dp": "int8"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", Wires(INT8)),
        ("gather=int8, reduce=int8", Wires(INT8)),
        ("reduce=int8,error-feedback", Wires(FEEDBACK)),
        ("reduce=int8,stochastic,seed=5", Wires(RANDOM)),
        ("dp_replicate:reduce=int8,error-feedback", Wires(named=(("dp_replicate", FEEDBACK),))),
        ("b:int8;a:fp32", Wires(named=(("a", Wire()), ("b", INT8)))),
    ],
)
def test_the_line_of_a_command_says_the_same(text: str, expected: Wires) -> None:
    assert parse_wires(text) == expected


@pytest.mark.parametrize("wire", [*WIRES, RANDOM], ids=str)
def test_a_wire_is_shown_as_it_is_written(wire: Wire) -> None:
    assert parse_wires(str(wire)) == Wires(wire)

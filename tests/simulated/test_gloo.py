"""What gloo's collectives take, on simulated ranks and on processes.

Where gloo computes what it should, simulated ranks compute the same. Where gloo takes the wrong
memory or bytes without an error, or raises one, simulated ranks raise an error that names a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from tests.harness import run_ranks

Tensors = list[torch.Tensor]

# Tensors of the same values, in other memory: with gaps, or by columns, on all ranks or on one.
LAYOUTS = ("contiguous", "part of a buffer", "gaps", "columns", "columns on rank 1")


def _laid_out(value: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "part of a buffer":
        return torch.full((value.numel() + 4,), -1.0)[2:-2].view(value.shape).copy_(value)
    if layout == "gaps":
        return torch.full((len(value), 2 * value.shape[1]), -1.0)[:, ::2].copy_(value)
    if layout == "columns" or (layout == "columns on rank 1" and dist.get_rank() == 1):
        return value.t().contiguous().t()
    return value.clone()


def _values(rank: int) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3) + 10 * rank


def _single(name: str, older: str, *args: Any) -> None:
    getattr(dist, name if hasattr(dist, name) else older)(*args)


class _Case:
    """One collective on two ranks: what it reads and writes, and what is right."""

    def __init__(self, layout: str) -> None:
        self.rank = dist.get_rank()
        self.layout = layout
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def given(self, value: torch.Tensor) -> torch.Tensor:
        return _laid_out(value, self.layout)

    def gets(self, expected: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
        tensor = self.given(torch.zeros_like(expected) if value is None else value)
        self.held.append((tensor, expected))
        return tensor

    def gets_plain(self, expected: torch.Tensor) -> torch.Tensor:
        tensor = torch.zeros_like(expected)
        self.held.append((tensor, expected))
        return tensor

    def is_right(self) -> bool:
        """Whether values are right, and nothing was written beside them."""
        return all(
            torch.equal(tensor, expected) and self._has_gaps_left(tensor)
            for tensor, expected in self.held
        )

    def _has_gaps_left(self, tensor: torch.Tensor) -> bool:
        every = torch.empty(0).set_(tensor.untyped_storage())
        return int((every == -1).sum()) == every.numel() - tensor.numel()


def _all_reduce(case: _Case) -> None:
    dist.all_reduce(case.gets(_values(0) + _values(1), _values(case.rank)))


def _reduce(case: _Case) -> None:
    mine = _values(case.rank)
    on_first = case.rank == 0
    dist.reduce(case.gets(_values(0) + _values(1), mine) if on_first else case.given(mine), 0)


def _broadcast(case: _Case) -> None:
    dist.broadcast(case.gets(_values(0), _values(case.rank)), 0)


def _all_gather(case: _Case) -> None:
    dist.all_gather([case.gets(_values(each)) for each in range(2)], case.given(_values(case.rank)))


def _all_gather_single(case: _Case) -> None:
    whole = case.gets(torch.cat([_values(0), _values(1)]))
    _single("all_gather_single", "all_gather_into_tensor", whole, case.given(_values(case.rank)))


def _gather(case: _Case) -> None:
    parts = [case.gets(_values(each)) for each in range(2)] if case.rank == 0 else None
    dist.gather(case.given(_values(case.rank)), parts, 0)


def _scatter_out(case: _Case) -> None:
    parts = [_values(0), _values(1)] if case.rank == 0 else None
    dist.scatter(case.gets(_values(case.rank)), parts, 0)


def _scatter_in(case: _Case) -> None:
    parts = [case.given(_values(each)) for each in range(2)] if case.rank == 0 else None
    dist.scatter(case.gets_plain(_values(case.rank)), parts, 0)


def _reduce_scatter_in(case: _Case) -> None:
    parts = [case.given(_values(each) + case.rank) for each in range(2)]
    dist.reduce_scatter(case.gets_plain(2 * _values(case.rank) + 1), parts)


def _reduce_scatter_out(case: _Case) -> None:
    parts = [_values(each) + case.rank for each in range(2)]
    dist.reduce_scatter(case.gets(2 * _values(case.rank) + 1), parts)


def _reduce_scatter_single(case: _Case) -> None:
    whole = case.given(torch.cat([_values(0), _values(1)]) + case.rank)
    mine = case.gets(2 * _values(case.rank) + 1)
    _single("reduce_scatter_single", "reduce_scatter_tensor", mine, whole)


def _all_to_all(case: _Case) -> None:
    given = [case.given(_values(case.rank) + 100 * to) for to in range(2)]
    dist.all_to_all([case.gets(_values(each) + 100 * case.rank) for each in range(2)], given)


def _all_to_all_single_in(case: _Case) -> None:
    rows = torch.stack([_values(each)[case.rank] for each in range(2)])
    dist.all_to_all_single(case.gets_plain(rows), case.given(_values(case.rank)))


def _all_to_all_single_out(case: _Case) -> None:
    rows = torch.stack([_values(each)[case.rank] for each in range(2)])
    dist.all_to_all_single(case.gets(rows), _values(case.rank))


def _send(case: _Case) -> None:
    if case.rank == 0:
        dist.send(case.given(_values(0)), 1)
    else:
        dist.recv(case.gets(_values(0)), 0)


COLLECTIVES: tuple[Callable[[_Case], None], ...] = (
    _all_reduce,
    _reduce,
    _broadcast,
    _all_gather,
    _all_gather_single,
    _gather,
    _scatter_in,
    _scatter_out,
    _reduce_scatter_in,
    _reduce_scatter_out,
    _reduce_scatter_single,
    _all_to_all,
    _all_to_all_single_in,
    _all_to_all_single_out,
    _send,
)
#: One rank of gloo raises, and the other waits for its timeout.
HANG = {("_all_to_all_single_in", "columns on rank 1"), ("_send", "columns on rank 1")}
LAYOUT_ROWS = [(call, layout) for call in COLLECTIVES for layout in LAYOUTS]


def _is_right(call: Callable[[_Case], None], layout: str) -> bool:
    case = _Case(layout)
    call(case)
    return case.is_right()


def _layouts_on_gloo(rank: int, world_size: int) -> list[bool]:
    found = []
    for call, layout in LAYOUT_ROWS:
        if (call.__name__, layout) in HANG:
            found.append(False)
            continue
        try:
            found.append(_is_right(call, layout))
        except (ValueError, RuntimeError):
            found.append(False)
        dist.barrier()
    return found


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_layouts_are_computed_as_on_gloo_or_refused_with_the_rank() -> None:
    on_gloo = [all(each) for each in zip(*run_ranks(_layouts_on_gloo, 2), strict=True)]
    assert 25 < sum(on_gloo) < len(on_gloo) - 25  # both kinds of rows are there
    for (call, layout), is_right in zip(LAYOUT_ROWS, on_gloo, strict=True):
        found = _simulated(_is_right, call, layout)
        if is_right:
            assert found == [True, True], f"{call.__name__} with {layout} is right on gloo"
        else:
            assert "rank " in found and "strides" in found, f"{call.__name__} with {layout}"


def _simulated(function: Callable[..., Any], *args: Any) -> Any:
    """Return what each of two simulated ranks returns, or what the first error says."""
    try:
        return [rank.value for rank in shardwise.simulate(function, 2, *args)]
    except (TypeError, ValueError, shardwise.RanksDivergedError) as error:
        return str(error)


def _dtype_all_reduce(dtype: torch.dtype) -> Any:
    value = torch.ones(4).to(dtype)
    dist.all_reduce(value)
    return value


def _dtype_average(dtype: torch.dtype) -> Any:
    value = (torch.ones(4) * (1 + 2 * dist.get_rank())).to(dtype)
    dist.all_reduce(value, dist.ReduceOp.AVG)
    return value


def _dtype_gather_into(dtype: torch.dtype) -> Any:
    whole = torch.zeros(4, dtype=dtype)
    _single("all_gather_single", "all_gather_into_tensor", whole, torch.ones(2))
    return whole


def _dtype_reduce_scatter_into(dtype: torch.dtype) -> Any:
    part = torch.zeros(2, dtype=dtype)
    _single("reduce_scatter_single", "reduce_scatter_tensor", part, torch.ones(4))
    return part


def _dtype_receive(dtype: torch.dtype) -> Any:
    value = torch.ones(2) if dist.get_rank() == 0 else torch.zeros(2, dtype=dtype)
    if dist.get_rank() == 0:
        dist.send(value, 1)
    else:
        dist.recv(value, 0)
    return value.float()


def _dtype_all_to_all(dtype: torch.dtype) -> Any:
    mine = torch.float32 if dist.get_rank() == 0 else dtype
    found = torch.zeros(2, dtype=mine)
    dist.all_to_all_single(found, torch.ones(2, dtype=mine))
    return found.float()


DTYPE_ROWS: list[tuple[Callable[[torch.dtype], Any], torch.dtype]] = [
    *((_dtype_all_reduce, each) for each in (torch.float16, torch.bfloat16, torch.complex64)),
    *((_dtype_all_reduce, each) for each in (torch.uint8, torch.bool, torch.int64)),
    *((_dtype_all_reduce, each) for each in (torch.int16, torch.uint32, torch.float8_e4m3fn)),
    *((_dtype_average, each) for each in (torch.float64, torch.bfloat16, torch.complex64)),
    *((_dtype_average, each) for each in (torch.int64, torch.int8, torch.bool)),
    *((_dtype_gather_into, each) for each in (torch.float32, torch.float64, torch.int32)),
    *((_dtype_reduce_scatter_into, each) for each in (torch.float32, torch.float64, torch.int64)),
    *((_dtype_receive, each) for each in (torch.float32, torch.int32)),
    *((_dtype_all_to_all, each) for each in (torch.float32, torch.int32)),
]


def _dtypes_on_gloo(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    for call, dtype in DTYPE_ROWS:
        try:
            found.append(call(dtype))
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_dtypes_are_computed_as_on_gloo_or_refused_with_the_rank() -> None:
    on_gloo = run_ranks(_dtypes_on_gloo, 2)
    for (call, dtype), *expected in zip(DTYPE_ROWS, *on_gloo, strict=True):
        row = f"{call.__name__} with {dtype}"
        found = _simulated(call, dtype)
        if all(isinstance(each, torch.Tensor) and _is_plausible(each) for each in expected):
            assert isinstance(found, list), f"{row} is right on gloo: {found}"
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=row)
        else:
            assert "rank " in str(found) and str(dtype).removeprefix("torch.") in str(found), row


def _is_plausible(value: torch.Tensor) -> bool:
    """Whether values are sums or averages of ones and threes, and not another dtype's bytes."""
    return all(1 <= abs(each) <= 3 for each in value.tolist())


def _with_nan(numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + numel + 7 * dist.get_rank())
    value = torch.randn(numel, generator=generator)
    return value.masked_fill_(torch.rand(numel, generator=generator) < 0.3, torch.nan)


def _extremes() -> Tensors:
    size, found = dist.get_world_size(), []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        for numel in (1, 5, 9, 100):
            dist.all_reduce(everywhere := _with_nan(numel, 0), op)
            dist.reduce(on_last := _with_nan(numel, 1), size - 1, op)
            part = torch.zeros(numel)
            whole = _with_nan(size * numel, 2)
            _single("reduce_scatter_single", "reduce_scatter_tensor", part, whole, op)
            dist.reduce_scatter(other := torch.zeros(numel), list(torch.split(whole, numel)), op)
            with_gaps = list(whole.view(numel, size).unbind(1))
            dist.reduce_scatter(third := torch.zeros(numel), with_gaps, op)
            found += [everywhere, part, other, third]
            found += [on_last] if dist.get_rank() == size - 1 else []
    dist.all_reduce(long := _with_nan(700_000, 3), dist.ReduceOp.MAX)  # several messages
    shape = (3, 2) if dist.get_rank() == 1 else (6,)  # as many elements are enough
    work = dist.all_reduce(torch.arange(6.0).view(shape), async_op=True)
    work.wait()
    return [*found, long, *work.result()]


def _extremes_on_gloo(rank: int, world_size: int) -> Tensors:
    return _extremes()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("world_size", [2, 3])
def test_max_and_min_lose_the_nans_that_gloo_loses(world_size: int) -> None:
    on_gloo = run_ranks(_extremes_on_gloo, world_size)
    for rank, found in enumerate(shardwise.simulate(_extremes, world_size)):
        for value, expected in zip(found.value, on_gloo[rank], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


def test_sizes_that_differ_name_both_ranks() -> None:
    def part(sent: int, expected: int) -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(sent), 1)
        else:
            dist.recv(torch.zeros(expected), 0)

    for sizes in ((3, 2), (2, 4)):  # gloo ends the process, or leaves a part as it was
        with pytest.raises(ValueError, match=r"rank 0 gives . float32, for which rank 1 has a"):
            shardwise.simulate(part, 2, *sizes)


def _bits_of_floats() -> None:
    dist.all_reduce(torch.ones(2), dist.ReduceOp.BOR)


def _gathers_on_nobody() -> None:
    dist.gather_object("object", None, group_dst=7)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("call", "found"),
    [
        (_bits_of_floats, "all-reduce BOR: found torch.float32, expected integers"),
        (_gathers_on_nobody, "gather: found rank 7 of the group, expected one of its 2 ranks"),
    ],
)
def test_what_gloo_refuses_is_refused(call: Callable[[], None], found: str) -> None:
    with pytest.raises((TypeError, ValueError), match=found):
        shardwise.simulate(call, 2)
    assert run_ranks(_is_refused, 2, call) == [True, True]


def _is_refused(rank: int, world_size: int, call: Callable[[], None]) -> bool:
    try:
        call()
    except (RuntimeError, ValueError):
        return True
    return False


def _reduces_to_scalars() -> None:
    _single("reduce_scatter_single", "reduce_scatter_tensor", torch.zeros(()), torch.ones(2))


def _negates() -> None:
    dist.all_reduce(torch.ones(2, 2, dtype=torch.complex64).conj().imag)


def _sends_itself() -> None:
    dist.isend(
        torch.ones(2),
        group=dist.new_group([dist.get_rank()], use_local_synchronization=True),
        group_dst=0,
    )


def _receives_nothing_from_anybody() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(0), 1)
    else:
        dist.recv(torch.ones(0))


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("call", "found"),
    [
        (_reduces_to_scalars, "rank 0, reduce-scatter: found an output without dimensions"),
        (_negates, "rank 0, all-reduce SUM: found a view of negative or conjugate values"),
        (_sends_itself, "rank 0, send: found itself, expected another rank"),
        (_receives_nothing_from_anybody, "rank 1, recv: found a tensor without elements"),
    ],
)
def test_what_gloo_ends_on_or_computes_wrongly_is_refused(
    call: Callable[[], None], found: str
) -> None:
    with pytest.raises(ValueError, match=found):
        shardwise.simulate(call, 2)


def test_overlapping_elements_are_refused() -> None:
    def part() -> None:
        dist.all_reduce(torch.ones(1, 3).expand(2, 3))

    with pytest.raises(ValueError, match=r"rank 0, all-reduce SUM: found .* strides \(0, 1\)"):
        shardwise.simulate(part, 2)

"""The local sum of a reduction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.transport import buckets
from shardwise.transport.buckets import add_in_order, exact_factor

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BLOCK_BYTES", 64)
        yield


def _reference(parts: list[torch.Tensor], dtype: torch.dtype, divisor: int | None) -> torch.Tensor:
    result = parts[0].to(dtype)
    for part in parts[1:]:
        result = result + part.to(dtype)
    return result if divisor is None else result / divisor


@given(
    count=st.integers(1, 5),
    numel=st.integers(0, 100),
    stored=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    divisor=st.sampled_from([None, 2, 3]),
)
def test_adds_in_the_order_given_in_the_dtype_of_the_result(
    count: int, numel: int, stored: torch.dtype, dtype: torch.dtype, divisor: int | None
) -> None:
    parts = [torch.randn(numel).to(stored) for _ in range(count)]
    out = torch.empty(numel, dtype=dtype)
    add_in_order(out, parts, divisor)
    assert torch.equal(out, _reference(parts, dtype, divisor))


@pytest.mark.parametrize("position", [0, 1])
@given(count=st.integers(2, 4), numel=st.integers(0, 100))
def test_one_of_the_first_two_parts_may_be_the_result(
    position: int, count: int, numel: int
) -> None:
    parts = [torch.randn(numel) for _ in range(count)]
    expected = _reference(parts, torch.float32, count)
    out = parts[position]
    add_in_order(out, parts, count)
    assert torch.equal(out, expected)


@given(
    count=st.sampled_from([2, 4, 8]),
    numel=st.integers(0, 100),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    data=st.data(),
)
def test_an_average_of_parts_that_are_divided_already_is_the_same_bit_for_bit(
    count: int, numel: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    parts = [torch.randn(numel).to(dtype) for _ in range(count)]
    expected = _reference(parts, dtype, count)
    factor = exact_factor(count, dtype)
    assert factor is not None
    own = data.draw(st.integers(0, count - 1))
    laid_out = [part if i == own else part * factor for i, part in enumerate(parts)]
    out = torch.empty(numel, dtype=dtype)
    add_in_order(out, laid_out, unscaled=own, factor=factor)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("world_size", "dtype"), [(3, torch.float32), (2, torch.float16)])
def test_an_average_is_divided_at_the_end_where_that_is_not_the_same(
    world_size: int, dtype: torch.dtype
) -> None:
    assert exact_factor(world_size, dtype) is None

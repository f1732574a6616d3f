"""Codes of eight bits: what they stand for, and that the nearest one is found."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise.optim.codes import CodeBook, Range, values

BOTH = pytest.mark.parametrize("numbers", list(Range))


def encode(numbers: Range, given: torch.Tensor) -> torch.Tensor:
    given = given.float().clone()
    index = torch.empty(given.shape, dtype=torch.int64)
    work = torch.empty(given.shape, dtype=torch.int32)
    out = torch.empty(given.shape, dtype=torch.uint8)
    CodeBook(numbers, given.device).encode(given, index, work, out)
    return out


def decode(numbers: Range, codes: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codes.shape)
    CodeBook(numbers, codes.device).decode(codes, torch.empty(codes.shape, dtype=torch.int64), out)
    return out


@BOTH
def test_seven_decades_have_twice_as_many_values_each(numbers: Range) -> None:
    positive = [value for value in values(numbers) if 0 < value < 1]
    counts = [sum(10.0**-k < value < 10.0 ** (1 - k) for value in positive) for k in range(1, 8)]
    largest = 64 if numbers is Range.SIGNED else 128
    assert counts == [largest // 2**k for k in range(7)]
    assert len(values(numbers)) == 256
    assert min(values(numbers)) == pytest.approx(-1 + 0.9 / 128 if numbers is Range.SIGNED else 0.0)
    assert 0.0 in values(numbers)
    assert max(values(numbers)) == 1.0


@BOTH
def test_a_code_stands_for_what_is_encoded_as_it(numbers: Range) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(encode(numbers, decode(numbers, codes)), codes)


@BOTH
def test_the_nearest_code_is_found(numbers: Range) -> None:
    torch.manual_seed(0)
    sizes = 10.0 ** torch.linspace(-9, 0, 5000)
    given = torch.cat([sizes * (torch.rand(5000) * 2 - 1), torch.tensor([0.0, 1.0, -1.0, -0.99])])
    if numbers is Range.UNSIGNED:
        given = given.abs()
    known = torch.tensor(values(numbers), dtype=torch.float64)
    wanted = (given.double()[:, None] - known).abs().argmin(1)
    if numbers is Range.UNSIGNED:
        wanted[(given > 0) & (wanted == 0)] = 1
    assert torch.equal(encode(numbers, given).long(), wanted)


@BOTH
def test_the_next_code_begins_in_the_middle_to_the_last_bit(numbers: Range) -> None:
    pairs = list(itertools.pairwise(values(numbers)))[1:]
    middles = torch.tensor([(low + high) / 2 for low, high in pairs], dtype=torch.float64)
    nearest = middles.float()
    up, down = torch.tensor(2.0), torch.tensor(-2.0)
    upper = torch.where(nearest.double() >= middles, nearest, nearest.nextafter(up))
    wanted = torch.arange(2, 256, dtype=torch.uint8)
    assert torch.equal(encode(numbers, upper), wanted)
    assert torch.equal(encode(numbers, upper.nextafter(down)), wanted - 1)


def test_of_second_moments_only_zero_becomes_zero() -> None:
    smallest = torch.tensor([0.0, 1e-45, 1e-12])
    assert decode(Range.UNSIGNED, encode(Range.UNSIGNED, smallest)).tolist() == [
        0.0,
        *[pytest.approx(3.25e-7)] * 2,
    ]


@BOTH
def test_anything_that_is_no_number_has_some_code(numbers: Range) -> None:
    nan, inf = float("nan"), float("inf")
    negative = torch.tensor([-1], dtype=torch.int32).view(torch.float32)  # a NaN with a sign
    encode(numbers, torch.cat([torch.tensor([nan, -nan, inf, -inf]), negative]))

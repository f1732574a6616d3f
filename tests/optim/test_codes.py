"""Codes of eight bits: what they stand for, and which one a number becomes."""

from __future__ import annotations

import pytest
import torch

from shardwise.optim.codes import NEAREST, CodeBook, Range, share_of, values

BOTH = pytest.mark.parametrize("numbers", list(Range))


def encode(numbers: Range, given: torch.Tensor, share: float = NEAREST) -> torch.Tensor:
    given = given.float().clone()
    index = torch.empty(given.shape, dtype=torch.int64)
    work = torch.empty(given.shape, dtype=torch.int32)
    out = torch.empty(given.shape, dtype=torch.uint8)
    CodeBook(numbers, given.device, share).encode(given, index, work, out)
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
        wanted[(given < 1) & (wanted == 255)] = 254
    assert torch.equal(encode(numbers, given).long(), wanted)


@BOTH
@pytest.mark.parametrize("share", [NEAREST, 0.01, 0.999, *map(share_of, (1, 2, 377))])
def test_the_next_code_begins_at_the_share_to_the_last_bit(numbers: Range, share: float) -> None:
    codes = slice(1, 254)  # the unsigned range has rules of its own for 0 and 1
    lower, upper = torch.tensor(values(numbers), dtype=torch.float64).unfold(0, 2, 1)[codes].T
    wanted = lower + (upper - lower) * share
    first = wanted.float()
    first = torch.where(first.double() >= wanted, first, first.nextafter(torch.tensor(2.0)))
    assert torch.equal(encode(numbers, first, share).long(), torch.arange(2, 255))
    before = first.nextafter(torch.tensor(-2.0))
    assert torch.equal(encode(numbers, before, share).long(), torch.arange(1, 254))


def test_second_moments_are_right_on_average_over_steps() -> None:
    torch.manual_seed(0)
    given = 0.99 * 10.0 ** (-6 * torch.rand(1000))
    steps = 200
    codes = [encode(Range.UNSIGNED, given, share_of(step)) for step in range(1, steps + 1)]
    mean = torch.stack([decode(Range.UNSIGNED, each) for each in codes]).mean(0)
    known = torch.tensor(values(Range.UNSIGNED))
    above = torch.bucketize(given, known).clamp(max=254)
    assert bool(((mean - given).abs() <= 0.02 * (known[above] - known[above - 1])).all())


@pytest.mark.parametrize("share", [NEAREST, 0.001, 0.999])
def test_of_second_moments_only_zero_becomes_zero_and_only_one_becomes_one(share: float) -> None:
    given = torch.tensor([0.0, 1e-45, 1e-12, 0.999999, 1.0])
    codes = encode(Range.UNSIGNED, given, share)
    assert codes.tolist() == [0, 1, 1, 254, 255]
    assert decode(Range.UNSIGNED, codes)[1] == pytest.approx(3.25e-7)


@BOTH
def test_anything_that_is_no_number_has_some_code(numbers: Range) -> None:
    nan, inf = float("nan"), float("inf")
    negative = torch.tensor([-1], dtype=torch.int32).view(torch.float32)  # a NaN with a sign
    encode(numbers, torch.cat([torch.tensor([nan, -nan, inf, -inf]), negative]))

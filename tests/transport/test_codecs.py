"""The bounds on what encoding changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.diloco.few_bits import codec_of
from shardwise.transport.codecs import (
    BLOCK,
    Codec,
    Noise,
    Piece,
    Room,
    decode,
    encode,
)
from shardwise.transport.encoded import Tally
from shardwise.transport.wire import WireError, WireFormat

CPU = torch.device("cpu")
BLOCKED = (WireFormat.FP8, WireFormat.INT8, WireFormat.INT4, WireFormat.TERNARY)

#: The largest error, of the value itself, and of the largest of its block.
BOUNDS = {
    WireFormat.FP32: (0.0, 0.0),
    WireFormat.FP16: (2.0**-11, 0.0),
    WireFormat.BF16: (2.0**-8, 0.0),
    WireFormat.FP8: (2.0**-4, 2.0**-19),
    WireFormat.INT8: (0.0, 1 / 254),
    WireFormat.INT4: (0.0, 1 / 14),
    WireFormat.TERNARY: (0.0, 1.0),
}
#: Where a format's numbers are no longer normal, the error is absolute.
SMALLEST = {
    WireFormat.FP32: 0.0,
    WireFormat.FP16: 2.0**-25,
    WireFormat.BF16: 2.0**-134,
    WireFormat.FP8: torch.finfo(torch.float32).tiny,
    WireFormat.INT8: torch.finfo(torch.float32).tiny,
    WireFormat.INT4: torch.finfo(torch.float32).tiny,
    WireFormat.TERNARY: torch.finfo(torch.float32).tiny,
}


def _room(tile: int = 4 * BLOCK) -> Room:
    room = Room(CPU)
    room.tile = tile  # several in every test
    return room


def _piece(codec: Codec, numel: int) -> Piece:
    # What nobody writes must not matter.
    raw = torch.full((codec.nbytes(numel),), 0xA5, dtype=torch.uint8)
    return codec.piece(raw, numel)


def _through(
    values: torch.Tensor, wire: WireFormat, error: torch.Tensor | None = None
) -> torch.Tensor:
    codec = codec_of(wire)
    piece = _piece(codec, values.numel())
    encode(codec, values, piece, _room(), error=error)
    out = torch.empty_like(values)
    decode(codec, piece, out, _room())
    return out


def _largest_of_block(values: torch.Tensor) -> torch.Tensor:
    parts = [part.abs().max().expand(part.numel()) for part in torch.split(values, BLOCK)]
    return torch.cat(parts)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    exponent=st.integers(-44, 4),
    numel=st.integers(1, 7 * BLOCK),
    outlier=st.booleans(),
)
@pytest.mark.parametrize("wire", WireFormat)
def test_errors_keep_their_bounds(
    wire: WireFormat, seed: int, exponent: int, numel: int, outlier: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10.0**exponent
    if outlier:
        values[seed % numel] *= 100
    values[: numel // 3] = 0
    values.clamp_(-60000, 60000)  # fp16 ends soon after
    found = _through(values, wire)

    of_value, of_block = BOUNDS[wire]
    largest = _largest_of_block(values)
    allowed = of_value * values.abs().double() + of_block * largest.double()
    allowed = allowed * (1 + 1e-4) + SMALLEST[wire]
    assert ((found - values).abs().double() <= allowed).all()


@pytest.mark.parametrize("wire", WireFormat)
def test_zero_stays_zero(wire: WireFormat) -> None:
    assert torch.equal(_through(torch.zeros(700), wire), torch.zeros(700))


@pytest.mark.parametrize("wire", WireFormat)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_pass_for_a_number(wire: WireFormat, bad: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    found = _through(values, wire)
    assert not found[3].isfinite()
    assert torch.equal(found[BLOCK:], values[BLOCK:]), "the other block has nothing to do"


@pytest.mark.parametrize("wire", BLOCKED)
def test_a_block_is_finite_as_a_whole_or_not_at_all(wire: WireFormat) -> None:
    values = torch.linspace(-3, 5, BLOCK)
    values[7] = float("nan")
    assert not _through(values, wire).isfinite().any()


@pytest.mark.parametrize("wire", BLOCKED)
def test_blocks_that_are_not_finite_are_counted_and_the_first_is_told(
    wire: WireFormat, caplog: pytest.LogCaptureFixture
) -> None:
    values = torch.ones(5 * BLOCK + 9)
    values[0] = float("nan")
    values[BLOCK : BLOCK + 2] = float("inf")  # two in one block
    values[-1] = float("-inf")
    codec, tally = codec_of(wire), Tally()
    piece = _piece(codec, values.numel())
    encode(codec, values, piece, _room())
    tally.add(codec, piece, values.numel())
    assert tally.total == 3
    tally.add(codec, piece, BLOCK)
    assert tally.total == 4
    assert caplog.text.count("not finite. Further ones are only counted") == 1


@pytest.mark.parametrize("wire", BLOCKED)
def test_a_block_of_the_largest_numbers_is_right_or_counted(wire: WireFormat) -> None:
    largest = torch.finfo(torch.float32).max
    codec = codec_of(wire)
    for share in (1.0, 0.999, 0.99, 0.9):
        values, tally = torch.full((BLOCK,), largest * share), Tally()
        piece = _piece(codec, BLOCK)
        encode(codec, values, piece, _room())
        tally.add(codec, piece, BLOCK)
        found = torch.empty(BLOCK)
        decode(codec, piece, found, _room())
        if tally.total:
            assert not found.isfinite().any()
        else:
            torch.testing.assert_close(found, values, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("wire", "of_block"),
    [
        (WireFormat.FP8, 256),
        (WireFormat.INT8, 256),
        (WireFormat.INT4, 128),
        (WireFormat.TERNARY, 52),
    ],
)
@pytest.mark.parametrize("numel", [1, BLOCK, 4 * BLOCK])
def test_numbers_take_their_bytes_and_every_block_four_more(
    wire: WireFormat, of_block: int, numel: int
) -> None:
    blocks = -(-numel // BLOCK)
    needed = (1 if numel == 1 else of_block * blocks) + 4 * blocks
    assert needed <= codec_of(wire).nbytes(numel) < needed + 16


def test_ternary_values_are_the_best_three_for_normal_ones() -> None:
    values = torch.randn(256 * BLOCK, generator=torch.Generator().manual_seed(0))
    found = _through(values, WireFormat.TERNARY)
    # Max's quantizer of three levels has 0.1902; blocks that choose their own are a bit better.
    assert 0.18 < (found - values).square().mean() < 0.1902
    share = (found != 0).float().mean()
    assert share == pytest.approx(0.54, abs=0.01), "those above 0.612 standard deviations"


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32), numel=st.integers(1, 3 * BLOCK), power=st.sampled_from([1, 3, 9])
)
@pytest.mark.parametrize("wire", [WireFormat.INT4, WireFormat.TERNARY])
def test_no_block_is_further_from_its_values_than_zeros_are(
    wire: WireFormat, seed: int, numel: int, power: int
) -> None:
    """Without that, error feedback would not converge, whatever the values are."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** power
    for found, given_ in zip(_through(values, wire).split(BLOCK), values.split(BLOCK), strict=True):
        assert (found - given_).norm() < given_.norm()


def test_small_numbers_are_packed_and_unpacked_without_a_change() -> None:
    for wire, digits in ((WireFormat.INT4, 7), (WireFormat.TERNARY, 1)):
        for numel in (1, 2, 4, 5, 6, 51, 255, 256, 257, 3 * BLOCK + 7):
            generator = torch.Generator().manual_seed(numel)
            values = torch.randint(-digits, digits + 1, (numel,), generator=generator).float()
            values[::BLOCK] = digits  # the scale of each block is 1
            torch.testing.assert_close(_through(values, wire), values, rtol=1e-6, atol=0.0)


def test_fp8_decodes_as_torch_does() -> None:
    codec = codec_of(WireFormat.FP8)
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    piece = _piece(codec, 256)
    piece.numbers.view(torch.uint8).copy_(every)
    assert piece.scales is not None
    piece.scales.fill_(1.0)
    found = torch.empty(256)
    decode(codec, piece, found, _room())
    expected = every.view(torch.float8_e4m3fn).float()
    numbers = expected.isfinite()
    assert int(numbers.sum()) == 254
    assert torch.equal(found[numbers], expected[numbers])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wire", WireFormat)
def test_values_of_any_floating_dtype_are_encoded_as_fp32(
    wire: WireFormat, dtype: torch.dtype
) -> None:
    values = torch.linspace(-2, 3, 1000).to(dtype)
    assert torch.equal(_through(values, wire), _through(values.float(), wire).to(dtype))


@pytest.mark.parametrize("wire", [WireFormat.BF16, *BLOCKED])
def test_what_is_lost_comes_with_the_next_value(wire: WireFormat) -> None:
    """The sum of what was decoded falls behind the sum of the values by one error, not by many."""
    generator = torch.Generator().manual_seed(0)
    error = torch.zeros(1500)
    total, exact = torch.zeros(1500, dtype=torch.float64), torch.zeros(1500, dtype=torch.float64)
    for _ in range(200):
        values = torch.randn(1500, generator=generator)
        exact += values
        total += _through(values, wire, error)
        assert (exact - total - error).abs().max() < 1e-4, "what is not sent is kept"
    one = (_through(values, wire) - values).abs().max()
    assert (exact - total).abs().max() < 4 * one


@pytest.mark.parametrize("wire", [WireFormat.BF16, *BLOCKED])
def test_nothing_of_what_is_not_finite_is_kept(wire: WireFormat) -> None:
    error = torch.zeros(600)
    values = torch.full((600,), 0.3)
    values[5], values[300] = float("nan"), float("inf")
    _through(values, wire, error)
    assert error.isfinite().all()
    assert _through(torch.full((600,), 0.3), wire, error).isfinite().all()


def _rounded(values: torch.Tensor, noise: Noise, place: Sequence[int]) -> torch.Tensor:
    codec = codec_of(WireFormat.INT8)
    piece = _piece(codec, values.numel())
    encode(codec, values, piece, Room(CPU), noise=noise, place=place)
    out = torch.empty_like(values)
    decode(codec, piece, out, Room(CPU))
    return out


def test_random_rounding_is_right_on_average_and_never_further_than_a_step() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    noise = Noise(7, CPU)
    found = torch.stack([_rounded(values, noise, (0, call)) for call in range(1000)])
    step = _largest_of_block(values) / 127
    assert ((found - values).abs() <= step * 1.0001).all()
    # The mean of 1,000 has a standard deviation of at most half a step / sqrt(1000).
    assert ((found.mean(0) - values).abs() < 5 * 0.5 / 1000**0.5 * step).all()


def test_random_rounding_follows_from_the_seed_and_the_place() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    first = _rounded(values, Noise(7, CPU), (3, 1))
    assert torch.equal(before, torch.get_rng_state()), "no other random numbers are drawn"
    assert torch.equal(first, _rounded(values, Noise(7, CPU), (3, 1)))
    assert not torch.equal(first, _rounded(values, Noise(8, CPU), (3, 1)))
    assert not torch.equal(first, _rounded(values, Noise(7, CPU), (3, 2)))
    assert not torch.equal(first, _rounded(values, Noise(7, CPU), (1, 3)))


def test_random_rounding_of_the_largest_number_does_not_overflow() -> None:
    values = torch.full((BLOCK,), 3.7)
    values[::2] *= -1
    noise = Noise(0, CPU)
    for call in range(50):
        found = _rounded(values, noise, (call,))
        assert torch.equal(found.sign(), values.sign())
        assert ((found - values).abs() <= 3.7 / 127 * 1.0001).all()


@pytest.mark.parametrize("text", ["int2", "topk:0.02", "int8:0.5"])
def test_other_words_are_errors_that_name_the_formats(text: str) -> None:
    with pytest.raises(
        WireError, match=rf"found '{text}', expected .*fp32, .*int4, ternary"
    ) as error:
        WireFormat(text)
    assert ("top-k was removed" in str(error.value)) == text.startswith("topk")

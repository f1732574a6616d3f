"""What is sent of values of which only the largest are sent, and that the rest follows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.transport.codecs import Room, decode, encode
from shardwise.transport.encoded_sums import Tally
from shardwise.transport.formats import codec_of
from shardwise.transport.sparse import CHUNK, TopKCodec
from shardwise.transport.wire import TopK, WireError, WireFormat, parse_format

CPU = torch.device("cpu")


def _room() -> Room:
    room = Room(CPU)
    room.tile = 2 * CHUNK  # several in every test
    return room


def _through(
    values: torch.Tensor,
    density: float = 0.02,
    error: torch.Tensor | None = None,
    tally: Tally | None = None,
) -> torch.Tensor:
    codec = TopKCodec(density)
    numel = values.numel()
    # What nobody writes must not matter.
    raw = torch.full((codec.nbytes(numel),), 0xA5, dtype=torch.uint8)
    piece = codec.piece(raw, numel)
    encode(codec, values, piece, _room(), error=error)
    if tally is not None:
        tally.add(codec, piece, numel)
    out = torch.full_like(values, 7.0)
    decode(codec, piece, out, _room())
    return out


def _normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numel", [CHUNK, 5 * CHUNK + 1000])
@pytest.mark.parametrize("density", [0.01, 0.02, 0.03])
def test_the_largest_values_of_every_chunk_are_sent_and_nothing_else(
    density: float, numel: int
) -> None:
    values = _normal(numel)
    for found, given_ in zip(
        _through(values, density).split(CHUNK), values.split(CHUNK), strict=True
    ):
        count = round(density * given_.numel())
        largest = given_.abs().topk(count).indices.sort().values
        assert torch.equal(found.nonzero().flatten(), largest)
        assert torch.equal(found[largest].sign(), given_[largest].sign())


def test_a_chunk_has_two_sizes_which_are_means() -> None:
    values = torch.zeros(CHUNK)
    values[[3, 70, 900, 4095]] = torch.tensor([1.0, -2.0, 10.0, -14.0])
    found = _through(values, 4 / CHUNK)
    assert found[[3, 70, 900, 4095]].tolist() == [1.5, -1.5, 12.0, -12.0]
    assert found.count_nonzero() == 4


@pytest.mark.parametrize("numel", [1, 2, 3, 4, 5, 49, 51, CHUNK - 1, CHUNK + 1])
def test_stretches_of_any_length_have_at_least_one_value_sent(numel: int) -> None:
    values = _normal(numel, seed=numel)
    found = _through(values)
    last = found.split(CHUNK)[-1]
    assert found.isfinite().all()
    assert last.count_nonzero() == max(1, round(0.02 * last.numel()))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    numel=st.integers(1, 2 * CHUNK),
    power=st.sampled_from([1, 3, 9]),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_nothing_is_further_from_its_values_than_zeros_are(
    seed: int, numel: int, power: int, zeros: float
) -> None:
    """Without that, error feedback would not converge, whatever the values are."""
    values = _normal(numel, seed) ** power
    values[: int(zeros * numel)] = 0
    assert (_through(values) - values).norm() < values.norm()


def test_zero_stays_zero() -> None:
    assert torch.equal(_through(torch.zeros(CHUNK + 700)), torch.zeros(CHUNK + 700))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_chunk_is_finite_as_a_whole_or_not_at_all_and_counted(
    bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    values = _normal(3 * CHUNK + 5)
    values[CHUNK + 3] = values[-1] = bad
    tally = Tally()
    found = _through(values, tally=tally)
    assert not found[CHUNK : 2 * CHUNK].isfinite().any()
    assert not found[3 * CHUNK :].isfinite().any()
    assert torch.equal(found[:CHUNK], _through(values[:CHUNK])), "others have nothing to do with it"
    assert found[2 * CHUNK : 3 * CHUNK].isfinite().all()
    assert tally.total == 2
    assert "a block of 4096 values" in caplog.text


def test_nothing_of_what_is_not_finite_is_kept() -> None:
    error = torch.zeros(CHUNK)
    values = torch.full((CHUNK,), 0.3)
    values[5] = float("nan")
    _through(values, error=error)
    assert error.isfinite().all()
    assert _through(torch.full((CHUNK,), 0.3), error=error).isfinite().all()


def test_what_was_not_sent_follows() -> None:
    """The sum of what was decoded falls behind the sum of the values by what is kept, no more."""
    numel = CHUNK + 100
    error = torch.zeros(numel)
    total, exact = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    sizes = []
    for round_ in range(300):
        values = _normal(numel, round_)
        exact += values
        total += _through(values, error=error)
        assert (exact - total - error).abs().max() < 1e-3, "what is not sent is kept"
        sizes.append(error.norm())
    assert max(sizes[150:]) < 1.2 * max(sizes[:150]), "what is kept does not grow forever"


def test_of_values_that_stay_the_mean_of_many_rounds_is_right() -> None:
    values = _normal(CHUNK)
    error, total = torch.zeros(CHUNK), torch.zeros(CHUNK)
    for _ in range(1000):
        total += _through(values, error=error)
    assert (total / 1000 - values).norm() < 0.05 * values.norm()


def test_three_percent_of_four_replicas_take_a_fiftieth_of_fp32() -> None:
    replicas, numel = 4, 1_000_000
    gathered = (replicas - 1) * codec_of(TopK(0.03)).nbytes(numel)
    ring = 2 * (replicas - 1) / replicas * 4 * numel
    assert gathered <= ring / 50


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", WireFormat.INT8),
        ("ternary", WireFormat.TERNARY),
        ("topk", TopK(0.02)),
        ("topk:0.01", TopK(0.01)),
    ],
)
def test_formats_are_read_and_written_as_words(text: str, expected: WireFormat | TopK) -> None:
    assert parse_format(text) == expected
    assert parse_format(expected.value) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int2", "found 'int2', expected fp32, fp16, bf16, fp8, int8, int4, ternary, or topk:D"),
        ("topk:", "found 'topk:', expected topk:DENSITY, a number"),
        ("topk:2%", "found 'topk:2%', expected topk:DENSITY, a number"),
        ("topk:0", "found 'topk:0', expected topk:DENSITY, above 0, and 0.1 at most"),
        ("topk:nan", "found 'topk:nan', expected topk:DENSITY, above 0"),
        ("int8:0.5", "found 'int8:0.5'"),
    ],
)
def test_other_words_are_errors(text: str, message: str) -> None:
    with pytest.raises(WireError, match=message):
        parse_format(text)


@pytest.mark.parametrize("density", [0.0, -0.1, 0.2, float("nan")])
def test_densities_out_of_range_are_errors(density: float) -> None:
    with pytest.raises(WireError, match=r"density=.*expected above 0, and 0\.1 at most"):
        TopK(density)

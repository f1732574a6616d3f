"""The bounds on what encoding changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.diloco import WireFormat
from shardwise.diloco.average import BLOCK, codec_of

#: The largest error, of the value itself, and of the largest of its block.
BOUNDS = {
    WireFormat.FP32: (0.0, 0.0),
    WireFormat.FP16: (2.0**-11, 0.0),
    WireFormat.BF16: (2.0**-8, 0.0),
    WireFormat.INT8: (0.0, 1 / 254),
}
#: Where a format's numbers are no longer normal, the error is absolute.
SMALLEST = {
    WireFormat.FP32: 0.0,
    WireFormat.FP16: 2.0**-25,
    WireFormat.BF16: 2.0**-134,
    WireFormat.INT8: torch.finfo(torch.float32).tiny,
}


def _through(values: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    codec = codec_of(wire)
    encoded = codec.encode(values.clone())
    assert encoded.dtype == torch.uint8
    return codec.decode(encoded)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    exponent=st.integers(-44, 4),
    rows=st.integers(1, 3),
    blocks=st.integers(1, 3),
    outlier=st.booleans(),
)
@pytest.mark.parametrize("wire", WireFormat)
def test_errors_keep_their_bounds(
    wire: WireFormat, seed: int, exponent: int, rows: int, blocks: int, outlier: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, blocks * BLOCK, generator=generator) * 10.0**exponent
    if outlier:
        values[0, seed % BLOCK] *= 100
    values[-1, : BLOCK // 2] = 0
    values.clamp_(-60000, 60000)  # fp16 ends soon after
    found = _through(values, wire)

    of_value, of_block = BOUNDS[wire]
    largest = values.view(rows, blocks, BLOCK).abs().amax(2, keepdim=True).expand(-1, -1, BLOCK)
    allowed = of_value * values.abs().double() + of_block * largest.reshape(rows, -1).double()
    allowed = allowed * (1 + 1e-5) + SMALLEST[wire]
    assert ((found - values).abs().double() <= allowed).all()


@pytest.mark.parametrize("wire", WireFormat)
def test_zero_stays_zero(wire: WireFormat) -> None:
    assert torch.equal(_through(torch.zeros(2, BLOCK), wire), torch.zeros(2, BLOCK))


@pytest.mark.parametrize("wire", WireFormat)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_pass_for_a_number(wire: WireFormat, bad: float) -> None:
    values = torch.ones(1, 2 * BLOCK)
    values[0, 3] = bad
    found = _through(values, wire)
    assert not found[0, 3].isfinite()
    assert torch.equal(found[0, BLOCK:], values[0, BLOCK:]), "the other block has nothing to do"


def test_int8_takes_a_byte_and_a_scale_for_every_256() -> None:
    assert codec_of(WireFormat.INT8).encode(torch.ones(2, 4 * BLOCK)).shape == (2, 4 * (BLOCK + 4))

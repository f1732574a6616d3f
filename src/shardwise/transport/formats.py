"""The codec of each format."""

from __future__ import annotations

import torch

from shardwise.transport.codecs import CastCodec, Codec, Fp8Codec, Int8Codec
from shardwise.transport.few_bits import Int4Codec, TernaryCodec
from shardwise.transport.wire import WireFormat

_CODECS: dict[WireFormat, Codec] = {
    WireFormat.FP32: CastCodec(torch.float32),
    WireFormat.FP16: CastCodec(torch.float16),
    WireFormat.BF16: CastCodec(torch.bfloat16),
    WireFormat.FP8: Fp8Codec(),
    WireFormat.INT8: Int8Codec(),
    WireFormat.INT4: Int4Codec(),
    WireFormat.TERNARY: TernaryCodec(),
}


def codec_of(format_: WireFormat) -> Codec:
    """Return the codec of a format."""
    return _CODECS[format_]

"""The codec of each format."""

from __future__ import annotations

import functools

import torch

from shardwise.transport.codecs import CastCodec, Codec, Fp8Codec, Int8Codec
from shardwise.transport.few_bits import Int4Codec, TernaryCodec
from shardwise.transport.wire import WireFormat


@functools.cache
def codec_of(format_: WireFormat) -> Codec:
    """Return the codec of a format."""
    match format_:
        case WireFormat.INT8:
            return Int8Codec()
        case WireFormat.INT4:
            return Int4Codec()
        case WireFormat.TERNARY:
            return TernaryCodec()
        case WireFormat.FP8:
            return Fp8Codec()
        case WireFormat.FP16:
            return CastCodec(torch.float16)
        case WireFormat.BF16:
            return CastCodec(torch.bfloat16)
        case WireFormat.FP32:
            return CastCodec(torch.float32)

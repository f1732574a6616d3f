"""The contract of transports that encode: what the codec says, no more and no less."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from shardwise.transport import carrier
from shardwise.transport.base import Reduce, Transport
from shardwise.transport.carrier import Carrier, carried_by
from shardwise.transport.codecs import Room, codec_of, decode, encode
from shardwise.transport.encoded import EncodedTransport
from shardwise.transport.peers import Peers
from shardwise.transport.select import ChannelOptions, compose
from shardwise.transport.two_levels import TwoLevelTransport
from shardwise.transport.wire import Wire, WireFormat
from tests.transport.conformance import TOLERANCE, Checks, check_cases
from tests.transport.streams import fuzz

CPU = torch.device("cpu")
#: The error of one encoding, as a share of the largest value.
SHARE = {"fp32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-4, "int8": 1 / 254}
ENCODED = (torch.float32, torch.bfloat16, torch.float16)


Encoded = EncodedTransport | TwoLevelTransport
INT8 = Wire(gather="int8", reduce="int8")
FEEDBACK = Wire(reduce="int8", error_feedback=True)
MIXED = Wire(gather="bf16", reduce="fp8", error_feedback=True)


class Source:
    """What a gradient is of."""


def values_of(rank: int, numel: int, step: int = 0) -> torch.Tensor:
    """The values of a rank in a step."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def check_contract(transport: Encoded, rounds: int) -> None:
    """Check what all transports promise, within the error of the format."""
    checks = EncodedChecks(transport)
    check_cases(checks)
    fuzz(checks, rounds, seed=3, largest=3000)


def same_bits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are the same, NaNs too."""
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def over_world(wire: Wire, requested: str = "c10d") -> Encoded:
    """The transport of all ranks with a wire: of two levels where hosts have several ranks each."""
    assert dist.group.WORLD is not None
    found = compose(dist.group.WORLD, CPU, ChannelOptions(requested, wire))
    assert isinstance(found, EncodedTransport | TwoLevelTransport)
    return found


def on_host(rank: int, local: int) -> AbstractContextManager[None]:
    """Act as if processes were on hosts of so many: only on the same one do they share memory."""

    carrier._name = lambda: f"host {rank // local}"
    return carried_by(_OnHost(local))


class _OnHost(Carrier):
    """What carries as always, but for memory that ranks of several hosts would share."""

    def __init__(self, local: int) -> None:
        self._local = local

    def share_memory(self, peers: Peers) -> Transport | str:
        """Refuse it to ranks of several hosts."""
        if len({each // self._local for each in peers.members}) > 1:
            return "its ranks are on several hosts"
        return super().share_memory(peers)


def through(values: torch.Tensor, name: str) -> torch.Tensor:
    """What a codec makes of values, fp32."""
    codec = codec_of(WireFormat(name))
    raw = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    piece = codec.piece(raw, values.numel())
    encode(codec, values, piece, Room(CPU))
    out = torch.empty(values.numel())
    decode(codec, piece, out, Room(CPU))
    return out


class EncodedChecks(Checks):
    """The checks of :mod:`tests.transport.conformance` for a transport with a wire."""

    def __init__(self, transport: Encoded) -> None:
        super().__init__(transport, exact=False)
        self.wire = transport.wire
        self._largest = 0.0

    def inexact(self) -> Checks:
        """They never have the last bits."""
        return self

    def gathered(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the codec says, to the bit, where it makes values smaller."""
        itemsize = {"fp32": 4, "bf16": 2, "fp8": 1, "int8": 1}[self.wire.gather]
        if dtype not in ENCODED or itemsize >= dtype.itemsize:
            return values.to(dtype)
        return through(values, self.wire.gather).to(dtype)

    def reduce(self, parts: list[torch.Tensor], dtype: torch.dtype, op: Reduce) -> torch.Tensor:
        """The exact result; remember how large its parts are."""
        wide = torch.complex128 if dtype.is_complex else torch.float64
        self._largest = sum(float(part.abs().max()) for part in parts if part.numel())
        return super().reduce([part.to(wide) for part in parts], wide, op).to(dtype)

    def compare(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Twice encoded: once each contribution, once their sum."""
        share = SHARE[self.wire.reduce] if expected.dtype in ENCODED else 0.0
        bound = 2.1 * share * self._largest
        tolerance = TOLERANCE[expected.dtype]
        torch.testing.assert_close(
            found,
            expected,
            rtol=tolerance,
            atol=tolerance + bound,
            msg=lambda text: f"{what} on rank {self.rank} of {self.world_size}: {text}",
        )

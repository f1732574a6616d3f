"""What is sent of a value, by choice. These settings do not import torch, for the command line."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.base.errors import NotPossibleError


class WireFormat(enum.Enum):
    """The format of values on the wire; they are computed and added in fp32.

    ``INT8`` and ``FP8`` (e4m3) send one byte per element, and one fp32 scale per 256 elements:
    1.016 bytes per element. ``INT4`` takes 0.516, and ``TERNARY`` 0.219: signs of the larger values
    of a block, and 0 for the others. Both are for DiLoCo, which keeps what they lose.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    TERNARY = "ternary"

    @property
    def needs_error_feedback(self) -> bool:
        """Whether it sends so little that the rest has to be sent later."""
        return self in (WireFormat.INT4, WireFormat.TERNARY)

    @classmethod
    def _missing_(cls, value: object) -> WireFormat:
        expected = ", ".join(each.value for each in cls)
        if str(value).startswith("topk"):
            expected = f"one of {expected}: top-k was removed, ternary loses less"
        raise WireError(repr(value), expected)


#: The formats of a :class:`Wire`. fp16 is none: gradients above 65504 would become infinite.
Encoding = Literal["fp32", "bf16", "fp8", "int8"]
Rounding = Literal["nearest", "stochastic"]


class WireError(NotPossibleError):
    """A wire that does not exist, or that does not go with something else."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__("wire", found, expected)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What ranks send each other where a dimension of the mesh leaves the host.

    A format takes effect where it has fewer bytes than what would be sent without it: bf16
    parameters do not change on a bf16 wire. Values of other dtypes than fp32, bf16 and fp16 are
    sent as they are.

    Attributes:
        gather: the format of parameters. Every rank computes with the decoded ones, the rank that
            keeps a shard too; shards stay exact.
        reduce: the format of gradients. They are decoded and added in fp32.
        error_feedback: add to a gradient what encoding lost of the one before. It takes 4 bytes per
            element of what a rank exchanges: of its shard in an all-reduce between replicas, but of
            the full parameter in a reduce-scatter, divided by the ranks of a host if several share
            each. Checkpoints do not have it.
        rounding: of int8 gradients: to the nearest number, or up or down at random, so that the
            expected value is exact.
        seed: of the random numbers, which also depend on the rank, the parameter and how often its
            gradient was sent. Nothing else draws from them.

    Raises:
        WireError: a value is unknown, or error feedback or random rounding has nothing to do.
    """

    gather: Encoding = "fp32"
    reduce: Encoding = "fp32"
    error_feedback: bool = False
    rounding: Rounding = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, found, choices in (
            ("gather", self.gather, get_args(Encoding)),
            ("reduce", self.reduce, get_args(Encoding)),
            ("rounding", self.rounding, get_args(Rounding)),
        ):
            if found not in choices:
                raise WireError(f"{name}={found!r}", f"one of {', '.join(choices)}")
        if not isinstance(self.error_feedback, bool):
            raise WireError(f"error_feedback={self.error_feedback!r}", "True or False")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise WireError(f"seed={self.seed!r}", "an integer from 0 to 2**63 - 1")
        if self.error_feedback and self.reduce == "fp32":
            raise WireError(
                "error_feedback=True with reduce='fp32', which loses nothing",
                "reduce='bf16', 'fp8' or 'int8', or error_feedback=False",
            )
        if self.rounding == "stochastic" and self.reduce != "int8":
            raise WireError(
                f"rounding='stochastic' with reduce={self.reduce!r}",
                "reduce='int8', or rounding='nearest'",
            )

    @property
    def is_plain(self) -> bool:
        """Whether nothing is encoded."""
        return self.gather == "fp32" and self.reduce == "fp32"

    def __str__(self) -> str:
        """The wire as it is written on the command line."""
        parts = [f"gather={self.gather}", f"reduce={self.reduce}"]
        if self.error_feedback:
            parts.append("error-feedback")
        if self.rounding != "nearest":
            parts.append(self.rounding)
        if self.seed:
            parts.append(f"seed={self.seed}")
        return ",".join(parts)


@dataclass(frozen=True)
class Wires:
    """The wires of the dimensions of a mesh.

    Attributes:
        common: the wire of all dimensions that are not named.
        named: the wires of others, by the names of their dimensions.
    """

    common: Wire = Wire()
    named: tuple[tuple[str, Wire], ...] = ()

    @classmethod
    def of(cls, wire: Wire | Mapping[str, Wire] | None) -> Wires:
        """Read the argument ``wire`` of ``fully_shard``.

        Raises:
            TypeError: it is something else than a wire or wires by name.
        """
        if wire is None:
            return cls()
        if isinstance(wire, Wire):
            return cls(wire)
        if not isinstance(wire, Mapping) or not all(
            isinstance(name, str) and isinstance(each, Wire) for name, each in wire.items()
        ):
            raise TypeError(
                f"wire: found {wire!r}, expected a Wire, or a mapping from names of mesh "
                "dimensions to Wires"
            )
        return cls(named=tuple(sorted(wire.items())))

    @property
    def argument(self) -> Wire | dict[str, Wire]:
        """The same as the argument ``wire`` of ``fully_shard``."""
        return dict(self.named) if self.named else self.common

    def __str__(self) -> str:
        """The wires as they are written on the command line."""
        return ";".join(f"{name}:{each}" for name, each in self.named) or str(self.common)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is encoded."""
        return self.common.is_plain and all(each.is_plain for _, each in self.named)

    def get(self, name: str) -> Wire:
        """Return the wire of a dimension."""
        return dict(self.named).get(name, self.common)

    def unknown(self, names: Collection[str]) -> str | None:
        """Return the first dimension that has a wire by name and is none of ``names``."""
        return next((name for name, _ in self.named if name not in names), None)

    def check_names(self, names: Collection[str], where: str) -> None:
        """Check that the mesh has the dimensions that have wires of their own.

        Args:
            names: those of the mesh.
            where: what is sharded and on which rank, for the message.

        Raises:
            WireError: it does not have one of them.
        """
        name = self.unknown(names)
        if name is not None:
            raise WireError(
                f"the mesh dimension {name!r} ({where})",
                f"one of {', '.join(map(repr, names))}, the data parallel dimensions of the mesh",
            )


#: Nothing is encoded.
PLAIN = Wires()

"""Which tensors of a call travel alone and which are packed together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Parcel:
    """The tensors that travel in one message per peer: one large one, or many small ones."""

    indices: tuple[int, ...]

    @property
    def packed(self) -> bool:
        """Whether the tensors are copied together, rather than sent from where they lie."""
        return len(self.indices) > 1


def parcels(nbytes: Sequence[int], kinds: Sequence[Hashable], small: int) -> list[Parcel]:
    """Divide the tensors of a call into parcels.

    Args:
        nbytes: size of a chunk of each tensor, in bytes; the same on every rank.
        kinds: only tensors of an equal kind (dtypes, say) are packed together.
        small: chunks of fewer bytes are packed.

    Returns:
        Parcels in the order of their first tensor. Tensors of no bytes are in none.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (size, kind) in enumerate(zip(nbytes, kinds, strict=True)):
        if size:
            groups.setdefault((kind, None if size < small else i), []).append(i)
    return [Parcel(tuple(indices)) for indices in groups.values()]


def total(numels: Sequence[int], parcel: Parcel) -> int:
    """Elements of a parcel, from the elements of every tensor of the call."""
    return sum(numels[i] for i in parcel.indices)


def pack(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor with the pieces one after the other; the piece itself where there is one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def unpack(packed: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy a packed tensor to where its pieces belong."""
    parts = torch.split(packed, [piece.numel() for piece in pieces])
    for piece, part in zip(pieces, parts, strict=True):
        piece.copy_(part)

"""What a run of a program showed, on one rank, and where two runs differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Shard

#: Which part of a full tensor a rank holds: dimension, number of parts, which.
Cut = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor that was looked at, ``None`` where there was none.

    Attributes:
        scale: of the numbers that it is a sum of, if that is known.
    """

    label: str
    tensor: torch.Tensor | None
    cut: Cut | None = None
    scale: float = 0.0


@dataclasses.dataclass
class Trace:
    """Everything that was looked at, in order.

    Attributes:
        entries: tensors by what they are.
        raised: what ended the program early: type and message.
        undefined: the unsharded program means nothing from here on, as ranks have parted.
    """

    entries: list[Entry] = dataclasses.field(default_factory=list)
    raised: str | None = None
    undefined: bool = False

    def note(self, label: str, value: torch.Tensor | None, scale: float = 0.0) -> None:
        """Look at a tensor, of a sharded one at this rank's part, without communication."""
        if value is None:
            self.entries.append(Entry(label, None))
            return
        with torch.no_grad():
            if isinstance(value, DTensor):
                local = value.to_local().detach().clone()
                self.entries.append(Entry(label, local, _cut_of(value), scale))
            else:
                self.entries.append(Entry(label, value.detach().clone(), scale=scale))


def _cut_of(tensor: DTensor) -> Cut | None:
    mesh = tensor.device_mesh
    for at, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            return placement.dim % tensor.ndim, mesh.size(at), mesh.get_local_rank(at)
    return None


def cut(tensor: torch.Tensor, part: Cut | None) -> torch.Tensor:
    """Take a part of a full tensor, cut as ``torch.chunk`` does."""
    if part is None:
        return tensor
    dim, parts, index = part
    chunks = tensor.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def first_difference(ours: Trace, other: Trace, tolerance: float) -> str | None:
    """Say where ``ours`` differs first from what ``other`` showed, or ``None``.

    A trace that ended early is compared as far as it goes, and so is one with an ``other`` that
    raised or lost its meaning.
    """
    for mine, theirs in zip(ours.entries, other.entries, strict=False):
        if mine.label != theirs.label:
            return f"{mine.label} in place of {theirs.label}"
        if said := _difference(mine, theirs, tolerance):
            return f"{mine.label}: {said}"
    short = len(ours.entries) < len(other.entries) and ours.raised is None
    if short:
        return f"nothing after {len(ours.entries)} of {len(other.entries)} entries"
    if len(ours.entries) > len(other.entries) and other.raised is None and not other.undefined:
        return f"{ours.entries[len(other.entries)].label} is not there in the other"
    return None


def _difference(mine: Entry, theirs: Entry, tolerance: float) -> str | None:
    if mine.tensor is None or theirs.tensor is None:
        if mine.tensor is theirs.tensor:
            return None
        return f"{_brief(mine.tensor)} in place of {_brief(theirs.tensor)}"
    found, expected = mine.tensor, theirs.tensor
    if mine.cut != theirs.cut:
        expected = cut(expected, mine.cut)
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} in place of {tuple(expected.shape)}"
    if not found.numel():
        return None
    found, expected = found.double(), expected.double()
    # Sums of numbers around one may cancel: that leaves an error which is not relative to them.
    floor = max(1e-2, theirs.scale, _floor(tolerance, theirs.tensor.numel()))
    scale = theirs.tensor.double().abs().max().clamp(min=floor)
    bound = tolerance * torch.nan_to_num(scale, nan=1.0, posinf=1.0).item()
    if torch.allclose(found, expected, rtol=tolerance, atol=bound, equal_nan=True):
        return None
    at = int((found - expected).abs().nan_to_num(nan=float("inf")).argmax())
    return f"{found.flatten()[at]:.6g} in place of {expected.flatten()[at]:.6g}"


def _floor(tolerance: float, numel: int) -> float:
    """From what size on differences are relative; in bfloat16, most gradients are below it.

    The gradient of a number is a sum over all samples, and no other number beside it shows of what.
    """
    if tolerance < 1e-3:
        return 0.1
    return 0.3 if numel == 1 else 0.0


def _brief(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return f"a tensor of up to {tensor.abs().max():.3g}" if tensor.numel() else "an empty tensor"


def tolerance_of(names: Sequence[str]) -> float:
    """How far apart two runs may be, relative, that compute in these dtypes."""
    if any("bf" in name for name in names):
        return 6e-2
    return 1e-10 if "float64" in names else 1e-5

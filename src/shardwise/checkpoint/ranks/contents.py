"""What ranks write of a model: which rows of which tensors, and what is converted before.

Nothing is gathered, except for what a caller wants written in another form than the model has it,
such as the experts of a layer one by one: see :class:`Conversion`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import xxhash
from torch.distributed.tensor import DTensor, Replicate

from shardwise.base.boxes import Box, full_box
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.entries import TensorInfo, dtype_name, torch_dtype
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.checkpoint.ranks.alike import RankState, check_alike, digests_of
from shardwise.checkpoint.ranks.loading import own_part
from shardwise.sharding.placement import full_tensor

R = TypeVar("R")


@dataclass(frozen=True)
class Conversion:
    """Tensors of a model that are written in another form.

    Attributes:
        sources: the tensors of the model by name, sharded or not.
        results: what is written in their place, by name.
        convert: makes the tensors to write of the full ``sources``, on the CPU.
    """

    sources: Mapping[str, torch.Tensor]
    results: Mapping[str, TensorInfo]
    convert: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]

    def renamed(self, names: Mapping[str, str]) -> Conversion:
        """The same, with results of other names.

        Args:
            names: the new name of each result.
        """
        return Conversion(
            self.sources,
            {names[name]: info for name, info in self.results.items()},
            lambda full: {names[name]: each for name, each in self.convert(full).items()},
        )


@dataclass(frozen=True)
class Contents:
    """What ranks write of a model.

    Attributes:
        tensors: the tensors to write by their names in the files, sharded or not.
        conversions: what is written in another form. The sources of one conversion at a time are
            gathered in full on every rank.
        dtype: what floating-point tensors are converted to; ``None`` to write them as they are.
    """

    tensors: Mapping[str, torch.Tensor]
    conversions: Sequence[Conversion] = ()
    dtype: torch.dtype | None = None

    @functools.cached_property
    def infos(self) -> dict[str, TensorInfo]:
        """Dtype and shape of everything that is written, by name."""
        infos = {name: info_of(tensor) for name, tensor in self.tensors.items()}
        for conversion in self.conversions:
            infos.update(conversion.results)
        return {
            name: TensorInfo(dtype_name(self.dtype_of(torch_dtype(info.dtype))), info.shape)
            for name, info in infos.items()
        }

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which tensors of a dtype are written."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype


@dataclass(frozen=True)
class Rows:
    """A part of a tensor that this rank writes.

    Attributes:
        name: of the tensor.
        shape: of the tensor in full.
        box: which part of it.
        values: the part, in the dtype of the model; shares the memory of a shard, or is new.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor


def own_rows(contents: Contents, ranks: Ranks) -> list[Rows]:
    """The rows of this rank's shards that it is the one to write."""
    mine = {name: each.detach() for name, each in contents.tensors.items() if _writes(each, ranks)}
    parts = {name: own_part(tensor) for name, tensor in mine.items()}
    return [
        Rows(name, tuple(mine[name].shape), box, values.resolve_conj().resolve_neg())
        for name, (box, values) in parts.items()
    ]


def agreed_contents(
    read: Callable[[], Contents], ranks: Ranks, doing: str, prepare: Callable[[Contents], R]
) -> tuple[Contents, R]:
    """Let every rank find what it writes, and the first rank prepare for that. All ranks call this.

    Args:
        read: called on every rank; returns what is written.
        ranks: who writes.
        doing: what the ranks do, for error messages.
        prepare: called on the first rank with what it writes, once all others have found the same.

    Returns:
        What this rank writes, and what ``prepare`` has returned.

    Raises:
        CheckpointError: a rank failed, or has other tensors than the first one; raised on all ranks
            alike.
    """
    found: list[Contents] = []

    def plan() -> tuple[int, int, RankState]:
        found.append(read())
        infos = found[0].infos
        lines = "\n".join(f"{name} {info.dtype} {info.shape}" for name, info in infos.items())
        replicas = {n: t for n, t in found[0].tensors.items() if not isinstance(t, DTensor)}
        digests = digests_of(replicas, replicas.keys() if ranks.size > 1 else frozenset())
        held = RankState(
            [], [], {(("model", name), ()): digest for name, digest in digests.items()}
        )
        return len(infos), xxhash.xxh3_64_intdigest(lines.encode("utf-8", "surrogatepass")), held

    def compare(plans: list[tuple[int, int, RankState]]) -> list[tuple[R, str]]:
        for number, each in enumerate(plans):
            if each[:2] != plans[0][:2]:
                raise CheckpointError(
                    f"found {plans[0][0]} tensors, and on rank {number} of those that save "
                    f"{each[0]}, of other names, shapes or dtypes; expected the same model on all"
                )
        differs = check_alike([held for _, _, held in plans], ranks.names)
        return [(prepare(found[0]), differs)] * len(plans)

    prepared, differs = ranks.together(doing, plan, compare)
    if differs:
        warnings.warn(differs, stacklevel=2)
    return found[0], prepared


def write_rows(
    contents: Contents, ranks: Ranks, write: Callable[[list[Rows]], None]
) -> Callable[[], None]:
    """Let every rank write its rows. Every rank calls this.

    Every element is written by one rank. What is converted is written by one rank in full, the
    ranks taking turns.

    Args:
        contents: what to write.
        ranks: who writes.
        write: called with rows of this rank, once for the shards and once for each conversion.

    Returns:
        What raises if this rank has failed: its part in the next round of ``ranks``. Until then, it
        gathers with the others all the same.
    """
    errors: list[Exception] = []

    def attempt(make: Callable[[], list[Rows]]) -> None:
        try:
            if not errors:
                write(make())
        except Exception as error:  # raised below
            errors.append(error)

    attempt(lambda: own_rows(contents, ranks))
    for number, conversion in enumerate(contents.conversions):
        full = gathered(conversion)
        if number % ranks.size == ranks.rank:
            attempt(functools.partial(converted, conversion, full))
        del full

    def check() -> None:
        if errors:
            raise errors[0]

    return check


def gathered(conversion: Conversion) -> dict[str, torch.Tensor]:
    """The full sources of a conversion, on the CPU. All ranks call this."""
    sources = {name: each.detach() for name, each in conversion.sources.items()}
    return {
        name: (full_tensor(each) if isinstance(each, DTensor) else each).cpu()
        for name, each in sources.items()
    }


def converted(conversion: Conversion, full: Mapping[str, torch.Tensor]) -> list[Rows]:
    """What a conversion makes of its full sources.

    Raises:
        CheckpointError: it makes something else than was planned.
    """
    made = conversion.convert(full)
    if {name: info_of(tensor) for name, tensor in made.items()} != dict(conversion.results):
        raise CheckpointError(
            f"{', '.join(conversion.sources)}: found {', '.join(made)} after the conversion, "
            f"expected {', '.join(conversion.results)} with the planned shapes"
        )
    return [
        Rows(name, tuple(tensor.shape), full_box(tensor.shape), tensor)
        for name, tensor in made.items()
    ]


def info_of(tensor: torch.Tensor) -> TensorInfo:
    """The dtype and the full shape of a tensor."""
    return TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape))


def _writes(tensor: torch.Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the one to write its part, of all ranks that have the same part."""
    if not isinstance(tensor, DTensor):
        return ranks.coordinates
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        isinstance(placement, Replicate) and at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )

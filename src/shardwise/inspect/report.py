"""The report: which rank of a mesh holds which part of which parameter."""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.inspect.grid import Grid
from shardwise.inspect.tiling import Block, Tiling

ADAM_STATES = 2  # tensors of a parameter's size that Adam keeps: exp_avg and exp_avg_sq


class Kind(enum.Enum):
    """What keeps a parameter."""

    SHARDED = "sharded"
    REPLICATED = "replicated"
    TENSOR_PARALLEL = "tensor parallel only"
    PLAIN = "plain"

    @property
    def meaning(self) -> str:
        """In words."""
        return _MEANINGS[self]


_MEANINGS = {
    Kind.SHARDED: "cut by fully_shard",
    Kind.REPLICATED: "in a group of fully_shard, which did not cut it: a scalar, or a mesh that "
    "only replicates",
    Kind.TENSOR_PARALLEL: "a DTensor in no group of fully_shard",
    Kind.PLAIN: "a plain tensor in no group of fully_shard: ignored, or not reached by a call",
}


@dataclass(frozen=True, kw_only=True)
class ParameterReport:
    """One parameter, and who holds what of it.

    Attributes:
        name: fully qualified name; the first, where it is tied.
        aliases: the other names of a tied parameter.
        dtype: as it is stored, ``"float32"``.
        itemsize: bytes of an element.
        trainable: whether it requires a gradient.
        kind: what keeps it.
        group: name of the module whose ``fully_shard`` call took it, ``""`` for the model itself;
            ``None`` where none did.
        cut_dim: the dimension that ``fully_shard`` cut it along; ``None`` if it did not.
        placements: torch's placements by the names of the mesh dimensions they are on.
        tiling: the blocks of all ranks.
        cut_along: for every dimension of the report's mesh, the dimensions of the tensor that
            change along it; none where the ranks along it hold the same.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: str
    itemsize: int
    trainable: bool
    kind: Kind
    group: str | None
    cut_dim: int | None
    placements: tuple[tuple[str, str], ...]
    tiling: Tiling
    cut_along: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.tiling.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.tiling.numel * self.itemsize

    @property
    def padding_nbytes(self) -> int:
        """Bytes of padding in the chunks of all ranks together."""
        return self.tiling.padding * self.itemsize

    def block(self, rank: int) -> Block | None:
        """What ``rank`` holds; ``None`` if it does not have the parameter."""
        return self.tiling.by_rank.get(rank)

    def nbytes_on(self, rank: int) -> int:
        """Bytes that ``rank`` holds."""
        block = self.block(rank)
        return block.numel * self.itemsize if block else 0


@dataclass(frozen=True, kw_only=True)
class RankTotals:
    """What one rank holds, in bytes.

    Attributes:
        rank: which rank.
        parameters: bytes of its shards and of what it holds whole.
        trainable: those of them that require a gradient.
        replicated: those that some other rank holds too.
        padding: bytes by which its chunks are longer than its shards, while they are gathered.
    """

    rank: int
    parameters: int
    trainable: int
    replicated: int
    padding: int

    @property
    def gradients(self) -> int:
        """Estimate: the gradients between backward and ``zero_grad``, in the stored dtype."""
        return self.trainable

    @property
    def optimizer(self) -> int:
        """Estimate: the two states of Adam, in the stored dtype."""
        return ADAM_STATES * self.trainable


@dataclass(frozen=True, kw_only=True)
class Remark:
    """Something to mind.

    Attributes:
        kind: ``"unbalanced"``, ``"padding"``, ``"empty"``, ``"replicated"``, ``"not sharded"`` or
            ``"interleaved"``.
        text: in a sentence, with figures.
        nbytes: how many bytes it is about; ``None`` if bytes are not the point.
        parameters: names of those it is about.
    """

    kind: str
    text: str
    nbytes: int | None
    parameters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Who holds what of a model. ``print`` it, or see ``to_json`` and ``to_html``.

    Attributes:
        model: what it is called.
        grid: the mesh.
        parameters: in the order of the model, tied ones once.
        values: elements of small parameters by name and rank, nested as in ``tolist()``; ``None``
            where they were not asked for, or this is not the rank that has them.
    """

    model: str
    grid: Grid
    parameters: tuple[ParameterReport, ...]
    values: Mapping[str, Mapping[int, Any]] | None = field(default=None, compare=False)

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(each.tiling.numel for each in self.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model's parameters."""
        return sum(each.nbytes for each in self.parameters)

    @cached_property
    def totals(self) -> tuple[RankTotals, ...]:
        """For every rank of the mesh, in its order."""
        return tuple(self._totals_of(rank) for rank in self.grid.ranks)

    @cached_property
    def remarks(self) -> tuple[Remark, ...]:
        """What to mind."""
        from shardwise.inspect.remarks import remarks_on

        return tuple(remarks_on(self))

    def find(self, name: str) -> ParameterReport:
        """The parameter of this name, or of this alias.

        Raises:
            KeyError: there is none.
        """
        for each in self.parameters:
            if name == each.name or name in each.aliases:
                return each
        raise KeyError(name)

    def matching(self, pattern: str | None) -> tuple[ParameterReport, ...]:
        """The parameters of which a name matches (``*`` for anything); all, for ``None``."""
        return tuple(
            each
            for each in self.parameters
            if pattern is None
            or any(fnmatch.fnmatchcase(name, pattern) for name in (each.name, *each.aliases))
        )

    def to_json(self, pattern: str | None = None) -> dict[str, Any]:
        """The report as plain values that ``json`` can write; docs/inspect.md has the fields.

        Args:
            pattern: of the parameters to tell of one by one, see :meth:`matching`.
        """
        from shardwise.inspect.plain import plain_report

        return plain_report(self, self.matching(pattern))

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one page that needs nothing else.

        Returns:
            The path.

        Raises:
            OSError: it cannot be written.
        """
        from shardwise.inspect.page import page

        path = Path(path)
        path.write_text(page(self), encoding="utf-8")
        return path

    def to_svg(self, parameter: str, path: str | Path, *, rank: int | None = None) -> Path:
        """Draw the mesh and one parameter, and mark a rank and its block.

        Returns:
            The path.

        Raises:
            KeyError: there is no such parameter.
            OSError: it cannot be written.
        """
        from shardwise.inspect.draw import drawing

        path = Path(path)
        path.write_text(drawing(self, self.find(parameter), rank), encoding="utf-8")
        return path

    def __str__(self) -> str:
        from shardwise.inspect.text import as_text

        return as_text(self)

    def _totals_of(self, rank: int) -> RankTotals:
        found = [(each, block) for each in self.parameters if (block := each.block(rank))]

        def total(some: Sequence[tuple[ParameterReport, Block]]) -> int:
            return sum(block.numel * each.itemsize for each, block in some)

        return RankTotals(
            rank=rank,
            parameters=total(found),
            trainable=total([(each, block) for each, block in found if each.trainable]),
            replicated=total([(each, block) for each, block in found if len(block.ranks) > 1]),
            padding=sum(block.padding * each.itemsize for each, block in found),
        )

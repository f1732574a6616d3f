"""The report: which rank of a mesh holds which part of which parameter.

A plain value; ``text.py``, ``page.py`` and ``picture.py`` show it, and ``docs/inspect.md``
describes its JSON form.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.inspect.grid import Grid
from shardwise.inspect.tiling import Block, Tiling
from shardwise.inspect.words import Row, counted, fold, ranks_in_words, shape_in_words
from shardwise.units import brief_size

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


def folded(parameters: Iterable[ParameterReport]) -> list[Row[ParameterReport]]:
    """Parameters of repeated layers that are laid out alike as one row."""
    return fold(
        parameters,
        name=lambda each: each.name,
        kind=lambda each: (
            each.dtype,
            each.trainable,
            each.kind,
            each.placements,
            each.tiling,
            len(each.aliases),
        ),
    )


def unfolded(parameters: Iterable[ParameterReport]) -> list[Row[ParameterReport]]:
    """A row for each parameter."""
    return fold(parameters, name=lambda each: each.name, kind=lambda each: each.name)


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
        from shardwise.inspect.report import remarks_on

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
        from shardwise.inspect.report import plain_report

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
        from shardwise.inspect.picture import drawing

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


_EVEN_ENOUGH = 1.05  # what the fullest rank may hold, as a multiple of the emptiest one's


def remarks_on(report: Report) -> Iterator[Remark]:
    """Every remark that there is reason for, the most expensive kinds first."""
    yield from _not_sharded(report)
    yield from _replicated(report)
    yield from _unbalanced(report)
    yield from _empty(report)
    yield from _padding(report)
    yield from _interleaved(report)


def _remark(
    kind: str, text: str, found: list[ParameterReport], nbytes: int | None = None
) -> Remark:
    return Remark(
        kind=kind, text=text, nbytes=nbytes, parameters=tuple(each.name for each in found)
    )


def _not_sharded(report: Report) -> Iterator[Remark]:
    if report.grid.size == 1:
        return
    found = [each for each in report.parameters if each.kind is Kind.PLAIN]
    nbytes = sum(each.nbytes for each in found)
    if found:
        yield _remark(
            "not sharded",
            f"{counted(found, 'parameter')}, {brief_size(nbytes)} on every rank, "
            f"{'is' if len(found) == 1 else 'are'} in no group of fully_shard (ignored, or not "
            f"reached by a call), and so are gradients and optimizer state: "
            f"{_some(found)}",
            found,
            nbytes,
        )


def _replicated(report: Report) -> Iterator[Remark]:
    """For every dimension of the mesh, what is the same along it."""
    sharded = [each for each in report.parameters if each.kind is not Kind.PLAIN]
    for dim, (name, size) in enumerate(zip(report.grid.names, report.grid.shape, strict=True)):
        found = [each for each in sharded if not each.cut_along[dim] and each.tiling.numel]
        if size == 1 or not found:
            continue
        nbytes = max(sum(each.nbytes_on(rank) for each in found) for rank in report.grid.ranks)
        every = len(found) == len(sharded)
        what = (
            "every parameter is"
            if every
            else f"{counted(found, 'parameter')} {'is' if len(found) == 1 else 'are'}"
        )
        rest = "" if every else f": {_some(found)}"
        yield _remark(
            "replicated",
            f"{what} the same on all {size} ranks along {name}: {brief_size(nbytes)} a rank{rest}",
            found,
            nbytes,
        )


def _unbalanced(report: Report) -> Iterator[Remark]:
    most = max(report.totals, key=lambda total: total.parameters)
    least = min(report.totals, key=lambda total: total.parameters)
    if most.parameters <= _EVEN_ENOUGH * least.parameters:
        return
    found = [
        each
        for each in report.parameters
        if len({each.nbytes_on(rank) for rank in report.grid.ranks}) > 1
    ]
    ratio = most.parameters / least.parameters if least.parameters else None
    more = most.parameters - least.parameters
    times = "" if ratio is None else f", {ratio:.2f} times as much ({brief_size(more)} more)"
    yield _remark(
        "unbalanced",
        f"rank {most.rank} holds {brief_size(most.parameters)} and rank {least.rank} "
        f"{brief_size(least.parameters)}{times}; {counted(found, 'parameter')} "
        f"{'is' if len(found) == 1 else 'are'} cut unevenly",
        found,
        more,
    )


def _empty(report: Report) -> Iterator[Remark]:
    found = [each for each in report.parameters if each.tiling.empty_ranks]
    if not found:
        return
    worst = max(found, key=lambda each: len(each.tiling.empty_ranks))
    one = len(worst.tiling.empty_ranks) == 1
    yield _remark(
        "empty",
        f"{counted(found, 'parameter')} {'leaves' if len(found) == 1 else 'leave'} ranks with "
        f"nothing: of {worst.name}, {shape_in_words(worst.shape)}, "
        f"{'rank' if one else 'ranks'} {ranks_in_words(worst.tiling.empty_ranks)} "
        f"{'holds' if one else 'hold'} no element",
        found,
    )


def _padding(report: Report) -> Iterator[Remark]:
    found = [each for each in report.parameters if each.padding_nbytes]
    if not found:
        return
    nbytes = sum(each.padding_nbytes for each in found)
    held = sum(total.parameters for total in report.totals)
    worst = max(found, key=lambda each: each.padding_nbytes)
    yield _remark(
        "padding",
        f"{brief_size(nbytes)} of padding over all ranks ({nbytes / held:.2%} of the shards) while "
        f"{counted(found, 'parameter')} {'is' if len(found) == 1 else 'are'} gathered, most for "
        f"{worst.name}: {brief_size(worst.padding_nbytes)}",
        found,
        nbytes,
    )


def _interleaved(report: Report) -> Iterator[Remark]:
    """Parameters that ``fully_shard`` cut along another dimension than the first."""
    found = [each for each in report.parameters if each.cut_dim not in (None, 0)]
    if found:
        nbytes = sum(each.nbytes for each in found)
        yield _remark(
            "interleaved",
            f"{counted(found, 'parameter')} {'is' if len(found) == 1 else 'are'} sharded along "
            f"another dimension than the first: every unshard costs one more copy of "
            f"{brief_size(nbytes)} in all",
            found,
            nbytes,
        )


def _some(found: list[ParameterReport]) -> str:
    names = [each.name for each in found[:2]]
    return ", ".join(names) + (", ..." if len(found) > 2 else "")


VERSION = 1  # raised when a field changes its meaning or goes


def plain_report(report: Report, parameters: Sequence[ParameterReport]) -> dict[str, Any]:
    """A report, with some of its parameters. Those that are cut alike refer to one tiling.

    Totals and remarks are those of the whole model.
    """
    tilings = list(dict.fromkeys(each.tiling for each in parameters))
    told = {each.name for each in parameters}
    numbers = {tiling: number for number, tiling in enumerate(tilings)}
    return {
        "version": VERSION,
        "model": report.model,
        "mesh": {
            "names": list(report.grid.names),
            "shape": list(report.grid.shape),
            "ranks": list(report.grid.ranks),
        },
        "numel": report.numel,
        "nbytes": report.nbytes,
        "ranks": [_totals(each) for each in report.totals],
        "parameters": [_parameter(each, numbers[each.tiling]) for each in parameters],
        "tilings": [_tiling(each) for each in tilings],
        "remarks": [
            {
                "kind": each.kind,
                "text": each.text,
                "nbytes": each.nbytes,
                "parameters": list(each.parameters),
            }
            for each in report.remarks
        ],
        "values": None
        if report.values is None
        else {
            name: {str(rank): elements for rank, elements in held.items()}
            for name, held in report.values.items()
            if name in told
        },
    }


def _totals(each: RankTotals) -> dict[str, int]:
    return {
        "rank": each.rank,
        "parameters": each.parameters,
        "trainable": each.trainable,
        "replicated": each.replicated,
        "padding": each.padding,
        "estimated_gradients": each.gradients,
        "estimated_adam": each.optimizer,
    }


def _parameter(each: ParameterReport, tiling: int) -> dict[str, Any]:
    return {
        "name": each.name,
        "aliases": list(each.aliases),
        "shape": list(each.shape),
        "dtype": each.dtype,
        "itemsize": each.itemsize,
        "nbytes": each.nbytes,
        "trainable": each.trainable,
        "kind": each.kind.value,
        "group": each.group,
        "cut_dim": each.cut_dim,
        "placements": [list(pair) for pair in each.placements],
        "cut_along": [list(dims) for dims in each.cut_along],
        "tiling": tiling,
    }


def _tiling(tiling: Tiling) -> dict[str, Any]:
    return {
        "shape": list(tiling.shape),
        "blocks": [
            {
                "ranks": list(block.ranks),
                "spans": [[list(span) for span in spans] for spans in block.part],
                "numel": block.numel,
                "padding": block.padding,
            }
            for block in tiling.blocks
        ],
    }

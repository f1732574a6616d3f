"""The report: which rank of a mesh holds which part of which parameter.

A report is a plain value. ``text.py`` and ``page.py`` show it, and
``docs/inspect.md`` describes its JSON form.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from shardwise.base.units import binary_size, counted
from shardwise.insight.inspect.grid import Block, Grid, Tiling
from shardwise.insight.inspect.words import Row, fold, holders_in_words, shape_in_words

JSON_VERSION = 1  # raised when a field is removed or changes its meaning
ADAM_STATES = 2  # tensors of a parameter's size that Adam keeps: exp_avg and exp_avg_sq
MOST_VALUES = 256  # elements of the largest parameter whose values a report has

_BALANCED = 1.05  # largest ratio of bytes on two ranks that deserves no remark

#: Elements of small parameters by name and rank, nested as in ``tolist()``.
Values = Mapping[str, Mapping[int, Any]]


class ParamKind(enum.Enum):
    """How a parameter is stored."""

    SHARDED = "sharded"
    REPLICATED = "replicated"
    TENSOR_PARALLEL = "tensor parallel only"
    PLAIN = "plain"


#: A phrase that explains each kind.
MEANINGS = {
    ParamKind.SHARDED: "sharded by fully_shard",
    ParamKind.REPLICATED: "managed by fully_shard but not sharded: a scalar, or a mesh that only "
    "replicates",
    ParamKind.TENSOR_PARALLEL: "a DTensor that no fully_shard call manages",
    ParamKind.PLAIN: "a plain tensor that no fully_shard call manages: ignored, or not reached",
}


@dataclass(frozen=True, kw_only=True)
class ParameterReport:
    """One parameter, and the part of it that each rank holds.

    Attributes:
        name: fully qualified name; the first one if the parameter is tied.
        aliases: the other names of a tied parameter.
        dtype: the stored dtype, such as ``"float32"``.
        itemsize: bytes per element.
        trainable: whether it requires a gradient.
        kind: how it is stored.
        group: name of the module whose ``fully_shard`` call manages it, ``""`` for the model
            itself; ``None`` if no call does.
        cut_dim: the dimension that ``fully_shard`` sharded; ``None`` if it did not shard any.
        placements: pairs of a mesh dimension's name and torch's placement on it.
        tiling: the blocks of all ranks.
        cut_along: for each dimension of the report's mesh, the tensor dimensions whose indices
            differ between the ranks along it; empty where those ranks hold the same part.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: str
    itemsize: int
    trainable: bool
    kind: ParamKind
    group: str | None
    cut_dim: int | None
    placements: tuple[tuple[str, str], ...]
    tiling: Tiling
    cut_along: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""
        return self.tiling.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameter."""
        return self.tiling.numel * self.itemsize

    @property
    def padding_nbytes(self) -> int:
        """Bytes of padding, summed over all ranks."""
        return self.tiling.padding * self.itemsize

    def block(self, rank: int) -> Block | None:
        """What ``rank`` holds; ``None`` if the parameter is not on that rank."""
        return self.tiling.by_rank.get(rank)

    def nbytes_on(self, rank: int) -> int:
        """Bytes that ``rank`` holds."""
        block = self.block(rank)
        return block.numel * self.itemsize if block else 0


@dataclass(frozen=True)
class GroupReport:
    """Parameters that are gathered and freed together.

    Attributes:
        name: name of the module whose ``fully_shard`` call made the group, ``""`` for the model.
        parameters: the parameters of the group.
    """

    name: str
    parameters: tuple[ParameterReport, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the full parameters."""
        return sum(each.tiling.numel for each in self.parameters)

    @property
    def padding(self) -> int:
        """Number of padding elements on all ranks together."""
        return sum(each.tiling.padding for each in self.parameters)

    def numel_on(self, rank: int) -> int:
        """Number of elements that ``rank`` holds."""
        blocks = (each.block(rank) for each in self.parameters)
        return sum(block.numel for block in blocks if block is not None)

    def nbytes_on(self, rank: int) -> int:
        """Number of bytes that ``rank`` holds."""
        return sum(each.nbytes_on(rank) for each in self.parameters)


def folded(parameters: Iterable[ParameterReport]) -> list[Row[ParameterReport]]:
    """One row for the parameters of repeated layers that are sharded alike."""
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
    """One row for each parameter."""
    return fold(parameters, name=lambda each: each.name, kind=lambda each: each.name)


@dataclass(frozen=True, kw_only=True)
class RankTotals:
    """Bytes on one rank.

    Attributes:
        rank: the global rank.
        parameters: bytes of all parameters that the rank holds, sharded or not.
        trainable: bytes of those that require a gradient.
        replicated: bytes that at least one other rank holds too.
        padding: bytes of padding in the rank's chunks while they are gathered.
    """

    rank: int
    parameters: int
    trainable: int
    replicated: int
    padding: int

    @property
    def gradients(self) -> int:
        """Estimated bytes of gradients between backward and ``zero_grad``, in the stored dtype."""
        return self.trainable

    @property
    def optimizer(self) -> int:
        """Estimated bytes of Adam's two states, in the stored dtype."""
        return ADAM_STATES * self.trainable


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A property of the layout that costs memory, copies, balance or the average of gradients.

    Attributes:
        kind: ``"not averaged"``, ``"unbalanced"``, ``"padding"``, ``"empty"``, ``"replicated"``,
            ``"not sharded"`` or ``"interleaved"``.
        text: one sentence with figures.
        nbytes: the bytes concerned; ``None`` if the remark is not about bytes.
        parameters: names of the parameters concerned.
    """

    kind: str
    text: str
    nbytes: int | None
    parameters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Which rank holds what of a model.

    Attributes:
        model: the model's name.
        grid: the mesh.
        parameters: in the order of the model; tied parameters appear once.
        values: elements of small parameters by name and rank, nested as in ``tolist()``; ``None``
            if they were not requested, or on ranks that they were not gathered to.
        unaveraged: the number of ranks along each mesh dimension over which nothing is averaged,
            though ranks may train apart; see ``unaveraged_dims``.
    """

    model: str
    grid: Grid
    parameters: tuple[ParameterReport, ...]
    values: Values | None = field(default=None, compare=False)
    unaveraged: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def numel(self) -> int:
        """Number of elements of the full model."""
        return sum(each.tiling.numel for each in self.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of the full model's parameters."""
        return sum(each.nbytes for each in self.parameters)

    @cached_property
    def groups(self) -> tuple[GroupReport, ...]:
        """The groups of ``fully_shard``, the model's own last; tied parameters in their first."""
        members: dict[str, list[ParameterReport]] = {}
        for each in self.parameters:
            if each.group is not None:
                members.setdefault(each.group, []).append(each)
        own = members.pop("", None)
        if own is not None:
            members[""] = own
        return tuple(GroupReport(name, tuple(group)) for name, group in members.items())

    @cached_property
    def totals(self) -> tuple[RankTotals, ...]:
        """Bytes on each rank, in the order of the mesh."""
        return tuple(_totals(self.parameters, rank) for rank in self.grid.ranks)

    @cached_property
    def remarks(self) -> tuple[Remark, ...]:
        """Everything about this layout that costs memory, copies or balance."""
        return tuple(_remarks(self))

    def find(self, name: str) -> ParameterReport:
        """Find a parameter.

        Args:
            name: its name or alias.

        Returns:
            What is known of it.

        Raises:
            KeyError: there is none.
        """
        for each in self.parameters:
            if name == each.name or name in each.aliases:
                return each
        raise KeyError(name)

    def matching(self, pattern: str | None) -> tuple[ParameterReport, ...]:
        """Find parameters.

        Args:
            pattern: of their names or aliases; ``*`` stands for any characters. ``None``: of all.

        Returns:
            What is known of each.
        """
        return tuple(
            each
            for each in self.parameters
            if pattern is None
            or any(fnmatch.fnmatchcase(name, pattern) for name in (each.name, *each.aliases))
        )

    def to_json(self, pattern: str | None = None) -> dict[str, Any]:
        """Convert the report to values that ``json`` can write. docs/inspect.md lists the fields.

        Parameters that are sharded alike refer to the same tiling.

        Args:
            pattern: leave out parameters that do not match it; see :meth:`matching`. Totals and
                remarks are those of the full model.

        Returns:
            Dicts, lists, strings, numbers and ``None``.
        """
        parameters = self.matching(pattern)
        tilings = list(dict.fromkeys(each.tiling for each in parameters))
        numbers = {tiling: number for number, tiling in enumerate(tilings)}
        return {
            "version": JSON_VERSION,
            "model": self.model,
            "mesh": {
                "names": list(self.grid.names),
                "shape": list(self.grid.shape),
                "ranks": list(self.grid.ranks),
            },
            "numel": self.numel,
            "nbytes": self.nbytes,
            "ranks": [
                {
                    **asdict(each),
                    "estimated_gradients": each.gradients,
                    "estimated_adam": each.optimizer,
                }
                for each in self.totals
            ],
            "parameters": [_json_of_parameter(p, numbers[p.tiling]) for p in parameters],
            "tilings": [_json_of_tiling(each) for each in tilings],
            "remarks": [
                {**asdict(each), "parameters": list(each.parameters)} for each in self.remarks
            ],
            "values": None if self.values is None else _json_of_values(self.values, parameters),
        }


def _totals(parameters: Sequence[ParameterReport], rank: int) -> RankTotals:
    found = [(each, block) for each in parameters if (block := each.block(rank))]

    def total(some: Iterable[tuple[ParameterReport, Block]]) -> int:
        return sum(block.numel * each.itemsize for each, block in some)

    return RankTotals(
        rank=rank,
        parameters=total(found),
        trainable=total((each, block) for each, block in found if each.trainable),
        replicated=total((each, block) for each, block in found if len(block.ranks) > 1),
        padding=sum(block.padding * each.itemsize for each, block in found),
    )


# -- remarks -----------------------------------------------------------------------------------


def _remarks(report: Report) -> Iterator[Remark]:
    """All remarks on a report, the most expensive kinds first."""
    for name, size in report.unaveraged.items():
        text = f"each of the {size} ranks along {name} trains a model of its own"
        yield _remark("not averaged", text, [])
    yield from _not_sharded(report)
    yield from _replicated(report)
    yield from _unbalanced(report)
    yield from _empty(report)
    yield from _padding(report)
    yield from _interleaved(report)


def _remark(
    kind: str, text: str, found: list[ParameterReport], nbytes: int | None = None
) -> Remark:
    names = tuple(each.name for each in found)
    return Remark(kind=kind, text=text, nbytes=nbytes, parameters=names)


def _not_sharded(report: Report) -> Iterator[Remark]:
    if report.grid.size == 1:
        return
    found = [each for each in report.parameters if each.kind is ParamKind.PLAIN]
    if found:
        nbytes = sum(each.nbytes for each in found)
        yield _remark(
            "not sharded",
            f"{counted(found, 'parameter')} ({binary_size(nbytes)}) {_verb(found)} full on every "
            "rank, with gradients and optimizer state: ignored, or not reached by a fully_shard "
            f"call: {_examples(found)}",
            found,
            nbytes,
        )


def _replicated(report: Report) -> Iterator[Remark]:
    """One remark per mesh dimension along which parameters are the same."""
    sharded = [each for each in report.parameters if each.kind is not ParamKind.PLAIN]
    for dim, (name, size) in enumerate(zip(report.grid.names, report.grid.shape, strict=True)):
        found = [each for each in sharded if not each.cut_along[dim] and each.tiling.numel]
        if size == 1 or not found:
            continue
        nbytes = max(sum(each.nbytes_on(rank) for each in found) for rank in report.grid.ranks)
        what, examples = "all parameters are", ""
        if len(found) < len(sharded):
            what = _parameters(found)
            examples = f": {_examples(found)}"
        yield _remark(
            "replicated",
            f"{what} the same on all {size} ranks along {name}, {binary_size(nbytes)} per rank"
            f"{examples}",
            found,
            nbytes,
        )


def _unbalanced(report: Report) -> Iterator[Remark]:
    most = max(report.totals, key=lambda total: total.parameters)
    least = min(report.totals, key=lambda total: total.parameters)
    if most.parameters <= _BALANCED * least.parameters:
        return
    found = [
        each
        for each in report.parameters
        if len({each.nbytes_on(rank) for rank in report.grid.ranks}) > 1
    ]
    more = most.parameters - least.parameters
    beside = f"and rank {least.rank} holds nothing"
    if least.parameters:
        times, size = most.parameters / least.parameters, binary_size(least.parameters)
        beside = f"{times:.2f} times the {size} of rank {least.rank} ({binary_size(more)} more)"
    yield _remark(
        "unbalanced",
        f"rank {most.rank} holds {binary_size(most.parameters)}, {beside}; "
        f"{_parameters(found)} sharded unevenly",
        found,
        more,
    )


def _empty(report: Report) -> Iterator[Remark]:
    found = [each for each in report.parameters if each.tiling.empty_ranks]
    if not found:
        return
    worst = max(found, key=lambda each: len(each.tiling.empty_ranks))
    ranks = worst.tiling.empty_ranks
    yield _remark(
        "empty",
        f"{counted(found, 'parameter')} {_verb(found, 'leaves', 'leave')} some ranks without "
        "elements; "
        f"{holders_in_words(ranks)} {'holds' if len(ranks) == 1 else 'hold'} nothing of "
        f"{worst.name} ({shape_in_words(worst.shape)})",
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
        f"{binary_size(nbytes)} of padding on all ranks together ({nbytes / held:.2%} of the "
        f"shards) while {_parameters(found)} gathered; "
        f"{binary_size(worst.padding_nbytes)} of it for {worst.name}",
        found,
        nbytes,
    )


def _interleaved(report: Report) -> Iterator[Remark]:
    """Parameters that ``fully_shard`` sharded along a dimension other than the first."""
    found = [each for each in report.parameters if each.cut_dim not in (None, 0)]
    if found:
        nbytes = sum(each.nbytes for each in found)
        yield _remark(
            "interleaved",
            f"{_parameters(found)} sharded along a dimension other than the first; every unshard "
            f"copies {binary_size(nbytes)} once more",
            found,
            nbytes,
        )


def _parameters(found: list[ParameterReport]) -> str:
    return f"{counted(found, 'parameter')} {_verb(found)}"


def _verb(found: list[ParameterReport], singular: str = "is", plural: str = "are") -> str:
    return singular if len(found) == 1 else plural


def _examples(found: list[ParameterReport]) -> str:
    names = [each.name for each in found[:2]]
    return ", ".join(names) + (", ..." if len(found) > 2 else "")


# -- JSON --------------------------------------------------------------------------------------


def _json_of_parameter(each: ParameterReport, tiling: int) -> dict[str, Any]:
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


def _json_of_tiling(tiling: Tiling) -> dict[str, Any]:
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


def _json_of_values(values: Values, parameters: Sequence[ParameterReport]) -> dict[str, Any]:
    names = {each.name for each in parameters}
    return {
        name: {str(rank): elements for rank, elements in held.items()}
        for name, held in values.items()
        if name in names
    }

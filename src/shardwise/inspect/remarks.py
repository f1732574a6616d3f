"""What to mind: where shards are uneven, wasted or unbalanced, with figures."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.inspect.report import Kind, ParameterReport, Remark, Report
from shardwise.inspect.words import counted, ranks_in_words, shape_in_words
from shardwise.units import brief_size

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

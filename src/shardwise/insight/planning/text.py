"""A plan as text for a terminal of 80 columns or more, and as one HTML page.

The page is the inspector's, with memory, traffic and time above it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from shardwise.base.html import bar, document, escape, keys
from shardwise.base.lazy import resource
from shardwise.base.observe import Memory
from shardwise.base.units import binary_size, counted, seconds
from shardwise.frontends.strategies import Checkpointing
from shardwise.insight.inspect import page as inspector
from shardwise.insight.inspect.report import Report
from shardwise.insight.inspect.text import Cells, rendered
from shardwise.insight.inspect.words import Row, fold
from shardwise.insight.planning.memory import RankBytes
from shardwise.insight.planning.report import Plan
from shardwise.insight.planning.settings import MOST_PEERS, Products, Settings, name_of
from shardwise.insight.schema.sharding import Stepping

MOST_MODULES = 6  # of whose activations are listed

NAMES = {
    Memory.PARAMETERS: "parameters",
    Memory.GRADIENTS: "gradients",
    Memory.OPTIMIZER: "optimizer states",
    Memory.FULL_PARAMETERS: "full parameters",
    Memory.TRANSPORT: "transport, staging",
    Memory.ACTIVATIONS: "activations",
    Memory.OTHER: "logits, loss, other",
}


def as_text(plan: Plan, width: int | None = None) -> str:
    """Format a plan, without a newline at the end.

    Args:
        plan: the plan.
        width: number of columns; ``None`` for those of the terminal.
    """
    return rendered(_parts(plan), width)


def _parts(plan: Plan) -> Iterator[Text | Table]:
    yield _lines(head(plan))
    yield Text()
    yield from needs(plan)
    for cells in speeds(plan):
        yield Text()
        yield cells.for_terminal()
    for note in notes(plan):
        yield Text()
        yield Text(note)


def _lines(labeled: Iterable[tuple[str, str]]) -> Table:
    lines = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for label, text in labeled:
        lines.add_row(Text(label), Text(text))
    return lines


def needs(plan: Plan) -> Iterator[Text | Table]:
    """Tables of what a step needs on any machine: memory and traffic."""
    first, *others = bytes_needed(plan)
    table = first.for_terminal()
    table.add_row(Text(f"peak: {plan.ranks[0].peak_moment}"))
    yield table
    for cells in others:
        yield Text()
        yield cells.for_terminal()


def head(plan: Plan) -> Iterator[tuple[str, str]]:
    """The first lines: a label and a text each."""
    settings = plan.settings
    yield "model", f"{plan.model}, {plan.numel:,} parameters"
    ranks = counted(settings.mesh.size, "rank")
    yield "sharding", f"{settings.strategy.value} over {settings.world}, {ranks}"
    yield "step", _batch(settings)
    yield "precision", ", ".join(_precision(settings))
    yield "optimizer", _optimizer(settings)
    if plan.alternatives:
        yield "options", " ".join(_options(settings))
    if (diloco := settings.diloco) is not None:
        sent = f"{binary_size(plan.exchanged)} sent by a rank as {diloco.wire.value}"
        yield "exchange", f"every {counted(diloco.local_steps, 'step')}, {sent}"
    if every := settings.replicate_every:
        kept_on_host, sent_by_rank = map(binary_size, plan.kept_in_memory)
        each = f"{sent_by_rank} sent by a rank every {counted(every, 'step')}"
        yield "in memory", f"{kept_on_host} of a host; {each}"
    if plan.machine:
        yield "machine", plan.machine
    yield "memory", verdict(plan)
    places = {
        "states": settings.offload,
        "parameters": settings.offload_parameters,
        "inputs of blocks": settings.place_of_activations,
    }
    if any(places.values()):
        kept = max(rank.offloaded for rank in plan.ranks)
        each = ", ".join(f"{what} to {place}" for what, place in places.items() if place)
        yield "offloaded", f"{binary_size(kept)} of a rank: {each}"
    if plan.step is not None:
        yield "speed", speed(plan)


def _options(settings: Settings) -> Iterator[str]:
    """What was looked for, as a command takes it: of a plan, and of a training."""
    yield f"--mesh {settings.mesh} --strategy {settings.strategy.value}"
    yield f"--batch-size {settings.batch_size}"
    yield f"--activation-checkpointing {settings.activation_checkpointing.value}"
    if settings.offload_activations is not None:
        yield f"--offload-activations {settings.offload_activations}"
    yield f"--logits {settings.logits.value}"


def _batch(settings: Settings) -> str:
    one = f"{settings.batch_size} x {settings.seq_length:,} tokens" if settings.seq_length else ""
    one = one or counted(settings.batch_size, "sample")
    times = f", {settings.accumulate} microbatches" if settings.accumulate > 1 else ""
    total = settings.samples * (settings.seq_length or 1)
    unit = "tokens" if settings.seq_length else "samples"
    tensor = settings.mesh.tensor_parallel
    whose = "rank" if tensor == 1 else f"{tensor} ranks of tp"
    return f"{one} per {whose}{times}; {total:,} {unit} on all ranks"


def _precision(settings: Settings) -> Iterator[str]:
    compute = settings.compute_dtype or "as built"
    yield f"{compute} compute"
    yield f"{settings.reduce_dtype or compute} reduction"
    yield f"{settings.shard_dtype or 'as built'} shards"
    if settings.products is Products.FLOAT8:
        yield "float8 matrix products"


def _optimizer(settings: Settings) -> str:
    parts = [name_of(settings.optimizer)]
    if settings.activation_checkpointing is not Checkpointing.NONE:
        every = settings.recompute_every
        which = f" of one block in {every}" if every > 1 else ""
        parts.append(f"{settings.activation_checkpointing.value} activation checkpointing{which}")
    if settings.stepping is Stepping.IN_BACKWARD:
        parts.append("steps in backward")
    if settings.master_dtype is not None:
        parts.append(f"{settings.master_dtype} masters")
    if settings.compile:
        parts.append("blocks compiled")
    return ", ".join(parts)


def verdict(plan: Plan) -> str:
    """Whether the plan fits, with figures."""
    peak = f"{binary_size(plan.peak)} at the peak of a rank"
    if plan.reserved is not None:
        peak += f", {binary_size(plan.needed)} with the slack of the allocator"
    if plan.available is None:
        return peak
    limit = f"{binary_size(plan.available.nbytes)} ({plan.available.source})"
    if plan.fits:
        return f"{peak}, of {limit}: fits"
    more = binary_size(plan.needed - plan.available.nbytes)
    return f"{peak}, of {limit}: does not fit, {more} too much"


def speed(plan: Plan) -> str:
    """The time of a step, tokens per second and what bounds it."""
    assert plan.step is not None
    unit = "tokens/s" if plan.settings.seq_length else "samples/s"
    ranks = plan.settings.mesh.size
    rate = plan.step.tokens_per_second
    parts = [f"{seconds(plan.step.seconds)} a step", f"{rate:,.0f} {unit}"]
    if ranks > 1:
        parts.append(f"{rate / ranks:,.0f} per rank")
    parts.append(f"MFU {plan.step.mfu:.1%}")
    bound = [f"bound by {plan.step.bound_by}", *([plan.observed] if plan.observed else [])]
    return "; ".join([", ".join(parts), *bound])


# -- tables that the page shows too ----------------------------------------------------------------


def bytes_needed(plan: Plan) -> Iterator[Cells]:
    """Tables of memory, the modules with the most activations, and traffic."""
    yield _memory(plan.ranks)
    if rows := list(_modules(plan.ranks[0])):
        yield Cells(("activations at the peak", "each", "together"), rows)
    if plan.traffic:
        heads = ("traffic of a step", "collective", "calls", "launches", "full tensors", "sent")
        traffic = [
            (
                *(each.dimension, each.collective, f"{each.calls:,}", f"{each.launches:,}"),
                *(binary_size(each.nbytes), binary_size(each.sent)),
            )
            for each in plan.traffic
        ]
        yield Cells(heads, traffic, words=2)


def comparison(plans: Sequence[Plan]) -> str:
    """Format what two plans of one training by two runtimes need, side by side."""
    heads = [each.settings.runtime.value for each in plans]
    first, second = (each.ranks[0] for each in plans)
    rows = [
        (name, *_difference(getattr(first, kind.value), getattr(second, kind.value)))
        for kind, name in NAMES.items()
    ]
    rows.append(("peak", *_difference(first.peak, second.peak)))
    sums = (sum(each.bytes_sent.values()) for each in plans)
    rows.append(("sent in a step", *_difference(*sums)))
    of_both = (each for each in head(plans[0]) if each[0] not in ("memory", "speed"))
    table = Cells(("memory of a rank at its peak", *heads, "difference"), rows).for_terminal()
    return rendered([_lines(of_both), Text(), table])


def _difference(first: int, second: int) -> tuple[str, str, str]:
    sign = "-" if second < first else "+" if second > first else ""
    return binary_size(first), binary_size(second), sign + binary_size(abs(second - first))


def speeds(plan: Plan) -> Iterator[Cells]:
    """Tables of time, and of alternatives, the fastest first."""
    if (step := plan.step) is not None:
        every = {**step.parts, "all together": step.seconds}
        rows = [
            (name, seconds(value), f"{value / step.seconds:.1%}" if step.seconds else "")
            for name, value in every.items()
        ]
        yield Cells(("part of a step", "time", "share"), rows)
    if plan.alternatives:
        unit = "tokens/s" if plan.settings.seq_length else "samples/s"
        heads = ("alternative", "checkpointing", "batch", "peak", unit, "fits")
        others = [
            (
                f"{each.strategy} {each.mesh}",
                each.activation_checkpointing,
                str(each.batch_size),
                binary_size(each.peak),
                f"{each.tokens_per_second:,.0f}",
                "yes" if each.fits else "no",
            )
            for each in plan.alternatives
        ]
        yield Cells(heads, others, words=2)


def _memory(ranks: Sequence[RankBytes]) -> Cells:
    """The kinds of memory, each with its bytes at the peak and at most."""
    columns = [counted(rank.ranks, "rank") for rank in ranks] if ranks[1:] else ["at the peak"]
    rows = []
    for kind in Memory:
        found = [getattr(rank, kind.value) for rank in ranks]
        most = max(rank.most.get(kind, 0) for rank in ranks)
        rows.append((NAMES[kind], *map(binary_size, found), binary_size(max(most, *found))))
    rows.append(("all together", *(binary_size(rank.peak) for rank in ranks), ""))
    return Cells(("memory of a rank", *columns, "at most"), rows)


def _modules(rank: RankBytes) -> Iterator[tuple[str, str, str]]:
    """The modules with the most activations at the peak, repeated ones folded, largest first."""

    def together(row: Row[tuple[str, int]]) -> int:
        return row.first[1] * len(row.members)

    rows = fold(rank.by_module.items(), name=lambda item: item[0], kind=lambda item: item[1])
    rows = sorted(rows, key=together, reverse=True)[:MOST_MODULES]
    for row in rows:
        name = row.full_name or "the model itself"
        yield name, binary_size(row.first[1]), binary_size(together(row))
    left = rank.activations - sum(map(together, rows))
    if rows and left > 0:
        yield "others", "", binary_size(left)


def notes(plan: Plan) -> Iterator[str]:
    """What the figures do not say of themselves."""
    if plan.alternatives:
        yield "The figures of the alternatives are estimates."
    if plan.formulas:
        for module, why in plan.formulas.items():
            name = module or "the model"
            yield (
                f"* {name} could not be traced ({why}): its figures come from formulas, for the "
                "largest result that is possible"
            )
    settings = plan.settings
    peers = settings.world.size
    if settings.backend is None and settings.transport == "collectives" and peers > MOST_PEERS:
        yield (
            f"Plain collectives among {peers:,} ranks on CPUs: messages (--transport c10d) and "
            "shared memory (shm) take minutes to rehearse."
        )
    if plan.step is None:
        yield (
            "No times: this machine was not measured. `shardwise calibrate` does so, once; "
            "`shardwise plan --device` plans for others."
        )


# -- the page --------------------------------------------------------------------------------------

#: Hues of kinds of memory, in degrees.
_HUES = {
    Memory.PARAMETERS: 215,
    Memory.GRADIENTS: 175,
    Memory.OPTIMIZER: 265,
    Memory.FULL_PARAMETERS: 195,
    Memory.TRANSPORT: 320,
    Memory.ACTIVATIONS: 35,
    Memory.OTHER: 95,
}
#: Colors of parts of a step, as a timeline has them.
_COLORS = {
    "compute": "var(--forward)",
    "exposed communication": "var(--wait)",
    "optimizer": "var(--optimizer)",
    "host": "var(--runtime)",
}


def page(plan: Plan, layout: Report | None) -> str:
    """The HTML of the page.

    Args:
        plan: the plan.
        layout: who holds what; ``None`` to leave it out.
    """
    sections = list(_sections(plan))
    if layout is not None:
        return inspector.page(layout, sections)
    title = f"{plan.model} on {plan.settings.world}"
    heading = f"<header><h1>{escape(plan.model)}</h1></header>"
    return document(title, [heading, *sections])


def _sections(plan: Plan) -> Iterator[str]:
    yield f'<style>{resource(__name__, "page.css")}</style><div class="plan"><h2>Plan</h2><dl>'
    for label, text in head(plan):
        yield f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>"
    yield "</dl>"
    yield from _memory_bar(plan)
    if plan.step is not None:
        yield from _time_bar(plan)
    yield '<div class="tables">'
    for cells in (*bytes_needed(plan), *speeds(plan)):
        yield f"<div>{cells.for_page()}</div>"
    yield "</div>"
    for note in notes(plan):
        yield f"<p>{escape(note)}</p>"
    yield "</div>"


def _memory_bar(plan: Plan) -> Iterator[str]:
    rank = plan.ranks[0]
    parts = [
        (NAMES[kind], getattr(rank, kind.value), f"hsl({_HUES[kind]} var(--s) var(--l))")
        for kind in Memory
    ]
    limit = None if plan.available is None else plan.available.nbytes
    scale = max(rank.peak, limit or 0, 1)
    mark = ""
    if limit is not None:
        place = min(100 * limit / scale, 99.5)
        mark = f'<span class="limit" style="left:{place:.2f}%" title="{binary_size(limit)}"></span>'
    yield from _bar(
        f"memory at the peak: {rank.peak_moment}",
        [(name, binary_size(value), value / scale, color) for name, value, color in parts],
        mark,
    )


def _time_bar(plan: Plan) -> Iterator[str]:
    step = plan.step
    assert step is not None
    scale = max(sum(step.parts.values()), 1e-12)
    yield from _bar(
        f"time of a step: {seconds(step.seconds)}",
        [
            (name, seconds(value), value / scale, _COLORS[name])
            for name, value in step.parts.items()
        ],
    )


def _bar(title: str, parts: Sequence[tuple[str, str, float, str]], mark: str = "") -> Iterator[str]:
    """A bar with its title and the keys to its parts; for these see :func:`.html.bar`."""
    yield f"<p>{escape(title)}</p>"
    yield bar(parts, mark)
    yield keys((f"{name} {size}", color) for name, size, share, color in parts if share > 0)

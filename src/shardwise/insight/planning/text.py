"""A plan as text for a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from shardwise.base.observe import Memory
from shardwise.base.units import binary_size, seconds
from shardwise.frontends.strategies import Checkpointing
from shardwise.insight.inspect.text import add_figures, plain_table, rendered
from shardwise.insight.inspect.words import Row, counted, fold
from shardwise.insight.planning.memory import RankBytes
from shardwise.insight.planning.report import KINDS, Plan, bytes_of
from shardwise.insight.planning.settings import MOST_PEERS, Compiled, Products, Settings, name_of
from shardwise.insight.schema.sharding import Stepping

MOST_MODULES = 6  # of whose activations are listed
_MOST_KINDS = 3  # of ranks that get a column

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
    lines = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for label, text in head(plan):
        lines.add_row(Text(label), Text(text))
    yield lines
    yield Text()
    yield from needs(plan)
    if plan.step is not None:
        yield Text()
        yield _time(plan)
    if plan.alternatives:
        yield Text()
        yield _alternatives(plan)
    for note in notes(plan):
        yield Text()
        yield Text(note)


def needs(plan: Plan) -> Iterator[Text | Table]:
    """Tables of what a step needs on any machine: memory and traffic."""
    yield _memory(plan.ranks)
    modules = largest_modules(plan.ranks[0])
    if modules:
        yield Text()
        yield _modules(plan.ranks[0], modules)
    if plan.traffic:
        yield Text()
        yield _traffic(plan)


def head(plan: Plan) -> Iterator[tuple[str, str]]:
    """The first lines: a label and a text each."""
    settings = plan.settings
    yield "model", f"{plan.model}, {plan.numel:,} parameters"
    ranks = counted(settings.mesh.size, "rank")
    yield "sharding", f"{settings.strategy.value} over {settings.world}, {ranks}"
    yield "step", _batch(settings)
    yield "precision", ", ".join(_precision(settings))
    yield "optimizer", _optimizer(settings)
    if (exchange := settings.exchange) is not None:
        sent = f"{binary_size(plan.exchanged)} sent by a rank as {exchange.wire.value}"
        yield "exchange", f"every {counted(exchange.every, 'step')}, {sent}"
    if plan.machine:
        yield "machine", plan.machine
    yield "memory", verdict(plan)
    places = {"states": settings.offload, "parameters": settings.offload_parameters}
    if any(places.values()):
        kept = max(rank.offloaded for rank in plan.ranks)
        each = ", ".join(f"{what} to {place}" for what, place in places.items() if place)
        yield "offloaded", f"{binary_size(kept)} of a rank: {each}"
    if plan.step is not None:
        yield "speed", speed(plan)


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
    if settings.compiled is Compiled.BLOCKS:
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
    if plan.step.mfu is not None:
        parts.append(f"MFU {plan.step.mfu:.1%}")
    bound = [f"bound by {plan.step.bound_by}", *([plan.observed] if plan.observed else [])]
    return "; ".join([", ".join(parts), *bound])


# -- tables, as cells that the page shows too ------------------------------------------------------


def memory_rows(ranks: Sequence[RankBytes]) -> Iterator[tuple[str, ...]]:
    """Cells of the table of memory: the kind, and its bytes at the peak and at most."""
    for kind in KINDS:
        found = [bytes_of(rank)[kind.value] for rank in ranks]
        most = max(rank.most.get(kind, 0) for rank in ranks)
        yield NAMES[kind], *map(binary_size, found), binary_size(max(most, *found))
    yield "all together", *(binary_size(rank.peak) for rank in ranks), ""


def memory_heads(ranks: Sequence[RankBytes]) -> tuple[str, ...]:
    """The heads of the table of memory."""
    if len(ranks) == 1:
        return "memory of a rank", "at the peak", "at most"
    return "memory of a rank", *(counted(rank.ranks, "rank") for rank in ranks), "at most"


def _memory(ranks: Sequence[RankBytes]) -> Table:
    shown = ranks[:_MOST_KINDS]
    first, *others = memory_heads(shown)
    table = plain_table(first)
    add_figures(table, *others)
    for cells in memory_rows(shown):
        table.add_row(*map(Text, cells))
    table.add_row(Text(f"peak: {ranks[0].peak_moment}"))
    return table


Module = tuple[str, int]


def largest_modules(rank: RankBytes) -> list[Row[Module]]:
    """The modules with the most activations at the peak, repeated ones folded, largest first."""
    rows = fold(rank.by_module.items(), name=lambda item: item[0], kind=lambda item: item[1])
    return sorted(rows, key=lambda row: -row.first[1] * len(row.members))[:MOST_MODULES]


def module_rows(rank: RankBytes, rows: Sequence[Row[Module]]) -> Iterator[tuple[str, str, str]]:
    """Cells of the table of activations: the modules, bytes of each, and of all of them."""
    for row in rows:
        each, times = row.first[1], len(row.members)
        yield row.full_name or "the model itself", binary_size(each), binary_size(each * times)
    left = rank.activations - sum(row.first[1] * len(row.members) for row in rows)
    if left > 0:
        yield "others", "", binary_size(left)


MODULE_HEADS = ("activations at the peak", "each", "together")


def _modules(rank: RankBytes, rows: Sequence[Row[Module]]) -> Table:
    table = plain_table(MODULE_HEADS[0])
    add_figures(table, *MODULE_HEADS[1:])
    for cells in module_rows(rank, rows):
        table.add_row(*map(Text, cells))
    return table


TRAFFIC_HEADS = ("traffic of a step", "collective", "calls", "launches", "full tensors", "sent")


def traffic_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Cells of the table of traffic, on one rank."""
    for each in plan.traffic:
        counts = f"{each.calls:,}", f"{each.launches:,}"
        yield (
            each.dimension,
            each.collective,
            *counts,
            binary_size(each.nbytes),
            binary_size(each.sent),
        )


def _traffic(plan: Plan) -> Table:
    table = plain_table(*TRAFFIC_HEADS[:2])
    add_figures(table, *TRAFFIC_HEADS[2:])
    for cells in traffic_rows(plan):
        table.add_row(*map(Text, cells))
    return table


TIME_HEADS = ("time of a step", "seconds", "share")


def time_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Cells of the table of time."""
    step = plan.step
    assert step is not None
    for name, value in (
        ("compute", step.compute),
        ("exposed communication", step.exposed),
        ("optimizer", step.optimizer),
        ("host", step.host),
        ("all together", step.seconds),
    ):
        share = f"{value / step.seconds:.1%}" if step.seconds else ""
        yield name, seconds(value), share


def _time(plan: Plan) -> Table:
    table = plain_table(TIME_HEADS[0])
    add_figures(table, *TIME_HEADS[1:])
    for cells in time_rows(plan):
        table.add_row(*map(Text, cells))
    return table


def alternative_heads(plan: Plan) -> tuple[str, ...]:
    """The heads of the table of alternatives."""
    unit = "tokens/s" if plan.settings.seq_length else "samples/s"
    return "next to it", "checkpointing", "batch", "peak", unit, "fits"


def alternative_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Cells of the table of alternatives, the fastest first."""
    for each in plan.alternatives:
        yield (
            f"{each.strategy} {each.mesh}",
            each.checkpointing,
            str(each.batch_size),
            binary_size(each.peak),
            f"{each.rate:,.0f}",
            "yes" if each.fits else "no",
        )


def _alternatives(plan: Plan) -> Table:
    heads = alternative_heads(plan)
    table = plain_table(*heads[:2])
    add_figures(table, *heads[2:])
    for cells in alternative_rows(plan):
        table.add_row(*map(Text, cells))
    return table


def notes(plan: Plan) -> Iterator[str]:
    """What the figures do not say of themselves."""
    if plan.alternatives:
        yield "The figures of what is next to it are estimates."
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

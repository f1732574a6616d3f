"""The tables of stored documents, as data: what has a row, its columns, and the notes below.

Every benchmark stores raw numbers; :data:`TABLES` says how those of each script are shown. A
column is a title and a function of a case and the name of a row. Quartiles are those of rounds,
and ratios are medians of the ratios within rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, mean, median, quantiles
from typing import Any

from _contenders import CONTENDERS, Case
from _measured import (
    beside,
    bytes_ratio,
    disagreement,
    factor,
    loss_ratio,
    losses,
    optimizer_differences,
    overheads,
    peak,
    quartiles,
    ratio,
    seconds_by_round,
    slowest,
    step_seconds,
    too_high,
    wire_bytes,
)
from _measured import plan_ranks as ranks_of
from _report import Table
from _strategy_contenders import ACCUMULATED, STRATEGIES

Content = dict[str, Any]
Columns = Sequence[tuple[str, Callable[[Any, str], str]]]
MIB = 2**20


@dataclass(frozen=True)
class Spec:
    """A kind of table.

    Attributes:
        title: of a case's table.
        columns: titles, and what is in them for a case and the name of a row.
        rows: the names of a case's rows.
        notes: below a case's table.
    """

    title: Callable[[Any], str]
    columns: Columns
    rows: Callable[[Any], Iterable[str]] = lambda case: case["contenders"]
    notes: Callable[[Any], list[str]] = lambda case: []

    def table(self, case: Any) -> Table:
        """Show a case."""
        cells = [[cell(case, name) for _, cell in self.columns] for name in self.rows(case)]
        return Table(
            self.title(case), [column for column, _ in self.columns], cells, self.notes(case)
        )

    def of_cases(self, content: Content) -> list[Table]:
        """Make a table for each case of a document."""
        return [self.table(case) for case in content["cases"]]

    def of_document(self, content: Content) -> list[Table]:
        """Make one table of all cases of a document."""
        return [self.table(content["cases"])]


def verdict(case: Content, contenders: Any = CONTENDERS) -> str:
    """Tell whether the losses of contenders agree."""
    wrong = disagreement(case, contenders)
    return f"losses: {'DIFFERENT: ' + wrong if wrong else 'OK, equal to four decimals'}"


def mib(size: float | None, digits: int = 1) -> str:
    """Show bytes in MiB."""
    return "" if size is None else f"{size / MIB:.{digits}f}"


def _over(mine: float | None, theirs: float | None) -> str:
    return f"{mine / theirs:.2f}" if mine and theirs else ""


# -- steps -----------------------------------------------------------------------------------------


def _part(part: str) -> Callable[[Content, str], str]:
    def cell(case: Content, name: str) -> str:
        steps = [step for turn in case["contenders"][name] for step in turn["steps"]]
        return f"{median(fmean(rank[part] for rank in step) for step in steps):.3f}"

    return cell


def _step_notes(case: Content) -> list[str]:
    turns = case["contenders"]
    every = [turn for name in turns for turn in turns[name]]
    steps = max(len(turns[name]) * len(turns[name][0]["steps"]) for name in turns)
    measured = sum(slowest(step, "seconds") for turn in every for step in turn["steps"])
    return [
        verdict(case),
        f"{len(next(iter(turns.values())))} rounds, {steps} measured steps each contender; "
        f"transport of ours: {case['transport']}; {case['worlds']} worlds",
        f"while {measured:.0f} s were measured, sleeping contenders took "
        f"{case['idle_cpu_seconds']:.2f} s of processor time, other programs "
        f"{sum(turn['foreign_cpu_seconds'] for turn in every):.1f} s",
    ]


def _step_over(peer: str) -> Callable[[Content, str], str]:
    return lambda case, name: beside(case, name, peer, step_seconds)


STEP = Spec(
    title=lambda case: f"{Case.stored(case).label()} ({case['numel'] / 1e6:.1f} M)",
    columns=(
        ("contender", lambda case, name: CONTENDERS[name].title),
        ("step s", lambda case, name: f"{median(step_seconds(case, name)):.3f}"),
        ("quartiles s", lambda case, name: quartiles(step_seconds(case, name), 3)),
        ("x FSDP2", _step_over("fsdp2")),
        ("x DDP", _step_over("ddp")),
        ("x floor", _step_over("floor")),
        ("forward", _part("forward")),
        ("backward", _part("backward")),
        ("optimizer", _part("optimizer")),
        ("CPU s", _part("cpu")),
        (
            "last loss",
            lambda case, name: (
                f"{losses(case, name)[-1]:.4f}" if CONTENDERS[name].exchanges else ""
            ),
        ),
    ),
    notes=_step_notes,
)


def _strategy_notes(case: Content) -> list[str]:
    notes = [
        f"{verdict(case, STRATEGIES)} (DiLoCo and compute only: the first; with int8 and bf16 to "
        "0.05)",
        f"{len(next(iter(case['contenders'].values())))} rounds; utilization: step of compute only "
        "over this step; MB: sent by the busier host, as its interface counts; memory: highest PSS "
        "of a rank",
    ]
    for name in case["contenders"]:
        if met := case["beside"][name].get("meetings"):
            seconds = median(each["seconds"] for each in met)
            sent = median(max(each["sent"]) for each in met)
            notes.append(
                f"{STRATEGIES[name].title}: an inner step {median(step_seconds(case, name)):.3f} s,"
                f" an exchange {seconds:.3f} s and {sent / 1e6:.2f} MB, shared by H = "
                f"{case['local_steps']} steps"
            )
    for name in case["contenders"]:
        if name in ACCUMULATED:
            parts = ", ".join(
                f"{max(each['sent']) / 1e6:.2f} MB with {each['microbatches']}"
                for each in case["beside"][name]["accumulated"]
            )
            notes.append(f"{STRATEGIES[name].title}, a step of several microbatches: {parts}")
    return notes


def _utilization(case: Content, name: str) -> str:
    if "floor" not in case["contenders"]:
        return ""
    mine, floor = (seconds_by_round(case, each) for each in (name, "floor"))
    return f"{100 * median(f / m for m, f in zip(mine, floor, strict=True)):.0f} %"


STRATEGY = Spec(
    title=lambda case: (
        f"{case['gbit']:g} Gbit/s, {case['hosts']} hosts of {case['ranks'] // case['hosts']} "
        f"ranks, {case['numel'] / 1e6:.1f} M parameters, {case['dtype']}, {case['tokens']} tokens "
        "a rank"
    ),
    columns=(
        ("strategy", lambda case, name: STRATEGIES[name].title),
        ("step s", lambda case, name: f"{median(seconds_by_round(case, name)):.3f}"),
        ("quartiles s", lambda case, name: quartiles(seconds_by_round(case, name), 3)),
        (
            "tokens/s",
            lambda case, name: (
                f"{case['ranks'] * case['tokens'] / median(seconds_by_round(case, name)):.0f}"
            ),
        ),
        ("utilization", _utilization),
        ("MB/step", lambda case, name: f"{wire_bytes(case, name) / 1e6:.2f}"),
        (
            "x FSDP2 full",
            lambda case, name: beside(case, name, "fsdp2-full", seconds_by_round),
        ),
        (
            "x FSDP2 hybrid",
            lambda case, name: beside(case, name, "fsdp2-hybrid", seconds_by_round),
        ),
        ("memory MB", lambda case, name: f"{max(case['beside'][name]['memory']) / 1e6:.0f}"),
    ),
    notes=_strategy_notes,
)


# -- memory ----------------------------------------------------------------------------------------


FORMULA = "formula"


def _peak(case: Content, name: str) -> float | None:
    return sum(case["formula"].values()) if name == FORMULA else peak(case, name)


def _phase(phase: str) -> Callable[[Content, str], str]:
    return lambda case, name: (
        "" if name == FORMULA else mib(case["contenders"][name]["peak"][phase])
    )


def _pss(case: Content, name: str) -> float | None:
    found: float | None = case["contenders"].get(name, {}).get("pss")
    return found


def _memory_notes(case: Content) -> list[str]:
    parts, wrong = case["formula"], too_high(case)
    judged = f"TOO HIGH: {wrong}" if wrong else "OK, no higher than the formula and FSDP2 + 5 %"
    return [
        *([f"ours: {judged}"] if "ours" in case["contenders"] else []),
        f"formula: shards {mib(parts['shards'])} + unsharded {mib(parts['unsharded'])} + full "
        f"gradients {mib(parts['gradients'])} + activations {mib(parts['activations'])}",
        f"transport of ours: {case['transport']}; malloc: {case['malloc']}",
    ]


MEMORY = Spec(
    title=lambda case: Case.stored(case).label(),
    rows=lambda case: [FORMULA, *case["contenders"]],
    columns=(
        ("MiB a rank", lambda case, name: name if name == FORMULA else CONTENDERS[name].title),
        ("peak", lambda case, name: mib(_peak(case, name))),
        ("x formula", lambda case, name: _over(_peak(case, name), _peak(case, FORMULA))),
        ("x FSDP2", lambda case, name: _over(_peak(case, name), peak(case, "fsdp2"))),
        *((phase, _phase(phase)) for phase in ("forward", "backward", "optimizer")),
        ("at rest", _phase("rest")),
        ("peak PSS", lambda case, name: mib(_pss(case, name))),
        ("x FSDP2", lambda case, name: _over(_pss(case, name), _pss(case, "fsdp2"))),
    ),
    notes=_memory_notes,
)


# -- overhead and checkpoints: a row for each contender of each of several things ------------------

OVERHEAD_TITLES = {"ours": "shardwise", "fsdp2": "torch FSDP2"}
CHECKPOINT_TITLES = {"ours": "shardwise", "dcp": "torch DCP", "floor": "plain files"}
STALL_TITLES = {
    "steps": "steps alone",
    "sync": "shardwise, save",
    "async": "shardwise, async_save",
    "dcp": "torch DCP, async_save",
}


def overhead_tables(content: Content) -> list[Table]:
    """Make a table of steps and one of building, with a row for each world size and contender."""
    cases = content["cases"]
    steps = [(case, {name: overheads(case, name) for name in OVERHEAD_TITLES}) for case in cases]
    groups = f"{cases[0]['groups']} tiny groups"
    title = f"Overhead of a group and step, {groups} (µs, over the unsharded step)"
    tables = [_by_ranks(title, "µs a group", steps, 0)]
    builds = [(case, case["build"]["seconds"]) for case in cases if "build" in case]
    if builds:
        groups = builds[0][0]["build"]["groups"]
        tables.append(_by_ranks(f"fully_shard of {groups} tiny groups (s)", "s", builds, 2))
    return tables


def _by_ranks(title: str, unit: str, cases: Sequence[tuple[Any, Any]], digits: int) -> Table:
    rows = [
        [
            OVERHEAD_TITLES[name],
            str(case["ranks"]),
            f"{median(values[name]):.{digits}f}",
            quartiles(values[name], digits, "exclusive"),
            ratio(values[name], values["fsdp2"]),
        ]
        for case, values in cases
        for name in OVERHEAD_TITLES
    ]
    return Table(title, ["contender", "ranks", unit, "quartiles", "x FSDP2"], rows)


def _way(row: str) -> tuple[str, str]:
    name, _, what = row.partition(" ")
    return name, what


def _moved(case: Content, row: str) -> list[float]:
    name, what = _way(row)
    return [max(turn[f"{what}_s"]) for turn in case["turns"][name]]


def _faster(peer: str) -> Callable[[Content, str], str]:
    return lambda case, row: ratio(_moved(case, f"{peer} {_way(row)[1]}"), _moved(case, row))


def _extra(case: Content, row: str) -> str:
    name, what = _way(row)
    return mib(max(max(turn[f"{what}_extra"]) for turn in case["turns"][name]), 0)


CHECKPOINT = Spec(
    title=lambda case: (
        f"{case['params']} parameters with AdamW, {case['ranks']} ranks, "
        f"{case['nbytes'] / 1e9:.2f} GB"
    ),
    rows=lambda case: [f"{n} {what}" for what in ("save", "load") for n in CHECKPOINT_TITLES],
    columns=(
        ("contender", lambda case, row: f"{CHECKPOINT_TITLES[_way(row)[0]]}, {_way(row)[1]}"),
        ("s", lambda case, row: f"{median(_moved(case, row)):.2f}"),
        ("quartiles s", lambda case, row: quartiles(_moved(case, row), 2, "exclusive")),
        ("GB/s", lambda case, row: f"{case['nbytes'] / median(_moved(case, row)) / 1e9:.2f}"),
        ("x DCP", _faster("dcp")),
        ("x plain", _faster("floor")),
        ("extra MiB a rank", _extra),
    ),
    notes=lambda case: [
        f"{len(case['turns']['ours'])} rounds, the slowest rank of each; files "
        f"{'dropped from' if case['cold'] else 'in'} the page cache when they are loaded; ratios "
        "are of throughput, medians of those within each round"
    ],
)


def _turns(case: Content, way: str, what: str) -> list[float]:
    return [slowest(turn, what) for turn in case["turns"][way]]


def _costs(case: Content, way: str) -> list[float]:
    pairs = zip(_turns(case, way, "seconds"), _turns(case, "steps", "seconds"), strict=True)
    return [mine - alone for mine, alone in pairs]


def _held(case: Content, way: str) -> str:
    peaks = [median(_turns(case, each, "peak")) for each in (way, "steps")]
    return mib(max(0.0, peaks[0] - peaks[1]), 0)


STALL = Spec(
    title=lambda case: (
        f"{case['params']} parameters with AdamW, {case['ranks']} ranks, "
        f"{12 * case['numel'] / 1e9:.2f} GB saved in {case['steps']} steps"
    ),
    rows=lambda case: list(STALL_TITLES)[1:],
    columns=(
        ("way", lambda case, way: STALL_TITLES[way]),
        ("stall s", lambda case, way: f"{median(_turns(case, way, 'stall')):.2f}"),
        ("quartiles s", lambda case, way: quartiles(_turns(case, way, "stall"), 2, "exclusive")),
        (
            "x save",
            lambda case, way: ratio(_turns(case, way, "stall"), _turns(case, "sync", "stall")),
        ),
        ("in all s", lambda case, way: f"{median(_costs(case, way)):.2f}"),
        ("quartiles s", lambda case, way: quartiles(_costs(case, way), 2, "exclusive")),
        ("extra MiB a rank", _held),
    ),
    notes=lambda case: [
        f"{len(case['turns']['steps'])} rounds, the slowest rank of each; {case['steps']} steps of "
        f"{case['tokens']} tokens a rank take {median(_turns(case, 'steps', 'seconds')):.2f} s "
        "alone; ratios are medians of those within each round"
    ],
)


# -- DiLoCo ----------------------------------------------------------------------------------------


def _diloco_title(case: Content) -> str:
    settings = case["settings"]
    tokens = settings["steps"] * settings["ranks"] * settings["batch"] * settings["length"]
    warmup = settings.get("outer_warmup")  # older documents have none
    risen = f", momentum rises over {warmup} rounds" if warmup else ""
    return (
        f"{settings['model']}, {settings['replicas']} replicas on {settings['ranks']} ranks, "
        f"{settings['steps']} steps, {tokens / 1e6:.2f} M tokens; outer rate "
        f"{settings['outer_lr']}{risen}"
    )


def _diloco_name(case: Content, name: str) -> str:
    kind, _, momentum = name.partition(":")
    every = case["settings"]["every"]
    return (
        name
        if name == "synchronous"
        else f"DiLoCo, H = {every}, {kind}, momentum {momentum or 0.9}"
    )


def _crossed(case: Content, name: str) -> str:
    found = case["contenders"][name]
    return f"{(found['sent'] + found['sent_at_end']) / 1e6:.2f}"


def _diloco_notes(case: Content) -> list[str]:
    start = case["settings"]["start"]
    return [
        "loss: nats per token on 512 sequences that were held out, of the outer parameters; bytes: "
        "payload of all ranks",
        *([f"all start from one model, trained synchronously for {start} steps"] if start else []),
    ]


DILOCO = Spec(
    title=_diloco_title,
    columns=(
        ("contender", _diloco_name),
        ("loss", lambda case, name: f"{case['contenders'][name]['judged']:.4f}"),
        ("x synchronous", lambda case, name: f"{loss_ratio(case, name):.4f}"),
        ("MB between replicas", _crossed),
        ("fewer bytes", lambda case, name: f"{bytes_ratio(case, name):.1f} x"),
    ),
    notes=_diloco_notes,
)


# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZER_TITLES = {
    "ours-adamw": "torch AdamW, fused",
    "fsdp2-adamw": "torch AdamW, fused",
    "ours-adamw8bit": "shardwise AdamW8bit",
    "fsdp2-adamw8bit": "torchao AdamW8bit",
    "ours-muon": "shardwise Muon",
    "fsdp2-muon": "muon-fsdp2",
    "ours-lion": "shardwise Lion",
    "fsdp2-lion": "lion-pytorch",
    "ours-adafactor": "shardwise Adafactor",
    "ours-sgd": "torch SGD, momentum",
    "fsdp2-sgd": "torch SGD, momentum",
}
"""Contenders, by what shards the model and what ``shardwise train`` calls the optimizer."""

ADAMW = "fsdp2-adamw"
LAST = 50  # steps whose mean loss counts


def _shards(name: str) -> str:
    return {"ours": "shardwise", "fsdp2": "torch FSDP2"}[name.partition("-")[0]]


def _optimizer_over(peer: Callable[[str], str]) -> Callable[[Content, str], str]:
    def cell(case: Content, name: str) -> str:
        seconds = case["seconds"]
        return ratio(seconds[name], seconds[peer(name)]) if peer(name) in seconds else ""

    return cell


def _peer(name: str) -> str:
    peer = f"fsdp2-{name.partition('-')[2]}"
    return peer if peer != name else ""


def _state(case: Content, name: str) -> str:
    pairs = zip(case["state_bytes"][name], case["shard_numel"][name], strict=True)
    return f"{max(held / own for held, own in pairs):.2f}"


OPTIMIZER_STEPS = Spec(
    title=lambda case: (
        f"A step of the optimizer: {case['numel'] / 1e6:.1f} M parameters, {case['ranks']} ranks, "
        "fp32, ZeRO-3"
    ),
    rows=lambda case: case["seconds"],
    columns=(
        ("optimizer", lambda case, name: OPTIMIZER_TITLES[name]),
        ("sharded by", lambda case, name: _shards(name)),
        ("ms", lambda case, name: f"{1e3 * median(case['seconds'][name]):.1f}"),
        (
            "quartiles",
            lambda case, name: quartiles(
                [1e3 * each for each in case["seconds"][name]], 1, "exclusive"
            ),
        ),
        ("x AdamW", _optimizer_over(lambda name: ADAMW)),
        ("x peer", _optimizer_over(_peer)),
        ("bytes of states", _state),
        ("MiB of a step", lambda case, name: mib(max(case["step_bytes"][name]))),
    ),
    notes=lambda case: [
        f"Medians of {len(next(iter(case['seconds'].values())))} steps, of the slowest rank; "
        "contenders take turns. AdamW is torch's, fused, on FSDP2; a peer has the same kind of "
        "optimizer, on FSDP2.",
        "Bytes of states are those of a parameter's element. The last column is the memory of a "
        "rank that a step takes for as long as it runs, beside parameters, gradients and states.",
    ],
)


def _last(cases: Sequence[Content], name: str) -> list[float]:
    return [mean(case["losses"][name][-LAST:]) for case in cases if name in case["losses"]]


def _apart(cases: Sequence[Content], name: str) -> str:
    if name == ADAMW or ADAMW not in cases[0]["losses"]:
        return ""
    pairs = zip(_last(cases, name), _last(cases, ADAMW), strict=True)
    return ", ".join(f"{mine / theirs - 1:+.1%}" for mine, theirs in pairs)


def _optimizer_notes(cases: Sequence[Content]) -> list[str]:
    several = " Several figures in a cell are of several seeds." if len(cases) > 1 else ""
    found = {kind for case in cases for kind in optimizer_differences(case)}
    return [
        f"Means of the last {min(LAST, cases[0]['steps'])} steps.{several}",
        *(f"Losses of torch's {kind} DIFFER between runtimes." for kind in sorted(found)),
    ]


OPTIMIZER_LOSSES = Spec(
    title=lambda cases: (
        f"Loss after {cases[0]['steps']} steps: {cases[0]['numel'] / 1e6:.1f} M parameters, "
        f"{cases[0]['ranks']} ranks, ZeRO-3, {cases[0]['tokens']} tokens a step"
    ),
    rows=lambda cases: cases[0]["losses"],
    columns=(
        ("optimizer", lambda cases, name: OPTIMIZER_TITLES[name]),
        ("sharded by", lambda cases, name: _shards(name)),
        ("lr", lambda cases, name: f"{cases[0]['rates'][name]:g}"),
        ("loss", lambda cases, name: ", ".join(f"{each:.3f}" for each in _last(cases, name))),
        ("against AdamW", _apart),
    ),
    notes=_optimizer_notes,
)


def optimizers_tables(content: Content) -> list[Table]:
    """Make a table of each case of steps, and one of the losses of each model."""
    tables = [OPTIMIZER_STEPS.table(case) for case in content["cases"] if case["part"] == "steps"]
    models: dict[tuple[Any, ...], list[Content]] = {}
    for case in content["cases"]:
        if case["part"] == "loss":
            key = tuple(case[name] for name in ("ranks", "params", "tokens", "lr", "steps"))
            models.setdefault(key, []).append(case)
    return [*tables, *map(OPTIMIZER_LOSSES.table, models.values())]


# -- plans -----------------------------------------------------------------------------------------


def plan_memory_tables(content: Content) -> list[Table]:
    """Make a table with a row for each case: that of the rank that is furthest from its plan."""
    cases = content["cases"]
    times = factor(cases)
    columns = ["configuration", "mesh", "bare", "tensors", "predicted", "measured", "ratio"]
    shown = Table("PSS of a rank at its peak, MiB", columns)
    off = []
    for case in cases:
        tensors = case["predicted"]["peak"]
        bare, measured = max(
            ranks_of(case), key=lambda rank: abs((rank[0] + times * tensors) / rank[1] - 1)
        )
        total = bare + times * tensors
        off.append(abs(total / measured - 1))
        sizes = [f"{each / MIB:,.0f}" for each in (bare, tensors, total, measured)]
        label, mesh = _planned_label(case["case"]), case["case"]["mesh"]
        shown.rows.append([label, mesh, *sizes, f"{total / measured:.3f}"])
    shown.notes += [
        f"A rank takes {times:.2f} x its tensors in the median.",
        f"With that, {sum(each <= 0.05 for each in off)} of {len(off)} are within 5 %, "
        f"{100 * median(off):.1f} % off in the median, {100 * max(off):.1f} % at most.",
    ]
    return [shown]


def _planned_label(case: Content) -> str:
    what = "images" if case["model"].startswith("vit") else "tokens"
    where = (
        f"two hosts, {case['gbit']:g} Gbit/s" if case.get("gbit") else case.get("transport", "shm")
    )
    size = case["size"] if "size" in case else case["tokens"]
    words = [case["model"], f"{size} {what}", case["dtype"], case.get("strategy", "full"), where]
    if case.get("checkpointing", "none") != "none":
        words.append(f"{case['checkpointing']} checkpointing")
    if case.get("accumulate", 1) > 1:
        words.append(f"{case['accumulate']} microbatches")
    return ", ".join(words)


def _real(case: Content) -> list[float]:
    return [quantiles(each["steps"], n=4)[0] for each in case["rounds"]]  # others only add to it


def _expected(case: Content) -> list[float]:
    return [each["predicted"]["seconds"] for each in case["rounds"]]


def _errors(case: Content) -> list[float]:
    return [found / real - 1 for found, real in zip(_expected(case), _real(case), strict=True)]


def _of_rounds(case: Content) -> str:
    off = [100 * each for each in _errors(case)]
    return f"{min(off):+.1f} to {max(off):+.1f} %"


def _error_note(cases: Sequence[Content]) -> list[str]:
    off = [100 * abs(median(_errors(case))) for case in cases]
    return [f"Error: {median(off):.1f} % in the median, {max(off):.1f} % at most."]


PLAN_TIME = Spec(
    title=lambda cases: "Seconds of a step",
    rows=lambda cases: map(str, range(len(cases))),
    columns=(
        ("case", lambda cases, at: _planned_label(cases[int(at)]["case"])),
        ("ranks", lambda cases, at: cases[int(at)]["case"]["mesh"]),
        ("measured", lambda cases, at: f"{1e3 * median(_real(cases[int(at)])):,.0f} ms"),
        ("predicted", lambda cases, at: f"{1e3 * median(_expected(cases[int(at)])):,.0f} ms"),
        ("error", lambda cases, at: f"{100 * median(_errors(cases[int(at)])):+.1f} %"),
        ("of rounds", lambda cases, at: _of_rounds(cases[int(at)])),
        ("bound by", lambda cases, at: cases[int(at)]["rounds"][0]["predicted"]["bound_by"]),
    ),
    notes=_error_note,
)

TABLES: dict[str, Callable[[Content], list[Table]]] = {
    "step_time": STEP.of_cases,
    "strategies": STRATEGY.of_cases,
    "memory": MEMORY.of_cases,
    "overhead": overhead_tables,
    "checkpoint": CHECKPOINT.of_cases,
    "checkpoint_stall": STALL.of_cases,
    "diloco": DILOCO.of_cases,
    "optimizers": optimizers_tables,
    "plan_memory": plan_memory_tables,
    "plan_time": PLAN_TIME.of_document,
}

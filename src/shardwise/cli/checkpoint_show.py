"""How ``shardwise checkpoint`` shows what it found: tables for people, JSON for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from shardwise.units import brief_size

if TYPE_CHECKING:
    from shardwise.checkpoint.formats.source import Source, Watch
    from shardwise.checkpoint.tools.diff import Difference
    from shardwise.checkpoint.tools.survey import Damage, Listed

_MOST_DAMAGES = 20
_WIDE = 10_000  # columns, where nobody's terminal is in the way


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Watch]:
    """A progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda total: lambda moved: None
        return
    narrow = console.width < 76
    with Progress(
        TextColumn(doing),
        BarColumn(bar_width=None),
        DownloadColumn(),
        *([] if narrow else [TransferSpeedColumn(), TimeRemainingColumn()]),
        console=console,
        expand=True,
        transient=True,
    ) as bar:

        def watch(total: int) -> Any:
            task = bar.add_task(doing, total=total)
            return lambda moved: bar.update(task, advance=moved)

        yield watch


def listing(where: Path, found: Sequence[Listed], *, json: bool) -> None:
    """The checkpoints of a folder."""
    if json:
        _print_json([_listed(each) for each in found])
        return
    if not found:
        print(f"no checkpoints in {where}")
        return
    table = _table("step", "size", "state", "ranks", "mesh", "strategy", "format")
    for each in found:
        table.add_row(
            Text(each.path.name if each.step is None else str(each.step)),
            Text(brief_size(each.nbytes)),
            Text("incomplete", style="red") if each.problem else Text("complete", style="green"),
            *map(
                Text,
                (
                    "" if each.world_size is None else str(each.world_size),
                    each.mesh,
                    each.strategy,
                    each.format.value if each.format else "",
                ),
            ),
        )
    console = _console()
    console.print(table)
    for each in found:
        if each.problem:
            console.print(Text(f"{each.path.name}: {each.problem}", style="dim"))


def _listed(each: Listed) -> dict[str, Any]:
    fields = dataclasses.asdict(each)
    return {
        **fields,
        "path": str(each.path),
        "format": each.format.value if each.format else None,
        "complete": not each.problem,
    }


def damages(where: Path, found: Sequence[Damage], *, json: bool) -> None:
    """What ``verify`` found."""
    if json:
        _print_json({"path": str(where), "damaged": [dataclasses.asdict(each) for each in found]})
        return
    for each in found[:_MOST_DAMAGES]:
        print(f"damaged: file {each.file}, parameter {each.parameter}, piece {each.piece}")
        print(f"         {each.reason}")
    if len(found) > _MOST_DAMAGES:
        print(f"and {len(found) - _MOST_DAMAGES} more")
    if not found:
        print(f"{where}: every checksum is right")
    else:
        places = "1 place" if len(found) == 1 else f"{len(found)} places"
        print(f"{where}: damaged in {places}; an older checkpoint may be whole, see: ls")


def contents(source: Source, *, values: bool, json: bool) -> None:
    """What a checkpoint holds."""
    if json:
        _print_json(_contents(source, values=values))
        return
    console = _console()
    console.print(Text(str(source.where), style="bold"))
    for line in source.about:
        console.print(Text(line))
    for section in ("model", "optimizer", "extra"):
        paths = [path for path in source.tensors if path[0] == section]
        if not paths:
            continue
        total = sum(source.tensors[path].nbytes for path in paths)
        numel = sum(source.tensors[path].numel for path in paths)
        count = "1 tensor" if len(paths) == 1 else f"{len(paths)} tensors"
        console.print()
        console.print(
            Text(f"{section}: {count}, {numel:,} elements, {brief_size(total)}", style="bold")
        )
        table = _table("name", "shape", "dtype", "placements")
        for path in paths:
            info = source.tensors[path]
            table.add_row(
                *map(
                    Text,
                    (
                        ".".join(map(str, path[1:])),
                        "x".join(map(str, info.shape)) or "scalar",
                        info.dtype,
                        source.placements.get(path, ""),
                    ),
                )
            )
        console.print(table)
    if values and source.values:
        console.print()
        console.print(Text("values", style="bold"))
        for path, value in source.values.items():
            console.print(Text(f"{'.'.join(map(str, path))} = {_short(value)}"))


def _contents(source: Source, *, values: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "path": str(source.where),
        "about": list(source.about),
        "tensors": [
            {
                "section": str(path[0]),
                "name": ".".join(map(str, path[1:])),
                "shape": list(info.shape),
                "dtype": info.dtype,
                "nbytes": info.nbytes,
                "placements": source.placements.get(path, ""),
            }
            for path, info in source.tensors.items()
        ],
    }
    if values:
        found["values"] = {
            ".".join(map(str, path)): repr(value) for path, value in source.values.items()
        }
    return found


def differences(first: Path, second: Path, found: Sequence[Difference], *, json: bool) -> None:
    """In what two checkpoints differ."""
    if json:
        fields = [dataclasses.asdict(each) for each in found]
        for entry in fields:  # JSON has no number for what is none
            if entry["max_abs"] is not None and not math.isfinite(entry["max_abs"]):
                entry["max_abs"] = str(entry["max_abs"])
        _print_json({"a": str(first), "b": str(second), "differences": fields})
        return
    if not found:
        print(f"{first} and {second} hold the same")
        return
    table = _table("name", "differs in", "A", "B", "max abs", "elements")
    for each in found:
        table.add_row(
            *map(
                Text,
                (
                    each.name,
                    each.what,
                    _short(each.first, quote=False),
                    _short(each.second, quote=False),
                    "" if each.max_abs is None else f"{each.max_abs:.3g}",
                    "" if each.count is None else f"{each.count:,}",
                ),
            )
        )
    console = _console()
    console.print(Text(f"A  {first}"))
    console.print(Text(f"B  {second}"))
    console.print(table)
    print(f"{len(found)} difference{'' if len(found) == 1 else 's'}")


def written(path: Path) -> None:
    """What was made, and what it lacks for ``from_pretrained``."""
    from shardwise.checkpoint.formats.detect import Format, format_of
    from shardwise.checkpoint.formats.hf import CONFIG

    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    size = sum(file.stat().st_size for file in files)
    what = "" if path.is_file() else f" in {len(files)} file{'' if len(files) == 1 else 's'}"
    print(f"wrote {path}: {brief_size(size)}{what}")
    if path.is_dir() and format_of(path) is Format.HF and not (path / CONFIG).exists():
        note = f"note: from_pretrained needs {path / CONFIG}; there was none to copy, so add it"
        print(note)


def _table(*columns: str) -> Table:
    """A table without lines; names are folded where the terminal is narrow, figures never."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        figures = column in ("step", "size", "ranks", "max abs", "elements", "dtype", "state")
        table.add_column(
            column,
            overflow="fold",
            no_wrap=figures,
            justify="right" if column in ("step", "size", "ranks", "elements") else "left",
        )
    return table


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False, soft_wrap=False)


def _short(value: Any, *, quote: bool = True) -> str:
    text = repr(value) if quote else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _print_json(value: Any) -> None:
    print(json_module.dumps(value, indent=2, ensure_ascii=False))

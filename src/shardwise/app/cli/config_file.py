"""Options in a file: ``--config run.yaml`` reads them, ``--save-config`` and every run write them.

    model: llama-34m
    batch-size: 8
    activation-checkpointing: selective

A key is the name of an option without its hyphens in front, whatever part of the configuration it
belongs to: what the help lists, a file may have, and no option has to be looked up twice. Values
are read by the type of the option, and not by YAML's guess: ``1e-3`` is a number, ``no`` is a name.
Each mistake is reported with its line and column.

PyYAML parses a file into nodes with their places, from which nothing is constructed; it expands no
aliases. What is written is the part of YAML that JSON has in common, and needs no library.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import typer

from shardwise.app.cli.options import Options, Setting, brief
from shardwise.app.recipes.core.installed import require_installed
from shardwise.base.errors import UserError
from shardwise.base.units import one_line, printable
from shardwise.insight.schema.option import OnResume
from shardwise.insight.schema.words import FORMS, own_option

_MAX_BYTES = 1 << 20  # of a file of options


@dataclasses.dataclass(frozen=True)
class FileOption:
    """An option that a file gives.

    Attributes:
        value: of the type of the option.
        place: where its key is: ``run.yaml, line 3, column 1``.
    """

    value: Any
    place: str


def read_options(
    path: Path, options: Sequence[Options[Any]], command: str
) -> dict[str, FileOption]:
    """Read a file; return what it gives by the names of options, ``--batch-size``.

    Args:
        path: the file.
        options: that it may have.
        command: whose options they are, for messages: ``train lm``.

    Raises:
        UserError: it cannot be read, or has an option that does not exist, twice, or with a value
            that cannot be; the message names line and column.
    """
    settings = [setting for each in options for setting in each.settings()]
    known = {name: setting for setting in settings for name in setting.flags or [setting.key]}
    found: dict[str, FileOption] = {}
    for key, node in _pairs(path):
        place = _place(path, key)
        name = "--" + own_option(str(key.value))
        if name not in known:
            near = [FORMS[name]] if name in FORMS else difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {_as_line(near[0])}?" if near else ""
            hint = "; a file has no sections" if node.id == "mapping" else hint
            raise UserError(
                f"{place}: found {brief(key.value)}, expected an option of {command} without "
                f"its hyphens{hint}"
            )
        setting = known[name]
        value = _value(setting, name, path, node, str(key.value))
        if value is None:
            continue
        if setting.key in found:
            first = found[setting.key].place
            again = f"{key.value} {'too' if setting.flags else 'again'}"
            raise UserError(f"{place}: found {again}, expected it once ({first})")
        found[setting.key] = FileOption(value, place)
    return found


def _as_line(form: str) -> str:
    """Return an option with a value, as ``--nproc gpu``, as the line of a file."""
    return re.sub(r"^--([\w-]+) (?=\S+$)", r"\1: ", form).replace("--", "")


def options_of_run(
    record: Mapping[str, Any], options: Options[Any], place: str
) -> dict[str, FileOption]:
    """Return what a run that goes on gives, as :func:`read_options` does of a file.

    Args:
        record: the content of its ``run.json``.
        options: that it has.
        place: where it is, for messages.

    Raises:
        UserError: it has a value that cannot be.
    """
    found: dict[str, FileOption] = {}
    for setting in options.settings():
        if not setting.option.on_resume.is_kept:
            continue
        value: Any = record.get("config", {})
        for key in setting.keys:
            if not isinstance(value, Mapping | None):
                raise UserError(
                    f"{place}: found {brief(str(value))} where {setting.key[2:]} is, expected an "
                    "object"
                )
            value = None if value is None else value.get(key)
        if value is None or value == []:
            continue
        several = get_origin(setting.kind) is tuple
        try:
            if isinstance(value, list) != several or isinstance(value, bool) != (
                setting.kind is bool
            ):
                raise typer.BadParameter(f"found {brief(str(value))}, expected another type")
            texts = value if several else [value]
            read = [v if isinstance(v, bool) else setting.read(str(v)) for v in texts]
        except typer.BadParameter as error:
            raise UserError(f"{place}: {error.message} for {setting.key[2:]}") from None
        found[setting.key] = FileOption(tuple(read) if several else read[0], place)
    return found


def written(command: str, values: Iterable[tuple[Setting, Any]]) -> str:
    """Return the file that repeats a command.

    Args:
        command: ``shardwise train lm``.
        values: of its options; None: the option is not given.
    """
    lines = [
        f"# {command} --config FILE repeats this; options on the command line win.",
        "# Without --out, a run takes a folder of its own. Relative paths were given in",
        f"# {printable(os.getcwd())}",
    ]
    panel: str | None = ""
    for setting, value in values:
        if value is None or setting.option.on_resume is OnResume.START:
            continue
        if setting.option.panel != panel:
            panel = setting.option.panel
            lines += ["", *([f"# {panel}"] if panel else [])]
        shown = value is setting.flags[setting.key] if setting.flags else value
        lines.append(f"{setting.key[2:]}: {_text(shown)}")
    return "\n".join(lines) + "\n"


def save(path: Path, text: str) -> None:
    """Write a new file.

    Raises:
        UserError: there is one, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"--save-config: found {path}, expected the name of a new file") from None
    except OSError as error:
        raise UserError(f"--save-config: {path}: {error.strerror}") from None


# -- from a file to nodes --------------------------------------------------------------------------


def _pairs(path: Path) -> list[tuple[Any, Any]]:
    """Return the keys and values of a file as nodes."""
    require_installed("--config", ["yaml"])
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"--config: {path}: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise UserError(f"--config: found {path} of more than {_MAX_BYTES:,} bytes, expected fewer")
    try:
        node = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise UserError(
            f"{path}{where}: found no YAML ({error.problem or error.context})"
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = one_line(error, 200)
        raise UserError(f"{path}: found no YAML ({reason})") from None
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{_place(path, node)}: found a {node.id}, expected lines of option: value")
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(
                f"{_place(path, key)}: found a {key.id}, expected the name of an option"
            )
    return list(node.value)


def _place(path: Path, node: Any) -> str:
    return f"{path}, line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"


# -- from nodes to values --------------------------------------------------------------------------

_NULL = "tag:yaml.org,2002:null"


def _value(setting: Setting, name: str, path: Path, node: Any, key: str) -> Any:
    """Return what a file says about an option, or by a flag of it; None: nothing."""
    if name in setting.flags:
        is_on = _scalar(dataclasses.replace(setting, kind=bool), path, node, key)
        opposite = f"--{name[5:]}" if name.startswith("--no-") else f"--no-{name[2:]}"
        named = name if is_on else opposite
        return None if is_on is None else setting.flags.get(named)
    several = get_origin(setting.kind) is tuple
    if not several or node.id != "sequence":
        value = _scalar(setting, path, node, key)
        return (value,) if several and value is not None else value
    for each in node.value:
        if each.tag == _NULL:
            place = _place(path, each)
            raise UserError(f"{place}: found nothing in the list for {key}, expected text")
    return tuple(_scalar(setting, path, each, key) for each in node.value)


def _scalar(setting: Setting, path: Path, node: Any, key: str) -> Any:
    place = _place(path, node)
    if node.id != "scalar":
        raise UserError(f"{place}: found a {node.id} for {key}, expected one value")
    if node.tag == _NULL:
        return None
    try:
        return setting.read(node.value)
    except typer.BadParameter as error:
        raise UserError(f"{place}: {error.message} for {key}") from None


# -- from values to a file -------------------------------------------------------------------------

_PLAIN = re.compile(r"[A-Za-z0-9./][\w./=-]*", re.ASCII)


def _text(value: Any) -> str:
    """Return a value as YAML."""
    match value:
        case enum.Enum():
            return _text(value.value)
        case bool() | int() | float():
            return json.dumps(value) if isinstance(value, bool) else repr(value)
        case tuple() | list():
            return f"[{', '.join(map(_text, value))}]"
        case Path():
            return _text(str(value))
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() != "null":
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)

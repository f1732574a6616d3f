"""What the documents show is true: their Python runs, their links lead somewhere.

And the reference has every public name; what it says of each, tests/test_public_api.py checks.

A fenced ``python`` block is preceded by a comment that says how it is run:

    <!-- run on 2 ranks -->         as a program of its own, on simulated ranks
    <!-- run on 2 processes -->     the same, for what needs processes
    <!-- continued -->              behind the block before it, in the same program
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import os
import pkgutil
import re
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import shardwise
from tests.test_layers import HEIGHT, NAMES, nodes_of
from tests.test_public_api import MOVED, PUBLIC
from tests.worlds import Ranks

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(
    r"^(?:<!-- (?P<how>run on (?P<ranks>\d) (?P<kind>rank|process)(?:s|es)?|continued) -->\n)?"
    r"```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)|src=\"(?P<source>[^\"]+)\"")


@dataclasses.dataclass
class Program:
    """A program of a document. Its lines stand where they stand there, for tracebacks."""

    document: Path
    line: int
    ranks: int
    kind: str
    code: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def _programs(document: Path) -> list[Program]:
    text = document.read_text()
    programs: list[Program] = []
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("code"))
        where = f"{document.name}:{line}"
        assert block["how"], f"{where}: say above the block how it is run"
        if block["how"] == "continued":
            program = programs[-1]
            program.code += "\n" * (line - program.code.count("\n")) + block["code"]
        else:
            code = "\n" * line + block["code"]
            programs.append(Program(document, line, int(block["ranks"]), block["kind"], code))
    return programs


PROGRAMS = [program for document in DOCUMENTS for program in _programs(document)]


def _run(program: Program) -> None:
    exec(compile(program.code, str(program.document), "exec"), {"__name__": "__main__"})


def _be_process(rank: int, world_size: int, program: Program, folder: Path) -> None:
    with contextlib.chdir(folder):
        _run(program)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_programs_run(
    ranks: Ranks, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program.kind == "process":
        ranks(_be_process, program.ranks, program, tmp_path, backend=None)
        return
    monkeypatch.chdir(tmp_path)  # where it may write
    shardwise.simulate(_run, program.ranks, program)


#: Packages of which users import nothing.
PUBLIC_MODULES = {name.split(".")[1] for name in (*PUBLIC, *MOVED.values()) if "." in name}
INTERNAL = HEIGHT.keys() - PUBLIC_MODULES - {"__init__", "__main__", "weights"}
OF_A_LAYER = re.compile(rf"\bshardwise\.({'|'.join(sorted(INTERNAL))})\b")
IMPORT = re.compile(rf"\b(import|from) {OF_A_LAYER.pattern}")


@pytest.mark.parametrize(
    "document",
    [*DOCUMENTS, ROOT / "CHANGELOG.md", NOTEBOOK, *sorted((ROOT / "examples").glob("*.py"))],
    ids=lambda path: path.name,
)
def test_no_document_shows_the_name_of_a_layer(document: Path) -> None:
    """Users import public names from where they stay, whatever becomes of the source."""
    assert not OF_A_LAYER.findall(document.read_text())


def test_no_docstring_or_message_shows_an_import_from_a_layer() -> None:
    shown = [
        f"{name}:{node.lineno}: {node.value}"
        for name in NAMES
        if name != "elastic/call.py"  # which writes a program for ranks
        for node in nodes_of(name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if IMPORT.search(node.value)
    ]
    assert not shown


def _cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def test_the_notebook_has_the_form_of_one() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["nbformat_minor"] == 5  # cells have ids
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in _cells()]
    assert len(set(ids)) == len(ids)
    for cell in _cells():
        assert all(isinstance(line, str) for line in cell["source"])
        common = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert set(cell) == common | {"execution_count", "outputs"}
        else:
            assert cell["cell_type"] == "markdown"
            assert set(cell) == common


def _executed() -> list[dict[str, Any]]:
    """The cells with the outputs that they have now: as text, which is small and shown anywhere."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = _cells(), 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        count += 1
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        where, printed = f"{NOTEBOOK.name}:{cell['id']}", io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, where, "exec"), names)
            shown = last and eval(compile(ast.Expression(last.value), where, "eval"), names)
        cell["execution_count"], cell["outputs"] = count, []
        if text := printed.getvalue():
            lines = text.splitlines(keepends=True)
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": lines})
        if shown is not None:
            data = {"text/plain": str(shown).splitlines(keepends=True)}
            result = {"data": data, "execution_count": count, "metadata": {}}
            cell["outputs"].append({**result, "output_type": "execute_result"})
    return cells


def test_the_notebook_runs_and_has_the_outputs_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m tests.test_docs`` writes them."""
    monkeypatch.setenv("COLUMNS", "100")
    assert _executed() == _cells()


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    torchs = set(re.findall(r"^\| `(\w+)` \|", pages, re.MULTILINE))
    values = [pkgutil.resolve_name(name) for name in shown]
    missing = []
    for name in import_module(package).__all__:
        value = getattr(import_module(package), name)
        if isinstance(value, types.ModuleType):
            found = value.__name__ in PUBLIC
        elif value.__module__.startswith("torch."):
            found = name in torchs
        else:
            found = value in values
        if not found:
            missing.append(f"{package}.{name}")
    assert not missing, "add these to a page of docs/reference/"


@pytest.mark.parametrize("document", [*DOCUMENTS, NOTEBOOK], ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    if document == NOTEBOOK:
        text = "".join("".join(c["source"]) for c in _cells() if c["cell_type"] == "markdown")
    broken = []
    for link in LINK.finditer(text):
        target = link["target"] or link["source"]
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = document.parent / file if file else document
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(target)
    assert not broken


def _anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w/.]*)`", document.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    notebook = {**json.loads(NOTEBOOK.read_text()), "cells": _executed()}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")

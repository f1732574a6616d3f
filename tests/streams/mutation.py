"""Take one wait, event, kept reference or allocation out of the runtime, and put it back.

:func:`places` finds them in the syntax trees of the source. A place is named by the function that
contains it and by what is called there, so it keeps its name when the function is reformatted, its
arguments change, or it moves to another file. :func:`without` compiles the module without one of
them and puts the new code into the functions that exist, so that everything else stays as it is.
"""

from __future__ import annotations

import ast
import copy
import enum
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import shardwise
from tests.streams.device import Event, Stream, current_device

SOURCE = Path(shardwise.__file__).parent


class What(enum.Enum):
    """What is taken out."""

    WAIT = "wait"
    EVENT = "event"
    REFERENCE = "reference"
    ALLOCATION = "allocation"
    COPY = "wait of a copy between host and device"


_WAITS = frozenset(
    {"wait", "wait_event", "wait_stream", "synchronize", "finish"}
    | {"wait_for_unshard", "wait_for_offload"}
)
#: Waits that return what they are given.
_WAITS_FOR_ARGUMENT = frozenset({"wait_tensor", "wait_in_graph", "wait_for_inputs"})
_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "zeros", "zeros_like", "new_empty", "new_zeros"}
    | {"clone", "cat", "stack", "where", "contiguous", "resize_", "allocate", "flat_rows"}
)
#: What holds works and tensors until a collective is over.
_HOLDERS = frozenset(
    {"self.alive", "self.works", "flight.works", "self._works", "self._in_flight"}
    | {"launched", "under_way"}
)


@dataclass(frozen=True)
class Place:
    """One of these in the source.

    Attributes:
        file: the file, from the package.
        function: the qualified name of the function or method that contains it.
        what: which it is.
        call: the function or method that is called, or the argument that holds a reference.
        number: 1 for the first such call in the function.
    """

    file: str
    function: str
    what: What
    call: str
    number: int = 1

    def __str__(self) -> str:
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.function}: {self.call}{again}"


def places(files: Iterable[str]) -> dict[str, Place]:
    """All that can be taken out of files, by name: with the file where two files share a name."""
    by_name: dict[str, list[Place]] = {}
    for file in files:
        for place, _ in _found(file, _parsed(file)):
            by_name.setdefault(str(place), []).append(place)
    return {
        name if len(same) == 1 else f"{place.file} {name}": place
        for name, same in by_name.items()
        for place in same
    }


@contextmanager
def without(place: Place) -> Iterator[None]:
    """Run the runtime without what is at ``place``."""
    tree = copy.deepcopy(_parsed(place.file))
    node = next(node for found, node in _found(place.file, tree) if found == place)
    changed = ast.fix_missing_locations(_Change(node, place.what).visit(tree))
    module = _module(place.file)
    code = compile(changed, str(SOURCE / place.file), "exec")
    added = {"_elsewhere": _elsewhere, "_never_recorded": Event}
    with (
        mock.patch.dict(module.__dict__, added),
        _exchanged(_function(module, place.function), _code_of(code, place.function)),
    ):
        yield


@contextmanager
def _exchanged(function: types.FunctionType, code: types.CodeType) -> Iterator[None]:
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


def _module(file: str) -> types.ModuleType:
    return importlib.import_module("shardwise." + file.removesuffix(".py").replace("/", "."))


@functools.cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text())


def _found(file: str, tree: ast.Module) -> list[tuple[Place, ast.AST]]:
    """The places in a file and their nodes, in the order of the source."""
    found: list[tuple[Place, ast.AST]] = []
    counts: dict[tuple[str, str], int] = {}
    for function, definition in _functions(tree):
        nodes = (each for each in ast.walk(definition) if isinstance(each, (ast.Call, ast.arg)))
        for node in sorted(nodes, key=_end):
            what = _kind(node, definition)
            if what is None:
                continue
            call = node.arg if isinstance(node, ast.arg) else _name(node)
            number = counts[function, call] = counts.get((function, call), 0) + 1
            found.append((Place(file, function, what, call, number), node))
    return found


def _end(node: ast.Call | ast.arg) -> tuple[int, int]:
    """Where it ends: so calls are in the order in which they are made."""
    return node.end_lineno or 0, node.end_col_offset or 0


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and the methods of its classes, by qualified name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield f"{node.name}.{each.name}", each


def _kind(node: ast.AST, definition: ast.FunctionDef) -> What | None:
    if isinstance(node, ast.arg):
        return What.REFERENCE if _holds(node, definition) else None
    if not isinstance(node, ast.Call):
        return None
    name = _name(node)
    held_by = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if name in _WAITS_FOR_ARGUMENT or (name in _WAITS and not (name == "finish" and node.args)):
        return What.WAIT
    if name == "record_event":
        return What.EVENT
    if name == "append" and held_by in _HOLDERS:
        return What.REFERENCE
    if name == "cpu" or (name == "to" and _is_to_device(node)):
        return What.COPY
    if name == "to" or (name in _ALLOCATIONS and not _frees(node)):
        return What.ALLOCATION
    return None


def _is_to_device(node: ast.Call) -> bool:
    """Whether a call of ``to()`` is given a device."""
    return any(word in ast.unparse(node) for word in ("device", "home", '"cpu"', "'cpu'"))


def _name(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _frees(node: ast.Call) -> bool:
    """Whether a call is ``resize_(0)``."""
    return any(isinstance(each, ast.Constant) and each.value == 0 for each in node.args)


def _holds(node: ast.arg, definition: ast.FunctionDef) -> bool:
    """Whether an argument of an inner function only holds what its default names."""
    for inner in ast.walk(definition):
        if isinstance(inner, ast.FunctionDef) and inner is not definition:
            arguments = inner.args.args
            for argument, default in zip(
                arguments[len(arguments) - len(inner.args.defaults) :],
                inner.args.defaults,
                strict=True,
            ):
                if argument is node and isinstance(default, ast.Name) and default.id == node.arg:
                    return True
    return False


class _Change(ast.NodeTransformer):
    """Changes one node."""

    def __init__(self, node: ast.AST, what: What) -> None:
        self._node = node
        self._what = what

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        if self._node in node.args:
            position = node.args.index(self._node) - len(node.args)
            node.defaults[position] = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self._node:
            return self.generic_visit(node)
        match self._what:
            case What.WAIT if _name(node) in _WAITS_FOR_ARGUMENT:
                return node.args[0] if len(node.args) == 1 else ast.Tuple(node.args, ast.Load())
            case What.COPY:
                where = node.args or [ast.Constant("cpu")]
                function = ast.Attribute(node.func.value, "to", ast.Load())  # type: ignore[attr-defined]
                return ast.Call(function, where, [ast.keyword("non_blocking", ast.Constant(True))])
            case What.REFERENCE:
                return node.args[0]
            case What.WAIT:
                # What it is called on may have been taken from somewhere.
                return (
                    node.func.value if isinstance(node.func, ast.Attribute) else ast.Constant(None)
                )
            case What.EVENT:
                return ast.Call(ast.Name("_never_recorded", ast.Load()), [], [])
            case What.ALLOCATION:
                nothing = ast.arguments([], [], None, [], [], None, [])
                return ast.Call(ast.Name("_elsewhere", ast.Load()), [ast.Lambda(nothing, node)], [])


def _elsewhere(allocate: Callable[[], Any]) -> Any:
    """Allocate on a stream that waits for nobody."""
    found = [each for each in current_device().streams if each.name == "elsewhere"]
    with found[0] if found else Stream(name="elsewhere"):
        return allocate()


def _function(module: types.ModuleType, name: str) -> types.FunctionType:
    """The function of a qualified name, inside whatever wraps it."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    while not isinstance(found, types.FunctionType) or hasattr(found, "__wrapped__"):
        found = found.fget if isinstance(found, property) else found.__wrapped__
    return found


def _code_of(code: types.CodeType, name: str) -> types.CodeType:
    """The code of a function, in that of its module."""
    for part in name.split("."):
        code = next(
            each
            for each in reversed(code.co_consts)  # the last one: others are overloads of it
            if isinstance(each, types.CodeType) and each.co_name == part
        )
    return code

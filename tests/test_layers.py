"""The house rules that a reader can check by looking at the source, checked by looking at it."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import shardwise
from tests import architecture

SOURCE = Path(shardwise.__file__).parent
BENCHMARKS = SOURCE.parents[1] / "benchmarks"
#: Files that name a module which has moved, and nothing else (tests/test_public_api.py).
OLD_PATH = '"""The old path of :mod:`'
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if not path.read_text().startswith(OLD_PATH)]
NAMES = [str(path.relative_to(SOURCE)) for path in FILES]

# From the bottom up; what stands on one line may import what stands on the lines before, and
# from itself.
LAYERS = [
    ["_torch"],
    ["base"],
    ["wrap", "schedules"],
    ["transport"],
    ["elastic"],
    ["sharding"],
    ["checkpoint"],
    ["optim"],
    ["frontends"],
    ["compat", "pretrained"],
    ["weights"],
    ["diloco"],
    ["insight"],
    ["timeline"],
    ["simulated"],
    ["runs"],
    ["__init__"],
    ["app"],
    ["__main__", "worker"],
]

HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}

# The same inside packages that have packages.
INNER_LAYERS = {
    "base": [
        ["boxes", "errors"],
        [
            "arguments",
            "caches",
            "lazy",
            "mixing",
            "say",
            "optim_names",
            "ordering",
            "places",
            "portions",
            "repeated",
        ],
        ["states_keeper"],
        ["html", "interrupts", "libc", "plain", "strict", "units"],
        ["files", "observe", "progress", "scratch"],
        ["spans"],
        ["devices"],
        ["offload"],
        ["activations"],
        ["__init__"],
    ],
    "checkpoint": [
        ["disk"],
        ["formats"],
        ["storage"],
        ["ranks", "tools"],
        ["consolidate"],
        ["__init__"],
    ],
    "frontends": [
        ["device_mesh", "module", "summon", "untied"],
        ["meta"],
        ["fsdp2"],
        ["strategies"],
        ["blocks", "settings", "torch_groups"],
        ["optim_groups", "state_dict"],
        ["cross_entropy"],
        ["optim_state"],
        ["optim_saving"],
        ["unit"],
        ["fsdp"],
        ["xla", "relayout", "watch_ranks"],
        ["__init__"],
    ],
    "insight": [
        ["schema", "blueprint", "audit"],
        ["token_loss"],
        ["optimizers"],
        ["program"],
        ["inspect"],
        ["planning"],
        ["proof"],
        ["__init__"],
    ],
    "insight/schema": [["words"], ["option"], ["sharding"], ["training"], ["__init__"]],
    "app": [["doctor"], ["recipes"], ["cli"], ["__init__"]],
    "app/recipes": [
        ["core"],
        ["text", "vision"],
        ["images", "lm", "mnist"],
        ["rank"],
        ["__init__"],
    ],
}

PEERS = {
    "FullyShardedDataParallel",
    "DistributedDataParallel",
    "replicate",
    "torch.distributed.fsdp.fully_shard",
}

# Underscored by custom, and documented nevertheless: of os, of named tuples, of transformers, and
# of torch's GradScaler, which asks other people's optimizers for it.
DOCUMENTED = frozenset(
    {
        *("_current_frames", "_exit", "_fields", "_init_weights", "_replace"),
        "_step_supports_amp_scaling",
    }
)


@functools.cache
def _tree(name: str) -> ast.Module:
    return ast.parse((SOURCE / name).read_text())


@functools.cache
def nodes_of(name: str) -> list[ast.AST]:
    return list(ast.walk(_tree(name)))


@functools.cache
def _imports(name: str) -> list[tuple[int, str]]:
    """Every name that a file imports, dotted in full, with its line."""
    found = []
    for node in nodes_of(name):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: write imports in full"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def _part(name: str) -> str:
    """The top-level part of the package that a file belongs to."""
    return name.partition("/")[0].removesuffix(".py")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_imports_point_downward() -> None:
    upward = []
    for name in NAMES:
        part = _part(name)
        assert part in HEIGHT, f"say in LAYERS where {part} belongs"
        for line, imported in _imports(name):
            package, _, rest = imported.partition(".")
            if package != "shardwise":
                continue
            target = rest.partition(".")[0]
            target = target if target in HEIGHT else "__init__"  # a public name
            if target != part and HEIGHT[target] >= HEIGHT[part]:
                upward.append(f"{name}:{line}: {part} must not import {imported}")
    assert not upward, "\n".join(upward)


def test_no_file_imports_what_imports_it() -> None:
    """Late imports count too: they hide a circle, and do not break it."""
    benchmarks = sorted(BENCHMARKS.glob("*.py"))
    files = {path.stem: f"../../benchmarks/{path.name}" for path in benchmarks}
    assert files
    for name in NAMES:
        files["shardwise." + name.removesuffix(".py").replace("/", ".")] = name
    for dotted in [each for each in files if each.endswith(".__init__")]:
        files[dotted.removesuffix(".__init__")] = files.pop(dotted)
    circles = _circles({name: set(_imported_files(name, files)) for name in files.values()})
    assert not circles, f"these import one another: {circles}"


def test_a_circle_is_found_without_what_imports_it_and_what_it_imports() -> None:
    graph = {"above": {"a"}, "a": {"b"}, "b": {"c"}, "c": {"a", "below"}, "below": set()}
    assert _circles(graph) == ["a", "b", "c"]


def _imported_files(name: str, files: Mapping[str, str]) -> Iterator[str]:
    """The files that a file imports from, of those in ``files``, which are by dotted name."""
    for _, imported in _imports(name):
        parts = imported.split(".")
        for count in range(len(parts), 0, -1):
            file = files.get(".".join(parts[:count]), name)
            if file != name:
                yield file
                break


def _circles(imports: Mapping[str, set[str]]) -> list[str]:
    """The files that import themselves through others, or are on a path between two circles."""
    left = set(imports)
    while True:
        imported = set[str]().union(*(imports[name] for name in left))
        within = {name for name in left if name in imported and imports[name] & left}
        if within == left:
            return sorted(left)
        left = within


def test_imports_inside_a_package_point_downward() -> None:
    upward = []
    for outer, layers in INNER_LAYERS.items():
        height = {name: at for at, names in enumerate(layers) for name in names}
        for name in NAMES:
            if not name.startswith(f"{outer}/"):
                continue
            part = _part(name.removeprefix(f"{outer}/"))
            assert part in height, f"say in INNER_LAYERS where {outer}/{part} belongs"
            for line, imported in _imports(name):
                inside = f"shardwise.{outer}.".replace("/", ".")
                if not imported.startswith(inside):
                    continue
                target = imported.removeprefix(inside).partition(".")[0]
                target = target if target in height else "__init__"  # a public name
                if target != part and height[target] >= height[part]:
                    upward.append(f"{name}:{line}: {part} must not import {imported}")
    assert not upward, "\n".join(upward)


def test_no_class_name_stands_twice() -> None:
    """A name that is searched for leads to one class, with an underscore before it or without."""
    found: dict[str, list[str]] = {}
    for name in NAMES:
        for node in nodes_of(name):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(f"{name}:{node.lineno}")
    twice = [f"{name}: {', '.join(places)}" for name, places in found.items() if len(places) > 1]
    assert not twice, "say what each is:\n" + "\n".join(twice)


#: What Python calls at its end, and a rank that leaves before the last part of it.
END_OF_PYTHON = {"threading._shutdown", "atexit._run_exitfuncs"}


def test_private_names_are_touched_in_one_place_only() -> None:
    found = [
        f"{name}:{line}: {touch}"
        for name in NAMES
        if _part(name) != "_torch" and name != "pretrained/hf.py"
        for line, touch in _private_touches(name)
        if touch not in END_OF_PYTHON
    ]
    assert not found, (
        "put torch's behind a function of _torch/, those of transformers behind one of "
        "pretrained/hf.py, and ours into one file:\n" + "\n".join(found)
    )


def _private_touches(name: str) -> Iterator[tuple[int, str]]:
    """Private names that a file uses and does not define: torch's, or another file's own."""
    for line, imported in _imports(name):
        package, *parts = imported.split(".")
        if package == "torch" and any(_is_private(part) for part in parts):
            yield line, imported
    own = _own_names(name) | DOCUMENTED
    for node in nodes_of(name):
        for touched in _touched(node):
            if _is_private(touched) and touched not in own:
                yield node.lineno, ast.unparse(node)  # type: ignore[attr-defined]


def _touched(node: ast.AST) -> Iterator[str]:
    """The attributes that an expression gets, sets or asks for, be they named by text."""
    match node:
        case ast.Attribute(attr=attr):
            yield attr
        case ast.Call(ast.Name("getattr" | "setattr" | "hasattr" | "delattr"), [_, named, *_]):
            if isinstance(named, ast.Constant):
                yield str(named.value)
        case ast.Subscript(ast.Attribute(attr="__dict__"), ast.Constant(str(attr))):
            yield attr
        case ast.Call(keywords=keywords):
            yield from (each.arg for each in keywords if each.arg)


def test_no_class_takes_the_place_of_a_private_name_of_torch() -> None:
    """A method that overrides one of torch's looks like the file's own."""
    found = []
    for name in NAMES:
        if _part(name) == "_torch" or not any(isinstance(n, ast.ClassDef) for n in nodes_of(name)):
            continue
        home = "shardwise." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            continue
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == home:
                private = {each for each in vars(cls) if _is_private(each)} & _own_names(name)
                theirs = (base for base in cls.__mro__ if base.__module__.startswith("torch."))
                found += [f"{name}: {each}" for base in theirs for each in private & {*vars(base)}]
    assert not found, "give it a public name in a class of _torch/:\n" + "\n".join(found)


def test_every_private_name_is_used_in_the_package() -> None:
    """What nobody here uses is dead, or is a name for which torch asks."""
    defined: dict[str, str] = {}
    used: set[str] = set()
    for name in NAMES:
        for node in nodes_of(name):
            match node:
                case ast.Attribute(attr=attr) | ast.Name(id=attr, ctx=ast.Load()):
                    used.add(attr)
                case ast.ClassDef(body=body) | ast.Module(body=body):
                    for each in body if _part(name) != "_torch" else ():
                        if isinstance(each, ast.FunctionDef | ast.ClassDef):
                            defined[each.name] = f"{name}:{each.lineno}: {each.name}"
                        elif isinstance(each, ast.Assign | ast.AnnAssign):
                            for target in ast.walk(each):
                                if isinstance(target, ast.Name) and _is_bound(target):
                                    defined[target.id] = f"{name}:{each.lineno}: {target.id}"
    unused = [
        place
        for attr, place in defined.items()
        if _is_private(attr) and not attr.endswith("_") and attr not in used | DOCUMENTED
    ]
    assert not unused, "delete these, or name them for torch in _torch/:\n" + "\n".join(unused)


def _is_bound(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


@functools.cache
def _own_names(name: str) -> frozenset[str]:
    """Every name that a file defines: functions, classes, variables and attributes."""
    names: set[str] = set()
    for node in nodes_of(name):
        match node:
            case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own):
                names.add(own)
            case ast.ClassDef(name=own):
                names.add(own)
            case ast.Name(id=own, ctx=ast.Store()):
                names.add(own)
            case ast.Attribute(value=ast.Name(id="self"), attr=own, ctx=ast.Store()):
                names.add(own)
    return frozenset(names)


DEVICES = "base/devices.py"
ACCELERATORS = ("cuda", "hpu", "mlu", "mps", "mtia", "musa", "npu", "tpu", "xla", "xpu")
BACKENDS = ("gloo", "hccl", "mpi", "nccl", "ucc", "xccl")
# "cuda", and "cpu:gloo,cuda:" with its end to follow, but no sentence that has such a word.
NAMES_ONE = re.compile(rf"[\w:,]*\b({'|'.join(ACCELERATORS + BACKENDS)})\b[\w:,]*")
OF_DEVICES = {f"torch.{name}" for name in (*ACCELERATORS, "accelerator", "get_device_module")}
OF_DEVICES |= {"torch.Event", "torch.Stream"}  # to be made; to be named in annotations is fine
PINNING = frozenset({"pin_memory", "is_pinned"})


def test_a_process_rebinds_only_the_global_names_that_contributing_lists() -> None:
    found = {
        f"{name}: `{variable}`"
        for name in NAMES
        for node in nodes_of(name)
        if isinstance(node, ast.Global)
        for variable in node.names
    }
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    listed = re.findall(r"\| `([\w/.]+)` \| (`\w+`) \|", page)
    assert {f"{file}: {variable}" for file, variable in listed} == found


def test_devices_and_backends_are_named_in_one_file() -> None:
    found = [
        f"{name}:{line}: {text}"
        for name in NAMES
        if name != DEVICES
        for line, text in _device_names(_tree(name))
    ]
    assert not found, f"put these behind a function of {DEVICES}:\n" + "\n".join(found)


def test_what_names_a_device_is_found() -> None:
    program = """
import torch
"This one names cuda."
def step(stream: torch.Stream, kind: str) -> torch.Event:
    "On cuda."
    message = "found no cuda device"
    torch.accelerator.synchronize()
    made = torch.Stream("cpu")
    return torch.empty(1, pin_memory=kind == "cuda").is_pinned(), f"cpu:gloo,{kind}:x", made
"""
    assert [text for _, text in _device_names(ast.parse(program))] == [
        *("torch.accelerator", "torch.Stream"),
        *("is_pinned()", "pin_memory=", "'cuda'", "'cpu:gloo,'"),
    ]


def _device_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What a file says of devices, with its line, annotations and docstrings left out."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            match node:
                case ast.Expr(value=ast.Constant()):
                    continue  # a docstring
                case ast.Constant(value=str(text)) if NAMES_ONE.fullmatch(text):
                    yield node.lineno, repr(text)
                case ast.Attribute(ast.Name("torch"), attr) if f"torch.{attr}" in OF_DEVICES:
                    yield node.lineno, f"torch.{attr}"
                case ast.Call(func=ast.Attribute(attr=attr)) if attr in PINNING:
                    yield node.lineno, f"{attr}()"
                case ast.keyword(arg="pin_memory"):
                    yield node.lineno, "pin_memory="
            yield from _device_names(node)


def test_nobody_above_the_seam_asks_what_kind_of_transport_is_below() -> None:
    asked = [
        f"{name}:{node.lineno}"
        for name in NAMES
        if _part(name) != "transport"
        for node in nodes_of(name)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"
        if re.search(r"\b\w*Transport\b", ast.unparse(node.args[1]))
    ]
    assert not asked, f"ask the transport itself instead: {asked}"


def test_torchs_own_data_parallel_trainers_are_never_used() -> None:
    found = []
    for name in NAMES:
        for line, imported in _imports(name):
            last = imported.rpartition(".")[2]
            if imported in PEERS or (last in PEERS and imported.startswith("torch.")):
                found.append(f"{name}:{line}: {imported}")
        for node in nodes_of(name):
            if isinstance(node, ast.Attribute) and node.attr in {*PEERS, "fully_shard"}:
                dotted = ast.unparse(node)
                if dotted in PEERS or (node.attr in PEERS and dotted.startswith("torch.")):
                    found.append(f"{name}:{node.lineno}: {dotted}")
    assert not found, "\n".join(found)


COLLECTIVES = frozenset(
    {"all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "gather", "reduce"}
)


def test_collectives_of_trainings_say_that_a_peer_was_lost() -> None:
    """A launcher takes nothing for the loss of a peer but a ``PeerLostError``."""
    bare = []
    for name in NAMES:
        if not name.startswith(("app/recipes/", "elastic/")):
            continue
        named = {
            id(call)
            for block in nodes_of(name)
            if isinstance(block, ast.With)
            and any(
                re.match(r"Peers\(.*\)\.collective\(", ast.unparse(item.context_expr))
                for item in block.items
            )
            for call in ast.walk(block)
        }
        for node in nodes_of(name):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="dist"), attr=attr)):
                    if attr in COLLECTIVES and id(node) not in named:
                        bare.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not bare, "put these inside Peers(...).collective(...):\n" + "\n".join(bare)


def test_the_table_of_additions_counts_every_file_of_the_core_once() -> None:
    _, wrong = architecture.counted(architecture.PAGE.read_text())
    assert not wrong, f"run {architecture.WRITE}, or add a file to a row:\n" + "\n".join(wrong)


def test_counting_anew_mends_a_count_and_names_a_file_that_no_row_has() -> None:
    page = architecture.PAGE.read_text()
    with_old_count = re.sub(r"own_order \| \d+ \|", "own_order | 7 |", page)
    mended, wrong = architecture.counted(with_old_count)
    assert len(wrong) == 1
    assert wrong[0].startswith("sharding own_order: 7 lines in the table, found ")
    assert architecture.counted(mended)[1] == []
    _, wrong = architecture.counted(page.replace("policy paging", "policy"))
    assert "sharding/paging.py: in no row of the table" in wrong

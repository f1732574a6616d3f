"""What a reader of each front door has to load, and could have to read: it only ever gets less."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fresh import loaded_after
from tests.test_public_api import MOVED, PUBLIC

#: By front door: what a program does with it, and the lines and files of the package that are
#: loaded then. Lower them when they fall; a feature that needs more has to remove something.
DOORS = {
    "fully_shard": ("shardwise.fully_shard", 13470, 47),
    "FullyShardedDataParallel": ("shardwise.FullyShardedDataParallel", 16722, 57),
    "checkpoint.save": ("shardwise.fully_shard, shardwise.checkpoint.save", 19176, 71),
    "checkpoint.load": ("shardwise.fully_shard, shardwise.checkpoint.load", 21665, 82),
    "simulate": ("shardwise.simulate(print, 2)", 7465, 35),
    "timeline.record": ("shardwise.timeline.record", 7102, 31),
    "a training of a recipe": (
        "import shardwise.app.recipes.core.training, shardwise.app.recipes.lm",
        36595,
        155,
    ),
}

MODULES = ["shardwise.weights.sglang", *MOVED.values(), *PUBLIC]
#: Programs of which only single packages and modules matter.
OTHERS = {
    "every module": "\n".join(f"import {each}\nfrom {each} import *" for each in MODULES),
    "the library": """
import shardwise; shardwise.checkpoint.latest('runs'); shardwise.diloco; shardwise.wrap
from shardwise import *
""",
    "a rank": "import shardwise.app.recipes.lm",
}

_FORMATS = "shardwise.checkpoint.formats"
_READERS = tuple(f"{_FORMATS}.{name}" for name in ("archive", "dcp", "pickles", "rank_files"))
#: What is never loaded: checkpoints know no optimizer, and no format before there is a file of it.
NEVER = {
    "checkpoint.save": ("shardwise.optim", _FORMATS),
    "checkpoint.load": ("shardwise.optim", *_READERS),
}

Loaded = dict[str, dict[str, str | None]]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """What each program has loaded: modules, with their files."""
    doors = {name: f"import shardwise\n{code}" for name, (code, _, _) in DOORS.items()}
    return loaded_after(doors | OTHERS)


@pytest.mark.parametrize("door", DOORS)
def test_a_front_door_loads_no_more_than_it_did(door: str, loaded: Loaded) -> None:
    _, most_lines, most_files = DOORS[door]
    mine = {name: file for name, file in loaded[door].items() if _package(name) == "shardwise"}
    files = set(filter(None, mine.values()))
    lines = sum(len(Path(file).read_text().splitlines()) for file in files)
    print(f"{door}: {lines} lines in {len(files)} files, of {most_lines} in {most_files}")
    assert lines <= most_lines
    assert len(files) <= most_files
    assert not [name for name in mine if name.startswith(NEVER.get(door, ()))]


def test_the_library_is_there_without_what_only_trainings_need(loaded: Loaded) -> None:
    found = set(map(_package, loaded["the library"]))

    assert "shardwise" in found
    assert not found & {"transformers", "rich", "typer", "click", "matplotlib", "tensorboard"}


def test_every_public_module_can_be_imported_in_both_forms(loaded: Loaded) -> None:
    assert loaded["every module"].keys() >= set(MODULES)


def test_a_rank_imports_only_what_its_training_uses(loaded: Loaded) -> None:
    others = {
        *("app.recipes.text.conversations", "app.recipes.text.streams"),
        *("app.recipes.text.chat", "app.recipes.text.documents"),
        *("app.recipes.text.generate", "checkpoint.formats.dcp", "pretrained.building"),
        *("insight.inspect.read", "transport.codecs", "transport.two_levels"),
    }
    assert not loaded["a rank"].keys() & {"peft", *(f"shardwise.{name}" for name in others)}


def _package(module: str) -> str:
    return module.partition(".")[0]

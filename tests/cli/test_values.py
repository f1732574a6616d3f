"""Names, paths and sizes on a command line are read as people write them; mistakes are one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch
import typer
from safetensors.torch import save_file

from shardwise.app.cli import main
from shardwise.app.cli import run as cli_run
from shardwise.app.cli.options import read_name, read_path, read_place, read_size
from shardwise.elastic.network import parse_endpoint
from tests.cli.shell import call, refused

Capture = pytest.CaptureFixture[str]

# Everything that takes a path, or a name that may be one, at the place of "*".
COMMANDS = """
train lm --data words.txt --out *
train lm --data *
train lm --data words.txt *
train lm --data words.txt --model *
train lm --data words.txt --tokenizer *
train mnist --data-dir *
train imagenet --data-dir *
train imagenet --fake-data --model *
train vit --fake-data --out *
train vit --data-dir *
train vit --dry-run --model *
inspect --model *
inspect --html *
inspect --param model.norm.weight --svg *
checkpoint ls *
checkpoint show *
checkpoint verify *
checkpoint diff * good.safetensors
checkpoint diff good.safetensors *
checkpoint consolidate * out.safetensors
checkpoint consolidate good.safetensors *
checkpoint convert * out --to dcp
checkpoint convert good.safetensors * --to dcp
merge-lora * merged
merge-lora good.safetensors *
""".strip().splitlines()

BAD = {
    "": "found nothing, expected a name or a path",
    "a\0b": r"found 'a\x00b', expected a name without null characters",
    "~nosuchuser": "found '~nosuchuser', expected a user of this host behind ~ (or ./~nosuchuser",
    "~nosuchuser/runs": "found '~nosuchuser/runs', expected a user of this host behind ~",
    "x" * 256: "with 256 characters, expected names of 255 bytes at most in a path of 4,095",
    "folder/"
    * 600: "with 4,200 characters, expected names of 255 bytes at most in a path of 4,095",
}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, no_world: Path) -> Path:
    def started(*arguments: object, **options: object) -> int:
        raise AssertionError("processes were started")

    monkeypatch.setattr(cli_run, "run_job", started)
    Path("words.txt").write_text("shard gather reduce " * 2000)
    save_file({"a": torch.ones(3)}, "good.safetensors")
    return no_world


@pytest.mark.parametrize("text", ["s3://bucket/run", "file:///tmp/run", "gs://key:secret@bucket"])
def test_no_folder_is_made_of_a_url(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="found a URL, expected a path of this host") as e:
        read_path(text)
    assert "secret" not in str(e.value)


def test_a_run_may_be_in_an_object_store_and_nowhere_else() -> None:
    assert str(read_place("s3://bucket/run/")) == "s3://bucket/run"
    assert read_place("runs/lm") == Path("runs/lm")
    for bad in ("gs://key:secret@bucket/run", "ftp://host/run", "s3://bucket/../run"):
        with pytest.raises(typer.BadParameter, match=r"^found .*, expected ") as caught:
            read_place(bad)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("read", [read_name, read_path])
@pytest.mark.parametrize("bad", BAD, ids=["empty", "null", "nobody", "of nobody", "name", "path"])
def test_a_name_that_none_can_have_is_refused(read: Callable[[str], object], bad: str) -> None:
    with pytest.raises(typer.BadParameter, match=re.escape(BAD[bad])):
        read(bad)


@pytest.mark.parametrize("bad", ["", "a\0b"], ids=["empty", "null"])
def test_a_name_that_none_can_have_is_refused_everywhere(
    capsys: Capture, here: Path, bad: str
) -> None:
    before = sorted(here.iterdir())
    for command in COMMANDS:
        words = [bad if word == "*" else word for word in command.split()]
        told = refused(capsys, *words)
        assert BAD[bad] in told, command
        *_, option = command.partition("*")[0].split()
        if option.startswith("--"):
            assert told.startswith(f"error: {option}: found"), command
    assert sorted(here.iterdir()) == before, "nothing was made"


def test_every_path_of_every_command_is_read_by_us() -> None:
    def parsers(of: typer.Typer) -> Iterator[tuple[str, Any]]:
        for command in of.registered_commands:
            assert command.callback is not None
            for name, hint in get_type_hints(command.callback, include_extras=True).items():
                kinds = get_args(hint)[0] if get_origin(hint) is not None else hint
                if Path in (kinds, *get_args(kinds)):
                    yield f"{command.callback.__name__} {name}", get_args(hint)[1].parser
        for group in of.registered_groups:
            assert group.typer_instance is not None
            yield from parsers(group.typer_instance)

    found = dict(parsers(main.commands([])))
    assert len(found) > 10
    assert {name for name, parser in found.items() if parser is not read_path} == set()


def test_a_home_folder_stands_for_its_sign_wherever_the_shell_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in --out=~/runs, which bash hands over as it is.
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert read_path("~/runs") == Path("/home/of/mine/runs")
    assert read_name("~") == "/home/of/mine"
    assert read_path("./~nosuchuser") == Path("~nosuchuser")
    assert read_name("a~b") == "a~b"
    assert read_name("hf:allenai/c4:en") == "hf:allenai/c4:en"
    assert read_path(Path("runs/lm")) == Path("runs/lm")
    assert len(read_name("é" * 127)) == 127
    with pytest.raises(typer.BadParameter, match="with 128 characters"):
        read_name("é" * 128)  # two bytes each


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("8MiB", 8 << 20), ("1.5GB", 1_500_000_000), ("2k", 2000), ("3 gib", 3 << 30)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("more", ["--to dcp", ""])
def test_a_name_needs_room_for_what_stands_beside_it_while_it_is_made(
    capsys: Capture, here: Path, more: str
) -> None:
    command = "convert" if more else "consolidate"
    words = ["checkpoint", command, "good.safetensors", "x" * 250, *more.split()]
    told = refused(capsys, *words)
    assert (
        told
        == "error: found a name of 250 bytes for the file or folder to make, expected 5 fewer\n"
    )
    assert call(*words[:3], "x" * 245, *more.split()) == 0


def test_a_file_that_may_not_be_looked_at_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    # As for users whom the folder does not belong to; before Python 3.12 that was an exception.
    def is_dir(path: Path) -> bool:
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    told = refused(capsys, "train", "mnist", "--data-dir", "secret")
    assert told == "error: secret: Permission denied\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "lm", "--nnodes", "9" * 5000],
        ["train", "lm", "--mesh", "\x1b[2J" + "x" * 5000],
        ["inspect", "--param", "x" * 100_000],
        ["doctor", "--nnodes", "2", "--node-rank", "1", "--rdzv", "x" * 5000 + ":29400"],
        ["launch-lines", "--hosts", "a", "--", "train", ""],
    ],
)
def test_whatever_is_typed_the_answer_is_one_short_line(
    capsys: Capture, arguments: list[str]
) -> None:
    assert len(refused(capsys, *arguments)) < 2100


@pytest.mark.parametrize(
    "host", ["", "a..b", "x" * 64, "a/b", "~nosuchuser", "a b", "a\0b", "a\x1bb", "user@host"]
)
def test_what_is_no_name_of_a_host_is_never_looked_up(host: str) -> None:
    assert parse_endpoint(f"{host}:29400") is None
    assert parse_endpoint("host-a.example.org:29400") == ("host-a.example.org", 29400)
    assert parse_endpoint("bücher.example:1") == ("bücher.example", 1)
    assert parse_endpoint("[fe80::1%eth0]:1") == ("fe80::1%eth0", 1)
    assert parse_endpoint("a:" + "9" * 5000) is None

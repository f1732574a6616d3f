"""Models and data in an object store, which ``--from`` and ``--data`` name. No torch here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from shardwise.base.errors import CheckpointError, UserError
from shardwise.base.progress import progress
from shardwise.base.say import say
from shardwise.base.units import binary_size
from shardwise.checkpoint.disk.fetched import Files, cached
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.formats.detect import find_checkpoint
from shardwise.insight.schema.option import OptionError
from shardwise.pretrained.opening import small_files

_CONFIG, _RUN = "config.json", "run.json"


def fetched_config(url: str) -> Path:
    """Check that there are weights at the URL of ``--from``, and fetch their configuration.

    Raises:
        OptionError: there is none, or the URL is that of a file.
        UserError: there are no weights, or the store cannot be read.
    """
    if url.endswith(".safetensors"):
        raise OptionError("--from", f"{url}, a file", "the folder that it is in")
    with _naming("--from"):
        place = place_of(url)
        find_checkpoint(place)
        config = small_files(place) / _CONFIG
    if not config.is_file():
        raise OptionError("--from", f"{url} without {_CONFIG}", "the model's configuration in it")
    return config


def fingerprint_of_weights(url: str) -> str:
    """What tells the weights of a model from those of another: of names, sizes and entity tags.

    Raises:
        UserError: the store cannot be read.
    """
    with _naming("--from"):
        place = place_of(url)
        assert not isinstance(place, Path)
        digest = xxhash.xxh3_128()
        for name, found in sorted(place.below().items()):
            if name.endswith(".safetensors"):
                digest.update(f"{name} {found.size} {found.tag or found.modified}\n".encode())
        return digest.hexdigest()


def fetched_data(url: str, option: str) -> Path:
    """The file, or the folder, that a URL names: fetched, unless this host has it.

    Raises:
        OptionError: there is nothing, or a run.
        UserError: it cannot be fetched.
    """
    with _naming(option):
        place = place_of(url)
        assert not isinstance(place, Path)
        found = place.find()
        files: Files = {place.name: found} if found else place.below()
    files = {name: each for name, each in files.items() if each.size and not _is_left_out(name)}
    if not files:
        raise OptionError(option, f"nothing at {url}", "a file, or files below it, with text")
    if _RUN in files:  # and checkpoints, which nobody wants to fetch
        raise OptionError(option, f"{url}, a run", "text, without a run beside it")
    source = place.parent if found else place
    with _naming(option), progress(f"fetching {url}", unit="bytes") as work:

        def begin(total: int, folder: Path) -> Callable[[int], None]:
            say(f"fetching   {url}, {binary_size(total)}, to {folder}")
            return work.of(total)

        folder = cached(place, {source: files}, most=math.inf, begin=begin)
    return folder / place.name if found else folder


@contextlib.contextmanager
def _naming(option: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, ValueError) as error:
        raise UserError(f"{option}: {str(error).removeprefix('path: ')}") from None


def _is_left_out(name: str) -> bool:
    """Whether a file of a folder is no text: it is hidden, or Python has made it."""
    return any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))

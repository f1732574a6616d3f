"""Data in an object store, which ``--data`` and ``--chat`` name. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from shardwise.base.progress import progress
from shardwise.base.say import say
from shardwise.base.units import binary_size
from shardwise.checkpoint.disk.fetched import Files, cached
from shardwise.checkpoint.disk.place import place_of
from shardwise.insight.schema.option import OptionError, naming


def fetched_data(url: str, option: str, is_left_out: Callable[[str], bool]) -> Path:
    """The file, or the folder, that a URL names: fetched, unless this host has it.

    Args:
        url: in an object store.
        option: what named it, for errors.
        is_left_out: whether a file or a folder of that name is no text.

    Raises:
        OptionError: there is nothing, or a run.
        UserError: it cannot be fetched.
    """
    with naming(option):
        place = place_of(url)
        assert not isinstance(place, Path)
        found = place.find()
        files: Files = {place.name: found} if found else place.below()
        files = {
            name: each
            for name, each in files.items()
            if each.size and not any(map(is_left_out, name.split("/")))
        }
    if not files:
        raise OptionError(option, f"nothing at {url}", "a file, or files below it, with text")
    if "run.json" in files:  # and checkpoints, which nobody wants to fetch
        raise OptionError(option, f"{url}, a run", "text, without a run beside it")
    source = place.parent if found else place
    with naming(option), progress(f"fetching {url}", unit="bytes") as work:

        def begin(total: int, folder: Path) -> Callable[[int], None]:
            say(f"fetching   {url}, {binary_size(total)}, to {folder}")
            return work.of(total)

        folder = cached(place, {source: files}, most=math.inf, begin=begin)
    return folder / place.name if found else folder

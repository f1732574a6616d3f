"""Where shards and optimizer states are kept, as users write it. No torch: options are read so."""

from __future__ import annotations

from pathlib import Path


def folder_of_place(text: str) -> Path | None:
    """Read where something is kept: ``"host"`` or ``"disk:FOLDER"``.

    Returns:
        The folder of a disk; ``None``: the host.

    Raises:
        ValueError: it is neither.
    """
    medium, colon, folder = text.partition(":")
    if medium == "host" and not colon:
        return None
    if medium == "disk" and folder:
        return Path(folder).expanduser()
    expected = 'expected "host" or "disk:FOLDER", such as "disk:/scratch"'
    raise ValueError(f"offload: found {text!r}, {expected}")

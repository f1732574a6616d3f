"""Where shards and optimizer states are kept, as users write it. No torch: options are read so."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

_EXPECTED = 'expected "host" or "disk:FOLDER", such as "disk:/scratch"'


class Medium(enum.StrEnum):
    """What holds the bytes."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class OffloadPlace:
    """Where shards, or the states of an optimizer, are kept, as users write it.

    Attributes:
        medium: what holds the bytes.
        folder: of a disk.
    """

    medium: Medium
    folder: Path | None = None

    @classmethod
    def parse(cls, text: str) -> OffloadPlace:
        """Read ``"host"`` or ``"disk:FOLDER"``.

        Raises:
            ValueError: it is neither.
        """
        medium, colon, folder = text.partition(":")
        if medium == Medium.HOST and not colon:
            return cls(Medium.HOST)
        if medium == Medium.DISK and folder:
            return cls(Medium.DISK, Path(folder).expanduser())
        raise ValueError(f"offload: found {text!r}, {_EXPECTED}")

    def __str__(self) -> str:
        return self.medium.value if self.folder is None else f"{self.medium.value}:{self.folder}"

"""Where shards and optimizer states are kept, as users write it. No torch: options are read so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_EXPECTED = 'expected "host" or "disk:FOLDER", such as "disk:/scratch"'


@dataclass(frozen=True)
class OffloadPlace:
    """Where shards, or the states of an optimizer, are kept, as users write it.

    Attributes:
        folder: of a disk; ``None``: the host.
    """

    folder: Path | None = None

    @classmethod
    def parse(cls, text: str) -> OffloadPlace:
        """Read ``"host"`` or ``"disk:FOLDER"``.

        Raises:
            ValueError: it is neither.
        """
        medium, colon, folder = text.partition(":")
        if medium == "host" and not colon:
            return cls()
        if medium == "disk" and folder:
            return cls(Path(folder).expanduser())
        raise ValueError(f"offload: found {text!r}, {_EXPECTED}")

    def __str__(self) -> str:
        return "host" if self.folder is None else f"disk:{self.folder}"

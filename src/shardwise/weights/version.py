"""Versions of published weights, as readers see them."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

#: Changes when a reader of an earlier release would misread what is published.
FORMAT = 1
#: Seconds between two looks at whether there is a newer version.
LOOK_SECONDS = 0.002
_MOST_NAME = 200  # bytes, so that a suffix fits in the name of a file


@dataclass(frozen=True)
class Version:
    """A version of published weights.

    Attributes:
        number: counted by the publisher; a later one is higher.
        origin: what tells it from a version of the same number that another process published.
        format: of what is published.

    Raises:
        ValueError: it is of a release that publishes in another form.
    """

    number: int
    origin: str
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(
                f"found format {self.format}, expected {FORMAT}; publish and read with the same "
                "release of Shardwise"
            )


def quoted(name: str) -> str:
    """The name of published weights as the name of a file. It may contain anything.

    Raises:
        ValueError: it is empty or too long.
    """
    safe = urllib.parse.quote(name, safe=" ", errors="surrogatepass")
    if safe.startswith("."):
        safe = f"%2E{safe[1:]}"  # neither hidden nor the folder above
    if not 0 < len(safe) <= _MOST_NAME:
        raise ValueError(
            f"name: found {name[:40]!r}, expected 1 to {_MOST_NAME} characters once it is quoted "
            "as in a URL"
        )
    return safe

"""What rank 0 does alone, and all ranks go on from.

No two ranks see the same disk: one looks earlier, another through a cache of its own. So where what
lies there decides what ranks do together (save, load, begin anew, delete), rank 0 looks and tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.checkpoint.ranks.background import group_for
from shardwise.launch.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class _Refusal:
    """A ``UserError`` on its way to other ranks."""

    text: str
    exit_code: int


def on_rank_zero(doing: str, act: Callable[[], T]) -> T:
    """Do something on rank 0, and return on every rank what it returned there.

    Every rank calls it, while no checkpoint is being saved in the background.

    Args:
        doing: what is done, for messages: ``"looking for checkpoints in runs/lm"``.
        act: what rank 0 does; what it returns is small, and pickled.

    Raises:
        UserError: ``act`` raised one, or an ``OSError``; on every rank alike.
        CheckpointError: ``act`` raised anything else, or a rank was lost.
    """
    refused: list[UserError] = []

    def part() -> T | _Refusal:
        try:
            return act()
        except UserError as error:
            refused.append(error)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            refused.append(UserError(f"{doing}: {where}{error.strerror or error}"))
            refused[0].__cause__ = error
        return _Refusal(str(refused[0]), refused[0].exit_code)

    found = Ranks(group_for(None)).first(doing, part)
    if not isinstance(found, _Refusal):
        return found
    error = refused[0] if refused else UserError(found.text)
    error.exit_code = found.exit_code
    raise error

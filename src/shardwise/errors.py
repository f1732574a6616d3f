"""The errors that Shardwise raises by itself.

    ShardwiseError (RuntimeError)
    ├── PeerLostError       a peer died, departed or stalled: a collective could not finish
    └── RanksDivergedError  ranks disagree about what they are about to do

Wrong use of the library is a plain ``ValueError``, ``TypeError`` or ``NotImplementedError``,
as it is in torch; the classes above are for what goes wrong while a correct program runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ShardwiseError(RuntimeError):
    """Root of the errors that are not the caller's wrong use."""


class PeerLostError(ShardwiseError):
    """A collective could not finish because a peer died, departed or stalled.

    The message names this rank, the group whose collective broke and, where the backend tells,
    the peer.
    """


class RanksDivergedError(ShardwiseError):
    """Ranks disagree: on the order of groups, on shapes or dtypes, or on the configuration."""


@contextmanager
def naming(what: str, group: str) -> Iterator[None]:
    """Add the group's name to what a transport, which knows no modules, has to say."""
    try:
        yield
    except PeerLostError as error:
        raise PeerLostError(f"{what} of {group or 'the root group'}: {error}") from error

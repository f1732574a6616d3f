"""The errors that Shardwise raises by itself.

    ShardwiseError (RuntimeError)
    ├── PeerLostError       a peer died, departed or stalled: a collective could not finish
    ├── RanksDivergedError  ranks disagree about what they are about to do
    └── CheckpointError     a checkpoint is damaged, is of another model, or could not be written

Wrong use of the library is a plain ``ValueError``, ``TypeError`` or ``NotImplementedError``,
as it is in torch; the classes above are for what goes wrong while a correct program runs. Where
torch raises ``AssertionError`` for wrong use, a :class:`MisuseError` is both.
"""

from __future__ import annotations


class ShardwiseError(RuntimeError):
    """Root of the errors that are not the caller's wrong use."""


class PeerLostError(ShardwiseError):
    """A collective could not finish because a peer died, departed or stalled.

    The message names this rank, the group whose collective broke and, where the backend tells,
    the peer.
    """


def lost_peer_behind(error: BaseException) -> PeerLostError | None:
    """Find the lost peer that an error reports, or that it was raised from.

    Where an error came from decides, not what its text says: an error of the user's own code may
    well speak of peers and connections.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, PeerLostError):
            return cause
        seen.add(id(cause))
        cause = cause.__cause__
    return None


class RanksDivergedError(ShardwiseError):
    """Ranks disagree: on the order of groups, on shapes or dtypes, or on the configuration."""


class CheckpointError(ShardwiseError):
    """A checkpoint is damaged, hostile, of another model, or could not be written.

    The message names the file, the entry in it, what was found and what was expected.
    """


class MisuseError(ValueError, AssertionError):
    """Wrong use for which torch's ``fully_shard`` raises ``AssertionError``."""

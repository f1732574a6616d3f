"""What is said when a peer of a process group is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise import _torch
from shardwise.errors import PeerLostError, ShardwiseError

#: The first tag that messages must not use; nothing ever arrives for it.
PROBE_TAG = 2**30

_HUNG_UP = "shardwise/hung-up"

#: Words by which backends tell of a broken or silent connection, as against wrong arguments.
_SIGNS = ("connection", "timed out", "timeout", "peer", "socket", "broken pipe", "network")


def tells_of_lost_peer(error: RuntimeError) -> bool:
    """Whether what a backend raised means that a peer is gone or silent.

    Ask it only of what a call of ``torch.distributed`` raised: the words alone prove nothing.
    Everything above knows a lost peer by its type, :class:`~shardwise.errors.PeerLostError`.
    """
    text = str(error).lower()
    return isinstance(error, dist.DistNetworkError) or any(sign in text for sign in _SIGNS)


def tells_of_stall(error: RuntimeError) -> bool:
    """Whether the peer still holds its connection but did not answer in time."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def peer_lost(
    group: dist.ProcessGroup, doing: str, error: RuntimeError, peers: Sequence[int] = ()
) -> PeerLostError:
    """Make the error for a collective of ``group`` that broke.

    Args:
        group: the process group.
        doing: what was being done, such as ``"the all-gather of 3 tensors"``.
        error: what the backend raised.
        peers: ranks in the group of the peers concerned, where they are known.
    """
    members = dist.get_process_group_ranks(group)
    me = members[group.rank()]
    if peers:
        who = "rank " if len(peers) == 1 else "ranks "
        who += ", ".join(str(members[peer]) for peer in sorted(peers))
    else:
        others = [str(member) for member in members if member != me]
        who = f"one of ranks {', '.join(others)} (the backend does not say which)"
    what = "no answer in time" if tells_of_stall(error) else "the peer closed the connection"
    return PeerLostError(
        f"rank {me} lost {who} during {doing}: {what}. It died, left early or stalled: look for "
        "the first error in its own output, then restart all ranks from the last checkpoint. "
        f"(The backend says: {error})"
    )


@contextlib.contextmanager
def naming_lost_peer(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """Turn a backend's error that means a lost peer into one that says so.

    Put only calls of ``torch.distributed`` inside.

    Args:
        group: whose collective it is; None: the default process group.
        doing: what it is, such as ``"the all-gather of 3 tensors"``.

    Raises:
        PeerLostError: instead of such an error.
    """
    try:
        yield
    except ShardwiseError:
        raise  # which says so
    except RuntimeError as error:
        members = group or dist.group.WORLD
        if members is not None and tells_of_lost_peer(error):
            raise peer_lost(members, doing, error) from error
        raise


def departed(group: dist.ProcessGroup, peers: Sequence[int]) -> list[int]:
    """Those of ``peers`` (ranks in ``group``, on gloo) whose connection to this rank is closed."""
    gone = []
    for peer in peers:
        try:
            group.recv([torch.empty(1)], peer, PROBE_TAG)
        except RuntimeError:  # no message to it can even be posted
            gone.append(peer)
    return gone


def hang_up(group: dist.ProcessGroup) -> None:
    """Close all connections of a group on gloo: with a peer lost it is of no more use.

    Other ranks may wait for this one, which will never come; now they fail at once. Gloo does so
    itself when a wait times out, so this lets one time out.
    """
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    if others:
        with contextlib.suppress(RuntimeError):  # the store may be gone as well
            _torch.store_of(group).set(_HUNG_UP, "1")
    for peer in others:
        with contextlib.suppress(RuntimeError):
            probe = group.recv([torch.empty(1)], peer, PROBE_TAG)
            probe.wait(timedelta(milliseconds=1))


def was_hung_up(group: dist.ProcessGroup) -> bool:
    """Whether a rank closed its connections though it lives: then they tell nothing of who does."""
    try:
        return bool(_torch.store_of(group).check([_HUNG_UP]))
    except RuntimeError:
        return False

"""Which replicas are in the group, which has the newest outer state, and how the others receive it.

This runs when a group is formed: at the start, when a replica has left, when one has joined. Every
member reports what it has; the first of those with the most outer steps leads; if any member has
something else, the leader's outer parameters and momentum are sent to all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
import xxhash

from shardwise.base.errors import RanksDivergedError
from shardwise.diloco.fragment import Fragment
from shardwise.transport.peers import Peers


@dataclass(frozen=True)
class MemberReport:
    """What a member reports to the others.

    Attributes:
        settings: what must be equal, in words.
        layout: names, shapes and dtypes of its shards.
        rounds: outer steps of each fragment.
        steps: inner steps.
        even_at: inner steps at which each fragment's inner parameters last equaled the outer ones.
        digests: of each fragment's outer parameters and momentum.
    """

    settings: str
    layout: tuple[str, ...]
    rounds: tuple[int, ...]
    steps: int
    even_at: tuple[int, ...]
    digests: tuple[int, ...]

    @classmethod
    def of(cls, settings: str, steps: int, fragments: Sequence[Fragment]) -> MemberReport:
        """Return the report of this rank."""
        return cls(
            settings=settings,
            layout=tuple(line for fragment in fragments for line in fragment.layout),
            rounds=tuple(fragment.rounds for fragment in fragments),
            steps=steps,
            even_at=tuple(fragment.even_at for fragment in fragments),
            digests=tuple(map(digest, fragments)),
        )

    def lacks(self, other: MemberReport) -> list[bool]:
        """Return, for each fragment, whether this member needs what the other one has."""
        both = zip(self.rounds, other.rounds, self.digests, other.digests, strict=True)
        return [mine != theirs or own != sent for mine, theirs, own, sent in both]


def agree(group: dist.ProcessGroup, mine: MemberReport) -> tuple[int, list[MemberReport]]:
    """Agree on the leader. Every member calls it.

    Returns:
        The leader's rank in the group, and the reports of all members.

    Raises:
        RanksDivergedError: members have different models or settings; raised on all of them.
        PeerLostError: a member is lost.
    """
    Peers(group).name_dimension("replicas")
    found = Peers(group).gather_objects(mine, "the agreement of DiLoCo's replicas")
    leader = max(found, key=lambda report: report.rounds)  # the first of equals
    members = dist.get_process_group_ranks(group)
    for rank, report in zip(members, found, strict=True):
        difference = _difference(report, leader)
        if difference:
            raise RanksDivergedError(
                f"DiLoCo over ranks {members}: rank {rank} has {difference[0]}, rank "
                f"{members[found.index(leader)]} has {difference[1]}. All replicas need the same "
                "model, sharded in the same way, and the same settings"
            )
    return found.index(leader), found


def broadcast_outer_state(group: dist.ProcessGroup, leader_rank: int, fragment: Fragment) -> None:
    """Copy the leader's outer parameters and momentum to all members. Every member calls it.

    Raises:
        PeerLostError: a member is lost.
    """
    peers = Peers(group)
    source = peers.members[leader_rank]
    for flat in (fragment.outer, fragment.momentum):
        if flat.numel():
            send = functools.partial(dist.broadcast, flat, src=source, group=group)
            doing = f"the broadcast of the outer state of {fragment.name}"
            if flat.is_cpu:
                peers.call(send, doing)
            else:
                with peers.collective(doing):
                    send()


def digest(fragment: Fragment) -> int:
    """Return a digest of the outer parameters and momentum of this rank's shards."""
    found = xxhash.xxh64()
    for flat in (fragment.outer, fragment.momentum):
        found.update(flat.cpu().numpy().data)
    return found.intdigest()


def _difference(one: MemberReport, other: MemberReport) -> tuple[str, ...] | None:
    """Return the first thing that two members should have in common and do not, as each has it."""
    lines = ((each.settings, *each.layout) for each in (one, other))
    pairs = itertools.zip_longest(*lines, fillvalue="nothing more")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)

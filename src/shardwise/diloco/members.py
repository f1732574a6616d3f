"""Who is in the group, who has the newest outer state, and how the others get it.

Runs when a group is formed: at the start, when a replica has left, when one has joined. Every
member tells what it has; the first of those that have made the most outer steps leads; where anyone
has something else, the leader's outer parameters and momentum go to all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
import xxhash

from shardwise.diloco.fragment import Fragment
from shardwise.errors import RanksDivergedError
from shardwise.transport.peers import attended, gather_objects, naming_lost_peer


@dataclass(frozen=True)
class Report:
    """What a member tells the others.

    Attributes:
        settings: what has to be equal, in words.
        layout: names, shapes and dtypes of its shards.
        rounds: outer steps of each fragment.
        steps: inner steps.
        even_at: when each fragment's inner parameters were the outer ones, in inner steps.
        digests: of each fragment's outer parameters and momentum.
    """

    settings: str
    layout: tuple[str, ...]
    rounds: tuple[int, ...]
    steps: int
    even_at: tuple[int, ...]
    digests: tuple[int, ...]

    @classmethod
    def of(cls, settings: str, steps: int, fragments: Sequence[Fragment]) -> Report:
        """What this rank has to tell."""
        return cls(
            settings=settings,
            layout=tuple(line for fragment in fragments for line in fragment.layout),
            rounds=tuple(fragment.rounds for fragment in fragments),
            steps=steps,
            even_at=tuple(fragment.even_at for fragment in fragments),
            digests=tuple(map(_digest, fragments)),
        )

    def lacks(self, other: Report) -> list[bool]:
        """Of each fragment, whether this member needs what the other one has."""
        return [
            mine != theirs
            for mine, theirs in zip(
                zip(self.rounds, self.digests, strict=True),
                zip(other.rounds, other.digests, strict=True),
                strict=True,
            )
        ]


@dataclass(frozen=True)
class Agreement:
    """What the members have found out.

    Attributes:
        leader: its report.
        leader_rank: its rank in the group.
        needed: of each fragment, whether anyone needs what the leader has.
        lacked: of each fragment, whether this rank does.
    """

    leader: Report
    leader_rank: int
    needed: list[bool]
    lacked: list[bool]


def agree(group: dist.ProcessGroup, mine: Report) -> Agreement:
    """Find out who leads. Every member calls it.

    Raises:
        RanksDivergedError: members train other models, or by other settings; on all of them alike.
    """
    found = gather_objects(mine, group, "the agreement of DiLoCo's replicas")
    leader = max(found, key=lambda report: report.rounds)  # the first of equals
    members = dist.get_process_group_ranks(group)
    for rank, report in zip(members, found, strict=True):
        difference = _difference(report, leader)
        if difference:
            raise RanksDivergedError(
                f"DiLoCo over ranks {members}: rank {rank} has {difference[0]}, rank "
                f"{members[found.index(leader)]} has {difference[1]}. All replicas need the same "
                "model, sharded alike, and the same settings"
            )
    return Agreement(
        leader=leader,
        leader_rank=found.index(leader),
        needed=[any(column) for column in zip(*(r.lacks(leader) for r in found), strict=True)],
        lacked=mine.lacks(leader),
    )


def hand_over(group: dist.ProcessGroup, leader_rank: int, fragment: Fragment) -> None:
    """Copy the leader's outer parameters and momentum to all members. Every member calls it.

    Args:
        group: the members.
        leader_rank: the leader's rank in the group.
        fragment: of this rank; overwritten, but for its inner parameters.
    """
    source = dist.get_process_group_ranks(group)[leader_rank]
    for flat in (fragment.outer, fragment.momentum):
        if flat.numel():
            send = functools.partial(dist.broadcast, flat, src=source, group=group)
            doing = f"the handing over of {fragment.name}"
            if flat.is_cpu:
                attended(send, group, doing)
            else:
                with naming_lost_peer(group, doing):
                    send()


def _digest(fragment: Fragment) -> int:
    digest = xxhash.xxh64()
    for flat in (fragment.outer, fragment.momentum):
        digest.update(flat.cpu().numpy().data)
    return digest.intdigest()


def _difference(one: Report, other: Report) -> tuple[str, str] | None:
    """The first thing that two members should have alike and do not, as each has it."""
    if one.settings != other.settings:
        return one.settings, other.settings
    if one.layout != other.layout:
        longest = max(len(one.layout), len(other.layout))
        both = (
            (*layout, *["nothing more"] * (longest - len(layout)))
            for layout in (one.layout, other.layout)
        )
        return next(pair for pair in zip(*both, strict=True) if pair[0] != pair[1])
    return None

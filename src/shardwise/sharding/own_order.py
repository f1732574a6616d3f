"""Ranks that run different groups: how they agree on the next collective.

A rank that needs a group, or has come to the end of a forward or a backward, takes part in a
*round*: an all-gather of a few numbers, in which each rank announces what it is at.

    1. A rank that needs a group announces ``GATHER``, and one that will need it soon ``OFFER``.
    2. All ranks choose the same one of these groups: in forward the first, in backward the last.
    3. All of them gather it. Those that have not asked for it *supply*: they send their shards, and
       keep nothing.
    4. A rank whose group was not chosen announces it again. One that only offered goes on.
    5. In backward, each rank announces the groups that get no more gradients from it, and those of
       which it has some. A group that gets no more from any rank is reduced by all ranks, after the
       gather of the same round. Zeros stand for what a rank has not run.
    6. A rank that is through with its forward announces ``END_FORWARD``, and goes on when no rank
       is in that forward any more. Until then it supplies.
    7. So with ``END_BACKWARD``, which a rank without a batch announces at once.

No rank waits for anything but rounds, and for collectives that all ranks start in the same round. A
rank outside of a round computes, and then comes to the next one. Each round starts a gather that a
rank needs, lets a rank pass, or ends a forward or backward, and a program has finitely many of
these. So ranks cannot wait for each other forever, unless they wait elsewhere: a rank that leaves
the training while others go on is missed, as in any collective.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise._torch import autograd, fsdp
from shardwise.base.errors import RanksDivergedError
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.states import BACKWARD
from shardwise.transport.base import Label

_BITS = 62  # groups in a number of 64 bits
_LABEL = Label("what ranks run next")


class Intent(enum.IntEnum):
    """What a rank is at."""

    PASS = 0  # it goes on at once
    OFFER = 1  # it will need a group soon
    GATHER = 2  # it needs a group now
    END_FORWARD = 3
    END_BACKWARD = 4
    BATCHES = 5  # it asks whether any rank has a batch


_WANTS = (Intent.OFFER, Intent.GATHER)
_WORDS = {
    Intent.END_FORWARD: "is through with its forward",
    Intent.END_BACKWARD: "is through with its backward, or has no batch",
    Intent.BATCHES: "asks for the next batch",
}


def check_own_order(groups: Sequence[ParamGroup]) -> None:
    """Check that ranks may run these groups in orders of their own.

    Raises:
        NotImplementedError: something was asked for that needs all ranks to run the same groups.
    """
    for group in groups:
        found = None
        if group.mesh.mesh != groups[0].mesh.mesh:
            found = "a mesh of its own"
        elif group.post_forward is not None:
            found = "an integer reshard_after_forward"
        elif group.stepper is not None:
            found = "an optimizer that steps in backward"
        elif group.pages is not None:
            found = "shards on a disk"
        elif any(fsdp.has_extension(param.local) for param in group.params):
            found = "a tensor subclass that decides what is gathered"
        elif any(param.form.origin is not None for param in group.params):
            found = "parameters of tensor parallelism"
        if found is not None:
            raise NotImplementedError(
                f"group {group.label.name!r} on rank {dist.get_rank()}: found {found} beside "
                'order="own", in which ranks may run different modules; expected none, or '
                'order="same"'
            )


class Announcement(NamedTuple):
    """What one rank announces in a round.

    Attributes:
        intent: what it is at.
        number: of the group that it asks for; with ``BATCHES``, whether it has a batch.
        is_backward: whether it is in a backward.
        closed: a bit for each group that gets no more gradients from it in this backward.
        holds: a bit for each group of which it has gradients that wait.
    """

    intent: Intent
    number: int
    is_backward: bool
    closed: int
    holds: int


class OwnOrder:
    """The rounds of one rank; see the docstring of this module.

    Args:
        groups: all groups of the model, in an order that all ranks know.
        deliver: starts to reduce the gradients of a group, on all ranks.
    """

    def __init__(self, groups: Sequence[ParamGroup], deliver: Callable[[ParamGroup], None]) -> None:
        self._groups = list(groups)
        self._numbers = {group: number for number, group in enumerate(groups)}
        self._deliver = deliver
        self._transport = groups[0].mesh.over_all_ranks()
        self._words = -(-len(self._groups) // _BITS)
        # The groups whose backward is over here, and that wait for other ranks.
        self._waiting: set[int] = set()
        self._open = dict.fromkeys(range(len(self._groups)))

    def check(self) -> None:
        """Check that ranks may still run these groups in orders of their own.

        Raises:
            NotImplementedError: something was asked for that needs all ranks to run the same
                groups.
        """
        check_own_order(self._groups)

    def gather(self, group: ParamGroup, start: Callable[[], None]) -> None:
        """Have all ranks gather a group that this one needs now.

        Args:
            group: the group.
            start: starts the gather on this rank.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        number = self._numbers[group]
        while self._round(Intent.GATHER, number, start)[1] != number:
            pass

    def offer(self, group: ParamGroup, start: Callable[[], None]) -> None:
        """Have all ranks gather a group that this one needs soon, unless others need one now.

        Args:
            group: the group.
            start: starts the gather on this rank, if it is chosen.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        self._round(Intent.OFFER, self._numbers[group], start)

    def finish(self, group: ParamGroup) -> None:
        """Note that the backward of a group is over on this rank.

        If its parameters were kept from forward, backward asks for none. So this is where other
        ranks hear of it.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        self._waiting.add(self._numbers[group])
        if not group.options.reshard_after_forward and autograd.in_backward():
            self._round(Intent.PASS)

    def end_forward(self) -> None:
        """Supply until no rank is in this forward any more.

        Raises:
            PeerLostError: a peer died or stalled.
            RanksDivergedError: a peer is not in a step.
        """
        self._meet(Intent.END_FORWARD, Intent.END_BACKWARD)

    def end_backward(self) -> None:
        """Supply until no rank is in this backward any more. All reductions have started then.

        Raises:
            PeerLostError: a peer died or stalled.
            RanksDivergedError: a peer is not in a step.
        """
        self._meet(Intent.END_BACKWARD)
        self.reset()

    def any_has(self, has_batch: bool) -> bool:
        """Whether any rank has a batch.

        Raises:
            PeerLostError: a peer died or stalled.
            RanksDivergedError: a peer is in a step.
        """
        return any(row.number for row in self._meet(Intent.BATCHES, number=int(has_batch)))

    def reset(self) -> None:
        """Forget the backward that is over, or has raised."""
        self._waiting.clear()
        self._open = dict.fromkeys(range(len(self._groups)))

    # -- rounds ----------------------------------------------------------------------------------

    def _meet(self, intent: Intent, *others: Intent, number: int = 0) -> list[Announcement]:
        """Take part in rounds until all ranks are at ``intent``, or at one of ``others``."""
        while True:
            rows, _ = self._round(intent, number)
            intents = {row.intent for row in rows}
            if intents <= {intent, *others}:
                return rows
            if Intent.BATCHES in intents and intents <= _WORDS.keys():
                ranks = ", ".join(f"rank {i} {_WORDS[row.intent]}" for i, row in enumerate(rows))
                raise RanksDivergedError(
                    f"ranks have diverged on rank {dist.get_rank()}: {ranks}. In each step, every "
                    "rank calls forward and backward, or model.skip_step() in their place"
                )

    def _round(
        self, intent: Intent, number: int = 0, start: Callable[[], None] | None = None
    ) -> tuple[list[Announcement], int | None]:
        """Announce, gather what was chosen, and reduce what is complete.

        Returns:
            What all ranks announced, and the number of the group that was chosen.
        """
        rows = self._announce(intent, number)
        chosen = _choose(rows)
        if chosen is not None:
            if start is not None and chosen == number:
                start()
            else:
                self._groups[chosen].supply()
        complete, held = rows[0].closed, 0
        for row in rows:
            complete &= row.closed
            held |= row.holds
        complete &= held
        for each in reversed(range(complete.bit_length())):
            if complete >> each & 1:
                self._waiting.discard(each)
                self._deliver(self._groups[each])
        return rows, chosen

    def _announce(self, intent: Intent, number: int) -> list[Announcement]:
        """Exchange what ranks are at, in the order of ranks."""
        is_backward = intent is Intent.END_BACKWARD or autograd.in_backward()
        closed = self._closed(intent) if is_backward else 0
        holds = sum(1 << each for each in self._waiting if self._groups[each].has_waiting_grads)
        row = (intent, number, is_backward, *self._cut(closed), *self._cut(holds))
        sent = torch.tensor(row, dtype=torch.int64, device="cpu")
        ranks = self._transport.world_size
        found = torch.empty(ranks * len(row), dtype=torch.int64, device="cpu")
        self._transport.all_gather([sent], [found], _LABEL).wait()
        return [
            Announcement(
                Intent(its_intent),
                its_number,
                bool(its_backward),
                _joined(words[: self._words]),
                _joined(words[self._words :]),
            )
            for its_intent, its_number, its_backward, *words in found.view(ranks, -1).tolist()
        ]

    def _closed(self, intent: Intent) -> int:
        """The groups that get no more gradients from this rank in this backward, as bits."""
        every = (1 << len(self._groups)) - 1
        if intent is Intent.END_BACKWARD:
            return every
        for number in list(self._open):
            if not self._groups[number].passes.has_backward_to_come():
                del self._open[number]
        running = (i for i, group in enumerate(self._groups) if group.phase is BACKWARD)
        return every & ~sum(1 << number for number in {*self._open, *running})

    def _cut(self, bits: int) -> list[int]:
        return [bits >> (_BITS * i) & ((1 << _BITS) - 1) for i in range(self._words)]


def _joined(words: Sequence[int]) -> int:
    return sum(word << (_BITS * i) for i, word in enumerate(words))


def _choose(rows: Sequence[Announcement]) -> int | None:
    """Choose the group to gather next: one that a rank needs now, if there is any."""
    asking = [row for row in rows if row.intent in _WANTS]
    urgent = [row for row in asking if row.intent is Intent.GATHER] or asking
    if not urgent:
        return None
    choose = max if any(row.is_backward for row in urgent) else min
    return choose(row.number for row in urgent)

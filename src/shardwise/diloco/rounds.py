"""The rounds of a replica that is a world of its own: when it exchanges, and how it catches up.

What a replica has done since its work was last applied is the difference between its inner and its
outer parameters. That survives whatever happens to a round: if the replica is late for one, it
takes the newer outer parameters, moves its inner parameters along with them, and brings what it has
done to the next round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import xxhash

from shardwise.base import devices
from shardwise.diloco import members
from shardwise.diloco.average import Average
from shardwise.diloco.coordinator import Attempt, Fetch, RoundPlan, State
from shardwise.diloco.fragment import Fragment
from shardwise.diloco.membership import ReplicaSession, Wish
from shardwise.diloco.settings import OuterSGD, WireFormat
from shardwise.transport.all_to_all import AllToAll

_CPU = devices.CPU


class Rounds:
    """The rounds of one replica, on one of its ranks.

    Args:
        quorum: where it meets the others.
        fragment: all parameters, with their outer state.
        every: inner steps of a round.
        outer: the outer optimizer.
        wire: the format of pseudo-gradients.
        settings: what must be equal on all replicas, in words.
        reshard: called before parameters change.

    Attributes:
        quorum: as passed.
        bytes_sent: bytes of encoded pseudo-gradients that this rank has sent to others.
    """

    def __init__(
        self,
        quorum: ReplicaSession,
        fragment: Fragment,
        *,
        every: int,
        outer: OuterSGD,
        wire: WireFormat,
        settings: str,
        reshard: Callable[[], None],
    ) -> None:
        self.bytes_sent = 0
        self.quorum = quorum
        self._fragment = fragment
        self._every = every
        self._outer = outer
        self._wire = wire
        self._settings = settings
        self._reshard = reshard
        self._tokens = 0  # since the work of this replica was last applied
        self._counted = False  # whether the caller counts tokens
        self._steps = 0  # in this round
        self._is_joined = False
        # Held while the outer state changes, since it may be on its way to another replica.
        self._changing = threading.Lock()
        quorum.snapshot = self._snapshot

    @property
    def version(self) -> int:
        """Outer steps that this replica has made."""
        return self._fragment.rounds

    def count_tokens(self, tokens: int) -> None:
        """Count tokens that the step under way trains on, as weight of this replica's work."""
        self._tokens += tokens
        self._counted = True

    def join(self) -> None:
        """Begin with the outer state of the others. Every rank of the replica calls it.

        Inner parameters are kept if the outer state is the same already.
        """
        if self._is_joined:
            return
        quorum = self.quorum
        digests = quorum.gather(members.digest(self._fragment), "the digest of the outer state")
        combined = xxhash.xxh64(repr(digests).encode()).hexdigest()
        layouts = quorum.gather(self._fragment.layout, "the layout of the outer state")
        layout = xxhash.xxh64(repr(layouts).encode()).hexdigest()
        settings = f"{quorum.size} shards, parameters of checksum {layout}, {self._settings}"
        fetch = quorum.join(settings, combined, self.version)
        self._is_joined = True
        while fetch is not None:
            self._tokens = 0  # it belongs to an outer state that this replica does not go on from
            if self._catch_up(fetch):
                return
            fetch = quorum.wait_for(quorum.fetch_for_me)

    def after_step(self, step: int) -> None:
        """Count an inner step, and do what is due.

        Args:
            step: inner steps made so far.
        """
        self._steps += 1
        if not self._counted:
            self._tokens += 1
        self.join()
        wish = self.quorum.wish(self.version)
        if wish is Wish.FETCH:
            (fetch,) = self.quorum.wait_for(lambda plan: (self.quorum.fetch_for_me(plan),))
            if fetch is not None:
                self._catch_up(fetch)
        elif wish is Wish.MEET or self._steps >= self._every:
            self.meet(step)

    def meet(self, step: int) -> bool:
        """Bring what this replica has done to the exchange of this round.

        Args:
            step: inner steps made so far.

        Returns:
            Whether it was applied. If the others are further, or cannot be reached, it is kept for
            the next round.
        """
        self.join()
        quorum = self.quorum
        quorum.report(state=State.READY, tokens=self._tokens)

        def find(plan: RoundPlan) -> tuple[Attempt | Fetch | None] | None:
            if not (quorum.is_connected and quorum.replica in plan.live):
                return (None,)
            fetch = quorum.fetch_for_me(plan)
            if fetch is not None:
                return (fetch,)
            attempt = quorum.attempt_for_me(plan, self.version)
            return None if attempt is None else (attempt,)

        while True:
            (found,) = quorum.wait_for(find)
            match found:
                case Attempt():
                    if self._try(found, step):
                        return True
                case Fetch():
                    self._catch_up(found)
                    return False
                case None:
                    quorum.report(state=State.TRAINING)
                    self._steps = 0
                    return False

    def flush(self, step: int) -> None:
        """End the round now, unless nothing was done in it. Inner parameters equal outer ones then.

        If the others have ended the round already, what was done in it is lost.

        Args:
            step: inner steps made so far.
        """
        if self._tokens and not self.meet(step):
            self._reshard()
            self._fragment.mix_in(0.0)
            self._begin_round(step)

    # -- exchanges ---------------------------------------------------------------------------------

    def _try(self, attempt: Attempt, step: int) -> bool:
        """Take part in an attempt; return whether it was committed, and is applied."""
        quorum, fragment = self.quorum, self._fragment
        fragment.check()
        gradient = fragment.pseudo_gradient().to(_CPU)
        weight = weight_of(attempt, quorum.replica)
        if weight != 1.0:
            gradient.mul_(weight)
        error = None if fragment.error is None else fragment.error.to(_CPU, copy=True)

        def exchange(group: dist.ProcessGroup | None) -> tuple[torch.Tensor, int]:
            all_to_all = None if group is None else AllToAll(group, _CPU)
            label = f"the pseudo-gradient of round {attempt.version + 1}"
            average = Average(gradient, all_to_all, self._wire, label, error, fragment.sections)
            mean = average.wait()
            return mean, 0 if all_to_all is None else all_to_all.bytes_sent

        result = quorum.average(attempt, exchange)
        averaged = all(quorum.gather(result is not None, f"attempt {attempt.number}"))
        state = State.AVERAGED if averaged else State.FAILED
        quorum.report(state=state, attempt=attempt.number)
        if not averaged or result is None or not quorum.outcome(attempt):
            return False
        mean, sent = result
        self.bytes_sent += sent
        self._reshard()
        with self._changing:
            fragment.outer_step(mean.to(fragment.device), self._outer)
            if fragment.error is not None and error is not None:
                fragment.error.copy_(error)
        fragment.mix_in(0.0)
        self._begin_round(step)
        quorum.report(state=State.TRAINING, version=self.version, tokens=0)
        return True

    def _begin_round(self, step: int) -> None:
        self._fragment.even_at = step
        self._tokens = self._steps = 0

    # -- outer states ------------------------------------------------------------------------------

    def _snapshot(self) -> tuple[int, list[torch.Tensor]]:
        """Copy the outer state; called by other threads."""
        fragment = self._fragment
        with self._changing:
            state = [flat.to(_CPU, copy=True) for flat in (fragment.outer, fragment.momentum)]
            return fragment.rounds, state

    def _catch_up(self, fetch: Fetch) -> bool:
        """Take over the outer state of another replica; keep what inner steps have done here."""
        quorum, fragment = self.quorum, self._fragment
        state = [torch.empty_like(fragment.outer, device=_CPU) for _ in range(2)]
        version = quorum.receive(fetch, state)
        if version is None:
            quorum.report(refetch=fetch.number)
            quorum.see_end_of(fetch)
            return False
        moved = fragment.pseudo_gradient() if self._tokens else None
        self._reshard()
        with self._changing:
            fragment.outer.copy_(state[0])
            fragment.momentum.copy_(state[1])
            fragment.rounds = version
        if moved is None:
            fragment.mix_in(0.0)
        else:
            fragment.move_inner_by(moved)
        self._steps = 0
        quorum.report(
            state=State.TRAINING, version=version, tokens=self._tokens, fetched=fetch.number
        )
        quorum.see_end_of(fetch)
        return True


def weight_of(attempt: Attempt, replica: int) -> float:
    """Return what a replica multiplies its pseudo-gradient by before the plain average.

    The average is then weighted by tokens.
    """
    total = sum(attempt.tokens.values())
    if not total or len(set(attempt.tokens.values())) == 1:
        return 1.0
    return attempt.tokens[replica] * len(attempt.tokens) / total


def check_alone(fragments: Sequence[Fragment], overlap: int) -> Fragment:
    """Return the only fragment.

    Raises:
        ValueError: there are several, or their exchange overlaps with steps.
    """
    if overlap or len(fragments) != 1:
        raise ValueError(
            f"streaming: found {len(fragments)} fragments and an overlap of {overlap} steps, "
            "expected one fragment without overlap for replicas that are worlds of their own"
        )
    return fragments[0]

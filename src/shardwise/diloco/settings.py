"""The settings of the outer optimization. They do not import torch, for the command line."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from shardwise.base.arguments import check_arguments
from shardwise.base.errors import NotPossibleError
from shardwise.transport.wire import WireFormat as WireFormat


@dataclass(frozen=True, kw_only=True)
class OuterSGD:
    """The outer optimizer: SGD with momentum, as ``torch.optim.SGD`` defines it.

    The defaults are those of the DiLoCo paper (arXiv 2311.08105), section 3.

    Attributes:
        lr: learning rate.
        momentum: decay of the running sum of pseudo-gradients.
        nesterov: whether to use Nesterov momentum.
        warmup: rounds over which the momentum rises linearly from 0. From random weights, the
            direction of a round is soon wrong, and momentum overshoots.

    Raises:
        ValueError: a number is out of range.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    warmup: int = 0

    def __post_init__(self) -> None:
        check_arguments(type(self), vars(self))
        # Conditions are written so that NaN fails every one of them.
        if not 0 < self.lr < math.inf:
            raise NotPossibleError("outer lr", self.lr, "a number above 0")
        if not 0 <= self.momentum < 1:
            raise NotPossibleError("outer momentum", self.momentum, "0 to 1, without 1")
        if not self.warmup >= 0:
            raise NotPossibleError("outer warmup", self.warmup, "0 or more rounds")

    def momentum_of(self, round_: int) -> float:
        """Return the momentum of a round; the first round is 1.

        Args:
            round_: the number of the round, from 1.

        Returns:
            The factor of the momentum buffer in that round.
        """
        return self.momentum * min(1.0, round_ / max(1, self.warmup))


class Overlapped(enum.Enum):
    """What becomes of the inner steps that a replica makes during an exchange.

    ``MIXED`` mixes the inner parameters into the new outer ones, by ``alpha``.
    ``KEPT`` adds to the new outer parameters what these steps have changed, so that nothing of them
    is lost and the exchange may take a whole round.
    """

    MIXED = "mixed"
    KEPT = "kept"


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Fragments of the model that are exchanged one after another, while inner steps continue.

    Attributes:
        fragments: number of fragments. Blocks are assigned to them in turn ("strided"), and their
            exchanges are spread evenly over the inner steps of a round.
        overlap: inner steps between the start of an exchange and the use of its result; less than a
            round, or a whole one if the steps are kept.
        overlapped: what becomes of these steps.
        alpha: weight of the inner parameters when they are mixed with the outer ones: 0 replaces
            them (and drops what the steps during the overlap did), 1 would ignore the other
            replicas.

    Raises:
        ValueError: a number is out of range, or has no meaning.
    """

    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.0
    overlapped: Overlapped = Overlapped.MIXED

    def __post_init__(self) -> None:
        check_arguments(type(self), vars(self))
        object.__setattr__(self, "overlapped", Overlapped(self.overlapped))
        if not self.fragments >= 1:
            raise NotPossibleError("fragments", self.fragments, "1 or more")
        if not self.overlap >= 0:
            raise NotPossibleError("overlap", self.overlap, "0 or more inner steps")
        if not 0 <= self.alpha < 1:
            raise NotPossibleError("alpha", self.alpha, "0 to 1, without 1")
        if self.alpha and self.overlapped is Overlapped.KEPT:
            raise NotPossibleError("alpha", self.alpha, "0 with steps that are kept")

    def due(self, fragment: int, steps: int, every: int) -> bool:
        """Whether the exchange of a fragment starts after ``steps`` inner steps.

        Fragment 0 ends a round; the others come before it, evenly spread.

        Args:
            fragment: the number of the fragment, from 0.
            steps: inner steps made so far.
            every: inner steps per round.

        Returns:
            ``True`` if the exchange begins now.
        """
        return (steps + fragment * every // self.fragments) % every == 0


def check_streaming(streaming: Streaming, every: int) -> None:
    """Check the settings against the length of a round.

    Args:
        streaming: the settings.
        every: inner steps per round.

    Raises:
        ValueError: they contradict each other.
    """
    if not every >= 1:
        raise NotPossibleError("every", every, "1 or more inner steps")
    if not streaming.fragments <= every:
        expected = f"at most {every}, the inner steps of a round: one exchange starts per step"
        raise NotPossibleError("fragments", streaming.fragments, expected)
    kept = streaming.overlapped is Overlapped.KEPT
    most, hint = (every, "") if kept else (every - 1, ", or a whole round with steps that are kept")
    if not streaming.overlap <= most:
        expected = (
            f"at most {most}{hint}: the exchange of a fragment ends before its next one starts, "
            f"after {every} inner steps"
        )
        raise NotPossibleError("overlap", streaming.overlap, expected)


def keeps_errors(wire: WireFormat, error_feedback: bool | None) -> bool:
    """Decide whether what encoding loses is kept for the next exchange.

    Args:
        wire: the format.
        error_feedback: what was asked for; ``None``: what the format needs.

    Raises:
        ValueError: the format does not go without it.
    """
    if error_feedback is False and wire.needs_error_feedback:
        raise ValueError(
            f"error_feedback: found False with {wire.value}, expected True or None: what that "
            "format does not send would never be sent"
        )
    return wire.needs_error_feedback if error_feedback is None else error_feedback

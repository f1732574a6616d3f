"""How replicas that train apart meet, as the command line asks. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.diloco.settings import OuterSGD, Streaming, WireFormat


@dataclass(frozen=True, kw_only=True)
class DilocoConfig:
    """How replicas that train apart meet; see :class:`shardwise.diloco.DiLoCo`.

    Attributes:
        local_steps: inner steps of a round.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum.
        outer_warmup: rounds over which that rises from 0.
        wire: what pseudo-gradients are on the wire.
        error_feedback: send what encoding has lost the next time.
        streaming: fragments, and the overlap of their exchange with inner steps.
    """

    local_steps: int = 500
    outer_lr: float = OuterSGD.lr
    outer_momentum: float = OuterSGD.momentum
    outer_warmup: int = OuterSGD.warmup
    wire: WireFormat = WireFormat.FP32
    error_feedback: bool = False
    streaming: Streaming = field(default_factory=Streaming)

    @property
    def outer(self) -> OuterSGD:
        """The outer optimizer."""
        return OuterSGD(lr=self.outer_lr, momentum=self.outer_momentum, warmup=self.outer_warmup)

    def __str__(self) -> str:
        return f"meet every {self.local_steps} steps, {self.wire.value} on the wire"

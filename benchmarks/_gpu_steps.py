"""Training steps on GPUs: contenders that take turns, their time and their memory.

As in ``step_time.py``, every contender has processes of its own. Contenders that fit beside each
other stay in memory and take turns. Larger ones start anew for every turn, alone on the GPU, so the
one that runs out of memory spoils nothing but its own row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from _contenders import Case
from _gpu_journal import shortened
from _models import PRESETS, build
from _turns import Pace, Turns
from _worlds import WorldError
from shardwise.frontends.strategies import Strategy, WantedMesh
from shardwise.insight.planning.memory import memory
from shardwise.insight.planning.models import of_module
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.planning.settings import Settings
from shardwise.insight.schema.sharding import Checkpointing

#: Bytes of a parameter at rest and of its gradient, in bf16 with fp32 masters and AdamW.
_BYTES = {"ours": 16, "fsdp2": 16, "ddp": 22}
#: Of a process: CUDA's context and its libraries' workspaces; activations and logits.
_ACTIVATIONS = 4 * 2**30


#: A median of fewer says too little: such a case is measured again.
FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Room:
    """What memory there is.

    Attributes:
        gpus: the number of GPUs, over which ranks are dealt.
        memory: bytes of one; 0 on CPUs, where models are small.
    """

    gpus: int
    memory: int

    def holds(self, case: Case, names: list[str]) -> bool:
        """Whether contenders fit beside each other."""
        if not self.memory:
            return True
        ranks = -(-case.ranks // self.gpus)  # on one GPU
        shares = {name: 1 if name == "ddp" else case.ranks for name in names}
        state = sum(_BYTES[name] * PRESETS[case.params].numel / shares[name] for name in names)
        return ranks * (state + len(names) * _ACTIVATIONS) < 0.8 * self.memory

    def largest(self, ladder: Sequence[str]) -> str:
        """Return the largest model that a sharded contender can train on one GPU, alone.

        Args:
            ladder: keys of ``_models.PRESETS``, from small to large.
        """
        needs = {name: _BYTES["ours"] * PRESETS[name].numel + _ACTIVATIONS for name in ladder}
        fit = [name for name in ladder if not self.memory or needs[name] < self.memory]
        return fit[-1] if fit else ladder[0]


def planned_peak(case: Case) -> int | None:
    """Return the bytes at the peak of a step that ``shardwise plan`` expects on a rank of ours.

    ``None`` where plans do not say it: for compiled blocks, and for shards on the host.
    """
    if case.compiler or case.offload:
        return None
    settings = Settings(
        mesh=WantedMesh.parse(f"dp={case.ranks}"),
        strategy=Strategy.FULL_SHARD if case.zero == 3 else Strategy.SHARD_GRAD_OP,
        seq_length=case.tokens,
        param_dtype=None if case.dtype == "fp32" else "bf16",
        clip_grad=0.0,
        activation_checkpointing=Checkpointing.FULL if case.recomputes else Checkpointing.NONE,
        device_type=case.device,
    )
    return memory(rehearse(of_module(build(case.params, case.seed, "meta")), settings)).peak


class GpuTurns(Turns):
    """All contenders of one case, of which one that fails takes no other turn.

    Args:
        case: what they train.
        names: of the contenders.
        pace: how much is measured.
        room: what memory there is.
        backend: of the process group; by default NCCL on GPUs.
        deadline: no turn begins after it, as ``time.monotonic()`` counts.
    """

    def __init__(
        self,
        case: Case,
        names: list[str],
        pace: Pace,
        room: Room,
        backend: str | None,
        deadline: float,
    ) -> None:
        super().__init__(
            *(case, names, pace),
            is_resident=room.holds(case, names),
            backend=backend,
            timeout=120,
            deadline=deadline,
        )
        self._errors: dict[str, str] = {}

    def fail(self, name: str, error: WorldError) -> None:
        """Note it; a process that ran out of memory spoils nothing but its own row."""
        self._errors[name] = shortened(str(error))

    def play(self) -> dict[str, Any]:
        """Run all rounds and return the raw numbers."""
        found = super().play()
        if not found["contenders"]:
            raise WorldError("\n".join(self._errors.values()))
        rounds = len(next(iter(found["contenders"].values())))
        error = self._errors.get("ours")
        if error is None and rounds < min(FEWEST_ROUNDS, self.pace.rounds):
            error = f"only {rounds} rounds: the time of this part was over"
        backend = self.backend or ("nccl" if self.case.device == "cuda" else "gloo")
        return {**found, "backend": backend, "errors": self._errors, "error": error}

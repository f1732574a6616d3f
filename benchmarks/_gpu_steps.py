"""Training steps on GPUs: contenders that take turns, their time and their memory.

As in ``step_time.py``, every contender has processes of its own. Contenders that fit beside each
other stay in memory and take turns. Larger ones start anew for every turn, alone on the GPU, so the
one that runs out of memory spoils nothing but its own row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from _contenders import Case
from _gpu_journal import shortened
from _models import PRESETS, build
from _steps import StepWorker, transposed
from _worlds import World, WorldError
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


class GpuWorker(StepWorker):
    """One rank of a contender, whose device memory is counted too."""

    def memory(self) -> dict[str, int]:
        """Return the bytes allocated and reserved at the peak since the last call, and now.

        On a CPU nobody counts them.
        """
        if not self._cuda:
            return {}
        torch.cuda.synchronize()
        found = {
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "at_rest": torch.cuda.memory_allocated(),
        }
        torch.cuda.reset_peak_memory_stats()
        return found


#: A median of fewer says too little: such a case is measured again.
FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Pace:
    """How much is measured.

    Attributes:
        rounds: turns of every contender.
        steps: in a turn.
        warmup: steps before a process is measured.
    """

    rounds: int
    steps: int
    warmup: int


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


class Turns:
    """All contenders of one case, taking turns.

    Args:
        case: what they train.
        names: of the contenders.
        pace: how much is measured.
        room: what memory there is.
        backend: of the process group; by default NCCL on GPUs.
        deadline: no round begins after it, as ``time.monotonic()`` counts.
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
        self._case, self._names, self._pace = case, names, pace
        self._is_resident = room.holds(case, names)
        self._backend = backend
        self._deadline = deadline
        self._worlds: dict[str, World] = {}
        self._errors: dict[str, str] = {}
        self._turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def play(self) -> dict[str, Any]:
        """Run all rounds and return the raw numbers."""
        with ExitStack() as open_worlds:
            for index in range(self._pace.rounds):
                if index and time.monotonic() > self._deadline:
                    break
                shift = index % len(self._names)
                for name in self._names[shift:] + self._names[:shift]:
                    if name not in self._errors:
                        self._try(name, open_worlds)
        if len(self._errors) == len(self._names):
            raise WorldError("\n".join(self._errors.values()))
        # A round counts if every contender that is left has taken its turn.
        rounds = min(len(self._turns[n]) for n in self._names if n not in self._errors)
        error = self._errors.get("ours")
        if error is None and rounds < min(FEWEST_ROUNDS, self._pace.rounds):
            error = f"only {rounds} rounds: the time of this part was over"
        return {
            **asdict(self._case),
            "numel": PRESETS[self._case.params].numel,
            "worlds": "resident" if self._is_resident else "fresh",
            "backend": self._backend or ("nccl" if self._case.device == "cuda" else "gloo"),
            "contenders": {
                n: self._turns[n][:rounds] for n in self._names if n not in self._errors
            },
            "errors": self._errors,
            "error": error,
        }

    def _try(self, name: str, open_worlds: ExitStack) -> None:
        """Let a contender take its turn; one that fails takes no other."""
        try:
            world, warmup = self._worlds.get(name), 0
            if world is None:
                world, warmup = open_worlds.enter_context(self._start(name)), self._pace.warmup
                if self._is_resident:
                    self._worlds[name] = world
            self._turns[name].append(self._turn(world, warmup))
            if not self._is_resident:
                world.close()
        except WorldError as error:
            self._errors[name] = shortened(str(error))

    def _start(self, name: str) -> World:
        return World(
            *(name, self._case.ranks, GpuWorker, name, self._case),
            device=self._case.device,
            backend=self._backend,
            timeout=120,
        )

    def _turn(self, world: World, warmup: int) -> dict[str, Any]:
        warm = world.call("steps", warmup)
        world.call("memory")  # forget the peak of warming up
        steps = world.call("steps", self._pace.steps)
        return {
            "warmup": transposed(warm),
            "steps": transposed(steps),
            "memory": world.call("memory"),
            "foreign_cpu_seconds": 0.0,
        }

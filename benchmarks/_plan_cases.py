"""The trainings that plans are held against."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from _models import PRESETS, build
from shardwise import materialize
from shardwise.frontends.strategies import Checkpointing, Strategy, WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.models import find_model, of_module
from shardwise.insight.planning.rehearsal import make_batch, program_of
from shardwise.insight.planning.settings import Settings
from shardwise.insight.program import TrainingStep
from shardwise.insight.schema.sharding import PrecisionName, TransportName


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: a preset of ``_models.py``, or of ``shardwise plan``.
        size: tokens of a rank and step, in one sequence; for images, their number in a batch.
        mesh: of ranks.
        strategy: by name.
        dtype: of forward and backward.
        transport: as for ``fully_shard``.
        checkpointing: what is recomputed, by name.
        accumulate: microbatches of a step.
        gbit: speed of the link between two hosts; 0: all ranks are on one.
    """

    model: str
    size: int
    mesh: str
    strategy: str = "full"
    dtype: str = "fp32"
    transport: str = "shm"
    checkpointing: str = "none"
    accumulate: int = 1
    gbit: float = 0.0

    @property
    def is_text(self) -> bool:
        """Whether the model is one of ``_models.py``."""
        return self.model in PRESETS

    @property
    def settings(self) -> Settings:
        """What to plan for."""
        mesh = WantedMesh.parse(self.mesh)
        return Settings(
            mesh=mesh,
            strategy=Strategy(self.strategy),
            batch_size=1 if self.is_text else self.size,
            seq_length=self.size if self.is_text else None,
            param_dtype=None if self.dtype == "fp32" else PrecisionName(self.dtype),
            transport=TransportName(self.transport),
            activation_checkpointing=Checkpointing(self.checkpointing),
            accumulate=self.accumulate,
            ranks_per_host=mesh.size // (2 if self.gbit else 1),
        )

    @property
    def link(self) -> str | None:
        """The link between hosts, by name."""
        return f"ethernet-{self.gbit:g}" if self.gbit else None

    def __str__(self) -> str:
        size = f"{self.size} {'tokens' if self.is_text else 'images'}"
        where = f"two hosts, {self.gbit:g} Gbit/s" if self.gbit else self.transport
        words = [self.model, size, self.dtype, self.strategy, where]
        words += [f"{self.checkpointing} checkpointing"] * (self.checkpointing != "none")
        words += [f"{self.accumulate} microbatches"] * (self.accumulate > 1)
        return ", ".join(words)

    def blueprint(self) -> Blueprint:
        """Return the model, on the meta device, and how it is sharded."""
        return of_module(build(self.model, 0, "meta")) if self.is_text else find_model(self.model)


class Training:
    """A training on this rank."""

    def __init__(self, case: Case) -> None:
        settings, blueprint = case.settings, case.blueprint()
        program = program_of(blueprint, settings)
        program.prepare()
        program.shard(settings.sharding.make_mesh("cpu"))
        materialize(program.model.train())
        self._step = TrainingStep(program=program, optimizer=program.make_optimizer())
        self._batches = [
            make_batch(settings, program.model, str(case)) for _ in range(case.accumulate)
        ]

    def step(self) -> None:
        """Take an optimizer step."""
        count = len(self._batches)
        deque(self._step.backward(self._batches, count, count), maxlen=0)  # which keeps no loss
        self._step.norm()
        self._step.update()

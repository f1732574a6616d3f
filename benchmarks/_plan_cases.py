"""The trainings that plans are held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from _models import PRESETS, build
from shardwise import materialize
from shardwise.app.recipes.core.build import DTYPES
from shardwise.frontends.blocks import checkpoint_blocks, shard_blocks
from shardwise.frontends.strategies import Checkpointing, Strategy, WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.models import find_model, of_module
from shardwise.insight.planning.settings import Settings
from shardwise.insight.schema.sharding import PrecisionName, TransportName
from shardwise.optim.norms import clip_grad_norm_


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
        plan = settings.sharding
        checkpoint_blocks(blueprint.blocks, settings.activation_checkpointing)
        shard_blocks(
            blueprint.model,
            blueprint.blocks,
            mesh=plan.sharding_mesh(plan.make_mesh("cpu")),
            reshard_after_forward=plan.reshard_after_forward,
            precision=MixedPrecisionPolicy(DTYPES[settings.param_dtype], torch.float32),
            placement=blueprint.placement,
            transport=case.transport,
        )
        self._model: Any = materialize(blueprint.model.train())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._batches = [self._batch(case) for _ in range(case.accumulate)]

    def step(self) -> None:
        """Take an optimizer step."""
        for micro, batch in enumerate(self._batches):
            if len(self._batches) > 1:
                self._model.set_requires_gradient_sync(micro == len(self._batches) - 1)
            loss = self._model(**batch).loss
            (loss / len(self._batches)).backward()
            del loss
        clip_grad_norm_(list(self._model.parameters()), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _batch(self, case: Case) -> dict[str, torch.Tensor]:
        config = self._model.config
        if case.is_text:
            tokens = torch.randint(config.vocab_size, (1, case.size))
            return {"input_ids": tokens, "labels": tokens}
        pixels = torch.rand(case.size, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (case.size,))}

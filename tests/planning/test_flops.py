"""Attention in a rehearsal: its operations, and no mask that a training would not make."""

from __future__ import annotations

from pathlib import Path

from shardwise.frontends.strategies import WantedMesh
from shardwise.insight.planning.events import Op, StepPhase
from shardwise.insight.planning.models import find_model
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.planning.settings import Settings
from tests.recipes.small import write_model


def test_attention_counts_and_is_causal(tmp_path: Path) -> None:
    model = write_model(tmp_path, num_hidden_layers=1, attention_dropout=0.0)
    settings = Settings(mesh=WantedMesh.parse("dp=2"), batch_size=2, seq_length=64)
    log = rehearse(find_model(str(model)), settings)
    ops = [event for event in log.events if isinstance(event, Op)]
    product = 2 * (2 * 64 * 24) * 64  # of batch, length and width, with all keys
    done = {
        phase: sum(op.flops for op in ops if op.phase is phase and "attention" in op.name)
        for phase in StepPhase
    }
    assert done[StepPhase.FORWARD] == 2 * product // 2
    assert done[StepPhase.BACKWARD] == 5 * product // 2
    products = sum(op.flops for op in ops if op.name.startswith("aten.mm"))
    assert log.flops == products + (2 + 4) * product
    assert not any(op.dtype == "bool" and len(op.shapes[-1]) == 4 for op in ops), "a mask"

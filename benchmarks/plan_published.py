"""Plans held against tables that others measured on GPUs: memory, and tokens per second.

    python benchmarks/plan_published.py
    python benchmarks/plan_published.py --markdown      # a table of benchmarks/measurements.md

The figures are torchtitan's (``docs/performance.md`` and
``benchmarks/llama3_h100_202412_torchtitan.md`` of its repository): PyTorch's FSDP2, compute in
bf16, shards, reduction and AdamW in fp32. Two constants are fitted, ``matmul_efficiency`` of either
device, each on the one row that says so; everything else is predicted.

The script needs no GPU, and takes a minute or two.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, replace

from _report import Table, wide_console
from shardwise.frontends.strategies import Checkpointing, WantedMesh
from shardwise.insight.planning.clock import step_time
from shardwise.insight.planning.events import Log
from shardwise.insight.planning.machine import Machine, link_named
from shardwise.insight.planning.memory import reserved
from shardwise.insight.planning.models import find_model
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.planning.settings import Products, Settings
from shardwise.insight.schema.sharding import PrecisionName

H100 = Machine.named("h100-hbm2e")
A100 = replace(Machine.named("a100"), between=link_named("ib-200"))


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        machine: what it was measured on.
        model: a preset.
        settings: of the training.
        speed: tokens a second of a GPU, as measured.
        gib: peak memory that the allocator had reserved on the worst GPU, in GiB.
        fitted: whether a constant was fitted on the row's speed.
    """

    machine: Machine
    model: str
    settings: Settings
    speed: float
    gib: float | None = None
    fitted: bool = False

    def __str__(self) -> str:
        asked = self.settings
        recomputes = _WORDS[asked.activation_checkpointing, asked.recompute_every]
        words = [self.model, f"batch {asked.batch_size}", f"recomputes {recomputes}"]
        words += ["compiled"] * asked.compile
        words += ["float8"] * (asked.products is Products.FLOAT8)
        return ", ".join(words)


_WORDS = {
    (Checkpointing.NONE, 1): "nothing",
    (Checkpointing.FULL, 2): "every second layer",
    (Checkpointing.OPERATOR, 1): "by operator",
    (Checkpointing.FULL, 1): "everything",
}


def _settings(
    ranks: int, batch: int, length: int, recomputed: Checkpointing, every: int = 1
) -> Settings:
    return Settings(
        mesh=WantedMesh.parse(f"dp={ranks}"),
        batch_size=batch,
        seq_length=length,
        param_dtype=PrecisionName.BF16,
        reduce_dtype=PrecisionName.FP32,
        activation_checkpointing=recomputed,
        recompute_every=every,
        device_type="cuda",
        backend="nccl",
    )


_EIGHT = _settings(8, 2, 8192, Checkpointing.OPERATOR)
_COMPILED = replace(_EIGHT, compile=True)
_FLOAT8 = replace(_COMPILED, products=Products.FLOAT8)
ROWS = (
    Row(H100, "llama-8b", _EIGHT, 5762, 82.4, fitted=True),
    Row(H100, "llama-8b", _COMPILED, 6667, 77.0),
    Row(H100, "llama-8b", _FLOAT8, 8532, 76.8),
    Row(A100, "llama-8b", _settings(64, 1, 8192, Checkpointing.FULL, every=2), 2904),
    Row(A100, "llama-8b", _settings(64, 1, 8192, Checkpointing.OPERATOR), 2973, fitted=True),
    Row(A100, "llama-70b", _settings(64, 1, 8192, Checkpointing.FULL), 331),
    Row(A100, "llama2-13b", _settings(64, 2, 4096, Checkpointing.NONE), 2162),
    Row(A100, "llama2-13b", _settings(64, 2, 4096, Checkpointing.FULL, every=2), 1914),
)


@functools.cache
def _rehearsed(model: str, settings: Settings) -> Log:
    return rehearse(find_model(model), settings)


def _error(found: float, measured: float) -> str:
    return f"{100 * (found / measured - 1):+.1f} %"


def _cells(row: Row) -> list[str]:
    """Rehearse a row, and time it; show what the allocator reserves and how fast a GPU is."""
    asked = row.settings
    log = _rehearsed(row.model, replace(asked, compile=False, products=Products.AS_STORED))
    speed = step_time(log, row.machine, asked).tokens_per_second / asked.mesh.size
    error = _error(speed, row.speed)
    gib = ["", "", ""]
    if row.gib is not None:
        planned = reserved(log) / 2**30
        gib = [f"{row.gib:.1f}", f"{planned:.1f}", _error(planned, row.gib)]
    return [
        f"{asked.mesh.size} x {row.machine.device.name}",
        str(row),
        f"{row.speed:,.0f}",
        f"{speed:,.0f}",
        f"fitted ({error})" if row.fitted else error,
        *gib,
    ]


_HEADINGS = ["GPUs", "row", "tokens/s", "predicted", "error", "GiB", "predicted", "error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    options = parser.parse_args()
    table = Table("Plans and published figures", _HEADINGS, [_cells(row) for row in ROWS])
    if options.markdown:
        print(table.markdown())
    else:
        table.show(wide_console())


if __name__ == "__main__":
    main()

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
from typing import Any

from _report import Table, wide_console
from shardwise.frontends.strategies import WantedMesh
from shardwise.insight.planning.clock import step_time
from shardwise.insight.planning.machine import Machine
from shardwise.insight.planning.memory import reserved
from shardwise.insight.planning.models import find_model
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.planning.settings import Products, Settings
from shardwise.insight.schema.sharding import Checkpointing

H100 = Machine.named("h100-hbm2e", "ib-400", ranks_per_host=8)
A100 = Machine.named("a100", "ib-200", ranks_per_host=8)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table.

    Attributes:
        machine: what it was measured on.
        ranks: how many GPUs.
        model: a preset.
        batch: sequences of a GPU.
        length: tokens of a sequence.
        recomputed: in backward.
        every: of the blocks, every N-th is.
        compiled: whether blocks were.
        products: their dtype.
        speed: tokens a second of a GPU, as measured.
        gib: peak memory that the allocator had reserved on the worst GPU, in GiB.
        fitted: whether a constant was fitted on the row's speed.
    """

    machine: Machine
    ranks: int
    model: str
    batch: int
    length: int
    recomputed: Checkpointing
    every: int = 1
    compiled: bool = False
    products: Products = Products.AS_STORED
    speed: float
    gib: float | None = None
    fitted: bool = False

    def __str__(self) -> str:
        words = [
            self.model,
            f"batch {self.batch}",
            f"recomputes {_WORDS[self.recomputed, self.every]}",
        ]
        if self.compiled:
            words.append("compiled")
        if self.products is Products.FLOAT8:
            words.append("float8")
        return ", ".join(words)


_WORDS = {
    (Checkpointing.NONE, 1): "nothing",
    (Checkpointing.FULL, 2): "every second layer",
    (Checkpointing.OPERATOR, 1): "by operator",
    (Checkpointing.FULL, 1): "everything",
}

_H100 = functools.partial(
    Row,
    machine=H100,
    ranks=8,
    model="llama-8b",
    batch=2,
    length=8192,
    recomputed=Checkpointing.OPERATOR,
)
_A100 = functools.partial(Row, machine=A100, ranks=64)
ROWS = (
    _H100(speed=5762, gib=82.4, fitted=True),
    _H100(compiled=True, speed=6667, gib=77.0),
    _H100(compiled=True, products=Products.FLOAT8, speed=8532, gib=76.8),
    _A100(
        model="llama-8b", batch=1, length=8192, recomputed=Checkpointing.FULL, every=2, speed=2904
    ),
    _A100(
        model="llama-8b",
        batch=1,
        length=8192,
        recomputed=Checkpointing.OPERATOR,
        speed=2973,
        fitted=True,
    ),
    _A100(model="llama-70b", batch=1, length=8192, recomputed=Checkpointing.FULL, speed=331),
    _A100(model="llama2-13b", batch=2, length=4096, recomputed=Checkpointing.NONE, speed=2162),
    _A100(
        model="llama2-13b", batch=2, length=4096, recomputed=Checkpointing.FULL, every=2, speed=1914
    ),
)


@functools.cache
def _rehearsed(
    model: str, ranks: int, batch: int, length: int, recomputed: Checkpointing, every: int
) -> Any:
    settings = Settings(
        mesh=WantedMesh.parse(f"dp={ranks}"),
        batch_size=batch,
        seq_length=length,
        param_dtype="bf16",
        reduce_dtype="fp32",
        activation_checkpointing=recomputed,
        recompute_every=every,
        device_type="cuda",
        backend="nccl",
    )
    return rehearse(find_model(model), settings), settings


def _error(found: float, measured: float) -> str:
    return f"{100 * (found / measured - 1):+.1f} %"


def _cells(row: Row) -> list[str]:
    """Rehearse a row, and time it; show what the allocator reserves and how fast a GPU is."""
    log, settings = _rehearsed(
        row.model, row.ranks, row.batch, row.length, row.recomputed, row.every
    )
    settings = replace(settings, compile=row.compiled, products=row.products)
    speed = step_time(log, row.machine, settings).tokens_per_second / row.ranks
    error = _error(speed, row.speed)
    gib = ["", "", ""]
    if row.gib is not None:
        planned = reserved(log) / 2**30
        gib = [f"{row.gib:.1f}", f"{planned:.1f}", _error(planned, row.gib)]
    return [
        f"{row.ranks} x {row.machine.device.name}",
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

"""What planning a save costs the first rank: ours, and torch's DCP planner on the same plans.

    python benchmarks/save_planning.py --ranks 8,64,512,4096

Each rank of a Llama of 70 B parameters with AdamW's states, sharded by rows, says what it has to
save. No rank runs: what each would send is made here, one after the other, and given to what the
first rank does with it. Seconds are of the processor, so that other programs do not count. Torch's
planner gets the plans as objects, after they were received; it takes an object for each part of a
tensor, and is left out where memory or patience would not do.

What is sent is counted in bytes. Each rank exchanges two messages with the first in each of four
rounds: arguments, plans, digests, and what was written where.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pickle
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from _memory import peak_rss, reset_peak_rss
from _options import end, parser, run
from _report import Table
from shardwise.checkpoint.disk.entries import Origin, Value
from shardwise.checkpoint.disk.manifest import MAX_BYTES
from shardwise.checkpoint.disk.safetensors import BLOCK
from shardwise.checkpoint.ranks import outline
from shardwise.checkpoint.ranks.alike import check_alike

T = TypeVar("T")
_ROUNDS = 4
_PROPERTIES = TensorProperties(dtype=torch.float32)
_PIECE = len('{"file": "shard-00000-of-04096.safetensors", "offset": 12345678, ')
_PIECE += len('"offsets": [1000, 0], "sizes": [2, 8192], "checksums": "0123456789abcdef"}, ')


def shapes() -> dict[str, tuple[int, ...]]:
    """The parameters of Llama 3 70B, by name."""
    hidden, inner, heads = 8192, 28672, 1024
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (heads, hidden),
        "self_attn.v_proj": (heads, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128256, hidden)}
    for layer in range(80):
        found |= {f"model.layers.{layer}.{name}.weight": each for name, each in block.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (128256, hidden)}


def tensors() -> dict[tuple[str, ...], tuple[int, ...]]:
    """All tensors of the state, by path. Those without dimensions are on all ranks."""
    params = shapes()
    found: dict[tuple[str, ...], tuple[int, ...]] = {("model", n): s for n, s in params.items()}
    for name, shape in params.items():
        state = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        found |= {("optimizer", "state", name, each): its for each, its in state.items()}
    return found


def _rows(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, int]:
    """The first of a rank's rows, and how many they are."""
    chunk = -(-shape[0] // ranks)
    first = min(shape[0], chunk * rank)
    return first, min(shape[0], first + chunk) - first


@functools.cache
def _all_rows(count: int, ranks: int) -> tuple[list[int], list[int]]:
    """The first of the rows of each rank, and how many they are."""
    starts, rows = zip(*(_rows((count,), rank, ranks) for rank in range(ranks)), strict=True)
    return [*starts], [*rows]


def items(rank: int, ranks: int) -> list[WriteItem]:
    """What torch's planner plans on a rank."""
    found = []
    for path, shape in tensors().items():
        first, rows = _rows(shape, rank, ranks) if shape else (0, 0)
        offsets = torch.Size((first, *(0 for _ in shape[1:])) if shape else ())
        sizes = torch.Size((rows, *shape[1:]) if shape else ())
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), _PROPERTIES, torch.Size(shape))
        kind = WriteItemType.SHARD if shape else WriteItemType.TENSOR
        index = MetadataIndex(".".join(path), offsets)
        found.append(WriteItem(index, kind, tensor_data=data))
    return found


def outlines(ranks: int) -> list[bytes]:
    """What all ranks send; each has a random state of its own, too."""
    origins = {
        ".".join(path): Origin(path, *(("Shard(0)", f"shard={ranks}") if shape else ("", "")))
        for path, shape in tensors().items()
    }
    groups = {"lr": 1e-4, "betas": (0.9, 0.95), "params": list(shapes())}
    values = [Value(("optimizer", "param_groups", 0, key), each) for key, each in groups.items()]
    first = outline.outline_of(items(0, ranks), origins, values)
    columns: list[Any] = []
    for shape in filter(None, tensors().values()):
        starts, rows = _all_rows(shape[0], ranks)
        columns += [starts, *([0] * ranks for _ in shape[1:])]
        columns += [rows, *([size] * ranks for size in shape[1:])]
    table = np.array(columns, np.int64).T
    sent = []
    for rank in range(ranks):
        own = [[], [[["extra", "random", "$ranks", str(rank)], rank]]]
        text = zlib.compress(json.dumps(own).encode(), 1)
        boxes = outline.packed(table[rank])
        sent.append(pickle.dumps(outline.Outline(first.common, text, boxes)))
    return sent


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds of the processor that something takes, and its result."""
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def ours(ranks: int) -> dict[str, Any]:
    """What the first rank does, until every rank knows what to write."""
    sent = outlines(ranks)
    reset_peak_rss()
    before = peak_rss()

    def plan() -> list[bytes]:
        found = outline.Outlines([pickle.loads(each) for each in sent])
        shared = found.shared()
        held = found.states([bytes(8 * sum(map(int.bit_count, bits))) for bits in shared])
        check_alike(held, range(ranks))
        return [*shared, *found.writers(lowest=False)]

    with patch.object(outline, "MAX_BYTES", 1 << 62):  # to see what it would take
        seconds, answers = timed(plan)
    parts = blocks = 0
    for shape in tensors().values():
        sizes = _all_rows(shape[0], ranks)[1] if shape else [1]
        numels = [rows * math.prod(shape[1:]) for rows in sizes]
        parts += sum(map(bool, numels))
        blocks += sum(-(-4 * numel // BLOCK) for numel in numels)
    steps = 8 * len(shapes()) * ranks
    written = 8 * (parts + blocks)
    return {
        "seconds": seconds,
        "peak": peak_rss() - before,
        "bytes": sum(map(len, [*sent, *answers])) + steps + written,
        "messages": 2 * _ROUNDS * (ranks - 1),
        "parts": parts,
        "manifest": parts * _PIECE + 16 * (blocks - parts),
    }


def torchs(ranks: int) -> dict[str, Any]:
    """What torch's planner does with the plans of all ranks, on the first."""
    plans = [SavePlan(items(rank, ranks)) for rank in range(ranks)]
    nbytes = 2 * ranks * len(pickle.dumps(plans[0]))  # there and back
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reset_peak_rss()
    before = peak_rss()
    seconds, _ = timed(lambda: planner.create_global_plan(plans))
    return {"seconds": seconds, "peak": peak_rss() - before, "bytes": nbytes}


def tables(cases: list[dict[str, Any]]) -> list[Table]:
    """One table, a row for each number of ranks."""
    columns = ["ranks", "s", "MB through rank 0", "messages", "peak MiB", "parts", "manifest MB"]
    shown = Table(
        "Planning a save of Llama 3 70B with AdamW, on the first rank",
        [*columns, "torch's planner s", "MB of plans"],
    )
    for case in cases:
        mine, its = case["ours"], case["torch"]
        shown.rows.append(
            [
                f"{case['ranks']:,}",
                f"{mine['seconds']:.2f}",
                f"{mine['bytes'] / 1e6:,.1f}",
                f"{mine['messages']:,}",
                f"{mine['peak'] / 2**20:,.0f}",
                f"{mine['parts']:,}",
                f"{mine['manifest'] / 1e6:,.0f}",
                *((f"{its['seconds']:.1f}", f"{its['bytes'] / 1e6:,.0f}") if its else ("", "")),
            ]
        )
    shown.notes.append(
        "seconds of the processor; MB: of plans, digests, answers, and what was written where; a "
        f"manifest of more than {MAX_BYTES / 1e6:,.0f} MB is refused before anything is written"
    )
    return [shown]


def main() -> int:
    made = parser(__doc__, ranks="8,64,512,4096")
    made.add_argument("--most", type=int, default=64, help="ranks with torch's planner (64)")
    options: argparse.Namespace = made.parse_args()
    cases = (
        {"ranks": n, "ours": ours(n), "torch": torchs(n) if n <= options.most else None}
        for n in options.ranks
    )
    return run("save_planning", options, lambda say: cases, tables)


if __name__ == "__main__":
    end(main)

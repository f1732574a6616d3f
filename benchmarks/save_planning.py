"""What planning and committing a save costs the first rank; torch's DCP planner on the same plans.

    python benchmarks/save_planning.py --ranks 8,64,512,4096

Each rank of a Llama of 70 B parameters with AdamW's states, sharded by rows, says what it has to
save. No rank runs: what each would send is made here, one after the other, and given to what the
first rank does with it. Seconds are of the processor, so that other programs do not count. Torch's
planner gets the plans as objects, after they were received; it takes an object for each part of a
tensor, and is left out where memory or patience would not do.

Then the manifest is made, and read as a rank that loads does: it is checked, and a rank's parts of
all tensors are found in it. The commit on the first rank is to make it and to read it, without the
disk. Checksums are random numbers.

What is sent is counted in bytes. Each rank exchanges two messages with the first in each of four
rounds: arguments, plans, digests, and what was written where.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import pickle
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

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
from shardwise.base.boxes import Box
from shardwise.checkpoint.disk.columns import files_of, parts_in
from shardwise.checkpoint.disk.entries import Manifest, Origin, TensorEntry, Value, shard_name
from shardwise.checkpoint.disk.manifest import manifest_bytes, parse_manifest
from shardwise.checkpoint.disk.safetensors import BLOCK
from shardwise.checkpoint.ranks import outline
from shardwise.checkpoint.ranks.alike import check_alike

T = TypeVar("T")
_ROUNDS = 4
_HEADER = 1 << 16  # bytes of a file before its elements
_PROPERTIES = TensorProperties(dtype=torch.float32)


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


def written_by_all(found: outline.Outlines, answers: list[bytes], ranks: int) -> list[Any]:
    """What each rank says of what it has written, and how long its file is."""
    shape_of = [info.shape for info in found.infos.values()]
    said = []
    for rank, bits in enumerate(answers):
        chosen = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), count=len(shape_of)))
        sizes = []
        for shape in (shape_of[at] for at in chosen.tolist()):
            rows = _all_rows(shape[0], ranks)[1][rank] if shape else 1
            sizes.append(4 * rows * math.prod(shape[1:]))
        ends = np.cumsum([_HEADER, *sizes])
        blocks = sum(-(-size // BLOCK) for size in sizes)
        digests = np.random.default_rng(rank).bytes(8 * blocks)
        said.append((outline.packed(ends[:-1]), digests, int(ends[-1]) if sizes else 0))
    return said


def committed(found: outline.Outlines, answers: list[bytes], ranks: int) -> dict[str, Any]:
    """What the first rank does with the manifest, and what every rank does that loads."""
    said = written_by_all(found, answers, ranks)
    names = [shard_name(rank, ranks) for rank in range(ranks)]
    files = {name: size for name, (*_, size) in zip(names, said, strict=True) if size}

    def make() -> bytes:
        pieces = found.pieces([each[:2] for each in said], names)
        assert files_of(pieces.values()) == files.keys()
        known = [(found.origins[name], info, pieces[name]) for name, info in found.infos.items()]
        entries = (
            TensorEntry(at.path, info.shape, info.dtype, at.placements, at.mesh, its)
            for at, info, its in known
        )
        values = tuple(found.values)
        return manifest_bytes(Manifest(tuple(entries), values, files, BLOCK, ranks))

    making, text = timed(make)
    # In a process of its own, in which no memory has been used before.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        reading, peak = pool.apply(read_back, (text, sum(files.values()), ranks))
    return {"manifest": len(text), "commit": making + reading, "read": reading, "read_peak": peak}


def read_back(text: bytes, size: int, ranks: int) -> tuple[float, int]:
    """Seconds and bytes that a manifest takes a rank that reads it and finds its parts in it."""

    def read() -> int:
        manifest = parse_manifest(text, "manifest.json", size)
        parts = 0
        for entry in (each for each in manifest.tensors if each.shape):
            first, rows = _rows(entry.shape, 0, ranks)
            box = Box((first, *(0 for _ in entry.shape[1:])), (rows, *entry.shape[1:]))
            parts += sum(1 for _ in parts_in(entry.pieces, box))
        return parts

    reset_peak_rss()
    before = peak_rss()
    seconds, parts = timed(read)
    assert parts == 3 * len(shapes())
    return seconds, peak_rss() - before + len(text)


def ours(ranks: int) -> dict[str, Any]:
    """What the first rank does, until every rank knows what to write."""
    sent = outlines(ranks)
    reset_peak_rss()
    before = peak_rss()

    def plan() -> tuple[outline.Outlines, list[bytes], list[bytes]]:
        found = outline.Outlines([pickle.loads(each) for each in sent])
        shared = found.shared()
        held = found.states([bytes(8 * sum(map(int.bit_count, bits))) for bits in shared])
        check_alike(held, range(ranks))
        return found, shared, found.writers(lowest=False)

    seconds, (found, shared, answers) = timed(plan)
    peak = peak_rss() - before
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
        "peak": peak,
        "bytes": sum(map(len, [*sent, *shared, *answers])) + steps + written,
        "messages": 2 * _ROUNDS * (ranks - 1),
        "parts": parts,
        **committed(found, answers, ranks),
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
    columns += ["commit s", "read s", "read MiB", "torch's planner s", "MB of plans"]
    shown = Table("Planning a save of Llama 3 70B with AdamW, on the first rank", columns)
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
                f"{mine['manifest'] / 1e6:,.1f}",
                f"{mine['commit']:.2f}",
                f"{mine['read']:.2f}",
                f"{mine['read_peak'] / 2**20:,.0f}",
                *((f"{its['seconds']:.1f}", f"{its['bytes'] / 1e6:,.0f}") if its else ("", "")),
            ]
        )
    shown.notes.append(
        "seconds of the processor; MB: of plans, digests, answers, and what was written where; "
        "commit: making the manifest and reading it; read: parsing it, checking it and finding the "
        "parts of one rank, as every rank does that loads, with its peak of memory"
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

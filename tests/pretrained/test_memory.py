"""While it loads, a rank holds its shards and little else, and reads each byte once per host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwise
from tests.checkpoint.ranks.test_memory import extra_memory
from tests.harness import run_ranks
from tests.pretrained.small import save_llama

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("new_ranks"),
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(), reason="peaks come from Linux's /proc"
    ),
]

MIB = 2**20
EXTRA = 32 * MIB  # as promised; FACTOR times the shards beside it
FACTOR = 1.10
LARGE: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048}


def _read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def _loads(rank: int, world_size: int, folder: Path) -> tuple[int, int, int]:
    shardwise.from_pretrained(folder / "small")  # imports and groups are not counted
    models = []
    start = _read()
    extra = extra_memory(lambda: models.append(shardwise.from_pretrained(folder / "large")))
    read = _read() - start
    shards = 0
    for each in models[0].parameters():
        assert isinstance(each, DTensor)
        shards += each.to_local().nbytes
    return extra, shards, read


@pytest.mark.parametrize(
    ("dtype", "files"), [(torch.float32, "50GB"), (torch.bfloat16, "20MB")], ids=["fp32", "bf16"]
)
def test_peaks_and_reads(tmp_path: Path, dtype: torch.dtype, files: str) -> None:
    save_llama(tmp_path / "small", dtype=dtype)
    layers = 6 if dtype is torch.float32 else 16
    save_llama(
        tmp_path / "large",
        dtype=dtype,
        max_shard_size=files,
        num_hidden_layers=layers,
        **LARGE,
    )
    size = sum(each.stat().st_size for each in tmp_path.glob("large/*.safetensors"))
    found = run_ranks(_loads, 2, tmp_path)
    for extra, shards, _ in found:
        assert shards > 50 * MIB  # so that a second rank's would not fit
        assert extra <= FACTOR * shards + EXTRA
    assert 0.95 * size < sum(read for *_, read in found) < 1.05 * size

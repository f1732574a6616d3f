"""``generate`` of a sharded model gives what it gives on one process, with either runtime."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp

import shardwise
from tests.ecosystem.llama import tiny_llama, tokens
from tests.worlds import on_processes

SHARDS = {"shardwise": shardwise.fully_shard, "torch": torch.distributed.fsdp.fully_shard}


@pytest.mark.filterwarnings("ignore")
@on_processes(2)
def test_generates_what_one_process_generates(rank: int, world_size: int) -> None:
    plain: Any = tiny_llama().eval()
    given = tokens(world_size, 0)[rank]  # others on each rank
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    expected = plain.generate(given, **settings)
    for runtime, shard in SHARDS.items():
        model: Any = tiny_llama().eval()
        for block in model.model.layers:
            shard(block)
        shard(model)
        found = model.generate(given, synced_gpus=True, **settings)
        assert torch.equal(found, expected), runtime

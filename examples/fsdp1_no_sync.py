"""A script written for torch's FSDP1. Only the imports have changed.

    torchrun --standalone --nproc-per-node 2 examples/fsdp1_no_sync.py

Shows gradient accumulation under no_sync(), gradient clipping over all ranks, and a full state
dict of the model and the optimizer on rank 0.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise import (  # was: from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from shardwise import FullyShardedDataParallel as FSDP
from shardwise.wrap import (
    transformer_auto_wrap_policy,  # was: torch.distributed.fsdp.wrap
)

MICROBATCHES = 4


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)]
    model = FSDP(
        nn.Sequential(nn.Embedding(32, 16), *layers, nn.Linear(16, 32)),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=torch.device("cpu"),
        sync_module_states=True,  # every rank starts with rank 0's weights
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def backward() -> float:
        tokens = torch.randint(32, (8, 12))
        logits = model(tokens).float()
        successors = (tokens + 1) % 32
        loss = F.cross_entropy(logits.flatten(0, 1), successors.flatten()) / MICROBATCHES
        loss.backward()
        return loss.item()

    for step in range(30):
        with model.no_sync():
            loss = sum(backward() for _ in range(MICROBATCHES - 1))
        loss += backward()  # reduces everything accumulated so far
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.4f}, gradient norm {norm.item():.2f}")

    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ):
        state = model.state_dict()
        optimizer_state = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        states = len(optimizer_state["state"])
        print(f"gathered {len(state)} parameters and the optimizer state of {states}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Writes checkpoints with torch_xla: ``python make_torch_xla.py FOLDER KIND``.

Needs torch_xla 2.9.0 and torch 2.9.0; runs on CPUs. The ranks of FSDP are made in one process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "4" if sys.argv[2] == "spmd" else "1"
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from net import groups, trained
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Fsdp

#: Number of ranks and options of each kind.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "mixed": (3, {}),  # the inner module joins its parameters, the outer one does not
    "dim0": (3, {"shard_param_on_dim_0": True, "pin_layout_in_collective_ops": False}),
    "flat": (3, {"flatten_parameters": True}),
}


def fsdp(folder: Path, kind: str) -> None:
    world_size, options = KINDS[kind]
    model, _ = trained(scalar=kind != "dim0")
    torch.save(model.state_dict(), folder / f"{kind}_full.pt")
    for rank in range(world_size):
        model, _ = trained(scalar=kind != "dim0")
        same: dict[str, Any] = {
            "sharding_groups": [list(range(world_size))],
            "sharding_rank": rank,
            "sharding_world_size": world_size,
        }
        inner = {**options, "flatten_parameters": kind != "dim0"}
        model.mlp = Fsdp(model.mlp.to(torch_xla.device()), **same, **inner)  # type: ignore[assignment]
        sharded = Fsdp(model.to(torch_xla.device()), **same, **options)
        named = list(sharded.named_parameters())
        half = len(named) // 2
        optimizer = torch.optim.AdamW(
            [{"params": named[:half]}, {"params": named[half:], "lr": 0.02}], lr=0.01
        )
        for i, (_, param) in enumerate(named):
            torch.manual_seed(100 + 10 * i + rank)
            moments = [torch.rand(param.shape).to(param.device) for _ in range(2)]
            optimizer.state[param] = {
                "step": torch.tensor(2.0),
                "exp_avg": moments[0],
                "exp_avg_sq": moments[1],
            }
        state = {
            "model": sharded.state_dict(),
            "shard_metadata": sharded.get_shard_metadata(),
            "optimizer": optimizer.state_dict(),
        }
        path = folder / f"{kind}_rank-{rank:08d}-of-{world_size:08d}.pth"
        xm.save(state, str(path), master_only=False)


def whole(folder: Path) -> None:
    from torch_xla.utils import serialization

    model, optimizer = trained()
    full = {k: v.clone() for k, v in model.state_dict().items()}
    torch.save({"model": full, "optimizer": optimizer.state_dict()}, folder / "full.pt")
    model = model.to(torch_xla.device())
    xm.save({"model": model.state_dict(), "step": 2}, str(folder / "xm.pt"))
    serialization.save({"model": model.state_dict(), "step": 2}, str(folder / "xser.pt"))


def spmd(folder: Path) -> None:
    import numpy as np
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner, prime_optimizer

    xr.use_spmd()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29599"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    model, optimizer = trained()
    full = {k: v.clone() for k, v in model.state_dict().items()}
    torch.save({"model": full, "optimizer": optimizer.state_dict()}, folder / "full.pt")
    states = optimizer.state_dict()
    model = model.to(torch_xla.device())
    model.head.weight = model.emb.weight  # moving them has untied them
    count = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(count), (count,), ("fsdp",))
    for param in model.parameters():
        if param.dim() == 2:
            xs.mark_sharding(param, mesh, ("fsdp", None))
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    prime_optimizer(optimizer)
    with torch.no_grad():  # priming has decayed the weights
        for name, param in model.named_parameters():
            param.copy_(full[name])
    optimizer.load_state_dict(states)
    print(count, torch_xla._XLAC._get_xla_sharding_spec(model.emb.weight))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(folder / "dcp"),
        planner=SPMDSavePlanner(),
    )


folder, kind = Path(sys.argv[1]), sys.argv[2]
folder.mkdir(parents=True, exist_ok=True)
if kind in KINDS:
    fsdp(folder, kind)
else:
    {"whole": whole, "spmd": spmd}[kind](folder)

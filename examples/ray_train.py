"""One training function that runs on a Ray cluster and under torchrun, and resumes by itself.

    python examples/ray_train.py --workers 2 --out /shared/run
    torchrun --standalone --nproc-per-node 2 examples/ray_train.py --out run

--out is a folder that every host can see. Run it again with more --steps: it resumes from the last
checkpoint, on any number of ranks. Ray Train is an extra: pip install -e '.[ray]' in a clone.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import checkpoint, fully_shard


def train(config: dict) -> None:
    """Train on this rank. Ray has already made the process group; torchrun has not."""
    if not dist.is_initialized():
        dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    mesh = init_device_mesh(device, (ranks,))

    torch.manual_seed(0)  # every rank starts with the same weights
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
    model = nn.Sequential(*blocks).to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    folder, done = Path(config["out"]), 0
    newest = [checkpoint.latest(folder)]
    dist.broadcast_object_list(newest)  # rank 0 decides: others may see it later
    if newest[0] is not None:
        done = checkpoint.load(newest[0], model, optimizer)["step"]
    if rank == 0:
        print(f"{ranks} ranks, starting after step {done}", flush=True)
    for step in range(done + 1, config["steps"] + 1):
        torch.manual_seed(step)  # the same batch on any number of ranks
        x = torch.randn(128, 32).chunk(ranks)[rank].to(device)
        loss = F.mse_loss(model(x), x.roll(1, dims=1))  # the target is the input, shifted by one
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % config["every"] == 0:
            path = checkpoint.step_folder(folder, step)
            checkpoint.save(path, model, optimizer, {"step": step}, keep_last=2)
            dist.all_reduce(mean := loss.detach() / ranks)
            if rank == 0:
                print(f"step {step}: loss {mean.item():.4f}", flush=True)


def on_ray(config: dict, workers: int) -> None:
    """Train on workers of a Ray cluster. If some are lost, Ray restarts up to three times."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            storage_path=f"{config['out']}/ray",
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()


def main() -> None:
    """Train as a rank of torchrun, or ask Ray for workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="run", help="folder for checkpoints, visible to all hosts")
    parser.add_argument("--workers", type=int, default=2, help="ranks on Ray")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()
    out = Path(options.out).absolute()  # Ray's workers run in another folder
    config = {"out": str(out), "steps": options.steps, "every": options.every}
    if "RANK" in os.environ:
        train(config)
        dist.destroy_process_group()
    else:
        on_ray(config, options.workers)


if __name__ == "__main__":
    main()

"""A training of Shardwise's own on a Ray cluster, with the options of `shardwise train`.

    python examples/ray_recipe.py --workers 2 lm --model llama-34m --out /shared/run

Ray starts the workers, and restarts all of them up to three times if one is lost; they continue
from the last checkpoint. --out is a folder that every host can see. Ray Train is an extra:
pip install -e '.[ray,train]' in a clone.
"""

import argparse
import uuid

import torch


def worker(config: dict) -> None:
    """Train on this worker. Ray has already made the process group."""
    from shardwise.worker import train

    train(config["arguments"], config["job"])


def on_ray(arguments: list[str], workers: int) -> None:
    """Train on workers of a Ray cluster."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    use_gpu = torch.cuda.is_available()
    TorchTrainer(
        worker,
        # The id is the same after a restart: the run that is there is then this job's own.
        train_loop_config={"arguments": arguments, "job": uuid.uuid4().hex},
        # Small messages go through host memory, whatever the device.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


def main() -> None:
    """Read the number of workers, and hand the other options to the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of shardwise train")
    options = parser.parse_args()
    on_ray(options.arguments, options.workers)


if __name__ == "__main__":
    main()

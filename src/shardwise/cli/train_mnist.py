"""``shardwise train mnist``: options in, a configuration out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.cli import options
from shardwise.cli.grouped import grouped
from shardwise.cli.names import read_path
from shardwise.cli.run import run
from shardwise.recipes.core.config import Device, TrainConfig
from shardwise.recipes.core.job import Job
from shardwise.recipes.vision.config import MnistConfig

EXAMPLES = """
[bold]Examples[/bold]

Two processes; the folder has MNIST's four files, gzipped or not:
  [cyan]shardwise train mnist --data-dir mnist --nproc 2[/cyan]

Each convolution a unit of its own, activations computed twice:
  [cyan]shardwise train mnist --data-dir mnist --nproc 2 --use-nested-fsdp \\
    --use-gradient-checkpointing[/cyan]
"""


@grouped
def train_mnist(
    *,
    launch: options.Launch = options.Launch(),
    data_dir: Annotated[
        Path,
        Option(
            parser=read_path,
            metavar="PATH",
            help="Folder with MNIST's four IDX files.",
            rich_help_panel=options.MODEL,
        ),
    ],
    epochs: options.Epochs = 2,
    steps: options.MaxSteps = None,
    batch_size: options.PerRank = 64,
    accumulate: options.Accumulate = 1,
    optimizer: options.PictureAdamW = options.PictureAdamW(
        lr=5e-3, warmup=50, weight_decay=0.01, clip_grad=0.0
    ),
    seed: options.Seed = 0,
    device: options.OnDevice = Device.AUTO,
    use_nested_fsdp: Annotated[
        bool,
        Option(
            "--use-nested-fsdp",
            help="Shard each convolution block by itself, then the rest.",
            rich_help_panel=options.SHARD,
        ),
    ] = False,
    sharding: options.PictureSharding = options.PictureSharding(),
    output: options.Output = options.Output(out=Path("runs/mnist"), checkpoint_every=200),
) -> None:
    """Train a convolutional net on MNIST, sharded over processes.

    At the end the model is written as one safetensors file, loaded into a plain
    module, and judged again; a picture shows which digits it takes for which.
    """
    nodes = launch.nodes()
    config = MnistConfig(
        data_dir=data_dir,
        nested=use_nested_fsdp,
        train=TrainConfig(
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            accumulate=accumulate,
            seed=seed,
            device=device,
            peer_timeout=launch.peer_timeout,
            optimizer=optimizer.config(),
            sharding=sharding.config(nodes),
            output=output.config(),
        ),
    )
    run(Job(config), launch.nproc, nodes, launch.max_restarts)

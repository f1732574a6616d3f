"""``shardwise train imagenet``: options in, a configuration out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.cli import options
from shardwise.cli.grouped import grouped
from shardwise.cli.names import read_name
from shardwise.cli.run import run
from shardwise.recipes.core.config import Device, SgdConfig, TrainConfig
from shardwise.recipes.core.job import Job
from shardwise.recipes.vision.config import ImagenetConfig
from shardwise.recipes.vision.presets import RESNETS

EXAMPLES = """
[bold]Examples[/bold]

The published schedule, on 8 GPUs; the folder has train/CLASS/ and val/CLASS/:
  [cyan]shardwise train imagenet --data-dir imagenet --model resnet50 --nproc 8[/cyan]

A small net on pictures of your own, on two CPUs:
  [cyan]shardwise train imagenet --data-dir pictures --model resnet18 \\
    --image-size 96 --nproc 2 --batch-size 16 --lr 0.05 --epochs 20 \\
    --warmup-epochs 1[/cyan]

How fast it is without reading pictures:
  [cyan]shardwise train imagenet --fake-data --nproc 2 --batch-size 8 --steps 20[/cyan]
"""


@grouped
def train_imagenet(
    *,
    launch: options.Launch = options.Launch(),
    data_dir: options.PictureFolder = None,
    fake_data: options.FakeData = False,
    model: Annotated[
        str,
        Option(
            parser=read_name,
            metavar="NAME",
            help=f"{', '.join(RESNETS)}, or the path of a config.json of transformers.",
            rich_help_panel=options.MODEL,
        ),
    ] = "resnet50",
    image_size: Annotated[
        int, Option(help="Height and width that the model sees.", rich_help_panel=options.MODEL)
    ] = 224,
    workers: options.Workers = 4,
    epochs: options.Epochs = 100,
    steps: options.MaxSteps = None,
    batch_size: options.PerRank = 128,
    accumulate: options.Accumulate = 1,
    lr: options.PeakLr = 0.4,
    warmup_epochs: Annotated[
        float,
        Option(help="Epochs over which the learning rate rises.", rich_help_panel=options.STEP),
    ] = 5.0,
    lr_drop_epochs: Annotated[
        int,
        Option(
            help="Epochs from one drop of the learning rate to the next; 0: none.",
            rich_help_panel=options.STEP,
        ),
    ] = 30,
    lr_drop_factor: Annotated[
        float, Option(help="What it is divided by then.", rich_help_panel=options.STEP)
    ] = 10.0,
    momentum: Annotated[float, Option(help="Of SGD.", rich_help_panel=options.STEP)] = 0.9,
    weight_decay: Annotated[
        float, Option(help="On all parameters.", rich_help_panel=options.STEP)
    ] = 1e-4,
    clip_grad: options.ClipGrad = 0.0,
    seed: options.Seed = 0,
    device: options.OnDevice = Device.AUTO,
    sharding: options.PictureSharding = options.PictureSharding(),
    output: options.Output = options.Output(out=Path("runs/imagenet")),
) -> None:
    """Train a residual net on pictures in folders, sharded over processes.

    The defaults are ImageNet's published schedule for 1,024 pictures a step. At
    the end the model is written as one safetensors file, loaded into a plain
    module, and judged again.
    """
    nodes = launch.nodes()
    config = ImagenetConfig(
        data_dir=data_dir,
        fake_data=fake_data,
        model=model,
        image_size=image_size,
        warmup_epochs=warmup_epochs,
        drop_epochs=lr_drop_epochs,
        drop_factor=lr_drop_factor,
        threads=workers,
        train=TrainConfig(
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            accumulate=accumulate,
            seed=seed,
            device=device,
            peer_timeout=launch.peer_timeout,
            optimizer=SgdConfig(
                lr=lr, momentum=momentum, weight_decay=weight_decay, clip_grad=clip_grad
            ),
            sharding=sharding.config(nodes),
            output=output.config(),
        ),
    )
    run(Job(config), launch.nproc, nodes, launch.max_restarts)

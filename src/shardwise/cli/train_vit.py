"""``shardwise train vit``: options in, a configuration out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.cli import options
from shardwise.cli.grouped import grouped
from shardwise.cli.names import read_name
from shardwise.cli.run import run
from shardwise.recipes.core.config import Device, OptionError, TrainConfig, require
from shardwise.recipes.core.job import Job
from shardwise.recipes.vision.config import VitConfig, defaults_for, image_size_of
from shardwise.recipes.vision.presets import VIT_PRESETS

EXAMPLES = """
[bold]Examples[/bold]

Who would hold what of 10 billion parameters on 128 ranks, without training:
  [cyan]shardwise train vit --model vit-10b --dry-run --world-size 128[/cyan]

ImageNet, on 8 GPUs; the folder has train/CLASS/ and val/CLASS/:
  [cyan]shardwise train vit --data-dir imagenet --model vit-huge --nproc 8 \\
    --param-dtype bf16 --use-gradient-checkpointing[/cyan]

How fast it is without reading pictures, on two CPUs:
  [cyan]shardwise train vit --fake-data --nproc 2 --batch-size 4 --steps 10[/cyan]
"""


@grouped
def train_vit(
    *,
    launch: options.Launch = options.Launch(),
    data_dir: options.PictureFolder = None,
    fake_data: options.FakeData = False,
    model: Annotated[
        str,
        Option(
            parser=read_name,
            metavar="NAME",
            help=f"{', '.join(VIT_PRESETS)}, or the path of a config.json of transformers.",
            rich_help_panel=options.MODEL,
        ),
    ] = "vit-tiny",
    layers: Annotated[
        int | None,
        Option(
            help="Number of blocks.", rich_help_panel=options.MODEL, show_default=options.BY_MODEL
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        Option(
            help="Height and width that the model sees.",
            rich_help_panel=options.MODEL,
            show_default=options.BY_MODEL,
        ),
    ] = None,
    patch_size: Annotated[
        int | None,
        Option(
            help="Height and width of a patch.",
            rich_help_panel=options.MODEL,
            show_default=options.BY_MODEL,
        ),
    ] = None,
    workers: options.Workers = 4,
    epochs: options.Epochs = 300,
    steps: options.MaxSteps = None,
    batch_size: Annotated[
        int | None,
        Option(
            help="Pictures per rank and microbatch.",
            rich_help_panel=options.STEP,
            show_default=options.BY_MODEL,
        ),
    ] = None,
    accumulate: options.Accumulate = 1,
    optimizer: options.PictureAdamW = options.PictureAdamW(
        lr=1e-3, warmup=10_000, weight_decay=0.1, clip_grad=1.0
    ),
    seed: options.Seed = 0,
    device: options.OnDevice = Device.AUTO,
    no_nested_fsdp: Annotated[
        bool,
        Option(
            "--no-nested-fsdp",
            help="Shard the model as one group, not each block by itself.",
            rich_help_panel=options.SHARD,
        ),
    ] = False,
    sharding: options.PictureSharding = options.PictureSharding(),
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Show what every rank would hold, and end.",
            rich_help_panel=options.SHARD,
        ),
    ] = False,
    world_size: Annotated[
        int | None,
        Option(
            help="Ranks of the --dry-run.", rich_help_panel=options.SHARD, show_default="--nproc"
        ),
    ] = None,
    output: options.Output = options.Output(out=Path("runs/vit"), eval_every=10),
) -> None:
    """Train a Vision Transformer on pictures in folders, built block by block.

    Neither a host nor a device ever holds the model whole. The defaults are those
    of PyTorch/XLA's example with 10 billion parameters, for 1,024 pictures a
    step. At the end the model is written as one safetensors file, loaded into new
    shards, and judged again.
    """
    nodes = launch.nodes()
    config = VitConfig(
        data_dir=data_dir,
        fake_data=fake_data,
        model=model,
        layers=layers,
        image_size=image_size_of(model) if image_size is None else image_size,
        patch_size=patch_size,
        threads=workers,
        nested=not no_nested_fsdp,
        train=TrainConfig(
            epochs=epochs,
            steps=steps,
            batch_size=defaults_for(model).batch_size if batch_size is None else batch_size,
            accumulate=accumulate,
            seed=seed,
            device=device,
            peer_timeout=launch.peer_timeout,
            optimizer=optimizer.config(),
            sharding=sharding.config(nodes),
            output=output.config(),
        ),
    )
    if dry_run:
        expected = "none with --dry-run: say --world-size, and --replicas for hybrid strategies"
        require(nodes is None, "--nnodes", launch.nnodes, expected)
        given = launch.nproc if world_size is None else world_size
        _show_shares(config, 1 if given is None else given)
        return
    if world_size is not None:
        raise OptionError(
            "--world-size", f"{world_size} without --dry-run", "--nproc, or a world of torchrun"
        )
    run(Job(config), launch.nproc, nodes, launch.max_restarts)


def _show_shares(config: VitConfig, world_size: int) -> None:
    config.check_dry_run(world_size)
    from shardwise.recipes.vit import show_shares  # imports torch and transformers

    show_shares(config, world_size)

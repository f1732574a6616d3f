"""``shardwise train mnist``: options in, a configuration out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.cli import options
from shardwise.cli.run import run
from shardwise.frontends.strategies import Strategy
from shardwise.launch.hosts import Nodes, spans_hosts
from shardwise.recipes.config import (
    AdamWConfig,
    Device,
    OutputConfig,
    Precision,
    ShardingConfig,
    TrainConfig,
)
from shardwise.recipes.job import Job
from shardwise.recipes.mnist_config import MnistConfig

EXAMPLES = """
[bold]Examples[/bold]

Two processes; the folder has MNIST's four files, gzipped or not:
  [cyan]shardwise train mnist --data-dir mnist --nproc 2[/cyan]

Each convolution a unit of its own, activations computed twice:
  [cyan]shardwise train mnist --data-dir mnist --nproc 2 --use-nested-fsdp \\
    --use-gradient-checkpointing[/cyan]
"""


def train_mnist(
    *,
    nproc: options.Nproc = None,
    nnodes: options.Nnodes = None,
    node_rank: options.NodeRank = None,
    rdzv: options.Rdzv = None,
    rdzv_timeout: options.RdzvTimeout = 300.0,
    max_restarts: options.MaxRestarts = 0,
    peer_timeout: options.PeerTimeout = None,
    data_dir: Annotated[
        Path,
        Option(help="Folder with MNIST's four IDX files.", rich_help_panel=options.MODEL),
    ],
    epochs: options.Epochs = 2,
    steps: options.MaxSteps = None,
    batch_size: options.PerRank = 64,
    accumulate: options.Accumulate = 1,
    lr: options.PeakLr = 5e-3,
    warmup: Annotated[
        int,
        Option(
            help="Steps over which the learning rate rises; a cosine follows.",
            rich_help_panel=options.STEP,
        ),
    ] = 50,
    weight_decay: Annotated[
        float, Option(help="On weights, not on norms.", rich_help_panel=options.STEP)
    ] = 0.01,
    clip_grad: options.ClipGrad = 0.0,
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
    use_gradient_checkpointing: options.GradientCheckpointing = False,
    strategy: options.PictureStrategy = Strategy.FULL_SHARD,
    replicas: options.Replicas = None,
    mesh: options.MeshText = None,
    param_dtype: options.ParamDtype = Precision.FP32,
    reduce_dtype: options.ReduceDtype = Precision.FP32,
    transport: options.Transport = None,
    out: options.Out = Path("runs/mnist"),
    checkpoint_every: options.CheckpointEvery = 200,
    keep_last: options.KeepLast = 2,
    async_checkpoint: options.AsyncCheckpoint = False,
    eval_interval: options.EvalInterval = 1,
    tensorboard: options.Tensorboard = False,
    resume: options.Resume = False,
    auto_resume: options.AutoResume = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Train a convolutional net on MNIST, sharded over processes.

    At the end the model is written as one safetensors file, loaded into a plain
    module, and judged again; a picture shows which digits it takes for which.
    """
    nodes = Nodes.of(nnodes, node_rank, rdzv, rdzv_timeout)
    output = OutputConfig(
        out=out,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        async_checkpoint=async_checkpoint,
        eval_every=eval_interval,
        tensorboard=tensorboard,
    )
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
            peer_timeout=peer_timeout,
            optimizer=AdamWConfig(
                lr=lr,
                betas=(0.9, 0.999),
                weight_decay=weight_decay,
                warmup=warmup,
                clip_grad=clip_grad,
            ),
            sharding=ShardingConfig(
                strategy=strategy,
                replicas=replicas,
                over_hosts=spans_hosts(nodes),
                mesh=mesh,
                param_dtype=param_dtype,
                reduce_dtype=reduce_dtype,
                transport=transport,
                activation_checkpointing=use_gradient_checkpointing,
            ),
            output=options.Restart(resume, auto_resume, overwrite).of(output),
        ),
    )
    run(Job(config), nproc, nodes, max_restarts)

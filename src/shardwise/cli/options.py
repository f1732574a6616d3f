"""Options that every training has, said once, and what they become."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from shardwise.cli.names import read_path
from shardwise.frontends.strategies import Strategy
from shardwise.launch.hosts import Nodes, spans_hosts
from shardwise.recipes.core.config import (
    AdamWConfig,
    Device,
    Existing,
    OptionError,
    OutputConfig,
    Precision,
    ShardingConfig,
    TransportName,
)

MODEL, STEP, SHARD = "Model and data", "Training", "Sharding"
OUT = "Output and checkpoints"
BY_MODEL = "by model"

Nproc = Annotated[
    int | None,
    Option(
        help="Processes to start on this host. Under torchrun: none, the world is there.",
        show_default="1",
    ),
]
PictureFolder = Annotated[
    Path | None,
    Option(
        parser=read_path,
        metavar="PATH",
        help="Folder with train/CLASS/ and val/CLASS/.",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
FakeData = Annotated[
    bool, Option("--fake-data", help="Noise, to measure speed.", rich_help_panel=MODEL)
]
Workers = Annotated[
    int, Option(help="Threads that decode pictures, per rank.", rich_help_panel=MODEL)
]
_HOSTS = "Several hosts"
Nnodes = Annotated[
    str | None,
    Option(
        "--nnodes",
        metavar="N|MIN:MAX",
        help="Hosts of the job; run the same command on each, with its own --node-rank. MIN:MAX: "
        "begin with MIN or more; others may come later.",
        rich_help_panel=_HOSTS,
        show_default="1",
    ),
]
NodeRank = Annotated[
    int | None,
    Option(
        help="This host's number, from 0; with MIN:MAX only host 0 needs one.",
        rich_help_panel=_HOSTS,
        show_default=False,
    ),
]
Rdzv = Annotated[
    str | None,
    Option(
        metavar="HOST:PORT",
        help="An address of host 0, where the hosts meet; [ADDRESS]:PORT for IPv6.",
        rich_help_panel=_HOSTS,
        show_default=False,
    ),
]
RdzvTimeout = Annotated[
    float, Option(help="Seconds to wait for all hosts.", rich_help_panel=_HOSTS)
]
MaxRestarts = Annotated[
    int,
    Option(
        help="How often to begin again from the last checkpoint when a process or a host was "
        "lost, with the hosts that remain.",
        rich_help_panel=_HOSTS,
    ),
]
PeerTimeout = Annotated[
    float | None,
    Option(
        help="Seconds after which a process that does not answer in a collective is lost.",
        rich_help_panel=_HOSTS,
        show_default="torch's, 1800",
    ),
]
Accumulate = Annotated[
    int, Option(help="Microbatches per step; gradients are reduced once.", rich_help_panel=STEP)
]
Epochs = Annotated[int, Option(help="Epochs, from the beginning of the run.", rich_help_panel=STEP)]
MaxSteps = Annotated[
    int | None,
    Option(
        "--steps",
        help="End after so many optimizer steps, if that is before --epochs.",
        rich_help_panel=STEP,
        show_default=False,
    ),
]
PerRank = Annotated[int, Option(help="Pictures per rank and microbatch.", rich_help_panel=STEP)]
PeakLr = Annotated[float, Option(help="Peak learning rate.", rich_help_panel=STEP)]
Warmup = Annotated[
    int,
    Option(
        help="Steps over which the learning rate rises, at most half of all; a cosine follows.",
        rich_help_panel=STEP,
    ),
]
WeightDecay = Annotated[float, Option(help="On weights, not on norms.", rich_help_panel=STEP)]
ClipGrad = Annotated[float, Option(help="Largest gradient norm; 0: any.", rich_help_panel=STEP)]
Seed = Annotated[int, Option(help="Of initial weights and order of data.", rich_help_panel=STEP)]
OnDevice = Annotated[
    Device, Option(help="auto: GPUs if every rank can have one.", rich_help_panel=STEP)
]


def _strategy_option(known: Iterable[Strategy]) -> Any:
    names = ", ".join(strategy.value for strategy in known)
    return Option(metavar="NAME", help=f"What is sharded: {names}.", rich_help_panel=SHARD)


StrategyName = Annotated[Strategy, _strategy_option(Strategy)]
PictureStrategy = Annotated[
    Strategy, _strategy_option(each for each in Strategy if each is not Strategy.DILOCO)
]
Replicas = Annotated[
    int | None,
    Option(
        help="Hybrid strategies and diloco: copies of the model.",
        rich_help_panel=SHARD,
        show_default="one per host",
    ),
]
MeshText = Annotated[
    str | None,
    Option(
        help="The same as a mesh: dp_replicate=R,dp_shard=S.",
        rich_help_panel=SHARD,
        show_default=False,
    ),
]
ParamDtype = Annotated[
    Precision, Option(help="To compute in; shards stay fp32.", rich_help_panel=SHARD)
]
ReduceDtype = Annotated[Precision, Option(help="To reduce gradients in.", rich_help_panel=SHARD)]
ActivationCheckpointing = Annotated[
    bool,
    Option(
        "--activation-checkpointing",
        help="Compute activations again in backward instead of keeping them.",
        rich_help_panel=SHARD,
    ),
]
GradientCheckpointing = Annotated[
    bool,
    Option(
        "--use-gradient-checkpointing",
        help="Compute activations again in backward instead of keeping them.",
        rich_help_panel=SHARD,
    ),
]
Transport = Annotated[
    TransportName | None,
    Option(
        envvar="SHARDWISE_TRANSPORT",
        metavar="NAME",
        help=f"Who moves bytes between ranks: {', '.join(t.value for t in TransportName)}.",
        rich_help_panel=SHARD,
        show_default="auto",
    ),
]

Out = Annotated[
    Path,
    Option(parser=read_path, metavar="PATH", help="Folder of the run.", rich_help_panel=OUT),
]
CheckpointEvery = Annotated[
    int,
    Option(
        help="Steps between checkpoints; 0: only at the end or when stopped.",
        rich_help_panel=OUT,
    ),
]
AsyncCheckpoint = Annotated[
    bool,
    Option(
        "--async-checkpoint",
        help="Train on while a checkpoint is written; takes memory for a copy of every rank's "
        "shards and optimizer state.",
        rich_help_panel=OUT,
    ),
]
KeepLast = Annotated[int, Option(help="Checkpoints to keep.", rich_help_panel=OUT)]
EvalInterval = Annotated[
    int,
    Option(
        "--eval-interval",
        "--eval-every",
        help="Epochs between evaluations; 0: only at the end.",
        rich_help_panel=OUT,
    ),
]
Tensorboard = Annotated[
    bool, Option("--tensorboard", help="Write event files too.", rich_help_panel=OUT)
]
Resume = Annotated[
    bool,
    Option("--resume", help="Go on from the newest checkpoint in --out.", rich_help_panel=OUT),
]
AutoResume = Annotated[
    bool,
    Option(
        "--auto-resume",
        help="Go on if --out has checkpoints, else begin anew. For jobs that are "
        "started again by themselves.",
        rich_help_panel=OUT,
    ),
]
Overwrite = Annotated[
    bool, Option("--overwrite", help="Delete the run that is in --out.", rich_help_panel=OUT)
]


EvalEvery = Annotated[
    int,
    Option(
        help="Steps between looks at the validation loss; 0: only at the end.",
        rich_help_panel=OUT,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How many processes on how many hosts, and what becomes of lost ones."""

    nproc: Nproc = None
    nnodes: Nnodes = None
    node_rank: NodeRank = None
    rdzv: Rdzv = None
    rdzv_timeout: RdzvTimeout = 300.0
    max_restarts: MaxRestarts = 0
    peer_timeout: PeerTimeout = None

    def nodes(self) -> Nodes | None:
        """The hosts of the job; see :meth:`Nodes.of`."""
        return Nodes.of(self.nnodes, self.node_rank, self.rdzv, self.rdzv_timeout)


@dataclass(frozen=True, kw_only=True)
class PictureAdamW:
    """AdamW and its schedule, for trainings on pictures."""

    lr: PeakLr
    warmup: Warmup
    weight_decay: WeightDecay
    clip_grad: ClipGrad

    def config(self) -> AdamWConfig:
        """The configuration."""
        return AdamWConfig(
            lr=self.lr,
            betas=(0.9, 0.999),
            weight_decay=self.weight_decay,
            warmup=self.warmup,
            clip_grad=self.clip_grad,
        )


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the model is spread over ranks, and in which dtypes it computes."""

    strategy: StrategyName = Strategy.FULL_SHARD
    replicas: Replicas = None
    mesh: MeshText = None
    param_dtype: ParamDtype = Precision.FP32
    reduce_dtype: ReduceDtype = Precision.FP32
    activation_checkpointing: ActivationCheckpointing = False
    transport: Transport = None

    def config(self, nodes: Nodes | None) -> ShardingConfig:
        """The configuration of a job over these hosts."""
        return ShardingConfig(
            strategy=self.strategy,
            replicas=self.replicas,
            over_hosts=spans_hosts(nodes),
            mesh=self.mesh,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            transport=self.transport,
            activation_checkpointing=self.activation_checkpointing,
        )


@dataclass(frozen=True, kw_only=True)
class PictureSharding(Sharding):
    """The same for trainings on pictures."""

    strategy: PictureStrategy = Strategy.FULL_SHARD
    activation_checkpointing: GradientCheckpointing = False


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is kept, where, and what to do about a run that is there already."""

    out: Out
    checkpoint_every: CheckpointEvery = 1000
    keep_last: KeepLast = 2
    async_checkpoint: AsyncCheckpoint = False
    eval_every: EvalInterval = 1
    tensorboard: Tensorboard = False
    resume: Resume = False
    auto_resume: AutoResume = False
    overwrite: Overwrite = False

    def config(self) -> OutputConfig:
        """The configuration, with what is to be done about the run in ``out``.

        Raises:
            OptionError: the last three contradict each other.
        """
        return OutputConfig(
            out=self.out,
            checkpoint_every=self.checkpoint_every,
            keep_last=self.keep_last,
            async_checkpoint=self.async_checkpoint,
            eval_every=self.eval_every,
            tensorboard=self.tensorboard,
            existing=self._existing(),
        )

    def _existing(self) -> Existing:
        asked = {
            Existing.AUTO: self.auto_resume,
            Existing.RESUME: self.resume,
            Existing.OVERWRITE: self.overwrite,
        }
        chosen = [existing for existing, given in asked.items() if given]
        if len(chosen) > 1:
            first, second = (f"--{existing.value}" for existing in chosen[:2])
            raise OptionError(first, f"{second} too", "one of the two")
        return chosen[0] if chosen else Existing.REFUSE


@dataclass(frozen=True, kw_only=True)
class LmOutput(Output):
    """The same for a training that is counted in steps."""

    eval_every: EvalEvery = 100

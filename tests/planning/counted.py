"""Small trainings: what a rank really allocates and sends, and what its rehearsal says.

:func:`counted` trains, and counts what the runtime reports and what model and optimizer hold.
:func:`planned` rehearses the same. Both return values to compare.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from shardwise._torch import dtensor
from shardwise.base import observe
from shardwise.base.observe import Activity, Memory, Route
from shardwise.diloco.api import DiLoCo
from shardwise.diloco.state import KEY as DILOCO
from shardwise.frontends.blocks import shard_blocks
from shardwise.frontends.module import FSDPModule
from shardwise.frontends.strategies import REPLICATE, TENSOR, Strategy, WantedMesh
from shardwise.insight.blueprint import Blueprint, apply_tensor_parallelism
from shardwise.insight.planning.events import Start
from shardwise.insight.planning.memory import memory
from shardwise.insight.planning.models import of_module
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.planning.settings import Settings
from shardwise.insight.schema.training import DilocoConfig
from shardwise.optim.norms import clip_grad_norm_
from shardwise.pretrained.causal_lm import causal_lm_loss
from shardwise.pretrained.precision import keeping_float32
from shardwise.sharding.state import groups_of
from shardwise.transport.wire import PLAIN, Wires
from tests.corpus.instruments import run
from tests.corpus.models import MODELS, make_batch, make_model, one_by_one
from tests.harness import Processes, run_ranks
from tests.transport.encoded import on_host

#: The kinds whose bytes must be equal.
EXACT = (
    Memory.PARAMETERS,
    Memory.GRADIENTS,
    Memory.OPTIMIZER,
    Memory.FULL_PARAMETERS,
    Memory.TRANSPORT,
)

_STEPS = 8
#: How often each collective was called, by what it was.
Sent = Counter[tuple[str, str, int, str, int, int, str]]


@dataclass(frozen=True)
class Training:
    """A training of a random model, drawn from a seed.

    Attributes:
        seed: of the model.
        mesh: such as ``"dp=2,tp=2"``.
        strategy: what is sharded.
        transport: as for ``fully_shard``.
        param_dtype: of forward and backward.
        reduce_dtype: of reductions.
        optimizer: by name.
        accumulate: microbatches of a step.
        reshard_after_forward: in place of what the strategy says.
        wire: the formats of what is sent.
        per_host: how many ranks share a host; 0: all.
        diloco: how replicas exchange parameters, with that strategy.
    """

    seed: int
    mesh: str
    strategy: Strategy
    transport: str
    param_dtype: str | None
    reduce_dtype: str | None
    optimizer: str
    accumulate: int
    reshard_after_forward: bool | int | None = None
    wire: Wires = PLAIN
    per_host: int = 0
    diloco: DilocoConfig | None = None

    @classmethod
    def draw(
        cls, seed: int, world_size: int | None = None, transport: str | None = None
    ) -> Training:
        """Draw one, on 2 to 4 ranks."""
        draw = random.Random(seed)
        size = world_size or draw.choice([2, 3, 4])
        flat = [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.ZERO1, Strategy.NO_SHARD]
        mesh, strategy = f"dp={size}", draw.choice(flat)
        if size == 4:
            kind = draw.choice(["flat", "hybrid", "tensor"])
            if kind == "hybrid":
                mesh = "dp_replicate=2,dp_shard=2"
                strategy = draw.choice([Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2])
            elif kind == "tensor":
                mesh, strategy = "dp=2,tp=2", draw.choice(flat[:2])
        reshard: int | None = None
        if mesh == "dp=4" and strategy is Strategy.FULL_SHARD:
            reshard = 2
        return cls(
            seed=seed,
            mesh=mesh,
            strategy=strategy,
            transport=transport or draw.choice(["shm", "c10d", "collectives"]),
            param_dtype=draw.choice([None, "bf16"]),
            reduce_dtype=draw.choice([None, "fp32"]),
            optimizer=draw.choice(["adamw", "sgd", "sgd-momentum"]),
            accumulate=draw.choice([1, 1, 2]),
            reshard_after_forward=reshard,
        )

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return WantedMesh.parse(self.mesh).size

    @property
    def settings(self) -> Settings:
        """The same, for a plan."""
        width = self._width
        return Settings(
            mesh=WantedMesh.parse(self.mesh),
            strategy=self.strategy,
            batch_size=3,
            accumulate=self.accumulate,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            optimizer=self.optimizer,
            reshard_after_forward=self.reshard_after_forward,
            transport=self.transport,
            backend="fake" if self.transport == "collectives" else None,  # see counted()
            collective_wire=self.wire,
            ranks_per_host=self.per_host or None,
            diloco=self.diloco,
            batch=lambda size: torch.ones(size, width),
        )

    @property
    def _width(self) -> int:
        even = 2 if TENSOR in self.mesh else 1
        return even * random.Random(f"width {self.seed}").choice([5, 48, 301])

    def blueprint(self, device: str = "meta") -> Blueprint:
        """Build the model: uneven, with tied, frozen and scalar parameters."""
        draw = random.Random(f"model {self.seed}")
        width = self._width
        tensor_parallel = TENSOR in self.mesh
        with torch.device(device):
            hidden = [2 * draw.choice([7, 33, 700]) for _ in range(draw.choice([1, 2, 3]))]
            blocks = [Block(width, each) for each in hidden]
            model = nn.Sequential(*blocks, nn.Linear(width, draw.choice([1, 10, width])))
        frozen, tied = draw.random() < 0.3, draw.random() < 0.3 and not tensor_parallel
        if frozen:
            blocks[0].first.requires_grad_(False)
        if tied and len(blocks) > 1:
            blocks[1].scale = blocks[0].scale
        styles = {}
        if tensor_parallel:
            for i in range(len(blocks)):
                styles[f"{i}.first"] = ColwiseParallel()
                styles[f"{i}.second"] = RowwiseParallel()
        by_columns = draw.random() < 0.3 and self.reshard_after_forward is None
        return Blueprint(
            f"model {self.seed}",
            model,
            blocks,
            tensor_parallel=styles,
            placement=columns if by_columns and not tensor_parallel else None,
        )


@dataclass(frozen=True)
class CorpusTraining(Training):
    """A training of a model of the corpus.

    Attributes:
        name: of :data:`tests.corpus.models.MODELS`.
    """

    name: str = "net"

    @property
    def settings(self) -> Settings:
        """The same, for a plan."""
        return replace(super().settings, batch=self.batch, step=self.loss)

    def batch(self, size: int) -> Any:
        """Make what a rank sees, however many samples are asked for."""
        return make_batch(self.name, 0, 0, 0)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Compute the loss."""
        return MODELS[self.name].loss(model, *batch)

    def blueprint(self, device: str = "meta") -> Blueprint:
        """Build the model."""
        with torch.device(device):
            model = make_model(self.name)
        return Blueprint(self.name, model, one_by_one(MODELS[self.name].blocks(model)))


class LanguageTraining(Training):
    """A training of a small Llama, which tensor parallelism cuts as it does in plans."""

    @property
    def settings(self) -> Settings:
        """The same, for a plan."""
        return replace(
            super().settings,
            batch=lambda size: torch.arange(12 * size).view(size, 12) % 48,
            step=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
        )

    def blueprint(self, device: str = "meta") -> Blueprint:
        """Build the model."""
        return of_module(small_llama(48, device))


class WithoutLogits(LanguageTraining):
    """The same, with logits in chunks."""

    @property
    def settings(self) -> Settings:
        """The same, for a plan."""
        return replace(
            super().settings,
            step=lambda model, tokens: causal_lm_loss(model, tokens.roll(-1, 1), input_ids=tokens),
        )


class _Routed(nn.Module):
    """A block with a router that computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(24, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        odds = torch.softmax(x.float() @ self.gate.weight.float().t(), -1).to(x.dtype)
        each = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (each * odds[:, None]).sum(-1)


class _RoutedModel(PreTrainedModel):
    """Blocks whose routers ``transformers`` keeps in float32."""

    config_class = PreTrainedConfig
    _keep_in_fp32_modules_strict = ("gate.weight",)

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(_Routed() for _ in range(2))
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class RoutedTraining(Training):
    """A training in which some parameters compute in float32 beside others in bfloat16."""

    @property
    def settings(self) -> Settings:
        """The same, for a plan."""
        return replace(
            super().settings,
            batch=lambda size: torch.ones(size, 24),
            step=lambda model, x: model(x).float().square().mean(),
        )

    def blueprint(self, device: str = "meta") -> Blueprint:
        """Build the model."""
        with torch.device(device):
            model = _RoutedModel(PreTrainedConfig())
        return Blueprint("routed", model, list(model.blocks))


def columns(parameter: nn.Parameter) -> Shard | None:
    """Cut matrices along their columns."""
    return Shard(1) if parameter.ndim == 2 else None


class Block(nn.Module):
    """Two linear layers beside the input, and a scalar."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return x + self.second(torch.relu(self.first(x))) * self.scale


@dataclass
class Found:
    """What one rank had and did in one step.

    Attributes:
        most: the most bytes of each kind at once.
        sent: the calls of collectives.
    """

    most: dict[Memory, int] = field(default_factory=dict)
    sent: Sent = field(default_factory=Counter)


def planned(training: Training, rank: int) -> Found:
    """Rehearse a rank of a training."""
    log = rehearse(training.blueprint(), training.settings, rank)
    most = memory(log).most
    sent = Counter(
        (
            each.activity.value,
            each.dimension,
            each.ranks,
            each.group,
            each.nbytes,
            each.launches,
            each.transport,
        )
        for each in log.events
        if isinstance(each, Start) and each.dimension != TENSOR
    )
    return Found({kind: most.get(kind, 0) for kind in EXACT}, sent)


def counted(training: Training, looks: int = _STEPS) -> dict[int, Found]:
    """Train; return what the first and the last rank counted in their third step.

    Between them these have the most and the fewest rows. Plain collectives take the memory that
    torch gives them, and count the same whether others answer or not. So ranks that have nothing
    else are pretended. Those that exchange messages, or share memory, are processes.
    """
    size = training.world_size
    if training.transport == "collectives":
        found = run("pretended", count, size, training, looks=1)
    else:
        found = run_ranks(count, size, training, looks=looks, processes=Processes.NEW)
    return {0: found[0], size - 1: found[-1]}


class Counts:
    """An observer that counts."""

    def __init__(self) -> None:
        self.now: Counter[Memory] = Counter()
        self.most: Counter[Memory] = Counter()
        self.sent: Sent = Counter()
        self._number = 0

    def begin(self, activity: Activity, name: str, dimension: str, nbytes: int) -> int:
        """Count nothing."""
        return 1

    def collective(
        self, activity: Activity, name: str, wire: Route, nbytes: int, launches: int
    ) -> int:
        """Count a collective of the runtime; those of tensor parallelism are torch's."""
        if wire.dimension == TENSOR:
            return 1
        group = "" if name == "the root group" else name
        key = (activity.value, wire.dimension, wire.ranks, group, nbytes, launches, wire.transport)
        self.sent[key] += 1
        return 1

    def end(self, number: int) -> None:
        """Count nothing."""

    def memory(self, kind: Memory, name: str, nbytes: int) -> None:
        """Count memory."""
        self.now[kind] += nbytes
        self.most[kind] = max(self.most[kind], self.now[kind])

    def start(self) -> None:
        """Count from here on."""
        self.most = Counter(self.now)
        self.sent.clear()


def count(rank: int, world_size: int, training: Training, looks: int = _STEPS) -> Found:
    """Train on one rank, and count in the third step, or in as many ``looks`` from there on."""
    with on_host(rank, training.per_host) if training.per_host else nullcontext():
        return _count(training, looks)


def _count(training: Training, looks: int) -> Found:
    torch.manual_seed(0)
    counts = Counts()
    with observe.observing(counts):
        blueprint, settings = training.blueprint("cpu"), training.settings
        model, blocks = blueprint.model, blueprint.blocks
        world = settings.world
        mesh = init_device_mesh("cpu", world.shape, mesh_dim_names=world.names)
        plan = settings.sharding
        if TENSOR in world.names:
            apply_tensor_parallelism(model, mesh[TENSOR], blueprint.tensor_parallel)
        reshard = settings.reshard_after_forward
        shard_blocks(
            model,
            blocks,
            mesh=plan.sharding_mesh(mesh[plan.names] if TENSOR in world.names else mesh),
            reshard_after_forward=plan.reshard_after_forward if reshard is None else reshard,
            precision=keeping_float32(
                model,
                MixedPrecisionPolicy(
                    param_dtype=_dtype(settings.param_dtype),
                    reduce_dtype=_dtype(settings.reduce_dtype or settings.param_dtype),
                ),
            ),
            placement=blueprint.placement,
            transport=settings.transport,
            wire=settings.collective_wire.argument,
        )
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = {
            "adamw": lambda: torch.optim.AdamW(trained, fused=True),
            "sgd": lambda: torch.optim.SGD(trained),
            "sgd-momentum": lambda: torch.optim.SGD(trained, momentum=0.9),
        }[training.optimizer]()
        states: list[Any] = []
        if training.diloco is not None:
            apart = DiLoCo(
                model,
                optimizer,
                every=100,
                group=mesh[REPLICATE],
                error_feedback=training.diloco.keeps_errors,
            )
            states = [each[DILOCO] for each in apart.state_dict()["state"].values()]
        _step(model, settings, optimizer)
        _report_gradients_early(model)
        _step(model, settings, optimizer)
        most: list[Counter[Memory]] = []
        for _ in range(looks):
            counts.start()
            _step(model, settings, optimizer)
            most.append(counts.most)
    # Gloo's threads hold what a collective has read a little longer, in some steps.
    found = Found({kind: min(each[kind] for each in most) for kind in EXACT}, counts.sent)
    found.most[Memory.PARAMETERS] = held_by(list(model.parameters()))
    tensors = [each for state in (*states, *optimizer.state.values()) for each in state.values()]
    found.most[Memory.OPTIMIZER] = held_by([s for s in tensors if isinstance(s, torch.Tensor)])
    return found


def held_by(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages of some tensors, each counted once."""
    storages = [storage for each in tensors for storage in dtensor.storages_of(each)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _report_gradients_early(model: nn.Module) -> None:
    """Report full gradients as autograd makes them: the runtime does when it takes them."""

    def report(full: torch.Tensor) -> None:
        assert full.grad is not None
        observe.memory_of(Memory.GRADIENTS, "", dtensor.plain(full.grad))

    for group in groups_of(model):
        for param in group.params:
            if param.full is not None and param.full.requires_grad:
                param.full.register_post_accumulate_grad_hook(report)


def _step(model: nn.Module, settings: Settings, optimizer: torch.optim.Optimizer) -> None:
    """Take one step as trainings do."""
    assert isinstance(model, FSDPModule)
    assert settings.batch is not None
    for micro in range(settings.accumulate):
        if settings.accumulate > 1:
            model.set_requires_gradient_sync(micro == settings.accumulate - 1)
        batch = settings.batch(settings.batch_size)
        with loss_parallel() if TENSOR in settings.world.names else nullcontext():
            if callable(settings.step):
                loss = settings.step(model, batch)
            else:
                loss = model(batch).float().mean()
            (loss / settings.accumulate).backward()
        del loss
    if settings.clip_grad:
        clip_grad_norm_(list(model.parameters()), settings.clip_grad)
    optimizer.step()
    model.zero_grad()


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def small_llama(vocabulary: int, device: str = "meta") -> LlamaForCausalLM:
    """Build a Llama of one layer and a width of 32."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=1,
        num_attention_heads=4,
        use_cache=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)

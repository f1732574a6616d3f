"""The contenders: one class for each way to train the same model on several ranks.

All of them take one optimizer step on the mean of the ranks' gradients, with the same settings, but
for the floor, which computes a rank's share of that work and talks to nobody.

What ``bf16`` means is the same for all: fp32 parameters and optimizer state are what is kept,
forward and backward run in bf16, gradients are reduced and applied in fp32. The FSDPs have a policy
for it. DDP and the floor have none that works on the CPU, so they do it by hand: see
:class:`DistributedDataParallel` and :class:`Floor`. ``bf16-params`` means that there is nothing
else: parameters, gradients, their reduction and optimizer state are bf16.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from _models import build, groups, numel
from shardwise.frontends.strategies import Checkpointing, Strategy, WantedMesh
from shardwise.insight.planning.events import Log
from shardwise.insight.planning.models import of_module
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.planning.settings import Settings
from shardwise.insight.schema.sharding import PrecisionName

#: Losses that agree to four decimals differ by less.
FOUR_DECIMALS = 5e-5


@dataclass(frozen=True)
class Case:
    """One training to measure, the same for every contender.

    Attributes:
        ranks: world size.
        params: the model, a key of ``_models.PRESETS``.
        dtype: ``"fp32"``, ``"bf16"`` or ``"bf16-params"``, see the module's docstring.
        zero: 3 frees a group's parameters after its forward, 2 keeps them until its backward. DDP
            and the floor do not shard parameters and ignore it.
        tokens: on each rank, in each step.
        device: ``"cpu"`` or ``"cuda"``.
        seed: of weights and tokens.
        compiler: backend of ``torch.compile`` for each block; none if empty.
        recomputes: whether backward recomputes the activations of each block.
        offload: ``"pinned"`` or ``"pageable"`` host memory for shards; none if empty. DDP and the
            floor ignore it.
    """

    ranks: int
    params: str
    dtype: str = "fp32"
    zero: int = 3
    tokens: int = 256
    device: str = "cpu"
    seed: int = 0
    compiler: str = ""
    recomputes: bool = False
    offload: str = ""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return torch.float32 if self.dtype == "fp32" else torch.bfloat16

    @property
    def numel(self) -> int:
        """The number of the model's parameters."""
        return numel(self.params)

    def facts(self) -> dict[str, Any]:
        """Return the case for a document."""
        return {**asdict(self), "numel": self.numel}

    def rehearsed(self, mesh: str, strategy: Strategy) -> Log:
        """Rehearse a step on some ranks, sharded by a strategy."""
        settings = Settings(
            mesh=WantedMesh.parse(mesh),
            strategy=strategy,
            seq_length=self.tokens,
            param_dtype=None if self.dtype == "fp32" else PrecisionName.BF16,
            clip_grad=0.0,
            activation_checkpointing=Checkpointing.FULL if self.recomputes else Checkpointing.NONE,
            device_type=self.device,
        )
        return rehearse(of_module(build(self.params, self.seed, "meta")), settings)

    @classmethod
    def stored(cls, case: Mapping[str, Any]) -> Self:
        """Find the case among the raw numbers of a document, which may be older than a field."""
        return cls(**{name: case[name] for name in cls.__dataclass_fields__ if name in case})

    def label(self) -> str:
        """Name the case in a table's title."""
        ranks = f"{self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"
        parts = [f"{self.params} parameters", ranks, self.dtype, f"ZeRO-{self.zero}"]
        parts.append(f"{self.tokens} tokens a rank")
        parts += ["compiled"] * bool(self.compiler)
        parts += ["activation checkpointing"] * self.recomputes
        parts += [f"offload ({self.offload})"] * bool(self.offload)
        return ", ".join(parts)


class Contender(ABC):
    """A model and its optimizer on this rank, ready to train.

    Attributes:
        name: what the command line and the JSON call it.
        title: what tables call it.
        exchanges: whether ranks exchange gradients, so that the losses must agree.
        tolerance: by how much a loss may differ from that of the others.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    exchanges: ClassVar[bool] = True
    tolerance: ClassVar[float] = FOUR_DECIMALS

    model: Any
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def __init__(self, case: Case) -> None:
        """Build on this rank; the default process group exists."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute the loss of a batch of shape ``(1, tokens)``: an fp32 scalar."""
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Leave reduced gradients where the optimizer looks for them."""
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Take the optimizer's step and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Take a whole step, and wait for no device; return the loss."""
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        return loss.detach()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of every contender: torch's fused AdamW.

    Fused is the fastest that torch has, on the CPU too, and makes no temporaries: what is left of
    a step's time and memory is then the contender's own.
    """
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _model(case: Case) -> Any:
    model: Any = build(case.params, case.seed, case.device)
    if case.dtype == "bf16-params":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    layers = model.model.layers
    for index, layer in enumerate(layers):
        if case.recomputes:
            layers[index] = checkpoint_wrapper(layer)
        if case.compiler:
            layers[index].compile(backend=case.compiler)
    return model


class ByModule(Contender):
    """What ours and FSDP2 have in common: ``fully_shard`` called bottom-up with one signature."""

    def __init__(self, case: Case) -> None:
        fully_shard, policy_class = self.api()
        policy = policy_class()
        options: dict[str, Any] = {}
        if case.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=case.offload == "pinned")
        if case.dtype == "bf16":
            policy = policy_class(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = _model(case)
        mesh = self.mesh(case)
        options |= {"mesh": mesh, "mp_policy": policy, **self.options()}
        *inner, last = groups(model)
        for group in inner:
            fully_shard(group[0], reshard_after_forward=self.reshard(case), **options)
        # The last group computes again at once: to free it in between would only cost a gather.
        fully_shard(last, reshard_after_forward=False, **options)
        fully_shard(model, **options)
        self.model = model
        self.optimizer = make_optimizer(model.parameters())

    def mesh(self, case: Case) -> DeviceMesh:
        """Make the mesh to shard over: all ranks, in one dimension."""
        return init_device_mesh(case.device, (case.ranks,), mesh_dim_names=("shard",))

    def options(self) -> dict[str, Any]:
        """Return what ``fully_shard`` gets besides."""
        return {}

    def reshard(self, case: Case) -> bool | int:
        """Return ``reshard_after_forward`` of all groups but the last."""
        return case.zero == 3

    @staticmethod
    @abstractmethod
    def api() -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return ``fully_shard`` and ``MixedPrecisionPolicy``."""


class Ours(ByModule):
    """``shardwise.fully_shard``."""

    name = "ours"
    title = "shardwise"

    @staticmethod
    def api() -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the package's own."""
        from shardwise import MixedPrecisionPolicy, fully_shard

        return fully_shard, MixedPrecisionPolicy


class OursAhead(Ours):
    """The same, and forward gathers one group ahead, as trainings have it over a network."""

    name = "ours-ahead"
    title = "shardwise, ahead"

    def __init__(self, case: Case) -> None:
        from shardwise.sharding.state import gather_in_order

        super().__init__(case)
        gather_in_order(self.model)


class OwnOrder(Ours):
    """The same, and ranks may run different modules; here all run the same."""

    name = "own-order"
    title = "shardwise, own order"

    def options(self) -> dict[str, Any]:
        """Ask for it."""
        return {"order": "own"}


class OwnOrderHalf(OwnOrder):
    """The same, and the last rank runs every second layer."""

    name = "own-order-half"
    title = "shardwise, own order, half"
    tolerance = float("inf")  # what it computes is its own

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if dist.get_rank() == case.ranks - 1:
            self.model.model.layers.__class__ = _EverySecond


class _EverySecond(nn.ModuleList):
    """Layers, of which a model that takes a slice gets every second."""

    def __getitem__(self, index: Any) -> Any:
        return [*self][index][::2] if isinstance(index, slice) else super().__getitem__(index)


class FSDP2(ByModule):
    """``torch.distributed.fsdp.fully_shard``."""

    name = "fsdp2"
    title = "torch FSDP2"

    @staticmethod
    def api() -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return torch's."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        return fully_shard, MixedPrecisionPolicy


class OursInBackward(Ours):
    """The same as ours, and groups step in backward."""

    name = "ours-in-backward"
    title = "shardwise, in backward"

    def __init__(self, case: Case) -> None:
        from shardwise.optim import in_backward

        super().__init__(case)
        self.optimizer = in_backward(self.model, make_optimizer)

    def update(self) -> None:
        """Do nothing: backward has stepped, and dropped the gradients."""


class DistributedDataParallel(Contender):
    """``torch.nn.parallel.DistributedDataParallel``: whole parameters on every rank.

    In bf16 the model that computes is bf16 and each parameter has an fp32 master, which the
    optimizer steps; a communication hook widens each bucket and all-reduces it in fp32, as the
    FSDPs' policy reduces.
    """

    name = "ddp"
    title = "torch DDP"

    def __init__(self, case: Case) -> None:
        model = _model(case)
        self.parameters = list(model.parameters())
        self.masters = narrow(self.parameters) if case.dtype == "bf16" else None
        self.reduced: dict[nn.Parameter, torch.Tensor] = {}
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.masters is not None:
            ddp.register_comm_hook(self, _all_reduce_wide)
        self.model = ddp
        self.optimizer = make_optimizer(self.parameters if self.masters is None else self.masters)

    def update(self) -> None:
        """Step, in bf16 on the masters, and write what they became back into the model."""
        if self.masters is None:
            super().update()
            return
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = self.reduced.pop(parameter)
            parameter.grad = None
        super().update()
        with torch.no_grad():
            torch._foreach_copy_([*self.parameters], [*self.masters])


def narrow(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Turn parameters into bf16, in place, and return their fp32 masters.

    Parameters only: rotary embeddings keep their fp32 buffers, as under the FSDPs' policies.
    """
    masters = [nn.Parameter(p.detach().clone()) for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()
    return masters


def _all_reduce_wide(
    ddp: DistributedDataParallel,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # missing from torch's stubs
) -> torch.futures.Future[torch.Tensor]:
    """Average a bf16 bucket in fp32, and keep the fp32 result for the masters."""
    narrow = bucket.buffer()
    wide = narrow.float().div_(dist.get_world_size())
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        start = gradient.storage_offset() - narrow.storage_offset()
        view = wide[start : start + gradient.numel()].view_as(gradient)
        ddp.reduced[parameter] = view
    done: torch.futures.Future[torch.Tensor] = dist.all_reduce(wide, async_op=True).get_future()
    return done.then(lambda _: narrow)


class Floor(Contender):
    """Compute only: an unsharded forward and backward, and the step on this rank's rows.

    No communication, so what it trains is of no use; no contender that computes the same can take
    less time, unless it computes better. In bf16 this rank's rows have fp32 masters, and only
    these rows are cast.
    """

    name = "floor"
    title = "compute only"
    exchanges = False

    def __init__(self, case: Case) -> None:
        self.model = _model(case)
        self.parameters = list(self.model.parameters())
        self.rows = [_rows_of_rank(p, dist.get_rank(), case.ranks) for p in self.parameters]
        self.narrow = case.dtype == "bf16"
        own = [p.detach()[rows] for p, rows in zip(self.parameters, self.rows, strict=True)]
        if self.narrow:
            own = [rows.clone() for rows in own]
            for parameter in self.parameters:
                parameter.data = parameter.data.bfloat16()
        self.shards = [nn.Parameter(rows) for rows in own]
        self.optimizer = make_optimizer(self.shards)

    def update(self) -> None:
        """Step on the shards, which are views of the parameters in fp32 and masters in bf16."""
        for parameter, rows, shard in zip(self.parameters, self.rows, self.shards, strict=True):
            if parameter.grad is not None:
                shard.grad = parameter.grad[rows].to(shard.dtype)
            parameter.grad = None
        super().update()
        if self.narrow:
            own = [p.detach()[rows] for p, rows in zip(self.parameters, self.rows, strict=True)]
            with torch.no_grad():
                torch._foreach_copy_(own, [*self.shards])


class Copies(Floor):
    """The floor, and the copies without which no rank of a host has full parameters.

    A rank writes its rows where others read them, before each group's forward and, under ZeRO-3,
    before its backward; it lays out its peers' rows of each gradient, and adds what a peer has laid
    out to its own. Nobody waits for anybody, no memory is mapped or freed, and what is read are the
    rank's own numbers. So this is what a sharded step in shared memory cannot go below, in fp32.
    """

    name = "copies"
    title = "compute and copies"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._laid_out: dict[nn.Parameter, torch.Tensor] = {}
        self._ranks = case.ranks
        for modules in groups(self.model):
            owned = [p for module in modules for p in module.parameters()]
            rows = [_rows_of_rank(p, dist.get_rank(), case.ranks) for p in owned]
            pairs = [
                (torch.empty_like(p)[own].detach(), p.detach()[own])
                for p, own in zip(owned, rows, strict=True)
            ]
            modules[0].register_forward_pre_hook(_copying(pairs))
            if case.zero == 3:
                modules[-1].register_forward_hook(_before_backward(_copying(pairs)))
            for parameter, own in zip(owned, rows, strict=True):
                self._laid_out[parameter] = torch.zeros_like(parameter)
                reduce = self._reducing(own)
                parameter.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]

    def _reducing(self, own: slice) -> Callable[[torch.Tensor], None]:
        def reduce(parameter: torch.Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            assert parameter.grad is not None
            gradient, laid_out = parameter.grad, self._laid_out[parameter]
            for others in (slice(0, own.start), slice(own.stop, None)):
                torch.mul(gradient[others], 1 / self._ranks, out=laid_out[others])
            gradient[own].mul_(1 / self._ranks)
            for _ in range(self._ranks - 1):
                gradient[own].add_(laid_out[own])

        return reduce


class Messages(Floor):
    """The floor, and the messages without which no rank has full parameters or sums.

    A rank sends its rows to each peer before each group's forward and, under ZeRO-3, before its
    backward; and each peer its rows of each gradient. Nobody waits before the end of the step, and
    what arrives is not used. So this is what a sharded step over messages cannot go below, in fp32.
    """

    name = "messages"
    title = "compute and messages"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        rank = dist.get_rank()
        self._peers = [each for each in range(case.ranks) if each != rank]
        self._under_way: list[dist.Work] = []
        for modules in groups(self.model):
            owned = [p for module in modules for p in module.parameters()]
            of = {
                p: [_rows_of_rank(p, each, case.ranks) for each in range(case.ranks)] for p in owned
            }
            sent = [p.detach()[of[p][rank]] for p in owned]
            fulls = [torch.zeros_like(p).detach() for p in owned]
            landing = {
                peer: [full[of[p][peer]] for p, full in zip(owned, fulls, strict=True)]
                for peer in self._peers
            }
            gather = self._exchanging(dict.fromkeys(self._peers, sent), landing)
            modules[0].register_forward_pre_hook(gather)
            if case.zero == 3:
                modules[-1].register_forward_hook(_before_backward(gather))
            for parameter in owned:
                reduce = self._reducing(of[parameter], rank)
                parameter.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]

    def _exchanging(
        self, sent: dict[int, list[torch.Tensor]], landing: dict[int, list[torch.Tensor]]
    ) -> Callable[..., None]:
        def exchange(*_: object) -> None:
            for post, tensors in ((dist.isend, sent), (dist.irecv, landing)):
                for peer in self._peers:
                    for tensor in filter(torch.Tensor.numel, tensors[peer]):
                        work = post(tensor, peer)
                        assert work is not None
                        self._under_way.append(work)

        return exchange

    def _reducing(self, rows: list[slice], rank: int) -> Callable[[torch.Tensor], None]:
        def reduce(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            sent = {peer: [gradient[rows[peer]]] for peer in self._peers}
            landing = {peer: [torch.empty_like(gradient[rows[rank]])] for peer in self._peers}
            self._exchanging(sent, landing)()

        return reduce

    def update(self) -> None:
        """Wait for all messages, and step."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()
        super().update()


def _copying(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., None]:
    def copy(*_: object) -> None:
        for where, rows in pairs:
            where.copy_(rows)

    return copy


def _before_backward(copy: Callable[..., None]) -> Callable[..., None]:
    def mark(module: nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor]) -> None:
        first = output if isinstance(output, torch.Tensor) else output[0]
        first.register_hook(copy)  # type: ignore[no-untyped-call]

    return mark


def _rows_of_rank(parameter: nn.Parameter, rank: int, ranks: int) -> slice:
    """Return the rows that ``Shard(0)`` gives to a rank."""
    rows = parameter.shape[0]
    chunk = -(-rows // ranks)
    return slice(min(rank * chunk, rows), min((rank + 1) * chunk, rows))


CONTENDERS: dict[str, type[Contender]] = {
    contender.name: contender
    for contender in (
        *(Ours, OursAhead, OursInBackward, OwnOrder, OwnOrderHalf, FSDP2),
        *(DistributedDataParallel, Floor, Copies, Messages),
    )
}
#: What tables call them.
TITLES = {name: contender.title for name, contender in CONTENDERS.items()}

"""Right programs, as they are often written: an audit finds nothing in them, and changes nothing.

Each gets a way to shard, torch's ``fully_shard`` or ours, and returns a model and what makes one
step of it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES = 6, 5

Shard = Callable[..., Any]
Step = Callable[[], Any]
Program = Callable[[Shard], tuple[nn.Module, Step]]


class Block(nn.Module):
    """A residual block with dropout and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, *, tied: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.recomputes = recomputes
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def build(shard: Shard, model: Net | None = None, **options: Any) -> Any:
    """Build the model, and shard it."""
    torch.manual_seed(0)
    model = model or Net()
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)
    torch.manual_seed(dist.get_rank())
    return model


def loss_of(model: nn.Module) -> Tensor:
    """Compute a loss on another batch each time."""
    tokens = torch.randint(CLASSES, (3, 4))
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1).flatten())


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Program:
    """Return a training with an optimizer, and options of ``fully_shard``."""

    def program(shard: Shard) -> tuple[nn.Module, Step]:
        model = build(shard, **options)
        optimizer = make(model.parameters())

        def step() -> None:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return program


def clipping(norm_type: float = 2.0, foreach: bool | None = None) -> Program:
    """Return a training that clips, and logs the norm."""

    def program(shard: Shard) -> tuple[nn.Module, Step]:
        model = build(shard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step() -> float:
            loss = loss_of(model)
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type, False, foreach)
            optimizer.step()
            optimizer.zero_grad()
            assert math.isfinite(loss.item())
            return float(norm.full_tensor())

        return model, step

    return program


def accumulation_and_schedule(shard: Shard) -> tuple[nn.Module, Step]:
    """Accumulate over microbatches; warm up, then decay."""
    model = build(shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [2])

    def step() -> None:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            (loss_of(model) / 2).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return model, step


def ema_by_hand(shard: Shard) -> tuple[nn.Module, Step]:
    """Keep an average of the weights, as most programs write it."""
    model, train = with_optimizer(torch.optim.AdamW)(shard)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step() -> None:
        train()
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].mul_(0.9).add_(p, alpha=0.1)
                average[name].lerp_(p, 0.1)

    return model, step


def ema_of_torch(shard: Shard) -> tuple[nn.Module, Step]:
    """Keep an average of the weights by torch's function for it, sharded like the model."""
    model, train = with_optimizer(torch.optim.AdamW)(shard)
    average, update = build(shard), get_ema_multi_avg_fn(0.9)

    def step() -> None:
        train()
        update([*average.parameters()], [*model.parameters()], torch.tensor(1))

    return model, step


def loss_scaling(shard: Shard) -> tuple[nn.Module, Step]:
    """Scale the loss, as for float16."""
    model = build(shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step() -> None:
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return model, step


def adapters(shard: Shard) -> tuple[nn.Module, Step]:
    """Train small adapters beside frozen weights, and merge them into a full tensor."""

    class Adapted(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.base = linear.requires_grad_(False)
            self.a, self.b = nn.Linear(linear.in_features, 2, False), nn.Linear(2, 10, False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        block.up = Adapted(block.up)
    model = build(shard, net)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        for block in model.blocks:
            up = block.up
            up.base.weight.full_tensor() + up.b.weight.full_tensor() @ up.a.weight.full_tensor()

    return model, step


def penalty_on_full_tensors(shard: Shard) -> tuple[nn.Module, Step]:
    """Pull parameters to zero in the loss."""
    model = build(shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        penalty = sum(p.full_tensor().square().sum() for p in model.parameters())
        (loss_of(model) + 1e-3 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def statistics(shard: Shard) -> tuple[nn.Module, Step]:
    """Log norms, means and shares of zeros of parameters and gradients."""
    model = build(shard)

    def step() -> list[float]:
        loss_of(model).backward()
        logged = []
        for p in model.parameters():
            for each in (p.detach(), p.grad):
                assert isinstance(each, DTensor)
                values = each.norm(), each.mean(), each.std(), each.abs().amax()
                logged += [value.full_tensor().item() for value in values]
                logged.append(each.full_tensor().eq(0).double().mean().item())
        model.zero_grad()
        return logged

    return model, step


def writes(shard: Shard) -> tuple[nn.Module, Step]:
    """Change parameters between steps: whole, by masks, and by columns that ranks hold whole."""
    model = build(shard)

    def step() -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9).clamp_(-1, 1)
                p.masked_fill_(p.abs() < 0.01, 0.0)
                p.add_(torch.sign(p), alpha=0.01)
            weight = model.head.weight
            weight[:, 1].zero_()
            weight.t()[2].fill_(0.5)
            weight.view_as(weight).neg_()
            weight.to_local().abs_()
            whole = weight.full_tensor()
            whole[0] = 1.0
            weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements))

    return model, step


def state_dicts(shard: Shard) -> tuple[nn.Module, Step]:
    """Save and load in memory."""
    model = build(shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        get_model_state_dict(model)

    return model, step


def freezing(shard: Shard) -> tuple[nn.Module, Step]:
    """Thaw one more block each step, and evaluate in between."""
    model = build(shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.requires_grad_(False)
    order = itertools.cycle([model.head, model.blocks[1], model.blocks[0]])

    def step() -> float:
        next(order).requires_grad_(True)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            loss = loss_of(model).item()
            model.train()
            model.reshard()
        return loss

    return model, step


def with_tensor_parallelism(shard: Shard) -> tuple[nn.Module, Step]:
    """Cut blocks by tensor parallelism, then by FSDP, on one mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    build(shard, model, mesh=mesh["dp"])
    torch.manual_seed(0)  # ranks that share activations drop the same
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def hooks(shard: Shard) -> tuple[nn.Module, Step]:
    """Look at gradients in hooks, and step in one of them."""
    model = build(shard)
    seen: list[Any] = []
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_one(p: Tensor) -> None:
        seen.append(p.grad)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_one)

    def step() -> int:
        loss_of(model).backward()
        return len(seen)

    return model, step


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

PROGRAMS: dict[str, Program] = {
    "AdamW": with_optimizer(torch.optim.AdamW),
    "AdamW, one by one": with_optimizer(lambda p: torch.optim.AdamW(p, foreach=False)),
    "AdamW, fused": with_optimizer(lambda p: torch.optim.AdamW(p, fused=True)),
    "AdamW, amsgrad": with_optimizer(lambda p: torch.optim.AdamW(p, amsgrad=True, maximize=True)),
    "SGD": with_optimizer(lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1)),
    "RMSprop": with_optimizer(lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True)),
    "Adagrad": with_optimizer(lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "Adamax": with_optimizer(lambda p: torch.optim.Adamax(p, lr=0.1)),
    "NAdam": with_optimizer(lambda p: torch.optim.NAdam(p, lr=0.1)),
    "ZeRO-2": with_optimizer(torch.optim.AdamW, reshard_after_forward=False),
    "bfloat16": with_optimizer(torch.optim.AdamW, mp_policy=BF16),
    "offloading": with_optimizer(torch.optim.AdamW, offload_policy=CPUOffloadPolicy(False)),
    "clipping": clipping(),
    "clipping, one by one": clipping(foreach=False),
    "clipping by the largest": clipping(math.inf),
    "accumulation, schedule": accumulation_and_schedule,
    "EMA by hand": ema_by_hand,
    "EMA by torch": ema_of_torch,
    "GradScaler": loss_scaling,
    "LoRA": adapters,
    "tied": lambda shard: _trained(build(shard, Net(tied=True))),
    "checkpointing": lambda shard: _trained(build(shard, Net(recomputes=True))),
    "penalty": penalty_on_full_tensors,
    "statistics": statistics,
    "writes": writes,
    "state dicts": state_dicts,
    "freezing": freezing,
    "tensor parallelism": with_tensor_parallelism,
    "hooks": hooks,
}


def _trained(model: nn.Module) -> tuple[nn.Module, Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step

"""The same training twice: unsharded on one process, and sharded over ranks.

The reference computes each rank's gradients one after the other and averages them, in the order
of ranks. That is data parallelism by definition; a sharded run has to arrive at the same numbers,
through whichever of :data:`DOORS` the model is sharded, and whatever its ranks run on.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from shardwise import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    XlaFullyShardedDataParallel,
    checkpoint_module,
    clip_grad_norm_,
    fully_shard,
    materialize,
)
from shardwise._torch.fsdp import REDUCES_AS_STORED
from shardwise.frontends.blocks import shard_blocks
from shardwise.sharding.state import groups_of, state_of
from shardwise.sharding.states import GroupState
from shardwise.wrap import CustomPolicy
from tests.corpus.collectives import customize
from tests.corpus.gathering import (
    Part,
    gather,
    in_full,
    part_of,
    parts_of_optimizer_state,
    parts_of_parameters,
)
from tests.corpus.models import MODELS, Batch, make_batch, make_model, one_by_one

#: The second step is of parameters and states that the first has made.
STEPS = 2


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to shard: the mesh's shape for a world size, and ``reshard_after_forward``."""

    mesh_shape: tuple[int | None, ...]  # None is what is left of the world
    reshard_after_forward: bool | int
    of_fsdp: ShardingStrategy

    def mesh(self, world_size: int, device_type: str = "cpu") -> DeviceMesh:
        """Make the mesh over all ranks."""
        known = [size for size in self.mesh_shape if size is not None]
        rest = world_size // functools.reduce(lambda a, b: a * b, known, 1)
        shape = tuple(rest if size is None else size for size in self.mesh_shape)
        names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
        return init_device_mesh(device_type, shape, mesh_dim_names=names)


STRATEGIES = {
    "full-shard": Strategy((None,), True, ShardingStrategy.FULL_SHARD),
    "shard-grad-op": Strategy((None,), False, ShardingStrategy.SHARD_GRAD_OP),
    "no-shard": Strategy((None, 1), False, ShardingStrategy.NO_SHARD),
    "hybrid": Strategy((2, None), True, ShardingStrategy.HYBRID_SHARD),
    "hybrid-zero2": Strategy((2, None), False, ShardingStrategy._HYBRID_SHARD_ZERO2),
    "one-replica": Strategy((1, None), True, ShardingStrategy.HYBRID_SHARD),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        door: how the model is sharded: a name of :data:`DOORS`.
        dtype: of the parameters as stored.
        param_dtype: to compute in; ``None`` is ``dtype``.
        reduce_dtype: to add gradients up in; ``None`` is torch's default.
        microbatches: in each step, over which gradients accumulate.
        sync_every: reduce gradients after every microbatch, not only after the last.
        max_norm: clip gradients to it.
        evaluates: look at the loss without gradients before each step.
    """

    model: str
    strategy: str = "full-shard"
    optimizer: str = "adamw"
    door: str = "fully_shard"
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    microbatches: int = 1
    sync_every: bool = True
    max_norm: float | None = None
    evaluates: bool = False

    @property
    def reduces_in(self) -> torch.dtype:
        """The dtype in which gradients are added up.

        By default that of forward and backward; of FSDP2 from torch 2.15 on, that of shards.
        """
        as_stored = REDUCES_AS_STORED and not self.door.startswith("wrapper")
        default = self.dtype if as_stored else self.param_dtype
        return self.reduce_dtype or default or self.dtype

    def __str__(self) -> str:
        changed = [
            f"{field.name}={value}".replace("torch.", "")
            for field in dataclasses.fields(self)[2:]
            if (value := getattr(self, field.name)) != field.default
        ]
        return " ".join([self.model, self.strategy, *changed])


@dataclasses.dataclass
class History:
    """What a training went through: per step, and the optimizer's state at the end.

    Every tensor is whole; losses, and those of evaluations, are those of all ranks,
    ``(world_size,)``. A parameter without gradient has the gradient ``None``.
    """

    evaluations: list[Tensor] = dataclasses.field(default_factory=list)
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = dataclasses.field(default_factory=list)
    norms: list[Tensor] = dataclasses.field(default_factory=list)
    parameters: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    optimizer: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict)


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of a case, with the settings that all cases share."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


# ---- doors ----

#: ``door(model, blocks, mesh, case)``: shard a model, with the blocks as groups.
Door = Callable[[nn.Module, list[Any], DeviceMesh, Case], nn.Module]


def _by_hand(
    *,
    before: Callable[[list[Any]], object] | None = None,
    after: Callable[[nn.Module], object] | None = None,
    **more: Any,
) -> Door:
    """Apply ``fully_shard`` bottom-up.

    Args:
        before: is given the blocks first.
        after: is given the sharded model.
        more: arguments of ``fully_shard``.
    """

    def door(model: nn.Module, blocks: list[Any], mesh: DeviceMesh, case: Case) -> nn.Module:
        options = {
            "mesh": mesh,
            "reshard_after_forward": STRATEGIES[case.strategy].reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(case.param_dtype, case.reduce_dtype),
            **more,
        }
        if before is not None:
            before(blocks)
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        if after is not None:
            after(model)
        return model

    return door


def _recompute(blocks: list[Any]) -> None:
    for block in blocks:
        checkpoint_module(block)


def _gather_ahead(model: nn.Module) -> None:
    """Have each block gather the next one in forward, and the one before in backward."""
    blocks = [module for module in model.modules() if isinstance(module, FSDPModule)][1:]
    for this, following in itertools.pairwise(blocks):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])


def _from_meta(model: nn.Module, blocks: list[Any], mesh: DeviceMesh, case: Case) -> nn.Module:
    """Shard a model on the meta device, and give its modules their values one by one."""
    values = copy.deepcopy(model)
    model = _by_hand()(model.to("meta"), blocks, mesh, case)
    of = dict(zip(model.modules(), values.modules(), strict=True))

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    tensor.copy_(getattr(of[module], name))

    return materialize(model, init=fill)


def _as_trainings_do(
    model: nn.Module, blocks: list[Any], mesh: DeviceMesh, case: Case
) -> nn.Module:
    shard_blocks(
        model,
        one_by_one(blocks),
        mesh=mesh,
        reshard_after_forward=STRATEGIES[case.strategy].reshard_after_forward,
        precision=MixedPrecisionPolicy(case.param_dtype, case.reduce_dtype),
    )
    return model


def _wrapped(**more: Any) -> Door:
    def door(model: nn.Module, blocks: list[Any], mesh: DeviceMesh, case: Case) -> nn.Module:
        precision = MixedPrecision(case.param_dtype, case.reduce_dtype, cast_forward_inputs=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return FullyShardedDataParallel(
                model,
                device_mesh=mesh,
                sharding_strategy=STRATEGIES[case.strategy].of_fsdp,
                mixed_precision=precision,
                auto_wrap_policy=_only(blocks),
                **more,
            )

    return door


def _wrapped_for_xla(
    model: nn.Module, blocks: list[Any], mesh: DeviceMesh, case: Case
) -> nn.Module:
    return XlaFullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        reshard_after_forward=STRATEGIES[case.strategy].reshard_after_forward,
        compute_dtype=case.param_dtype,
        fp32_reduce_scatter=case.reduce_dtype is torch.float32,
        auto_wrap_policy=_only(blocks),
    )


def _recomputing(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    return FullyShardedDataParallel(checkpoint_module(module), *args, **kwargs)


def _only(blocks: list[Any]) -> CustomPolicy:
    chosen = one_by_one(blocks)
    return CustomPolicy(lambda module: any(module is each for each in chosen))


DOORS: dict[str, Door] = {
    "fully_shard": _by_hand(),
    "fully_shard, offloaded": _by_hand(offload_policy=CPUOffloadPolicy()),
    "fully_shard, collectives": _by_hand(transport="collectives"),
    "fully_shard, pageable": _by_hand(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fully_shard, recomputing": _by_hand(before=_recompute),
    "fully_shard, ahead": _by_hand(after=_gather_ahead),
    "fully_shard, custom collectives": _by_hand(after=customize),
    "fully_shard, from meta": _from_meta,
    "fully_shard, by columns": _by_hand(
        shard_placement_fn=lambda param: Shard(param.ndim - 1) if param.ndim else None
    ),
    "shard_blocks": _as_trainings_do,
    "wrapper": _wrapped(),
    "wrapper, offloaded": _wrapped(cpu_offload=CPUOffload(offload_params=True)),
    "wrapper, nothing ahead": _wrapped(backward_prefetch=None),
    "wrapper, ahead in forward": _wrapped(forward_prefetch=True),
    "wrapper, kept": _wrapped(reshard_after_forward=False),
    "wrapper, freed": _wrapped(reshard_after_forward=True),
    "wrapper, recomputing": _wrapped(auto_wrapper_callable=_recomputing),
    "wrapper, rank 0's values": _wrapped(sync_module_states=True),
    "wrapper, collectives": _wrapped(transport="collectives"),
    "wrapper for XLA": _wrapped_for_xla,
}


# ---- sharded ----


def make_sharded(
    case: Case, world_size: int, *, seed: int = 0, device_type: str = "cpu"
) -> nn.Module:
    """Build a case's model and shard it the case's way over all ranks."""
    model = make_model(case.model, seed=seed).to(case.dtype)
    mesh = STRATEGIES[case.strategy].mesh(world_size, device_type)
    blocks = MODELS[case.model].blocks(model)
    sharded = DOORS[case.door](model, blocks, mesh, case)
    assert all(state_of(block) is not None for block in one_by_one(blocks)), "a block has no group"
    return sharded


def train_sharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    rank: int,
    steps: Iterable[int] = range(STEPS),
) -> History:
    """Train a sharded model on this rank's batches."""
    return History(**gather(vars(train_in_parts(model, optimizer, case, rank, steps))))


def train_in_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    rank: int,
    steps: Iterable[int] = range(STEPS),
) -> History:
    """Train as :func:`train_sharded` does, but return this rank's parts of the history."""
    history = History()
    world = torch.Size([dist.get_world_size()])
    for step in steps:
        loss = torch.zeros((), dtype=case.dtype)
        if case.evaluates:
            with torch.no_grad():
                seen = _loss(case, model, make_batch(case.model, rank, step, 0))
            history.evaluations.append(Part(seen[None].cpu(), (rank,), world))
        for microbatch in range(case.microbatches):
            is_last = microbatch == case.microbatches - 1
            with _reducing(model, case.sync_every or is_last):
                part = _loss(case, model, make_batch(case.model, rank, step, microbatch))
                part.backward()
            loss += part.detach().cpu()
            if not (case.sync_every or is_last):
                assert all(p.grad is None for p in model.parameters()), "reduced too early"
        _assert_at_rest(model)
        history.losses.append(Part(loss[None], (rank,), world))
        history.gradients.append(
            {name: part_of(parameter.grad) for name, parameter in model.named_parameters()}
        )
        if case.max_norm is not None:
            norm = _clip(model, case.max_norm)
            norm = in_full(norm).cpu()
            history.norms.append(Part(norm, (), norm.shape))
        optimizer.step()
        optimizer.zero_grad()
        history.parameters.append(parts_of_parameters(model))
    history.optimizer = parts_of_optimizer_state(model, optimizer)
    return history


@contextlib.contextmanager
def _reducing(model: nn.Module, now: bool) -> Iterator[None]:
    """Say whether backwards reduce gradients, as programs say it to what they have."""
    if isinstance(model, FullyShardedDataParallel):
        with contextlib.nullcontext() if now else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(now)
        yield


def _clip(model: nn.Module, max_norm: float) -> Tensor:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)
    return clip_grad_norm_(model.parameters(), max_norm)


def _assert_at_rest(model: nn.Module) -> None:
    """After a backward nothing is whole any more, or under way."""
    for group in groups_of(model):
        assert group.state is GroupState.SHARDED, f"{group.params[0].fqn}: {group.state}"
    for module in model.modules():
        state = state_of(module)
        assert state is None or state.root.forward_root is None, "a forward that has not ended"


def sharded_trainings(rank: int, world_size: int, cases: Sequence[Case]) -> list[History]:
    """Be one rank of every case in turn; return this rank's parts of each case's history."""
    histories = []
    for case in cases:
        with naming(case):
            model = make_sharded(case, world_size)
            optimizer = make_optimizer(case.optimizer, model.parameters())
            histories.append(train_in_parts(model, optimizer, case, rank))
    return histories


@contextlib.contextmanager
def naming(case: Case) -> Iterator[None]:
    """Tell in an exception which case it comes from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case: {case}")
        raise


# ---- the reference ----


def reference_training(case: Case, world_size: int, device_type: str = "cpu") -> History:
    """Train unsharded on what ``world_size`` ranks would see.

    Strategy and door make no difference.
    """
    case = dataclasses.replace(case, strategy="", door="")
    return _reference_training(case, world_size, device_type)


@functools.cache
def _reference_training(case: Case, world_size: int, device_type: str) -> History:
    model, working = (make_model(case.model).to(device_type, case.dtype) for _ in range(2))
    optimizer = make_optimizer(case.optimizer, model.parameters())
    history = History()
    for step in range(STEPS):
        if case.evaluates:
            with torch.no_grad():
                of_step = [make_batch(case.model, rank, step, 0) for rank in range(world_size)]
                seen = [_loss(case, model, batch, cast_inputs=True) for batch in of_step]
            history.evaluations.append(torch.stack(seen).cpu())
        per_rank = [
            _reference_microbatches(case, model, working, rank, step) for rank in range(world_size)
        ]
        for name, parameter in model.named_parameters():
            parameter.grad = _combine(case, [gradients[name] for _, gradients in per_rank])
        gradients = {name: part_of(parameter.grad) for name, parameter in model.named_parameters()}
        if case.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            history.norms.append(norm.cpu())
        optimizer.step()
        history.losses.append(torch.stack([loss for loss, _ in per_rank]))
        history.gradients.append(gradients)
        history.parameters.append(parts_of_parameters(model))
    history.optimizer = parts_of_optimizer_state(model, optimizer)
    return history


def _reference_microbatches(
    case: Case, model: nn.Module, working: nn.Module, rank: int, step: int
) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
    """Return a rank's loss, and per parameter the gradients of its microbatches.

    ``working`` is another such model, to compute with in another dtype.
    """
    for own, parameter in zip(working.parameters(), model.parameters(), strict=True):
        own.data = parameter.data.to(case.param_dtype or case.dtype)
    loss = torch.zeros((), dtype=case.dtype)
    gradients: dict[str, list[Tensor | None]] = {name: [] for name, _ in model.named_parameters()}
    for microbatch in range(case.microbatches):
        working.zero_grad()
        batch = make_batch(case.model, rank, step, microbatch)
        part = _loss(case, working, batch, cast_inputs=True)
        part.backward()
        loss += part.detach().cpu()
        for name, parameter in working.named_parameters():
            gradients[name].append(parameter.grad)
    return loss, gradients


def _combine(case: Case, per_rank: list[list[Tensor | None]]) -> Tensor | None:
    """Average over ranks what was summed over microbatches, or sum the averages."""
    if all(gradient is None for gradients in per_rank for gradient in gradients):
        return None
    converted = [[gradient.to(case.reduces_in) for gradient in gradients] for gradients in per_rank]
    if case.sync_every:
        averages = [_sum(ranks) / len(per_rank) for ranks in zip(*converted, strict=True)]
        return _sum([average.to(case.dtype) for average in averages])
    total = _sum([_sum(gradients) for gradients in converted])
    return (total / len(per_rank)).to(case.dtype)


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


def _loss(case: Case, model: nn.Module, batch: Batch, *, cast_inputs: bool = False) -> Tensor:
    """Compute a microbatch's part of the step's mean loss."""
    device = next(model.buffers(), next(model.parameters())).device
    batch = tuple(
        part.to(device, case.dtype) if part.is_floating_point() else part.to(device)
        for part in batch
    )
    if cast_inputs and case.param_dtype is not None:  # as the mixed precision policy would
        first, *others = batch
        batch = (first.to(case.param_dtype) if first.is_floating_point() else first, *others)
    return MODELS[case.model].loss(model, *batch) / case.microbatches


# ---- comparison ----


def check_trainings(
    rank: int,
    world_size: int,
    cases: Sequence[Case],
    device_type: str,
    rtol: float | None = None,
    atol: float = 0.0,
) -> None:
    """Train every case on this rank, and unsharded on the same device; compare."""
    for case in cases:
        with naming(case):
            model = make_sharded(case, world_size, device_type=device_type)
            optimizer = make_optimizer(case.optimizer, model.parameters())
            found = train_sharded(model, optimizer, case, rank)
            expected = reference_training(case, world_size, device_type)
            assert_same_history(found, expected, rtol=rtol, atol=atol)


def assert_same_history(
    actual: History, expected: History, *, rtol: float | None, atol: float = 0.0
) -> None:
    """Compare two trainings, step by step; the first difference is told with its name.

    Args:
        rtol: relative tolerance; ``None`` asks for equality bit for bit.
        atol: absolute tolerance beside it.
    """
    compare = functools.partial(_assert_close, rtol=rtol, atol=atol)
    assert len(actual.losses) == len(expected.losses)
    for step in range(len(expected.losses)):
        where = f"step {step}"
        if expected.evaluations:
            compare(actual.evaluations[step], expected.evaluations[step], where=f"{where}: seen")
        compare(actual.losses[step], expected.losses[step], where=f"{where}: loss")
        _compare_named(
            actual.gradients[step], expected.gradients[step], f"{where}: gradient of", compare
        )
        if expected.norms:
            compare(actual.norms[step], expected.norms[step], where=f"{where}: gradient norm")
        _compare_named(actual.parameters[step], expected.parameters[step], where, compare)
    assert actual.optimizer.keys() == expected.optimizer.keys(), "optimizer state"
    for name, state in expected.optimizer.items():
        _compare_named(actual.optimizer[name], state, f"optimizer state of {name}:", compare)


def _compare_named(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    where: str,
    compare: Any,
) -> None:
    assert list(actual) == list(expected), where
    for name, value in expected.items():
        found = actual[name]
        if value is None:
            assert found is None or not found.any(), f"{where} {name}: expected none"
            continue
        assert found is not None, f"{where} {name}: there is none"
        compare(found, value, where=f"{where} {name}")


def _assert_close(
    actual: Tensor, expected: Tensor, *, where: str, rtol: float | None, atol: float
) -> None:
    assert actual.dtype == expected.dtype, f"{where}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{where}: {actual.shape} instead of {expected.shape}"
    if rtol is not None:
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}"
        )
    elif not torch.equal(actual, expected):
        differ = (actual != expected).nonzero()
        first = tuple(differ[0].tolist())
        raise AssertionError(
            f"{where}: {len(differ)} of {actual.numel()} elements are not the same bit for bit; "
            f"the first, at {list(first)}, is {actual[first].item()!r} "
            f"instead of {expected[first].item()!r}"
        )

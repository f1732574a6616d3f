"""The same training twice: unsharded on one process, and sharded over ranks.

The reference computes each rank's gradients one after the other and averages them, in the order
of ranks. That is data parallelism by definition; a sharded run has to arrive at the same numbers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from shardwise._torch.fsdp import REDUCES_AS_STORED
from tests.parity.gathering import (
    Part,
    gather,
    part_of,
    parts_of_optimizer_state,
    parts_of_parameters,
)
from tests.parity.models import MODELS, Batch, make_batch, make_model

#: The second step is of parameters and states that the first has made.
STEPS = 2


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to shard: the mesh's shape for a world size, and ``reshard_after_forward``."""

    mesh_shape: tuple[int | None, ...]  # None is what is left of the world
    reshard_after_forward: bool | int

    def mesh(self, world_size: int) -> DeviceMesh:
        """Make the mesh over all ranks."""
        known = [size for size in self.mesh_shape if size is not None]
        rest = world_size // functools.reduce(lambda a, b: a * b, known, 1)
        shape = tuple(rest if size is None else size for size in self.mesh_shape)
        names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
        return init_device_mesh("cpu", shape, mesh_dim_names=names)


STRATEGIES = {
    "full-shard": Strategy((None,), True),
    "shard-grad-op": Strategy((None,), False),
    "no-shard": Strategy((None, 1), False),
    "hybrid": Strategy((2, None), True),
    "hybrid-zero2": Strategy((2, None), False),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        dtype: of the parameters as stored.
        param_dtype: to compute in; ``None`` is ``dtype``.
        reduce_dtype: to add gradients up in; ``None`` is torch's default.
        microbatches: in each step, over which gradients accumulate.
        sync_every: reduce gradients after every microbatch, not only after the last.
        max_norm: clip gradients to it.
    """

    model: str
    strategy: str = "full-shard"
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    microbatches: int = 1
    sync_every: bool = True
    max_norm: float | None = None

    @property
    def reduces_in(self) -> torch.dtype:
        """The dtype in which gradients are added up: from torch 2.15 on as stored by default."""
        default = self.dtype if REDUCES_AS_STORED else self.param_dtype
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

    Every tensor is whole; losses are those of all ranks, ``(world_size,)``. A parameter without
    gradient has the gradient ``None``.
    """

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


# ---- sharded ----


def shard(model: nn.Module, name: str, **options: Any) -> nn.Module:
    """Shard a model of :data:`MODELS` bottom-up: its blocks, then the root."""
    for block in MODELS[name].blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def make_sharded(case: Case, world_size: int, *, seed: int = 0) -> nn.Module:
    """Build a case's model and shard it the case's way over all ranks."""
    strategy = STRATEGIES[case.strategy]
    return shard(
        make_model(case.model, seed=seed).to(case.dtype),
        case.model,
        mesh=strategy.mesh(world_size),
        reshard_after_forward=strategy.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=case.param_dtype, reduce_dtype=case.reduce_dtype
        ),
    )


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
    for step in steps:
        loss = torch.zeros((), dtype=case.dtype)
        for microbatch in range(case.microbatches):
            is_last = microbatch == case.microbatches - 1
            model.set_requires_gradient_sync(case.sync_every or is_last)
            part = _loss(case, model, make_batch(case.model, rank, step, microbatch))
            part.backward()
            loss += part.detach()
        history.losses.append(Part(loss[None], (rank,), torch.Size([dist.get_world_size()])))
        history.gradients.append(
            {name: part_of(parameter.grad) for name, parameter in model.named_parameters()}
        )
        if case.max_norm is not None:
            norm = clip_grad_norm_(model.parameters(), case.max_norm)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            history.norms.append(Part(norm, (), norm.shape))
        optimizer.step()
        optimizer.zero_grad()
        history.parameters.append(parts_of_parameters(model))
    history.optimizer = parts_of_optimizer_state(model, optimizer)
    return history


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


def reference_training(case: Case, world_size: int) -> History:
    """Train unsharded on what ``world_size`` ranks would see; the strategy makes no difference."""
    return _reference_training(dataclasses.replace(case, strategy="none"), world_size)


@functools.cache
def _reference_training(case: Case, world_size: int) -> History:
    model = make_model(case.model).to(case.dtype)
    working = copy.deepcopy(model)
    optimizer = make_optimizer(case.optimizer, model.parameters())
    history = History()
    for step in range(STEPS):
        per_rank = [
            _reference_microbatches(case, model, working, rank, step) for rank in range(world_size)
        ]
        for name, parameter in model.named_parameters():
            parameter.grad = _combine(case, [gradients[name] for _, gradients in per_rank])
        gradients = {name: part_of(parameter.grad) for name, parameter in model.named_parameters()}
        if case.max_norm is not None:
            history.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm))
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

    ``working`` is a copy of the model, to compute with in another dtype.
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
        loss += part.detach()
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
    batch = tuple(part.to(case.dtype) if part.is_floating_point() else part for part in batch)
    if cast_inputs and case.param_dtype is not None:  # as the mixed precision policy would
        first, *others = batch
        batch = (first.to(case.param_dtype) if first.is_floating_point() else first, *others)
    return MODELS[case.model].loss(model, *batch) / case.microbatches


# ---- comparison ----


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

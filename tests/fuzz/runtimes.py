"""What a program can run on: nothing, torch's FSDP2, or ours over each transport.

The program is written once; these say which ``fully_shard`` it means, and what a data parallel
step without any is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import shardwise
from tests.fuzz.models import FuzzModel, unwrap
from tests.fuzz.program import Program
from tests.fuzz.trace import cut

TRANSPORTS = ("shm", "c10d", "collectives")

#: What computes with values as they are gathered, and which groups it gathers for backward. One
#: that is not freed after forward may keep its values or, where they were written to, not.
GATHERED = {"gathered": "freed", "gathered anew": "all"}


class PartedError(Exception):
    """The ranks have parted: no step of all of them together has a meaning any more."""


class Runtime(Protocol):
    """What a program can run on."""

    def shard(self, model: FuzzModel, program: Program) -> None:
        """Shard a model as the program says."""

    def backward(self, loss: torch.Tensor, params: list[nn.Parameter], graph: str) -> None:
        """Go back from a loss, and average gradients if they are to be."""

    def sync(self, model: nn.Module, to: str) -> None:
        """Switch the reduction of gradients."""

    def average_now(self, param: nn.Parameter) -> bool:
        """Make the gradient in a hook that of a data parallel step, if there is to be one."""

    def own_rows(self, param: torch.Tensor, rank: int) -> tuple[torch.Tensor, int]:
        """Find the rows of a rank, as a view to write to, and the number of the first one.

        None of them, where they lie on another rank.
        """

    def after_failed_backward(self, model: nn.Module) -> None:
        """Tidy up as a user of this runtime has to."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Take this rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Unsharded:
    """The program as it is without sharding, with gradients averaged over ranks."""

    def __init__(self) -> None:
        self._shards = 1
        self._world = dist.get_world_size()
        self._columns = False
        self._syncs = True
        self._waiting: dict[nn.Parameter, torch.Tensor] = {}
        self.parted = False

    def shard(self, model: FuzzModel, program: Program) -> None:
        self._note_cut(program)
        if program.precision:
            _compute_apart(model, program, torch.bfloat16, "none")

    def backward(self, loss: torch.Tensor, params: list[nn.Parameter], graph: str) -> None:
        before = {param: param.grad for param in params}
        for param in params:
            param.grad = None
        try:
            loss.backward(retain_graph=graph == "retain")
        except BaseException:
            self._waiting.clear()
            raise
        for param in params:
            if param.grad is not None:
                waiting = self._waiting.get(param)
                self._waiting[param] = param.grad if waiting is None else waiting + param.grad
            param.grad = before[param]
        if not self._syncs:
            return
        averaged = self._average(list(self._waiting.values()))
        for param, grad in zip(list(self._waiting), averaged, strict=True):
            param.grad = grad if param.grad is None else param.grad.add_(grad)
        self._waiting.clear()

    def sync(self, model: nn.Module, to: str) -> None:
        self._syncs = to == "on"

    def average_now(self, param: nn.Parameter) -> bool:
        if not self._syncs or param.grad is None:
            return False
        waiting = self._waiting.pop(param, None)
        grad = param.grad if waiting is None else waiting + param.grad
        param.grad = self._average([grad])[0]
        return True

    def own_rows(self, param: torch.Tensor, rank: int) -> tuple[torch.Tensor, int]:
        if not param.ndim:
            return param.detach().new_empty(0), 0
        dim = 1 if self._columns and param.ndim > 1 else 0
        index = rank % self._shards
        rows = cut(param.detach(), (dim, self._shards, index))
        step = -(-param.shape[dim] // self._shards)
        return rows.movedim(dim, 0), index * step

    def after_failed_backward(self, model: nn.Module) -> None:
        pass

    def _note_cut(self, program: Program) -> None:
        self._shards = program.shards
        self._columns = "columns" in program.traits

    def _average(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.parted:
            raise PartedError
        if not grads:
            return []
        flat = torch.cat([grad.detach().flatten() for grad in grads])
        dist.all_reduce(flat)
        parts = (flat / self._world).split([grad.numel() for grad in grads])
        return [part.view_as(grad).clone() for part, grad in zip(parts, grads, strict=True)]


class Gathered(Unsharded):
    """The program without sharding, but with values gathered when a group's turn comes.

    What a hook writes to a block that has begun reaches its backward, or the next forward, as it
    does where shards are written to and the block computes with what was gathered of them. What is
    written to the latter is there afterwards.

    Args:
        again: ``freed`` groups are gathered again for backward, or ``all`` of them.
    """

    def __init__(self, again: str) -> None:
        super().__init__()
        self._again = again

    def shard(self, model: FuzzModel, program: Program) -> None:
        self._note_cut(program)
        dtype = torch.bfloat16 if program.precision else None
        _compute_apart(model, program, dtype, self._again)


def _compute_apart(
    model: FuzzModel, program: Program, dtype: torch.dtype | None, again: str
) -> None:
    """Let the modules that are sharded together compute with copies of their parameters."""
    for modules, reshard in groups_of(model, program):
        # Freed after forward, and so gathered again: the default, but for the root.
        freed = reshard == "true" or (reshard == "none" and modules[0] is not model)
        for module in modules:
            module.fuzz_copies = _Copies(dtype, again == "all" or (again == "freed" and freed))  # type: ignore[assignment]
            module.register_forward_pre_hook(_copy_in, prepend=True, with_kwargs=True)
            module.register_forward_hook(_copy_out, always_call=True)


@dataclasses.dataclass
class _Copies:
    dtype: torch.dtype | None
    refreshes: bool
    made: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]] = dataclasses.field(
        default_factory=list
    )


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not hasattr(child, "fuzz_copies"):
            yield from _owners(child)


def _copy_in(module: nn.Module, args: Any, kwargs: Any) -> Any:
    copies: Any = module.fuzz_copies
    for owner in _owners(module):
        for name, param in owner._parameters.items():
            if param is not None:
                copies.made.append((owner, name, param, param.detach().clone()))
                owner._parameters[name] = (  # type: ignore[assignment]
                    param.clone() if copies.dtype is None else param.to(copies.dtype)
                )

    def cast(value: Any) -> Any:
        casts = isinstance(value, torch.Tensor) and copies.dtype is not None
        return value.to(copies.dtype) if casts else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _copy_out(module: nn.Module, args: Any, output: Any) -> None:
    copies: Any = module.fuzz_copies
    made = copies.made
    copies.made = []
    pairs = []
    for owner, name, param, before in made:
        copied: Any = owner._parameters[name]
        if copies.dtype is None and not torch.equal(copied.detach(), before):
            param.data.copy_(copied.detach())  # a module wrote to what it computes with
        pairs.append((copied, param))
        owner._parameters[name] = param
    if not copies.refreshes or output is None:
        return

    def refresh(grad: torch.Tensor) -> None:
        for copied, param in pairs:
            copied.data.copy_(param.detach())
        pairs.clear()

    for tensor in unwrap(output):
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(refresh)


class Sharded:
    """The program under a ``fully_shard``, torch's or ours."""

    def __init__(self, fully_shard: Callable[..., Any], resets: str) -> None:
        self._fully_shard = fully_shard
        self._resets = resets

    def shard(self, model: FuzzModel, program: Program) -> None:
        options: dict[str, Any] = {"mesh": _mesh(program.mesh, program.world)}
        if program.precision:
            reduce_dtype = torch.float32 if program.precision == "bf16-fp32" else None
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        if "columns" in program.traits:
            options["shard_placement_fn"] = _columns
        sharded: list[Any] = []
        for modules, reshard in groups_of(model, program):
            how = {"none": None, "true": True, "false": False, "int": program.shards // 2}[reshard]
            how = True if how == 1 else how
            only = modules[0] if len(modules) == 1 else modules
            self._fully_shard(only, reshard_after_forward=how, **options)
            sharded.append(modules[0])
        blocks = sharded[:-1]
        for one, two in itertools.pairwise(blocks):
            if "forward_prefetch" in program.traits:
                one.set_modules_to_forward_prefetch([two])
            if "backward_prefetch" in program.traits:
                two.set_modules_to_backward_prefetch([one])
        if "keep_after_backward" in program.traits:
            model.set_reshard_after_backward(False)  # type: ignore[operator]

    def backward(self, loss: torch.Tensor, params: list[nn.Parameter], graph: str) -> None:
        loss.backward(retain_graph=graph == "retain")

    def sync(self, model: nn.Module, to: str) -> None:
        model.set_requires_gradient_sync(to == "on")  # type: ignore[operator]

    def average_now(self, param: nn.Parameter) -> bool:
        return param.grad is not None

    def own_rows(self, param: torch.Tensor, rank: int) -> tuple[torch.Tensor, int]:
        assert isinstance(param, DTensor), "only sharded parameters have rows of their own"
        for at, placement in enumerate(param.placements):
            if isinstance(placement, Shard):
                mesh, dim = param.device_mesh, placement.dim % param.ndim
                index = mesh.get_local_rank(at)
                rows = param.to_local().detach().movedim(dim, 0)
                step = -(-param.shape[dim] // mesh.size(at))
                mine = index == rank % mesh.size(at)
                return (rows if mine else rows[:0]), index * step
        return param.to_local().detach().new_empty(0), 0

    def after_failed_backward(self, model: nn.Module) -> None:
        if self._resets == "by the user":
            model.reset_iter_state()  # type: ignore[operator]


def _columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


def groups_of(model: FuzzModel, program: Program) -> list[tuple[list[nn.Module], str]]:
    """The calls of ``fully_shard``, in order: modules, and ``reshard_after_forward``."""
    calls: list[tuple[list[nn.Module], str]] = []
    last: list[nn.Module] | None = None
    for block, spec in zip(model.blocks, program.blocks, strict=True):
        if spec.shard == "root":
            last = None
            continue
        if spec.shard == "with_previous" and last is not None:
            last.append(block)
            continue
        if spec.shard == "nested" and hasattr(block, "inner"):
            calls.append(([block.inner], program.reshard))
        last = [block]
        calls.append((last, program.reshard))
    return [*calls, ([model], program.root_reshard)]


@functools.cache
def _mesh(kind: str, world: int) -> DeviceMesh:
    if kind == "hybrid":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh("cpu", (world,))


def forget_meshes() -> None:
    """Let go of the meshes of a process group that is left."""
    _mesh.cache_clear()


def runtime(name: str) -> Runtime:
    """Make what is called ``unsharded``, ``torch``, or as one of ``GATHERED`` or ``TRANSPORTS``."""
    if name == "unsharded":
        return Unsharded()
    if name in GATHERED:
        return Gathered(GATHERED[name])
    if name == "torch":
        return Sharded(torch.distributed.fsdp.fully_shard, "by the user")
    ours = functools.partial(shardwise.fully_shard, transport=name)
    return Sharded(ours, "by itself")

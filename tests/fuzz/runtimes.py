"""What a program can run on: nothing, torch's FSDP2, or ours over each transport.

The program is written once; these say which ``fully_shard`` it means, and what a data parallel
step without any is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import shardwise
from tests.fuzz.gathered import Between, Clock, Group, compute_with_copies
from tests.fuzz.models import FuzzModel, device
from tests.fuzz.program import Program
from tests.fuzz.trace import cut

TRANSPORTS = ("shm", "c10d", "collectives")

#: The forms of writes that autograd does not count for a ``DTensor``.
UNCOUNTED = ("data", "foreach")


class UndefinedError(Exception):
    """From here on the unsharded program has no meaning: ranks have parted, say."""


class Runtime(Protocol):
    """What a program can run on."""

    def shard(self, model: FuzzModel, program: Program) -> None:
        """Shard a model as the program says."""

    def backward(self, loss: torch.Tensor, models: list[list[nn.Parameter]], graph: str) -> None:
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

    def gather(self, module: nn.Module, call: str) -> None:
        """Call ``unshard()`` or ``reshard()`` of a module that has it."""

    def assign_data(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Say ``param.data = value``."""

    def writing(
        self, params: Sequence[torch.Tensor], form: str
    ) -> contextlib.AbstractContextManager[object]:
        """Around a write to parameters, in one of the forms of ``Write``.

        ``live`` ones are what modules hold.
        """

    def before_read(self, params: Sequence[torch.Tensor]) -> None:
        """Note that the program reads parameters that it has held since the model was made."""

    def after_load(self, model: nn.Module, before: dict[str, nn.Parameter]) -> None:
        """Treat parameters that a load has put in the place of others as sharding does."""


class Unsharded:
    """The program as it is without sharding, with gradients averaged over ranks."""

    def __init__(self) -> None:
        self._shards = 1
        self._world = dist.get_world_size()
        self._columns = False
        self._syncs = True
        self._waiting: dict[nn.Parameter, torch.Tensor] = {}
        self.clock = Clock()
        # In the backward that runs, by a hook.
        self._stepped: set[torch.Tensor] = set()
        self.parted = False

    def shard(self, model: FuzzModel, program: Program) -> None:
        self._note_cut(program)
        if program.precision:
            modules = [each for one, _ in groups_of(model, program) for each in one]
            groups = [Group([each], torch.bfloat16, Between.NOTHING) for each in modules]
            compute_with_copies(groups, self.clock, (), model)

    def backward(self, loss: torch.Tensor, models: list[list[nn.Parameter]], graph: str) -> None:
        params = list(dict.fromkeys(param for each in models for param in each))
        before = {param: param.grad for param in params}
        for param in params:
            param.grad = None
        self.clock.begin()
        self._stepped.clear()
        try:
            loss.backward(retain_graph=graph == "retain")
        except BaseException:
            self._waiting.clear()
            self.clock.free_all()
            raise
        finally:
            began = [gathers.groups[-1] for gathers in self.clock.began]
            self.clock.end()
        # A model that this backward did not come through keeps what waits for its own.
        reached = self._stepped.union(
            *(module.parameters() for each in began for module in each.modules)
        )
        reached.update(param for param in params if param.grad is not None)
        ran = {param for each in models if not reached.isdisjoint(each) for param in each}
        for param in params:
            if param.grad is not None:
                waiting = self._waiting.get(param)
                self._waiting[param] = param.grad if waiting is None else waiting + param.grad
            param.grad = before[param]
        if not self._syncs:
            return
        due = {param: grad for param, grad in self._waiting.items() if param in ran}
        averaged = self._average(list(due.values()))
        for param, grad in zip(due, averaged, strict=True):
            param.grad = grad if param.grad is None else param.grad.add_(grad)
            del self._waiting[param]
            # What was frozen since, or is not used now, has a hook that this backward did not run.
            hooks: Any = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            for hook in (hooks or {}).values():
                hook(param)

    def sync(self, model: nn.Module, to: str) -> None:
        self._syncs = to == "on"

    def average_now(self, param: nn.Parameter) -> bool:
        if not self._syncs or param.grad is None:
            return False
        waiting = self._waiting.pop(param, None)
        grad = param.grad if waiting is None else waiting + param.grad
        param.grad = self._average([grad])[0]
        self._stepped.add(param)
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

    def gather(self, module: nn.Module, call: str) -> None:
        pass

    def writing(
        self, params: Sequence[torch.Tensor], form: str
    ) -> contextlib.AbstractContextManager[object]:
        if self._stepped.intersection(params):
            # A sharded one steps later, when its gradient is reduced: docs/torch-compatibility.md.
            raise UndefinedError
        if form in UNCOUNTED:
            self.clock.uncounted.update(params)
        return contextlib.nullcontext()

    def before_read(self, params: Sequence[torch.Tensor]) -> None:
        pass

    def after_load(self, model: nn.Module, before: dict[str, nn.Parameter]) -> None:
        # Differences that docs/torch-compatibility.md tells. An unsharded model has two parameters
        # after a load that assigns to tied ones, and a sharded one of ours has one.
        first: dict[nn.Parameter, str] = {}
        for name, param in before.items():
            module, _, own = name.rpartition(".")
            tied = model.get_parameter(first.setdefault(param, name))
            if torch.equal(model.get_parameter(name), tied):
                model.get_submodule(module)._parameters[own] = tied
            # What was accumulated without synchronization belongs to the module.
            if param in self._waiting:
                self._waiting[tied] = self._waiting.pop(param)

    def assign_data(self, param: torch.Tensor, value: torch.Tensor) -> None:
        param.data = value

    def _note_cut(self, program: Program) -> None:
        self._shards = program.shards
        self._columns = "columns" in program.traits

    def _average(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.parted:
            raise UndefinedError
        if not grads:
            return []
        flat = torch.cat([grad.detach().flatten() for grad in grads])
        dist.all_reduce(flat)
        parts = (flat / self._world).split([grad.numel() for grad in grads])
        # In the memory format of the parameter, as autograd's: fused kernels take that for granted.
        return [
            torch.empty_like(grad).copy_(part.view_as(grad))
            for part, grad in zip(parts, grads, strict=True)
        ]


class Gathered(Unsharded):
    """The program without sharding, but with values gathered when a group's turn comes.

    What a hook writes to a block that has begun reaches its backward, or the next forward, as it
    does where shards are written to and the block computes with what was gathered of them. What is
    written to the latter is there afterwards.

    On one rank full parameters are the shards, and autograd does not see every write to these:
    docs/torch-compatibility.md has that under "Not detected".
    """

    def shard(self, model: FuzzModel, program: Program) -> None:
        self._note_cut(program)
        self._is_aliased = program.shards == 1 and not program.precision
        dtype = torch.bfloat16 if program.precision else None
        groups = []
        for modules, reshard in groups_of(model, program):
            freed = _reshards(reshard, program)
            if freed is None:
                freed = modules[0] is not model
            between = Between.FREED if freed is True else Between.KEPT
            if self._is_aliased:
                between = Between.ALIASED
            groups.append(Group(modules, dtype, between))
        for one, two in itertools.pairwise(groups[:-1]):
            if "forward_prefetch" in program.traits:
                one.ahead = [two]
            if "backward_prefetch" in program.traits:
                two.ahead_in_backward = [one]
        compute_with_copies(groups, self.clock, program.traits, model)

    def sync(self, model: nn.Module, to: str) -> None:
        super().sync(model, to)
        self.clock.syncs = to == "on"

    def gather(self, module: nn.Module, call: str) -> None:
        group: Any = getattr(module, "fuzz_group", None)
        if group is not None:
            getattr(group, call)()

    def writing(
        self, params: Sequence[torch.Tensor], form: str
    ) -> contextlib.AbstractContextManager[object]:
        usual = super().writing(params, form)
        if form == "live":
            return self._writing_live(params)
        if self._is_aliased and params and (self.clock.is_running or form in UNCOUNTED):
            return torch.autograd._unsafe_preserve_version_counter(tuple(params))
        return usual

    @contextlib.contextmanager
    def _writing_live(self, params: Sequence[torch.Tensor]) -> Iterator[None]:
        yield
        for gathers in self.clock.models:
            for group in gathers.groups:
                group.write_kept(params)

    def before_read(self, params: Sequence[torch.Tensor]) -> None:
        for gathers in self.clock.models:
            for group in gathers.groups:
                if not group.unread.isdisjoint(params):
                    raise UndefinedError

    def assign_data(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """A sharded parameter is a ``DTensor``: torch lets it be given data, and forgets them."""


class Sharded:
    """The program under a ``fully_shard``, torch's or ours."""

    def __init__(self, fully_shard: Callable[..., Any], resets: str) -> None:
        self._fully_shard = fully_shard
        self._resets = resets

    def shard(self, model: FuzzModel, program: Program) -> None:
        options: dict[str, Any] = {
            "mesh": _mesh(program.mesh, program.world, dist.group.WORLD),
        }
        if program.precision:
            reduce_dtype = torch.float32 if program.precision == "bf16-fp32" else None
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        if "columns" in program.traits:
            options["shard_placement_fn"] = _columns
        sharded: list[Any] = []
        for modules, reshard in groups_of(model, program):
            how = _reshards(reshard, program)
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

    def backward(self, loss: torch.Tensor, models: list[list[nn.Parameter]], graph: str) -> None:
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

    def writing(
        self, params: Sequence[torch.Tensor], form: str
    ) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def before_read(self, params: Sequence[torch.Tensor]) -> None:
        pass

    def after_load(self, model: nn.Module, before: dict[str, nn.Parameter]) -> None:
        pass

    def gather(self, module: nn.Module, call: str) -> None:
        if hasattr(module, call):
            getattr(module, call)()

    def assign_data(self, param: torch.Tensor, value: torch.Tensor) -> None:
        param.data = value


def _reshards(reshard: str, program: Program) -> bool | int | None:
    """The argument ``reshard_after_forward`` that is meant; half of few ranks is to free all."""
    half = program.shards // 2 if program.shards > 3 else True
    return {"none": None, "true": True, "false": False, "int": half}[reshard]


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
def _mesh(kind: str, world: int, group: dist.ProcessGroup | None) -> DeviceMesh:
    """Make a mesh over all ranks of ``group``: ranks that are threads have one each."""
    where = device().type
    if kind == "hybrid":
        names = ("dp_replicate", "dp_shard")
        return init_device_mesh(where, (2, world // 2), mesh_dim_names=names)
    return init_device_mesh(where, (world,))


def forget_meshes() -> None:
    """Let go of the meshes of a process group that is left."""
    _mesh.cache_clear()


def runtime(name: str) -> Runtime:
    """Make what is called ``unsharded``, ``torch``, or as one of ``TRANSPORTS``."""
    if name == "unsharded":
        return Unsharded()
    if name == "torch":
        return Sharded(torch.distributed.fsdp.fully_shard, "by the user")
    ours = functools.partial(shardwise.fully_shard, transport=name)
    return Sharded(ours, "by itself")

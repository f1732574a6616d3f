"""Writes down what a rehearsed step computes, allocates, sends and waits for.

Operations come from a dispatch mode above the fake tensors. Memory is that of storages: each is
noted when an operation makes it and when the last reference to it goes, so nothing that torch
allocates can be missed. What a storage was for is often known only later: a tensor of forward is an
activation if backward still has it, and a gradient when autograd hands it over. So kinds are
decided at the end.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from shardwise import _torch, optim, sharding, transport
from shardwise._torch import autograd, dtensor, fake, fsdp, fsdp2_code
from shardwise.base import observe
from shardwise.base.observe import Activity, Memory, Route
from shardwise.frontends import torch_groups
from shardwise.insight.planning import wires
from shardwise.insight.planning.events import (
    Change,
    Event,
    Mark,
    Op,
    Start,
    StepPhase,
    Wait,
)
from shardwise.insight.planning.settings import UntraceableError
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.state import groups_of
from shardwise.transport.base import ROOT_GROUP

#: The module that logits, loss and what is computed from them belong to.
LOSS = "logits and loss"

_FUNCTIONAL = {
    "all_gather_into_tensor": Activity.ALL_GATHER,
    "reduce_scatter_tensor": Activity.REDUCE_SCATTER,
    "all_reduce": Activity.ALL_REDUCE,
    "all_reduce_": Activity.ALL_REDUCE,
}


# What dispatch modes do not see: they are replaced for as long as a recorder watches.
_resize = torch.UntypedStorage.resize_
_get_rng_state = torch.get_rng_state


@dataclass(eq=False, slots=True)
class Held:
    """A storage.

    Attributes:
        nbytes: its size now.
        kind: what it is for, as far as that is known.
        module: whose it is.
        phase: the part of the step in which it was made.
        outlives: whether it was still there when its phase was over.
    """

    nbytes: int
    kind: Memory | None
    module: str
    phase: StepPhase | None
    outlives: bool = False

    @property
    def settled(self) -> Memory:
        """What the storage was for, now that the step is over."""
        if self.kind is not None:
            return self.kind
        makes = self.phase in (StepPhase.FORWARD, StepPhase.RECOMPUTE)
        if makes and self.outlives and self.module != LOSS:
            return Memory.ACTIVATIONS
        return Memory.OTHER


@dataclass(frozen=True, slots=True)
class _StorageChange:
    """A change of a storage whose kind is decided at the end."""

    held: Held
    nbytes: int
    moment: str


class RehearsalRecorder(fake.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the steps of one rank on fake tensors. Enter it, and observe with it.

    Args:
        mode: makes the fake tensors of the rehearsal.
        dimensions: name and number of ranks of each process group of the mesh, by its name.

    Attributes:
        before: bytes by kind when the step begins.
        formulas: modules whose results depend on values, and why; see :func:`stand_in`.
    """

    def __init__(
        self, mode: fake.FakeTensorMode, dimensions: Mapping[str, tuple[str, int]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._dimensions = dimensions
        self._records = False
        self._phase = StepPhase.FORWARD
        self._events: list[Event | _StorageChange] = []
        self._held: dict[int, Held] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._names: dict[nn.Module, str] = {}
        self._modules: list[str] = []
        self._ends: frozenset[str] = frozenset()
        self._node_numbers: list[int] = [-1]
        self._node_modules: list[str] = [""]
        self._group = ""
        self._unfollowed: dict[
            str, Callable[[], list[nn.Parameter]]
        ] = {}  # whose gradients are not labeled yet
        self._number = 0
        self._under_way: set[int] = set()
        self._functional: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = (
            weakref.WeakKeyDictionary()
        )
        self.before: dict[Memory, int] = {}
        self.model_flops = 0
        self.formulas: dict[str, str] = {}
        self._reads = 0

    # -- what the rehearsal says -----------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self, model: nn.Module, ends: frozenset[str]) -> Iterator[None]:
        """Follow which module runs, every change of a storage's size, and full gradients.

        Args:
            model: the model, sharded.
            ends: names of modules that compute logits or the loss.
        """
        self._names = {module: name for name, module in model.named_modules()}
        groups: list[ParamGroup | fsdp.TorchGroup] = [
            *groups_of(model),
            *fsdp.torch_groups(model),
        ]
        self._unfollowed = {self._names[each.modules[0]]: each.full_parameters for each in groups}
        self._ends = ends
        hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]

        @functools.wraps(_resize)
        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = _resize(storage, nbytes)
            self._resized(storage)
            return result

        @functools.wraps(_get_rng_state)
        def get_rng_state() -> torch.Tensor:
            state = _get_rng_state()
            self._hold(state.untyped_storage(), self._module, self._phase)
            return state

        try:
            torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
            torch.get_rng_state = get_rng_state  # activation checkpointing keeps it
            yield
        finally:
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
            torch.get_rng_state = _get_rng_state
            for hook in hooks:
                hook.remove()

    def label(self, tensor: torch.Tensor, kind: Memory, module: str) -> None:
        """Say what a plain tensor's storage is for."""
        storage = tensor.untyped_storage()
        held = self._held.get(id(storage)) or self._hold(storage, "", None)
        held.kind, held.module = kind, module

    def _follow_gradients(self, group: str, fulls: list[nn.Parameter]) -> None:
        def label(full: torch.Tensor) -> None:
            assert full.grad is not None
            self.label(dtensor.plain(full.grad), Memory.GRADIENTS, group)

        for full in fulls:
            if full.requires_grad:
                full.register_post_accumulate_grad_hook(label)  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """The bytes that are allocated now."""
        return sum(held.nbytes for held in self._held.values())

    def record(self) -> int:
        """Begin the step to record, and forget others. Return the bytes that are there before."""
        self._records, self._events = True, []
        self.before, self.model_flops = {}, 0
        for held in self._held.values():
            kind = held.kind or Memory.OTHER
            self.before[kind] = self.before.get(kind, 0) + held.nbytes
            held.kind = kind
        return self.nbytes

    def enter(self, phase: StepPhase) -> None:
        """Begin a part of the step."""
        for held in self._held.values():
            held.outlives |= held.phase is self._phase
        self._phase = phase
        self._group = ""

    def finish(self) -> tuple[Event, ...]:
        """Return what has been recorded."""
        return tuple(
            Change(each.held.settled, each.nbytes, each.held.module, each.moment)
            if isinstance(each, _StorageChange)
            else each
            for each in self._events
        )

    # -- the runtime's reports, as an observer ---------------------------------------------------

    def begin(self, activity: Activity, name: str, dimension: str, nbytes: int) -> int:
        """Note that an activity of the runtime begins."""
        self._number += 1
        if activity in (Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER):
            self._group = _group(name)
            if self._records:
                self._events.append(Mark(activity, self._group))
            if activity is not Activity.OPTIMIZER and self._group in self._unfollowed:
                fulls = self._unfollowed[self._group]()
                if fulls:  # not yet, when the first forward begins
                    del self._unfollowed[self._group]
                    self._follow_gradients(self._group, fulls)
        return self._number

    def collective(
        self, activity: Activity, name: str, wire: Route, nbytes: int, launches: int
    ) -> int:
        """Note that a collective is issued."""
        self._number += 1
        if self._records:
            self._under_way.add(self._number)
            self._events.append(
                Start(
                    number=self._number,
                    activity=activity,
                    dimension=wire.dimension,
                    ranks=wire.ranks,
                    group=_group(name),
                    nbytes=nbytes,
                    launches=launches,
                    transport=wire.transport,
                    apart=wire.members[1] - wire.members[0] if len(wire.members) > 1 else 0,
                )
            )
        return self._number

    def end(self, number: int) -> None:
        """Note that an activity has ended."""
        if number in self._under_way:
            self._under_way.remove(number)
            self._events.append(Wait(number))

    def memory(self, kind: Memory, name: str, nbytes: int) -> None:
        """Do nothing: storages say what is allocated."""

    # -- modules ---------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._modules.append(self._names.get(module, self._module))
        self._note_sequence()

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()
        self._note_sequence()

    def _note_sequence(self) -> None:
        self._node_numbers.append(autograd.sequence_number())
        self._node_modules.append(self._module)

    @property
    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _module_of_node(self) -> str:
        """The module whose forward made the node of the graph that runs now."""
        number = autograd.running_node_number()
        if number is None:
            return self._group
        return self._node_modules[bisect.bisect_right(self._node_numbers, number) - 1]

    # -- operations ------------------------------------------------------------------------------

    def _dispatch(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and write down what it does."""
        if (device := fake.device_of(func, args)) is not None:
            return device
        if any(map(dtensor.is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # what it does with the tensors inside comes here next
        kwargs = kwargs or {}
        name = str(func)
        namespace, short, *_ = name.split(".")
        try:
            out = fake.grouped_product(func, args, kwargs)
            if out is None:
                out = func(*args, **kwargs)
        except fake.UNTRACEABLE as error:
            out = self._stand_in(name, args, error)
        if fake.only_views(func):
            for tensor in tensors_in(out):
                self._keep_size(tensor.untyped_storage())
            return out
        written = tensors_in(out)
        if written and not fake.stands_for_memory(written[0], self._mode):
            return out  # shapes are also found out on the meta device, or on other fake tensors
        phase, module = self._where()
        source = _source(inspect.currentframe())
        if source is None:
            return out
        made = 0
        for tensor in written:
            storage = tensor.untyped_storage()
            if id(storage) in self._held:
                self._keep_size(storage)
            else:
                held = self._hold(storage, module, phase)
                held.kind = source.kind
                if source.kind is None and module in self._ends and phase is StepPhase.FORWARD:
                    held.module = LOSS
                made += 1
        if namespace == "c10d":
            return out
        if namespace == "_c10d_functional":
            self._functional_collective(short, module, args, out)
            return out
        if not self._records or short in _IDLE or not (made or fake.writes(func)):
            return out
        flops = fake.flops_of(func, args, kwargs, out)
        touched = (*tensors_in((args, tuple(kwargs.values()))), *written)
        if not source.runtime and phase in (StepPhase.FORWARD, StepPhase.BACKWARD):
            self.model_flops += flops.needed
        self._events.append(
            Op(
                name=name,
                module=module,
                phase=phase,
                flops=flops.done,
                nbytes=sum(tensor.numel() * tensor.element_size() for tensor in touched),
                shapes=tuple(tuple(tensor.shape) for tensor in touched),
                dtype=str(written[0].dtype)[6:] if written else "",
                runtime=source.runtime,
            )
        )
        return out

    def _stand_in(self, name: str, args: tuple[Any, ...], error: Exception) -> Any:
        """Return what stands in for a result that depends on values."""
        _, module = self._where()
        self._reads += 1
        try:
            if self._reads > MOST_READS:
                raise NotImplementedError
            found = stand_in(name, args)
        except NotImplementedError:
            raise UntraceableError(module, name) from error
        self.formulas.setdefault(module, f"{name} depends on values")
        return found

    def _where(self) -> tuple[StepPhase, str]:
        """The part of the step, and the innermost module."""
        if self._phase is not StepPhase.BACKWARD:
            return self._phase, self._module
        if self._modules:
            return StepPhase.RECOMPUTE, self._module
        # Backward itself runs without gradients; what checkpointing runs again, with them.
        phase = StepPhase.RECOMPUTE if torch.is_grad_enabled() else StepPhase.BACKWARD
        return phase, self._module_of_node()

    def _functional_collective(self, operation: str, module: str, args: Any, out: Any) -> None:
        """Note a collective of tensor parallelism, or the wait for one."""
        if operation == "wait_tensor":
            number = self._functional.get(args[0].untyped_storage())
            if number is not None:
                self.end(number)
            return
        activity = _FUNCTIONAL.get(operation)
        if activity is None:
            return
        name, ranks = self._dimensions.get(args[-1], ("", 0))
        full = args[0] if activity is Activity.REDUCE_SCATTER else out
        nbytes = full.numel() * full.element_size()
        number = self.collective(activity, module, Route("functional", name, ranks), nbytes, 1)
        self._functional[out.untyped_storage()] = number

    # -- memory ----------------------------------------------------------------------------------

    def _hold(self, storage: torch.UntypedStorage, module: str, phase: StepPhase | None) -> Held:
        key, nbytes = id(storage), storage.nbytes()
        held = Held(nbytes, None, module, phase)
        self._held[key] = held
        self._watches[key] = weakref.ref(storage, functools.partial(self._freed, key))
        self._grow(held, nbytes)
        return held

    def _freed(self, key: int, _: object) -> None:
        del self._watches[key]
        held = self._held.pop(key)
        self._grow(held, -held.nbytes)
        held.nbytes = 0

    def _resized(self, storage: torch.UntypedStorage) -> None:
        held = self._held.get(id(storage))
        if held is None:
            return
        nbytes = storage.nbytes()
        last = self._events[-1] if self._events else None
        if (
            nbytes == 0
            and isinstance(last, _StorageChange)
            and last.held is held
            and last.nbytes > 0
        ):
            self._events.pop()  # it only got a size, and no memory: nothing has been written to it
        else:
            self._grow(held, nbytes - held.nbytes)
        held.nbytes = nbytes

    def _keep_size(self, storage: torch.UntypedStorage) -> None:
        """Free a storage again: a view of one without memory gives it memory, if it is fake."""
        held = self._held.get(id(storage))
        if held is not None and held.nbytes == 0 and storage.nbytes():
            _resize(storage, 0)

    def _grow(self, held: Held, nbytes: int) -> None:
        if self._records and nbytes:
            moment = f"{self._phase.value} of {self._group or 'the model'}"
            moment = "optimizer" if self._phase is StepPhase.OPTIMIZER else moment
            self._events.append(_StorageChange(held, nbytes, moment))


# Assigned here, since torch wraps what stands in the class, which costs as much as an operation.
RehearsalRecorder.__torch_dispatch__ = RehearsalRecorder._dispatch  # type: ignore[method-assign, assignment]


def _group(label: str) -> str:
    """The name of a group from its label in reports."""
    return "" if label == ROOT_GROUP else label


# -- where operations come from -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Caller:
    """Who calls an operation.

    Attributes:
        runtime: whether the sharding runtime does.
        kind: what the memory that it allocates there is for, if the code says so.
    """

    runtime: bool
    kind: Memory | None = None


_MODEL = _Caller(runtime=False)

_FINDS_SHAPES = dtensor.code_that_finds_shapes()


def _folder(package: ModuleType) -> str:
    return f"{package.__path__[0]}/"


#: Where operations are the runtime's, and where they are done for a caller.
_TORCHS = fsdp2_code.PARAMETERS, fsdp2_code.COLLECTIVES
_RUNTIME = (
    *map(_folder, (sharding, optim, transport)),
    *(str(each.__file__) for each in (wires, *_TORCHS)),
)
_HELPERS = (*map(_folder, (torch, _torch)), __file__, str(torch_groups.__file__))

# What does not say what it allocates memory for: transports, unless it is for something else, and
# torch's own FSDP2.
for _code, _kind in (
    (transport, Memory.TRANSPORT),
    (fsdp2_code.COLLECTIVES, Memory.TRANSPORT),
    (fsdp2_code.PARAMETERS, Memory.FULL_PARAMETERS),
):
    observe.ALLOCATES[str(_code.__file__)] = _kind
for _functions, _kind in (
    (fsdp2_code.FOR_SENDING, Memory.TRANSPORT),
    (fsdp2_code.FOR_GRADIENTS, Memory.GRADIENTS),
):
    for _function in _functions:
        observe.allocates(_kind)(_function)


def _source(frame: FrameType | None) -> _Caller | None:
    """Find out who calls the operation whose frame this is: the first caller that is not torch.

    ``None`` of an operation that only tells what the shape of a ``DTensor`` is.
    """
    while frame is not None:
        code = frame.f_code
        if code is _FINDS_SHAPES:
            return None
        caller = _caller_in(code.co_filename)
        if caller is not None:
            own = observe.ALLOCATES.get((code.co_filename, code.co_firstlineno))
            return replace(caller, kind=own) if own is not None and caller.runtime else caller
        frame = frame.f_back
    return _MODEL


@functools.cache
def _caller_in(file: str) -> _Caller | None:
    """Who calls from a file, with what that says, or a package that it is in.

    ``None`` of torch and helpers, whose caller counts.
    """
    if file.startswith(_RUNTIME):
        says = (file, *(str(folder / "__init__.py") for folder in PurePath(file).parents))
        kinds = (observe.ALLOCATES[each] for each in says if each in observe.ALLOCATES)
        return _Caller(runtime=True, kind=next(kinds, None))
    return None if file.startswith(_HELPERS) else _MODEL


# -- operations and their tensors ------------------------------------------------------------------

#: They touch no memory.
_IDLE = frozenset(
    {
        *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
        *("empty_permuted", "set_", "resize_"),
    }
)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


# -- what depends on values ------------------------------------------------------------------------

MOST_READS = 10_000  # of values in one step; more are a loop that waits for one


def stand_in(name: str, args: tuple[Any, ...]) -> Any:
    """Return what an operation that depends on values returns in a rehearsal.

    Args:
        name: of the operation, such as ``"aten.nonzero.default"``.
        args: its arguments.

    Raises:
        NotImplementedError: there is nothing to stand in for it.
    """
    tensor: torch.Tensor = args[0]
    match name.split(".")[1]:
        case "_local_scalar_dense":
            return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
        case "nonzero":
            return tensor.new_empty(tensor.numel(), tensor.ndim, dtype=torch.long)
        case "masked_select":
            return torch.where(args[1], tensor, tensor).flatten()
        case "index":
            return torch.ops.aten.index.Tensor(tensor, _indices(args[1]))
    raise NotImplementedError(name)


def _indices(given: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace masks by positions: as many as they have elements."""
    found: list[torch.Tensor | None] = []
    for index in given:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions = index.new_empty(index.numel(), dtype=torch.long)
            found += [positions] * index.ndim
        else:
            found.append(index)
    return found

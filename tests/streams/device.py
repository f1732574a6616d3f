"""A device that exists on paper: fake tensors, real ordering.

:class:`Device` stands behind torch's PrivateUse1 backend. Tensors on it are fake, so they have no
values, but they have storages. Each operation is noted: who reads and writes which storage, and on
which stream. What is not ordered is reported as a :class:`~tests.streams.memory.Race`.

What is modeled, as CUDA documents it:

- An operation is launched on the current stream, after everything that the host knows.
- A copy between the device and pinned host memory with ``non_blocking=True`` is launched and not
  waited for. Any other copy between them blocks the host.
- Autograd runs each node on the stream of its forward, and hooks on the stream of their node. At
  the end, the stream that called ``backward()`` waits for all of these.
- The caching allocator: see :mod:`tests.streams.memory`.
- Pinned host memory that is freed is not handed out before the copies from and to it are over.
  Pageable memory is handed out at once.

The process needs no GPU and no other ranks; see :mod:`tests.streams.process_group`.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
import types
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import _sharding_prop
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.streams.clocks import Clock, Timeline
from tests.streams.memory import Access, Block, Kind, Place, Pool, Race

#: The type of the device.
NAME = "modeled"

_HERE = Path(__file__).parent
_OWN_FILES = frozenset(
    str(_HERE / name) for name in ("clocks.py", "memory.py", "device.py", "process_group.py")
)
_SITE_DEPTH = 5


class Pageable(enum.Enum):
    """What a copy to pageable host memory with ``non_blocking=True`` does."""

    BLOCKS = "as on CUDA: the host waits for it"
    RETURNS = "as on some other backends: nobody waits for it"


class OnRace(enum.Enum):
    """What the model does when it finds a race."""

    NOTE = "it goes on, and notes all"
    RAISE = "the next operation outside of backward raises an error"


@dataclass(frozen=True)
class Synchronization:
    """A wait of the host for the device.

    Attributes:
        what: what waited.
        site: where in the program it is, innermost first.
        collectives: how many launches of collectives there had been.
    """

    what: str
    site: tuple[str, ...]
    collectives: int

    def __str__(self) -> str:
        return f"{self.what} at {' < '.join(self.site)}"


class Stream(Timeline):
    """A stream of the modeled device, with the methods of ``torch.Stream``."""

    def __init__(
        self, device: object = None, *, priority: int = 0, name: str | None = None
    ) -> None:
        model = current_device()
        super().__init__(name or model.name_stream("stream"))
        model.streams.append(self)
        self.device = torch.device(NAME, 0)
        self._model = model

    def launch_point(self) -> Clock:
        """The clock, after what the host knows: a launch comes after it."""
        self.wait_for(self._model.host.clock)
        return self.clock

    def wait_event(self, event: Event) -> None:
        """Let later work wait for the work before ``event``."""
        self.launch_point().join(event.clock)

    def wait_stream(self, other: Stream) -> None:
        """Let later work wait for the work on ``other`` so far."""
        self.launch_point().join(other.clock)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event after the work so far."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for the work so far."""
        self._model.synchronize(self.clock, "Stream.synchronize")

    def query(self) -> bool:
        """Whether the work so far is known to be over: never, unless somebody waited."""
        return False

    def is_capturing(self) -> bool:
        """Whether a graph is captured, which torch 2.15 asks: never."""
        return False

    def __enter__(self) -> Self:
        self._model.enter(self)
        return self

    def __exit__(self, *raised: object) -> None:
        self._model.leave()


class Event:
    """An event of the modeled device, with the methods of ``torch.Event``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.clock = Clock()
        self._model = current_device()

    def record(self, stream: Stream | None = None) -> None:
        """Record the work on ``stream`` so far."""
        self.clock = (stream or self._model.current).launch_point().copy()

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work on ``stream`` wait for what was recorded."""
        (stream or self._model.current).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for what was recorded."""
        self._model.synchronize(self.clock, "Event.synchronize")

    def query(self) -> bool:
        """Whether what was recorded is known to be over."""
        return False


class Device:
    """The model.

    Args:
        pageable: what asynchronous copies to pageable memory do.
        on_race: what to do when there is a race.

    Attributes:
        compute: the default stream.
        streams: all streams.
        races: what is not ordered, each once.
        collectives: how many launches of collectives there were.
        synchronizations: where the host waited for the device.
        allocated: bytes that blocks take now.
        peak: the most that :attr:`allocated` has been since :meth:`reset_peak`.
    """

    def __init__(self, pageable: Pageable = Pageable.BLOCKS, on_race: OnRace = OnRace.NOTE) -> None:
        self.pageable = pageable
        self._on_race = on_race
        self.races: list[Race] = []
        self.collectives = 0
        self.synchronizations: list[Synchronization] = []
        self.allocated = self.peak = 0
        self.accesses = 0
        self.streams: list[Stream] = []
        self._threads: dict[int, Timeline] = {}
        self._main = Timeline("host")
        self._names: dict[str, int] = {}
        self._blocks: dict[int, Block] = {}
        self._pools: dict[str, Pool] = {}
        self._freed: dict[str, list[Block]] = {}
        self._host_memory = Pool(1 << 60)
        self._seen: set[object] = set()
        # The streams entered by ``with``, and whether a node of autograd was running then.
        self._entered: list[tuple[Stream, bool]] = []
        # The sequence numbers of autograd's nodes from which on forward ran on a stream.
        self._changes: tuple[list[int], list[Stream]] = ([], [])
        self._backward: list[Stream] = []  # the streams of the running backward
        _register()
        with _made_current(self):
            self.compute = Stream(name="compute")

    # -- who runs where ------------------------------------------------------------------------

    def name_stream(self, kind: str) -> str:
        """A name for one more stream."""
        self._names[kind] = self._names.get(kind, 0) + 1
        return f"{kind} {self._names[kind]}"

    @property
    def host(self) -> Timeline:
        """The thread of the host that runs now. Autograd's threads count as the main one."""
        return self._threads.get(threading.get_ident(), self._main)

    @contextmanager
    def host_thread(self, name: str, since: Clock) -> Iterator[None]:
        """Count what this thread does as that of another thread, which began at ``since``."""
        timeline = Timeline(name)
        timeline.wait_for(since)
        self._threads[threading.get_ident()] = timeline
        try:
            yield
        finally:
            del self._threads[threading.get_ident()]
            self._main.wait_for(timeline.clock)  # whoever looks at the result has joined it

    @property
    def current(self) -> Stream:
        """The stream that work is launched on now."""
        node = current_node()
        if self._entered and (self._entered[-1][1] or node is None):
            stream = self._entered[-1][0]
        elif node is None:
            stream = self.compute
        else:
            return self._stream_of(node)
        if node is None and self._backward:
            ended, self._backward = self._backward, []
            for other in ended:
                stream.wait_stream(other)
        return stream

    def enter(self, stream: Stream) -> None:
        """Make ``stream`` the current one."""
        self._entered.append((stream, current_node() is not None))
        self._note_change()

    def leave(self) -> None:
        """Return to the stream before."""
        self._entered.pop()
        self._note_change()

    def _note_change(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            numbers, streams = self._changes
            numbers.append(torch._C._autograd._get_sequence_nr())
            streams.append(self.current)

    def _stream_of(self, node: Any) -> Stream:
        """The stream on which autograd runs ``node``: that of its forward."""
        numbers, streams = self._changes
        found = bisect_right(numbers, node._sequence_nr())
        stream = streams[found - 1] if found and numbers else self.compute
        if node.name() == "torch::autograd::AccumulateGrad" and self._backward:
            stream = self._backward[-1]  # it has no number; its input comes from the one before
        if not self._backward:
            outside = self._entered[-1][0] if self._entered else self.compute
            if outside is not stream:
                stream.wait_stream(outside)
            self._backward.append(stream)
        elif self._backward[-1] is not stream:
            stream.wait_stream(self._backward[-1])
            self._backward.append(stream)
        return stream

    def synchronize(self, clock: Clock, what: str) -> None:
        """Let the host wait for all that ``clock`` knows."""
        self.synchronizations.append(Synchronization(what, site(), self.collectives))
        self.host.wait_for(clock)

    def synchronize_all(self) -> None:
        """Let the host wait for all streams."""
        self.synchronizations.append(Synchronization("synchronize", site(), self.collectives))
        for stream in self.streams:
            self.host.wait_for(stream.clock)

    # -- memory --------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        """The bytes that the caching allocator has taken from the device. They only grow here."""
        return sum(pool.allocator.reserved for pool in self._pools.values())

    def reset_peak(self) -> None:
        """Begin to look for the peak anew."""
        self.sweep()
        self.peak = self.allocated

    def sweep(self) -> None:
        """Free the blocks whose storage is gone."""
        for key in [key for key, block in self._blocks.items() if block.is_gone]:
            self.free(key)

    def block_of(self, storage: torch.UntypedStorage, device: torch.device) -> Block:
        """The block of a storage."""
        block = self._blocks.get(storage._cdata)
        if block is None:  # it was made where nobody looked, values and all
            block = self.allocate(storage, device)
            block.has_values = True
        return block

    def allocate(
        self, storage: torch.UntypedStorage, device: torch.device, *, pin_memory: bool = False
    ) -> Block:
        """Give a storage its memory."""
        self.sweep()
        where, nbytes = site(), storage.size()
        if device.type == "cpu":
            place = Place.PINNED if pin_memory else Place.PAGEABLE
            owner, pool = self.host.name, self._host_memory
        else:
            place, stream = Place.DEVICE, self.current
            owner = stream.name
            self._reuse(stream, nbytes, where)
            pool = self._pools.setdefault(owner, Pool((len(self._pools) + 1) << 50))
        part = pool.allocator.allocate(nbytes)
        block = Block(_weak(storage), place, owner, nbytes, where, pool, part)
        if place is Place.DEVICE:
            self.allocated += block.taken
            self.peak = max(self.peak, self.allocated)
        self._blocks[storage._cdata] = block
        return block

    def free(self, key: int) -> None:
        """Take the memory of a storage back."""
        block = self._blocks.pop(key)
        block.free()
        if block.place is Place.DEVICE:
            self.allocated -= block.taken
            self._freed.setdefault(block.owner, []).append(block)
            return
        if block.place is Place.PAGEABLE:
            host = self.host
            now = Access(Kind.FREE, host.tick(), "the host", site())
            for access in block.conflicts(Kind.FREE):
                if access.moment.timeline.startswith("host"):
                    continue  # threads of the host do not give memory away that they use
                self._check(access, now, host.clock, block)

    def _reuse(self, stream: Stream, nbytes: int, where: tuple[str, ...]) -> None:
        """Check that any block freed on ``stream`` may be handed out on it now."""
        freed = self._freed.pop(stream.name, [])
        if not freed:
            return
        clock = stream.launch_point()
        now = Access(Kind.REUSE, stream.tick(), f"an allocation of {nbytes} bytes", where)
        for block in freed:
            for access in block.conflicts(Kind.REUSE):
                if access.moment.timeline not in block.recorded:
                    self._check(access, now, clock, block)

    def storage_resized(self, storage: torch.UntypedStorage, resize: Callable[[], object]) -> None:
        """Follow ``storage.resize_()``."""
        before = self._blocks.get(storage._cdata)
        device = storage.device if before is None else _device_of(before)
        if before is not None:
            self.free(storage._cdata)
        resize()
        if storage.size():
            self.allocate(storage, device, pin_memory=bool(before and before.place is Place.PINNED))

    # -- accesses ------------------------------------------------------------------------------

    def access(
        self,
        on: Timeline,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        where: tuple[str, ...] | None = None,
    ) -> None:
        """Note that an operation reads and writes tensors, and report what it races with."""
        self.accesses += 1
        if self.races and self._on_race is OnRace.RAISE and self._may_raise():
            self.check()
        if isinstance(on, Stream):
            on.launch_point()
        moment = on.tick()
        where = site() if where is None else where
        for kind, tensors in ((Kind.READ, reads), (Kind.WRITE, writes)):
            for tensor in tensors:
                if not tensor.numel():
                    continue
                access = Access(kind, moment, what, where)
                storage = tensor.untyped_storage()
                if not storage.size():
                    self._report(Race(access, access, "none: its storage has been freed"))
                    continue
                block = self.block_of(storage, tensor.device)
                if kind is Kind.READ and not block.has_values:
                    self._report(Race(access, access, f"{block}. Nothing has written to it"))
                for other in block.conflicts(kind):
                    self._check(other, access, on.clock, block)
                block.note(access)
                block.has_values |= kind is Kind.WRITE

    def _check(self, earlier: Access, later: Access, clock: Clock, block: Block) -> None:
        if not clock.knows(earlier.moment):
            self._report(Race(earlier, later, str(block)))

    def _report(self, race: Race) -> None:
        if race.key not in self._seen:
            self._seen.add(race.key)
            self.races.append(race)

    def _may_raise(self) -> bool:
        """Whether an error can be raised here. Autograd's threads may end the process."""
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and torch._C._current_graph_task_id() == -1

    def check(self) -> None:
        """Raise if there was a race.

        Raises:
            AssertionError: the message has every race.
        """
        if self.races:
            raise AssertionError(
                f"{len(self.races)} races\n" + "\n".join(str(race) for race in self.races)
            )


def current_node() -> Any:
    """The node of autograd that runs, hooks included; ``None`` outside of them."""
    return torch._C._current_autograd_node()


def site() -> tuple[str, ...]:
    """Where the program is, innermost first: lines of the runtime and of the tests."""
    found: list[str] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _SITE_DEPTH:
        name = frame.f_code.co_filename
        if name not in _OWN_FILES and ("/shardwise/" in name or "/tests/streams/" in name):
            short = name.rpartition("/src/")[2].rpartition("/tests/streams/")[2]
            found.append(f"{short}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    node = current_node()
    if not found and node is not None:
        found.append(f"the backward of {node.name()}")
    return tuple(found)


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _device_of(block: Block) -> torch.device:
    return torch.device(NAME, 0) if block.place is Place.DEVICE else torch.device("cpu")


# -- what operations do -------------------------------------------------------------------------

#: Operations that touch no memory, although their schemas do not say so.
_NO_ACCESS = frozenset(
    f"aten::{name}"
    for name in (
        *("set_", "resize_", "_resize_output_", "record_stream", "is_pinned", "is_same_size"),
        *("_unsafe_view", "_reshape_alias", "lift_fresh"),
        *("sym_size", "sym_numel", "sym_stride", "sym_storage_offset"),
    )
)
#: Operations that only allocate.
_EMPTY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "empty_permuted"),
        *("new_empty", "new_empty_strided"),
    )
)
#: Operations that read the shape of their argument, and not its values.
_LIKE = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_full"),
    )
)
#: Operations that write to their first argument without reading it.
_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in (
        *("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_"),
        *("_foreach_copy_", "_foreach_zero_"),
    )
)
_PLAIN = (torch.Tensor, FakeTensor, torch.nn.Parameter)


_Mode: Any = TorchDispatchMode


class _Recorder(_Mode):
    """Notes what every operation reads and writes."""

    def __init__(self, model: Device, fake: FakeTensorMode) -> None:
        super().__init__()
        self._model = model
        self._fake = fake

    def _dispatch(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not self._fake:
            return func(*args, **kwargs)  # DTensor works out shapes in a mode of its own
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # what is inside comes here
        reads, writes = _arguments(func, args, kwargs)
        given = reads + writes
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            with unset_fake_temporarily():  # numbers of ranks, say, which meshes are made of
                return func(*args, **kwargs)
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            return self._value_of(args[0])
        if name.startswith("_c10d_functional::"):
            return _functional_collective(self._model, name, func, args, kwargs)
        pin_memory = bool(kwargs.pop("pin_memory", False))
        known = {tensor.untyped_storage()._cdata for tensor in given}
        out = func(*args, **kwargs)
        if name in _NO_ACCESS or name.startswith("prim::"):
            return out
        made = [
            tensor
            for tensor in _tensors(out)
            if tensor.untyped_storage()._cdata not in known
            and not any(each.alias_info for each in func._schema.returns)
        ]
        # What a copy to the host makes is pinned if nobody is to wait for it.
        pin_memory |= name == "aten::_to_copy" and bool(kwargs.get("non_blocking"))
        for tensor in made:
            if tensor.untyped_storage()._cdata not in self._model._blocks:
                self._model.allocate(tensor.untyped_storage(), tensor.device, pin_memory=pin_memory)
        is_view = not made and not writes
        if name not in _EMPTY and not is_view:
            self._access(name, args, kwargs, [] if name in _LIKE else reads, writes + made)
        return out

    def _access(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
    ) -> None:
        model = self._model
        kinds = {type_of(tensor) for tensor in reads + writes}
        if kinds == {"cpu"}:
            model.access(model.host, name, reads, writes)
            return
        if "cpu" in kinds and name not in ("aten::copy_", "aten::_to_copy"):
            # A number on the host travels as an argument of the kernel.
            numbers = [tensor for tensor in reads if type_of(tensor) == "cpu"]
            model.access(model.host, name, numbers, [])
            reads = [tensor for tensor in reads if type_of(tensor) != "cpu"]
            kinds = {NAME}
        stream = model.current
        model.access(stream, name, reads, writes)
        if "cpu" in kinds:
            asked = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            on_host = [tensor for tensor in reads + writes if type_of(tensor) == "cpu"]
            blocks = [model.block_of(each.untyped_storage(), each.device) for each in on_host]
            pinned = all(block.place is Place.PINNED for block in blocks)
            to_host = any(type_of(tensor) == "cpu" for tensor in writes)
            returns = pinned or (to_host and model.pageable is Pageable.RETURNS)
            if not (asked and returns):
                model.synchronize(stream.clock, name)

    def _value_of(self, tensor: torch.Tensor) -> object:
        """The value of a tensor, which the host waits for. All values are 1."""
        model = self._model
        on = model.host if tensor.device.type == "cpu" else model.current
        model.access(on, "aten::_local_scalar_dense", [tensor], [])
        if isinstance(on, Stream):
            model.synchronize(on.clock, "aten::_local_scalar_dense")
        return 1.0 if tensor.dtype.is_floating_point else 1


# Assigned here, since torch wraps what stands in the class, which costs as much as an operation.
_Recorder.__torch_dispatch__ = _Recorder._dispatch


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, without those on the meta device."""
    if isinstance(tree, torch.Tensor):
        return [] if type_of(tree) == "meta" else [tree]
    if isinstance(tree, list | tuple):
        return [tensor for each in tree for tensor in _tensors(each)]
    return []


def type_of(tensor: torch.Tensor) -> str:
    """The type of a tensor's device. Asking a fake tensor itself is an operation."""
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type


@functools.cache
def _roles(func: Any) -> list[tuple[str, bool, bool]]:
    """For each argument of an operation: its name, whether it is read, and whether written to."""
    roles, schema = [], func._schema
    for argument in schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        overwrites = writes and (argument.is_out or schema.name in _OVERWRITES)
        roles.append((argument.name, not overwrites, writes))
    return roles


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation reads, and those that it writes to."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for i, (name, is_read, is_written) in enumerate(_roles(func)):
        given = args[i] if i < len(args) else kwargs.get(name)
        if given is None or isinstance(given, int | float):
            continue
        tensors = _tensors(given)
        if is_read:
            reads += tensors
        if is_written:
            writes += tensors
    return reads, writes


#: Set by :mod:`tests.streams.process_group`, which knows the groups.
_functional_collective: Callable[..., Any]


def set_functional_collective(function: Callable[..., Any]) -> None:
    """Let ``function`` do the collectives that are operations."""
    global _functional_collective
    _functional_collective = function


# -- torch --------------------------------------------------------------------------------------

_current: Device | None = None


def current_device() -> Device:
    """The model that is in use.

    Raises:
        RuntimeError: none is.
    """
    if _current is None:
        raise RuntimeError("no device is modeled here")
    return _current


@contextmanager
def _made_current(model: Device) -> Iterator[None]:
    global _current
    before, _current = _current, model
    try:
        yield
    finally:
        _current = before


class _Module:
    """What torch looks up as ``torch.<name of the device>``."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return _current is not None

    def current_device(self) -> int:
        return 0

    def set_device(self, index: object) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        pass

    def device(self, index: object) -> AbstractContextManager[object]:
        return nullcontext()

    def current_stream(self, device: object = None) -> Stream:
        return current_device().current

    def stream(self, stream: Stream) -> Stream:
        return stream

    def synchronize(self, device: object = None) -> None:
        current_device().synchronize_all()


_is_registered = False


def _register() -> None:
    """Register the backend, once for all of this process."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())


def _resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    current_device().storage_resized(storage, lambda: _real_resize(storage, nbytes))
    return storage


_real_resize = torch.UntypedStorage.resize_


def _address(storage: torch.UntypedStorage) -> int:
    block = current_device()._blocks.get(storage._cdata)
    return 0 if block is None or not storage.size() else block.address


def _tensor_address(tensor: torch.Tensor) -> int:
    start = _address(tensor.untyped_storage())
    return start and start + int(tensor.storage_offset()) * tensor.itemsize


def _pin(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    copy = torch.empty_like(tensor, pin_memory=True)
    return copy.copy_(tensor)


def _is_pinned(tensor: torch.Tensor, *_: object) -> bool:
    block = current_device()._blocks.get(tensor.untyped_storage()._cdata)
    return block is not None and block.place is Place.PINNED


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    block = current_device().block_of(tensor.untyped_storage(), tensor.device)
    block.recorded.add(stream.name)


@contextmanager
def modeled(model: Device) -> Iterator[Device]:
    """Make ``model`` the accelerator of this process, and all tensors fake."""
    accelerator = torch.device(NAME, 0)
    replaced: list[tuple[object, str, object]] = [
        (torch.accelerator, "current_accelerator", lambda check_available=False: accelerator),
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "device_count", lambda: 1),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "set_device_index", lambda device: None),
        (torch.accelerator, "current_stream", lambda device=None: model.current),
        (torch.accelerator, "synchronize", lambda device=None: model.synchronize_all()),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
        (torch.UntypedStorage, "resize_", _resize),
        (torch.UntypedStorage, "data_ptr", _address),
        (torch.Tensor, "data_ptr", _tensor_address),
        (torch.Tensor, "pin_memory", _pin),
        (torch.Tensor, "is_pinned", _is_pinned),
        (torch.Tensor, "record_stream", _record_stream),
        # DTensor works out shapes with tensors of the global shape: not in the mode that is noted.
        (_sharding_prop, "detect_fake_mode", lambda *_: None),
    ]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(_made_current(model))
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(fake)
        stack.enter_context(_Recorder(model, fake))
        yield model

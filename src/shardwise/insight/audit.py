"""Whether a program computes with ``DTensor``s what it would compute with full tensors.

Parameters, gradients and optimizer states are ``DTensor``s between steps, and torch computes some
operations on them wrongly without an error: docs/dtensors.md has the list. An audit sees each
operation of the program, also in backward, and holds it against the same operation on full tensors:

    meet      ranks exchange which operation they are at; if they differ, all are told
    gather    the operands
    run       the operation of the program, then the same one on what was gathered
    compare   results, what was written, what the host has read
    meet      ranks exchange what they have found; if one has found something, all raise

Ranks meet in process groups of the audit's own, so that a rank that runs a collective of the
program in the meantime is not mistaken for one that has come.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import math
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise._torch import autograd, dtensor, fake, operations
from shardwise.base.arguments import check_arguments, check_seconds
from shardwise.base.devices import GLOO
from shardwise.base.errors import RanksDivergedError, ShardwiseError
from shardwise.frontends.watch_ranks import line_of
from shardwise.transport.peers import Peers, new_group

T = TypeVar("T")

#: Operations whose results have no values yet.
_UNDEFINED = ("aten.empty", "aten.new_empty")
_ALIASES = ("aten.alias", "aten.detach")  # the same tensor once more
_READ = "aten._local_scalar_dense"  # what item(), float() and bool() come to
#: Rounding errors, in units of the last place, of what is computed element by element, and of sums
#: in another order, as a share of the same sums of absolute values.
_ELEMENTWISE, _REORDERED = 4, 32


class _Remedy(enum.Enum):
    """What to write instead, by what an operation does differently."""

    VALUE = "compute on `x.full_tensor()`, which is differentiable, in place of the `DTensor` x"
    LOSS = "call losses on plain tensors: on outputs of the model, or on `x.full_tensor()`"
    FOREACH = "pass a plain number of all ranks, such as `norm.full_tensor()`"
    READ = "read `x.full_tensor().item()`"
    WRITE = (
        "write to a full tensor and copy it back, under no_grad: `full = p.full_tensor()`, then "
        "`full[0] = 0`, then `p.copy_(distribute_tensor(full, p.device_mesh, p.placements))`"
    )
    ASSIGNMENT = "`p.copy_(value)` under no_grad, in place of `p.data = value`"
    RANDOM = (
        "draw before sharding, or draw the full tensor on every rank and take "
        "`distribute_tensor(full, p.device_mesh, p.placements)`"
    )
    GRADIENT = "compute what reads parameters in the loss, such as a penalty, on `p.full_tensor()`"


class _ResultMemory(enum.Enum):
    """Where what an operation has made is, on one rank."""

    NONE = "it has no elements here, or is no DTensor"
    SHARED = "in the memory of the first operand"
    OWN = "elsewhere"


#: What is different, and how, in words.
_Finding = tuple[_Remedy, str]


@contextlib.contextmanager
def audit(model: nn.Module, *, seconds: float = 60.0) -> Iterator[None]:
    """Raise an error at the first operation that a ``DTensor`` computes wrongly.

    ::

        with shardwise.audit(model):
            for batch in itertools.islice(batches, 3):
                train_step(model, batch)

    For models of our runtime and of torch's ``fully_shard``. All ranks enter it, at the same place.
    Each operation on ``DTensor``s is held against the same operation on full tensors: its results
    and what it writes, but for rounding; gradients, in backward; writes to views that do not reach
    the tensor; what the host reads, by ``item()``, ``float()`` or ``bool()``; random values that
    are the same on ranks that hold different rows; and, between steps, the placements of gradients.

    The program computes the same as without it, but much more slowly: every operand is gathered. A
    few steps of a small model are enough. It does not look into compiled code, nor at what a
    program does with local tensors.

    Args:
        model: the sharded model. Its parameters are named in errors.
        seconds: how long a rank waits for the others to come to the same operation.

    Raises:
        ValueError: an operation differs. The message names it, the parameter, the line of the
            program, and what to write instead. Or: ``seconds`` is not above 0, or no parameter of
            the model is a ``DTensor``.
        RanksDivergedError: ranks run different operations.
        PeerLostError: a rank does not come within ``seconds``.
    """
    check_arguments(audit, locals())
    check_seconds("seconds", seconds)
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    if not meshes:
        raise ValueError(
            f"model: found a {type(model).__name__} without a DTensor among its parameters; call "
            "fully_shard first, and enter the audit between steps"
        )
    ranks = _MeshRanks(seconds)
    for mesh in dict.fromkeys(meshes):
        ranks.meet(mesh, "the beginning of the audit", None)
    comparison = _OperationCheck(model, ranks)
    try:
        with _Functions(comparison), _Operations(comparison):
            yield
    except (_FoundError, ShardwiseError):  # which others have been told, or are told by others
        ranks.forget()
        raise
    except BaseException as error:
        ranks.leave(f"{type(error).__name__}: {error}")
        raise
    for mesh in dict.fromkeys(meshes):
        comparison.settle(mesh, _Operation("the end of the audit"), comparison.misplaced_gradient())


class _FoundError(ValueError):
    """What all ranks have found together."""


class _MeshRanks:
    """The ranks of each mesh, which meet before and after every operation.

    Args:
        seconds: how long one waits for the others.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._groups = Peers().once(_groups)

    def meet(self, mesh: DeviceMesh, doing: str, report: T) -> dict[int, T]:
        """Exchange reports, and raise if ranks are at something else; return them by rank."""
        ranks = mesh.mesh.flatten().tolist()
        key = self._seconds, *ranks
        if key not in self._groups:
            self._groups[key] = new_group(ranks, timedelta(seconds=self._seconds), GLOO.name)
        peers = Peers(self._groups[key])
        found = peers.gather_objects((doing, _line(), report), f"the audit of {doing}")
        if len({what for what, _, _ in found}) > 1:
            each = (
                f"rank {rank}: {what}, at {line}"
                for rank, (what, line, _) in zip(ranks, found, strict=True)
            )
            raise RanksDivergedError(
                f"ranks run different operations on DTensors. {'; '.join(each)}. All ranks have to "
                "run the same ones: look before these lines for a condition that differs by rank"
            )
        return {rank: report for rank, (_, _, report) in zip(ranks, found, strict=True)}

    def leave(self, why: str) -> None:
        """Tell the others, if they are still there, that this rank comes no more."""
        for group in self._groups.values():
            with contextlib.suppress(RuntimeError):
                Peers(group).gather_objects((why, _line(), None), "the end of an audit")
        self.forget()

    def forget(self) -> None:
        """Let the next audit make new groups: in these, ranks may be out of step."""
        self._groups.clear()


def _groups(peers: Peers) -> dict[tuple[float, ...], dist.ProcessGroup]:
    """Keep the process groups of audits: by how long their ranks wait, and who they are."""
    return {}


class _Operation:
    """One operation.

    Args:
        function: the operation; or, in words, where else ranks meet.
        args: its arguments, by position and by name.
    """

    def __init__(self, function: Any, args: Any = ((), {})) -> None:
        self.function = function
        self.args = args
        tensors = {id(each): each for each in operations.tensors_in(args)}
        self.operands = [each for each in tensors.values() if isinstance(each, DTensor)]
        written = operations.written_by(function, *args)
        self.written = {id(each): each for each in written}
        self.name = str(function).removesuffix(".default")
        specs = [f"{tuple(each.shape)} {_placed(each)}" for each in self.operands]
        self.doing = f"{self.name} of {', '.join(specs)}" if specs else self.name

    def made(self, result: Any, written: dict[int, Any]) -> list[Any]:
        """Return what it returns that is new, and then what it has written to."""
        known = {id(each) for each in written.values()}
        new = [each for each in operations.leaves(result) if id(each) not in known]
        return [*new, *written.values()]

    def with_tensors(self, others: dict[int, torch.Tensor]) -> list[Any] | None:
        """Run it with other tensors; return what it has made, or ``None`` if it cannot be run."""
        others = others | {key: others[key].clone() for key in self.written}
        args, kwargs = operations.map_tensors(lambda each: others.get(id(each), each), self.args)
        try:
            with torch.no_grad():
                result = self.function(*args, **kwargs)
        except (RuntimeError, NotImplementedError, IndexError):
            return None
        return self.made(result, {key: others[key] for key in self.written})


class _OperationCheck:
    """Holds operations on ``DTensor``s against the same ones on full tensors.

    Args:
        model: whose parameters are named.
        ranks: the ranks, which meet.
    """

    def __init__(self, model: nn.Module, ranks: _MeshRanks) -> None:
        self._model = model
        self._ranks = ranks
        # By local tensors: of one that is referenced weakly, torch swaps no memory, as to() does.
        self._origins = operations.by_tensor()  # what a tensor was first computed from
        self._views = operations.by_tensor()  # what they are of; if they have memory of their own
        self._stale = operations.by_tensor()  # which writes to views of that kind a tensor lacks
        self._starts: list[int] = []  # numbers of nodes of the graph, and the lines that made them
        self._lines: list[str] = []

    def note_line(self, start: int) -> None:
        """Note the line of the program that has made the nodes of the graph from a number on."""
        if autograd.sequence_number() != start:
            self._starts.append(start)
            self._lines.append(_line())

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operation of the program, and compare it."""
        call = _Operation(function, (args, kwargs))
        if call.name in _ALIASES:  # which needs no other rank
            result = function(*args, **kwargs)
            self._follow(call, call.made(result, {}))
            return result
        has_values = all(map(_has_values, call.operands))
        if not has_values or call.name.startswith(_UNDEFINED):
            return function(*args, **kwargs)
        mesh = max((each.device_mesh for each in call.operands), key=DeviceMesh.size)
        is_freed = any(map(_is_freed, call.operands))  # as full parameters are, between their uses
        if any(self._ranks.meet(mesh, call.doing, is_freed).values()):
            return function(*args, **kwargs)
        plain = {k: v.clone() for k, v in call.written.items() if not isinstance(v, DTensor)}
        before = plain | {id(each): _full(each) for each in call.operands}
        result = function(*args, **kwargs)
        made = call.made(result, call.written)
        if operations.is_random(function):
            self._follow(call, made)
            self._compare_random(mesh, call, made)
            return result
        expected = call.with_tensors(before)
        full: list[Any] = []
        found = different = self._lost_write(call) or self.misplaced_gradient()
        if expected is not None:
            full = [_full(each) if isinstance(each, DTensor) else each for each in made]
            different = found or _difference(call, full, expected)
        reports = self._ranks.meet(mesh, call.doing, (different, _memory(call, made))).values()
        self._follow(call, made, [memory for _, memory in reports])
        if expected is not None and any(each for each, _ in reports):
            for each in call.operands:  # of which values may cancel
                key = id(each)
                before[key] = _sizes(before[key] if key in call.written else _full(each, _sizes))
            larger = call.with_tensors(before) or expected
            self.settle(mesh, call, found or _difference(call, full, expected, larger))
        return result

    def settle(self, mesh: DeviceMesh, call: _Operation, found: _Finding | None) -> None:
        """Exchange what ranks have found, and raise on all if one has found something."""
        told = {k: v for k, v in self._ranks.meet(mesh, call.doing, found).items() if v is not None}
        if not told:
            return
        (remedy, text), *_ = told.values()
        if len(set(told.values())) > 1:
            text = "; ".join(f"{each} (rank {rank})" for rank, (_, each) in told.items())
        name = next(filter(None, map(self._name_of, call.operands)), "")
        node = autograd.running_node_number()
        at = -1 if node is None else bisect(self._starts, node) - 1
        line = _line() if at < 0 else f"the backward of {self._lines[at]}"
        raise _FoundError(
            f"{call.name}{name and f' on {name}'}, at {line}: found {text}. Write instead: "
            f"{remedy.value}. See docs/dtensors.md"
        )

    def assigned(self, tensor: DTensor, value: torch.Tensor) -> None:
        """Compare a tensor with what was assigned to its ``data``."""
        if dtensor.storage_of(value) == dtensor.storage_of(tensor):
            return
        call = _Operation("the assignment to .data", ((tensor,), {}))
        self._ranks.meet(tensor.device_mesh, call.doing, None)
        whole = _full(value) if isinstance(value, DTensor) else value
        lost = _Remedy.ASSIGNMENT, "the values of before, expected those that were assigned"
        same = tensor.shape == whole.shape and torch.equal(_full(tensor), whole)
        self.settle(tensor.device_mesh, call, None if same else lost)

    def misplaced_gradient(self) -> _Finding | None:
        """Find a gradient that is not placed as its parameter, between backwards."""
        param: Any
        for name, param in self._model.named_parameters() if not autograd.in_backward() else ():
            grad = param.grad if isinstance(param, DTensor) else None
            if isinstance(grad, DTensor) and grad.placements != param.placements:
                return _Remedy.GRADIENT, (
                    f"the gradient of {name} placed as {_placed(grad)}, expected {_placed(param)}: "
                    "FSDP takes it for a shard"
                )
        return None

    # -- what an operation leaves behind ---------------------------------------------------------

    def _follow(
        self, call: _Operation, made: list[Any], memory: Sequence[Sequence[_ResultMemory]] = ()
    ) -> None:
        """Note what tensors are computed from, and which views have memory of their own.

        Args:
            call: the operation.
            made: what it has made.
            memory: where each of these is, on each rank. A view that all ranks have in full is one
                if the rank that has it shares its memory: what that writes is what counts.
        """
        base = call.operands[0]
        viewed, is_copy = self._views.get(dtensor.plain(base), (base, False))
        stale = self._stale.get(dtensor.plain(base))
        for at, each in enumerate(made):
            if isinstance(each, DTensor) and id(each) not in call.written:
                local, source = dtensor.plain(each), call.operands[min(at, len(call.operands) - 1)]
                self._origins[local] = self._origins.get(dtensor.plain(source), source)
                if fake.only_views(call.function):
                    found = {of_rank[at] for of_rank in memory}
                    apart = _ResultMemory.OWN in found and _ResultMemory.SHARED not in found
                    self._views[local] = viewed, is_copy or apart
                    if stale is not None:
                        self._stale[local] = stale

    def _lost_write(self, call: _Operation) -> _Finding | None:
        """Find what was written to a view and does not reach what it is a view of."""
        for tensor in call.written.values():
            base, is_copy = self._views.get(dtensor.plain(tensor), (tensor, False))
            if is_copy:
                name = self._exact_name_of(base)
                lost = f"{name or 'the tensor behind a view'} unchanged, expected what was written"
                if name:
                    return _Remedy.WRITE, lost
                lost = f"{lost} at {_line()}"
                self._stale[dtensor.plain(base)] = _Remedy.WRITE, lost  # if it is ever read
        return next(filter(None, (self._stale.get(dtensor.plain(e)) for e in call.operands)), None)

    def _exact_name_of(self, tensor: torch.Tensor) -> str:
        for name, param in self._model.named_parameters():
            if tensor is param:
                return name
            if tensor is param.grad:
                return f"the gradient of {name}"
        return ""

    def _name_of(self, tensor: torch.Tensor) -> str:
        """Name the parameter or gradient that a tensor is, or that it was computed from."""
        if name := self._exact_name_of(tensor):
            return name
        name = self._exact_name_of(self._origins.get(dtensor.plain(tensor), tensor))
        return name and f"what was computed from {name}"

    def _compare_random(self, mesh: DeviceMesh, call: _Operation, made: list[Any]) -> None:
        """Find ranks that drew the same for different rows, or something else for the same."""
        drawn = [each for each in made if isinstance(each, DTensor) and each.device_mesh == mesh]
        digests = [_digest(dtensor.local_of(each)) for each in drawn]
        reports = self._ranks.meet(mesh, call.doing, digests)
        found: _Finding | None = None
        for at, tensor in enumerate(drawn):
            for dim, placement in enumerate(tensor.placements):
                for ranks in mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist():
                    values = [reports[rank][at] for rank in ranks if reports[rank][at] is not None]
                    if placement.is_shard() and len(set(values)) < len(values):
                        found = _Remedy.RANDOM, "the same values drawn for different rows"
                    elif placement.is_replicate() and len(set(values)) > 1:
                        found = _Remedy.RANDOM, "other values drawn on each rank for the same rows"
        self.settle(mesh, call, found)


# -- what is compared ----------------------------------------------------------------------------


def _difference(
    call: _Operation, made: list[Any], expected: list[Any], larger: list[Any] | None = None
) -> _Finding | None:
    """Find the first result that is not as expected but for rounding.

    Args:
        call: the operation.
        made: its results and what it has written, as full tensors.
        expected: the same, computed on full tensors.
        larger: the same, computed on absolute values, if sums may be in another order.
    """
    units = _ELEMENTWISE if larger is None else _REORDERED
    reads_part = call.name == _READ and any(map(dtensor.is_part, call.operands))
    for found, want, size in zip(made, expected, larger or expected, strict=True):
        if isinstance(want, torch.Tensor):
            if not _is_close(call, found, want, size, units):
                return _remedy_for(call), _in_words(found, want)
        elif reads_part or not (found == want or (found != found and want != want)):
            return _Remedy.READ, f"{found}, expected {want} on all ranks"
    return None


def _is_close(
    call: _Operation, found: torch.Tensor, want: torch.Tensor, size: torch.Tensor, units: int
) -> bool:
    """Whether two tensors are equal but for some units of rounding of the largest values."""
    if found.shape != want.shape or found.dtype != want.dtype:
        return False
    if not (want.is_floating_point() or want.is_complex()) or not want.numel():
        return torch.equal(found, want)
    dtypes = {each.dtype for each in (*call.operands, want) if each.is_floating_point()}
    unit = max(torch.finfo(each).eps for each in dtypes or {want.dtype})
    bound = units * unit * max(_wide(each).abs().nan_to_num(0, 0, 0).max() for each in (want, size))
    return torch.allclose(_wide(found), _wide(want), rtol=0, atol=float(bound), equal_nan=True)


def _in_words(found: torch.Tensor, want: torch.Tensor) -> str:
    """Say how two tensors differ."""
    if found.shape != want.shape or found.dtype != want.dtype:
        return f"{tuple(found.shape)} {found.dtype}, expected {tuple(want.shape)} {want.dtype}"
    apart = (_wide(found) - _wide(want)).abs().nan_to_num(math.inf)
    at = torch.unravel_index(apart.argmax(), apart.shape)
    place = f" at {[int(each) for each in at]}" if at else ""
    return f"{found[at].item():.6g}{place}, expected {want[at].item():.6g} as of the full tensor"


def _memory(call: _Operation, made: list[Any]) -> list[_ResultMemory]:
    """Say where what an operation has made is, on this rank."""
    base = dtensor.storage_of(call.operands[0])

    def of(value: Any) -> _ResultMemory:
        if not isinstance(value, DTensor) or not dtensor.plain(value).numel():
            return _ResultMemory.NONE
        return _ResultMemory.SHARED if dtensor.storage_of(value) == base else _ResultMemory.OWN

    return [of(each) for each in made]


def _remedy_for(call: _Operation) -> _Remedy:
    if "loss" in call.name or "binary_cross_entropy" in call.name:
        return _Remedy.LOSS
    return _Remedy.FOREACH if "_foreach_" in call.name else _Remedy.VALUE


# -- tensors -------------------------------------------------------------------------------------


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128)


def _sizes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs() if tensor.is_floating_point() else tensor


def _full(tensor: DTensor, change: Callable[..., torch.Tensor] = torch.clone) -> torch.Tensor:
    """Gather a copy of a tensor, or of what ``change`` makes of each rank's part of it."""
    local = change(dtensor.wait_tensor(dtensor.local_of(tensor)).detach())
    with torch.no_grad():
        return dtensor.wrap_local(local, dtensor.spec_of(tensor)).full_tensor()


def _has_values(tensor: DTensor) -> bool:
    local = dtensor.local_of(tensor)
    is_here = tensor.device_mesh.get_coordinate() is not None
    return is_here and dtensor.has_values(local) and dtensor.has_memory(dtensor.wait_tensor(local))


def _is_freed(tensor: DTensor) -> bool:
    local = dtensor.local_of(tensor)
    return local.numel() > 0 and local.untyped_storage().nbytes() == 0


def _placed(tensor: DTensor) -> str:
    return ", ".join(map(dtensor.describe_placement, tensor.placements))


def _digest(local: torch.Tensor) -> tuple[float, ...] | None:
    """Return the first values drawn, unless others may well draw the same; ``None`` then."""
    count = 64 if local.dtype == torch.bool else 4
    values = local.flatten()[:count].tolist()
    return (
        tuple(values)
        if len(values) == count and len(set(values)) >= (4 if count == 4 else 2)
        else None
    )


def _line() -> str:
    """Return which line of the program runs."""
    return line_of(inspect.currentframe())


# -- what sees the operations --------------------------------------------------------------------


class _Operations(fake.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operations as they are dispatched, in forward, in backward and between them."""

    def __init__(self, comparison: _OperationCheck) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._comparison = comparison

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one."""
        is_seen = operations.is_operation(func) and any(issubclass(each, DTensor) for each in types)
        run = functools.partial(self._comparison.run, func) if is_seen else func
        return run(*args, **kwargs or {})


class _Functions(TorchFunctionMode):
    """Sees functions as the program calls them: for lines of backward, and assignments to data."""

    def __init__(self, comparison: _OperationCheck) -> None:
        super().__init__()
        self._comparison = comparison

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call one."""
        start = autograd.sequence_number()
        result = func(*args, **kwargs or {})
        self._comparison.note_line(start)
        if func == torch.Tensor.data.__set__ and isinstance(args[0], DTensor):  # type: ignore[attr-defined]
            self._comparison.assigned(*args)
        return result

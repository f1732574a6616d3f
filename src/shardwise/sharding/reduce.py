"""How the gradients of a group get from full to sharded.

A reduction runs while the backward of the next groups computes, in three steps:

    reduce-scatter over the shard dimension        (always; uncut parameters are all-reduced)
    all-reduce over the replicate dimension        (2-D meshes only)
    scale, convert to the stored dtype, add to the sharded gradient

A parameter that some ranks have no gradient for (an expert that their data did not need) counts as
zeros there. One that no rank has a gradient for gets none. To tell the two apart, one number for
each parameter is reduced with the gradients: 1 from a rank that has one, else 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence, Set
from dataclasses import dataclass, field

import torch

from shardwise import devices, observe
from shardwise._torch import autograd, fake
from shardwise._torch.ownership import is_only_reference
from shardwise.observe import Memory
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.policy import GroupOptions, Precision
from shardwise.transport.base import (
    Call,
    Kind,
    Label,
    PendingWork,
    Reduce,
    Transport,
    Work,
)
from shardwise.transport.memory import is_returned


@dataclass(frozen=True)
class Scaling:
    """How a sum over ranks becomes the gradient.

    Attributes:
        before: what to divide by before the reduction.
        op: the reduction.
        after: what to divide by after the reduction.
    """

    before: float
    op: Reduce
    after: float

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        world_size: int,
        factor: float | None,
        op: Reduce = Reduce.AVG,
    ) -> Scaling:
        """Choose the scaling for gradients reduced in ``dtype``.

        Args:
            dtype: the dtype of the reduction.
            world_size: the number of contributing ranks, over all mesh dimensions.
            factor: what to divide the sum by; ``None`` means ``world_size``.
            op: whether the reduction itself may divide (``AVG``), or only add (``SUM``).
        """
        if dtype == torch.float16:
            # Divide half before and half after: all of it before underflows, all of it after
            # overflows.
            divisor = float(world_size) if factor is None else factor
            before = 1.0
            while before * before < divisor:
                before *= 2.0
            return cls(before, Reduce.SUM, divisor / before)
        if factor is None and op is Reduce.AVG:
            return cls(1.0, Reduce.AVG, 1.0)
        return cls(1.0, Reduce.SUM, float(world_size) if factor is None else factor)


def _scalings_for(
    dtypes: tuple[torch.dtype, ...], world_size: int, options: GroupOptions
) -> tuple[Scaling, ...]:
    """Choose the scaling for each gradient of a group."""
    factor, op = options.gradient_divide_factor, options.reduce_op
    # A factor is not kept: programs set another in every step, or change one in place.
    return (_usual_scalings if factor is None else _scalings)(dtypes, world_size, op, factor)


def _scalings(
    dtypes: tuple[torch.dtype, ...], world_size: int, op: Reduce, factor: float | None
) -> tuple[Scaling, ...]:
    of = {dtype: Scaling.of(dtype, world_size, factor, op) for dtype in dict.fromkeys(dtypes)}
    return tuple(of[dtype] for dtype in dtypes)


_usual_scalings = functools.lru_cache(_scalings)


def deliver_alone(
    params: Sequence[GroupParam],
    grads: Sequence[torch.Tensor],
    precision: Precision,
    options: GroupOptions,
    growing: Container[ShardedParam],
) -> None:
    """Deliver the gradients of a rank that has nobody to reduce them with.

    The arithmetic is that of a :class:`Reduction` over one rank.

    Args:
        params: the parameters that have gradients.
        grads: their gradients.
        precision: the dtypes to reduce in.
        options: the options of the group.
        growing: the parameters whose hooks are left to the caller.
    """
    stored = [param.dtype for param in params]
    dtypes = tuple([precision.reduce_dtype(dtype) for dtype in stored])
    if options.keep_low_precision_grads:
        stored = list(dtypes)
    scalings = _scalings_for(dtypes, 1, options)
    with autograd.no_grad():
        for param, grad, dtype, scaling, kept in zip(
            params, grads, dtypes, scalings, stored, strict=True
        ):
            if grad.dtype != dtype:
                grad = grad.to(dtype)
            if scaling.before != 1.0:
                grad = grad / scaling.before
            form = param.form
            _deliver(form, grad.contiguous(), scaling, kept)
            if form not in growing:
                form.run_hooks()


def _deliver(form: ShardedParam, shard: torch.Tensor, scaling: Scaling, dtype: torch.dtype) -> None:
    """Add a reduced gradient to the sharded one, in ``dtype``."""
    if scaling.after != 1.0:
        shard /= scaling.after
    form.add_grad(shard if shard.dtype == dtype else shard.to(dtype))


@dataclass
class _Scattered:
    """What one reduce-scatter takes.

    Attributes:
        params: what each is the gradient of.
        fulls: full gradients, laid out as chunks.
        outs: what they are reduced into.
        owned: the indices of the gradients that nobody else has.
    """

    params: list[object] = field(default_factory=list)
    fulls: list[torch.Tensor] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    owned: set[int] = field(default_factory=set)

    def add(
        self, param: object, full: torch.Tensor, out: torch.Tensor, *, is_owned: bool = False
    ) -> None:
        """Add a gradient."""
        if is_owned:
            self.owned.add(len(self.fulls))
        self.params.append(param)
        self.fulls.append(full)
        self.outs.append(out)

    def start(self, transport: Transport, op: Reduce, label: Label) -> Work:
        """Start the reduce-scatter."""
        kind = Kind.REDUCE_SCATTER
        return transport.start(
            Call(kind, self.fulls, self.outs, op, label, of=self.params, disposable=self.owned)
        )


@dataclass
class _AllReduced:
    """What one all-reduce takes.

    Attributes:
        params: what each is the gradient of.
        grads: their gradients, which are reduced in place.
    """

    params: list[object] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)

    def add(self, param: object, grad: torch.Tensor) -> None:
        """Add a gradient."""
        self.params.append(param)
        self.grads.append(grad)

    def start(self, transport: Transport, op: Reduce, label: Label) -> Work:
        """Start the all-reduce."""
        return transport.start(
            Call(Kind.ALL_REDUCE, self.grads, self.grads, op, label, of=self.params)
        )


@dataclass(frozen=True)
class TakenGrads:
    """Full gradients that are to be reduced.

    Attributes:
        params: the parameters that take part, the same on all ranks.
        grads: their gradients; zeros for those that this rank has none for.
        owned: the indices of those whose memory goes back to the system when they are freed, and
            that nobody else has, neither a program nor autograd.
        missing: the indices of those that this rank has none for, and that get one only if another
            rank has.
    """

    params: list[GroupParam] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    owned: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)


class Reduction:
    """A running reduction of one group's gradients. The constructor starts the first collective.

    Args:
        label: the label of the group.
        params: the parameters that take part, the same on all ranks.
        grads: their full gradients.
        mesh: the ranks to reduce over.
        precision: the dtypes to reduce in.
        options: the options of the group. Later changes do not affect this reduction.
        pending_all_reduce: the gradients that wait for an all-reduce. This reduction adds to them,
            or takes them with it.
        owned: the indices of gradients that nobody else has.
        missing: the indices of gradients that this rank has not, and of which ``grads`` has zeros.
        growing: the parameters whose gradients may still grow when the reduction is complete. Their
            hooks are left to the caller.
        completed: what to call when the sharded gradients are complete. Not called if they wait
            for an all-reduce.
    """

    def __init__(
        self,
        label: Label,
        params: Sequence[GroupParam],
        grads: Sequence[torch.Tensor],
        mesh: DataMesh,
        precision: Precision,
        options: GroupOptions,
        pending_all_reduce: PendingAllReduce,
        owned: Set[int] = frozenset(),
        missing: Set[int] = frozenset(),
        growing: Container[ShardedParam] = (),
        completed: Callable[[], None] | None = None,
    ) -> None:
        self._label = label
        self._completed = completed
        self._hook = options.all_reduce_hook
        self._hook_stream = options.all_reduce_hook_stream
        self._keep_dtype = options.keep_low_precision_grads
        self._params = list(params)
        self._missing = missing
        self._mesh = mesh
        self._all_reduce = options.requires_all_reduce and mesh.replicate is not None
        self.awaits_all_reduce = mesh.replicate is not None and not options.requires_all_reduce
        self._pending_all_reduce = pending_all_reduce
        dtypes = tuple(precision.reduce_dtype(param.dtype) for param in params)
        self._scalings = _scalings_for(dtypes, mesh.world_size, options)
        self._is_over_replicate = False
        self._hooked = [param.form for param in params if param.form not in growing]
        self._works: list[Work] = []
        # What the collective reads, until it has been waited for.
        self._alive: list[torch.Tensor] = []
        # The reduced gradients, concatenated by dtype; only for an all-reduce hook.
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        with autograd.no_grad():
            self._shards = self._start_over_shard(list(grads), dtypes, owned)

    @property
    def can_be_left(self) -> bool:
        """Whether the rest continues by itself, and holds no more memory than sharded gradients.

        Not if gradients are offloaded: then it holds memory of the device.
        """
        replicate = self._mesh.replicate
        if replicate is None or not (self._is_over_replicate and replicate.overlaps_compute()):
            return False
        return all(param.local.device == self._mesh.device for param in self._params)

    @property
    def steps(self) -> bool:
        """Whether the shards are updated, and the gradients dropped, when this is over."""
        return self._completed is not None

    @property
    def has_hooks(self) -> bool:
        """Whether hooks run as soon as the gradients are complete, and may read or write them."""
        return not self.awaits_all_reduce and any(
            autograd.has_post_accumulate_hooks(form.parameter) for form in self._hooked
        )

    @property
    def is_heavy(self) -> bool:
        """Whether waiting for this at once frees much memory, and hides no less communication."""
        overlaps = self._mesh.scatter.overlaps_compute()
        return self.steps and not overlaps and any(map(is_returned, self._alive))

    def advance(self) -> bool:
        """Wait for the running collective, and start the next one or finish.

        Returns:
            Whether the sharded gradients are complete.
        """
        with autograd.no_grad():
            for work in self._works:
                work.wait()
            self._works.clear()
            self._alive.clear()
            if self.awaits_all_reduce:
                found = self._found.unbind()
                for param, shard, each in zip(self._params, self._shards, found, strict=True):
                    self._pending_all_reduce.add(param, shard, each)
                return True
            if self._all_reduce and not self._is_over_replicate:
                self._is_over_replicate = True
                self._start_over_replicate()
                return False
            if self._flat and self._hook_stream is not None:
                self._works.append(self._run_hook_on(self._hook_stream))
                return False
            self._deliver()
        return True

    def finish(self) -> None:
        """Wait until the sharded gradients are complete."""
        while not self.advance():
            pass

    def _start_over_shard(
        self, grads: list[torch.Tensor], dtypes: Sequence[torch.dtype], owned: Set[int]
    ) -> list[torch.Tensor]:
        transport = self._mesh.scatter
        outs_of = self._places_for_shards(dtypes, grads[0].device)
        shards: list[torch.Tensor] = []
        cut: dict[Reduce, _Scattered] = {}
        uncut: dict[Reduce, _AllReduced] = {}
        for i, (param, scaling, dtype) in enumerate(
            zip(self._params, self._scalings, dtypes, strict=True)
        ):
            grad, out = grads.pop(0), outs_of.pop(0)
            if scaling.before != 1.0:
                grad = grad.to(dtype) / scaling.before
            if transport.world_size == 1 or param.layout.dim is None:
                if grad.dtype != dtype:
                    grad = grad.to(dtype)
                shard = grad.reshape(-1) if out is None else out.copy_(grad.reshape(-1))
                if transport.world_size > 1:
                    uncut.setdefault(scaling.op, _AllReduced()).add(param, shard)
            else:
                full = param.layout.to_chunks(grad)
                shard = (
                    torch.empty(param.layout.chunk_numel, dtype=dtype, device=grad.device)
                    if out is None
                    else out
                )
                its = cut.setdefault(scaling.op, _Scattered())
                its.add(param, full, shard, is_owned=i in owned)
                self._alive.append(full)
            shards.append(shard)
        self._found = self._find_over_shard(cut, uncut, shards[0])
        for each in (*self._alive, *shards, self._found):
            observe.memory_of(Memory.GRADIENTS, self._label.name, each)
        for op, scattered in cut.items():
            self._works.append(scattered.start(transport, op, self._label))
        for op, reduced in uncut.items():
            self._works.append(reduced.start(transport, op, self._label))
        return shards

    def _find_over_shard(
        self, cut: dict[Reduce, _Scattered], uncut: dict[Reduce, _AllReduced], like: torch.Tensor
    ) -> torch.Tensor:
        """Add to what is reduced, for each parameter, whether this rank has a gradient.

        Returns:
            Where the sum arrives: 1-D, not 0 where any rank has one.
        """
        transport, op = self._mesh.scatter, self._scalings[0].op
        its = None if Kind.REDUCE_SCATTER in transport.replaced else cut.get(op)
        # As a gradient is sent, to go with one. A wire leaves float64 as it is.
        full_dtype = dtype = like.dtype
        if not transport.wire.is_plain:
            full_dtype = dtype = torch.float64
        elif its is not None:
            full_dtype, dtype = its.fulls[0].dtype, its.outs[0].dtype
        count = 1 if its is None else transport.world_size
        has = torch.ones(count, len(self._params), dtype=full_dtype, device=like.device)
        for i in self._missing:
            has[:, i] = 0
        has = has.view(-1)
        if its is not None:
            found = torch.empty(len(self._params), dtype=dtype, device=like.device)
            its.add(None, has, found)
            self._alive.append(has)
            return found
        if transport.world_size > 1:
            uncut.setdefault(op, _AllReduced()).add(None, has)
        return has

    def _start_over_replicate(self) -> None:
        replicate = self._mesh.replicate
        assert replicate is not None
        by_op: dict[Reduce, _AllReduced] = {}
        for i, (param, shard, scaling) in enumerate(
            zip(self._params, self._shards, self._scalings, strict=True)
        ):
            held = self._pending_all_reduce.take(param)
            if held is not None:
                shard += held[0]
                self._found[i] += held[1]
            # The rest is padding, with values that nobody may look at.
            own = shard[: param.local.numel()]
            by_op.setdefault(scaling.op, _AllReduced()).add(param, own)
        if not replicate.wire.is_plain:
            self._found = self._found.double()
        by_op[self._scalings[0].op].add(None, self._found)
        for op, reduced in by_op.items():
            self._works.append(reduced.start(replicate, op, self._label))

    def _places_for_shards(
        self, dtypes: Sequence[torch.dtype], device: torch.device
    ) -> list[torch.Tensor | None]:
        """The tensors to reduce into: slices of one per dtype for a hook, else ``None``."""
        if self._hook is None or self.awaits_all_reduce:
            return [None] * len(dtypes)
        sizes: dict[torch.dtype, list[int]] = {}
        for param, dtype in zip(self._params, dtypes, strict=True):
            sizes.setdefault(dtype, []).append(param.layout.chunk_numel)
        self._flat = {
            dtype: torch.zeros(sum(numels), dtype=dtype, device=device)
            for dtype, numels in sizes.items()
        }
        parts = {dtype: list(torch.split(flat, sizes[dtype])) for dtype, flat in self._flat.items()}
        return [parts[dtype].pop(0) for dtype in dtypes]

    def _run_hook_on(self, stream: torch.Stream) -> Work:
        """Run the hook on a stream beside that of backward. The work waits for that stream."""
        assert self._hook is not None
        flats = list(self._flat.values())
        self._flat.clear()  # the shards are slices of them
        device = self._mesh.device
        reduced = devices.current_stream(device).record_event()
        with stream:
            beside = devices.current_stream(device)
            beside.wait_event(reduced)
            for flat in flats:
                self._hook(flat)
            hooked = beside.record_event()
        return PendingWork(lambda: devices.current_stream(device).wait_event(hooked))

    def _deliver(self) -> None:
        for flat in self._flat.values():
            assert self._hook is not None
            self._hook(flat)
        self._flat.clear()
        shards, self._shards = self._shards, []
        absent = self._absent()
        for i, (param, scaling) in enumerate(zip(self._params, self._scalings, strict=True)):
            shard = shards.pop(0)
            if i in absent:
                continue
            stored = shard.dtype if self._keep_dtype else param.dtype
            _deliver(param.form, shard, scaling, stored)
            if param.form in self._hooked:
                param.form.run_hooks()
            del shard
        if self._completed is not None:
            self._completed()

    def _absent(self) -> Set[int]:
        """The indices of gradients that no rank has. Waits for the device if this rank lacks some.

        In a rehearsal, all ranks have the same.
        """
        if not (self._missing and fake.has_values(self._found)):
            return self._missing
        found = self._found.tolist()
        return {i for i in self._missing if not found[i]}


class PendingAllReduce:
    """Gradients that are reduced over the shard dimension only, waiting for the all-reduce."""

    def __init__(self) -> None:
        self._shards: dict[GroupParam, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, param: GroupParam, shard: torch.Tensor, found: torch.Tensor) -> None:
        """Add ``shard`` to the pending gradient of ``param``.

        Args:
            param: the parameter.
            shard: the gradient.
            found: a scalar: 0 if no rank of the shard dimension has a gradient.
        """
        held = self._shards.setdefault(param, (shard, found))
        if held[0] is not shard:
            held[0].add_(shard)
            held[1].add_(found)

    def __contains__(self, param: GroupParam) -> bool:
        return param in self._shards

    def take(self, param: GroupParam) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Remove and return the pending gradient of ``param``, and what was found."""
        return self._shards.pop(param, None)

    def clear(self) -> None:
        """Drop all pending gradients."""
        self._shards.clear()


class UnreducedGrads:
    """The gradients of a group that wait for a reduction.

    Args:
        params: the parameters of the group.
        precision: the dtypes to accumulate in.

    Attributes:
        pending_all_reduce: the gradients that were reduced over the shard dimension only.
    """

    def __init__(self, params: Sequence[GroupParam], precision: Precision) -> None:
        self.pending_all_reduce = PendingAllReduce()
        self._params = params
        self._precision = precision
        # What takes part in the next reduction, on all ranks.
        self._due: set[GroupParam] = set()

    def expect(self) -> None:
        """Note that a backward begins: what requires gradients now takes part in the reduction.

        Which of them get one may differ between ranks, so that cannot decide.
        """
        self._due.update([param for param in self._params if param.sharded.requires_grad])

    def take(self, options: GroupOptions, label: Label, mesh: DataMesh) -> TakenGrads:
        """Take the full gradients. With synchronization off, accumulate them here and take none.

        Args:
            options: the options of the group.
            label: its label.
            mesh: the ranks to reduce over.

        Returns:
            The parameters that take part in the reduction, and their gradients.
        """
        taken = TakenGrads()
        if not options.requires_gradient_sync:
            for param in self._params:
                param.accumulate_grad(self._precision.reduce_dtype(param.dtype))
                held = param.accumulated_grad
                if held is None and param.full is not None:
                    held = param.full.grad
                if held is not None:
                    observe.memory_of(Memory.GRADIENTS, label.name, held)
            return taken
        unused = options.reduce_scatter_unused_params
        if unused or (not self._due and any(param.holds_grad for param in self._params)):
            self.expect()  # what has not run, or ran without a hook that saw its backward begin
        # Gradients that earlier backwards only reduce-scattered are completed even if this
        # backward adds nothing.
        completes = options.requires_all_reduce
        for param in self._params:
            grad = param.take_grad()
            if grad is None and (
                param in self._due or (completes and param in self.pending_all_reduce)
            ):
                if unused or not mesh.is_alone:
                    grad = param.zeros_for_grad()
                if grad is not None and not unused:
                    taken.missing.add(len(taken.grads))
            if grad is not None:
                observe.memory_of(Memory.GRADIENTS, label.name, grad)
                if is_returned(grad) and is_only_reference(grad):
                    taken.owned.add(len(taken.grads))
                taken.params.append(param)
                taken.grads.append(grad)
        self._due.clear()
        return taken

    def drop(self) -> None:
        """Drop all gradients."""
        self.pending_all_reduce.clear()
        self._due.clear()
        for param in self._params:
            param.accumulated_grad = None
            if param.full is not None:
                param.full.grad = None

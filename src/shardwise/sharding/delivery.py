"""How the gradients of a group get from full to sharded.

A delivery is one group's gradients on their way. It goes on while the backward of the next groups
computes, in three steps:

    reduce-scatter over the shard dimension        (always; uncut parameters are all-reduced)
    all-reduce over the replicate dimension        (2-D meshes only)
    scale, convert to the stored dtype, add to the sharded gradient

A parameter that some ranks have no gradient for (an expert that their data did not need) counts as
zeros there. One that no rank has a gradient for gets none. To tell the two apart, one number for
each parameter is reduced with the gradients: 1 from a rank that has one, else 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from shardwise import devices, observe
from shardwise._torch import autograd, fake
from shardwise._torch.ownership import is_only_reference
from shardwise.observe import Memory
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.mesh import DataMesh
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


@dataclass(slots=True)
class Grad:
    """A gradient on its way.

    Attributes:
        param: what it is the gradient of.
        value: the full gradient, or zeros if this rank has none; then this rank's shard of the sum.
        is_owned: whether its memory goes back to the system when it is freed, and nobody else has
            it, neither a program nor autograd.
        is_missing: whether this rank has none, and gets one only if another rank has.
    """

    param: GroupParam
    value: torch.Tensor
    is_owned: bool
    is_missing: bool


#: Gradients that are reduced over the shard dimension only, and beside each a scalar: 0 if no rank
#: of that dimension has one.
Held = dict[GroupParam, tuple[torch.Tensor, torch.Tensor]]


class GroupGrads:
    """The gradients of a group that wait: full ones for a delivery, sharded ones for an all-reduce.

    Args:
        params: the parameters of the group.
        precision: the dtypes to accumulate in.

    Attributes:
        held: the sharded ones.
    """

    def __init__(self, params: Sequence[GroupParam], precision: Precision) -> None:
        self.held: Held = {}
        self._params = params
        self._precision = precision
        # What takes part in the next delivery, on all ranks, and whether it had no gradient when
        # the backward of the group began.
        self._due: dict[GroupParam, bool] = {}

    def expect(self) -> None:
        """Note that a backward begins: what requires gradients now takes part in the delivery.

        Which of them get one may differ between ranks, so that cannot decide.
        """
        for param in self._params:
            if param.sharded.requires_grad:
                self._due[param] = param.full is not None and param.full.grad is None

    def keep(self, name: str) -> None:
        """Accumulate the full gradients here: synchronization is off.

        Args:
            name: the group, for observers.
        """
        for param in self._params:
            self._drop_unwanted(param)
            held = param.accumulate_grad(self._precision.reduce_dtype(param.dtype))
            if held is not None:
                observe.memory_of(Memory.GRADIENTS, name, held)
        self._due = dict.fromkeys(self._due, False)

    def take(self, options: GroupOptions, mesh: DataMesh, name: str) -> list[Grad]:
        """Take the full gradients.

        Args:
            options: the options of the group.
            mesh: the ranks to reduce over.
            name: the group, for observers.

        Returns:
            A gradient for each parameter that takes part, the same ones on all ranks.
        """
        due, unused = self._due, options.reduce_scatter_unused_params
        if unused or (not due and any(param.holds_grad for param in self._params)):
            # What has not run, or ran without a hook that saw its backward begin.
            for param in self._params:
                if param.sharded.requires_grad:
                    due.setdefault(param, False)
        # Gradients that earlier backwards only reduce-scattered are completed even if this
        # backward adds nothing.
        completed = self.held if options.requires_all_reduce else ()
        taken = []
        for param in self._params:
            self._drop_unwanted(param)
            grad = param.take_grad()
            is_missing = grad is None and not unused
            takes_part = param in due or param in completed
            if grad is None and takes_part and (unused or not mesh.is_alone):
                grad = param.zeros_for_grad()
            if grad is not None:
                observe.memory_of(Memory.GRADIENTS, name, grad)
                is_owned = is_returned(grad) and is_only_reference(grad)
                taken.append(Grad(param, grad, is_owned, is_missing))
        due.clear()
        return taken

    def drop(self) -> None:
        """Drop all gradients."""
        self.held.clear()
        self._due.clear()
        for param in self._params:
            param.drop_grad()

    def _drop_unwanted(self, param: GroupParam) -> None:
        """Drop the gradient of a parameter that a hook froze during this backward."""
        param.freeze_or_unfreeze()
        if self._due.get(param) and param.full is not None and not param.full.requires_grad:
            param.full.grad = None


class Delivery:
    """One group's gradients on their way. The constructor starts the first collective.

    Args:
        label: the label of the group, with the parameters that take part.
        grads: the gradients.
        held: those of the group that wait for an all-reduce. These are added to them, or take them
            along.
        mesh: the ranks to reduce over.
        precision: the dtypes to reduce in.
        options: the options of the group. Later changes do not affect this delivery.
        complete: what to call when the sharded gradients are complete. Not called if they wait for
            an all-reduce.

    Attributes:
        is_held: whether the gradients are to wait for a later all-reduce.
        steps: whether the shards are updated, and the gradients dropped, when this is over.
    """

    def __init__(
        self,
        label: Label,
        grads: list[Grad],
        held: Held,
        mesh: DataMesh,
        precision: Precision,
        options: GroupOptions,
        complete: Callable[[], None] | None = None,
    ) -> None:
        self.is_held = mesh.replicate is not None and not options.requires_all_reduce
        self.steps = complete is not None
        self._forms = [grad.param.form for grad in grads if not grad.param.form.is_tied]
        self._mesh = mesh
        self._way = _deliver(label, grads, held, mesh, precision, options, complete)
        with autograd.no_grad():
            self._flight = next(self._way)

    @property
    def continues(self) -> bool:
        """Whether the rest needs nobody, and holds no more memory than sharded gradients."""
        return self._flight.continues

    @property
    def is_urgent(self) -> bool:
        """Whether to finish this at once.

        Because hooks run as soon as the gradients are complete, and may read or write them; or
        because that frees much memory before a step, and hides no less communication.
        """
        if not self.is_held and any(
            autograd.has_post_accumulate_hooks(form.parameter) for form in self._forms
        ):
            return True
        if not self.steps or self._mesh.scatter.overlaps_compute():
            return False
        return any(map(is_returned, self._flight.alive))

    @property
    def has_landed(self) -> bool:
        """Whether this is over: the sharded gradients are complete, or held."""
        return self._flight is _LANDED

    def advance(self) -> None:
        """Wait for what is under way, and start what follows."""
        with autograd.no_grad():
            for work in self._flight.works:
                work.wait()
            self._flight = _LANDED  # frees what was read
            self._flight = next(self._way, _LANDED)

    def finish(self) -> None:
        """Wait until it is over."""
        while not self.has_landed:
            self.advance()


class _Flight:
    """What a delivery waits for: collectives over one transport, or a hook on another stream.

    Attributes:
        works: what is under way.
        alive: what that reads, until it has been waited for.
        continues: whether the rest needs nobody, and holds no more memory than sharded gradients.
    """

    def __init__(self, continues: bool = False) -> None:
        self.works: list[Work] = []
        self.alive: list[torch.Tensor] = []
        self.continues = continues
        # By kind and arithmetic, what each call takes: what a tensor is the gradient of, what is
        # read and what is written, and whether nobody else has what is read.
        self._calls: dict[
            tuple[Kind, Reduce], list[tuple[object, torch.Tensor, torch.Tensor, bool]]
        ] = {}

    def reduce(self, op: Reduce, of: object, tensor: torch.Tensor) -> None:
        """Add a tensor to all-reduce in place."""
        self._calls.setdefault((Kind.ALL_REDUCE, op), []).append((of, tensor, tensor, False))

    def scatter(
        self, op: Reduce, of: object, full: torch.Tensor, shard: torch.Tensor, is_owned: bool
    ) -> None:
        """Add a tensor to reduce-scatter."""
        added = (of, full, shard, is_owned)
        self._calls.setdefault((Kind.REDUCE_SCATTER, op), []).append(added)
        self.alive.append(full)

    def scattered(self, op: Reduce) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the first full tensor to reduce-scatter so, and its shard, if there is one."""
        found = self._calls.get((Kind.REDUCE_SCATTER, op))
        return found[0][1:3] if found else None

    def start(self, transport: Transport, label: Label) -> None:
        """Start the calls, reduce-scatters first."""
        for kind, op in sorted(self._calls, key=lambda each: each[0] is Kind.ALL_REDUCE):
            of, read, written, owned = zip(*self._calls[kind, op], strict=True)
            disposable = {i for i, is_owned in enumerate(owned) if is_owned}
            call = Call(kind, read, written, op, label, of, disposable)
            self.works.append(transport.start(call))
        self._calls.clear()


_LANDED = _Flight()


def _deliver(
    label: Label,
    grads: list[Grad],
    held: Held,
    mesh: DataMesh,
    precision: Precision,
    options: GroupOptions,
    complete: Callable[[], None] | None,
) -> Iterator[_Flight]:
    """The way of gradients; see :class:`Delivery`. Yields what has to be waited for."""
    hook, stream = options.all_reduce_hook, options.all_reduce_hook_stream
    keeps_dtype, is_held = options.keep_low_precision_grads, not options.requires_all_reduce
    replicate = mesh.replicate
    dtypes = tuple(precision.reduce_dtype(grad.param.dtype) for grad in grads)
    scalings = _scalings_for(dtypes, mesh.world_size, options)
    outs: list[torch.Tensor | None] = [None] * len(grads)
    flats: list[torch.Tensor] = []
    if hook is not None and (replicate is None or not is_held):
        flats, outs = _places_for_hook(grads, dtypes)
    flight, found = _start_over_shard(label, grads, scalings, dtypes, outs, mesh.scatter)
    del outs
    yield flight
    del flight
    if replicate is not None and is_held:
        for grad, each in zip(grads, found.unbind(), strict=True):
            shard, presence = held.setdefault(grad.param, (grad.value, each))
            if shard is not grad.value:
                shard.add_(grad.value)
                presence.add_(each)
        return
    if replicate is not None:
        flight = _Flight(
            replicate.overlaps_compute()
            and all(grad.param.local.device == mesh.device for grad in grads)
        )
        for i, (grad, scaling) in enumerate(zip(grads, scalings, strict=True)):
            if grad.param in held:
                shard, presence = held.pop(grad.param)
                grad.value += shard
                found[i] += presence
            # The rest is padding, with values that nobody may look at.
            own = grad.value[: grad.param.local.numel()]
            flight.reduce(scaling.op, grad.param, own)
        if not replicate.wire.is_plain:
            found = found.double()
        flight.reduce(scalings[0].op, None, found)
        flight.start(replicate, label)
        yield flight
    if hook is not None and flats:
        if stream is None:
            for flat in flats:
                hook(flat)
        else:
            yield _run_hook_on(stream, hook, flats, mesh.device)
        flats.clear()  # the shards are slices of them
    absent = _absent(grads, found)
    for scaling in scalings:
        _add_to_shard(grads.pop(0), scaling, keeps_dtype, absent)
    if complete is not None:
        complete()


def _start_over_shard(
    label: Label,
    grads: Sequence[Grad],
    scalings: Sequence[Scaling],
    dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor | None],
    transport: Transport,
) -> tuple[_Flight, torch.Tensor]:
    """Start to reduce over the shard dimension, each into one of ``outs`` if there is one.

    Returns:
        What to wait for, and where the number for each parameter arrives: 1-D, not 0 where any
        rank has a gradient.
    """
    flight = _Flight()
    for grad, scaling, dtype, out in zip(grads, scalings, dtypes, outs, strict=True):
        value, layout = grad.value, grad.param.layout
        if scaling.before != 1.0:
            value = value.to(dtype) / scaling.before
        if transport.world_size == 1 or layout.dim is None:
            if value.dtype != dtype:
                value = value.to(dtype)
            grad.value = value.reshape(-1) if out is None else out.copy_(value.reshape(-1))
            if transport.world_size > 1:
                flight.reduce(scaling.op, grad.param, grad.value)
        else:
            full = layout.to_chunks(value)
            if out is None:
                out = torch.empty(layout.chunk_numel, dtype=dtype, device=value.device)
            grad.value = out
            flight.scatter(scaling.op, grad.param, full, out, grad.is_owned)
    found = _count(flight, scalings[0].op, grads, transport)
    for each in (*flight.alive, *(grad.value for grad in grads), found):
        observe.memory_of(Memory.GRADIENTS, label.name, each)
    flight.start(transport, label)
    return flight, found


def _count(
    flight: _Flight, op: Reduce, grads: Sequence[Grad], transport: Transport
) -> torch.Tensor:
    """Add to what is reduced, for each parameter, whether this rank has a gradient.

    Returns:
        Where the sum arrives.
    """
    beside = None if Kind.REDUCE_SCATTER in transport.replaced else flight.scattered(op)
    like = grads[0].value
    # As a gradient is sent, to go with one. A wire leaves float64 as it is.
    dtypes = [each.dtype for each in beside or (like, like)]
    if not transport.wire.is_plain:
        dtypes = [torch.float64] * 2
    rows = 1 if beside is None else transport.world_size
    has = torch.ones(rows, len(grads), dtype=dtypes[0], device=like.device)
    for i, grad in enumerate(grads):
        if grad.is_missing:
            has[:, i] = 0
    has = has.view(-1)
    if beside is not None:
        found = torch.empty(len(grads), dtype=dtypes[1], device=like.device)
        flight.scatter(op, None, has, found, is_owned=False)
        return found
    if transport.world_size > 1:
        flight.reduce(op, None, has)
    return has


def _places_for_hook(
    grads: Sequence[Grad], dtypes: Sequence[torch.dtype]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """A tensor of each dtype, for a hook, and the slice of one to reduce each gradient into."""
    sizes: dict[torch.dtype, list[int]] = {}
    for grad, dtype in zip(grads, dtypes, strict=True):
        sizes.setdefault(dtype, []).append(grad.param.layout.chunk_numel)
    device = grads[0].value.device
    flats = {
        dtype: torch.zeros(sum(numels), dtype=dtype, device=device)
        for dtype, numels in sizes.items()
    }
    slices = {dtype: iter(torch.split(flat, sizes[dtype])) for dtype, flat in flats.items()}
    return list(flats.values()), [next(slices[dtype]) for dtype in dtypes]


def _run_hook_on(
    stream: torch.Stream,
    hook: Callable[[torch.Tensor], object],
    flats: Sequence[torch.Tensor],
    device: torch.device,
) -> _Flight:
    """Run the hook on a stream beside that of backward. The work waits for that stream."""
    reduced = devices.current_stream(device).record_event()
    with stream:
        beside = devices.current_stream(device)
        beside.wait_event(reduced)
        for flat in flats:
            hook(flat)
        hooked = beside.record_event()
    flight = _Flight()
    flight.works.append(PendingWork(lambda: devices.current_stream(device).wait_event(hooked)))
    return flight


def _absent(grads: Sequence[Grad], found: torch.Tensor) -> Set[GroupParam]:
    """The parameters that no rank has a gradient of. Waits for the device if this rank lacks some.

    In a rehearsal, all ranks have the same.
    """
    missing = {i: grad.param for i, grad in enumerate(grads) if grad.is_missing}
    if missing and fake.has_values(found):
        sums = found.tolist()
        return {param for i, param in missing.items() if not sums[i]}
    return set(missing.values())


def deliver_alone(grads: Sequence[Grad], precision: Precision, options: GroupOptions) -> None:
    """Deliver the gradients of a rank that has nobody to reduce them with.

    The arithmetic is that of a :class:`Delivery` over one rank.

    Args:
        grads: the gradients.
        precision: the dtypes to reduce in.
        options: the options of the group.
    """
    dtypes = tuple([precision.reduce_dtype(grad.param.dtype) for grad in grads])
    scalings = _scalings_for(dtypes, 1, options)
    with autograd.no_grad():
        for grad, dtype, scaling in zip(grads, dtypes, scalings, strict=True):
            value = grad.value
            if value.dtype != dtype:
                value = value.to(dtype)
            if scaling.before != 1.0:
                value = value / scaling.before
            grad.value = value.contiguous()
            _add_to_shard(grad, scaling, options.keep_low_precision_grads)


def _add_to_shard(
    grad: Grad, scaling: Scaling, keeps_dtype: bool, absent: Set[GroupParam] = frozenset()
) -> None:
    """Add a reduced gradient to the sharded one, and run hooks unless other groups add to it."""
    param, shard = grad.param, grad.value
    if param in absent:
        return
    if scaling.after != 1.0:
        shard /= scaling.after
    form = param.form
    form.add_grad(shard if keeps_dtype or shard.dtype == param.dtype else shard.to(param.dtype))
    if not form.is_tied:
        form.run_hooks()

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

import enum
import functools
import operator
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from shardwise._torch import autograd, dtensor
from shardwise._torch.dtensor import is_only_reference, local_of
from shardwise.base import devices, observe
from shardwise.base.observe import Memory
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

observe.ALLOCATES[__file__] = Memory.GRADIENTS


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


_UNSCALED = Scaling(1.0, Reduce.AVG, 1.0)
#: The dtype of the shard that a :class:`Grad` is for.
_STORED = operator.attrgetter("param.form.parameter.dtype")


@dataclass(slots=True)
class Grad:
    """A gradient on its way.

    Attributes:
        param: what it is the gradient of.
        value: the full gradient, or zeros if this rank has none; then this rank's shard of the sum.
        is_owned: whether its memory goes back to the system when it is freed, and nothing else has
            it, neither a program nor autograd.
        is_missing: whether this rank has none, and gets one only if another rank has.
    """

    param: GroupParam
    value: torch.Tensor
    is_owned: bool
    is_missing: bool


class When(enum.Enum):
    """When a delivery waits for what is under way, at the latest.

    ``AT_ONCE``: hooks run next, and may read or write the gradients. ``BEFORE_STEP``: at once if
    the group then steps, for that frees much memory and hides no less communication. ``NEXT``: when
    the next group's backward is over. ``HELD``: so, or when this backward is over, since the
    gradients wait for a later all-reduce then. ``LEFT``: when gradients are to be complete, for it
    continues by itself, and holds no more memory than sharded gradients.
    """

    AT_ONCE = "at once"
    BEFORE_STEP = "before the step"
    NEXT = "when the next group is over"
    HELD = "when backward is over"
    LEFT = "at the end"


class Flight:
    """What a delivery waits for: collectives over one transport, or a hook on another stream.

    Attributes:
        when: when it does, at the latest.
        works: what is under way.
        alive: what that reads, until it has been waited for.
    """

    def __init__(self, when: When = When.NEXT) -> None:
        self.when = when
        self.works: list[Work] = []
        self.alive: list[torch.Tensor] = []
        # By kind and arithmetic, what each call takes: what a tensor is the gradient of, what is
        # read and what is written, and whether nothing else has what is read.
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
        """Start the calls: what is scattered, which is most, comes first."""
        calls = list(self._calls.items())
        if len(calls) > 1:
            calls.sort(key=lambda each: each[0][0] is Kind.ALL_REDUCE)
        for (kind, op), entries in calls:
            of, read, written, owned = zip(*entries, strict=True)
            disposable = {i for i, is_owned in enumerate(owned) if is_owned}
            call = Call(kind, read, written, op, label, of, disposable)
            self.works.append(transport.start(call))
        self._calls.clear()


_LANDED = Flight()  # nothing is waited for


class Delivery:
    """One group's gradients on their way. The constructor starts the first collective.

    Args:
        way: what the gradients go through. It yields what has to be waited for.
        step: updates the shards, and drops the gradients, when that is over; ``None``: nothing
            does.

    Attributes:
        when: when to :meth:`advance`, at the latest.
        has_landed: whether this is over: the sharded gradients are complete, or held.
    """

    when: When
    has_landed: bool

    def __init__(self, way: Iterator[Flight], step: Callable[[], None] | None) -> None:
        self._way = way
        self._step = step
        self._flight = _LANDED
        self.advance()

    @property
    def steps(self) -> bool:
        """Whether the shards are updated, and the gradients dropped, when this is over."""
        return self._step is not None

    def advance(self) -> None:
        """Wait for what is under way, and start what follows."""
        for work in self._flight.works:
            work.wait()
        self._flight = _LANDED  # frees what was read
        with autograd.no_grad():
            self._flight = next(self._way, _LANDED)
            self.when, self.has_landed = self._flight.when, self._flight is _LANDED
            if self.has_landed and self._step is not None:
                self._step()

    def finish(self) -> None:
        """Wait until this is over."""
        while not self.has_landed:
            self.advance()


class GroupGrads:
    """The gradients of a group: those that wait, and the way that they take.

    Args:
        params: the parameters of the group.
        precision: the dtypes to accumulate and reduce in.
    """

    def __init__(self, params: Sequence[GroupParam], precision: Precision) -> None:
        self._params = params
        self._reduce_dtype = functools.cache(precision.reduce_dtype)
        # The dtypes of parameters that do not have those of the group.
        self._own = {each: each.precision for each in params if each.precision is not precision}
        # What takes part in the next delivery, on all ranks, and whether it had no gradient when
        # the backward of the group began.
        self._due: dict[GroupParam, bool] = {}
        # Gradients that are reduced over the shard dimension only, and a scalar for each: 0 if no
        # rank of that dimension has one. They wait for the all-reduce.
        self._held: dict[GroupParam, tuple[torch.Tensor, torch.Tensor]] = {}

    def _dtype_for(self, param: GroupParam) -> torch.dtype:
        own = self._own.get(param)
        return self._reduce_dtype(param.dtype) if own is None else own.reduce_dtype(param.dtype)

    def expect(self) -> None:
        """Note that a backward begins: what requires gradients now takes part in the delivery.

        Which of them get one may differ between ranks, so that cannot decide.
        """
        for param in self._params:
            if param.form.parameter.requires_grad:
                self._due[param] = param.full is not None and param.full.grad is None

    def expect_all(self) -> None:
        """Have every parameter that requires gradients now take part in the next delivery."""
        for param in self._params:
            if param.sharded.requires_grad:
                self._due.setdefault(param, False)

    def are_left(self, options: GroupOptions) -> bool:
        """Whether there are gradients to deliver."""
        is_held = bool(self._held) and options.requires_all_reduce
        unused = options.reduce_scatter_unused_params
        return is_held or unused or any(param.holds_grad for param in self._params)

    def keep(self, name: str) -> None:
        """Accumulate the full gradients of the group ``name``: synchronization is off."""
        self._drop_unwanted()
        for param in self._params:
            kept = param.accumulate_grad(self._dtype_for(param))
            if kept is not None:
                observe.memory_of(Memory.GRADIENTS, name, kept)
        self._due = dict.fromkeys(self._due, False)

    def take(self, options: GroupOptions, mesh: DataMesh, name: str) -> list[Grad]:
        """Take the full gradients of the group ``name``, to deliver them over ``mesh``.

        Returns:
            One for each parameter that takes part: the same parameters on all ranks.
        """
        due, unused = self._due, options.reduce_scatter_unused_params
        if unused or (not due and any(param.holds_grad for param in self._params)):
            # What has not run, or ran without a hook that saw its backward begin.
            for param in self._params:
                if param.sharded.requires_grad:
                    due.setdefault(param, False)
        # Gradients that earlier backwards only reduce-scattered are completed even if this
        # backward adds nothing.
        completed = self._held if options.requires_all_reduce else ()
        self._drop_unwanted()
        taken, alone = [], mesh.is_alone
        for param in self._params:
            grad, is_missing = param.take_grad(), False
            if grad is None and (unused or not alone) and (param in due or param in completed):
                grad, is_missing = param.zeros_for_grad(), not unused
            if grad is not None:
                is_owned = not alone and is_returned(grad) and is_only_reference(grad)
                taken.append(Grad(param, grad, is_owned, is_missing))
        if observe.is_observed():
            observe.memory_of(Memory.GRADIENTS, name, *[grad.value for grad in taken])
        due.clear()
        return taken

    def drop(self) -> None:
        """Drop all gradients."""
        self._held.clear()
        self._due.clear()
        for param in self._params:
            param.drop_grad()

    def _drop_unwanted(self) -> None:
        """Drop the gradients of parameters whose shards a hook froze during this backward.

        If it froze the full parameter, autograd saw that: a gradient from before then stays.
        """
        for param in GroupParam.freeze_or_unfreeze_all(self._params):
            if param.full is not None and self._due.get(param):
                param.full.grad = None

    def complete(self, grads: list[Grad], options: GroupOptions, name: str) -> None:
        """Add what was taken from the group ``name`` to the sharded gradients, without reducing."""
        factor, keeps_dtype = options.gradient_divide_factor, options.keep_low_precision_grads
        while grads:
            grad = grads.pop(0)
            dtype = self._dtype_for(grad.param)
            scaling = _UNSCALED if factor is None else Scaling.of(dtype, 1, factor)
            grad.value = _scaled(grad.value, dtype, scaling, name).contiguous()
            _add_to_shard(grad, scaling, keeps_dtype)

    def deliver(
        self, grads: list[Grad], mesh: DataMesh, options: GroupOptions, label: Label
    ) -> Iterator[Flight]:
        """The way of gradients that were taken. Yields what has to be waited for.

        Args:
            grads: the gradients, which are taken out of the list.
            mesh: the ranks to reduce over.
            options: the options of the group. Later changes do not affect this delivery.
            label: the label of the group, with the parameters that take part.
        """
        hook, stream = options.all_reduce_hook, options.all_reduce_hook_stream
        keeps_dtype, replicate = options.keep_low_precision_grads, mesh.replicate
        is_held = replicate is not None and not options.requires_all_reduce
        if self._own:
            dtypes = tuple(self._dtype_for(grad.param) for grad in grads)
        else:
            dtypes = tuple(map(self._reduce_dtype, map(_STORED, grads)))
        scalings = _scalings_for(dtypes, mesh.world_size, options)
        flats, outs = _places_for_shards(grads, dtypes, None if is_held else hook)
        flight = Flight(When.HELD if is_held else _when(grads, mesh.scatter))
        found = _add_all(flight, grads, dtypes, scalings, outs, mesh.scatter, label.name)
        flight.start(mesh.scatter, label)
        del outs
        yield flight
        del flight
        if is_held:
            self._hold(grads, found)
            return
        if replicate is not None:
            self._add_held(grads, found)
            found = found if replicate.wire.is_plain else found.double()
            yield _start_over_replicas(grads, scalings, found, mesh, label)
        if hook is not None and stream is not None:
            yield _run_hook_on(stream, hook, flats, mesh.device)
        elif hook is not None:
            for flat in flats:
                hook(flat)
        flats.clear()  # the shards are slices of them
        absent = _absent(grads, found)
        for scaling in scalings:
            grad = grads.pop(0)
            if grad.param not in absent:
                _add_to_shard(grad, scaling, keeps_dtype)

    def _hold(self, grads: Sequence[Grad], found: torch.Tensor) -> None:
        """Keep gradients for a later all-reduce."""
        for grad, each in zip(grads, found.unbind(), strict=True):
            shard, presence = self._held.setdefault(grad.param, (grad.value, each))
            if shard is not grad.value:
                shard.add_(grad.value)
                presence.add_(each)

    def _add_held(self, grads: Sequence[Grad], found: torch.Tensor) -> None:
        """Add the gradients that wait for this all-reduce."""
        for i, grad in enumerate(grads):
            if grad.param in self._held:
                shard, presence = self._held.pop(grad.param)
                grad.value += shard
                found[i] += presence


def _when(grads: Sequence[Grad], transport: Transport) -> When:
    """When to wait for a reduction over the shard dimension."""
    found = When.NEXT
    alone = not transport.overlaps_compute
    for grad in grads:
        form = grad.param.form
        if not form.is_tied and autograd.has_post_accumulate_hooks(form.parameter):
            return When.AT_ONCE
        if alone and is_returned(grad.value):
            found = When.BEFORE_STEP
    return found


def _add_all(
    flight: Flight,
    grads: Sequence[Grad],
    dtypes: Sequence[torch.dtype],
    scalings: Sequence[Scaling],
    outs: Sequence[torch.Tensor | None],
    transport: Transport,
    name: str,
) -> torch.Tensor:
    """Add what is reduced over the shard dimension, each into one of ``outs`` if there is one.

    What is made for it is reported as memory of the group ``name``.

    Returns:
        Where the number for each parameter arrives: 1-D, not 0 where any rank has a gradient.
    """
    for grad, dtype, scaling, out in zip(grads, dtypes, scalings, outs, strict=True):
        value, layout = grad.value, grad.param.layout
        is_cut = transport.world_size > 1 and layout.dim is not None
        if scaling.before != 1.0 or not is_cut:
            value = _scaled(value, dtype, scaling, name)
        if is_cut:
            value = layout.to_chunks(value)
            if out is None:
                out = torch.empty(layout.chunk_numel, dtype=dtype, device=value.device)
            flight.scatter(scaling.op, grad.param, value, out, grad.is_owned)
        else:
            value = value.reshape(-1)
            out = value if out is None else out.copy_(value)
            if transport.world_size > 1:
                flight.reduce(scaling.op, grad.param, out)
        observe.memory_of(Memory.GRADIENTS, name, value, out)
        grad.value = out
    found, sent = _count(flight, scalings[0].op, grads, transport)
    observe.memory_of(Memory.GRADIENTS, name, sent, found)
    return found


def _count(
    flight: Flight, op: Reduce, grads: Sequence[Grad], transport: Transport
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to what is reduced, for each parameter, whether this rank has a gradient.

    Returns:
        Where the sum arrives, and what is sent.
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
        return found, has
    if transport.world_size > 1:
        flight.reduce(op, None, has)
    return has, has


def _start_over_replicas(
    grads: Sequence[Grad],
    scalings: Sequence[Scaling],
    found: torch.Tensor,
    mesh: DataMesh,
    label: Label,
) -> Flight:
    """Start to reduce over the replicate dimension, in place."""
    replicate = mesh.replicate
    assert replicate is not None
    on_device = all(grad.param.local.device == mesh.device for grad in grads)
    flight = Flight(When.LEFT if on_device and replicate.overlaps_compute else When.NEXT)
    for grad, scaling in zip(grads, scalings, strict=True):
        # The rest is padding, with values that may not be looked at.
        flight.reduce(scaling.op, grad.param, grad.value[: grad.param.local.numel()])
    flight.reduce(scalings[0].op, None, found)
    flight.start(replicate, label)
    return flight


def _places_for_shards(
    grads: Sequence[Grad], dtypes: Sequence[torch.dtype], hook: object
) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
    """For a hook, a tensor of each dtype, and the slice of one to reduce each gradient into."""
    if hook is None:
        return [], [None] * len(grads)
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
) -> Flight:
    """Run the hook on a stream beside that of backward. The work waits for that stream."""
    reduced = devices.current_stream(device).record_event()
    with stream:
        beside = devices.current_stream(device)
        beside.wait_event(reduced)
        for flat in flats:
            hook(flat)
        hooked = beside.record_event()
    flight = Flight()
    flight.works.append(PendingWork(lambda: devices.current_stream(device).wait_event(hooked)))
    return flight


def _absent(grads: Sequence[Grad], found: torch.Tensor) -> Set[GroupParam]:
    """The parameters that no rank has a gradient of. Waits for the device if this rank lacks some.

    In a rehearsal, all ranks have the same.
    """
    missing = {i: grad.param for i, grad in enumerate(grads) if grad.is_missing}
    if missing and dtensor.has_values(found):
        sums = found.tolist()
        return {param for i, param in missing.items() if not sums[i]}
    return set(missing.values())


def _scaled(value: torch.Tensor, dtype: torch.dtype, scaling: Scaling, name: str) -> torch.Tensor:
    if value.dtype != dtype:
        value = value.to(dtype)
        observe.memory_of(Memory.GRADIENTS, name, value)  # beside what it was converted from
    return value if scaling.before == 1.0 else value / scaling.before


def _add_to_shard(grad: Grad, scaling: Scaling, keeps_dtype: bool) -> None:
    """Add a reduced gradient to the sharded one, and run hooks unless other groups add to it."""
    form, shard = grad.param.form, grad.value
    if scaling.after != 1.0:
        shard /= scaling.after
    dtype = local_of(form.parameter).dtype
    form.add_grad(shard if keeps_dtype or shard.dtype == dtype else shard.to(dtype))
    if not form.is_tied and autograd.has_post_accumulate_hooks(form.parameter):
        form.run_hooks()

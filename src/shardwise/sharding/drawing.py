"""Random writes to shards, such as those of ``torch.nn.init``: the values of one process.

With one seed, every rank would draw the same numbers for its rows. So operators that draw, in place
or for a tensor like another one, draw for the whole tensor on every rank, which keeps its part.
They are registered in the table of operators of ``DTensor``, for tensors that are sharded like a
parameter of ours.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement

from shardwise._torch import dtensor, operations
from shardwise.transport.peers import Peers

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

#: Operators that give an element of their own to each element of the tensor they are called with,
#: and draw as many numbers whatever its values are. So poisson is not among them; torch refuses it.
_DRAWING = (
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *("native_dropout", "normal", "normal_", "rand_like", "randint_like", "randn_like"),
    *("random_", "uniform_"),
)

#: The attribute that marks a row of a tensor that is handled.
_ROW = "_shardwise_row"

#: How tensors that are handled are sharded, and how many elements they have, by the hash of their
#: mesh: a mesh itself would keep its process groups alive.
_known: dict[int, set[tuple[tuple[Placement, ...], int]]] = {}


def draw_whole(spec: dtensor.DTensorSpec) -> None:
    """Draw for the whole tensor from now on, for tensors that are sharded as ``spec`` says."""
    dtensor.handle(_handlers())  # ranks that are threads have a table each
    _known.setdefault(hash(spec.mesh), set()).add((spec.placements, spec.shape.numel()))


@functools.cache
def _handlers() -> dict[dtensor.Operator, dtensor.Handler]:
    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in _DRAWING]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    whole = [each for each in overloads if operations.is_random(each)]
    whole += [aten.eye.out, aten.eye.m_out]
    found: dict[dtensor.Operator, dtensor.Handler] = dict.fromkeys(whole, _compute_whole)
    return found | {aten.select.int: _select, aten.any.default: _any}


def _is_handled(tensor: object) -> bool:
    """Whether a tensor is sharded like a parameter of ours, or is what became of one."""
    if not isinstance(tensor, DTensor):
        return False
    local, known = dtensor.local_of(tensor), _known.get(hash(tensor.device_mesh))
    if known is None or local.is_meta or dtensor.is_wrapper(local):
        return False
    is_like_one = (tensor.placements, tensor.numel()) in known
    return is_like_one or _ROW in vars(tensor) or next(_frames_of_init(), None) is not None


def _compute_whole(operator: dtensor.Operator, args: _Args, kwargs: _Kwargs) -> Any:
    """Compute on whole tensors, of which this rank has its part, and keep its part of the result.

    Raises:
        NotImplementedError: a function of ``torch.nn.init`` goes on to do what no ``DTensor`` can.
    """
    sharded = [each for each in (*args, *kwargs.values()) if isinstance(each, DTensor)]
    if not all(map(_is_handled, sharded)) or len({each.shape for each in sharded}) > 1:
        return dtensor.compute(operator, args, kwargs)
    like = sharded[0]
    _check_init(like)
    part = _part_of(like)

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        local, strides = dtensor.local_of(value), value.stride()
        full = torch.empty_strided(value.shape, strides, dtype=local.dtype, device=local.device)
        full.zero_()[part] = local  # of the rows of others, results are not kept
        return full

    fulls = tuple(whole(each) for each in args), {key: whole(kwargs[key]) for key in kwargs}
    made = operator(*fulls[0], **fulls[1])
    written = operations.written_by(operator, args, kwargs)
    if written:
        dtensor.local_of(written[0]).copy_(_same_on_replicas(made[part], like))
        return written[0]
    spec = dtensor.spec_of(like)
    parts = [
        dtensor.wrap_local(
            _same_on_replicas(each[part], like), dtensor.with_dtype(spec, each.dtype)
        )
        for each in (made if isinstance(made, tuple) else (made,))
    ]
    return tuple(parts) if isinstance(made, tuple) else parts[0]


def _check_init(drawn: DTensor) -> None:
    """Refuse functions of ``torch.nn.init`` that go on to do what torch cannot do to shards.

    ``sparse_`` writes to elements by index, ``orthogonal_`` may transpose and reshape in place.
    """
    for frame in _frames_of_init():
        name, tensor = frame.f_code.co_name, frame.f_locals.get("tensor", drawn)
        is_tall = tensor.ndim == 2 and tensor.shape[0] >= tensor.shape[1]
        if name == "sparse_" or (name == "orthogonal_" and not is_tall):
            raise NotImplementedError(
                f"torch.nn.init.{name} on rank {dist.get_rank()}: found a parameter of shape "
                f"{tuple(tensor.shape)} with placements {tensor.placements}, expected a whole one. "
                "Build the model on the meta device and call shardwise.materialize(model, "
                "init=...), or initialize the parameter before fully_shard"
            )


def _part_of(tensor: DTensor) -> tuple[slice, ...]:
    starts, sizes = dtensor.chunk_of(tensor)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _same_on_replicas(part: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return a part in its own memory. Replicas get that of their first rank: seeds may differ."""
    part = part.clone(memory_format=torch.contiguous_format)
    for dim, placement in enumerate(like.placements):
        if placement.is_replicate() and like.device_mesh.size(dim) > 1 and part.numel():
            group = like.device_mesh.get_group(dim)
            with Peers(group).collective("the random values of replicas"):
                dist.broadcast(part.view(-1).view(torch.uint8), group=group, group_src=0)
    return part


def _select(operator: dtensor.Operator, args: _Args, kwargs: _Kwargs) -> Any:
    """Select a row, so that a write to it reaches the shard of the rank that has it.

    Torch gathers the row, and drops what is written to it: the padding row of an embedding, say.
    """
    made = dtensor.compute(operator, args, kwargs)
    tensor, dim, index = args
    if not _is_handled(tensor) or (torch.is_grad_enabled() and tensor.requires_grad):
        return made
    vars(made)[_ROW] = True
    dim %= tensor.ndim
    own = _part_of(tensor)[dim]
    index = index % tensor.shape[dim] - own.start
    if 0 <= index < own.stop - own.start:
        dtensor.wait_tensor(dtensor.local_of(made))  # what torch has gathered
        row = dtensor.local_of(tensor).select(dim, index)
        dtensor.move_local(made, row, dtensor.spec_of(made))
    return made


def _any(operator: dtensor.Operator, args: _Args, kwargs: _Kwargs) -> Any:
    """Whether any element is true: on all ranks, where ``torch.nn.init`` asks whether to go on."""
    (mask,) = args
    if not _is_handled(mask) or next(_frames_of_init(), None) is None:
        return dtensor.compute(operator, args, kwargs)
    found = dtensor.local_of(mask).any().to(torch.int32)
    for dim, placement in enumerate(mask.placements):
        if not placement.is_replicate():
            group = mask.device_mesh.get_group(dim)
            with Peers(group).collective("a random initialization"):
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.to(torch.bool)


def _frames_of_init() -> Iterator[FrameType]:
    """The functions of ``torch.nn.init`` that have called this one, from the inside out."""
    frame = inspect.currentframe()
    for _ in range(12):  # modes of torch functions come between
        if frame is None:
            return
        if frame.f_globals.get("__name__") == "torch.nn.init":
            yield frame
        frame = frame.f_back

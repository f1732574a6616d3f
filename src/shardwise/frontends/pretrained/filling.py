"""Weights of files, read straight into the shards of a ``transformers`` model.

``transformers`` stacks the experts of a file, cuts fused projections apart, and transposes. Its
operations run on a :class:`Pieced` as on a tensor. Nothing is read by that: the result says which
elements of the files each of its own elements is. A rank then reads those of its rows.

    experts.0.up (3, 4), experts.1.up (3, 4)   --torch.stack-->   (2, 3, 4), of which rank 1 of 2
                                                                  reads experts.1.up
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from transformers import PreTrainedModel

from shardwise.base import devices
from shardwise.base.errors import CheckpointError
from shardwise.base.units import listed
from shardwise.checkpoint.disk.boxes import Box, full_box
from shardwise.checkpoint.disk.entries import StatePath, dotted, torch_dtype
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.formats.detect import open_source
from shardwise.checkpoint.formats.source import ReadWindow, Source, model_tensors
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.arrival import check_scaled
from shardwise.checkpoint.ranks.loading import own_part, read_part
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.checkpoint.ranks.state import own_tensors, reshard
from shardwise.checkpoint.ranks.state import ties as ties_of
from shardwise.frontends.meta import materialize
from shardwise.frontends.pretrained import hf
from shardwise.frontends.pretrained.building import Name, find
from shardwise.frontends.pretrained.four_bits import four_bit_layers
from shardwise.sharding.allocate import allocate, compute_device
from shardwise.sharding.state import states_of

#: Bytes that reading may hold beside the model.
BUFFER = 8 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What loading found out about names. Rank 0 logs it.

    Attributes:
        missing: tensors of the model that the files lack; they were initialized.
        unexpected: tensors of the files that the model has no place for; they were left out.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass
class _FillPlan:
    """Where each tensor of the model comes from, by its name in a plain model.

    Attributes:
        direct: the tensor of the file that it is.
        converted: the conversion that makes it.
        unexpected: tensors of the files without a place in the model.
    """

    direct: dict[str, StatePath] = field(default_factory=dict)
    converted: dict[str, _Conversion] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    def shape_of(self, name: str, source: Source) -> tuple[int, ...]:
        """The shape of one of these tensors."""
        if name in self.converted:
            return tuple(self.converted[name].made[name].shape)
        return source.tensors[self.direct[name]].shape

    def dtype_of(self, name: str, source: Source) -> torch.dtype:
        """The dtype of one of these tensors in the files."""
        path = self.direct.get(name)
        if path is None:
            path = next(iter(self.converted[name].sources.values()))[0]
        return torch_dtype(source.tensors[path].dtype)


@dataclass
class _Conversion:
    """Tensors of a file that become others.

    Attributes:
        target: name of the first tensor of the model that they become.
        sources: the tensors of the file in order, by the pattern of the conversion.
        made: what they become, by name: where to read it, or a tensor on the meta device if the
            conversion does more than rearrange.
    """

    target: str
    sources: dict[str, list[StatePath]] = field(default_factory=dict)
    made: dict[str, Pieced | torch.Tensor] = field(default_factory=dict)

    def each(self, load: Callable[[StatePath], Any]) -> dict[str, list[Any]]:
        """The tensors of the file as ``load`` makes them, by the pattern of the conversion."""
        return {pattern: list(map(load, paths)) for pattern, paths in self.sources.items()}


def fill(
    model: nn.Module,
    name: Name,
    *,
    names: Mapping[str, str] | None = None,
    init: Callable[[nn.Module], object] | None = None,
    buffer: int = BUFFER,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Read the weights of a model from files, after it was sharded. Every rank calls this.

    Each rank reads its rows and no more, and converts them to the dtype of the shards. Tensors on
    the meta device get memory. Names and weights of older files are converted as ``transformers``
    does. Weights that the files lack, and buffers that no file contains, are initialized.

    Args:
        model: a ``transformers`` model, or a module around one; sharded or not.
        name: as for :func:`.build`.
        names: for tensors whose name is not the one that they have in a plain model, as under peft:
            the plain name, by the model's name.
        init: called with each module of tensors that were not loaded, to initialize them. The
            default is the initialization of the model itself.
        buffer: bytes that reading may hold beside the model.
        group: the ranks that load together; the default process group if ``None``.

    Returns:
        Which names the files lack, and which they have without need; the same on every rank.

    Raises:
        CheckpointError: the files are damaged, or a shape does not fit the model; raised on all
            ranks alike.
        TypeError: ``model`` has no ``transformers`` model in it.
    """
    wait_for_save()
    inner = hf.inner_model(model)
    ranks = Ranks(group_for(group))
    doing = f"loading {name}"
    report = ranks.all(doing, lambda: _load(model, inner, name, names or {}, buffer))
    with same_random_numbers(model, ranks, doing):
        ranks.all(doing, lambda: _initialize(model, init))
    if ranks.coordinates:
        _tell(name, report)
    return report


def _load(
    model: nn.Module, inner: PreTrainedModel, name: Name, names: Mapping[str, str], buffer: int
) -> LoadReport:
    """Read what the files have."""
    where = find(name)
    window = ReadWindow(buffer)
    reshard(model)
    state = own_tensors(model)
    ties = ties_of(model)
    layers = dict(four_bit_layers(model))
    packed: dict[str, str] = {}  # name of codes or scales -> plain name of their weight
    for path in layers:
        plain = names.get(f"{path}.codes", f"{path}.codes").removesuffix("codes") + "weight"
        packed |= dict.fromkeys((f"{path}.codes", f"{path}.scales"), plain)
    names = {**names, **packed}
    with open_source(where) as source, torch.no_grad():
        conversions = hf.Conversions(inner, {names.get(n, n) for n in state})
        plan = _plan(conversions, source)
        found: dict[str, str] = {}  # name in the model -> the plain name that it is found under
        for each in state:
            alike = [names.get(tied, tied) for tied in (each, *ties.get(each, ()))]
            # A copy that adapters make of a tied weight is not tied, and begins with its values.
            alike += conversions.tied_to(alike[0])
            for plain in alike:
                if plain in plan.direct or plain in plan.converted:
                    found[each] = plain
                    break
        if lost := sorted(packed[each] for each in packed.keys() - found.keys()):
            raise CheckpointError(
                f"{source.where}: found no {listed(sorted({*lost}), 3)}, expected all weights of a "
                "base in four bits: they are not initialized"
            )
        shapes = {each: tensor.shape for each, tensor in state.items()}
        for path, layer in layers.items():
            shape = torch.Size((layer.out_features, layer.in_features))
            shapes |= dict.fromkeys((f"{path}.codes", f"{path}.scales"), shape)
        _check_shapes(source, plan, shapes, found)
        dtypes = {each: plan.dtype_of(plain, source) for each, plain in found.items()}
        check_scaled(str(source.where), dtypes, state, plan.unexpected)
        if allocate(model, found):
            state = own_tensors(model)
        conversions.remember(inner)
        first = {
            each: plain
            for each, plain in found.items()
            if ties.get(each, [each])[0] == each and each not in packed
        }
        for path, layer in layers.items():
            plain, rows = packed[f"{path}.codes"], layer.empty_rows()
            if plain in plan.direct:
                read_part(rows, path, source, window, plan.direct[plain])
            else:
                _read_converted({plain: [rows]}, plan, conversions, source, window)
            layer.pack(rows)
            del rows  # before the next one is read
        for each, plain in first.items():
            if plain in plan.direct:
                read_part(state[each], each, source, window, plan.direct[plain])
        converted: dict[str, list[torch.Tensor]] = {}  # a weight, and copies that adapters make
        for each, plain in first.items():
            if plain in plan.converted:
                converted.setdefault(plain, []).append(state[each])
        _read_converted(converted, plan, conversions, source, window)
    own = own_tensors(conversions.plain).keys()
    missing = [
        each
        for each in state
        if each not in found
        and (state[each].is_meta or names.get(each, each) in own)  # an adapter may have values
        and not hf.may_be_missing(conversions.plain, names.get(each, each))
    ]
    unexpected = [
        each for each in plan.unexpected if not hf.may_be_unexpected(conversions.plain, each)
    ]
    return LoadReport(tuple(missing), tuple(unexpected))


def _plan(conversions: hf.Conversions, source: Source) -> _FillPlan:
    plan = _FillPlan()
    stored = model_tensors(source)
    jobs: dict[str, _Conversion] = {}
    for name in hf.natural_order(stored):
        target, pattern = conversions.target_of(name)
        if target not in conversions.names:
            plan.unexpected.append(target)
        elif pattern is None:
            plan.direct.setdefault(target, stored[name])
        else:
            job = jobs.setdefault(target, _Conversion(target))
            job.sources.setdefault(pattern, []).append(stored[name])
    for job in jobs.values():
        _convert(job, conversions, source)
        plan.converted |= dict.fromkeys(job.made, job)
    return plan


def _convert(job: _Conversion, conversions: hf.Conversions, source: Source) -> None:
    """Find out what a conversion makes, without reading anything.

    Raises:
        CheckpointError: ``transformers`` cannot convert these tensors.
    """
    try:
        with contextlib.suppress(Exception):  # it does more than rearrange: that is tried below
            job.made = conversions.convert(
                job.target, job.each(lambda path: Pieced.of(source, path))
            )
            return
        job.made = conversions.convert(
            job.target,
            job.each(lambda path: torch.empty(source.tensors[path].shape, device="meta")),
        )
    except Exception as error:
        names = [dotted(path[1:]) for paths in job.sources.values() for path in paths]
        raise CheckpointError(
            f"{source.where}: {job.target}: transformers cannot make it from {listed(names)}: "
            f"{error}"
        ) from error


def _check_shapes(
    source: Source,
    plan: _FillPlan,
    shapes: Mapping[str, Sequence[int]],
    found: Mapping[str, str],
) -> None:
    wrong = [
        f"{name}: found shape {list(shape)}, expected {list(shapes[name])}"
        for name, plain in found.items()
        if (shape := plan.shape_of(plain, source)) != tuple(shapes[name])
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{source.where}: does not fit its model: {'; '.join(wrong[:3])}{more}"
        )


def _read_converted(
    wanted: Mapping[str, Sequence[torch.Tensor]],
    plan: _FillPlan,
    conversions: hf.Conversions,
    source: Source,
    window: ReadWindow,
) -> None:
    """Read what conversions make into this rank's parts of tensors, which are given by plain name.

    A conversion that does more than rearrange is done in full, one at a time.
    """
    done: set[int] = set()
    for plain, tensors in wanted.items():
        job = plan.converted[plain]
        made = job.made[plain]
        if isinstance(made, Pieced):
            for tensor in tensors:
                made.read(source, window, *own_part(tensor))
        elif id(job) not in done:
            done.add(id(job))
            read = functools.partial(_read_full, source, tensors[0].dtype)  # dtypes come first
            full = conversions.convert(job.target, job.each(read))
            for name in full.keys() & wanted.keys():
                for tensor in wanted[name]:
                    box, local = own_part(tensor)
                    local.copy_(narrow(full[name], box))


def _read_full(source: Source, dtype: torch.dtype, path: StatePath) -> torch.Tensor:
    full = source.full(path)
    return full.to(dtype) if full.is_floating_point() else full


@contextlib.contextmanager
def same_random_numbers(model: nn.Module, ranks: Ranks, doing: str) -> Iterator[None]:
    """Let all ranks draw the same random numbers inside.

    If their generators agree, they go on, and the values are those of the unsharded model. If not,
    all draw from the seed of rank 0, and go on afterwards where they were.
    """
    used = dict.fromkeys([devices.CPU, compute_device(list(states_of(model)))])
    states = {device: devices.random_state(device) for device in used}
    digest = xxhash.xxh3_128()
    for state in states.values():
        if state is not None:
            digest.update(state.numpy().data)

    def agreed(parts: list[tuple[bytes, int]]) -> list[int | None]:
        differ = any(found != parts[0][0] for found, _ in parts)
        return [parts[0][1] if differ else None] * len(parts)

    seed = ranks.together(doing, lambda: (digest.digest(), torch.initial_seed()), agreed)
    if seed is None:
        yield
        return
    torch.manual_seed(seed)
    try:
        yield
    finally:
        for device, state in states.items():
            if state is not None:
                devices.set_random_state(device, state)


def _initialize(model: nn.Module, init: Callable[[nn.Module], object] | None) -> None:
    """Initialize what no file had, and all buffers that are never in files."""
    kept, pending = [], set()
    for module in model.modules():
        for tensor in (*module.parameters(False), *module.buffers(False)):
            if tensor.is_meta:
                pending.add(module)
            else:
                kept.append(tensor)
    if not pending:
        return
    with hf.kept(list({id(each): each for each in kept}.values())):
        if init is None:
            materialize(model)
        else:
            materialize(model, init=lambda module: init(module) if module in pending else None)


def _tell(name: Name, report: LoadReport) -> None:
    for names, what in (
        (report.missing, "not in the files, and initialized"),
        (report.unexpected, "in the files, and not in the model"),
    ):
        if names:
            _log.warning("%s: %s: %s", name, what, listed(names, 10))


# -- tensors put together from boxes of others, of which only the wanted part is read --------------


@dataclass(frozen=True)
class _Piece:
    """A box of the result, and the box of a tensor in the files that it is.

    Attributes:
        box: the box of the result.
        path: path of the tensor in the files.
        origin: offsets of the box in that tensor.
        dims: for each dimension of the result, the dimension of that tensor; ``None`` for one of
            size 1 that the tensor does not have.
    """

    box: Box
    path: StatePath
    origin: tuple[int, ...]
    dims: tuple[int | None, ...]

    def moved(self, dim: int, by: int) -> _Piece:
        """The same piece of a result in which it lies further back."""
        offsets = (
            *self.box.offsets[:dim],
            self.box.offsets[dim] + by,
            *self.box.offsets[dim + 1 :],
        )
        return replace(self, box=Box(offsets, self.box.sizes))

    def within(self, box: Box) -> _Piece | None:
        """The part of the piece inside a box of the result."""
        common = self.box.intersection(box)
        if common is None:
            return None
        origin = list(self.origin)
        for dim, own in enumerate(self.dims):
            if own is not None:
                origin[own] += common.offsets[dim] - self.box.offsets[dim]
        return replace(self, box=common, origin=tuple(origin))

    def source_box(self) -> Box:
        """The box in the files."""
        sizes = [1] * len(self.origin)  # a dimension that was squeezed
        for dim, own in enumerate(self.dims):
            if own is not None:
                sizes[own] = self.box.sizes[dim]
        return Box(self.origin, tuple(sizes))

    def placed(self, part: Box) -> Box:
        """Where a part of the box in the files is in the result."""
        offsets, sizes = [], []
        for dim, own in enumerate(self.dims):
            first = self.box.offsets[dim]
            offsets.append(first if own is None else first + part.offsets[own] - self.origin[own])
            sizes.append(1 if own is None else part.sizes[own])
        return Box(tuple(offsets), tuple(sizes))


class Pieced:
    """A tensor that is not read yet.

    Args:
        shape: its shape.
        pieces: boxes that cover it without overlap.
    """

    def __init__(self, shape: Sequence[int], pieces: Sequence[_Piece]) -> None:
        self.shape = torch.Size(shape)
        self._pieces = pieces

    @classmethod
    def of(cls, source: Source, path: StatePath) -> Pieced:
        """A tensor of the files as it is."""
        shape = source.tensors[path].shape
        dims = tuple(range(len(shape)))
        return cls(shape, [_Piece(full_box(shape), path, (0,) * len(shape), dims)])

    def read(self, source: Source, window: ReadWindow, box: Box, into: torch.Tensor) -> None:
        """Read a box of the result.

        Args:
            source: the files.
            window: the buffer that the elements pass through.
            box: the box to read.
            into: a tensor with the sizes of the box, to whose dtype the elements are converted.
        """
        for each in self._pieces:
            piece = each.within(box)
            if piece is None or not piece.box.numel:
                continue
            order = [own for own in piece.dims if own is not None]
            squeezed = [own for own in range(len(piece.origin)) if own not in order]
            for part, elements in window.parts(source, piece.path, piece.source_box()):
                place = piece.placed(part)
                target = narrow(into, place.relative_to(box.offsets))
                target.copy_(elements.permute(*squeezed, *order).reshape(place.sizes))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = _FUNCTIONS.get(func)
        return NotImplemented if made is None else made(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of a dimension."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Pieced:
        """The same; memory is laid out when it is read."""
        return self

    def transpose(self, dim0: int, dim1: int) -> Pieced:
        """As ``torch.transpose``."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]

        return self._arranged(lambda values, _: tuple(values[dim] for dim in order))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Pieced, ...]:
        """As ``torch.split``."""
        dim %= self.ndim
        length = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, length - first) for first in range(0, length, sizes)]
        if sum(sizes) != length:
            raise ValueError(f"sizes: found {list(sizes)}, expected a sum of {length}")
        made, first = [], 0
        for size in sizes:
            made.append(self._narrowed(dim, first, size))
            first += size
        return tuple(made)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Pieced, ...]:
        """As ``torch.chunk``."""
        return self.split(max(1, -(-self.shape[dim] // chunks)), dim)

    def unbind(self, dim: int = 0) -> tuple[Pieced, ...]:
        """As ``torch.unbind``."""
        return tuple(each.squeeze(dim) for each in self.split(1, dim))

    def squeeze(self, dim: int) -> Pieced:
        """As ``torch.squeeze``."""
        dim %= self.ndim
        if self.shape[dim] != 1:
            return self
        return self._arranged(lambda values, _: (*values[:dim], *values[dim + 1 :]))

    def unsqueeze(self, dim: int) -> Pieced:
        """As ``torch.unsqueeze``."""
        dim %= self.ndim + 1
        return self._arranged(lambda values, new: (*values[:dim], new, *values[dim:]))

    def _arranged(self, arrange: Callable[[Sequence[Any], Any], tuple[Any, ...]]) -> Pieced:
        """The tensor with its dimensions arranged anew.

        Args:
            arrange: called with what there is of each dimension, and with what a new one has.
        """
        pieces = [
            replace(
                piece,
                box=Box(arrange(piece.box.offsets, 0), arrange(piece.box.sizes, 1)),
                dims=arrange(piece.dims, None),
            )
            for piece in self._pieces
        ]
        return Pieced(arrange(self.shape, 1), pieces)

    def _narrowed(self, dim: int, first: int, size: int) -> Pieced:
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        offsets = tuple(first if each == dim else 0 for each in range(self.ndim))
        inside = [piece.within(Box(offsets, shape)) for piece in self._pieces]
        return Pieced(shape, [piece.moved(dim, -first) for piece in inside if piece is not None])


def _cat(tensors: Sequence[Pieced], dim: int = 0) -> Pieced:
    first = tensors[0]
    dim %= first.ndim
    made: list[_Piece] = []
    length = 0
    for each in tensors:
        rest = [(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (first, each)]
        if rest[0] != rest[1]:
            raise ValueError(f"cannot join shapes {list(first.shape)} and {list(each.shape)}")
        made += [piece.moved(dim, length) for piece in each._pieces]
        length += each.shape[dim]
    return Pieced((*first.shape[:dim], length, *first.shape[dim + 1 :]), made)


def _stack(tensors: Sequence[Pieced], dim: int = 0) -> Pieced:
    return _cat([each.unsqueeze(dim) for each in tensors], dim)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: _cat,
    torch.chunk: Pieced.chunk,
    torch.split: Pieced.split,
    torch.squeeze: Pieced.squeeze,
    torch.stack: _stack,
    torch.transpose: Pieced.transpose,
    torch.unbind: Pieced.unbind,
    torch.unsqueeze: Pieced.unsqueeze,
}

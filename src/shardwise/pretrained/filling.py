"""Weights of files, read straight into the shards of a ``transformers`` model.

``transformers`` stacks the experts of a file, cuts fused projections apart, and transposes. What a
rank then reads is of its own rows alone: see ``pieced.py``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from transformers import PreTrainedModel

from shardwise.base import devices
from shardwise.base.boxes import Box, narrow
from shardwise.base.errors import CheckpointError
from shardwise.base.units import listed
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo, dotted, torch_dtype
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.formats.detect import open_source
from shardwise.checkpoint.formats.source import ReadWindow, Source, model_tensors
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.arrival import check_scaled
from shardwise.checkpoint.ranks.loading import own_part, read_part
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.checkpoint.ranks.state import own_tensors, reshard
from shardwise.checkpoint.ranks.state import ties as ties_of
from shardwise.frontends.meta import materialize
from shardwise.pretrained import hf
from shardwise.pretrained.building import Name, find
from shardwise.pretrained.four_bits import four_bit_layers
from shardwise.pretrained.pieced import Pieced
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
class FillPlan:
    """Where each tensor of the model comes from, by its name in a plain model.

    Attributes:
        direct: the tensor of the file that it is.
        converted: the conversion that makes it.
        unexpected: tensors of the files without a place in the model.
    """

    direct: dict[str, StatePath] = field(default_factory=dict)
    converted: dict[str, _FileConversion] = field(default_factory=dict)
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
class _FileConversion:
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
    opened: Callable[[], AbstractContextManager[Source]] | None = None,
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
        opened: opens the weights, if not those that ``name`` means.

    Returns:
        Which names the files lack, and which they have without need; the same on every rank.

    Raises:
        CheckpointError: the files are damaged, or a shape does not fit the model; raised on all
            ranks alike.
        TypeError: ``model`` has no ``transformers`` model in it.
    """
    place_of(name)  # before messages name it: a URL with credentials is refused
    wait_for_save()
    inner = hf.inner_model(model)
    ranks = Ranks(group_for(group))
    doing = f"loading {name}"
    opens = opened or (lambda: open_source(find(name)))
    report = ranks.all(doing, lambda: _load(model, inner, opens, names or {}, buffer))
    with same_random_numbers(model, ranks, doing):
        ranks.all(doing, lambda: _initialize(model, init))
    if ranks.coordinates:
        _tell(name, report)
    return report


def _load(
    model: nn.Module,
    inner: PreTrainedModel,
    opened: Callable[[], AbstractContextManager[Source]],
    names: Mapping[str, str],
    buffer: int,
) -> LoadReport:
    """Read what the files have."""
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
    with opened() as source, torch.no_grad():
        conversions = hf.Conversions(inner, {names.get(n, n) for n in state})
        plan = plan_filling(conversions, source)
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
        direct = {each: plan.direct[plain] for each, plain in first.items() if plain in plan.direct}
        source.expect((path, own_part(state[each])[0]) for each, path in direct.items())
        for each, where in direct.items():
            read_part(state[each], each, source, window, where)
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


def plan_filling(conversions: hf.Conversions, source: Source) -> FillPlan:
    """Find out where each tensor of a model comes from, without reading anything.

    Raises:
        CheckpointError: ``transformers`` cannot convert what the files have.
    """
    plan = FillPlan()
    stored = model_tensors(source)
    jobs: dict[str, _FileConversion] = {}
    for name in hf.natural_order(stored):
        target, pattern = conversions.target_of(name)
        if target not in conversions.names:
            plan.unexpected.append(target)
        elif pattern is None:
            plan.direct.setdefault(target, stored[name])
        else:
            job = jobs.setdefault(target, _FileConversion(target))
            job.sources.setdefault(pattern, []).append(stored[name])
    for job in jobs.values():
        _convert(job, conversions, source)
        plan.converted |= dict.fromkeys(job.made, job)
    return plan


def _convert(job: _FileConversion, conversions: hf.Conversions, source: Source) -> None:
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
    plan: FillPlan,
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
    plan: FillPlan,
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

    def agreed(parts: list[tuple[bytes, int]]) -> int | None:
        differ = any(found != parts[0][0] for found, _ in parts)
        return parts[0][1] if differ else None

    seed = ranks.agree(doing, lambda: (digest.digest(), torch.initial_seed()), agreed)
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


class ConvertedSource(Source):
    """What files become in a model by being rearranged, such as the stacked experts of a layer.

    Args:
        base: the files.
        plan: where each tensor of the model comes from.

    Attributes:
        tensors: these tensors, each under ``("model", name in a plain model)``.
    """

    def __init__(self, base: Source, plan: FillPlan) -> None:
        self.where = base.where
        self.values: dict[StatePath, Any] = {}
        self._base = base
        self._made = {
            name: made
            for name, job in plan.converted.items()
            if isinstance(made := job.made[name], Pieced)
        }
        self.tensors: dict[StatePath, TensorInfo] = {
            ("model", name): TensorInfo(base.tensors[min(made.paths)].dtype, tuple(made.shape))
            for name, made in self._made.items()
        }

    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor; see :class:`.Source`."""
        self._made[dotted(path[1:])].read(self._base, ReadWindow(BUFFER), box, into)

    def parts_of(self, name: str) -> frozenset[StatePath]:
        """The tensors of the files that one is made of; none: it is no tensor of this source."""
        return self._made[name].paths if name in self._made else frozenset()

    def write(
        self, name: str, values: torch.Tensor, path: StatePath, box: Box, into: torch.Tensor
    ) -> None:
        """Put the values of a tensor into a box of one of its parts; see :meth:`Pieced.write`."""
        self._made[name].write(values, path, box, into)

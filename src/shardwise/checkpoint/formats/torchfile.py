"""Files of ``torch.save``: read without trusting them, and written without holding their tensors.

Such a file is a zip archive. It contains a pickle that describes the saved object, and for each
storage that tensors are views of one record, never compressed. :mod:`.archive` and :mod:`.pickles`
read these; this file says what torch's functions named in the pickle would do. No code in the file
is run.

To write tensors that do not fit in memory, torch lays out the file with fake tensors, which leaves
holes where their bytes belong. The holes are then filled a part of a tensor at a time, and the
checksums of the archive are corrected.

Source: ``torch/serialization.py`` and ``torch/_utils.py``.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import torch

from shardwise._torch import fake
from shardwise.base.boxes import full_box
from shardwise.base.errors import CheckpointError
from shardwise.base.files import Links, open_file
from shardwise.base.optim_names import without_wrappers
from shardwise.base.strict import (
    MAX_DIMS,
    Collisions,
    check_number,
    check_shape,
    refuse,
)
from shardwise.base.units import one_line
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo, dotted, dtype_name, torch_dtype
from shardwise.checkpoint.disk.filenames import DEEPSPEED
from shardwise.checkpoint.disk.safetensors import Chunks
from shardwise.checkpoint.disk.values import held_in, leaves, replaced_in
from shardwise.checkpoint.formats.archive import Archive, Record, write_checksums
from shardwise.checkpoint.formats.pickles import (
    AttributedDict,
    Constructor,
    PickledObject,
    PickleError,
    load,
    object_constructor,
    opaque,
)
from shardwise.checkpoint.formats.source import Deferred, Extent, ExtentSource, LazyBits

_PICKLE = "data.pkl"
_MOST_PICKLE = 1 << 26  # bytes; a tensor takes about 150
_MOST_STEPS = 1 << 23  # a tensor takes about 40
# Tensors may share elements: their bytes may be this many times those of the file, and some more.
_TIMES, _FREE = 64, 1 << 24
# Keys under which training scripts save the state dict of a model.
_MODEL = ("model", "state_dict", "model_state_dict")
#: Files that only other software can read, by a name in their pickles: what they are, what to do.
_OF_OTHERS = {
    b"torch.distributed._shard.sharded_tensor": "is a rank's local or sharded state dict of torch's"
    " FSDP1, whose shards torch.load alone can read; save it with torch.distributed.checkpoint",
    b"torch_xla.utils.serialization": "torch_xla.utils.serialization.save wrote it, without the "
    "tensors; save what torch_xla.utils.serialization.load returns with torch.save",
    b"deepspeed.runtime": f"is one of the files of {DEEPSPEED}",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        info: its dtype and shape.
        start: byte of the file at which its first element begins.
        strides: its strides, in elements.
        bits: what is done to elements once they are read.
    """

    info: TensorInfo
    start: int
    strides: tuple[int, ...]
    bits: LazyBits = frozenset()


@dataclass(frozen=True)
class StoredShard:
    """A rank's shard of a ``DTensor`` in a file.

    Attributes:
        shape: shape of the full tensor.
        local: the shard.
    """

    shape: tuple[int, ...]
    local: StoredTensor


def read_tree(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Read a file of ``torch.save``, with a :class:`StoredTensor` in place of every tensor.

    No tensor is read, and no code in the file is run.

    Args:
        path: path of the file.
        start: byte at which the archive begins, if it is a part of the file.
        length: size of the archive in bytes; up to the end of the file if ``None``.

    Raises:
        CheckpointError: it is not such a file, is damaged, or contains more than tensors and plain
            values.
    """
    tree, unknown = _read(path, start, length)
    if unknown:
        _refuse_file(path, f"it names {next(iter(unknown))}, which is not needed for plain values")
    return tree


def read_parts(path: Path) -> Any:
    """Read a file of ``torch.save`` of which not everything may be needed.

    What is of an unknown class is an opaque :class:`.PickledObject`, which :func:`plain` refuses.

    Args:
        path: path of the file.

    Raises:
        CheckpointError: it is not such a file, or is damaged.
    """
    return _read(path, 0, None)[0]


def plain(value: Any, where: str) -> Any:
    """Check that a value holds no tensors or objects; the bytes of a file in memory are bytes.

    Args:
        value: what a file has under a name.
        where: the file and the name, for error messages.

    Raises:
        CheckpointError: it does.
    """
    value = replaced_in(value, _contents)
    for each in held_in(value):
        if isinstance(each, PickledObject | Constructor):
            kind = each.kind if isinstance(each, PickledObject) else each
            name = getattr(kind, "name", kind)
            raise CheckpointError(f"{where}: found an object of {name}, expected plain values")
        if isinstance(each, StoredTensor | StoredShard | _Storage):
            raise CheckpointError(f"{where}: found tensors inside a value, expected plain values")
    return value


def _contents(value: Any) -> Any:
    """The bytes of a file in memory; anything else as it is."""
    is_file = isinstance(value, PickledObject) and value.kind is io.BytesIO
    state = value.state if is_file else None
    return state[0] if isinstance(state, tuple) and state else value


def _refuse_file(path: Path, why: str) -> NoReturn:
    raise CheckpointError(
        f"{path}: is not a file of torch.save that can be read without running code from it ({why})"
    ) from None


def _read(path: Path, start: int, length: int | None) -> tuple[Any, Collection[str]]:
    """What is in a file, and the names in it that are not known."""
    handle, size = open_file(path, Links.FOLLOW)
    try:
        length = size - start if length is None else length
        if start < 0 or length < 0 or start + length > size:
            raise CheckpointError(
                f"{path}: is {size} bytes long, expected {start + length} or more"
            )
        archive = Archive(handle, start, length, path)
        _check_byte_order(archive, path)
        data = archive.read(_PICKLE, _MOST_PICKLE)
    finally:
        os.close(handle)
    names = _PickledNames(archive.records, start, str(path))
    try:
        tree = load(data, names.find, _MOST_STEPS, names.storage, length)
    except PickleError as error:
        _refuse_others(path, data)
        _refuse_file(path, str(error))
    stored = (each.local if isinstance(each, StoredShard) else each for each in held_in(tree))
    needed = sum(each.info.nbytes for each in stored if isinstance(each, StoredTensor))
    if needed > _FREE + _TIMES * length:  # elements stored once, and read a million times
        refuse(f"{path}, tensors", f"{needed:,} bytes in all", f"about the {length:,} of the file")
    if names.unknown:
        _refuse_others(path, data)
    return tree, names.unknown


def _refuse_others(path: Path, data: bytes) -> None:
    """Refuse a file that only other software can read."""
    for name, what in _OF_OTHERS.items():
        if name in data:
            raise CheckpointError(f"{path}: {what}") from None


def _check_byte_order(archive: Archive, path: Path) -> None:
    if "byteorder" not in archive.records:  # older releases did not write it
        return
    order = archive.read("byteorder", most=16).decode("ascii", "replace")
    if order != sys.byteorder:
        raise CheckpointError(f"{path}: found {order!r} byte order, expected {sys.byteorder!r}")


@dataclass(frozen=True)
class _Storage:
    """A storage that tensors are views of.

    Attributes:
        dtype: dtype of its elements; ``None`` if it is untyped.
        first: byte of the file at which it begins.
        nbytes: its size in bytes.
    """

    dtype: torch.dtype | None
    first: int
    nbytes: int


class _PickledNames:
    """What the names in a pickle of ``torch.save`` stand for.

    Args:
        records: the records of the archive.
        start: byte of the file at which the archive begins.
        where: the file, for error messages.
    """

    def __init__(self, records: Mapping[str, Record], start: int, where: str) -> None:
        self._records, self._start, self._where = records, start, where
        self.unknown: dict[str, None] = {}  # in their order
        own: dict[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
            ("_rebuild_tensor", _UTILS): lambda args: self._tensor(*args),
            ("_rebuild_tensor_v2", _UTILS): lambda args: self._tensor(
                *args[:4], *(None, *args[6:7])
            ),
            ("_rebuild_tensor_v3", _UTILS): lambda args: self._tensor(*args[:4], *args[6:8]),
            ("_rebuild_device_tensor_from_cpu_tensor", _UTILS): lambda args: _is_tensor(args[0]),
            ("_rebuild_parameter", _UTILS): lambda args: _is_tensor(args[0]),
            ("_rebuild_parameter_with_state", _UTILS): lambda args: _is_tensor(args[0]),
            ("_rebuild_wrapper_subclass", _UTILS): _SubclassTensor,
            ("_rebuild_from_type_v2", "torch._tensor"): self._from_type,
        }
        self._own = {key: Constructor(key[0], make) for key, make in own.items()}

    def find(self, module: str, name: str) -> Any:
        """A :class:`.Constructor` or a plain value; of something opaque if it is not known."""
        module = {"__builtin__": "builtins"}.get(module, module)
        found = self._own.get((name, module)) or _PLAIN.get((name, module))
        if found is not None:
            return found
        if module == "torch":
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype):
                return value
        if (module, name) == ("_io", "BytesIO"):
            return object_constructor(name, io.BytesIO)
        if (module, name) in _NUMPY:
            return object_constructor(name, "numpy.ndarray")
        if module.startswith("torch.distributed."):  # placements and mesh of a DTensor
            return object_constructor(f"{module}.{name}", f"{module}.{name}")
        full = f"{module}.{name}"
        shown = (full if full.isprintable() else repr(full))[:120]
        self.unknown[shown] = None
        return opaque(shown)

    def storage(self, said: Any) -> _Storage:
        """The storage that a pickle refers to."""
        if not isinstance(said, tuple) or len(said) != 5 or said[0] != "storage":
            raise PickleError("it refers to something outside of it that is not a storage")
        _, kind, key, _, numel = said
        if (
            not isinstance(kind, Constructor)
            or kind.name not in _STORAGES
            or not isinstance(key, str)
        ):
            raise PickleError("it has a storage of an unknown type")
        dtype = _STORAGES[kind.name]
        record = self._records.get(f"data/{key}")
        held = 0 if record is None else record.length
        needed = check_number(numel, f"{self._where}: elements of a tensor") * (
            1 if dtype is None else dtype.itemsize
        )
        if record is None or needed > held:
            raise CheckpointError(
                f"{self._where}: needs {needed} bytes, found {held} in the archive"
            )
        return _Storage(dtype, self._start + record.first, needed)

    def _from_type(self, args: tuple[Any, ...]) -> Any:
        """A tensor with attributes, or of a subclass; the only subclass known is ``DTensor``."""
        make, kind, inner, state = args
        if not isinstance(make, Constructor) or not isinstance(inner, tuple):
            raise PickleError("it makes a tensor with something that is not a function")
        made = make.make(inner)
        if isinstance(kind, Constructor) and kind.name in self.unknown:
            return opaque(kind.name).make(())
        if not isinstance(made, _SubclassTensor):
            return _is_tensor(made)
        attributes: dict[str, Any] = {}
        for each in state if isinstance(state, tuple) else (state,):
            attributes |= each if isinstance(each, dict) else {}
        local = attributes.get("_local_tensor")
        if not isinstance(local, StoredTensor) or kind is not made.kind:
            raise PickleError("it has a subclass of Tensor that is not known")
        return StoredShard(_shape(made.shape, self._where), local)

    def _tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        dtype: torch.dtype | None = None,
        metadata: Any = None,
    ) -> StoredTensor:
        where = self._where
        if not isinstance(storage, _Storage):
            raise PickleError("it has a tensor without a storage")
        dtype = storage.dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise PickleError("it has a tensor without a dtype")
        try:
            info = TensorInfo(dtype_name(dtype), _shape(shape, where))
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from None
        check_shape(info.shape, info.itemsize, where)
        first = check_number(offset, f"{where}: offset of a tensor")
        steps = _shape(strides, where)
        if len(steps) != len(info.shape):
            refuse(where, f"{len(steps)} strides", f"{len(info.shape)}")
        reach = sum((n - 1) * step for n, step in zip(info.shape, steps, strict=True)) + 1
        end = (first + reach) * info.itemsize if info.numel else 0
        if end > storage.nbytes:
            raise CheckpointError(
                f"{where}: needs {end} bytes, found {storage.nbytes} in the archive"
            )
        begin = storage.first + (first * info.itemsize if info.numel else 0)
        return StoredTensor(info, begin, steps, _bits(metadata, dtype))


class _SubclassTensor:
    """A tensor of a subclass whose parts are not known yet, only the subclass and the shape."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.kind, _, self.shape = args[:3]
        if not isinstance(self.kind, Constructor) or not _is_dtensor(self.kind.name):
            raise PickleError("it has a subclass of Tensor that is not known")


def _is_dtensor(name: str) -> bool:
    return name.startswith("torch.distributed.") and name.endswith(".DTensor")


def _bits(metadata: Any, dtype: torch.dtype) -> LazyBits:
    """The bits that the metadata of a tensor has."""
    found = {} if metadata is None else metadata
    if not isinstance(found, dict) or not found.keys() <= {"conj", "neg"}:
        raise PickleError("it has a tensor with metadata that is not known")
    bits = frozenset(bit for bit, is_set in found.items() if is_set is True)
    can_negate = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    if (bits and not can_negate) or ("conj" in bits and not dtype.is_complex):
        raise PickleError(f"it has a tensor of {dtype} that is to be conjugated or negated")
    return bits


def _is_tensor(value: Any) -> StoredTensor | StoredShard:
    if not isinstance(value, StoredTensor | StoredShard):
        raise PickleError("it has a parameter that is not a tensor")
    return value


def _shape(values: Any, where: str) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > MAX_DIMS:
        refuse(where, values, f"a shape of at most {MAX_DIMS} dimensions")
    return tuple(check_number(value, f"{where}: shape or strides") for value in values)


def size_of_tensor(args: tuple[Any, ...]) -> torch.Size:
    """What ``torch.Size`` makes of the arguments in a pickle.

    Raises:
        TypeError: they are not integers.
    """
    (sizes,) = args
    if not isinstance(sizes, tuple) or not all(type(size) is int for size in sizes):
        raise TypeError("found a size that does not consist of integers")
    return torch.Size(sizes)


def _encoded(args: tuple[Any, ...]) -> bytes:
    text, encoding = args
    if encoding != "latin1":
        raise ValueError("expected latin1")  # what was found may take forever to show
    return cast(str, text).encode("latin-1")


def _bytes(args: tuple[Any, ...]) -> bytes:
    """Bytes made from bytes; from a number, Python would make as many as it says."""
    (found,) = args or (b"",)
    if not isinstance(found, bytes):
        raise TypeError(f"found a {type(found).__name__}, expected bytes")
    return found


def _set(args: tuple[Any, ...]) -> set[Any]:
    (items,) = args
    if not all(isinstance(item, str | int | float | bytes | bool | None) for item in items):
        raise TypeError("found items that are not plain values")
    collisions = Collisions("a set in it")
    for item in items:
        collisions.check(item)
    return set(items)


def _complex(args: tuple[Any, ...]) -> complex:
    real, imaginary = args
    return complex(float(real), float(imaginary))


def _layout(args: tuple[Any, ...]) -> torch.layout:
    (name,) = args
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(found, torch.layout):
        raise TypeError("found something else than the name of a layout")
    return found


def _text(args: tuple[Any, ...]) -> str:
    """The text that a subclass of ``str`` was made of."""
    (found,) = args
    if type(found) is not str:
        raise TypeError(f"found a {type(found).__name__}, expected a string")
    return found


def _dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    """An empty dict, whose items follow in the pickle; or, for a ``Counter``, the dict given."""
    (found,) = args or ({},)
    if type(found) is not dict:
        raise TypeError(f"found a {type(found).__name__}, expected a dict")
    return found


_UTILS = "torch._utils"
_STORAGES: Mapping[str, torch.dtype | None] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": None,
}


def _no_object(args: tuple[Any, ...]) -> Any:
    raise TypeError(f"found a call with {len(args)} arguments, expected only its name")


_PLAIN: Mapping[tuple[str, str], Constructor] = {
    key: Constructor(key[0], make)
    for key, make in {
        ("OrderedDict", "collections"): lambda args: AttributedDict(_dict(args)),
        ("Counter", "collections"): _dict,
        ("Size", "torch"): size_of_tensor,
        ("device", "torch"): lambda args: torch.device(*args),
        ("encode", "_codecs"): _encoded,
        ("bytes", "builtins"): _bytes,
        ("bytearray", "builtins"): lambda args: bytearray(_bytes(args)),
        ("set", "builtins"): _set,
        ("complex", "builtins"): _complex,
        ("_get_layout", "torch.serialization"): _layout,
        ("timedelta", "datetime"): lambda args: timedelta(*args).total_seconds(),
        ("TorchVersion", "torch.torch_version"): _text,
        ("Tensor", "torch"): _no_object,
        ("Parameter", "torch.nn.parameter"): _no_object,
        ("UntypedStorage", "torch.storage"): _no_object,
        **{(name, "torch"): _no_object for name in _STORAGES},
    }.items()
}


#: Parts of numpy's arrays, which programs save beside a model, as in random states.
_NUMPY = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "_reconstruct"),
}


class TorchSource(ExtentSource):
    """A file of ``torch.save``: a model's state dict, or what a training script saved.

    The model is the contents of ``model``, ``state_dict`` or ``model_state_dict``; or what an
    optimizer beside it has states for, by name; or else the whole file. An optimizer comes along if
    it says which parameter each state belongs to. Everything else is ``extra``. Values are looked
    at when they are asked for, and may be of unknown classes until then.

    Args:
        where: path of the file.
        optimizer: the file that the optimizer is in, if not in this one.

    Raises:
        CheckpointError: it is not such a file, contains no model, or code in place of a tensor.
    """

    def __init__(self, where: Path, optimizer: Path | None = None) -> None:
        super().__init__(where)
        tree = read_parts(where)
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{where}: found a {type(tree).__name__}, expected a state dict")
        parts = _parts(tree, where)
        self._stored = {
            path: (where, each)
            for path, each in _unwrapped(
                dict(_tensors(("model",), parts.model, str(where)))
            ).items()
        }
        if not self._stored:
            raise CheckpointError(f"{where}: found no named tensors, expected a state dict")
        self.versions = versions_of(parts.model)
        values: dict[StatePath, tuple[Path, Any]] = {
            path: (where, value) for path, value in _extra_states(("model",), parts.model)
        }
        beside = [(where, ("extra",), parts.extra)]
        if optimizer is None:
            beside.append((where, ("optimizer",), parts.optimizer))
        else:
            beside.append((optimizer, ("optimizer",), self._beside(optimizer, values)))
        names = {dotted(path[1:]) for path in self._stored}
        for file, root, found in beside:
            if root == ("optimizer",) and found is not None:
                found = by_names(found, names)
                if found is None:
                    self.about = (_NAMELESS.format(file.name),)
            for path, leaf in leaves_of(root, found):
                if isinstance(leaf, StoredTensor):
                    self._stored[path] = file, leaf
                else:
                    values[path] = file, leaf
        self._values = values
        self.tensors = {path: stored.info for path, (_, stored) in self._stored.items()}
        self.values = Deferred(values, self._value)

    def _beside(self, file: Path, values: dict[StatePath, tuple[Path, Any]]) -> Any:
        """The optimizer in another file. What is wrong with that matters to who wants it."""
        try:
            found = _only(read_parts(file))
            if found is None:
                refuse(str(file), "something else", "the state dict of an optimizer")
        except CheckpointError as error:
            values["optimizer", "state"] = file, error
            return None
        return found

    def _value(self, path: StatePath) -> Any:
        file, value = self._values[path]
        if isinstance(value, CheckpointError):
            raise value
        return plain(value, f"{file}, {dotted(path)}")

    def _extents_of(self, path: StatePath) -> list[Extent]:
        return [extent_of(*self._stored[path])]


def extent_of(file: Path, stored: StoredTensor) -> Extent:
    """Where the elements of a tensor in a file are."""
    box = full_box(stored.info.shape)
    return Extent(box, file, stored.start, stored.strides, stored.bits)


_NAMELESS = (
    "{}: the optimizer's states are left out: they are numbered, without param_names; make it from "
    "model.named_parameters() for that"
)


@dataclass(frozen=True)
class _SavedParts:
    """What a training script saved.

    Attributes:
        model: the model's state dict.
        optimizer: the optimizer's; ``None`` if there is none, or more than one.
        extra: everything else.
    """

    model: Mapping[Any, Any]
    optimizer: Any = None
    extra: Mapping[Any, Any] = field(default_factory=dict)


def _parts(tree: Mapping[Any, Any], where: Path) -> _SavedParts:
    """Tell the parts of a file apart.

    Raises:
        CheckpointError: it has no more than a rank's part of the model.
    """
    if "ds_version" in tree and isinstance(module := tree.get("module"), Mapping):
        groups = tree.get("param_shapes")
        shapes = [each for each in groups or () if isinstance(each, dict)]
        for name, shape in (item for each in shapes for item in each.items()):
            held = module.get(name)
            if isinstance(held, StoredTensor) and held.info.shape != shape:
                raise CheckpointError(f"{where}: is one of the files of {DEEPSPEED}")
        return _SavedParts(module)
    inner = tree.get("state")
    if isinstance(inner, Mapping) and isinstance(inner.get("model"), Mapping):  # of Composer
        tree = {**tree, **inner}
        del tree["state"]
    key = next((key for key in _MODEL if isinstance(tree.get(key), Mapping)), None)
    optimizers = {k: each for k, v in tree.items() if (each := _only(v)) and k != key}
    if key is None:
        trained = {name for each in optimizers.values() for name in (*each["state"], *_told(each))}
        found = [
            k
            for k, each in tree.items()
            if k not in optimizers and isinstance(each, Mapping) and trained & each.keys()
        ]
        key = found[0] if len(found) == 1 else None
    if key is None:
        return _SavedParts(tree)
    mine = next(iter(optimizers)) if len(optimizers) == 1 else None
    extra = {k: v for k, v in tree.items() if k not in (key, mine)}
    return _SavedParts(tree[key], optimizers.get(mine), extra)


def _only(value: Any) -> Any:
    """The state dict of an optimizer, which may be the only one in a list; ``None`` if it is none.

    Lightning has a list of them.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    is_one = isinstance(value, Mapping) and isinstance(value.get("param_groups"), list)
    return value if is_one and isinstance(value.get("state"), Mapping) else None


def _called(name: str, known: Mapping[str, str]) -> str:
    """What the model calls a parameter that a wrapper around it may call otherwise."""
    name = without_wrappers(name)
    for outer in ("", "module.", "_forward_module."):
        if name.startswith(outer) and name.removeprefix(outer) in known:
            return known[name.removeprefix(outer)]
    return name


def _told(optimizer: Mapping[str, Any]) -> Iterator[Any]:
    """The names in ``param_names`` of an optimizer's groups."""
    for group in optimizer["param_groups"]:
        names = group.get("param_names") if isinstance(group, Mapping) else None
        yield from (name for name in names or () if isinstance(name, str))


def by_names(optimizer: Any, names: Collection[str]) -> Any:
    """The state dict of an optimizer by the names of parameters, in place of their numbers.

    Args:
        optimizer: the state dict. It has names already, or ``param_names`` in its groups.
        names: names in the model.

    Returns:
        It; ``None`` if nothing tells which parameter a number stands for.
    """
    known = {without_wrappers(name): name for name in names}
    of: dict[Any, str] = {}
    groups = []
    for group in optimizer["param_groups"]:
        params = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(params, list):
            return None
        # Those that a wrapper of the model gave are less than what torch worked out.
        are_names = all(isinstance(name, str) for name in params)
        told = params if are_names else list(_told({"param_groups": [group]}))
        if len(told) != len(params):
            return None
        called = [_called(name, known) for name in told]
        of |= dict(zip(params, called, strict=True))
        rest = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**rest, "params": called})
    if not optimizer["state"].keys() <= of.keys():
        return None
    state = {of[key]: value for key, value in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": groups}


def leaves_of(path: StatePath, tree: Any) -> Iterator[tuple[StatePath, Any]]:
    """Yield the tensors of a tree that was read, and the largest parts without any, by path."""
    if isinstance(tree, Mapping) and tree and all(_is_name(key) for key in tree):
        for key, item in tree.items():
            yield from leaves_of((*path, key), item)
    elif isinstance(tree, list) and any(map(_is_stored, held_in(tree))):
        for i, item in enumerate(tree):
            yield from leaves_of((*path, i), item)
    elif len(path) > 1:
        yield path, tree


def _is_stored(value: Any) -> bool:
    return isinstance(value, StoredTensor)


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isprintable()


def _tensors(path: StatePath, tree: Any, where: str) -> Iterator[tuple[StatePath, StoredTensor]]:
    """The tensors of a nested state dict, by path. Everything else in it is ignored."""
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            if not isinstance(key, str) or not key.isprintable():
                raise CheckpointError(f"{where}: found the key {key!r}, expected a name")
            yield from _tensors((*path, key), item, where)
    elif isinstance(tree, StoredTensor):
        yield path, tree
    elif isinstance(tree, StoredShard):
        raise CheckpointError(
            f"{where}: {dotted(path[1:])} is a rank's shard of a tensor; "
            "consolidate the files of all ranks with python -m shardwise.checkpoint.consolidate"
        )
    elif isinstance(tree, PickledObject):
        plain(tree, f"{where}, {dotted(path[1:])}")


def _unwrapped(stored: dict[StatePath, StoredTensor]) -> dict[StatePath, StoredTensor]:
    """The tensors without what compilation and activation checkpointing put into their names."""
    found = {
        tuple(without_wrappers(key) if isinstance(key, str) else key for key in path): each
        for path, each in stored.items()
    }
    return found if len(found) == len(stored) else stored


def _extra_states(path: StatePath, tree: Mapping[Any, Any]) -> Iterator[tuple[StatePath, Any]]:
    """The plain values in a state dict that belong to extra states of modules, by path."""
    for key, item in tree.items():
        if isinstance(key, str) and key.rpartition(".")[2] == "_extra_state":
            for inner, value in leaves((*path, key), item):
                if not any(map(_is_stored, held_in(value))):
                    yield inner, value


def versions_of(tree: Mapping[Any, Any]) -> dict[str, int]:
    """The versions of modules that ``nn.Module.state_dict`` notes beside their state."""
    attributes = tree.attributes if isinstance(tree, AttributedDict) else None
    noted = attributes.get("_metadata") if isinstance(attributes, dict) else None
    return {
        without_wrappers(f"{name}.").removesuffix("."): each["version"]
        for name, each in (noted.items() if isinstance(noted, dict) else ())
        if isinstance(name, str) and isinstance(each, dict) and type(each.get("version")) is int
    }


@dataclass(frozen=True)
class Placeholder:
    """Stands for a tensor in a tree that :func:`write_tree` writes.

    Placeholders with the same name become one tensor that shares its memory.

    Attributes:
        name: the name under which its bytes are asked for.
        info: dtype and shape of the tensor.
    """

    name: str
    info: TensorInfo


def write_tree(path: Path, tree: Any, chunks: Chunks) -> None:
    """Write what ``torch.save`` would write, without holding the tensors in memory.

    Args:
        path: path of the file, which must not exist.
        tree: plain values, with a :class:`Placeholder` for every tensor.
        chunks: called with the name of a placeholder, gives the bytes of its tensor in order.

    Raises:
        OSError: the file cannot be written.
    """
    made: dict[str, torch.Tensor] = {}  # fake ones, which have no memory

    def tensor_for(value: Any) -> Any:
        if not isinstance(value, Placeholder):
            return value
        if value.name not in made:
            with fake.FakeTensorMode():
                dtype = torch_dtype(value.info.dtype)
                made[value.name] = torch.empty(value.info.shape, dtype=dtype)
        return made[value.name]

    with torch.serialization.skip_data(materialize_fake_tensors=True):
        save(replaced_in(tree, tensor_for), path)
    pairs = zip(held_in(tree), held_in(read_tree(path)), strict=True)
    places: dict[str, StoredTensor] = {
        hole.name: stored for hole, stored in pairs if isinstance(hole, Placeholder)
    }
    sums: dict[int, int] = {}
    with path.open("r+b") as file:
        for name, stored in places.items():
            file.seek(stored.start)
            crc = 0
            for chunk in chunks(name):
                file.write(chunk)
                crc = zlib.crc32(chunk, crc)
            assert file.tell() == stored.start + stored.info.nbytes, (
                f"{name}: wrote another number of bytes than it has"
            )
            sums[stored.start] = crc
        write_checksums(file, sums)
        file.flush()
        os.fsync(file.fileno())


def save(value: Any, file: Path | BinaryIO) -> None:
    """Write a value with ``torch.save``, and report a full disk as an ``OSError``.

    Torch reports it as a failed assertion of its own.

    Args:
        value: what to write.
        file: path of the file, or an open one.

    Raises:
        OSError: it cannot be written.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        name = str(file if isinstance(file, Path) else file.name)
        message = f"torch.save could not write it; is the disk full? ({one_line(error, 80)})"
        raise OSError(errno.EIO, message, name) from error

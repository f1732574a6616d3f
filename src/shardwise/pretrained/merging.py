"""Merge LoRA adapters into the weights of their base model, one layer at a time.

``peft`` itself computes every merged weight, so that all its kinds of adapters that can be merged
are merged as ``merge_and_unload`` does. The model is built on the meta device, and only the layer
that is being written has memory: its weights, its adapters and their product. All other tensors go
from the base's files to the new ones through a buffer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from peft import get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from shardwise.base.boxes import Box, narrow
from shardwise.base.errors import CheckpointError
from shardwise.base.files import Links, read_small, write_new
from shardwise.checkpoint.disk.beside import check_destination, written_beside
from shardwise.checkpoint.disk.companions import is_companion
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo, dotted, torch_dtype
from shardwise.checkpoint.disk.place import Place
from shardwise.checkpoint.formats.detect import open_source
from shardwise.checkpoint.formats.hf import CONFIG, DEFAULT_SHARD, HfSource, write_hf
from shardwise.checkpoint.formats.source import (
    DEFAULT_BUFFER,
    ReadWindow,
    Source,
    Watch,
    unwatched,
)
from shardwise.checkpoint.ranks.state import ties as ties_of
from shardwise.pretrained import hf, opening
from shardwise.pretrained.building import Name, build, explaining, find
from shardwise.pretrained.filling import ConvertedSource, plan_filling
from shardwise.pretrained.opening import ADAPTER_CONFIG

ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: What ``peft`` puts before the names of the plain model.
PREFIX = "base_model.model."

_MAX_FILE = 1 << 28  # bytes of a tokenizer or a configuration
_TOKENIZER = (
    *("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "spiece", "spm"),
    *("chat_template", "sentencepiece"),
)
# Initializations that change the weights of the base, which the files of the base do not show.
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")


def merge_lora(
    adapters: Path,
    destination: Path,
    base: Name | None = None,
    *,
    force: bool = False,
    buffer: int = DEFAULT_BUFFER,
    max_shard_size: int = DEFAULT_SHARD,
    watch: Watch = unwatched,
) -> None:
    """Write the weights of a base model with adapters merged into them.

    The result is a folder that transformers loads alone: weights in the dtypes of the base,
    ``config.json``, ``generation_config.json``, and the tokenizer, that of the adapters if they
    have one. Memory holds one layer and ``buffer`` bytes beside it.

    Args:
        adapters: a folder that ``peft`` wrote: ``adapter_config.json`` and
            ``adapter_model.safetensors``.
        destination: the folder to write. It is complete, or does not exist.
        base: the folder of the base model, its URL, or its name on the Hugging Face Hub; ``None``:
            the one that the adapters name.
        force: replace an existing checkpoint.
        buffer: bytes of memory to copy through.
        max_shard_size: largest size of a file in bytes.
        watch: called with the number of bytes to write; the function that it returns is called with
            the bytes of each part that was written.

    Raises:
        CheckpointError: a file is damaged, the adapters belong to another model, they cannot be
            merged, or a merged weight is not finite.
        ValueError: the destination exists.
        OSError: writing failed. There is no destination then.
    """
    named = _base_of(adapters)
    check_destination(destination, adapters, force=force)
    place_of_base = find(named if base is None else base)
    folder_of_base = opening.small_files(place_of_base)
    check_destination(destination, folder_of_base, force=force)
    with open_merged(adapters, place_of_base) as merged:
        total = sum(info.nbytes for info in merged.tensors.values())
        with written_beside(destination, adapters, force=force) as folder, torch.no_grad():
            folder.mkdir()
            write_hf(folder, merged, ReadWindow(buffer, watch(total)), max_shard_size)
            _write_beside(folder, adapters, folder_of_base, merged.untied)


@contextlib.contextmanager
def open_merged(adapters: Path, base: Place | None = None) -> Iterator[MergedSource]:
    """Open the weights of a base model with adapters merged into them.

    Args:
        adapters: a folder that ``peft`` wrote.
        base: the model; ``None``: the one that the adapters name.

    Raises:
        CheckpointError: a file is damaged, the adapters belong to another model, or they cannot be
            merged.
    """
    base = find_base(adapters) if base is None else base
    with HfSource(adapters / ADAPTER_WEIGHTS) as values, open_source(base) as plain:
        yield MergedSource(plain, values, adapters)


def find_base(adapters: Path) -> Place:
    """Return the folder of the base model that adapters name, or its name in an object store.

    Raises:
        CheckpointError: they name none, or there is no such model.
    """
    return find(_base_of(adapters))


S = TypeVar("S")


@dataclass(eq=False)
class MergedLayer(Generic[S]):
    """A layer of the model that adapters change.

    Attributes:
        name: its name in the model of ``peft``.
        module: the layer of ``peft``, on the meta device.
        base: the plain module inside of it.
        sources: for each tensor of the layer, by its name in ``module``: where to read it.
    """

    name: str
    module: nn.Module
    base: nn.Module
    sources: Mapping[str, S]

    def name_in_base(self, name: str) -> str | None:
        """The name in ``base`` of a tensor of the layer; ``None``: it is one of an adapter."""
        depth = "base_layer." * len(list(wrappers(self.module)))
        return name.removeprefix(depth) if name.startswith(depth) else None


_Stored = tuple[Source, StatePath]

#: The layer of each tensor that is merged, and the tensor's name in that layer's base; and where to
#: read each tensor that the adapters replace.
_MergePlan = tuple[dict[str, tuple[MergedLayer[_Stored], str]], dict[str, _Stored]]


class MergedSource(Source):
    """The weights of a base model with adapters merged into them, as one :class:`.Source`.

    Args:
        base: the weights of the base.
        values: the tensors of the adapters.
        adapters: the folder of the adapters.

    Attributes:
        untied: whether weights that the base ties are no longer equal, and are written apart.

    Raises:
        CheckpointError: the adapters belong to another model, or cannot be merged.
    """

    def __init__(self, base: Source, values: Source, adapters: Path) -> None:
        self.where = base.where
        self.values: dict[StatePath, Any] = {}
        self._base = base
        self._last: tuple[MergedLayer[_Stored], dict[str, torch.Tensor]] | None = None
        try:
            model = build(base.where)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        ties = {name: {*names} - {name} for name, names in ties_of(model).items()}
        ends = _ends(model)
        plan = plan_filling(hf.Conversions(model, model.state_dict().keys()), base)
        stored = dict(plan.direct)
        for name in ties.keys() - stored.keys():
            for other in sorted(ties[name] & stored.keys()):
                stored[name] = stored[other]
        self._stored = stored
        # The names in the model of tensors whose files have another one.
        self._names = {
            path: name for name, path in stored.items() if stored.get(dotted(path[1:])) != path
        }
        converted = ConvertedSource(base, plan)
        adapted = _adapted(model, adapters)
        self._changed, self._replaced = _plan(adapted, values, base, stored, converted)
        # Tensors of the files that are parts of those that the adapters change.
        self._parts: dict[StatePath, list[str]] = {}
        for name in sorted(self._changed.keys() | self._replaced.keys()):
            for part in converted.parts_of(name):
                self._parts.setdefault(part, []).append(name)
        self._converted = converted
        changed = (self._changed.keys() | self._replaced.keys()) & ties.keys()
        for name in sorted(changed):
            if not {name, *ties[name]} <= ends:
                raise CheckpointError(
                    f"{adapters}: changes {name}, which is tied to "
                    f"{', '.join(sorted(ties[name]))}; {type(model).__name__} cannot keep them "
                    "apart"
                )
        self.untied = bool(changed)
        self.tensors: dict[StatePath, TensorInfo] = dict(base.tensors)
        for name in sorted({each for first in changed for each in (first, *ties[first])}):
            self.tensors[("model", name)] = base.tensors[stored[name]]

    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor; see :class:`.Source`."""
        name = self._names.get(path, dotted(path[1:]))
        if path in self._parts:
            self._base.read(path, box, into)  # what no adapter changes
            for changed in self._parts[path]:
                self._converted.write(changed, self._full(changed), path, box, into)
        elif name in self._changed:
            into.copy_(narrow(self._full(name), box))
        elif name in self._replaced:
            source, stored = self._replaced[name]
            found = torch.empty(box.sizes, dtype=torch_dtype(source.tensors[stored].dtype))
            source.read(stored, box, found)
            into.copy_(found)
        else:
            self._base.read(self._stored.get(name, path), box, into)

    def _full(self, name: str) -> torch.Tensor:
        """A tensor of the model that the adapters change."""
        if name in self._changed:
            layer, inside = self._changed[name]
            return self._merged(layer)[inside]
        source, stored = self._replaced[name]
        return source.full(stored)

    def _merged(self, layer: MergedLayer[_Stored]) -> dict[str, torch.Tensor]:
        """The merged tensors of a layer. Those of the last layer are kept."""
        if self._last is None or self._last[0] is not layer:
            self._last = None  # frees it first
            tensors = {name: source.full(path) for name, (source, path) in layer.sources.items()}
            self._last = layer, merge(layer, tensors, str(self.where))
        return self._last[1]


def merge(
    layer: MergedLayer[S], tensors: Mapping[str, torch.Tensor], where: str
) -> dict[str, torch.Tensor]:
    """Let ``peft`` merge a layer.

    Args:
        layer: the layer.
        tensors: its tensors in full, by name in the layer.
        where: what it belongs to, for the error message.

    Returns:
        The tensors of its base, by name there.

    Raises:
        CheckpointError: a merged weight is not finite.
    """
    try:
        for name, tensor in tensors.items():
            is_adapter = layer.name_in_base(name) is None
            if is_adapter and tensor.dtype in (torch.float16, torch.bfloat16):
                tensor = tensor.float()  # as peft loads adapters
            _assign(layer.module, name, tensor)
        for each in reversed(list(wrappers(layer.module))):
            each.merge()
        base: Any = layer.module
        # Some adapters are layers that change places with the base.
        merged = {name: param.detach() for name, param in base.get_base_layer().named_parameters()}
        for name, tensor in merged.items():
            if not torch.isfinite(tensor).all():
                raise CheckpointError(
                    f"{where}: {name} of a merged {type(layer.base).__name__} is not finite; the "
                    "adapters, or the base, are broken"
                )
        return merged
    finally:
        for each in wrappers(layer.module):
            if each.get_base_layer() is not layer.base:
                each.unmerge()
        for name, tensor in list(layer.module.named_parameters()):
            _assign(layer.module, name, tensor.detach().to("meta"))
        for each in wrappers(layer.module):
            each.merged_adapters.clear()


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter of a module by one that holds ``tensor``."""
    prefix, _, last = name.rpartition(".")
    setattr(module.get_submodule(prefix), last, nn.Parameter(tensor, requires_grad=False))


def wrappers(module: Any) -> Iterator[Any]:
    """The layers of ``peft`` around a plain module, from the outermost one."""
    while isinstance(module, BaseTunerLayer):
        outer: Any = module
        yield outer
        module = outer.base_layer


def _base_of(adapters: Path) -> str:
    """The base model that adapters name."""
    name = opening.read_adapter_settings(adapters).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            f"{adapters / ADAPTER_CONFIG}: names no base model; give its folder or name (--base)"
        )
    return name


def _adapted(model: Any, adapters: Path) -> Any:
    """Put adapters without memory on a model."""
    file = adapters / ADAPTER_CONFIG
    with explaining(f"{file}: peft cannot read it", CheckpointError):
        config = opening.adapter_config(adapters)
    begun = getattr(config, "init_lora_weights", True)
    if begun not in _KEEPS_BASE:
        raise CheckpointError(
            f"{file}: was initialized by {begun!r}, which changed the weights of the base; convert "
            "it with peft's path_initial_model_for_weight_conversion first"
        )
    kind = type(model).__name__
    why = f"cannot be put on {kind}; its {ADAPTER_CONFIG} or its base is of another model"
    with explaining(f"{adapters}: {why}", CheckpointError):
        return opening.with_adapters(model, config, file)


def _plan(
    adapted: Any,
    values: Source,
    base: Source,
    stored: Mapping[str, StatePath],
    converted: ConvertedSource,
) -> _MergePlan:
    """Find what becomes of each tensor, and check that adapters and base belong together."""
    named = dict(adapted.named_parameters(remove_duplicate=False))
    names = {id(param): name for name, param in named.items()}
    saved = get_peft_model_state_dict(adapted, state_dict=named, save_embedding_layers=False)
    given = {dotted(path[1:]): path for path in values.tensors}
    of_base = given.keys() & named.keys()  # that adapters change in full, such as embeddings
    _check_names(values, saved.keys() - of_base, given.keys() - of_base)
    sources = {
        names[id(param)]: (values, given[key]) for key, param in saved.items() if key not in named
    }
    sources |= {name: (values, given[name]) for name in of_base}

    def source_of(name: str, plain: str) -> tuple[Source, StatePath]:
        found = sources.get(name)
        if found is None and plain in stored:
            found = base, stored[plain]
        elif found is None:
            found = converted, ("model", plain)
            if found[1] not in converted.tensors:
                raise CheckpointError(
                    f"{base.where}: contains no {plain!r}, which the adapters change, or only "
                    "tensors that transformers computes it from"
                )
        source, path = found
        if source.tensors[path].shape != tuple(named[name].shape):
            raise CheckpointError(
                f"{source.where}: {dotted(path[1:])}: found shape "
                f"{list(source.tensors[path].shape)}, expected {list(named[name].shape)}"
            )
        return found

    merged, replaced = planned_merge(adapted, source_of)
    layers = tuple(f"{name}." for name in adapters_of(adapted))
    for name in sources:
        if not name.startswith(layers):
            replaced[name.removeprefix(PREFIX)] = source_of(name, name.removeprefix(PREFIX))
    if not merged and not replaced:
        raise CheckpointError(f"{values.where}: contains nothing that could be merged")
    return merged, replaced


def adapters_of(adapted: nn.Module) -> dict[str, nn.Module]:
    """The outermost layers of peft in a model, by name."""
    kinds: Any = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    found: dict[str, nn.Module] = {}
    for name, module in adapted.named_modules():
        if isinstance(module, kinds) and not name.startswith(tuple(f"{each}." for each in found)):
            found[name] = module
    return found


def planned_merge(
    adapted: nn.Module, source_of: Callable[[str, str], S]
) -> tuple[dict[str, tuple[MergedLayer[S], str]], dict[str, S]]:
    """Find what becomes of each tensor of a base when its adapters are merged into it.

    Args:
        adapted: the model of peft, on the meta device.
        source_of: called with the name of a tensor of ``adapted``, and the name of the tensor of
            the plain model whose values it has if it is not an adapter; returns where its values
            are.

    Returns:
        For each tensor that is merged, by its name in the plain model, the layer, and its name in
        that layer's base; and where the values are of each one that is replaced.

    Raises:
        CheckpointError: peft cannot merge a layer.
    """
    merged: dict[str, tuple[MergedLayer[S], str]] = {}
    replaced: dict[str, S] = {}
    for name, module in adapters_of(adapted).items():
        plain = name.removeprefix(PREFIX)
        if isinstance(module, BaseTunerLayer) and hasattr(module, "merge"):
            assert isinstance(module, nn.Module)
            kernel = module.get_base_layer()
            own = {id(each) for each in kernel.buffers()}
            for each, buffer in module.named_buffers():
                if id(buffer) not in own:
                    raise CheckpointError(
                        f"{plain}: found the buffer {each} of an adapter, expected adapters of "
                        "parameters alone, such as LoRA; leave these apart from their base"
                    )
            depth = "base_layer." * len(list(wrappers(module)))
            sources = {
                each: source_of(f"{name}.{each}", f"{plain}.{each.removeprefix(depth)}")
                for each, _ in module.named_parameters()
            }
            layer = MergedLayer(name, module, kernel, sources)
            for each, _ in kernel.named_parameters():
                merged[f"{plain}.{each}"] = layer, each
        elif isinstance(module, ModulesToSaveWrapper):
            adapter = module.active_adapters[0]
            for each, _ in module.original_module.named_parameters():
                found = source_of(f"{name}.modules_to_save.{adapter}.{each}", f"{plain}.{each}")
                replaced[f"{plain}.{each}"] = found
        else:
            raise CheckpointError(f"{plain}: {type(module).__name__} cannot be merged")
    return merged, replaced


def _check_names(values: Source, expected: Set[str], found: Set[str]) -> None:
    """Check that the adapters' file has the tensors that their configuration asks for."""
    for problem, names in (
        ("contains no", sorted(expected - found)),
        ("contains an unexpected", sorted(found - expected)),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{values.where}: {problem} {names[0]!r}{more}; its {ADAPTER_CONFIG} or its base "
                "is of another model"
            )


# -- tied weights ----------------------------------------------------------------------------------


def _ends(model: Any) -> set[str]:
    """The names of embedding and output head, which a configuration can say are not tied."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if any(end is not None and param is end.weight for end in ends)
    }


def _write_beside(folder: Path, adapters: Path, base: Path, untied: bool) -> None:
    """Copy the configurations and the tokenizer, that of the adapters if they have one."""
    own = [file for file in sorted(adapters.iterdir()) if file.name.startswith(_TOKENIZER)]
    of_base = [
        file
        for file in sorted(base.iterdir())
        if is_companion(file.name) and not (own and file.name.startswith(_TOKENIZER))
    ]
    for file in (*own, *of_base):
        if file.is_file() and not (folder / file.name).exists():
            write_new(folder / file.name, read_small(file, _MAX_FILE, Links.FOLLOW))
    if untied:
        config = json.loads((folder / CONFIG).read_bytes())
        for each in (config, config.get("text_config")):
            if isinstance(each, dict):
                each["tie_word_embeddings"] = False
        (folder / CONFIG).unlink()
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        write_new(folder / CONFIG, text.encode())

"""Adapters of ``peft`` on a sharded model: added without memory, initialized, and saved as shards.

model = build(name)                                # on the meta device
adapted = add_adapters(model, LoraConfig(...))     # on the meta device, too
...                                                # fully_shard
initialize_adapters(adapted)
fill(adapted, name, names=plain_names(adapted))
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from shardwise._torch import fsdp
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.files import sync
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.hf import Contents, Conversion, SavedModel, info_of
from shardwise.checkpoint.ranks.loading import own_part, tensors_of
from shardwise.checkpoint.ranks.state import check_tensor, own_tensors, ties
from shardwise.frontends.pretrained import hf, opening
from shardwise.frontends.pretrained.filling import same_random_numbers
from shardwise.frontends.pretrained.four_bits import four_bit_layers
from shardwise.frontends.pretrained.merging import (
    ADAPTER_WEIGHTS,
    PREFIX,
    MergedLayer,
    merge,
    planned_merge,
)
from shardwise.sharding.allocate import allocate

_NAME = "default"  # peft's own name of the first adapter
# Other initializations compute with the weights of the base, which no rank has in full.
_INITIALIZATIONS = (True, "gaussian")


def add_adapters(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """Put adapters on a model, on the meta device, and freeze the rest.

    Args:
        model: the model, on the meta device, not sharded. Its layers are replaced by those of peft,
            so it computes with the adapters itself, too.
        config: which layers get adapters, and of which rank: a ``LoraConfig``.

    Returns:
        The model of peft, around ``model``. Adapters are float32, whatever the base is.

    Raises:
        ValueError: peft cannot put these adapters on the model, or they are initialized from
            weights of the base.
    """
    asked = getattr(config, "init_lora_weights", None)
    if asked not in _INITIALIZATIONS or getattr(config, "use_dora", False):
        how = "use_dora=True" if getattr(config, "use_dora", False) else f"{asked!r}"
        raise ValueError(
            f"config: found adapters of type {config.peft_type} initialized by {how}, expected "
            "LoRA with init_lora_weights=True or 'gaussian'; others need the base in full"
        )
    if tokens := getattr(config, "trainable_token_indices", None):
        raise ValueError(
            f"config: found trainable_token_indices={tokens}, expected none: their forward changes "
            "the embedding, which is sharded; modules_to_save=['embed_tokens'] trains all of it"
        )
    trains = model.training
    with torch.random.fork_rng(devices=[]):  # peft draws numbers that nothing holds
        adapted: PeftModel = opening.with_adapters(model, config, "config")
    adapted.train(trains)
    return adapted


def has_adapters(model: nn.Module) -> bool:
    """Whether layers of a model have been replaced by those of peft."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def plain_names(model: PeftModel) -> dict[str, str]:
    """The name that each weight of the base has in the plain model, by its name under peft.

    A copy that is trained in full (``modules_to_save``) has the name of what it is a copy of, so
    that it begins with those values. Adapters have no entry.

    Args:
        model: the model of peft.
    """
    modules = dict(model.named_modules())
    names = {}
    for name in own_tensors(model):
        plain = _plain_name(name, modules)
        if plain is not None:
            names[name] = plain
    return names


def _plain_name(name: str, modules: Mapping[str, Any]) -> str | None:
    """The name of a weight of the base in the plain model; ``None`` for one of an adapter."""
    plain: list[str] = []
    path = name.split(".")
    for depth, part in enumerate(path):
        parent = modules.get(".".join(path[:depth]))
        around = modules.get(".".join(path[: depth - 1])) if depth else None
        if isinstance(parent, BaseTunerLayer):
            if part != "base_layer":
                return None
        elif isinstance(parent, ModulesToSaveWrapper) or (
            isinstance(around, ModulesToSaveWrapper) and path[depth - 1] == "modules_to_save"
        ):
            continue  # original_module, or modules_to_save and the name of the adapter
        else:
            plain.append(part)
    return ".".join(plain).removeprefix(PREFIX)


def initialize_adapters(model: PeftModel, group: dist.ProcessGroup | None = None) -> None:
    """Give adapters memory, and the values that peft gives them. Every rank calls this.

    If the random generators of all ranks agree, the values are those of ``get_peft_model`` on the
    unsharded model with the same seed; else all ranks draw from the seed of rank 0. One adapter at
    a time exists in full.

    Args:
        model: the model of peft, after all ``fully_shard`` calls.
        group: the ranks of the model; the default process group if ``None``.

    Raises:
        CheckpointError: a rank failed; raised on all ranks alike.
    """
    ranks = Ranks(group_for(group))
    doing = "initializing adapters"

    def run() -> None:
        allocate(model, [name for name, _ in adapter_tensors(model)])
        state = dict(adapter_tensors(model))
        with torch.no_grad():
            for name, full in _initial_values(model):
                box, local = own_part(state[name])
                local.copy_(narrow(full, box))

    with same_random_numbers(model, ranks, doing):
        ranks.all(doing, run)


def adapter_tensors(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of adapters by name, with shards as ``DTensor``s; not those of the base."""
    base = plain_names(model)
    for name, tensor in own_tensors(model).items():
        if name not in base:
            yield name, tensor


def _initial_values(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Draw the values of all adapters, one after the other, with the random numbers of peft.

    When peft makes an adapter, torch initializes its two layers, and then peft does.
    """
    config: Any = model.peft_config[_NAME]
    gaussian = config.init_lora_weights == "gaussian"
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if _NAME in layer.lora_A:
            down: Any = layer.lora_A[_NAME]
            up: Any = layer.lora_B[_NAME]
            _uniform(down.weight)
            _uniform(up.weight)
            if up.bias is not None:
                torch.rand(up.bias.shape)
                yield f"{path}.lora_B.{_NAME}.bias", torch.zeros(up.bias.shape)
            if gaussian:
                drawn = torch.empty(down.weight.shape).normal_(std=1 / layer.r[_NAME])
            else:
                drawn = _uniform(down.weight)
            yield f"{path}.lora_A.{_NAME}.weight", drawn
            yield f"{path}.lora_B.{_NAME}.weight", torch.zeros(up.weight.shape)
        if _NAME in layer.lora_embedding_A:
            down, up = layer.lora_embedding_A[_NAME], layer.lora_embedding_B[_NAME]
            torch.randn(down.shape)
            torch.randn(up.shape)
            yield f"{path}.lora_embedding_A.{_NAME}", torch.zeros(down.shape)
            yield f"{path}.lora_embedding_B.{_NAME}", torch.randn(up.shape)


def _uniform(like: torch.Tensor) -> torch.Tensor:
    """Values as torch initializes the weight of a linear layer."""
    return nn.init.kaiming_uniform_(torch.empty(like.shape), a=math.sqrt(5))


def saved_adapters(model: PeftModel) -> SavedModel:
    """How the adapters of a model are saved: as peft does.

    ``PeftModel.from_pretrained`` and ``AutoPeftModel`` load the folder.

    Args:
        model: the model of peft, sharded or not.
    """

    def contents() -> Contents:
        saved = get_peft_model_state_dict(
            model, state_dict=tensors_of(model), save_embedding_layers=False
        )
        return Contents({name: check_tensor(tensor, name) for name, tensor in saved.items()})

    def write_config(folder: Path) -> None:
        config = copy.copy(model.peft_config[_NAME])
        config.inference_mode = True
        mapping = None
        if config.task_type is None:  # else peft knows the class of its own
            base = fsdp.original_class(hf.inner_model(model))
            mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=mapping)
        sync(folder / opening.ADAPTER_CONFIG)

    return SavedModel(contents, write_config, single=ADAPTER_WEIGHTS, needs_single=True)


class MergedAdapters:
    """The weights of a base with its adapters merged into them, one layer at a time.

    Args:
        model: the model of peft, sharded or not.

    Raises:
        CheckpointError: peft cannot merge a layer, or it would untie weights.
    """

    def __init__(self, model: PeftModel) -> None:
        if found := next(four_bit_layers(model), None):
            raise CheckpointError(
                f"{found[0]}: found a weight in four bits, expected a base to merge adapters into; "
                "publish the adapters alone, or merge the files with `shardwise merge-lora`"
            )
        self._model = model
        self._names = plain_names(model)
        base = hf.inner_model(model)
        plain = hf.build(fsdp.original_class(base), copy.deepcopy(base.config), torch.float32)
        tied = ties(plain)
        adapted = opening.with_adapters(plain, copy.copy(model.peft_config[_NAME]), "model")
        merged, self._replaced = planned_merge(adapted, lambda name, plain: name)
        self._layers: dict[MergedLayer[str], dict[str, str]] = {}
        for name, (layer, inside) in merged.items():
            self._layers.setdefault(layer, {})[inside] = name
        self._changed = merged.keys() | self._replaced.keys()
        for name in sorted(self._changed & tied.keys()):
            raise CheckpointError(
                f"{name}: found adapters on a weight that is tied to "
                f"{', '.join({*tied[name]} - {name})}, expected others; publish the adapters alone"
            )

    def __call__(self) -> tuple[dict[str, torch.Tensor], list[Conversion]]:
        """The tensors that no adapter changes, by name in the plain model, and the merged ones."""
        found = tensors_of(self._model)
        secondary = hf.tied_names(hf.inner_model(self._model))
        kept = {
            plain: found[name]
            for name, plain in self._names.items()
            if plain not in self._changed and plain not in secondary
        }
        kept |= {plain: found[name] for plain, name in self._replaced.items()}
        return kept, [self._merge(layer, names, found) for layer, names in self._layers.items()]

    def _merge(
        self,
        layer: MergedLayer[str],
        names: Mapping[str, str],
        found: Mapping[str, torch.Tensor],
    ) -> Conversion:
        sources = {name: found[name] for name in layer.sources.values()}

        def convert(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            # Copies, for peft adds to the weight of the base, which may be the model's own.
            own = {name: full[source].clone() for name, source in layer.sources.items()}
            made = merge(layer, own, type(self._model).__name__)
            return {names[inside]: tensor for inside, tensor in made.items()}

        results = {
            names[inside.rpartition("base_layer.")[2]]: info_of(found[source])
            for inside, source in layer.sources.items()
            if "base_layer." in inside
        }
        return Conversion(sources, results, convert)

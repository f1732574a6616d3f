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
from peft import PeftConfig, PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lycoris_utils import LycorisLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, get_pattern_key
from torch import nn
from transformers import PreTrainedModel

from shardwise._torch import fsdp
from shardwise.base.boxes import narrow
from shardwise.base.errors import CheckpointError
from shardwise.base.files import sync
from shardwise.base.units import one_line
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.contents import Contents, Conversion, info_of
from shardwise.checkpoint.ranks.hf import SavedModel
from shardwise.checkpoint.ranks.loading import own_part, tensors_of
from shardwise.checkpoint.ranks.state import check_tensor, own_tensors, ties
from shardwise.pretrained import hf, opening
from shardwise.pretrained.building import explaining
from shardwise.pretrained.filling import same_random_numbers
from shardwise.pretrained.four_bits import four_bit_layers
from shardwise.pretrained.merging import (
    ADAPTER_WEIGHTS,
    PREFIX,
    MergedLayer,
    merge,
    planned_merge,
    wrappers,
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
    fused = next((name for name, each in model.named_parameters() if each.ndim == 3), None)
    trains = model.training
    with torch.random.fork_rng(devices=[]):  # peft draws numbers that nothing holds
        try:
            adapted: PeftModel = opening.with_adapters(model, config, "config")
        except ValueError as error:
            dropout = getattr(config, "lora_dropout", 0.0)
            if fused is None or not dropout:
                raise
            raise ValueError(
                f"config: found lora_dropout={dropout} in a model with {fused}, "
                "expected 0: adapters on parameters that are no layers cannot drop their inputs "
                f"({one_line(error)})"
            ) from error
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
    for path, layer in _in_order_of_peft(model):
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


def _in_order_of_peft(model: PeftModel) -> list[tuple[str, LoraLayer]]:
    """The layers with adapters, by name, in the order in which peft has made them.

    Modules come first. Then come single parameters, such as the fused experts of a layer; each has
    a layer of its own, around the one before it.
    """
    layers = [(path, each) for path, each in model.named_modules() if isinstance(each, LoraLayer)]
    modules = [(path, each) for path, each in layers if not hasattr(each, "parameter_name")]
    of_parameters = {
        f"{_without_wrappers(path)}.{each.parameter_name}": (path, each)
        for path, each in layers
        if hasattr(each, "parameter_name")
    }
    made = getattr(model.base_model, "targeted_parameter_names", ())
    return modules + [of_parameters[name] for name in made]


def _without_wrappers(path: str) -> str:
    """The name that a layer of peft has in the plain model."""
    return path.removeprefix(PREFIX).replace(".base_layer", "")


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
        adapter = active_adapter(model)
        _check_settings(model, adapter)
        tensors = tensors_of(model)
        try:
            saved = get_peft_model_state_dict(
                model,
                state_dict=tensors,
                adapter_name=adapter,
                save_embedding_layers=False,
            )
        except KeyError as error:
            kind = model.peft_config[adapter].peft_type
            raise CheckpointError(
                f"{error}: found no such tensor among those of the model, expected all tensors of "
                f"adapters of type {kind}; save them with the save_pretrained of peft"
            ) from error
        _check_frozen(model, tensors, saved)
        return Contents({name: check_tensor(tensor, name) for name, tensor in saved.items()})

    def write_config(folder: Path) -> None:
        config = copy.copy(model.peft_config[active_adapter(model)])
        config.inference_mode = True
        mapping = None
        if config.task_type is None:  # else peft knows the class of its own
            base = fsdp.original_class(hf.inner_model(model))
            mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=mapping)
        sync(folder / opening.ADAPTER_CONFIG)

    return SavedModel(contents, write_config, single=ADAPTER_WEIGHTS, needs_single=True)


def active_adapter(model: PeftModel) -> str:
    """The name of the adapter that a forward of a model computes with.

    Raises:
        CheckpointError: it computes with none or several, or not with the same one everywhere.
    """
    active = list(model.active_adapters)
    if not model.has_active_enabled_adapter:  # prompts have no layers that say so
        raise CheckpointError(
            "adapters: found them disabled, expected them enabled: what is saved is what a forward "
            "computes"
        )
    for path, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer | ModulesToSaveWrapper):
            continue
        if layer.disable_adapters:
            raise CheckpointError(
                f"{path}: found adapters that are disabled, expected them enabled: what is saved "
                "is what a forward computes"
            )
        own = list(layer.active_adapters)
        if own != active and (own or isinstance(layer, BaseTunerLayer)):
            active += own or ["none"]
            break
    if len(active) != 1:
        names = ", ".join(dict.fromkeys(active)) or "none"
        raise CheckpointError(
            f"adapters: found {names} active, expected one in all layers; choose it with "
            "set_adapter, or make one of them with add_weighted_adapter"
        )
    return active[0]


def _check_settings(model: PeftModel, adapter: str) -> None:
    """Check that layers have the rank and scale of the configuration, which is saved beside them.

    Raises:
        CheckpointError: one does not, as after ``scale_layer``, ``set_scale``, or a change of the
            configuration; or it draws the base's values at random.
    """
    begun = getattr(model.peft_config[adapter], "init_lora_weights", None)
    if isinstance(begun, str) and begun.startswith("pissa_niter"):
        raise CheckpointError(
            f"init_lora_weights: found {begun!r}, expected 'pissa' or another: where peft reads "
            "these adapters, it changes the base by other random numbers; merge the adapters"
        )
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer | LycorisLayer) or adapter not in layer.scaling:
            continue
        rank, usual = _settings(model, adapter, path, layer)
        if layer.r[adapter] != rank:
            raise CheckpointError(
                f"{path}: found adapters of rank {layer.r[adapter]}, expected {rank} as in the "
                "configuration, which was changed since; files of peft have no other"
            )
        if not math.isclose(found := layer.scaling[adapter], usual):
            raise CheckpointError(
                f"{path}: found adapters scaled by {found:g}, expected {usual:g}, which follows "
                "from alpha and r: files of peft keep no other; undo it with unscale_layer, or "
                "merge the adapters"
            )


def _settings(
    model: PeftModel, adapter: str, path: str, layer: LoraLayer | LycorisLayer
) -> tuple[int, float]:
    """The rank and scale that peft gives a layer when it reads the configuration."""
    config: Any = model.peft_config[adapter]
    rank: int = layer.r[adapter]
    if isinstance(layer, LycorisLayer):
        return rank, layer.alpha[adapter] / rank
    if config.peft_type == PeftType.ADALORA:
        return rank, config.lora_alpha if config.lora_alpha > 0 else rank
    name = _without_wrappers(path)
    if parameter := getattr(layer, "parameter_name", None):
        name = f"{name}.{parameter}"
    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _check_frozen(
    model: PeftModel, tensors: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
) -> None:
    """Check that no weights are trained but those that are saved.

    Raises:
        CheckpointError: one of the base is trained, and files of adapters have no place for it.
    """
    kept = {id(tensor) for tensor in saved.values()}
    own = own_tensors(model)
    for name in plain_names(model):
        if not name.startswith("base_model.") or ".modules_to_save." in name:
            continue  # prompts, and copies of which the active adapter's are saved
        if own[name].requires_grad and id(tensors[name]) not in kept:
            raise CheckpointError(
                f"{name}: found a weight of the base that is trained, expected it frozen, or in "
                "modules_to_save: files of adapters have no place for it; merge the adapters, or "
                "call requires_grad_(False) on it if it was not trained"
            )


class MergedAdapters:
    """The weights of a base with its active adapter merged into them, one layer at a time.

    Args:
        model: the model of peft, sharded or not.

    Raises:
        CheckpointError: peft cannot merge a layer, it would untie weights, or more than one adapter
            is active.
    """

    def __init__(self, model: PeftModel) -> None:
        if found := next(four_bit_layers(model), None):
            raise CheckpointError(
                f"{found[0]}: found a weight in four bits, expected a base to merge adapters into; "
                "publish the adapters alone, or merge the files with `shardwise merge-lora`"
            )
        self._model = model
        self._adapter = active_adapter(model)
        config: Any = copy.copy(model.peft_config[self._adapter])
        if replicated := getattr(config, "layer_replication", None):
            raise CheckpointError(
                f"layer_replication: found {replicated}, expected none: the merged "
                "model has other layers than its base; publish the adapters alone"
            )
        base = hf.inner_model(model)
        plain = hf.build(fsdp.original_class(base), copy.deepcopy(base.config), torch.float32)
        tied, of_base = ties(plain), own_tensors(plain).keys()
        why = f"peft cannot put adapters of type {config.peft_type} on a model without memory"
        with explaining(f"{why}; publish the adapters alone", CheckpointError):
            adapted = opening.with_adapters(plain, config, "model", self._adapter)
        merged, self._replaced = planned_merge(adapted, lambda name, plain: name)
        self._layers: dict[MergedLayer[str], dict[str, str]] = {}
        for name, (layer, inside) in merged.items():
            self._layers.setdefault(layer, {})[inside] = name
        self._changed = merged.keys() | self._replaced.keys()
        used = {*self._replaced.values()}
        used |= {source for layer in self._layers for source in layer.sources.values()}
        named = dict(adapted.named_parameters(remove_duplicate=False))
        plain_of = plain_names(adapted)
        # What several layers share is beside them, in no module of the plain model.
        self._beside = {name for name in named if plain_of.get(name) not in of_base}
        if not {id(named[name]) for name in self._beside} <= {id(named[name]) for name in used}:
            raise CheckpointError(
                f"adapters: found type {config.peft_type.value}, which adds to more than the "
                "weights of layers, expected one that can be merged; publish the adapters alone"
            )
        for name in sorted(self._changed & tied.keys()):
            raise CheckpointError(
                f"{name}: found adapters on a weight that is tied to "
                f"{', '.join({*tied[name]} - {name})}, expected others; publish the adapters alone"
            )

    def __call__(self) -> tuple[dict[str, torch.Tensor], list[Conversion]]:
        """The tensors that no adapter changes, by name in the plain model, and the merged ones."""
        self._check()
        found = tensors_of(self._model)
        secondary = hf.tied_names(hf.inner_model(self._model))
        # Copies that are trained in full count only as the active adapter has them.
        kept = {
            plain: found[name]
            for name, plain in plain_names(self._model).items()
            if plain not in self._changed and plain not in secondary
            if name not in self._beside and ".modules_to_save." not in name
        }
        kept |= {plain: found[name] for plain, name in self._replaced.items()}
        return kept, [self._merge(layer, names, found) for layer, names in self._layers.items()]

    def _check(self) -> None:
        """Check that the forward adds the adapter that was active at first.

        Raises:
            CheckpointError: it adds another one, or has been merged into the base.
        """
        if (now := active_adapter(self._model)) != self._adapter:
            raise CheckpointError(
                f"adapters: found {now} active, expected {self._adapter}, as when publishing began"
            )
        for path, layer in self._model.named_modules():
            if isinstance(layer, BaseTunerLayer) and layer.merged:
                raise CheckpointError(
                    f"{path}: found adapters that are merged into the base, expected them apart; "
                    "call unmerge_adapter()"
                )

    def _merge(
        self,
        layer: MergedLayer[str],
        names: Mapping[str, str],
        found: Mapping[str, torch.Tensor],
    ) -> Conversion:
        for name in layer.sources.values():
            if name not in found:
                raise CheckpointError(
                    f"{name}: found no such tensor, expected those that "
                    f"{self._adapter} alone gives a model; remove other adapters"
                )
        sources = {name: found[name] for name in layer.sources.values()}

        def convert(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            # Copies, for peft adds to the weight of the base, which may be the model's own.
            own = {name: full[source].clone() for name, source in layer.sources.items()}
            self._scale(layer)
            made = merge(layer, own, type(self._model).__name__)
            return {names[inside]: tensor for inside, tensor in made.items()}

        results = {
            names[plain]: info_of(found[source])
            for inside, source in layer.sources.items()
            if (plain := layer.name_in_base(inside)) is not None
        }
        return Conversion(sources, results, convert)

    def _scale(self, layer: MergedLayer[str]) -> None:
        """Scale the adapter of a layer as the trained model does, which may have changed it."""
        own = self._model.get_submodule(layer.name)
        for to, like in zip(wrappers(layer.module), wrappers(own), strict=True):
            if isinstance(scaling := getattr(like, "scaling", None), dict):
                to.scaling.update(scaling)

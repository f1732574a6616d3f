"""The private names of ``transformers``, behind functions: the only file that touches them.

``transformers`` 5 renames and rearranges weights while it loads them. Its tables of conversions and
its rules for missing and unexpected weights are used as they are, so that a sharded model gets what
``from_pretrained`` gives an unsharded one. Tried with 5.12, 5.17 and 5.23.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import guard_torch_init_functions, meta_device_safe_creation_ops
from transformers.utils import import_utils

from shardwise._torch import fsdp
from shardwise.checkpoint.ranks.state import own_tensors

_LOADED = "_is_hf_initialized"  # initializations leave tensors with this attribute alone


@contextmanager
def fake_as_real() -> Iterator[None]:
    """Have models treat fake tensors as they treat real ones, until the end of the block.

    Models take fake tensors for a sign of tracing, and then make masks that no training makes. A
    batch of real tensors is also searched for sequences that are packed into one; a fake one has
    no values, and counts as one that has none.
    """
    is_fake, find_packed = import_utils.is_fake_tensor, masking_utils.find_packed_sequence_indices
    try:
        import_utils.is_fake_tensor = lambda x: False
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        yield
    finally:
        import_utils.is_fake_tensor = is_fake
        masking_utils.find_packed_sequence_indices = find_packed


def config_class(model_type: str) -> type[PreTrainedConfig] | None:
    """The configuration class of a model type; ``None`` if this version does not know the type."""
    try:
        return transformers.CONFIG_MAPPING[model_type]
    except KeyError:
        return None


def class_named(name: str) -> type[PreTrainedModel] | None:
    """The model class of this name; ``None`` if this version has none."""
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def build(model_class: Any, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model on the meta device, with tied weights tied.

    Args:
        model_class: a model class, or an ``AutoModel...`` class.
        config: the configuration, which becomes the model's own.
        dtype: dtype of its parameters, but for those that the model keeps in float32.
    """
    is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
    with torch.device("meta"), meta_device_safe_creation_ops():
        if is_model:
            model = model_class._from_config(config, dtype=dtype)
        else:
            model = model_class.from_config(config, dtype=dtype, trust_remote_code=False)
    assert isinstance(model, PreTrainedModel)
    patterns = _kept_patterns(model, dtype)
    for name, tensor in own_tensors(model).items():
        if tensor.is_floating_point() and _matches(patterns, name):
            tensor.data = tensor.data.to(torch.float32)
    return model


def kept_in_float32(model: nn.Module, dtype: torch.dtype) -> set[nn.Parameter]:
    """The parameters that stay in float32 when the rest of a model has another dtype.

    Args:
        model: a ``transformers`` model, or a module around one, with adapters of peft or not; any
            other has no such parameters.
        dtype: the dtype of the rest.
    """
    found = set()
    for inner in model.modules():
        if isinstance(inner, PreTrainedModel) and (patterns := _kept_patterns(inner, dtype)):
            for name, param in inner.named_parameters(remove_duplicate=False):
                if param.dtype == torch.float32 and _matches(patterns, _PEFT.sub("", name)):
                    found.add(param)
    return found


#: What peft puts into the names of weights that adapters, or trained copies, belong to.
_PEFT = re.compile(r"\b(base_layer|original_module|modules_to_save\.[^.]+)\.")


def _kept_patterns(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Patterns of the names of what a model keeps in float32."""
    return [each.replace("*", ".*") for each in model._get_dtype_plan(dtype)]


def untie(model: PreTrainedModel, are_equal: Callable[[str, str], bool]) -> list[str]:
    """Untie weights of a model on the meta device.

    Args:
        model: the model.
        are_equal: called with the names of a tied weight and of the one that it is tied to.

    Returns:
        The names of the weights that have a parameter of their own now.
    """
    untied = [
        name for name, other in model.all_tied_weights_keys.items() if not are_equal(name, other)
    ]
    for name in untied:
        del model.all_tied_weights_keys[name]
        path, _, attribute = name.rpartition(".")
        old = model.get_parameter(name)
        new = nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad)
        setattr(model.get_submodule(path), attribute, new)
    return untied


class Conversions:
    """What ``transformers`` does with the weights of a file, for one model.

    Args:
        model: the model, sharded or not.
        names: names of its tensors as they are in a plain model; an attribute, too.
    """

    def __init__(self, model: PreTrainedModel, names: Collection[str]) -> None:
        # Conversions are looked up by the names of classes, which sharding changes, and ask the
        # model for shapes. So a plain model on the meta device is built to answer for it.
        self.plain = build(fsdp.original_class(model), copy.deepcopy(model.config), torch.float32)
        self.names = dict.fromkeys(names, True)
        self._all = get_model_conversion_mapping(self.plain)
        self._renamings = [each for each in self._all if isinstance(each, WeightRenaming)]
        self._converters = [each for each in self._all if isinstance(each, WeightConverter)]
        self._by_pattern = {
            pattern: each for each in self._converters for pattern in each.source_patterns
        }

    def tied_to(self, name: str) -> list[str]:
        """The names of the weights that one is tied to in a plain model."""
        ties = self.plain.all_tied_weights_keys
        first = ties.get(name, name)
        alike = [first, *(each for each, other in ties.items() if other == first)]
        return [each for each in alike if each != name]

    def target_of(self, name: str) -> tuple[str, str | None]:
        """Where a weight goes.

        Args:
            name: its name in the file. Call this in the order of :func:`natural_order`.

        Returns:
            Its name in the model, and the pattern of the conversion that takes it; ``None`` if it
            is taken as it is. If one weight becomes several, the name is that of the first.
        """
        prefix = self.plain.base_model_prefix
        renamed, pattern = rename_source_key(
            name, self._renamings, self._converters, prefix, self.names
        )
        if renamed not in self.names and name in self.names:
            renamed, pattern = rename_source_key(name, [], [], prefix, self.names)
        return str(renamed), pattern

    def convert(self, target: str, sources: Mapping[str, list[Any]]) -> dict[str, Any]:
        """Convert the weights of a file.

        Args:
            target: the name that :meth:`target_of` gave for all of them.
            sources: the weights in order, by pattern.

        Returns:
            The weights by their names in the model.
        """
        converter = copy.deepcopy(self._by_pattern[next(iter(sources))])
        for pattern, weights in sources.items():
            converter.collected_tensors[pattern] = list(weights)
        made = converter.convert(target, model=self.plain, config=self.plain.config)
        return {
            name: weight[0] if isinstance(weight, list) else weight for name, weight in made.items()
        }

    def remember(self, model: PreTrainedModel) -> None:
        """Let ``save_pretrained`` of a model revert the conversions that were used."""
        used = [each for each in self._all if each.was_used()]
        model.__dict__["_weight_conversions"] = used


class Reversal:
    """What ``save_pretrained`` does with the weights of one model: loading's conversions reverted.

    Args:
        model: the model, sharded or not.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # As for loading: conversions are looked up by the names of classes.
        self._plain = build(fsdp.original_class(model), copy.deepcopy(model.config), torch.float32)
        used = getattr(model, "_weight_conversions", None)
        if used is None:  # it was not loaded: whether files have a prefix is unknown
            found = get_model_conversion_mapping(self._plain, add_legacy=False)
            used = [each for each in found if not isinstance(each, PrefixChange)]
        self._plain.__dict__["_weight_conversions"] = used
        converters = [each for each in reversed(used) if isinstance(each, WeightConverter)]
        self._reversed: list[Any] = [each.reverse_transform() for each in converters]

    def groups(self, names: Collection[str]) -> list[list[str]]:
        """The weights that are converted together, by name. Others are renamed at most."""
        groups: dict[str, list[str]] = {}
        for name in natural_order(names):
            for converter in self._reversed:
                target, pattern = converter.rename_source_key(name)
                if pattern is not None:  # one converts a weight at most
                    groups.setdefault(target, []).append(name)
                    break
        return list(groups.values())

    def revert(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert weights of the model to those of a file; weights that are renamed stay objects.

        Args:
            weights: by name in the model; also on the meta device.

        Returns:
            The weights by name in the file.
        """
        made: dict[str, torch.Tensor] = revert_weight_conversion(self._plain, dict(weights))
        return made


def not_saved(model: PreTrainedModel) -> frozenset[str]:
    """The names of tensors that the model never saves."""
    return frozenset(model._keys_to_ignore_on_save or ())


def tied_names(model: PreTrainedModel) -> frozenset[str]:
    """The names that are tied to others, and not saved if those are."""
    return frozenset(model.all_tied_weights_keys or ())


def natural_order(names: Collection[str]) -> list[str]:
    """Names in the order in which ``transformers`` loads them: ``2`` before ``10``."""
    return sorted(names, key=dot_natural_key)


def may_be_missing(model: PreTrainedModel, name: str) -> bool:
    """Whether the model says that files need not have this weight."""
    return _matches(model._keys_to_ignore_on_load_missing, name)


def may_be_unexpected(model: PreTrainedModel, name: str) -> bool:
    """Whether the model says that files may have this weight without need."""
    former = {
        "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
        "position_ids": r"(^|\.)position_ids$",
    }
    buffers = [buffer for buffer, _ in model.named_buffers()]  # that files used to have
    had = [former[end] for end in former if any(buffer.endswith(end) for buffer in buffers)]
    return _matches([*(model._keys_to_ignore_on_load_unexpected or ()), *had], name)


def _matches(patterns: Collection[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


@contextmanager
def kept(tensors: Collection[torch.Tensor]) -> Iterator[None]:
    """Let initializations leave ``tensors`` as they are, inside."""
    try:
        for tensor in tensors:
            setattr(tensor, _LOADED, True)
        with guard_torch_init_functions():
            yield
    finally:
        for tensor in tensors:
            vars(tensor).pop(_LOADED, None)


def tell_sharded(model: PreTrainedModel, shards: int, replicas: int) -> None:
    """Tell ``transformers`` that a model is sharded, as its own ``from_pretrained`` would.

    ``Trainer`` then leaves the model as it is, and lets all ranks save it. ``generate`` runs as
    many forwards on every rank, and models that drop layers at random run all of them.

    Args:
        model: the model, sharded.
        shards: number of ranks that share its parameters.
        replicas: number of copies.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        config = DistributedConfig(fsdp_size=shards, dp_replicate_size=replicas)
    except (ImportError, TypeError):  # older than 5.20: its Trainer shards by Accelerate alone
        return
    model.__dict__["_is_distributed_loading_by_transformers"] = True
    fsdp.mark_managed(model)
    model.config.distributed_config = config  # in no config.json
    if config.dp_size == 1:  # it takes a model on one rank for one that is not sharded
        model.__dict__["gather_sharded_state_dict_for_save"] = _gathered_alone


def _gathered_alone(_: object, state: dict[str, Any], *__: object, **___: object) -> dict[str, Any]:
    """Return a state dict with full tensors: what transformers writes, on one rank."""
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in state.items()
    }


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The outermost ``transformers`` model in ``model``, which may be wrapped, as by peft.

    Raises:
        TypeError: there is none.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(f"model: found a {type(model).__name__}, expected a transformers model")

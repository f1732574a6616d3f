"""Published models in one call: loaded into shards, and saved from them.

Importing this does not import transformers: everything that lists our names imports it.
"""

from __future__ import annotations

import enum
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwise._torch import fsdp
from shardwise.base.arguments import check_arguments
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.entries import TensorInfo, torch_dtype
from shardwise.checkpoint.disk.place import folder_of, place_of
from shardwise.checkpoint.formats.source import DEFAULT_BUFFER
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.contents import Contents, Conversion, info_of
from shardwise.checkpoint.ranks.hf import (
    SavedModel,
    named_tensors,
    write_configs,
    write_model,
)
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.frontends.fsdp2 import fully_shard
from shardwise.pretrained.precision import keeping_float32
from shardwise.wrap import AUTO, Policy, apply_wrap

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    from shardwise.pretrained.building import Name
    from shardwise.pretrained.hf import Reversal


@overload
def from_pretrained(name: Name, *, peft_config: None = None, **options: Any) -> PreTrainedModel: ...
@overload
def from_pretrained(name: Name, *, peft_config: PeftConfig, **options: Any) -> PeftModel: ...
def from_pretrained(
    name: Name,
    *,
    mesh: DeviceMesh | None = None,
    policy: Policy = AUTO,
    param_dtype: torch.dtype | None = None,
    dtype: torch.dtype | str | None = None,
    model_class: Any = None,
    peft_config: PeftConfig | None = None,
    reshard_after_forward: bool | int | None = None,
    offload_policy: OffloadPolicy | None = None,
    shard: Callable[..., object] = fully_shard,
    **config: Any,
) -> PreTrainedModel | PeftModel:
    """Load a ``transformers`` model straight into shards. Every rank calls this.

    The model is built on the meta device and sharded. Then every rank reads its rows from the
    files, so no rank ever holds the full model, and each byte of a file is read once per host.
    Weights that the files lack are initialized as the model would; rank 0 logs which.

        model = shardwise.from_pretrained("Qwen/Qwen3-0.6B", param_dtype=torch.bfloat16)

    Args:
        name: a folder of ``save_pretrained``, a run or a checkpoint of Shardwise, its URL in an
            object store, or the name of a repository on the Hugging Face Hub.
        mesh: the ranks to shard over; see :func:`shardwise.fully_shard`.
        policy: which modules become groups; see :func:`shardwise.wrap.apply_wrap`. By default the
            repeated blocks of the model.
        param_dtype: dtype to compute in; gradients are reduced in float32. The default is the dtype
            of the shards. What ``transformers`` keeps in float32 (routers, say) computes in it.
        dtype: dtype of the shards, or its name. The default is that of the configuration, or else
            of the weights.
        model_class: a model class or an ``AutoModel...`` class of ``transformers``. The default is
            the first of the configuration's ``architectures``.
        peft_config: adapters to put on the model, a ``LoraConfig``: they are float32 and trained,
            and the rest is frozen. What is returned is then a ``PeftModel``, in training mode.
        reshard_after_forward: for every group but the root; see :func:`shardwise.fully_shard`.
        offload_policy: where shards are stored; see :func:`shardwise.fully_shard`.
        shard: what shards each group: :func:`shardwise.fully_shard`, or torch's own
            ``torch.distributed.fsdp.fully_shard``.
        config: overrides of the configuration, such as ``attn_implementation="eager"``.

    Returns:
        The model, sharded, in evaluation mode as from ``from_pretrained`` of ``transformers``.

    Raises:
        CheckpointError: there is no such model, ``transformers`` cannot build it, it is damaged, or
            it does not fit its configuration; raised on all ranks alike.
        ValueError: an argument of :func:`shardwise.fully_shard` is out of range, or a URL is of no
            store or has credentials.
    """
    check_arguments(from_pretrained, locals())
    place_of(name)  # before messages name it: a URL with credentials is refused
    from shardwise.pretrained import hf
    from shardwise.pretrained.building import build
    from shardwise.pretrained.filling import fill

    options: dict[str, Any] = {"mesh": mesh}
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    group = _ranks_of(mesh)
    # A folder that one rank cannot read ends all of them.
    model = Ranks(group_for(group)).all(
        f"loading {name}", lambda: build(name, model_class=model_class, dtype=dtype, **config)
    )

    def shard_block(block: torch.nn.Module, **arguments: Any) -> torch.nn.Module:
        own = {"reshard_after_forward": reshard_after_forward, **options, **arguments}
        shard(block, **own)
        return block

    if peft_config is None:
        options["mp_policy"] = _precision(model, param_dtype, shard)
        apply_wrap(model, policy, shard_block)
        shard(model, **options)
        fill(model, name, group=group)
        shards = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
        replicas = 1 if mesh is None else mesh.size() // shards
        hf.tell_sharded(model, shards, replicas)
        return model
    from shardwise.pretrained.lora import add_adapters, initialize_adapters, plain_names

    adapted = add_adapters(model.train(), peft_config)
    options["mp_policy"] = _precision(adapted, param_dtype, shard)
    apply_wrap(model, policy, shard_block)
    shard(adapted, **options)
    initialize_adapters(adapted, group)
    fill(adapted, name, names=plain_names(adapted), group=group)
    return adapted


def _precision(
    model: nn.Module, param_dtype: torch.dtype | None, shard: Callable[..., object]
) -> MixedPrecisionPolicy:
    """The policy with which a model computes in ``param_dtype``, but for what stays in float32."""
    reduce_dtype = None if param_dtype is None else torch.float32
    plain = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    policy = keeping_float32(model, plain)
    if policy is not plain and shard is not fully_shard and not fsdp.REDUCES_AS_STORED:
        _log.warning(
            "transformers keeps parameters of %s in float32, which torch's own fully_shard casts "
            "to %s before torch 2.15; use shardwise.fully_shard, or a newer torch",
            *(type(model).__name__, param_dtype),
        )
    return policy


def _ranks_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks that load together: all of a mesh, or those that hold its shards once."""
    if mesh is None or mesh.size() == dist.get_world_size():
        return None
    return mesh.get_group(mesh.ndim - 1)


# -- saving ----------------------------------------------------------------------------------------


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    max_shard_size: int | None = None,
    buffer: int = DEFAULT_BUFFER,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a sharded model as ``save_pretrained`` of ``transformers`` saves the unsharded one.

    Every rank calls this. The folder gets the weights under the names of published checkpoints,
    ``config.json``, ``generation_config.json`` if the model can generate, and the tokenizer. So
    ``AutoModel...`` and ``AutoTokenizer`` load it without Shardwise. It is complete, or does not
    exist.

    Each rank writes its shards to their places in the files. Only weights whose form differs in
    files, such as the experts of a layer, are gathered, one group at a time.

        shardwise.save_pretrained(model, "fine-tuned", tokenizer=tokenizer)

    Of a model with adapters, the adapters are saved in the format of peft; ``shardwise merge-lora``
    makes full weights of them.

    Args:
        model: a model of ``transformers``, or a ``PeftModel`` around one; sharded or not.
        folder: the folder to make, on a file system that all ranks share; or, but for adapters,
            its URL in an object store, where each file is sent by one rank.
        tokenizer: what is saved beside the model with its own ``save_pretrained``: a tokenizer, a
            processor, an image processor; ``None`` for nothing.
        max_shard_size: largest size of a file in bytes; a larger tensor gets a file of its own.
            ``None`` for 50 GB, and in an object store for 2 GB.
        buffer: bytes that writing to a folder may hold beside the model and what is gathered.
        group: the ranks that save together; the default process group if ``None``.

    Raises:
        CheckpointError: it could not be written, or the path exists; raised on all ranks alike.
        TypeError: ``model`` is not a model of ``transformers``.
    """
    given = locals()

    def own() -> SavedModel:
        check_arguments(save_pretrained, given)
        saved = saved_pretrained(model)
        if saved is None:
            raise TypeError(
                f"model: found a {type(model).__name__}, expected a model of transformers; pass "
                "the inner model of a wrapper, or use shardwise.checkpoint.save_hf for any other"
            )
        if saved.needs_single:  # peft knows no index, and asks for one name
            folder_of("folder", folder)
        place_of(folder)
        return saved

    wait_for_save()
    saved = Ranks(group_for(group)).begin("save_pretrained", own)

    def write_others(partial: Path) -> None:
        saved.write_others(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(os.fspath(partial))

    write_model(
        place_of(folder),
        replace(saved, write_others=write_others),
        max_shard_size=max_shard_size,
        buffer=buffer,
        group=group,
    )


class AdapterForm(enum.Enum):
    """How a model with adapters is written."""

    ALONE = "alone"  # as peft saves them
    MERGED = "merged"  # into the weights of the base


def saved_pretrained(
    model: nn.Module, adapters: AdapterForm = AdapterForm.ALONE
) -> SavedModel | None:
    """How a model of ``transformers``, or of peft, is saved; ``None`` for any other module.

    Args:
        model: the model, sharded or not.
        adapters: what is written of a ``PeftModel``.

    Raises:
        CheckpointError: the adapters cannot be merged.
        TypeError: the model has adapters in it, without a ``PeftModel`` around it.
    """
    if "peft" in sys.modules:  # what is not imported has made no adapters
        from peft import PeftModel

        from shardwise.pretrained import hf
        from shardwise.pretrained.lora import (
            MergedAdapters,
            has_adapters,
            saved_adapters,
        )

        if isinstance(model, PeftModel) and adapters is AdapterForm.MERGED:
            base = hf.inner_model(model)
            return SavedModel(
                _SavedWeights(base, MergedAdapters(model)),
                lambda folder: write_configs(folder, base),
            )
        if isinstance(model, PeftModel):
            return saved_adapters(model)
        if has_adapters(model):
            raise TypeError(
                f"model: found a {type(model).__name__} with adapters in it, expected the "
                "PeftModel around it, whose adapters are saved"
            )
    if "transformers" in sys.modules:
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel):
            return SavedModel(_SavedWeights(model), lambda folder: write_configs(folder, model))
    return None


#: Tensors by their names in the model, and those that are first computed of others.
Unconverted = tuple[Mapping[str, torch.Tensor], Sequence[Conversion]]


@dataclass(frozen=True)
class _SavePlan:
    """How weights become those of a file.

    Attributes:
        infos: dtype and shape of the weights that this is for, by name in the model.
        renamed: for each weight that is only renamed, by name in the model: its name in the file.
        converted: names of weights that are converted together, and what they become.
    """

    infos: Mapping[str, TensorInfo]
    renamed: Mapping[str, str]
    converted: Sequence[tuple[Sequence[str], Mapping[str, TensorInfo]]]


class _SavedWeights:
    """The weights of a model of ``transformers`` under the names of published checkpoints.

    Args:
        model: the model, sharded or not.
        read: returns its tensors; those of its state dict by default.
    """

    def __init__(
        self, model: PreTrainedModel, read: Callable[[], Unconverted] | None = None
    ) -> None:
        self._model = model
        self._read = self._own_tensors if read is None else read
        self._reversal: Reversal | None = None
        self._plan = _SavePlan({}, {}, [])

    def __call__(self) -> Contents:
        """Find what to write: weights by their names in the files, and those to convert.

        Raises:
            CheckpointError: the conversion of some weights depends on that of others.
        """
        from shardwise.pretrained import hf

        tensors, computed = self._read()
        if self._reversal is None:
            self._reversal = hf.Reversal(self._model)
        infos = {name: info_of(tensor) for name, tensor in tensors.items()}
        for each in computed:
            infos.update(each.results)
        if infos != self._plan.infos:
            self._plan = _planned(infos, self._reversal)
        names, convert = self._plan.renamed, self._reversal.revert
        done = {name for each in computed for name in each.results}
        return Contents(
            {names[name]: tensor for name, tensor in tensors.items() if name in names},
            [
                *(self._converted_again(each, tensors) for each in computed),
                *(
                    Conversion({name: tensors[name] for name in group}, results, convert)
                    for group, results in self._plan.converted
                    if done.isdisjoint(group)
                ),
            ],
        )

    def _converted_again(
        self, first: Conversion, tensors: Mapping[str, torch.Tensor]
    ) -> Conversion:
        """What is computed of other tensors, in the form and under the names of files.

        Raises:
            CheckpointError: that takes what another conversion makes.
        """
        assert self._reversal is not None
        names, convert = self._plan.renamed, self._reversal.revert
        later = [
            each for each in self._plan.converted if not first.results.keys().isdisjoint(each[0])
        ]
        beside = [name for group, _ in later for name in group if name not in first.results]
        if not later:
            return first.renamed(names)
        if unknown := [name for name in beside if name not in tensors]:
            raise CheckpointError(
                f"{', '.join(first.results)}: found adapters on weights that transformers saves "
                f"together with {', '.join(unknown)}, which have adapters of their own, expected "
                "others; publish the adapters alone"
            )

        def convert_all(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            made = {**first.convert(full), **{name: full[name] for name in beside}}
            found = {names[name]: made[name] for name in first.results if name in names}
            for group, _ in later:
                found |= convert({name: made[name] for name in group})
            return found

        results = {names[name]: info for name, info in first.results.items() if name in names}
        for _, infos in later:
            results |= infos
        sources = {**first.sources, **{name: tensors[name] for name in beside}}
        return Conversion(sources, results, convert_all)

    def _own_tensors(self) -> Unconverted:
        from shardwise.pretrained import hf

        tensors = named_tensors(self._model, secondary=hf.tied_names(self._model))
        for name in hf.not_saved(self._model):
            tensors.pop(name, None)
        return tensors, []


def _planned(infos: Mapping[str, TensorInfo], reversal: Reversal) -> _SavePlan:
    empty = {
        name: torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")
        for name, info in infos.items()
    }
    planned = reversal.revert(empty)
    converted = []
    for names in reversal.groups(infos.keys()):
        made = reversal.revert({name: empty[name] for name in names})
        results = {name: info_of(each) for name, each in made.items()}
        if any(name not in planned or info_of(planned[name]) != results[name] for name in results):
            raise CheckpointError(
                f"{', '.join(names)}: transformers converts them to {', '.join(results)} when they "
                "are saved alone, and to something else with all weights; expected the same. Use "
                "shardwise.checkpoint.save_hf, which saves weights under the names of the model"
            )
        converted.append((names, results))
    # A weight that is only renamed is the same object before and after.
    name_of = {id(each): name for name, each in empty.items()}
    made_of_others = {name for _, results in converted for name in results}
    renamed = {
        name_of[id(each)]: target
        for target, each in planned.items()
        if target not in made_of_others
    }
    return _SavePlan(infos, renamed, converted)

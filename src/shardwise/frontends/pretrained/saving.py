"""``save_pretrained`` of a sharded ``transformers`` model: each rank writes its shards."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.entries import TensorInfo
from shardwise.checkpoint.formats.hf import DEFAULT_SHARD
from shardwise.checkpoint.formats.source import DEFAULT_BUFFER
from shardwise.checkpoint.ranks.hf import (
    Conversion,
    info_of,
    named_tensors,
    write_configs,
    write_model,
)

if TYPE_CHECKING:
    from shardwise.frontends.pretrained.hf import Reversal


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    max_shard_size: int = DEFAULT_SHARD,
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
        folder: the folder to make, on a file system that all ranks share.
        tokenizer: what is saved beside the model with its own ``save_pretrained``: a tokenizer, a
            processor, an image processor; ``None`` for nothing.
        max_shard_size: largest size of a file in bytes; a larger tensor gets a file of its own.
        buffer: bytes that writing may hold beside the model and what is gathered.
        group: the ranks that save together; the default process group if ``None``.

    Raises:
        CheckpointError: it could not be written, or the path exists; raised on all ranks alike.
        TypeError: ``model`` is not a model of ``transformers``.
    """
    # Importing this name does not import transformers: everything that lists our names imports it.
    from transformers import PreTrainedModel

    from shardwise.frontends.pretrained import hf

    if "peft" in sys.modules:  # what is not imported has made no adapters
        from peft import PeftModel

        from shardwise.frontends.pretrained.lora import has_adapters, save_adapters

        if isinstance(model, PeftModel):
            save_adapters(model, folder, tokenizer=tokenizer, buffer=buffer, group=group)
            return
        if has_adapters(model):
            raise TypeError(
                f"model: found a {type(model).__name__} with adapters in it, expected the "
                "PeftModel around it, whose adapters are saved"
            )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: found a {type(model).__name__}, expected a model of transformers; pass the "
            "inner model of a wrapper, or use shardwise.checkpoint.save_hf for any other module"
        )

    def contents() -> tuple[Mapping[str, torch.Tensor], Sequence[Conversion]]:
        tensors = named_tensors(model, secondary=hf.tied_names(model))
        for name in hf.not_saved(model):
            tensors.pop(name, None)
        return _reverted(tensors, hf.Reversal(model))

    def write_others(partial: Path) -> None:
        write_configs(partial, model)
        if tokenizer is not None:
            tokenizer.save_pretrained(os.fspath(partial))

    write_model(
        Path(folder),
        contents,
        write_others,
        max_shard_size=max_shard_size,
        buffer=buffer,
        group=group,
    )


@dataclass(frozen=True)
class _Reverted:
    """Weights that files have in another form, as :class:`.Conversion` asks for.

    Attributes:
        sources: the weights of the model by name.
        results: those of the file.
        reversal: makes one of the other.
    """

    sources: Mapping[str, torch.Tensor]
    results: Mapping[str, TensorInfo]
    reversal: Reversal

    def convert(self, full: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the weights of the file, made of the full weights of the model."""
        return self.reversal.revert(full)


def _reverted(
    tensors: Mapping[str, torch.Tensor], reversal: Reversal
) -> tuple[dict[str, torch.Tensor], list[_Reverted]]:
    """Plan what is written: weights by their names in the files, and those to convert.

    Raises:
        CheckpointError: the conversion of some weights depends on that of others.
    """
    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    planned = reversal.revert(empty)
    grouped = reversal.groups(tensors.keys())
    converted = []
    for names in grouped:
        made = reversal.revert({name: empty[name] for name in names})
        results = {name: info_of(each) for name, each in made.items()}
        if any(name not in planned or info_of(planned[name]) != results[name] for name in results):
            raise CheckpointError(
                f"{', '.join(names)}: transformers converts them to {', '.join(results)} when they "
                "are saved alone, and to something else with all weights; expected the same. Use "
                "shardwise.checkpoint.save_hf, which saves weights under the names of the model"
            )
        sources = {name: tensors[name] for name in names}
        converted.append(_Reverted(sources, results, reversal))
    # A weight that is only renamed is the same object before and after.
    name_of = {id(each): name for name, each in empty.items()}
    made_of_others = {name for each in converted for name in each.results}
    renamed = {
        target: tensors[name_of[id(each)]]
        for target, each in planned.items()
        if target not in made_of_others
    }
    return renamed, converted

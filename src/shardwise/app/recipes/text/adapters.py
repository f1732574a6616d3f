"""The adapters of a training with ``--lora``: put on its model, initialized, written at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType
from transformers import PreTrainedModel

from shardwise import FSDPModule, pretrained
from shardwise.app.recipes.core.checkpointing import on_rank_zero
from shardwise.app.recipes.core.recipe import TrainContext
from shardwise.app.recipes.text.config import LmConfig
from shardwise.app.recipes.text.published import (
    BaseFormat,
    Frozen,
    allowed,
    frozen_bytes,
    parse_lora,
)
from shardwise.base import devices
from shardwise.base.units import binary_size, one_line
from shardwise.checkpoint.disk.commit import delete
from shardwise.insight.schema.option import OptionError
from shardwise.pretrained.four_bits import store_in_four_bits
from shardwise.pretrained.lora import (
    add_adapters,
    initialize_adapters,
    plain_names,
)
from shardwise.pretrained.merging import merge_lora
from shardwise.transport.peers import Peers


class Adapters:
    """The adapters of one training.

    Args:
        model: the base, on the meta device. Its layers are replaced by those of peft, so it
            computes with the adapters from here on.
        config: the training, with ``--lora``.

    Raises:
        OptionError: peft cannot put them on this model.
    """

    def __init__(self, model: PreTrainedModel, config: LmConfig) -> None:
        assert config.lora is not None
        assert config.pretrained is not None
        self._config = config
        self._base = config.pretrained
        self._settings = parse_lora(config.lora)
        modules, parameters = _targets(model, self._settings.targets)
        lora = LoraConfig(
            r=self._settings.r,
            lora_alpha=self._settings.alpha,  # type: ignore[arg-type]  # peft takes any number
            lora_dropout=self._settings.dropout,
            target_modules=modules,
            target_parameters=parameters,
            fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
            task_type=TaskType.CAUSAL_LM,
        )
        try:
            self._model: PeftModel = add_adapters(model, lora)
        except (ValueError, TypeError, KeyError) as error:
            reason = one_line(error)
            expected = "layers that the model has and that peft can put adapters on"
            raise OptionError("--lora", f"{config.lora} ({reason})", expected) from error
        if config.base is BaseFormat.NF4:
            store_in_four_bits(self._model)

    def decide(self, sharded: FSDPModule, place: TrainContext) -> tuple[Frozen, str]:
        """Keep frozen parameters between forward and backward, if asked or if memory allows.

        Returns:
            What was decided, and a line that says so.
        """
        needed = frozen_bytes(self._model, self._config.train.sharding.compute_dtype)
        free = devices.free_memory(place.device)
        if place.device.type == "cpu":
            free //= place.world.local_size
        asked = self._config.frozen
        if not place.plan.reshard_after_forward:
            return Frozen.KEEP, f"{binary_size(needed)} stay in memory, by --strategy"
        if asked is None:
            least = min(Peers().gather_objects(free, "the comparison of free memory"))
            asked = allowed(needed, least)
            why = f", as {binary_size(least)} are free" if least else ""
        else:
            why = ", as --frozen says"
        if asked is Frozen.KEEP:
            sharded.set_reshard_after_forward(False)
            return asked, f"gathered once per step and kept, {binary_size(needed)} per rank{why}"
        return asked, f"gathered for forward and again for backward{why}"

    def fill(self, seed: int) -> pretrained.LoadReport:
        """Initialize the adapters as peft does with this seed, and load the base."""
        torch.manual_seed(seed)
        initialize_adapters(self._model)
        return pretrained.fill(self._model, self._base, names=plain_names(self._model))

    def __str__(self) -> str:
        parameters = list(self._model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        return f"{self._settings}; {trained:,} parameters are trained"

    def write(self, place: TrainContext, tokenizer: Any) -> None:
        """Write the adapters in the format of peft and, with ``--merge``, whole weights.

        Args:
            place: where this rank trains.
            tokenizer: of ``transformers``, written beside the adapters.
        """
        files, say = self._config.files, place.display.say
        on_rank_zero(f"replacing {files.adapters}", lambda: delete(files.adapters))
        pretrained.save_pretrained(self._model, files.adapters, tokenizer=tokenizer)
        say(f"adapters   {files.adapters}")
        if self._config.merge:
            on_rank_zero(
                f"merging into {files.merged}", lambda: self._merge(files.adapters, files.merged)
            )
            say(f"merged     {files.merged}")

    def _merge(self, adapters: Path, merged: Path) -> None:
        delete(merged)
        merge_lora(adapters, merged, self._base)


def _targets(
    model: PreTrainedModel, targets: str | tuple[str, ...]
) -> tuple[str | list[str], list[str] | None]:
    """Tell names of layers from names of single parameters, such as the fused experts of a layer.

    Returns:
        What peft calls target modules, and target parameters.
    """
    if isinstance(targets, str):
        return targets, None
    layers = [f".{name}" for name, _ in model.named_modules()]
    single = [f".{name}" for name, _ in model.named_parameters()]

    def names_one(target: str) -> bool:
        end = f".{target}"
        return any(name.endswith(end) for name in single) and not any(
            name.endswith(end) for name in layers
        )

    parameters = [target for target in targets if names_one(target)]
    return [target for target in targets if target not in parameters], parameters or None

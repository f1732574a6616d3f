"""Models that a plan may be made for, by name: what ``shardwise inspect --model`` takes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardwise.frontends.strategies import WantedMesh
from shardwise.recipes.core.config import find_settings, require
from shardwise.recipes.text.config import PRESETS
from shardwise.recipes.vision.presets import VIT_PRESETS

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PreTrainedModel

    from shardwise.inspect.planning import Planned
    from shardwise.inspect.report import Report


#: Every preset of every recipe, as the ``config.json`` that it stands for.
PLANNED: dict[str, dict[str, Any]] = {
    name: preset.settings()
    for presets in (PRESETS, VIT_PRESETS)
    for name, preset in presets.items()
}


def settings_of(model: str) -> dict[str, Any]:
    """The settings of a preset or of a ``config.json``; see :func:`find_settings`."""
    return find_settings(model, PLANNED)


def make_plan(settings: dict[str, Any], model: str, wanted: WantedMesh, text: str) -> Report:
    """The report of a plan.

    Args:
        settings: of the model; those of type ``vit`` tell classes of pictures apart, all others
            are causal language models.
        model: its name or path.
        wanted: the mesh.
        text: the mesh as it was written.

    Raises:
        OptionError: the model cannot be built, or the mesh does not suit it.
    """
    from shardwise.inspect.planning import plan

    is_vit = settings["model_type"] == "vit"
    planned = _vision_transformer(settings) if is_vit else _language_model(model, settings)
    size = wanted.tensor_parallel
    for what, count in planned.heads.items():
        require(count % size == 0, "--mesh", text, f"a tp that divides the {count} {what}")
    require(
        size == 1 or bool(planned.tensor_parallel),
        "--mesh",
        f"{text} for {model}, which has no tensor parallel plan",
        "data parallel dimensions only",
    )
    return plan(planned, wanted, model)


def _vision_transformer(settings: dict[str, Any]) -> Planned:
    from shardwise.inspect.planning import Planned
    from shardwise.recipes.vision.config import FAKE_CLASSES
    from shardwise.recipes.vit import build, placement, units_of

    made = build(settings, FAKE_CLASSES)
    return Planned(model=made, blocks=units_of(made, nested=True), placement=placement)


def _language_model(model: str, settings: dict[str, Any]) -> Planned:
    from shardwise.inspect.planning import Planned
    from shardwise.recipes.core.model import build, decoder_layers
    from shardwise.recipes.text.data import SEPARATOR, VOCAB_SIZE

    # A preset is what `train lm` makes of it; a config file describes a model of its own.
    ours = model in PRESETS
    made = build(settings, VOCAB_SIZE if ours else None, SEPARATOR if ours else None)
    return Planned(
        model=made,
        blocks=list(decoder_layers(made)),
        tensor_parallel=dict(_styles(made)),
        heads=dict(_heads(made.config)),
    )


def _styles(model: PreTrainedModel) -> Iterator[tuple[str, ParallelStyle]]:
    """Torch's style for every module of the plan that transformers has for the model.

    The embedding and the head are cut by rows of the vocabulary, whether or not the plan has them.
    Styles that torch has no counterpart for (fused projections, experts) are left out: what they
    are for stays whole.
    """
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan: Mapping[str, str] = model.tp_plan or {}
    if not plan:
        return
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    ends = {model.get_input_embeddings(): "rowwise", head: "colwise"}
    for name, module in model.named_modules():
        style = ends.get(module) or next(
            (style for pattern, style in plan.items() if _matches(name, pattern)), ""
        )
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if style.removeprefix("embedding_").startswith("colwise"):
            yield name, ColwiseParallel()
        elif style.removeprefix("embedding_").startswith("rowwise"):
            yield name, RowwiseParallel()


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _heads(config: Any) -> Iterator[tuple[str, int]]:
    for field, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key and value heads"),
    ):
        count = getattr(config, field, None)
        if isinstance(count, int):
            yield what, count

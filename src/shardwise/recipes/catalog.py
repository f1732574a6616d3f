"""What the command line can name: the recipes of ``train``, and the models of ``inspect``.

No torch here: what builds a model or a task is imported when it is needed.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.frontends.strategies import REPLICATE, MeshError, Strategy, WantedMesh
from shardwise.launch.errors import UserError
from shardwise.recipes.core.config import find_settings, flatten, require
from shardwise.recipes.core.recipe import Recipe
from shardwise.recipes.core.rundir import RunDir
from shardwise.recipes.text.config import PRESETS, LmConfig
from shardwise.recipes.vision.config import (
    FAKE_CLASSES,
    VIT_PRESETS,
    ImagenetConfig,
    MnistConfig,
    VitConfig,
)

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PreTrainedModel

    from shardwise.inspect.api import Blueprint
    from shardwise.inspect.report import Report


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="lm",
            config=LmConfig.for_model("llama-tiny"),
            config_for=LmConfig.for_model,
            module="shardwise.recipes.lm",
        ),
        Recipe(name="mnist", config=MnistConfig(), module="shardwise.recipes.mnist"),
        Recipe(name="imagenet", config=ImagenetConfig(), module="shardwise.recipes.imagenet"),
        Recipe(
            name="vit",
            config=VitConfig.for_model("vit-tiny"),
            config_for=VitConfig.for_model,
            module="shardwise.recipes.vit",
        ),
    )
}


#: The presets of language models and Vision Transformers, as settings of a ``config.json``.
PLANNED: dict[str, dict[str, Any]] = {
    name: preset.settings()
    for presets in (PRESETS, VIT_PRESETS)
    for name, preset in presets.items()
}


@dataclass(frozen=True)
class Subject:
    """A model to plan for.

    Attributes:
        build: builds the model on the meta device. Imports torch and transformers.
        mesh: the mesh that it was trained on; ``None`` if it was not.
    """

    build: Callable[[], Blueprint]
    mesh: WantedMesh | None = None

    @classmethod
    def of_model(cls, model: str) -> Subject:
        """A preset, or the model of a ``config.json``.

        Raises:
            OptionError: there is neither.
        """
        settings = find_settings(model, PLANNED)
        if model in PRESETS:  # as `train lm` builds it
            return cls(partial(_language_preset, model, settings))
        return cls(partial(_build, model, settings))

    @classmethod
    def of_run(cls, files: RunDir) -> Subject:
        """The model of a run of ``shardwise train``, and the mesh of its last session.

        Raises:
            UserError: the folder contains no run, or the run did not record its model or mesh.
        """
        if not files.run_json.is_file():
            raise UserError(f"RUN: found no run in {files.root}, expected a folder with run.json")
        record = files.read("RUN")
        name = f"{record.get('model', {}).get('name', 'model')} of {files.root}"
        if record.get("recipe") == "mnist":
            build: Callable[[], Blueprint] = partial(_convnet, name)
        elif files.model_config.is_file():
            build = partial(_build, name, find_settings(str(files.model_config), {}, "RUN"))
        else:
            raise UserError(f"RUN: found no {files.model_config}, expected the model's settings")
        settings = flatten(record.get("config", {}))
        if not settings.get("nested", True):
            build = partial(_as_one_group, build)
        return cls(build, _mesh_of(files, record, settings))


def _mesh_of(files: RunDir, record: Mapping[str, Any], settings: Mapping[str, Any]) -> WantedMesh:
    """The mesh of the last session; with DiLoCo, of one replica: replicas differ in values."""
    sessions = record.get("sessions", [])
    sizes = sessions[-1].get("mesh") if sessions else None
    if not isinstance(sizes, Mapping) or not sizes:
        raise UserError(f"RUN: found no mesh in {files.run_json}, expected that of a session")
    if settings.get("strategy") == Strategy.DILOCO.value:
        sizes = {name: size for name, size in sizes.items() if name != REPLICATE}
    try:
        return WantedMesh.parse(",".join(f"{name}={size}" for name, size in sizes.items()))
    except MeshError as error:
        raise UserError(f"RUN: {files.run_json}, 'mesh': {error}") from None


def make_plan(subject: Subject, wanted: WantedMesh) -> Report:
    """Report which rank of a mesh would hold what of a model.

    Args:
        subject: the model.
        wanted: the mesh.

    Raises:
        OptionError: the model cannot be built, or the mesh does not fit it.
    """
    from shardwise.inspect.api import plan

    blueprint = subject.build()
    size = wanted.tensor_parallel
    for what, count in blueprint.heads.items():
        require(count % size == 0, "--mesh", str(wanted), f"a tp that divides the {count} {what}")
    require(
        size == 1 or bool(blueprint.tensor_parallel),
        "--mesh",
        f"{wanted} for {blueprint.name}, which has no tensor parallel plan",
        "data parallel dimensions only",
    )
    return plan(blueprint, wanted)


def _build(name: str, settings: dict[str, Any]) -> Blueprint:
    match settings["model_type"]:
        case "vit":
            return _vision_transformer(name, settings)
        case "resnet":
            return _residual_net(name, settings)
    return _language_model(name, settings)


def _vision_transformer(name: str, settings: dict[str, Any]) -> Blueprint:
    from shardwise.inspect.api import Blueprint
    from shardwise.recipes.core.model import build_classifier, decoder_layers
    from shardwise.recipes.vit import placement

    model = build_classifier(settings, _classes(settings))
    return Blueprint(name, model, decoder_layers(model), placement=placement)


def _residual_net(name: str, settings: dict[str, Any]) -> Blueprint:
    from shardwise.inspect.api import Blueprint
    from shardwise.recipes.core.model import build_classifier
    from shardwise.wrap import repeated_blocks

    model = build_classifier(settings, _classes(settings))
    return Blueprint(name, model, repeated_blocks(model))


def _classes(settings: dict[str, Any]) -> int:
    return len(settings.get("id2label", ())) or FAKE_CLASSES


def _convnet(name: str) -> Blueprint:
    from shardwise.recipes.mnist import blueprint

    return dataclasses.replace(blueprint(MnistConfig(nested=True)), name=name)


def _as_one_group(build: Callable[[], Blueprint]) -> Blueprint:
    return dataclasses.replace(build(), blocks=())


def _language_preset(name: str, settings: dict[str, Any]) -> Blueprint:
    """A causal language model with the vocabulary of ``train lm``'s default tokenizer."""
    from shardwise.recipes.text.data import SEPARATOR, VOCAB_SIZE

    return _language_model(name, settings, VOCAB_SIZE, SEPARATOR)


def _language_model(
    name: str,
    settings: dict[str, Any],
    vocab_size: int | None = None,
    separator: int | None = None,
) -> Blueprint:
    from shardwise.inspect.api import Blueprint
    from shardwise.recipes.core.model import build, decoder_layers

    model = build(settings, vocab_size, separator)
    return Blueprint(
        name,
        model,
        decoder_layers(model),
        tensor_parallel=dict(_styles(model)),
        heads=dict(_heads(model.config)),
    )


def _styles(model: PreTrainedModel) -> Iterator[tuple[str, ParallelStyle]]:
    """Torch's parallel style for each module of the plan that transformers has for the model.

    The embedding and the head are sharded along the vocabulary, whether or not the plan has them.
    Styles without a counterpart in torch (fused projections, experts) are left out, and their
    modules are replicated.
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

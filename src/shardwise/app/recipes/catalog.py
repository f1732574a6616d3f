"""What the command line can name: the recipes of ``train``, and the models of ``inspect``.

No torch here: what builds a model or a task is imported when it is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.app.recipes.core.begin import find_settings
from shardwise.app.recipes.core.recipe import RecipeConfig
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.app.recipes.text.config import DEFAULT_MODEL, LmConfig
from shardwise.app.recipes.vision.config import ImagenetConfig, MnistConfig, VitConfig
from shardwise.elastic.errors import UserError
from shardwise.frontends.strategies import REPLICATE, MeshError, Strategy, WantedMesh
from shardwise.insight.planning.presets import MODELS
from shardwise.insight.schema.option import flatten, naming, require

if TYPE_CHECKING:
    from shardwise.insight.blueprint import Blueprint
    from shardwise.insight.inspect.report import Report


#: Each kind of training by its name, with all its defaults.
RECIPES: dict[str, RecipeConfig] = {
    config.recipe: config
    for config in (
        LmConfig.for_model(DEFAULT_MODEL),
        MnistConfig(),
        ImagenetConfig(),
        VitConfig.for_model("vit-tiny"),
    )
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
        """A preset, the model of a ``config.json``, or a function ``package.module:name``.

        Raises:
            OptionError: there is neither.
        """
        if ":" not in model:  # else a function, which is called later
            find_settings(model, MODELS)
        return cls(partial(_find, model))

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
    from shardwise.insight.inspect.api import plan

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


def _find(name: str) -> Blueprint:
    from shardwise.insight.planning.models import find_model

    with naming("--model"):
        return find_model(name)


def _build(name: str, settings: dict[str, Any]) -> Blueprint:
    from shardwise.insight.planning.models import of_settings

    with naming("--model"):
        return of_settings(name, settings)


def _convnet(name: str) -> Blueprint:
    from shardwise.app.recipes.mnist import blueprint

    return dataclasses.replace(blueprint(MnistConfig(nested=True)), name=name)


def _as_one_group(build: Callable[[], Blueprint]) -> Blueprint:
    return dataclasses.replace(build(), blocks=())

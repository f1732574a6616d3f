"""Models that a plan may be made for, by name: what ``shardwise inspect --model`` takes."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.inspect.wanted import WantedMesh
from shardwise.recipes.config import require
from shardwise.recipes.presets import PRESETS, model_settings

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PreTrainedModel

    from shardwise.inspect.planning import Planned
    from shardwise.inspect.report import Report


@dataclass(frozen=True)
class Family:
    """Models of one recipe.

    Attributes:
        names: of its presets.
        check: is given a name or a path, and raises an ``OptionError`` if it is neither; without
            importing torch.
        build: makes the model on the meta device.
    """

    names: Sequence[str]
    check: Callable[[str], object]
    build: Callable[[str], Planned]


def family_of(model: str) -> Family:
    """The family that has a preset of this name; the first, which takes paths, if none has."""
    return next((family for family in FAMILIES if model in family.names), FAMILIES[0])


def make_plan(family: Family, model: str, wanted: WantedMesh, text: str) -> Report:
    """The report of a plan.

    Args:
        family: of the model.
        model: its name or path.
        wanted: the mesh.
        text: the mesh as it was written.

    Raises:
        OptionError: the model cannot be built, or the mesh does not suit it.
    """
    from shardwise.inspect.planning import plan

    planned = family.build(model)
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


def near_parameters(report: Report, pattern: str) -> str:
    """What to write instead of a pattern that matches nothing."""
    names = [name for each in report.parameters for name in (each.name, *each.aliases)]
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
    hint = f", such as {near[0]}" if near else ""
    return f"the name of one of its {len(report.parameters)} parameters{hint}, or a pattern with *"


def with_counted_values(report: Report) -> Report:
    """The report with elements that count 0, 1, 2, ... in every small parameter."""
    from shardwise.inspect.values import counted_values

    return dataclasses.replace(report, values=counted_values(report))


def _language_model(model: str) -> Planned:
    from shardwise.inspect.planning import Planned
    from shardwise.recipes.data import SEPARATOR, VOCAB_SIZE
    from shardwise.recipes.model import build, decoder_layers

    settings = model_settings(model)
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
    ends = {model.get_input_embeddings(): "rowwise", model.get_output_embeddings(): "colwise"}
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


FAMILIES = (Family(tuple(PRESETS), model_settings, _language_model),)

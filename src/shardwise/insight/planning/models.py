"""Models to plan for, built on the meta device: presets, files, functions, modules."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.presets import (
    BYTE_VOCABULARY,
    LLAMAS,
    SEPARATOR,
    ModelError,
    find_module,
    find_settings,
    is_code,
)
from shardwise.pretrained.opening import model_of
from shardwise.wrap import matches, repeated_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLASSES = 1000  # of an image classifier whose settings do not say


def find_model(name: str, device: torch.device | str = "meta") -> Blueprint:
    """Build a model by its name.

    Args:
        name: a preset, the path of a ``config.json``, or the name of a function in code that makes
            a module (or a :class:`Blueprint`); see :func:`load_object`.
        device: torch's default device while that function is called.

    Raises:
        ModelError: there is no such model, or it cannot be built.
    """
    if is_code(name):
        return of_module(_call(name, device), name)
    settings = find_settings(name)
    if name in LLAMAS and "vocab_size" not in settings:
        return of_module(build(settings, BYTE_VOCABULARY, SEPARATOR), name)
    return of_settings(name, settings)


def of_module(model: object, name: str | None = None) -> Blueprint:
    """Return how a module would be sharded: its repeated blocks, then the rest.

    Args:
        model: any module, on any device. A blueprint is returned as it is.
        name: what reports call it; the name of its class by default.

    Raises:
        ModelError: it is no module.
    """
    if isinstance(model, Blueprint):
        return model
    if not isinstance(model, nn.Module):
        found = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ModelError(found, "an nn.Module, a Blueprint or a name")
    name = name or type(model).__name__
    if any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        transformer: Any = model
        has_list = any(isinstance(module, nn.ModuleList) for module in model.modules())
        blocks = decoder_layers(transformer) if has_list else repeated_blocks(model)
        counts = {what: getattr(transformer.config, field, None) for field, what in _HEADS.items()}
        heads = {what: count for what, count in counts.items() if isinstance(count, int)}
        return Blueprint(name, model, blocks, tensor_parallel=_styles(transformer), heads=heads)
    return Blueprint(name, model, repeated_blocks(model))


def of_settings(name: str, settings: dict[str, Any]) -> Blueprint:
    """Build the model of a ``config.json``: a causal language model or an image classifier.

    Raises:
        ModelError: ``transformers`` cannot build it.
    """
    if settings["model_type"] not in ("vit", "resnet"):
        return of_module(build(settings), name)
    model = build_classifier(settings, len(settings.get("id2label", ())) or CLASSES)
    if settings["model_type"] == "vit":
        return Blueprint(name, model, decoder_layers(model), placement=vit_placement)
    return Blueprint(name, model, repeated_blocks(model))


def vit_placement(param: nn.Parameter) -> Shard | None:
    """Return the dimension that a parameter is sharded along: the first, unless it has one row.

    The class token and the position embeddings have shapes (1, 1, hidden) and (1, positions,
    hidden). Sharded along the first dimension, rank 0 would hold all of them, and with N ranks
    they would be gathered into a buffer of N times their size. So they are sharded along their
    longest dimension.
    """
    if param.ndim < 2 or param.shape[0] > 1:
        return None
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


def _call(name: str, device: torch.device | str) -> nn.Module | Blueprint:
    """Call the function that a name refers to."""
    found = load_object(name)
    try:
        with torch.device(device):
            made = found() if callable(found) and not isinstance(found, nn.Module) else found
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise ModelError(f"{name}, which raises {reason}", "a function that makes a module") from (
            error
        )
    if not isinstance(made, nn.Module | Blueprint):
        raise ModelError(f"{name}, which makes {type(made).__name__}", "an nn.Module")
    return made


def load_object(name: str) -> Callable[..., Any]:
    """Import what a name in code means.

    Args:
        name: ``package.module:function``, ``package.module.function`` or ``FILE.py:function``.

    Raises:
        ModelError: there is no such module or file, it cannot be imported, or it has no such name.
    """
    module, colon, attribute = name.partition(":")
    if not colon and not name.endswith(".py") and find_module(name) is None:
        module, _, attribute = name.rpartition(".")
    attribute = attribute.strip(":").removesuffix("()")
    try:
        imported = import_file(Path(module)) if module.endswith(".py") else import_module(module)
    except Exception as error:  # whatever the module does
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        expected = "package.module:function, importable from here, or FILE.py:function"
        raise ModelError(f"{name} ({reason})", expected) from error
    try:
        found: Callable[..., Any] = attrgetter(attribute)(imported)
    except AttributeError:
        own = [
            each
            for each, value in vars(imported).items()
            if callable(value) and getattr(value, "__module__", "") == imported.__name__
            if not each.startswith("_")
        ]
        names = " or ".join(f"{module}:{each}" for each in own[:5]) or f"a function in {module}"
        raise ModelError(name, names) from None
    return found


def import_file(file: Path) -> ModuleType:
    """Import a file as the module of its name, as what lies beside it would.

    Raises:
        ImportError: there is no such file, or another module has this name.
    """
    file = file.resolve()
    if not file.is_file():
        raise ImportError(f"there is no {file}")
    sys.path.insert(0, str(file.parent))
    try:
        found = import_module(file.stem)
    finally:
        sys.path.remove(str(file.parent))
    if Path(found.__file__ or "").resolve() != file:
        raise ImportError(f"{file.stem} is {found.__file__}; rename one of them")
    return found


# -- models of transformers ------------------------------------------------------------------------


def build(
    settings: dict[str, Any], vocab_size: int | None = None, separator: int | None = None
) -> PreTrainedModel:
    """Build a causal language model on the meta device.

    Args:
        settings: as in a ``config.json`` of ``transformers``.
        vocab_size: rows of the embedding, whatever the settings say; ``None``: as they say.
        separator: the token that stands between documents; ``None``: as they say.

    Raises:
        ModelError: ``transformers`` cannot make a causal language model of the settings.
    """
    from transformers import AutoModelForCausalLM

    own: dict[str, Any] = {"use_cache": False}
    if vocab_size is not None:
        own |= {"vocab_size": vocab_size}
    if separator is not None:
        own |= {"bos_token_id": separator, "eos_token_id": separator, "pad_token_id": None}
    with torch.device("meta"):
        return _from_settings(AutoModelForCausalLM, {**settings, **own}, "a causal language model")


def build_classifier(
    settings: dict[str, Any], classes: int, device: str = "meta"
) -> PreTrainedModel:
    """Build an image classifier.

    Args:
        settings: as in a ``config.json`` of ``transformers``.
        classes: number of classes, whatever the settings say.
        device: where its tensors are.

    Raises:
        ModelError: ``transformers`` cannot make an image classifier of the settings.
    """
    from transformers import AutoModelForImageClassification

    own = {"num_labels": classes}
    rest = {k: v for k, v in settings.items() if k not in ("id2label", "label2id")}
    with torch.device(device):
        return _from_settings(
            AutoModelForImageClassification, {**rest, **own}, "an image classifier"
        )


def _from_settings(family: Any, settings: dict[str, Any], kind: str) -> PreTrainedModel:
    try:
        model = model_of(family, settings)
    except Exception as error:  # each of its models checks in its own way
        # Their first sentence; a list of everything that would do follows.
        first = " ".join(str(error).split()).partition(". ")[0]
        reason = textwrap.shorten(first, 200, placeholder=" ...")
        found = f"settings that transformers cannot use ({reason})"
        raise ModelError(found, f"those of {kind}") from error
    model.config.architectures = [type(model).__name__]  # as it is called before it is sharded
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks: the longest list of modules in the model.

    Raises:
        ModelError: the model has no list of modules.
    """
    lists = [list(each) for each in model.modules() if isinstance(each, nn.ModuleList)]
    if not lists:
        raise ModelError(f"{type(model).__name__} without a list of layers", "one made of layers")
    return max(lists, key=len)


def _styles(model: Any) -> dict[str, ParallelStyle]:
    """Torch's parallel style for each module of the plan that transformers has for the model.

    The embedding and the head are sharded along the vocabulary, whether or not the plan has them,
    and logits stay sharded for the loss. If there are only attentions, feed-forward modules and
    norms between the two, what these hand on is sharded along the sequence. Styles without a
    counterpart in torch (experts) are left out, and their modules are replicated.
    """
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        return {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    named = dict(model.named_modules())
    asked = {
        name: next((style for pattern, style in plan.items() if matches(name, pattern)), "")
        for name, each in named.items()
        if each not in (embedding, head) and next(each.parameters(recurse=False), None) is not None
    }
    norms = {name for name in asked if type(named[name]).__name__.endswith("Norm")}
    linear = {name for name in asked if isinstance(named[name], nn.Linear)}
    made = {name for name in norms | linear if asked[name] in _STYLES}
    along_sequence = head is not None and norms | made == asked.keys()
    between: Placement = Shard(1) if along_sequence else Replicate()
    styles = {name: _STYLES[asked[name]](between) for name in made}
    if along_sequence:
        parents = {name: name.rpartition(".")[0] for name in asked}
        inner = {parents[name] for name in linear if "rowwise" in asked[name]}
        styles |= {name: _gathering(named[name]) for name in inner}
        styles |= {name: SequenceParallel() for name in norms if parents[name] not in inner}
    ends: dict[Any, ParallelStyle] = {
        embedding: _adding(between, Replicate()),
        head: ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    return styles | {name: ends[each] for name, each in named.items() if each in ends}


def _adding(to: Placement, input_layouts: Placement | None = None) -> ParallelStyle:
    """Return the style of a module whose results on all ranks are added."""
    return RowwiseParallel(
        input_layouts=input_layouts, output_layouts=to, use_local_output=to.is_replicate()
    )


def _gathering(module: nn.Module) -> ParallelStyle:
    """Return the style of an attention or a feed-forward module that gets parts of sequences.

    In transformers, attentions get them by name, beside masks and positions.
    """
    if len(inspect.signature(module.forward).parameters) == 1:
        return PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    )


#: Styles of transformers -> what makes torch's, given the placement of what modules hand on.
_STYLES: Mapping[str, Callable[[Placement], ParallelStyle]] = {
    "colwise": lambda to: ColwiseParallel(),
    "colwise_gather_output": lambda to: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": _adding,
    "rowwise_split_input": lambda to: _adding(to, Replicate()),
    # Norms of heads, which ranks share as they would a sequence: gradients are sums over ranks.
    "replicated_with_grad_allreduce": lambda to: SequenceParallel(
        sequence_dim=2, use_local_output=True
    ),
}


#: What the heads are called that tensor parallelism divides, by fields of configurations.
_HEADS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
}

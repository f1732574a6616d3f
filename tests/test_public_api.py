"""What users may rely on: the public names, and that importing them is cheap."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp

import shardwise

PUBLIC = {
    "shardwise": [
        "BackwardPrefetch",
        "CPUOffload",
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "DiskOffloadPolicy",
        "FSDPModule",
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "FullyShardedDataParallel",
        "GracefulStop",
        "GradientReductionHandle",
        "LocalOptimStateDictConfig",
        "LocalStateDictConfig",
        "MachineConfig",
        "MixedPrecision",
        "MixedPrecisionPolicy",
        "ModelPlan",
        "ModelReport",
        "OffloadError",
        "OffloadPolicy",
        "OptimStateDictConfig",
        "OptimStateKeyType",
        "PeerLostError",
        "Plan",
        "PlannedStep",
        "Publication",
        "RankFailedError",
        "RanksDivergedError",
        "Report",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
        "ShardingStrategy",
        "ShardwiseError",
        "SimulatedRank",
        "SimulatedRanks",
        "Simulation",
        "StateDictConfig",
        "StateDictSettings",
        "StateDictType",
        "StrategyConfig",
        "Subscription",
        "UnshardHandle",
        "Wire",
        "XlaFullyShardedDataParallel",
        "audit",
        "checkpoint",
        "checkpoint_module",
        "clip_grad_norm_",
        "compat",
        "diloco",
        "from_pretrained",
        "fully_shard",
        "init_mesh",
        "inspect",
        "launch",
        "linear_cross_entropy",
        "log",
        "materialize",
        "offload_activations",
        "optim",
        "patch_torch",
        "plan",
        "pretrained",
        "publish",
        "register_fsdp_forward_method",
        "relayout",
        "save_pretrained",
        "schedules",
        "share_comm_ctx",
        "simulate",
        "simulation",
        "subscribe",
        "timeline",
        "watch_ranks",
        "wrap",
    ],
    "shardwise.checkpoint": [
        "CheckpointError",
        "Handle",
        "PerRank",
        "Recovered",
        "StoreError",
        "async_save",
        "consolidate_sharded_model_checkpoints",
        "get_shard_metadata",
        "is_complete",
        "keep_last",
        "latest",
        "load",
        "load_rank_checkpoint",
        "load_weights",
        "per_rank",
        "recover",
        "replicate",
        "save",
        "save_hf",
        "save_rank_checkpoint",
        "step_folder",
        "steps",
        "transfer",
    ],
    "shardwise.diloco": [
        "DiLoCo",
        "OuterSGD",
        "Overlapped",
        "Quorum",
        "QuorumServer",
        "Streaming",
        "WireFormat",
    ],
    "shardwise.optim": [
        "Adafactor",
        "AdamW8bit",
        "ClipBy",
        "Lion",
        "Muon",
        "NonFinite",
        "OffloadError",
        "OffloadedOptimizer",
        "OptimizerInBackward",
        "OptimizerOnShards",
        "StepInterruptedError",
        "in_backward",
        "local",
        "muon_groups",
        "offload",
        "param_groups",
        "step_on_shards",
        "whole",
    ],
    "shardwise.compat": ["patch_torch"],
    "shardwise.pretrained": [
        "LoadReport",
        "build",
        "causal_lm_loss",
        "fill",
        "from_pretrained",
        "save_pretrained",
    ],
    "shardwise.schedules": ["Exhaustive", "FixedOrder", "Random"],
    "shardwise.timeline": ["Recording", "Timeline", "read", "record", "write"],
    "shardwise.wrap": [
        "CustomPolicy",
        "ModuleWrapPolicy",
        "Policy",
        "WrapPolicy",
        "always_wrap_policy",
        "apply_to",
        "apply_wrap",
        "chosen_modules",
        "enable_wrap",
        "lambda_auto_wrap_policy",
        "or_policy",
        "repeated_blocks",
        "size_based_auto_wrap_policy",
        "transformer_auto_wrap_policy",
        "wrap",
    ],
}

#: Modules that have moved, by the path that programs may still import them from.
MOVED = {
    "shardwise.app.cli.worker": "shardwise.worker",
    "shardwise.frontends.compat": "shardwise.compat",
    "shardwise.frontends.compat.fsdp2": "shardwise.compat.fsdp2",
    "shardwise.frontends.pretrained": "shardwise.pretrained",
    "shardwise.frontends.pretrained.trainer": "shardwise.pretrained.trainer",
    "shardwise.frontends.wrap": "shardwise.wrap",
    "shardwise.insight.timeline": "shardwise.timeline",
}


@pytest.mark.parametrize("old", MOVED)
def test_what_has_moved_can_be_imported_from_where_it_was(old: str) -> None:
    before, now = import_module(old), import_module(MOVED[old])

    assert now.__all__
    for name in now.__all__:
        assert getattr(before, name) is getattr(now, name), name


def test_an_old_path_is_a_name_and_nothing_else() -> None:
    found = {}
    for file in Path(shardwise.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text())
        about = re.match(r"The old path of :mod:`(.*)`", ast.get_docstring(tree) or "")
        if about is not None:
            imports = [each for each in tree.body[1:] if isinstance(each, ast.ImportFrom)]
            assert len(imports) == len(tree.body) - 1
            assert {each.module for each in imports} == {about[1]}
            path = file.relative_to(Path(shardwise.__file__).parents[1]).with_suffix("")
            found[".".join(path.parts).removesuffix(".__init__")] = about[1]

    assert found == MOVED


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_are_these_and_every_one_is_there_and_listed(package: str) -> None:
    module = import_module(package)

    assert module.__all__ == PUBLIC[package]
    assert all(hasattr(module, name) for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))


def _documented() -> dict[str, Any]:
    """The public functions, classes and their public methods that are ours, by full name."""
    found: dict[str, Any] = {}
    for package in PUBLIC:
        module = import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if not _is_ours(value):
                continue
            found[f"{package}.{name}"] = value
            for member in dir(value) if inspect.isclass(value) else ():
                method = inspect.unwrap(getattr(value, member))
                if _is_ours(method) and inspect.isroutine(method) and not member.startswith("_"):
                    found[f"{package}.{name}.{member}"] = method
    return found


def _is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", None)).startswith("shardwise.")


DOCUMENTED = _documented()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_is_public_says_what_it_takes_returns_and_raises(name: str) -> None:
    value = DOCUMENTED[name]
    sections = _sections(inspect.getdoc(value) or "")
    assert sections[""], "has no docstring"

    if inspect.isclass(value):
        if "__init__" not in vars(value) or issubclass(value, Exception):
            return
        docs = [_sections(inspect.getdoc(each) or "") for each in value.__mro__ if _is_ours(each)]
        described = "".join(doc.get(part, "") for doc in docs for part in ("Args", "Attributes"))
        signature = inspect.signature(value.__init__)
    elif inspect.isroutine(value):
        described = sections.get("Args", "")
        signature = inspect.signature(value)
        returned = str(signature.return_annotation)
        if returned not in ("None", "NoReturn", "Iterator[None]"):
            assert sections.keys() & {"Returns", "Yields"}, (
                f"returns {returned}, and does not say so"
            )
        undescribed = _raised(value) - _first_words(sections.get("Raises", ""))
        assert not undescribed, "say when it raises these"
    else:
        return
    unnamed = {
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.name != "self"
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    } - _first_words(described)
    assert not unnamed, "describe these in Args"


def _sections(docstring: str) -> dict[str, str]:
    """The parts of a docstring in Google's style, by their headings."""
    heading = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)
    parts = heading.split(docstring)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def _first_words(section: str) -> set[str]:
    return set(re.findall(r"^    \**(\w+)(?:, \w+)*:", section, re.MULTILINE))


def _raised(function: Any) -> set[str]:
    """The errors that a function itself raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        ast.unparse(node.exc.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if ast.unparse(node.exc.func)[0].isupper()  # else a function makes the error
    }


def _functions(value: Any) -> Iterator[Any]:
    """The functions that a public name calls: itself, or what makes a class."""
    made = vars(value).get("__init__") if inspect.isclass(value) else value
    if inspect.isroutine(made) and made.__code__.co_filename != "<string>":  # not of a dataclass
        yield made


def _unread(function: Any) -> set[str]:
    """The arguments that a function never looks at, unless all it does is to raise an error."""
    made = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(made, ast.FunctionDef)
    body = made.body[1:] if ast.get_docstring(made) else made.body
    if all(isinstance(each, ast.Raise) for each in body):
        return set()
    read = {
        node.id
        for each in body
        for node in ast.walk(each)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    if "locals" in read:  # by name, as tables beside the function say
        home = ast.parse(Path(inspect.getfile(function)).read_text())
        constants = [each.value for each in ast.walk(home) if isinstance(each, ast.Constant)]
        read.update(each for each in constants if isinstance(each, str))
    return set(inspect.signature(function).parameters) - read - {"self", "cls"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_no_argument_is_accepted_and_ignored(name: str) -> None:
    for function in _functions(DOCUMENTED[name]):
        assert not _unread(function), "honor these, or raise an error if they are passed"


def test_an_argument_that_is_ignored_is_found() -> None:
    def ignores(one: int, two: int = 0, *, three: int = 0) -> int:
        """Read one, and drop two."""
        del two
        return one

    assert _unread(ignores) == {"two", "three"}


@pytest.mark.parametrize(
    "package", ["shardwise", "shardwise.checkpoint", "shardwise.diloco", "shardwise.optim"]
)
def test_type_checkers_see_the_names_that_are_imported_late(package: str) -> None:
    module = import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    seen = {
        alias.name
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert seen == set(module.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'shardwise\.checkpoint' has no attribute 'lode'"):
        _ = import_module("shardwise.checkpoint").lode


def test_an_fsdp_module_is_torchs_too() -> None:
    assert issubclass(shardwise.FSDPModule, torch.distributed.fsdp.FSDPModule)
    assert shardwise.MixedPrecisionPolicy is torch.distributed.fsdp.MixedPrecisionPolicy


def test_importing_the_package_alone_does_not_import_torch() -> None:
    code = "import sys, shardwise; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

"""An argument of a wrong type: one sentence names it, says what was found and what is expected."""

from __future__ import annotations

import contextlib
import enum
import inspect
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

import shardwise
from shardwise import checkpoint, diloco, optim, simulate, timeline, wrap
from shardwise.base.arguments import _expected, _fits, check_arguments
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import transfer
from shardwise.diloco import Quorum, QuorumServer
from shardwise.pretrained.api import save_pretrained
from shardwise.transport.wire import Wire
from shardwise.weights.sglang import SGLangServer
from tests.worlds import on_processes


class Odd:
    """No argument is of this type."""


#: What is right for arguments that have no default. None of these calls goes beyond its checks.
RIGHT: dict[str, Any] = {
    "address": "localhost",
    "chosen": {},
    "ckpt_prefix": "c",
    "count": 1,
    "deadline": 1.0,
    "every": 1,
    "fn": len,
    "folder": "f",
    "function": len,
    "group": None,
    "head": nn.Linear(1, 1),
    "hidden": torch.ones(1, 1),
    "inner": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1),
    "lambda_fn": len,
    "make": len,
    "max_norm": 1.0,
    "method_name": "forward",
    "model": nn.Linear(1, 1),
    "module": nn.Linear(1, 1),
    "module_classes": [nn.Linear],
    "modules": [],
    "name": "n",
    "offload_policy": shardwise.CPUOffloadPolicy(),
    "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1),
    "optimizer_class": torch.optim.SGD,
    "parameters": [],
    "params": [],
    "path": "p",
    "policies": [],
    "policy": "auto",
    "replica": 0,
    "replicas": 1,
    "root": "r",
    "rules": {},
    "server": "localhost:1",
    "step": 1,
    "targets": torch.zeros(1, dtype=torch.long),
    "timeline": timeline.Timeline(()),
    "to": "host",
    "world_size": 1,
    "wrapper_cls": len,
}
#: Made by the library, not by its users; or what answers for each value by itself.
MADE_BY_US = {
    "DiskOffloadPolicy",
    "FSDPModule",
    "GradientReductionHandle",
    "Handle",
    "MachineConfig",
    "ModelPlan",
    "ModelReport",
    "OffloadedOptimizer",
    "OptimizerInBackward",
    "OptimizerOnShards",
    "PerRank",
    "Plan",
    "PlannedStep",
    "Publication",
    "Recording",
    "Recovered",
    "Report",
    "SimulatedRank",
    "SimulatedRanks",
    "StrategyConfig",
    "Subscription",
    "Timeline",
    "UnshardHandle",
    "Wire",
    "WrapPolicy",
}
#: Ranks agree that the arguments are right, or all raise.
TOGETHER = {"relayout", "transfer"}


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module in (shardwise, checkpoint, optim, diloco, wrap, timeline):
        for name in module.__all__:
            each = getattr(module, name)
            ours = getattr(each, "__module__", "").startswith("shardwise")
            is_value = isinstance(each, type) and issubclass(each, Exception | enum.Enum)
            ours = ours and not name.endswith("wrap_policy")  # called by what wraps
            if ours and callable(each) and not is_value and name not in MADE_BY_US | TOGETHER:
                yield f"{module.__name__}.{name}", each


@pytest.mark.parametrize(("name", "function"), [pytest.param(*x, id=x[0]) for x in _public()])
def test_every_public_function_names_the_argument_of_a_wrong_type(
    name: str, function: Callable[..., Any]
) -> None:
    is_class = isinstance(function, type)
    fields = is_class and hasattr(function, "__dataclass_fields__")
    known = _expected(function if fields or not is_class else function.__init__)
    parameters = inspect.signature(function).parameters
    for argument, expected in known.items():
        if argument.startswith("**"):
            argument = "anything"
        if argument == "policy" or argument == "auto_wrap_policy" or _fits(Odd(), expected):
            continue  # the policy says so by itself, and truth values are any
        needed = [n for n, each in parameters.items() if each.default is each.empty]
        plain = [n for n in needed if parameters[n].kind not in (2, 4)]
        given = {**{n: RIGHT[n] for n in plain}, argument: Odd()}
        with pytest.raises(
            TypeError, match=rf"^{argument}: found an Odd, expected (a|an|one|'|\()"
        ):
            _call(function, given)


def _call(function: Callable[..., Any], given: dict[str, Any]) -> None:
    found = function(**given)
    if isinstance(found, contextlib.AbstractContextManager):
        with found:
            pass


METHODS = [
    name
    for name, each in vars(shardwise.FSDPModule).items()
    if inspect.isfunction(each) and not name.startswith("_")
    if not hasattr(each, "__deprecated__") and name not in {"load_state_dict", "until_all_end"}
]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_a_sharded_module_names_the_argument_of_a_wrong_type(name: str) -> None:
    """At once, not in the next forward or backward."""

    def run() -> None:
        method = getattr(shardwise.fully_shard(nn.Linear(4, 4)), name)
        for argument, expected in _expected(method).items():
            if not _fits(Odd(), expected) and "symm_mem" not in name:  # not offered
                given = {"hook": len} if name == "set_all_reduce_hook" else {}
                message = f"^{argument}: (found|expected) a"
                with pytest.raises((TypeError, ValueError), match=message):
                    method(**{**given, argument: Odd()})

    simulate(run, 1)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"mp_policy": MixedPrecisionPolicy("bf16")}, "mp_policy.param_dtype: found 'bf16'"),
        ({"mp_policy": MixedPrecisionPolicy(None, "bf16")}, "mp_policy.reduce_dtype: found 'bf16'"),
        (
            {"mp_policy": MixedPrecisionPolicy(torch.int8)},
            "mp_policy.param_dtype: found torch.int8",
        ),
        ({"mesh": 2}, r"mesh: found 2, expected a DeviceMesh \(such as shardwise.init_mesh"),
        (
            {"ignored_params": {"bias"}},
            "ignored_params: found a set of str, expected a set, each",
        ),
    ],
)
def test_fully_shard_refuses_before_the_first_forward(made: dict[str, Any], message: str) -> None:
    def run() -> None:
        model = nn.Linear(4, 4)
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            shardwise.fully_shard(model, **made)
        assert type(model) is nn.Linear

    simulate(run, 1)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"mixed_precision": MixedPrecision("bf16")}, "mixed_precision.param_dtype: found 'bf16'"),
        ({"backward_prefetch": "pre"}, "backward_prefetch: found 'pre', expected a Backward"),
    ],
)
def test_the_wrapper_refuses_before_the_first_forward(made: dict[str, Any], message: str) -> None:
    def run() -> None:
        with pytest.raises(TypeError, match=f"^{message}"):
            shardwise.FullyShardedDataParallel(nn.Linear(4, 4), **made)

    simulate(run, 1)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
def test_a_module_in_place_of_its_parameters_is_refused(model: nn.Module) -> None:
    """A Sequential can be iterated, over modules without gradients."""
    with pytest.raises(
        TypeError, match=r"^parameters: found the .*, expected model\.parameters\(\)"
    ):
        shardwise.clip_grad_norm_(model, 1.0)  # type: ignore[arg-type]


def test_full_tensors_do_not_load_into_shards_and_the_error_says_what_loads_them() -> None:
    full = nn.Linear(4, 4).state_dict()

    def run() -> None:
        model = shardwise.fully_shard(nn.Linear(4, 4))
        before = model.weight.full_tensor()
        with pytest.raises(RuntimeError, match=r"^weight on rank \d: found a full tensor of shape"):
            model.load_state_dict(full)
        assert torch.equal(model.weight.full_tensor(), before)
        set_model_state_dict(model, dict(full), options=StateDictOptions(full_state_dict=True))
        assert torch.equal(model.weight.full_tensor(), full["weight"])
        with pytest.raises(RuntimeError, match="Missing key"):  # what else is wrong, torch says
            model.load_state_dict({})

    simulate(run, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: shardwise.fully_shard(nn.Linear(4, 4)),
        lambda: shardwise.FullyShardedDataParallel(nn.Linear(4, 4)),
        lambda: shardwise.XlaFullyShardedDataParallel(nn.Linear(4, 4)),
        lambda: shardwise.init_mesh(dp=2),
    ],
)
def test_a_process_that_is_no_rank_is_told_how_to_start_one(
    call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"found no RANK.* shardwise run .* torchrun"):
        call()


def test_ranks_refuse_together() -> None:
    def run(function: Callable[..., Any], given: dict[str, Any], message: str) -> None:
        model = shardwise.fully_shard(nn.Linear(4, 4))
        here = {nn: model, (nn, None): (model, None)}
        with pytest.raises((TypeError, CheckpointError), match=message):
            function(**{name: here.get(each, each) for name, each in given.items()})

    scheduler = torch.optim.lr_scheduler.StepLR(RIGHT["optimizer"], 1)
    for function, given, message in (
        (shardwise.relayout, {"model": 3}, "model: found 3, expected an nn.Module"),
        (
            shardwise.relayout,
            {"model": nn, "optimizer": scheduler},
            "optimizer: found a StepLR, expected an Optimizer or None",
        ),
        (shardwise.relayout, {"model": nn, "group": 3}, "group: found 3, expected a ProcessGroup"),
        (transfer, {"source": 3, "target": None}, r"source: found 3, expected .*\(an nn.Module"),
        (
            transfer,
            {"source": (nn, None), "target": (3, None)},
            "target: found a tuple of int, NoneType, expected",
        ),
    ):
        simulate(run, 1, function, given, message)


TOGETHER_FROM_FILES: dict[str, Callable[[Path, nn.Module, Any], Any]] = {
    "optimizer: found 3": lambda path, model, wrong: checkpoint.save(path, model, wrong),
    "extra: found 3": lambda path, model, wrong: checkpoint.async_save(path, model, None, wrong),
    "keep_last: found 0": lambda path, model, wrong: checkpoint.save(
        path, model, keep_last=wrong and 0
    ),
    " optimizer: found 3": lambda path, model, wrong: checkpoint.load(path, model, wrong),
    "buffer: found None": lambda path, model, wrong: checkpoint.load_weights(
        path, model, buffer=None if wrong else 1 << 20
    ),
    "max_shard_size: found '1'": lambda path, model, wrong: checkpoint.save_hf(
        path, model, max_shard_size="1" if wrong else 1 << 20
    ),
    "buffers: found 1": lambda path, model, wrong: shardwise.publish(
        model, "policy", to=path, buffers=1 if wrong else 2
    ),
    "model: found a FSDPLinear": lambda path, model, wrong: save_pretrained(model, path),
}


@on_processes(2)
def test_a_mistake_on_one_rank_raises_there_and_names_it_on_others(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    model = shardwise.fully_shard(nn.Linear(4, 4))
    for message, call in TOGETHER_FROM_FILES.items():
        kinds = (TypeError, ValueError)
        if rank == 0 and "FSDP" not in message:
            kinds = (CheckpointError,)
            message = rf"rank 1: (Type|Value)Error: {message.strip()}"
        with pytest.raises(kinds, match=f"^{message.strip()}" if rank else message):
            call(tmp_path / "made", model, 3 if rank == 1 else None)
        assert not list(tmp_path.iterdir())
    checkpoint.save(tmp_path / "made", model)


def test_a_transfer_to_nowhere_is_refused_and_the_training_is_still_there() -> None:
    def run() -> None:
        model = shardwise.fully_shard(nn.Linear(4, 4))
        before = model.weight.full_tensor()
        with pytest.raises(CheckpointError, match="target: found None on all ranks, expected"):
            transfer((model, None), None)
        assert torch.equal(model.weight.full_tensor(), before)

    simulate(run, 2)


@pytest.mark.parametrize("seconds", [math.nan, -1.0, "3", None])
def test_a_time_to_wait_is_a_number_that_ends(seconds: Any, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    wrong: dict[str, Callable[[], Any]] = {
        "seconds": lambda: _call(shardwise.audit, {"model": model, "seconds": seconds}),
        " seconds": lambda: _call(shardwise.watch_ranks, {"model": model, "seconds": seconds}),
        "patience": lambda: timeline.record(tmp_path, patience=seconds),
        "timeout": lambda: shardwise.subscribe("nobody", at=tmp_path, timeout=seconds),
        " timeout": lambda: Quorum(server="a:1", replica=0, timeout=seconds),
        "  timeout": lambda: SGLangServer("http://localhost:1", timeout=seconds),
        "deadline": lambda: QuorumServer(1, deadline=seconds),
        "start_timeout": lambda: QuorumServer(1, deadline=1.0, start_timeout=seconds),
    }
    for name, call in wrong.items():
        with pytest.raises(
            (TypeError, ValueError), match=rf"^{name.strip()}: found {re.escape(repr(seconds))}"
        ):
            call()


def test_a_clip_by_nan_is_refused() -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    with pytest.raises(ValueError, match="max_norm: found nan, expected a number"):
        shardwise.clip_grad_norm_([param], math.nan)
    assert param.grad.tolist() == [1.0, 1.0]


def test_what_stands_for_a_type_passes() -> None:
    def function(
        count: int, share: float, betas: tuple[float, float], names: list[str], wire: Wire | None
    ) -> None:
        check_arguments(function, locals())

    function(torch.tensor(3), True, [0.9, torch.tensor(0.1)], ("a", "b"), None)  # type: ignore[arg-type]
    for change, message in (
        ({"betas": ("x", 1)}, r"betas: found a tuple of str, int, expected \(a number, a number\)"),
        ({"names": "ab"}, "names: found 'ab', expected a list, each a string"),
        ({"names": [1]}, "names: found a list of int, expected a list, each a string"),
        ({"share": "1"}, "share: found '1', expected a number"),
        ({"wire": Path("w")}, r"wire: found PosixPath\('w'\), expected a Wire or None"),
    ):
        right: dict[str, Any] = {
            "count": 1,
            "share": 1.0,
            "betas": (0.9, 0.1),
            "names": [],
            "wire": None,
        }
        with pytest.raises(TypeError, match=message):
            function(**{**right, **change})

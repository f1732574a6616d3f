"""A rehearsed step, against arithmetic and against a step with values."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise import DiskOffloadPolicy, MachineConfig, PlannedStep, StrategyConfig, plan
from shardwise.base.observe import Memory
from shardwise.base.scratch import file as scratch_file
from shardwise.frontends.blocks import checkpoint_blocks
from shardwise.frontends.strategies import Checkpointing, Runtime, Strategy, WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning import recorder
from shardwise.insight.planning.api import ModelPlan
from shardwise.insight.planning.events import Change, Log, Mark, Op, Start, Wait
from shardwise.insight.planning.memory import memory
from shardwise.insight.planning.models import of_module
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.planning.settings import (
    RehearsalError,
    Settings,
    SettingsError,
    UntraceableError,
)
from shardwise.insight.schema.sharding import Stepping
from tests.planning.profiled import allocated


def _blueprint(width: int = 64, depth: int = 3) -> Blueprint:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        return Blueprint("blocks", nn.Sequential(*blocks, nn.Linear(width, 4)), blocks)


def _rehearse(mesh: str, width: int = 64, rank: int = 0, **given: Any) -> Log:
    settings = Settings(
        mesh=WantedMesh.parse(mesh),
        batch_size=8,
        transport="collectives",
        batch=lambda size: torch.zeros(size, width),
        **given,
    )
    return rehearse(_blueprint(width), settings, rank)


@functools.cache
def _shared(mesh: str) -> Log:
    """A rehearsed step that tests share."""
    return _rehearse(mesh)


def test_steps_in_backward_keep_the_gradients_of_few_groups() -> None:
    after, inside = (_rehearse("dp=2", stepping=each) for each in Stepping)
    per_block = (64 * 64 + 64) * 4
    # One block computes its full gradients while those of another are reduced.
    assert memory(inside).most[Memory.GRADIENTS] <= 3 * per_block
    assert memory(after).most[Memory.GRADIENTS] > memory(inside).most[Memory.GRADIENTS]
    changes = [event.nbytes for event in inside.events if isinstance(event, Change)]
    assert sum(changes) == 0, "all that the step allocates is freed in it"
    assert inside.flops == after.flops


def test_shards_and_optimizer_states_are_counted_to_the_byte() -> None:
    per_block, rest = 64 * 64 + 64, 64 * 4 + 4
    log = _shared("dp=2")
    assert log.before[Memory.PARAMETERS] == (3 * per_block + rest) // 2 * 4
    steps = 8 * 4  # AdamW counts the steps of each parameter in float32
    assert log.before[Memory.OPTIMIZER] == 2 * log.before[Memory.PARAMETERS] + steps


@pytest.mark.parametrize("transport", ["collectives", "shm"])
def test_parameters_without_a_gradient_have_no_states(transport: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    settings = Settings(
        mesh=WantedMesh.parse("dp=2"),
        batch_size=8,
        transport=transport,
        batch=lambda size: torch.zeros(size, 64),
        step=lambda model, batch: model[2](model[0](batch)).mean(),
    )
    log = rehearse(Blueprint("skips", model, list(model)), settings)
    assert log.before[Memory.PARAMETERS] == (2 * (64 * 64 + 64) + 64 * 4 + 4) // 2 * 4
    used = (64 * 64 + 64 + 64 * 4 + 4) // 2 * 4
    assert log.before[Memory.OPTIMIZER] == 2 * used + 4 * 4


@pytest.mark.parametrize(
    ("optimizer", "elements"),
    [
        ("lion", 3 * (32 * 64 + 32) + 2 * 64 + 2),
        # Means of this rank's rows, of all columns, and the squares of biases.
        ("adafactor", 3 * (32 + 64 + 32) + (2 + 64 + 2)),
    ],
)
def test_states_of_other_shapes_are_counted_to_the_byte(optimizer: str, elements: int) -> None:
    settings = Settings(
        mesh=WantedMesh.parse("dp=2"),
        batch_size=8,
        transport="collectives",
        optimizer=optimizer,
        batch=lambda size: torch.zeros(size, 64),
    )
    steps = 8 if optimizer == "adafactor" else 0
    for stepping in Stepping:
        log = rehearse(_blueprint(), dataclasses.replace(settings, stepping=stepping))
        assert log.before[Memory.OPTIMIZER] == 4 * (elements + steps)


def test_states_of_eight_bits_are_counted_to_the_byte() -> None:
    settings = Settings(
        mesh=WantedMesh.parse("dp=2"),
        batch_size=8,
        transport="collectives",
        optimizer="adamw8bit",
        batch=lambda size: torch.zeros(size, 64),
    )
    log = rehearse(_blueprint(), settings)
    quantized = 3 * 2 * (64 * 64 + 64 * 4)  # two codes an element, two scales a row
    in_fp32 = 2 * (3 * 64 + 64 * 4 + 4) * 4  # biases, and a matrix of 256 elements
    steps = 8 * 4
    assert log.before[Memory.OPTIMIZER] == (quantized + in_fp32) // 2 + steps
    scratch = 28 << 16  # bytes for 65,536 elements, for each thread
    largest = max(event.nbytes for event in log.events if isinstance(event, Change))
    assert largest <= scratch * torch.get_num_threads()


def test_states_that_are_kept_elsewhere_are_counted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_file, "SMALLEST", 1024)
    after, inside = (
        _rehearse("dp=2", offload="disk:/nowhere", stepping=each, param_dtype="bf16")
        for each in Stepping
    )
    matrices, small = 3 * 64 * 64 // 2, (3 * 64 + 64 * 4 + 4) // 2
    for log, blocks in ((after, 3), (inside, 1)):
        assert log.offloaded == 2 * 4 * matrices
        assert log.before[Memory.OPTIMIZER] == 2 * 4 * small + 8 * 4
        changes = [event for event in log.events if isinstance(event, Change)]
        staged = [change.nbytes for change in changes if change.kind is Memory.OPTIMIZER]
        assert sum(staged) == 0, "memory for states on their way is free between steps"
        assert max(staged) == blocks * 2 * 4 * 64 * 64 // 2
    with_masters = _rehearse(
        "dp=2", offload="disk:/nowhere", shard_dtype="bf16", master_dtype="fp32"
    )
    assert with_masters.offloaded == 3 * 4 * matrices
    monkeypatch.setattr(scratch_file, "SMALLEST", 1024)
    everything = _rehearse("dp=2", offload="disk:/nowhere", offload_parameters="disk:/nowhere")
    assert everything.offloaded == (2 + 1) * 4 * matrices
    assert everything.before[Memory.PARAMETERS] == 4 * small
    stays = _rehearse("dp=2", offload="host", offload_parameters="host")
    assert stays.before[Memory.PARAMETERS] == 4 * (matrices + small)
    assert stays.offloaded == 0, "states of a CPU are on the host already"
    moved = _rehearse("dp=2", offload="host", device_type="cuda")
    assert moved.offloaded == after.offloaded


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offload": "tape"}, "offload"),
        ({"offload_parameters": "disk:"}, "offload_parameters"),
        ({"master_dtype": "fp32"}, "master_dtype"),
        ({"offload": "host", "master_dtype": "int3"}, "master_dtype"),
    ],
)
def test_places_that_are_none_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        _rehearse("dp=2", **given)


def test_steps_in_backward_need_an_optimizer() -> None:
    with pytest.raises(SettingsError, match=r"^stepping: found in-backward without an optimizer"):
        _rehearse("dp=2", stepping=Stepping.IN_BACKWARD, optimizer="none")


def test_what_a_step_allocates_is_freed_in_it() -> None:
    log = _shared("dp=2")
    changes = [event for event in log.events if isinstance(event, Change)]
    for kind in (Memory.FULL_PARAMETERS, Memory.GRADIENTS, Memory.ACTIVATIONS, Memory.TRANSPORT):
        assert sum(change.nbytes for change in changes if change.kind is kind) == 0, kind
        assert any(change.kind is kind for change in changes)


def test_the_last_ranks_hold_less_of_uneven_parameters() -> None:
    first, last = (_rehearse("dp=3", width=7, rank=rank).before for rank in (0, 2))
    assert last[Memory.PARAMETERS] < first[Memory.PARAMETERS]


def test_collectives_are_waited_for_once() -> None:
    log = _rehearse("dp=4")
    starts = [event.number for event in log.events if isinstance(event, Start)]
    waits = [event.number for event in log.events if isinstance(event, Wait)]
    assert starts
    assert sorted(starts) == sorted(waits)


def test_products_are_counted_in_forward_and_twice_in_backward() -> None:
    log = _shared("dp=2")
    forward = 2 * 8 * (3 * 64 * 64 + 64 * 4)
    first = 2 * 8 * 64 * 64  # the gradient of the input is not computed
    assert log.flops == 3 * forward - first
    assert sum(event.flops for event in log.events if isinstance(event, Op)) == log.flops


def test_the_peak_is_named() -> None:
    found = memory(_shared("dp=2"))
    assert found.peak == sum(getattr(found, kind.value) for kind in Memory)
    assert found.peak >= max(found.most.values())
    assert "ward of " in found.peak_moment
    assert any(isinstance(event, Mark) for event in _shared("dp=2").events)


# -- against what torch's allocator reports of a step with values ----------------------------------


def _llama() -> Blueprint:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return of_module(model, "llama")


def _tokens(size: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(size, 64, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**batch).loss
    assert isinstance(loss, torch.Tensor)
    return loss


_TENSOR = {"mesh": WantedMesh.parse("tp=2")}
_BOTH = {"mesh": WantedMesh.parse("dp=2,tp=2")}
_HYBRID = {"strategy": Strategy.HYBRID_SHARD, "mesh": WantedMesh.parse("dp_replicate=2,dp_shard=2")}
_ACCUMULATED = {"strategy": Strategy.SHARD_GRAD_OP, "accumulate": 2}
_BF16 = {"param_dtype": "bf16"}
_FULL, _SELECTIVE, _OPERATOR = (
    {"activation_checkpointing": mode}
    for mode in (Checkpointing.FULL, Checkpointing.SELECTIVE, Checkpointing.OPERATOR)
)
_TORCH = {"runtime": Runtime.TORCH}
#: Between them every value of every setting.
SETTINGS: dict[str, dict[str, Any]] = {
    "accumulated": _ACCUMULATED,
    "full": {**_FULL, "shard_dtype": "bf16"},
    "selective": {**_SELECTIVE, **_BF16},
    "in backward": {"stepping": Stepping.IN_BACKWARD, "accumulate": 2},
    "hybrid": _HYBRID,
    "every second block": {**_FULL, "recompute_every": 2},
    "sharded, tensor parallel and operator": {**_BOTH, **_OPERATOR},
    "torch accumulated": {**_TORCH, **_ACCUMULATED},
    "torch full": {**_TORCH, **_FULL},
    "torch hybrid": {**_TORCH, **_HYBRID, **_BF16},
    "torch tensor parallel": {**_TORCH, **_BOTH},
}
#: More pairs of them.
MORE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": _BF16,
    "tensor parallel": _TENSOR,
    "sharded and tensor parallel": {**_BOTH, **_BF16},
    "and full": {**_BOTH, **_FULL},
    "operator": {**_OPERATOR, **_BF16},
    "torch fp32": _TORCH,
    "torch bf16": {**_TORCH, **_BF16},
}


@pytest.mark.parametrize(
    "given",
    [
        *(pytest.param(given, id=name) for name, given in SETTINGS.items()),
        *(pytest.param(given, id=name, marks=pytest.mark.long) for name, given in MORE.items()),
    ],
)
def test_allocates_what_a_step_with_values_allocates(given: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(
        **{"mesh": WantedMesh.parse("dp=2"), **given},
        batch_size=4,
        transport="auto" if "runtime" in given else "collectives",
        backend="fake",
        clip_grad=0,
        batch=_tokens,
        step=_loss,
    )
    log = rehearse(_llama(), settings)

    def prepare(model: nn.Module) -> None:
        layers = model.model.layers
        checkpoint_blocks(layers, settings.activation_checkpointing, settings.recompute_every)

    found = allocated(_llama(), settings, prepare, tmp_path)
    now = peak = 0
    after_forward = None
    for event in log.events:
        if isinstance(event, Change):
            if after_forward is None and event.moment.startswith("backward"):
                after_forward = now
            now += event.nbytes
            peak = max(peak, now)
    # Tensor parallelism counts the targets of the loss, once for each step.
    count = 4 if "tp" in settings.mesh.names else 0
    assert after_forward == pytest.approx(found.after_forward, abs=count, rel=0)
    assert peak == pytest.approx(found.peak, abs=count, rel=0)


@pytest.mark.parametrize("given", [{}, _BF16, {"recompute_every": 2}], ids=str)
def test_inputs_that_a_disk_keeps_are_counted_there(given: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(
        mesh=WantedMesh.parse("dp=2"),
        activation_checkpointing=Checkpointing.OFFLOAD,
        offload_activations=f"disk:{tmp_path}",
        batch_size=8,
        transport="collectives",
        backend="fake",
        batch=_tokens,
        step=_loss,
        **given,
    )
    log = rehearse(_llama(), settings)
    every, policy = settings.recompute_every, DiskOffloadPolicy(tmp_path)
    nbytes = 8 * 64 * 64 * (2 if settings.param_dtype == "bf16" else 4)
    assert log.offloaded == nbytes * 2 // every

    def prepare(model: nn.Module) -> None:
        checkpoint_blocks(model.model.layers, Checkpointing.OFFLOAD, every, policy)

    found = allocated(_llama(), settings, prepare, tmp_path)
    changes = [event for event in log.events if isinstance(event, Change)]
    in_forward = [each.nbytes for each in changes if each.moment.startswith("forward")]
    assert sum(in_forward) == found.after_forward
    peak = max(itertools.accumulate(each.nbytes for each in changes))
    # What comes back is memory of the file, which no allocator knows.
    assert found.peak <= peak <= found.peak + nbytes


def test_inputs_cross_the_link_to_the_host_and_back() -> None:
    def planned(**given: Any) -> ModelPlan:
        mode = given.pop("mode", Checkpointing.OFFLOAD)
        config = StrategyConfig(activation_checkpointing=mode, **given)
        step = PlannedStep(batch_size=8, batch=_tokens, step=_loss)
        return plan(_llama(), sharding=config, step=step, machine=MachineConfig(device="h100"))

    inputs, kept = planned(), planned(mode=Checkpointing.FULL)
    nbytes = 8 * 64 * 64 * 4
    [copies] = [each for each in inputs.traffic if each.collective == "copy"]
    # The last input is still there when backward asks for it.
    assert (copies.dimension, copies.calls, copies.sent) == ("host", 3, 3 * nbytes)
    assert inputs.ranks[0].offloaded == 2 * nbytes
    assert inputs.peak <= kept.peak
    assert "inputs of blocks to host" in str(inputs)


def test_on_cpus_inputs_need_a_folder() -> None:
    settings = Settings(
        mesh=WantedMesh.parse("dp=2"), activation_checkpointing=Checkpointing.OFFLOAD
    )
    with pytest.raises(SettingsError, match=r"offload_activations: found host, expected disk:FOL"):
        rehearse(_llama(), settings)


# -- tensor parallelism, and modules that compute with values ------------------------------------


def test_tensor_parallel_collectives_have_a_dimension_of_their_own() -> None:
    model = _llama().model
    blueprint = Blueprint(
        "mlp",
        model,
        list(model.model.layers),
        tensor_parallel={
            f"model.layers.{i}.mlp.{name}": style()
            for i in range(2)
            for name, style in (
                ("gate_proj", ColwiseParallel),
                ("up_proj", ColwiseParallel),
                ("down_proj", RowwiseParallel),
            )
        },
    )
    mesh = WantedMesh.parse("dp=2,tp=2")
    settings = Settings(mesh=mesh, transport="collectives", batch=_tokens, step=_loss)
    log = rehearse(blueprint, settings)
    sent = [event for event in log.events if isinstance(event, Start) and event.dimension == "tp"]
    activations = 64 * 64 * 4  # tokens, width, bytes
    # Forward reduces the output of each block, and backward the gradients of two inputs.
    norm = 4
    assert [event.nbytes for event in sent] == [activations] * 6 + [norm]
    assert [event.group for event in sent[:2]] == [f"model.layers.{i}.mlp" for i in range(2)]
    assert {event.ranks for event in sent} == {2}
    whole = rehearse(_llama(), dataclasses.replace(settings, mesh=WantedMesh.parse("dp=2")))
    mlp = 2 * 3 * 64 * 160 * 4  # layers, matrices, shape, bytes
    halved = whole.before[Memory.PARAMETERS] - mlp // 2 // 2
    assert log.before[Memory.PARAMETERS] == halved


class _Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x[x > 0]
        return x


class _Waiting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool(x.sum() > 0):
            pass
        return x


def _with(module: nn.Module) -> tuple[Blueprint, Settings]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), module)
    return Blueprint("values", model, []), Settings(
        mesh=WantedMesh.parse("dp=2"), batch=lambda size: torch.zeros(size, 8), batch_size=4
    )


def test_a_module_that_reads_values_is_named_and_gets_the_largest_shape() -> None:
    log = rehearse(*_with(_Reading()))
    assert list(log.formulas) == ["1"]
    assert any(
        isinstance(event, Change) and event.module == "1" and event.nbytes == 4 * 8 * 4
        for event in log.events
    )


def test_a_module_that_waits_for_a_value_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "MOST_READS", 100)
    with pytest.raises(UntraceableError, match=r"module '1': found aten._local_scalar_dense"):
        rehearse(*_with(_Waiting()))


def _small(**options: Any) -> Settings:
    given: dict[str, Any] = {"batch": lambda size: torch.zeros(size, 4), **options}
    return Settings(mesh=WantedMesh.parse("dp=2"), transport="collectives", **given)


def _of(*modules: nn.Module) -> Blueprint:
    return Blueprint("small", nn.Sequential(*modules), [])


class _Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise OSError("no such table")


def test_an_error_of_the_model_names_the_module_and_keeps_its_cause() -> None:
    model = _of(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), _Raises()))
    with pytest.raises(
        RehearsalError, match=r"forward of module 1\.1: found OSError: no such table"
    ):
        rehearse(model, _small())
    assert rehearse(_of(nn.Linear(4, 4)), _small()).events  # nothing is left of the other


def test_errors_outside_of_the_model_say_what_was_being_done() -> None:
    lazy = pytest.raises(RehearsalError, match=r"copying the model: .* uninitialized parameter")
    with lazy:
        rehearse(_of(nn.LazyLinear(4)), _small())
    with pytest.raises(RehearsalError, match=r"making a batch: found ZeroDivisionError"):
        rehearse(_of(nn.Linear(4, 4)), _small(batch=lambda size: 1 // 0))
    with pytest.raises(RehearsalError, match=r"a step of the optimizer: .* 'closure'"):
        rehearse(_of(nn.Linear(4, 4)), _small(optimizer=torch.optim.LBFGS))


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (lambda model, x: 5, "int"),
        (lambda model, x: model(x), r"\(1, 4\) trained"),
        (lambda model, x: x.sum(), r"\(\) that nothing trained went into"),
    ],
)
def test_what_is_no_loss_is_refused(step: Any, found: str) -> None:
    with pytest.raises(SettingsError, match=f"step: found .*{found}, expected a loss"):
        rehearse(_of(nn.Linear(4, 4)), _small(step=step))


def test_a_model_of_its_own_needs_a_function_that_makes_batches() -> None:
    with pytest.raises(SettingsError, match="batch: found none, for a Sequential,"):
        rehearse(_of(nn.Linear(4, 4)), _small(batch=None))


def test_the_first_trained_tensor_of_an_output_stands_for_the_loss() -> None:
    class Several(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"inputs": x, "all": (super().forward(x), 5)}

    assert rehearse(Blueprint("several", Several(4, 4), []), _small()).flops > 0


class _Words(nn.Module):
    """Takes tokens, and has no configuration that says how many there are."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1, 4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embed(input_ids)
        return found


def test_tokens_are_made_without_the_size_of_a_vocabulary() -> None:
    log = rehearse(Blueprint("words", _Words(), []), _small(batch=None, seq_length=3))
    assert log.tokens == 3


def test_a_rehearsal_and_modes_of_its_caller_do_not_change_each_other() -> None:
    drawn = random.getstate()
    expected = memory(rehearse(_of(nn.Linear(4, 4)), _small()))
    assert random.getstate() == drawn
    for mode in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        with mode:
            assert memory(rehearse(_of(nn.Linear(4, 4)), _small())) == expected


def test_threads_take_turns() -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: memory(rehearse(_of(nn.Linear(4, 4)), _small())), range(3)))
    assert found[0] == found[1] == found[2]


def test_grouped_products_have_a_result_in_every_dtype() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            offs = torch.full((2,), 4, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            return torch._grouped_mm(x, self.weight, offs=offs)

    for dtype in (torch.float32, torch.bfloat16):
        made = Experts().to(dtype)
        settings = _small(
            batch_size=8, batch=lambda size, dtype=dtype: torch.zeros(size, 16, dtype=dtype)
        )
        log = rehearse(Blueprint("experts", made, []), settings)
        named = [
            event for event in log.events if isinstance(event, Op) and "_grouped_mm" in event.name
        ]
        assert {event.shapes[-1] for event in named} == {(8, 8), (2, 16, 8)}


def test_every_collective_of_a_mesh_names_its_dimension() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    settings = dataclasses.replace(_small(), mesh=WantedMesh.parse("dp=2,tp=2"))
    log = rehearse(Blueprint("split", model, [], tensor_parallel=styles), settings)
    named = {event.dimension for event in log.events if isinstance(event, Start)}
    assert named == {"dp", "tp"}

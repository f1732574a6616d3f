"""Plans of real models: what is asked for arrives in the rehearsal; mistakes are refused."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig

import shardwise
from shardwise import MachineConfig, PlannedStep, StrategyConfig
from shardwise.base import devices
from shardwise.base.observe import Memory
from shardwise.frontends.strategies import Checkpointing, MeshError, Strategy, WantedMesh
from shardwise.insight.planning.api import (
    ModelPlan,
    find_machine,
    kinds_of_ranks,
    machine_in_words,
    make_fit,
    observed_error,
    on_machine,
)
from shardwise.insight.planning.calibrate import cache_file
from shardwise.insight.planning.machine import MachineError
from shardwise.insight.planning.memory import PROCESS_FACTOR
from shardwise.insight.planning.models import of_module
from shardwise.insight.planning.report import Available
from shardwise.insight.planning.settings import Products, Settings, SettingsError
from shardwise.insight.planning.text import speed
from shardwise.insight.schema.option import OptionError

TINY = PlannedStep(seq_length=16)
ROWS = PlannedStep(batch=lambda count: torch.zeros(count, 8))


class Perceptron(nn.Module):
    """No model of transformers: equal layers, and a mean as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@functools.cache
def _on_two_ranks() -> ModelPlan:
    """A plan that tests share."""
    return shardwise.plan(Perceptron(), mesh="dp=2", step=ROWS)


def test_any_module_is_planned_for_with_a_batch_of_its_own_and_stays_as_it_is() -> None:
    model = Perceptron()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = shardwise.plan(
        model,
        mesh={"dp": 2},
        sharding=StrategyConfig(
            strategy="grad-op", activation_checkpointing="full", recompute_every=2
        ),
        step=PlannedStep(
            optimizer="sgd",
            batch_size=3,
            batch=lambda count: torch.zeros(count, 8),
            step=lambda model, x: model(x).square().mean(),
        ),
    )
    assert plan.model == "Perceptron"
    asked = plan.settings
    assert (asked.strategy, asked.batch_size) == (Strategy.SHARD_GRAD_OP, 3)
    assert (asked.activation_checkpointing, asked.recompute_every) == (Checkpointing.FULL, 2)
    assert plan.ranks[0].optimizer == 0
    assert type(model.layers[0]) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bytes_follow_from_the_shards_and_times_from_a_known_device() -> None:
    machine = MachineConfig(device="h100", ranks_per_host=4)
    plan = shardwise.plan("llama-tiny", mesh="dp=8", step=TINY, machine=machine)
    (rank,) = plan.ranks
    per_rank = plan.numel * 4 / 8
    assert rank.parameters == pytest.approx(per_rank, rel=2e-3)
    assert rank.optimizer == pytest.approx(2 * per_rank, rel=2e-3)
    assert rank.ranks == 8
    assert sum(plan.to_json()["ranks"][0]["bytes"].values()) == plan.peak
    # gathered twice, reduced once
    assert sum(plan.bytes_sent.values()) > 2 * plan.numel * 4 * 7 / 8
    assert plan.step is not None
    assert plan.step.tokens_per_second == pytest.approx(8 * 16 / plan.step.seconds)
    assert plan.available is not None
    assert plan.available.source == "h100"
    assert plan.fits is True
    assert plan.machine == "h100, nvlink4 inside 2 hosts of 4, ib-400 between"
    assert (plan.settings.device_type, plan.settings.backend) == (devices.KNOWN, devices.NCCL.name)
    slower = "; published trainings were 12 to 32% slower than plans of this kind"
    assert speed(plan).endswith(slower)


@pytest.mark.parametrize(
    ("device", "products", "mesh", "is_far"),
    [
        ("a100", "as-stored", "dp=2", False),
        ("a100", "float8", "dp=2", True),
        ("h200", "as-stored", "dp=2", True),
        ("h200", "float8", "dp=2,tp=2", False),
    ],
)
def test_a_plan_says_if_its_kind_was_far_from_published_trainings(
    device: str, products: str, mesh: str, is_far: bool
) -> None:
    settings = Settings(mesh=WantedMesh.parse(mesh), products=Products(products))
    assert bool(observed_error(find_machine(MachineConfig(device=device)), settings)) is is_far


def test_sequences_have_the_usual_length_unless_the_model_is_shorter() -> None:
    assert shardwise.plan("llama-tiny", mesh="dp=1").settings.seq_length == 1024
    with pytest.raises(SettingsError, match="at most 1,024, the positions of llama-tiny"):
        shardwise.plan("llama-tiny", mesh="dp=1", step=PlannedStep(seq_length=1025))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"mesh": "dp=2,tp=3"}, MeshError, "a tp that divides the 4 attention heads"),
        ({"mesh": "pp=2"}, MeshError, "among dp_replicate, dp"),
        ({"step": PlannedStep(batch_size=0)}, SettingsError, "batch_size: found 0, expected 1"),
        ({"available": -5}, SettingsError, "available: found -5, expected bytes, 1 or more"),
        ({"step": PlannedStep(optimizer="no:sgd")}, SettingsError, "optimizer: found no:sgd"),
        ({"machine": MachineConfig(device="h1000")}, MachineError, "h100"),
        ({"machine": MachineConfig(device="h100", link="carrier-pigeon")}, MachineError, "ib-400"),
        (
            {"machine": MachineConfig(device="h100", device_file=Path("x.toml"))},
            MachineError,
            "one of the two",
        ),
    ],
)
def test_what_cannot_be_planned_for_is_refused(
    values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shardwise.plan("llama-tiny", **{"step": TINY, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "zero9"}, "--strategy: found zero9, expected one of full"),
        ({"param_dtype": "fp16"}, "--param-dtype: found fp16, expected one of fp32, bf16"),
        ({"activation_checkpointing": "some"}, "one of none, full, selective, op, offload"),
        ({"collective_wire": "int9"}, "--wire: found 'int9', expected fp32, bf16"),
    ],
)
def test_names_that_stand_for_nothing_are_refused_at_once(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        StrategyConfig(**values)


def test_without_tensor_parallel_styles_a_mesh_with_tp_is_refused() -> None:
    with pytest.raises(MeshError, match="Perceptron, which has no tensor parallel plan"):
        shardwise.plan(Perceptron(), mesh="dp=2,tp=2", step=ROWS)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_as_in_a_training(kind: Any) -> None:
    model = nn.Sequential(kind(10, 8, sparse=True), Perceptron())
    tokens = PlannedStep(batch=lambda count: torch.zeros(count, 4, dtype=torch.long))
    with pytest.raises(SettingsError, match=r"model: found module '0' with sparse gradients.*den"):
        shardwise.plan(model, mesh="dp=2", step=tokens)
    model[0].weight.requires_grad_(False)  # nothing is to be reduced then
    assert shardwise.plan(model, mesh="dp=2", step=tokens).peak > 0


def test_a_token_counts_for_its_own_experts_only(tmp_path: Path) -> None:
    def activations(experts: int) -> int:
        config = MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=experts,
            num_experts_per_tok=2,
        )
        folder = tmp_path / str(experts)
        config.save_pretrained(folder)
        plan = shardwise.plan(str(folder), mesh="dp=1", step=PlannedStep(seq_length=128))
        assert not plan.formulas
        return plan.ranks[0].most[Memory.ACTIVATIONS]

    assert activations(8) == pytest.approx(activations(2), rel=0.02)


@pytest.mark.parametrize("text", ["{", '{"version": 99}', "\0"])
def test_a_damaged_calibration_stops_no_plan_that_does_not_need_it(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    try:
        plan = shardwise.plan(Perceptron(), mesh="dp=1", step=ROWS)
        with pytest.raises(MachineError, match=re.escape(str(path))):
            find_machine(MachineConfig(device="cpu"))
        assert find_machine(MachineConfig(device="h100")) is not None
    finally:
        path.unlink()
    assert plan.step is None
    (message,) = caplog.messages
    assert str(path) in message
    assert message.endswith("the plan goes on without predicted times")


def test_ranks_on_cpus_share_what_is_free_and_take_more_than_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda device: 3 << 10)
    plan = shardwise.plan(Perceptron(), mesh="dp=3", step=ROWS)
    assert plan.available == Available(nbytes=1 << 10, source="free on this host, over 3 ranks")
    assert plan.reserved == round(PROCESS_FACTOR * plan.peak)
    assert plan.needed > plan.peak
    assert plan.fits is False


def test_links_are_named_where_they_are_used() -> None:
    machine = find_machine(MachineConfig(device="a100", link="ethernet-100", ranks_per_host=4))
    assert machine is not None
    words = {}
    for mesh in ("dp=1", "dp=4", "dp=8"):
        settings = on_machine(Settings(mesh=WantedMesh.parse(mesh)), machine)
        words[mesh] = machine_in_words(machine, settings)
    assert words == {
        "dp=1": "a100",
        "dp=4": "a100, nvlink3",
        "dp=8": "a100, nvlink3 inside 2 hosts of 4, ethernet-100 between",
    }


def test_the_page_has_the_plan_and_the_layout(tmp_path: Path) -> None:
    path = _on_two_ranks().to_html(tmp_path / "plan.html")
    html = path.read_text()
    assert "<h2>Plan</h2>" in html
    assert "layers.0..2" in html
    assert re.search(r"<title>Perceptron on dp=2</title>", html)


def test_the_fastest_that_fits_is_planned_in_full() -> None:
    machine = find_machine(MachineConfig(device="h100"))
    assert machine is not None
    settings = Settings(mesh=WantedMesh.parse("dp=2"), batch=lambda count: torch.zeros(count, 8))
    available = Available(nbytes=4 << 20, source="--fit")
    plan = make_fit(of_module(Perceptron()), settings, machine, available)
    assert plan.fits
    assert any(each.fits for each in plan.alternatives)
    found = json.loads(json.dumps(plan.to_json()))
    assert found["fits"] is True
    assert found["alternatives"][0]["tokens_per_second"] > 0
    assert "alternative" in str(plan)


def test_many_ranks_on_cpus_are_rehearsed_with_plain_collectives() -> None:
    def transport(mesh: str, device: str | None = None, asked: str = "auto") -> str:
        settings = Settings(mesh=WantedMesh.parse(mesh), transport=asked)
        machine = None if device is None else find_machine(MachineConfig(device=device), 17)
        return on_machine(settings, machine).transport

    assert transport("dp=16") == "auto"
    assert transport("dp=17") == "collectives"
    assert transport("dp=17", asked="c10d") == "c10d"
    assert transport("dp=17", device="h100") == "auto"
    many = shardwise.plan(Perceptron(), mesh="dp=17", step=ROWS)
    assert "Plain collectives" not in str(_on_two_ranks())
    assert "Plain collectives among 17 ranks on CPUs" in " ".join(str(many).split())


def test_errors_after_a_plan_are_not_those_of_a_rank() -> None:
    before = sys.excepthook
    shardwise.plan(Perceptron(), mesh="dp=2", step=ROWS)
    assert sys.excepthook is before


def test_ranks_whose_shards_differ_are_kinds_of_their_own() -> None:
    def plan(mesh: str, strategy: str) -> Any:
        return shardwise.plan(
            Perceptron(), mesh=mesh, sharding=StrategyConfig(strategy=strategy), step=ROWS
        )

    even, uneven = plan("dp=4", "full"), plan("dp_replicate=2,dp_shard=3", "hybrid")
    assert [rank.ranks for rank in even.ranks] == [4]
    # 8 rows over 3 ranks are 3, 3 and 2; each of 3 layers has 8 weights and a bias in a row.
    assert [(rank.ranks, rank.parameters) for rank in uneven.ranks] == [(4, 324), (2, 216)]
    # Two states, and a count of steps for each of 6 parameters.
    assert [rank.optimizer for rank in uneven.ranks] == [2 * 324 + 24, 2 * 216 + 24]
    assert uneven.ranks[0].peak > uneven.ranks[1].peak
    json_ranks = uneven.to_json()["ranks"]
    assert [each["bytes"]["parameters"] for each in json_ranks] == [324, 216]


def test_no_more_than_three_kinds_of_ranks_are_told_apart() -> None:
    model = nn.ParameterList([torch.ones(rows, 2) for rows in (3, 5, 7, 11, 16)])
    settings = Settings(mesh=WantedMesh.parse("dp=16"), batch=torch.ones)
    kinds = kinds_of_ranks(of_module(model), settings)
    assert next(iter(kinds)) == 0
    assert sum(kinds.values()) == 16
    assert len(kinds) == 3

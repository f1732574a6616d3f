"""Models to plan for: by name, from files, from code, and any module."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.frontends.blocks import shard_blocks
from shardwise.frontends.strategies import DATA, TENSOR
from shardwise.insight.blueprint import Blueprint, apply_tensor_parallelism
from shardwise.insight.planning.models import find_model, load_object, of_module
from shardwise.insight.planning.presets import LLAMAS, ModelError, find_settings
from tests.worlds import on_processes


def _numel(blueprint: Blueprint) -> int:
    return sum(p.numel() for p in blueprint.model.parameters())


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def no_module() -> int:
    return 3


def failing() -> nn.Module:
    raise RuntimeError("no such file")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-8b", 8.03), ("llama-70b", 70.55), ("llama2-13b", 13.02), ("vit-huge", 0.632)],
)
def test_published_models_have_their_published_sizes(name: str, billions: float) -> None:
    blueprint = find_model(name)
    assert _numel(blueprint) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert all(p.is_meta for p in blueprint.model.parameters())


def test_a_small_llama_has_the_vocabulary_of_bytes() -> None:
    blueprint = find_model("llama-tiny")
    assert blueprint.model.get_input_embeddings().weight.shape == (264, 128)  # type: ignore[operator]
    assert len(blueprint.blocks) == LLAMAS["llama-tiny"]["num_hidden_layers"]
    assert blueprint.heads["attention heads"] == 4
    assert "model.layers.0.mlp.up_proj" in blueprint.tensor_parallel


def test_a_function_in_code_is_a_model() -> None:
    blueprint = find_model(f"{__name__}:two_layers")
    assert _numel(blueprint) == 40
    assert all(p.is_meta for p in blueprint.model.parameters())


@pytest.mark.parametrize("name", ["{}:two", "{}.two", "{}::two", "{}:two()", "{file}:two"])
def test_a_function_in_code_has_each_name_that_is_likely_to_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = tmp_path / "a_file_of_mine.py"
    file.write_text("from torch.nn import Linear\n\n\ndef two():\n    return Linear(3, 4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    assert _numel(find_model(name.format(file.stem, file=file))) == 16
    with pytest.raises(ModelError, match=f"expected {file}:two$"):
        find_model(str(file))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-70", "did you mean llama-70b?"),
        ("no.such:model", "No module named 'no'"),
        (f"{__name__}:nobody", "nobody"),
        (f"{__name__}:no_module", "makes int, expected an nn.Module"),
        (f"{__name__}:failing", "raises RuntimeError: no such file"),
        (f"{__name__}:", f"expected {__name__}:two_layers or "),
        (__name__, f"expected {__name__}:two_layers or "),
        ("nowhere.py:build", "there is no "),
    ],
)
def test_a_model_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ModelError, match="expected") as raised:
        find_model(name)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "expected a JSON object"),
        ("{}", 'with no "model_type"'),
        ("[" * 50_000, "no JSON"),
        ('{"model_type": ' + "[" * 500 + "]" * 500 + "}", "nested too deeply"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "expected 1 to 10,000"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ModelError) as raised:
        find_settings(str(file))
    assert message in str(raised.value)


def test_a_configuration_file_is_a_model(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model_type": "gpt2", "n_layer": 3, "n_embd": 16, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert len(find_model(str(tmp_path)).blocks) == 3


def test_any_module_is_sharded_by_its_repeated_blocks() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(8, 8), *(nn.TransformerEncoderLayer(8, 2) for _ in range(3))
        )
    blueprint = of_module(model)
    assert blueprint.name == "Sequential"
    assert list(blueprint.blocks) == list(model)[1:]
    assert of_module(blueprint) is blueprint


def test_an_object_inside_a_class_can_be_named() -> None:
    assert load_object("torch.nn:Linear.forward") is nn.Linear.forward


# -- tensor parallelism ----------------------------------------------------------------------------

#: Kinds of models of transformers -> settings beside the common ones.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "qwen3": {"head_dim": 8},  # norms of each head
    "gemma2": {"head_dim": 8},  # a scaled embedding that is the head too, and capped logits
    "olmo2": {},  # norms of all heads at once
    "phi3": {"pad_token_id": 0},  # fused projections
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},  # LayerNorm
    "mixtral": {"num_local_experts": 2},  # experts, which all ranks have in full
}


def _small(kind: str) -> Blueprint:
    config = AutoConfig.for_model(
        kind,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=48,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        **KINDS[kind],
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return of_module(model)


def _losses(model: Any, batches: torch.Tensor) -> list[float]:
    """Train on batches, ``(steps, samples, length)``; return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
@on_processes(4)
def test_training_with_tensor_parallelism_has_the_losses_of_one_process(
    rank: int, world_size: int, kind: str
) -> None:
    batches = torch.randint(48, (3, 2, 10), generator=torch.Generator().manual_seed(1))
    expected = _losses(_small(kind).model, batches)
    for data, tensor in ((1, 4), (2, 2)) if kind == "llama" else ((2, 2),):
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=(DATA, TENSOR))
        blueprint = _small(kind)
        apply_tensor_parallelism(blueprint.model, mesh[TENSOR], blueprint.tensor_parallel)
        shard_blocks(
            blueprint.model,
            blueprint.blocks,
            mesh=mesh[DATA],
            reshard_after_forward=True,
            precision=MixedPrecisionPolicy(),
        )
        mine = batches.chunk(data, dim=1)[mesh.get_local_rank(DATA)]
        with loss_parallel():
            found = torch.tensor(_losses(blueprint.model, mine))
        dist.all_reduce(found)
        assert (found / world_size).tolist() == pytest.approx(expected, rel=1e-5), (data, tensor)

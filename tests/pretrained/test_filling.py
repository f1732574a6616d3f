"""What ``fill`` reads, initializes and reports, and what it says when files do not fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.base.errors import CheckpointError
from shardwise.pretrained import LoadReport, build, fill, filling
from tests.harness import run_ranks
from tests.pretrained.families import save_family
from tests.pretrained.small import assert_same, full_tensors, save_llama

transformers = pytest.importorskip("transformers")


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def test_names_are_reported_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without sharding: a model may be filled as it is."""
    save_llama(tmp_path)

    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.norm.weight"]
        weights["extra"] = torch.ones(2)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # of old files

    _edit(tmp_path, change)
    model = build(tmp_path)
    assert fill(model, tmp_path) == LoadReport(("model.norm.weight",), ("extra",))
    assert len(caplog.records) == 2
    assert "not in the files, and initialized: model.norm.weight" in caplog.text
    assert "in the files, and not in the model: extra" in caplog.text
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert_same(full_tensors(model), full_tensors(plain))


def _fills_with_names(rank: int, world_size: int, folder: Path) -> LoadReport:
    model = build(folder)
    inner = model.model.layers[0].mlp
    inner.up_proj = nn.ModuleDict({"base": inner.up_proj, "own": _meta_linear()})
    inner.up_proj.forward = lambda x: inner.up_proj["base"](x)
    shardwise.fully_shard(model.model.layers[1])
    shardwise.fully_shard(model)
    name = "model.layers.0.mlp.up_proj"
    initialized = []

    def init(module: nn.Module) -> None:
        initialized.append(type(module).__name__)
        for parameter in module.parameters(recurse=False):
            assert not isinstance(parameter, DTensor)
            nn.init.constant_(parameter, 3)
        if hasattr(module, "inv_freq"):
            nn.init.constant_(module.inv_freq, 1)
            nn.init.constant_(module.original_inv_freq, 1)

    report = fill(model, folder, names={f"{name}.base.weight": f"{name}.weight"}, init=init)
    assert sorted(initialized) == ["Linear", "LlamaRotaryEmbedding"]
    found = full_tensors(model)
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(found.pop(f"{name}.base.weight"), weights.pop(f"{name}.weight"))
    assert found[f"{name}.own.weight"].eq(3).all()
    for each, value in weights.items():
        assert torch.equal(found[each], value)
    return report


def _meta_linear() -> nn.Linear:
    return nn.Linear(2, 3, bias=False, device="meta")


def test_other_names_and_another_initialization_as_adapters_need(tmp_path: Path) -> None:
    save_llama(tmp_path)
    own = ("model.layers.0.mlp.up_proj.own.weight",)
    assert run_ranks(_fills_with_names, 2, tmp_path) == [LoadReport(own)] * 2


def _reads_experts_in_part(rank: int, world_size: int, folder: Path) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError(f"read in full: {args}")

    filling._read_full = never
    model = shardwise.from_pretrained(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert_same(full_tensors(model), full_tensors(plain))


def test_no_rank_reads_all_experts(tmp_path: Path) -> None:
    save_family("mixtral", tmp_path)
    assert any(".experts.2." in name for name in load_file(tmp_path / "model.safetensors"))
    run_ranks(_reads_experts_in_part, 2, tmp_path)


def _differs_by_rank(rank: int, world_size: int, folder: Path) -> list[float]:
    torch.manual_seed(rank)
    logging.disable(logging.WARNING)
    model = shardwise.from_pretrained(
        folder, model_class=transformers.AutoModelForSequenceClassification
    )
    after = torch.rand(2).tolist()
    torch.manual_seed(rank)
    assert torch.rand(2).tolist() == after  # generators go on where they were
    score = model.score.weight.full_tensor()
    assert 0.005 < score.std().item() < 0.05
    bias_like = dict(model.named_buffers())["model.rotary_emb.inv_freq"]
    return [*score.flatten().tolist(), *bias_like.tolist()]


def test_ranks_with_other_seeds_initialize_one_model(tmp_path: Path) -> None:
    save_llama(tmp_path)
    first, second = run_ranks(_differs_by_rank, 2, tmp_path)
    assert first == second
    half = len(first) // 2
    assert first[:half] != first[half:]


def _damage(name: str, folder: Path) -> None:
    if name == "shape":
        _edit(folder, lambda w: w.update({"lm_head.weight": torch.ones(3, 16)}))
    elif name == "expert":
        _edit(folder, lambda w: w.pop("model.layers.0.mlp.experts.1.gate_proj.weight"))
    elif name == "short":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
    elif name == "header":
        (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    elif name == "no weights":
        (folder / "model.safetensors").unlink()
    elif name == "index":
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        names = {"lm_head.weight": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("shape", r"lm_head.weight: found shape [3, 16], expected [32, 16]"),
        ("short", "model.safetensors"),
        ("header", "model.safetensors"),
        ("no weights", "found no checkpoint"),
        ("index", "model-00002-of-00002.safetensors"),
    ],
)
def test_every_rank_raises_the_same(tmp_path: Path, damage: str, message: str) -> None:
    save_llama(tmp_path)
    _damage(damage, tmp_path)
    outcomes = run_ranks(_loads, 2, tmp_path, expect_failures=True)
    for outcome in outcomes:
        assert outcome.error is not None
        last = outcome.error.strip().splitlines()[-1]
        assert last.startswith("shardwise.base.errors.CheckpointError: loading")
        assert message in last


def _loads(rank: int, world_size: int, folder: Path) -> None:
    shardwise.from_pretrained(folder)


def _one_rank_fails(rank: int, world_size: int, folder: Path) -> str:
    name = folder if rank == 0 else folder / "elsewhere"
    with pytest.raises(CheckpointError) as raised:
        shardwise.from_pretrained(name)
    return str(raised.value)


def test_a_folder_that_one_rank_lacks_ends_all(tmp_path: Path) -> None:
    save_llama(tmp_path)
    for message in run_ranks(_one_rank_fails, 2, tmp_path):
        assert "rank 1" in message
        assert "elsewhere" in message


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save_family("qwen3_moe", tmp_path)
    _damage("expert", tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.gate_up_proj"):
        fill(build(tmp_path), tmp_path)


def test_only_models_of_transformers_are_filled(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="found a Linear, expected a transformers model"):
        fill(nn.Linear(2, 2), tmp_path)


def _is_hybrid(rank: int, world_size: int, folder: Path) -> None:
    mesh = shardwise.init_mesh(replicate=2, shard=2)
    model = shardwise.from_pretrained(
        folder, mesh=mesh, param_dtype=torch.bfloat16, reshard_after_forward=False
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert_same(full_tensors(model), full_tensors(plain))
    tokens = torch.arange(8).view(1, 8)
    logits = model(input_ids=tokens).logits
    assert logits.dtype == torch.bfloat16
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert {each.grad.dtype for each in model.parameters()} == {torch.float32}


def test_hybrid_meshes_and_other_compute_dtypes(tmp_path: Path) -> None:
    save_llama(tmp_path)
    run_ranks(_is_hybrid, 4, tmp_path)

"""Models of transformers and adapters of peft are published under the names that engines know."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import shardwise
from shardwise.base.errors import CheckpointError
from tests.harness import run_ranks
from tests.pretrained.test_lora import KINDS
from tests.weights.names import keep_names_in

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="needs peft: install .[ecosystem]")

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs

_SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _make(family: str, **settings: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, **_SMALL, **settings)
    return transformers.AutoModelForCausalLM.from_config(config)


def _adapted(base: Any, kind: str) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **KINDS[kind])
    adapted = get_peft_model(base, config)
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_" in name:
                param.normal_()
    return adapted


def _shard(model: Any) -> Any:
    for layer in model.model.layers:
        shardwise.fully_shard(layer)
    return shardwise.fully_shard(model)


def _assert_read(expected: dict[str, torch.Tensor], at: str | None) -> None:
    found = dict(shardwise.subscribe("policy", at=at))
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert torch.equal(each, expected[name]), name


def _publishes_experts(rank: int, world_size: int, folder: Path, to: str | None) -> None:
    keep_names_in(folder / "names")
    model = _shard(_make("mixtral", num_local_experts=3))
    with shardwise.publish(model, "policy", to=to) as weights:
        for step in range(3):
            shardwise.save_pretrained(model, folder / str(step))
            _assert_read(load_file(folder / str(step) / "model.safetensors"), to)
            dist.barrier()
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(step + 1)
            weights.update()
        dist.barrier()


@pytest.mark.parametrize("to", [None, "folder"])
def test_a_published_model_has_the_names_and_tensors_of_its_files(
    tmp_path: Path, to: str | None
) -> None:
    run_ranks(_publishes_experts, 2, tmp_path, None if to is None else str(tmp_path / to))


def _publishes_adapters(rank: int, world_size: int, names: str) -> None:
    from peft import get_peft_model_state_dict

    keep_names_in(names)
    for kind in KINDS:
        twin = _adapted(_make("llama"), kind)
        base = _make("llama")
        for layer in base.model.layers:
            shardwise.fully_shard(layer)
        model = shardwise.fully_shard(_adapted(base, kind))
        with shardwise.publish(model, "policy"):
            expected = get_peft_model_state_dict(twin, save_embedding_layers=False)
            _assert_read(expected, None)
            dist.barrier()
        dist.barrier()
        with shardwise.publish(model, "policy", adapters="merged"):
            _assert_read(copy.deepcopy(twin).merge_and_unload().state_dict(), None)
            dist.barrier()
        dist.barrier()


def test_adapters_are_published_alone_or_merged(tmp_path: Path) -> None:
    run_ranks(_publishes_adapters, 2, str(tmp_path / "names"))


def test_adapters_that_would_untie_weights_are_not_merged() -> None:
    model = _adapted(_make("llama", tie_word_embeddings=True), "embedding")
    with pytest.raises(CheckpointError, match=r"adapters on a weight that is tied to .*lm_head"):
        shardwise.publish(model, "policy", adapters="merged")
    with shardwise.publish(model, "policy"):
        assert len(dict(shardwise.subscribe("policy"))) == 2 + 2 * 2


def test_merged_adapters_follow_a_step() -> None:
    model = _adapted(_make("llama"), "plain")
    with shardwise.publish(model, "policy", adapters="merged", dtype=torch.bfloat16) as weights:
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_" in name:
                    param.mul_(2)
        weights.update()
        merged = copy.deepcopy(model).merge_and_unload().to(torch.bfloat16)
        _assert_read(merged.state_dict(), None)


@pytest.mark.parametrize(
    ("to", "updates"),
    [(None, 40), ("folder", 20), pytest.param(None, 200, marks=pytest.mark.long)],
)
def test_a_reader_computes_the_logits_of_the_trainer_after_every_update(
    tmp_path: Path, to: str | None, updates: int
) -> None:
    place = None if to is None else str(tmp_path / to)
    trained, engine = _make("llama"), _make("llama")
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    with shardwise.publish(trained, "policy", to=place) as weights:
        subscription = shardwise.subscribe("policy", at=place)
        for _ in range(updates):
            trained(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.update()
            engine.load_state_dict(dict(subscription))
            with torch.no_grad():
                assert torch.equal(engine(tokens).logits, trained(tokens).logits)

"""``save_pretrained`` of sharded models, beside that of ``transformers``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardwise
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.entries import TensorInfo
from shardwise.pretrained.api import _planned
from tests.harness import run_ranks
from tests.pretrained.small import LLAMA, assert_same, full_tensors

pytest.importorskip("transformers")

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "image_size": 8}
ENCODER = {**LLAMA, "max_position_embeddings": 16}

# What differs between a model and its files: nothing; ties; experts, one by one; names; ties of
# three; ties of a bias; a head that is not for text; two-dimensional kernels.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("AutoModelForCausalLM", "llama", LLAMA),
    "llama-tied": ("AutoModelForCausalLM", "llama", {**LLAMA, "tie_word_embeddings": True}),
    "mixtral": ("AutoModelForCausalLM", "mixtral", {**LLAMA, "num_local_experts": 3}),
    "qwen2_moe": (
        "AutoModelForCausalLM",
        "qwen2_moe",
        {
            **LLAMA,
            "num_experts": 3,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
    ),
    "gpt2": ("AutoModelForCausalLM", "gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    "t5": (
        "AutoModelForSeq2SeqLM",
        "t5",
        {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 32},
    ),
    "bert": ("AutoModelForMaskedLM", "bert", ENCODER),
    "vit": ("AutoModelForImageClassification", "vit", {**VISION, "patch_size": 4}),
}


def _make(name: str) -> Any:
    import transformers

    kind, family, settings = FAMILIES[name]
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, **settings)
    return getattr(transformers, kind).from_config(config)


def _sharded(model: Any) -> Any:
    shardwise.wrap.apply_wrap(model, "auto", shardwise.fully_shard)
    return shardwise.fully_shard(model)


def _saves(rank: int, world_size: int, folder: Path) -> None:
    for name in FAMILIES:
        plain = _make(name)
        if rank == 0:
            plain.save_pretrained(folder / "theirs" / name, max_shard_size=4000)
        model = _sharded(_make(name))
        shardwise.save_pretrained(model, folder / "ours" / name, max_shard_size=4000)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def test_files_have_what_transformers_writes(tmp_path: Path) -> None:
    import transformers

    (tmp_path / "ours").mkdir()
    run_ranks(_saves, 2, tmp_path)
    for name, (kind, _, _) in FAMILIES.items():
        ours, theirs = (tmp_path / each / name for each in ("ours", "theirs"))
        assert_same(_weights(ours), _weights(theirs))
        for file in ("config.json", "generation_config.json"):
            assert (ours / file).exists() == (theirs / file).exists(), f"{name}: {file}"
            if (ours / file).exists():
                assert _json(ours / file) == _json(theirs / file), f"{name}: {file}"
        loaded, told = getattr(transformers, kind).from_pretrained(ours, output_loading_info=True)
        assert not any(told.values()), f"{name}: {told}"
        assert_same(full_tensors(loaded), full_tensors(_make(name)))


def _json(file: Path) -> Any:
    return json.loads(file.read_text())


def _goes_round(rank: int, world_size: int, folder: Path) -> None:
    for name in ("mixtral", "llama-tied"):
        model = shardwise.from_pretrained(folder / "theirs" / name)
        shardwise.save_pretrained(model, folder / "round" / name)


def test_what_was_loaded_into_shards_is_saved_as_it_was(tmp_path: Path) -> None:
    for name in ("mixtral", "llama-tied"):
        _make(name).save_pretrained(tmp_path / "theirs" / name)
    (tmp_path / "round").mkdir()
    run_ranks(_goes_round, 2, tmp_path)
    for name in ("mixtral", "llama-tied"):
        theirs, ours = (tmp_path / each / name for each in ("theirs", "round"))
        assert_same(_weights(ours), _weights(theirs))
        assert _json(ours / "config.json") == _json(theirs / "config.json")


class _FailingTokenizer:
    def save_pretrained(self, folder: str) -> None:
        raise OSError(28, "No space left on device", folder)


def _fails_alike(rank: int, world_size: int, folder: Path) -> None:
    model = _sharded(_make("mixtral"))
    with pytest.raises(CheckpointError, match=r"rank 0: .*No space left on device"):
        shardwise.save_pretrained(model, folder / "full", tokenizer=_FailingTokenizer())
    with pytest.raises(TypeError, match=r"found a Linear, expected a model of transformers"):
        shardwise.save_pretrained(torch.nn.Linear(2, 2), folder / "linear")


def test_an_error_is_raised_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    run_ranks(_fails_alike, 2, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_is_saved_beside_the_model(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "shard": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    model = _make("llama")
    shardwise.save_pretrained(model, tmp_path / "out", tokenizer=tokenizer)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("a shard")["input_ids"] == [1, 2]
    assert loaded.chat_template == tokenizer.chat_template
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(full_tensors(again), full_tensors(model))


class _Unsteady:
    """A reversal whose result for two weights depends on a third."""

    def groups(self, names: Any) -> list[list[str]]:
        return [["a", "b"]]

    def revert(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "joined" if "c" in weights else "alone"
        return {name: torch.cat([weights["a"], weights["b"]])}


class _Steady(_Unsteady):
    def revert(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = {"joined": torch.cat([weights["a"], weights["b"]])}
        return {**made, "d": weights["c"]} if "c" in weights else made


@pytest.mark.parametrize("make", [_Steady, _Unsteady])
def test_a_conversion_of_a_few_weights_is_that_of_all(make: Callable[[], Any]) -> None:
    weights = {name: TensorInfo("F32", (2,)) for name in "abc"}
    if make is _Unsteady:
        with pytest.raises(CheckpointError, match=r"a, b: transformers converts them to alone"):
            _planned(weights, make())
        return
    plan = _planned(weights, make())
    assert plan.renamed == {"c": "d"}
    assert plan.converted == [(["a", "b"], {"joined": TensorInfo("F32", (4,))})]

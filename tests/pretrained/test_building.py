"""What ``build`` makes of a folder, and what it says about a folder that is not as it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.base.errors import CheckpointError
from shardwise.pretrained import build, fill
from tests.pretrained.small import save_llama

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_llama(tmp_path)
    return tmp_path


def _edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_nothing_is_allocated_and_the_model_is_what_the_folder_says(folder: Path) -> None:
    model = build(folder)
    assert type(model) is transformers.LlamaForCausalLM
    tensors = [*model.parameters(), *model.buffers()]
    assert all(each.is_meta for each in tensors)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert not model.training
    assert model.config.name_or_path == str(folder)


def test_overrides_and_generation_settings_are_kept(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    model = build(folder, attn_implementation="eager", use_cache=False)
    assert model.config.use_cache is False
    assert model.config.to_dict()["use_cache"] is False
    assert model.generation_config.temperature == 0.25


def test_the_class_may_be_chosen(folder: Path) -> None:
    of_tokens = build(folder, model_class=transformers.AutoModelForTokenClassification)
    assert type(of_tokens) is transformers.LlamaForTokenClassification
    bare = build(folder, model_class=transformers.LlamaModel)
    assert type(bare) is transformers.LlamaModel


@pytest.mark.parametrize(
    ("said", "asked", "expected"),
    [
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        (None, None, torch.float32),  # that of the weights
        ("float32", torch.float16, torch.float16),
    ],
)
def test_dtypes(folder: Path, said: str | None, asked: Any, expected: torch.dtype) -> None:
    _edit(folder, dtype=said, torch_dtype=None)
    model = build(folder, dtype=asked)
    assert {each.dtype for each in model.parameters()} == {expected}
    assert model.config.dtype == expected


def test_what_a_model_keeps_in_float32_stays_in_it(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    model = build(tmp_path, dtype=torch.float16)
    kept = {name for name, each in model.named_parameters() if each.dtype == torch.float32}
    plain = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    same = {name for name, each in plain.named_parameters() if each.dtype == torch.float32}
    assert kept == same
    assert "encoder.block.0.layer.1.DenseReluDense.wo.weight" in kept


@pytest.mark.parametrize("asked", ["int8", "complex64", "float8_e4m3fn", "nonsense", torch.int32])
def test_a_dtype_that_cannot_be_is_named(folder: Path, asked: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype: found .*, expected a floating-point dtype"):
        build(folder, dtype=asked)


def test_weights_that_differ_are_not_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_llama(tmp_path)  # not tied, with a head of its own
    _edit(tmp_path, tie_word_embeddings=True)
    model = build(tmp_path)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert "are not tied: lm_head.weight" in caplog.text
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    caplog.clear()
    model = build(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "no_such_model"},
            "has model_type 'no_such_model', which transformers does",
        ),
        ({"model_type": None}, "found no config.json that names a model_type"),
        ({"model_type": 7}, "found no config.json that names a model_type"),
        ({"architectures": ["NoSuchModel"]}, r"architectures \['NoSuchModel'\].*pass model_class="),
        ({"architectures": ["AutoConfig"]}, "of which transformers has none"),
        ({"architectures": None}, "pass model_class="),
        ({"hidden_size": "wide"}, "transformers cannot use config.json"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "weights are quantized"),
    ],
)
def test_a_configuration_that_cannot_be_is_named(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    _edit(folder, **changes)
    with pytest.raises((ValueError, CheckpointError), match=message) as raised:
        build(folder)
    assert str(folder) in str(raised.value)


def test_code_of_a_folder_is_never_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')\nclass Model: pass\n")
    _edit(folder, auto_map={"AutoConfig": "evil.Model", "AutoModelForCausalLM": "evil.Model"})
    assert type(build(folder)) is transformers.LlamaForCausalLM


def test_a_folder_without_a_configuration_or_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found nothing there"):
        build(tmp_path / "a" / "b" / "c")
    with pytest.raises(CheckpointError, match="found no checkpoint"):
        build(tmp_path)
    save_llama(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"found no config\.json"):
        build(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": "llama"', "\0"])
def test_a_damaged_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"found no config\.json"):
        build(folder)


def test_a_shard_that_the_index_names_is_missing(tmp_path: Path) -> None:
    save_llama(tmp_path, max_shard_size=4000)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    files[1].unlink()
    with pytest.raises((CheckpointError, OSError)) as raised:
        build(tmp_path)
    assert files[1].name in str(raised.value)


def test_a_single_file_wins_over_the_index_of_an_earlier_model(folder: Path) -> None:
    names = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    expected = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    model = build(folder)
    assert not fill(model, folder).missing
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())


def test_files_of_several_dtypes_have_that_of_the_first_name(folder: Path) -> None:
    _edit(folder, dtype=None)
    weights = load_file(folder / "model.safetensors")
    half = {name: each.bfloat16() for name, each in weights.items() if "norm" not in name}
    save_file({**weights, **half}, folder / "model.safetensors", metadata={"format": "pt"})
    found = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert found.dtype == torch.bfloat16
    assert {each.dtype for each in build(folder).parameters()} == {torch.bfloat16}

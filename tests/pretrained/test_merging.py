"""Merging adapters as file work equals ``peft``'s ``merge_and_unload``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.base.errors import CheckpointError
from shardwise.pretrained.merging import ADAPTER_CONFIG, ADAPTER_WEIGHTS, merge_lora
from tests.cli.shell import call

pytest.importorskip("peft", reason="needs peft: install .[ecosystem]")

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs

IDS = torch.arange(12).view(2, 6)


def _llama(folder: Path, dtype: torch.dtype = torch.float32, tied: bool = False) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder, max_shard_size="8KB")
    return folder


def _gpt2(folder: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def with_experts(family: str, folder: Path, **changes: Any) -> Path:
    """A model whose experts are one parameter, which files may have apart."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**EXPERTS[family], **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
#: Stacked when they are loaded, named and stacked in another way, and stored transposed.
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {**_SIZES, "num_local_experts": 3},
    "qwen3_moe": {**_SIZES, "num_experts": 3, "moe_intermediate_size": 8, "head_dim": 8},
    "gpt_oss": {**_SIZES, "num_local_experts": 3, "head_dim": 8, "num_experts_per_tok": 2},
}


def _adapters(base: Path, folder: Path, **settings: Any) -> Any:
    """Write adapters with random values; return the model that has them."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    chosen = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    adapted = get_peft_model(model, LoraConfig(**chosen))
    torch.manual_seed(1)
    for param in adapted.parameters():
        if param.requires_grad:
            param.data.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return adapted.eval()


def _assert_merges_as_peft(base: Path, folder: Path, adapted: Any) -> Any:
    """Return the merged model, as transformers alone loads it."""
    from transformers import AutoModelForCausalLM

    merge_lora(folder, folder.parent / "merged", base, max_shard_size=4096)
    merged, info = AutoModelForCausalLM.from_pretrained(
        folder.parent / "merged", output_loading_info=True
    )
    assert not any(info.values()), info
    expected = adapted.merge_and_unload().state_dict()
    found = merged.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype == expected[name].dtype, name
    return merged.eval()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "lora_alpha": 5, "rank_pattern": {"q_proj": 4}},
        {"use_dora": True},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"lora_bias": True, "target_modules": ["q_proj"]},
        {"bias": "lora_only", "target_modules": ["q_proj"]},
    ],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_merged_weights_equal_those_of_peft(tmp_path: Path, settings: dict[str, Any]) -> None:
    base = _llama(tmp_path / "base")
    adapted = _adapters(base, tmp_path / "adapters", **settings)
    _assert_merges_as_peft(base, tmp_path / "adapters", adapted)


def test_adapters_in_fp32_merge_into_a_base_in_bf16(tmp_path: Path) -> None:
    base = _llama(tmp_path / "base", torch.bfloat16)
    adapted = _adapters(base, tmp_path / "adapters")
    merged = _assert_merges_as_peft(base, tmp_path / "adapters", adapted)
    assert merged.dtype == torch.bfloat16


def test_adapters_in_bf16_merge_as_peft_loads_them(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = _llama(tmp_path / "base", torch.bfloat16)
    folder = tmp_path / "adapters"
    _adapters(base, folder)
    file = folder / ADAPTER_WEIGHTS
    halved = {name: each.to(torch.bfloat16) for name, each in load_file(file).items()}
    save_file(halved, file)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    _assert_merges_as_peft(base, folder, adapted)


def test_weights_stored_transposed_are_merged_transposed(tmp_path: Path) -> None:
    """GPT-2 stores its linear layers as (in, out)."""
    base = _gpt2(tmp_path / "base")
    adapted = _adapters(base, tmp_path / "adapters", fan_in_fan_out=True)
    _assert_merges_as_peft(base, tmp_path / "adapters", adapted)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        {"target_parameters": ["experts.down_proj"], "target_modules": ["q_proj"]},
    ],
    ids=["all-linear", "both", "one"],
)
def test_adapters_on_fused_experts_are_merged(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    base = with_experts(family, tmp_path / "base")
    adapted = _adapters(base, tmp_path / "adapters", **settings)
    _assert_merges_as_peft(base, tmp_path / "adapters", adapted)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == load_file(base / "model.safetensors").keys()


def test_weights_that_are_no_longer_tied_are_written_apart(tmp_path: Path) -> None:
    """``peft`` itself adds the product to both of them; the adapted model does not."""
    from transformers import AutoModelForCausalLM

    base = _llama(tmp_path / "base", tied=True)
    adapted = _adapters(base, tmp_path / "adapters", target_modules=["lm_head", "q_proj"])
    merge_lora(tmp_path / "adapters", tmp_path / "merged", base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    embedding, head = merged.get_input_embeddings().weight, merged.get_output_embeddings().weight
    assert not torch.equal(embedding, head)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits)


def test_the_result_has_the_files_of_the_base_and_the_tokenizer_of_the_adapters(
    tmp_path: Path,
) -> None:
    base = _llama(tmp_path / "base")
    folder = tmp_path / "adapters"
    _adapters(base, folder)
    for where in (base, folder):
        (where / "tokenizer_config.json").write_text(json.dumps({"from": where.name}))
    (base / "generation_config.json").write_text('{"max_length": 7}')
    (base / "tokenizer.json").write_text("{}")
    (folder / "training_args.json").write_text("{}")
    merge_lora(folder, tmp_path / "merged", base)
    names = {file.name for file in (tmp_path / "merged").iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json")
    }
    assert json.loads((tmp_path / "merged/tokenizer_config.json").read_text()) == {
        "from": "adapters"
    }


def _edit(file: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(file)
    for name, tensor in changes.items():
        match = next((each for each in tensors if name in each), name)
        tensors.pop(match, None)
        if tensor is not None:
            tensors[match] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_proj.lora_A": None}, "contains no .*q_proj.lora_A"),
        ({"other": torch.zeros(2)}, "contains an unexpected 'other'"),
        ({"q_proj.lora_A": torch.zeros(2, 15)}, r"found shape \[2, 15\], expected \[2, 16\]"),
        ({"q_proj.lora_B": torch.full((16, 2), torch.nan)}, "not finite"),
    ],
)
def test_damaged_adapters_are_refused_and_nothing_is_left(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    base = _llama(tmp_path / "base")
    folder = tmp_path / "adapters"
    _adapters(base, folder)
    _edit(folder / ADAPTER_WEIGHTS, **changes)
    with pytest.raises(CheckpointError, match=message):
        merge_lora(folder, tmp_path / "merged", base)
    assert {each.name for each in tmp_path.iterdir()} == {"base", "adapters"}


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("init_lora_weights", "pissa", "changed the weights of the base"),
        ("peft_type", "NONSENSE", "found .NONSENSE., expected adapters in layers"),
        ("target_modules", ["nothing"], "cannot be put on LlamaForCausalLM"),
        ("base_model_name_or_path", "../nowhere", "found nothing there"),
    ],
)
def test_configurations_that_cannot_be_merged_are_refused(
    tmp_path: Path, setting: str, value: object, message: str
) -> None:
    base = _llama(tmp_path / "base")
    folder = tmp_path / "adapters"
    _adapters(base, folder)
    file = folder / ADAPTER_CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), setting: value}))
    named = None if setting == "base_model_name_or_path" else base
    with pytest.raises(CheckpointError, match=message):
        merge_lora(folder, tmp_path / "merged", named)


def test_weights_that_files_have_under_former_names_are_merged(tmp_path: Path) -> None:
    """GPT-2 on the Hub has no prefix in front of its names; transformers adds it."""
    base = _gpt2(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    bare = {name.removeprefix("transformer."): each for name, each in tensors.items()}
    save_file(bare, base / "model.safetensors", metadata={"format": "pt"})
    adapted = _adapters(base, tmp_path / "adapters", fan_in_fan_out=True)
    _assert_merges_as_peft(base, tmp_path / "adapters", adapted)


def test_another_model_as_base_is_refused(tmp_path: Path) -> None:
    _adapters(_llama(tmp_path / "base"), tmp_path / "adapters")
    other = _gpt2(tmp_path / "other")
    with pytest.raises(CheckpointError, match="another model"):
        merge_lora(tmp_path / "adapters", tmp_path / "merged", other)


def test_the_command_finds_adapters_of_a_run_and_the_base_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = _llama(tmp_path / "base")
    (tmp_path / "run").mkdir()
    adapted = _adapters(base, tmp_path / "run" / "adapters")

    monkeypatch.chdir(tmp_path)
    assert call("merge-lora", "run", "merged", "--max-shard-size", "4KB") == 0
    assert "wrote merged: " in capsys.readouterr().out
    expected = adapted.merge_and_unload().state_dict()
    found: dict[str, torch.Tensor] = {}
    for file in Path("merged").glob("*.safetensors"):
        found |= load_file(file)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert call("merge-lora", "run", "merged") == 2
    assert "merged exists; give another name, or --force" in capsys.readouterr().err
    assert call("merge-lora", "base", "other") == 1
    assert "expected adapters of peft" in capsys.readouterr().err

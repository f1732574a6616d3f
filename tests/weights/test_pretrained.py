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
from tests.pretrained.test_lora import EXPERTS, KINDS
from tests.pretrained.test_merging import with_experts
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
    config = LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **{**KINDS, **EXPERTS}[kind])
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


def _publishes_experts(rank: int, world_size: int, folder: Path) -> None:
    keep_names_in(folder / "names")
    model = _shard(_make("mixtral", num_local_experts=3))
    in_memory = shardwise.publish(model, "policy")
    in_files = shardwise.publish(model, "policy", to=folder / "published")
    with in_memory, in_files:
        for step in range(3):
            shardwise.save_pretrained(model, folder / str(step))
            expected = load_file(folder / str(step) / "model.safetensors")
            for at in (None, str(folder / "published")):
                _assert_read(expected, at)
            dist.barrier()
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(step + 1)
            in_memory.update()
            in_files.update()
        dist.barrier()


def test_a_published_model_has_the_names_and_tensors_of_its_files(tmp_path: Path) -> None:
    run_ranks(_publishes_experts, 2, tmp_path)


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


def _publishes_adapters_on_experts(rank: int, world_size: int, names: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    keep_names_in(names)
    for family in EXPERTS:
        base = folder / family
        twin = _adapted(AutoModelForCausalLM.from_pretrained(base), family)
        model = AutoModelForCausalLM.from_pretrained(base)
        for layer in model.model.layers:
            shardwise.fully_shard(layer)
        model = shardwise.fully_shard(_adapted(model, family))
        with shardwise.publish(model, "policy", adapters="merged"):
            merged = twin.merge_and_unload()
            if rank == 0:
                merged.save_pretrained(folder / f"{family}-merged")
            dist.barrier()
            _assert_read(load_file(folder / f"{family}-merged" / "model.safetensors"), None)
            dist.barrier()
        dist.barrier()


def test_adapters_on_experts_are_published_as_their_files_have_them(tmp_path: Path) -> None:
    for family in EXPERTS:
        with_experts(family, tmp_path / family)
    run_ranks(_publishes_adapters_on_experts, 2, str(tmp_path / "names"), tmp_path)


def _lora(**settings: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, **{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **settings})


def _with_two_adapters() -> Any:
    from peft import get_peft_model

    model = get_peft_model(_make("llama"), _lora(modules_to_save=["lm_head"]))
    model.add_adapter("other", _lora(target_modules=["v_proj"]))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                param.normal_()
    return model


def test_the_active_adapter_is_what_is_published_and_saved(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, get_peft_model_state_dict

    model = _with_two_adapters()
    for name in ("other", "default"):
        model.set_adapter(name)
        with shardwise.publish(model, "policy"):
            _assert_read(get_peft_model_state_dict(model, adapter_name=name), None)
        with shardwise.publish(model, "policy", adapters="merged") as weights:
            merged = copy.deepcopy(model).merge_and_unload(adapter_names=[name])
            _assert_read(merged.state_dict(), None)
            model.set_adapter("other" if name == "default" else "default")
            with pytest.raises(CheckpointError, match=rf"found \w+ active, expected {name}, as"):
                weights.update()
    model.set_adapter("other")
    _make("llama").save_pretrained(tmp_path / "base")
    model.peft_config["other"].base_model_name_or_path = str(tmp_path / "base")
    shardwise.save_pretrained(model, tmp_path / "saved")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_adapters_are_merged_with_the_scale_that_the_forward_has() -> None:
    model = _adapted(_make("llama"), "plain")
    with shardwise.publish(model, "policy", adapters="merged") as weights:
        _halve(model)
        weights.update()
        _assert_read(copy.deepcopy(model).merge_and_unload().state_dict(), None)
    with pytest.raises(CheckpointError, match=r"q_proj: found adapters scaled by 2, expected 4, "):
        shardwise.publish(model, "policy")


def _halve(model: Any) -> None:
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(0.5)


@pytest.mark.parametrize("kind", ["LoHa", "LoKr", "AdaLora"])
def test_other_kinds_are_merged_with_their_scale_too(kind: str) -> None:
    model = _with_values(_other(kind))
    _halve(model)
    with shardwise.publish(model, "policy", adapters="merged"):
        _assert_read(copy.deepcopy(model).merge_and_unload().state_dict(), None)
    with pytest.raises(CheckpointError, match=r"q_proj: found adapters scaled by"):
        shardwise.publish(model, "policy")


def test_adapters_that_come_later_do_not_disturb_those_that_are_merged() -> None:
    model = _adapted(_make("llama"), "plain")
    with shardwise.publish(model, "policy", adapters="merged") as weights:
        model.add_adapter("late", _lora(target_modules=["k_proj"], modules_to_save=["lm_head"]))
        weights.update()
        merged = copy.deepcopy(model).merge_and_unload(adapter_names=["default"])
        _assert_read(merged.state_dict(), None)
        model.model.model.layers[0].self_attn.q_proj = _make("llama").lm_head
        with pytest.raises(CheckpointError, match=r"q_proj.base_layer.weight: found no such"):
            weights.update()


def _another_alpha(model: Any) -> None:
    model.peft_config["default"].lora_alpha = 99


def _another_rank(model: Any) -> None:
    model.peft_config["default"].rank_pattern = {"q_proj": 3}


def _drawn_at_random(model: Any) -> None:
    model.peft_config["default"].init_lora_weights = "pissa_niter_4"


def _a_trained_base(model: Any) -> None:
    model.model.model.norm.weight.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_another_alpha, r"q_proj: found adapters scaled by 4, expected 49.5"),
        (_another_rank, r"q_proj: found adapters of rank 2, expected 3 as in the configuration"),
        (_drawn_at_random, r"init_lora_weights: found 'pissa_niter_4', expected 'pissa' or"),
        (_a_trained_base, r"model.norm.weight: found a weight of the base that is trained"),
    ],
)
def test_files_of_adapters_that_give_another_model_are_refused(
    tmp_path: Path, change: Any, found: str
) -> None:
    model = _adapted(_make("llama"), "plain")
    with shardwise.publish(model, "policy") as weights:
        change(model)
        with pytest.raises(CheckpointError, match=found):
            weights.update()
    with pytest.raises(CheckpointError, match=found):
        shardwise.save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with shardwise.publish(model, "policy", adapters="merged"):
        _assert_read(copy.deepcopy(model).merge_and_unload().state_dict(), None)


def _several_active(model: Any) -> None:
    model.base_model.set_adapter(["default", "other"])


def _one_elsewhere(model: Any) -> None:
    model.model.model.layers[1].self_attn.q_proj.set_adapter("other")


def _disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()


@pytest.mark.parametrize("form", ["alone", "merged"])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_several_active, "adapters: found default, other active, expected one in all layers"),
        (_one_elsewhere, "adapters: found default, other active, expected one in all layers"),
        (_disabled, "self_attn.q_proj: found adapters that are disabled, expected them enabled"),
    ],
)
def test_what_no_reader_would_compute_is_not_published(change: Any, found: str, form: str) -> None:
    model = _with_two_adapters()
    change(model)
    with pytest.raises(CheckpointError, match=found):
        shardwise.publish(model, "policy", adapters=form)


def test_adapters_that_are_merged_already_are_not_added_again() -> None:
    model = _adapted(_make("llama"), "plain")
    model.merge_adapter()
    with pytest.raises(CheckpointError, match=r"merged into the base, .*call unmerge_adapter"):
        shardwise.publish(model, "policy", adapters="merged")


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (lambda: _lora(layer_replication=[(0, 2), (1, 2)]), "layer_replication: found"),
        (lambda: _other("Vera"), "found the buffer vera_A.default of an adapter, expected"),
        (lambda: _other("OFT"), "found the buffer oft_R.default.rows of an adapter, expected"),
        (lambda: _other("AdaptionPrompt", **_PROMPT), "type ADAPTION_PROMPT, which adds to more"),
        (lambda: _prompts("PromptTuning"), "found type PROMPT_TUNING, which adds to more than"),
        (lambda: _prompts("PrefixTuning"), "found type PREFIX_TUNING, which adds to more than"),
        (lambda: _other("Shira"), "adapters of type .*SHIRA on a model without memory; publish"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused_by_name(config: Any, found: str) -> None:
    from peft import get_peft_model

    model = get_peft_model(_make("llama"), config())
    with pytest.raises(CheckpointError, match=found):
        shardwise.publish(model, "policy", adapters="merged")


def test_prompts_that_are_disabled_are_not_published() -> None:
    from peft import get_peft_model

    model = get_peft_model(_make("llama"), _prompts("PromptTuning"))
    refused = pytest.raises(CheckpointError, match="found them disabled, expected them enabled")
    with shardwise.publish(model, "policy") as weights, model.disable_adapter(), refused:
        weights.update()


#: Kinds of adapters, and what each needs.
OTHERS: dict[str, dict[str, Any]] = {
    "AdaLora": {"total_step": 10},
    "HRA": {},
    "IA3": {"feedforward_modules": []},
    "LNTuning": {"target_modules": ["input_layernorm"]},
    "LoHa": {},
    "LoKr": {},
    "OFT": {},
    "Shira": {"r": 2},
    "VBLoRA": {"vector_length": 4, "num_vectors": 8, "topk": 2},
    "Vera": {"r": 2},
}
_SAVED_APART = ("OFT", "Shira", "Vera")
_PROMPT: dict[str, Any] = {"adapter_len": 2, "adapter_layers": 1, "target_modules": None}


def _other(kind: str, **more: Any) -> Any:
    import peft

    own = {**OTHERS.get(kind, {}), **more}
    given = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **own}
    return getattr(peft, f"{kind}Config")(**given)


def _prompts(kind: str) -> Any:
    import peft

    return getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=3)


def _with_values(config: Any) -> Any:
    from peft import get_peft_model

    model = get_peft_model(_make("llama"), config)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.normal_(std=0.1)
    return model


@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_of_every_kind_are_published_as_peft_saves_and_merges_them(kind: str) -> None:
    from peft import get_peft_model_state_dict

    model = _with_values(_other(kind))
    with shardwise.publish(model, "policy"):
        _assert_read(get_peft_model_state_dict(model), None)
    if kind not in _SAVED_APART:
        with shardwise.publish(model, "policy", adapters="merged") as weights:
            _assert_read(copy.deepcopy(model).merge_and_unload().state_dict(), None)
            weights.update()
            _assert_read(copy.deepcopy(model).merge_and_unload().state_dict(), None)


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

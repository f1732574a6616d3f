"""Trainings with ``--lora`` have the losses of a plain loop of peft, and write what it loads."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.app.recipes import lm
from shardwise.app.recipes.core.plan import plan_training
from shardwise.app.recipes.text.config import LmConfig, Packing
from shardwise.app.recipes.text.published import (
    BaseFormat,
    Frozen,
    LoraSettings,
    fingerprint,
    parse_lora,
)
from shardwise.base import devices
from shardwise.base.errors import CheckpointError, UserError
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.tools.convert import convert
from shardwise.elastic.world import World
from shardwise.insight.planning.api import Rehearsed
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.sharding import Gathers, PrecisionName
from shardwise.insight.schema.training import Existing
from tests.cli.shell import call
from tests.pretrained.test_merging import with_experts
from tests.recipes.running import as_after, train
from tests.recipes.small import losses, small_config, validation
from tests.recipes.text.plain import plain_losses, tuned
from tests.recipes.text.published import publish, write_lines
from tests.recipes.text.test_finetuning import chat_batches
from tests.worlds import Ranks

pytest.importorskip("peft", reason="needs peft: install .[train]")

# What peft and transformers warn of in this process is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


# Shards of 16 elements or a multiple: torch's fused AdamW rounds what is left over of these, at the
# end of a tensor, in another way, and shards end where full tensors do not.
LORA = "r=16,alpha=32"


def adapting(folder: Path, published: Path, out: str, **changes: Any) -> LmConfig:
    chat = (str(published / "chats.jsonl"),)
    given = {"lora": LORA, "frozen": Frozen.GATHER, **changes}
    return tuned(folder, published / "model", out, chat=chat, **given)


def test_two_ranks_have_the_losses_of_peft_bit_for_bit(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    configs = [
        adapting(tmp_path, published, "gathered"),
        adapting(tmp_path, published, "kept", frozen=Frozen.KEEP, accumulate=2),
        adapting(tmp_path, published, "padded", packing=Packing.PADDED, frozen=None),
    ]
    ranks(train, 2, *configs)
    for config in configs:
        expected = plain_losses(config, 2, chat_batches(config, 2))
        assert [loss for _, loss, _ in losses(config)] == expected, config.train.output.out.name


def test_text_is_generated_from_a_run_and_its_adapters_on_the_base_that_they_name(
    ranks: Ranks, tmp_path: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    config = adapting(tmp_path, published, "run", steps=2, sample_tokens=6)
    ranks(train, 2, config)
    files = config.files
    capsys.readouterr()
    adapted = AutoPeftModelForCausalLM.from_pretrained(files.adapters).merge_and_unload()
    tokenizer = AutoTokenizer.from_pretrained(files.adapters)
    tokens = tokenizer("rank shard", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = adapted(tokens).logits[0, -1]
    words = ("--prompt", "rank shard", "--temperature", "0", "--max-tokens", "1")
    expected = f"rank shard{tokenizer.decode(logits.argmax())}\n"
    for source in (files.root, files.adapters):
        assert call("generate", str(source), *words) == 0
        assert capsys.readouterr().out == expected
    chats = [json.loads(line) for line in Path(config.chat[0]).read_text().splitlines()]
    asked = {each["messages"][0]["content"] for each in chats if "messages" in each}
    asked |= {each["prompt"] for each in chats if "prompt" in each}
    assert files.sample.read_text().startswith(tuple(asked)), "a question of the data"


def test_a_plan_gathers_frozen_parameters_as_often_as_the_training(
    tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = shutil.copytree(published / "model", tmp_path / "model")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 1}))
    config = adapting(tmp_path, tmp_path, "run", frozen=None, seq_length=16, accumulate=2)
    blueprint = lm.blueprint(config)
    # Once each, or twice in each of two microbatches: the rest of the model stays in between.
    for free, gathers in ((1 << 40, 1 + 1), (1, 2 * (2 + 1))):
        monkeypatch.setattr(devices, "free_memory", lambda device, free=free: free)
        plan = plan_training(
            blueprint, config.train, lm.example(config), World(0, 2, 0, 2), Rehearsed.FIRST
        )
        found = sum(each.calls for each in plan.traffic if each.collective == "all-gather")
        assert found == gathers
    for frozen, free, expected in (
        (Frozen.KEEP, 1, Gathers.EVERY_STEP),
        (Frozen.GATHER, 1 << 40, Gathers.EVERY_MICROBATCH),
    ):
        example = lm.example(dataclasses.replace(config, frozen=frozen))
        assert example.gathers(blueprint.model, True, free) is expected


def test_a_run_goes_on_exactly_from_checkpoints_of_adapters_alone(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    whole = adapting(tmp_path, published, "whole", checkpoint_every=2, merge=True)
    ranks(train, 2, whole)
    again = adapting(tmp_path, published, "again", existing=Existing.RESUME, merge=True)
    as_after(2, whole, again)
    ranks(train, 2, again)
    assert losses(again) == losses(whole)
    assert validation(again) == validation(whole)

    last = whole.files.checkpoints / "step-00000004"
    saved = {entry.fqn for entry in read_manifest(last).tensors}
    assert {name.split(".")[-2] for name in saved if name.startswith("model.")} == {"default"}
    assert not any("base_layer" in name for name in saved)
    with pytest.raises(CheckpointError, match="adapters of a training with --lora alone"):
        convert(last, tmp_path / "converted", Format.HF)
    _assert_loaded_by_peft_and_transformers(whole, again)


def _assert_loaded_by_peft_and_transformers(whole: LmConfig, again: LmConfig) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(whole.files.merged)("gather", return_tensors="pt")
    assert AutoTokenizer.from_pretrained(whole.files.adapters).chat_template
    merged = AutoModelForCausalLM.from_pretrained(whole.files.merged)
    logits = []
    for config in (whole, again):
        adapted = AutoPeftModelForCausalLM.from_pretrained(config.files.adapters)
        with torch.no_grad():
            logits.append(adapted(**ids).logits)
    assert torch.equal(*logits)
    expected = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in merged.state_dict().items())


def test_a_run_of_this_library_is_adapted_and_merged(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = small_config(tmp_path, "base", steps=1)
    ranks(train, 2, base)
    run = str(base.train.output.out)
    config = adapting(tmp_path, published, "run", merge=True, steps=2)
    pairs = [{"prompt": f"shard {i} ", "completion": f"gather {i}"} for i in range(40)]
    write_lines(tmp_path / "pairs.jsonl", pairs)
    chat = (str(tmp_path / "pairs.jsonl"),)
    ranks(train, 2, dataclasses.replace(config, pretrained=run, model=run, chat=chat))

    convert(base.train.output.out, tmp_path / "plain", Format.HF)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    adapted = PeftModel.from_pretrained(plain, config.files.adapters)
    merged = AutoModelForCausalLM.from_pretrained(config.files.merged)
    expected = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in merged.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(config.files.merged)
    assert tokenizer("gather")["input_ids"] == list(b"gather")


def test_the_base_must_be_the_one_that_the_run_began_with(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(published / "model", base)
    chat = (str(published / "chats.jsonl"),)
    config = tuned(tmp_path, base, "run", chat=chat, lora=LORA, steps=1, checkpoint_every=1)
    ranks(train, 1, config)
    resumed = dataclasses.replace(config.train.output, existing=Existing.RESUME)
    before = config.files.read()
    inputs = dataclasses.replace(
        config, train=dataclasses.replace(config.train, steps=2, output=resumed)
    ).check(World(0, 1, 0, 1))
    inputs.check_same(before)
    publish(base, initializer_range=0.3)
    with pytest.raises(OptionError, match="whose weights have changed"):
        inputs.check_same(before)
    other = dataclasses.replace(inputs, config=dataclasses.replace(inputs.config, lora="r=8"))
    with pytest.raises(OptionError, match="--lora: found r=8, expected r=16,alpha=32"):
        other.check_same(before)


def test_adapters_stay_in_float32_on_a_base_in_bf16(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    config = adapting(tmp_path, published, "run", shard_dtype=PrecisionName.BF16, steps=2)
    ranks(train, 2, config)
    saved = read_manifest(config.files.checkpoints / "step-00000002").tensors
    floats = {e.info.dtype for e in saved if e.fqn.startswith(("model.", "optimizer.state"))}
    assert floats == {"F32"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r=8", LoraSettings(r=8, alpha=16)),
        ("alpha=1, targets=q_proj+v_proj", LoraSettings(alpha=1, targets=("q_proj", "v_proj"))),
        ("targets=all-linear,dropout=0.1", LoraSettings(dropout=0.1)),
    ],
)
def test_settings_are_read(text: str, expected: LoraSettings) -> None:
    assert parse_lora(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16", "found '16', expected r=16,alpha=32"),
        ("rank=16", "found 'rank=16', expected"),
        ("r=16,r=8", "found r twice"),
        ("r=0", "found r=0, expected a whole number"),
        ("r=1.5", "found r=1.5, expected a whole number"),
        ("r=many", "found r=many, expected a number"),
        ("alpha=nan", "found alpha=nan, expected a number"),
        ("alpha=0", "found alpha=0, expected a number above 0"),
        ("dropout=1", "found dropout=1, expected a number from 0"),
        ("targets=a+", r"found targets=a\+, expected all-linear"),
        ("", "found '', expected"),
    ],
)
def test_settings_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=f"--lora: {message}"):
        parse_lora(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": None, "frozen": Frozen.KEEP}, "--frozen: found no --lora"),
        ({"lora": None, "frozen": None, "merge": True}, "--merge: found no --lora"),
        ({"lora": None, "frozen": None, "base": BaseFormat.NF4}, "--base: found no --lora"),
        ({"pretrained": None, "model": "llama-tiny"}, "--lora: found no --from"),
    ],
)
def test_options_that_need_each_other_are_checked(
    tmp_path: Path, published: Path, changes: dict[str, Any], message: str
) -> None:
    config = dataclasses.replace(adapting(tmp_path, published, "run"), **changes)
    with pytest.raises(OptionError, match=message):
        config.check(World(0, 1, 0, 1))


def _refused(rank: int, world_size: int, config: LmConfig) -> None:
    with pytest.raises(UserError, match=r"--lora: found targets=nothing .*not found"):
        train(rank, world_size, config)


def test_layers_that_the_model_lacks_are_reported(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    ranks(_refused, 1, adapting(tmp_path, published, "run", lora="targets=nothing"))


def test_adapters_on_experts_are_trained_and_merged(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    """Those that are named by themselves; of other families, tests/pretrained/test_lora.py."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(published / "model")
    base = with_experts("gpt_oss", tmp_path / "base", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(base)
    config = tuned(
        tmp_path,
        base,
        "run",
        chat=(str(published / "chats.jsonl"),),
        lora="r=2,targets=q_proj+gate_up_proj+experts.down_proj",
        packing=Packing.PADDED,
        merge=True,
        steps=2,
    )
    assert ranks(train, 2, config)[0] == ["finished"]
    adapted = AutoPeftModelForCausalLM.from_pretrained(config.files.adapters)
    trained = [
        name for name, value in adapted.state_dict().items() if "lora_B" in name and value.any()
    ]
    assert sum(".experts." in name for name in trained) == 2 * 2
    expected = adapted.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(config.files.merged).state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in merged.items())


def test_a_fingerprint_sees_values_and_not_only_sizes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(100_000))
    before = fingerprint(str(tmp_path))
    assert fingerprint(str(tmp_path)) == before
    file.write_bytes(bytes(99_999) + b"1")
    assert fingerprint(str(tmp_path)) != before
    assert fingerprint("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"

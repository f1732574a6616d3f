"""``shardwise generate``: the text of a run, a checkpoint or a folder, as it comes."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.app.recipes.text.data import SEPARATOR, byte_tokenizer
from tests.cli.shell import call
from tests.pretrained.small import save_llama
from tests.programs import shell_environment, start_program
from tests.recipes.running import train
from tests.recipes.small import small_config

pytest.importorskip("transformers")

BYTES = {
    "vocab_size": SEPARATOR + 1,
    "max_position_embeddings": 32,
    "bos_token_id": SEPARATOR,
    "eos_token_id": SEPARATOR,
}
PROMPT = "héllo wor"

Shell = Callable[..., str]


@pytest.fixture
def shell(
    no_world: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Shell:
    """``shell(*words)``: what ``shardwise generate`` prints; with ``code``, what it fails with."""

    def run(*words: str, code: int = 0) -> str:
        capfd.readouterr()
        ended, (out, err) = call("generate", *words), capfd.readouterr()
        assert ended == code, err
        assert code or not err or err.startswith("warning "), err
        return err or out

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A published model on bytes, with a chat template."""
    save_llama(tmp_path / "model", **BYTES)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _likeliest(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers generates."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


def _shown(tokens: list[int]) -> str:
    """The text of tokens, as a terminal may show it."""
    text = bytes(token for token in tokens if token != SEPARATOR).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def test_the_likeliest_text_is_that_of_transformers(shell: Shell, folder: Path) -> None:
    words = ("--temperature", "0", "--max-tokens", "20", "--prompt")
    found = shell(str(folder), *words, PROMPT)
    expected = _likeliest(folder, list(PROMPT.encode()), 20)
    assert found == f"{PROMPT}{_shown(expected)}\n"
    chat = "".join(f"{role}: {text}" for role, text in (("user", "hi\n"), ("assistant", "")))
    expected = _likeliest(folder, list(chat.encode()), 10)
    found = shell(str(folder), "--chat", *words[:3], "10", "--prompt", "hi")
    assert found == f"{_shown(expected)}\n", "the answer alone"


def test_the_text_over_several_processes_is_that_of_one(
    shell: Shell, folder: Path, tmp_path: Path
) -> None:
    words = (str(folder), "--prompt", PROMPT, "--top-k", "50", "--top-p", "0.9", "--seed", "3")
    alone = shell(*words, "--max-tokens", "40")
    assert alone.startswith(PROMPT)
    over_two = ["-m", "shardwise", "generate", *words, "--max-tokens", "40", "--nproc", "2"]
    program = start_program(over_two, folder=tmp_path, env=shell_environment())
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out) == (0, alone), err
    assert shell(*words, "--max-tokens", "40", "--seed", "4") != alone


def test_a_run_and_its_checkpoint_continue_as_its_documents_do(
    shell: Shell, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    config = small_config(tmp_path, steps=2)
    assert ranks(train, 2, config) == [["finished"]] * 2
    out = config.files.root
    words = ("--temperature", "0", "--max-tokens", "6", "--prompt", "shard")
    expected = shell(str(out), *words)
    assert shell(str(out / "checkpoints" / "step-00000002"), *words) == expected
    (out / "tokenizer").rename(tmp_path / "moved")  # as of runs that kept none
    assert shell(str(out), *words) == expected
    from shardwise.checkpoint.formats.detect import Format
    from shardwise.checkpoint.tools.convert import convert

    (tmp_path / "moved").rename(out / "tokenizer")
    convert(out, tmp_path / "hf", Format.HF)
    plain = _likeliest(tmp_path / "hf", [SEPARATOR, *b"shard"], 6)
    assert expected == f"shard{_shown(plain)}\n"


def test_a_prompt_may_come_from_standard_input(
    shell: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (str(folder), "--temperature", "0", "--max-tokens", "5", "--prompt")
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert shell(*words, "-") == shell(*words, PROMPT)


def test_what_is_left_out_of_a_long_prompt_is_said(shell: Shell, folder: Path) -> None:
    warning = shell(str(folder), "--max-tokens", "3", "--prompt", "x" * 40)
    assert warning == (
        "warning    the prompt has 40 tokens, and the model 32 positions: the first 8 are left "
        "out\n"
    )


@pytest.mark.parametrize("temperature", ["0", "0.9"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_an_error(
    shell: Shell, folder: Path, temperature: str, number: float
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"].fill_(number)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    message = shell(str(folder), "--temperature", temperature, "--prompt", "a", code=2)
    assert "found logits that are not finite after 1 tokens, expected numbers" in message
    assert message.count("\n") == 1


def test_a_prompt_beyond_the_embedding_is_an_error(shell: Shell, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        weights[name] = weights[name][:100].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    ends = {"bos_token_id": None, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100, **ends}))
    message = shell(str(folder), "--prompt", "z", code=2)
    assert "found token 122 in the prompt, and 100 rows in the embedding" in message


def test_a_text_ends_with_the_end_of_text(shell: Shell, folder: Path) -> None:
    first = _likeliest(folder, list(PROMPT.encode()), 1)
    config = folder / "generation_config.json"
    ends = {**json.loads(config.read_text()), "eos_token_id": [SEPARATOR, *first]}
    config.write_text(json.dumps(ends))
    assert shell(str(folder), "--temperature", "0", "--prompt", PROMPT) == f"{PROMPT}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-tokens", "0"], "--max-tokens: found 0, expected 1 or more"),
        (["--temperature", "nan"], "--temperature: found nan, expected 0 or more"),
        (["--top-p", "0"], "--top-p: found 0.0, expected a number above 0"),
        (["--top-k", "-1"], "--top-k: found -1, expected 0 or more"),
        (["--dtype", "int8"], "--dtype: found 'int8', expected one of fp32, bf16, fp16"),
        (
            ["--prompt", os.fsdecode(b"\xff")],
            "--prompt: found bytes that are no UTF-8, expected text in UTF-8",
        ),
    ],
)
def test_a_wrong_option_is_one_line(shell: Shell, words: list[str], expected: str) -> None:
    assert shell("model", *words, code=2) == f"error: {expected}\n"


def test_what_a_model_lacks_is_one_line(shell: Shell, folder: Path, tmp_path: Path) -> None:
    assert "found nothing there" in shell(str(tmp_path / "no" / "such"), code=2)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    message = shell(str(folder), "--chat", code=2)
    assert "its chat template cannot be used (no system)" in message
    (folder / "chat_template.jinja").unlink()
    assert "found no chat template in its tokenizer; leave out --chat" in shell(
        str(folder), "--chat", code=2
    )
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "found no tokenizer, expected the files of one" in shell(str(folder), code=2)
    byte_tokenizer().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{")
    assert "cannot be loaded (" in shell(str(folder), code=2)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    message = shell(str(folder), code=2)
    assert "found no weights for model.layers.3." in message
    assert message.count("\n") == 1

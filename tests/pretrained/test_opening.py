"""Folders of strangers: no code of theirs runs, nothing asks, nothing waits, one line says why."""

from __future__ import annotations

import ast
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.app.recipes.text.data import byte_tokenizer
from shardwise.base.errors import CheckpointError
from shardwise.insight.planning.presets import ModelError, find_settings
from shardwise.pretrained import build, opening
from tests.pretrained.small import save_llama
from tests.programs import shell_environment, start_program

transformers = pytest.importorskip("transformers")

# What makes an object of what a file or a folder says.
LOADERS = {"from_pretrained", "from_config", "_from_config", "from_dict"} | {
    *(
        "AutoConfig.for_model",
        "from_peft_type",
        "from_json_file",
        "get_peft_model",
        "load_adapter",
        "pipeline",
    ),
}
#: All calls of them that there are, with what keeps code from running.
CALLS = {
    ("pretrained/opening.py", "AutoTokenizer.from_pretrained", "trust_remote_code=False"),
    ("pretrained/opening.py", "AutoConfig.for_model", ""),
    ("pretrained/opening.py", "family.from_config", "trust_remote_code=False"),
    ("pretrained/opening.py", "made.from_dict", ""),
    ("pretrained/opening.py", "GenerationConfig.from_dict", ""),
    ("pretrained/opening.py", "PeftConfig.from_peft_type", ""),
    ("pretrained/opening.py", "get_peft_model", ""),
    ("pretrained/hf.py", "model_class._from_config", ""),
    ("pretrained/hf.py", "model_class.from_config", "trust_remote_code=False"),
}


def _calls(file: Path) -> set[tuple[str, str, str]]:
    source = Path(shardwise.__file__).parent
    found, text = set[tuple[str, str, str]](), file.read_text()
    if not any(name.rpartition(".")[2] in text for name in LOADERS):
        return found  # most files: nothing needs to be parsed
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if {called, called.rpartition(".")[2]} & LOADERS:
                trust = [each for each in node.keywords if each.arg == "trust_remote_code"]
                said = "".join(f"{each.arg}={ast.unparse(each.value)}" for each in trust)
                found.add((str(file.relative_to(source)), called, said))
    return found


def test_folders_of_others_are_opened_in_one_place() -> None:
    files = Path(shardwise.__file__).parent.rglob("*.py")
    found = {each for file in files for each in _calls(file)}
    assert found == CALLS, "open them by functions of pretrained/opening.py"
    for file in ("opening.py", "building.py"):  # nothing is asked of a terminal
        assert "input(" not in (Path(opening.__file__).parent / file).read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model on bytes with its tokenizer, and a file of code that leaves a trace."""
    save_llama(tmp_path / "model", vocab_size=257, max_position_embeddings=32)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    trace = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass M: pass\n"
    (tmp_path / "model" / "evil.py").write_text(trace)
    return tmp_path / "model"


def edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **changes}))


def pipe(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        os.mkfifo(folder / name)

    return make


CODE = {"AutoModelForCausalLM": "evil.M", "AutoConfig": "evil.M", "AutoTokenizer": ["evil.M"] * 2}

DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code of a model": (
        lambda f: edit(f, model_type="vit", auto_map=CODE),
        "cannot build AutoModelForCausalLM",
    ),
    "code of a tokenizer": (
        lambda f: edit(f, "tokenizer_config.json", auto_map=CODE, tokenizer_class="EvilTokenizer"),
        "the tokenizer in .* cannot be loaded .*custom code",
    ),
    "files anywhere": (
        lambda f: edit(f, "tokenizer_config.json", init_inputs=["/dev/zero"]),
        "'init_inputs': found .*, expected none",
    ),
    "a billion layers": (
        lambda f: edit(f, num_hidden_layers=10**9),
        "found 1,000,000,000 layers, expected 1 to 10,000",
    ),
    "no layers": (lambda f: edit(f, num_hidden_layers=0), "found 0 layers, expected 1 to 10,000"),
    "layers below": (lambda f: edit(f, num_hidden_layers=-1), "found -1 layers"),
    "layers inside": (lambda f: edit(f, text_config={"n_layer": 10**9}), "found 1,000,000,000 lay"),
    "positions below": (
        lambda f: edit(f, max_position_embeddings=-5),
        "found -5 positions, expected 1 or more",
    ),
    "an end that is text": (
        lambda f: edit(f, "generation_config.json", eos_token_id="a"),
        "'eos_token_id': found 'a', expected numbers of tokens",
    ),
    "ends of all kinds": (
        lambda f: edit(f, "generation_config.json", eos_token_id=[1, [2]]),
        "'eos_token_id': found list of 1, expected",
    ),
    "a negative end": (
        lambda f: edit(f, "generation_config.json", eos_token_id=[-1]),
        "'eos_token_id': found -1, expected",
    ),
    "a huge end": (
        lambda f: edit(f, "generation_config.json", eos_token_id=10**40),
        "'eos_token_id': found a huge number, expected",
    ),
    "generation settings that are a list": (
        lambda f: (f / "generation_config.json").write_text("[1]"),
        "found list of 1, expected a JSON object",
    ),
    **{
        f"a pipe, {name}": (pipe(name), "(found|expected) .*a regular file")
        for name in (
            *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
            *("added_tokens.json", "model.safetensors", "additional_chat_templates/x.jinja"),
        )
    },
}


@pytest.fixture(scope="module", autouse=True)
def _yes() -> Any:
    """Answer yes to whatever is asked, as ``yes |`` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", lambda *_: "y")
        yield


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_hostile_folder_is_one_line_and_runs_no_code(folder: Path, damage: str) -> None:
    from shardwise.app.recipes.text.generate import Request, generate
    from shardwise.base.errors import UserError

    make, message = DAMAGES[damage]
    make(folder)
    with pytest.raises(UserError, match=message) as raised:
        generate(Request(source=str(folder), max_tokens=1))
    assert str(raised.value).isprintable()
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize("layers", [-1, 0, 10**9])
def test_settings_that_are_planned_for_are_bounded(folder: Path, layers: int) -> None:
    edit(folder, num_hidden_layers=layers)
    with pytest.raises(ModelError, match=f"{layers:,} layers, expected 1 to 10,000"):
        find_settings(str(folder))
    pipe("config.json")(folder)
    with pytest.raises(ModelError):
        find_settings(str(folder / "config.json"))


def test_settings_that_name_code_are_left_out(folder: Path) -> None:
    from shardwise.insight.planning.models import find_model

    edit(folder, auto_map=CODE, _attn_implementation="evil/kernel")
    assert build(folder).config.to_dict().get("auto_map") is None
    model: Any = find_model(str(folder)).model
    assert not hasattr(model.config, "auto_map")
    assert not (folder.parent / "ran").exists()


def test_numbers_that_json_does_not_have_are_read_in_settings(folder: Path) -> None:
    (folder / "config.json").write_text(
        '{"model_type": "mamba2", "time_step_limit": [0, Infinity]}'
    )
    assert find_settings(str(folder))["time_step_limit"] == [0, float("inf")]


# -- adapters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "'peft_type': found 'PROMPT_TUNING', expected adapters"),
        ({"peft_type": "XLORA"}, "'peft_type': found 'XLORA'"),
        ({"peft_type": ["LORA"]}, "'peft_type': found list of 1"),
        ({"peft_type": None}, "'peft_type': found None"),
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "'megatron_config': found"),
        ({"layer_replication": [[0, 10**9]]}, "'layer_replication': found list of 1"),
        ({"layer_replication": "all"}, "peft cannot read it"),
    ],
)
def test_adapters_that_would_load_more_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="needs peft: install .[ecosystem]")
    from shardwise.pretrained.merging import merge_lora

    base = tmp_path / "base"
    save_llama(base)
    (tmp_path / "adapters").mkdir()
    lora = {"peft_type": "LORA", "target_modules": ["q_proj"], "base_model_name_or_path": "base"}
    edit(tmp_path / "adapters", "adapter_config.json", **{**lora, **changes})
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "adapters" / "adapter_model.safetensors")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", pytest.fail)
    with pytest.raises(CheckpointError, match=message):
        merge_lora(tmp_path / "adapters", tmp_path / "merged", base)
    assert not (tmp_path / "merged").exists()


# -- time ------------------------------------------------------------------------------------------


def test_a_pattern_that_loops_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="needs peft: install .[ecosystem]")
    monkeypatch.setattr(opening, "LIMIT", 0.5)
    save_llama(tmp_path)
    (tmp_path / "adapters").mkdir()
    pattern = r"(\w|\w\w|\.|[a-z.])+X"
    edit(tmp_path / "adapters", "adapter_config.json", peft_type="LORA", target_modules=pattern)
    config = opening.adapter_config(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match=r"here: a pattern .* takes more than 0\.5 s"):
        opening.with_adapters(build(tmp_path), config, "here")


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 3 ** (3 ** 18) }}",
    ],
    ids=["loops", "a power"],
)
def test_a_template_that_loops_is_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    from shardwise.app.recipes.text.chat import Chat, ChatEncoder, ChatError
    from shardwise.app.recipes.text.data import Tokenizer

    (folder / "chat_template.jinja").write_text(template)
    encoder = ChatEncoder(Tokenizer(str(folder)))
    monkeypatch.setattr(opening, "LIMIT", 0.5)
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    with pytest.raises(ChatError, match=r"f, line 3: the chat template .* in .*model takes more"):
        encoder.documents(Chat(messages, (1,)), "--chat: f, line 3")


def test_a_library_that_does_not_come_back_is_ended_with_its_process(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [double] * 40}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    program = (
        "from shardwise.pretrained import opening\n"
        "from shardwise.app.recipes.text.generate import Request, generate\n"
        "opening.LIMIT, opening._GRACE = 20.0, 0.0\n"
        "t = opening.tokenizer\n"
        "def loaded(name):\n"
        "    opening_limit = t(name); opening.LIMIT = 0.5; return opening_limit\n"
        "opening.tokenizer = loaded\n"
        f"generate(Request(source={str(folder)!r}, prompt='a'))\n"
    )
    (tmp_path / "program.py").write_text(program)
    ended = start_program([str(tmp_path / "program.py")], folder=tmp_path, env=shell_environment())
    _, err = ended.communicate(timeout=200)
    assert ended.returncode == 2, err
    assert err.strip().endswith("it may never end"), err
    assert "its chat template or its tokenizer takes more than 0.5 s" in err


def test_a_limit_leaves_the_alarm_of_others_as_it_was() -> None:
    import signal

    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    with opening.limited("this"):
        time.sleep(0.01)
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


def test_without_a_network_a_name_takes_one_look_and_a_path_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub

    looks: list[str] = []

    class Client:
        def head(self, url: str, timeout: float) -> None:
            looks.append(url)
            raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_session", Client)
    for path in ("./nowhere", "~/nowhere", "../nowhere", "runs/lm/nowhere"):
        with pytest.raises(CheckpointError, match=r"found nothing there, expected a folder"):
            opening.from_hub(path, ["config.json"])
    assert looks == []
    with pytest.raises(CheckpointError, match=r"nowhere: .* \(which cannot be reached\); expected"):
        opening.from_hub("nowhere", ["config.json"])
    assert looks == [huggingface_hub.constants.ENDPOINT]

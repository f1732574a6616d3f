"""Whatever files and folders say: nothing of it controls the terminal that it is shown on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.runs.serve import Server
from tests.cli.shell import call
from tests.runs import folders

#: Sets the clipboard and the title, clears the screen (as 7 and as 8 bits), turns text around.
HOSTILE = "\x1b]52;c;aGk=\x07\x1b[2J\x9b2J\x1b]0;t\x1b\\\x7f\x08\r\u202e\u2028name"

pytestmark = pytest.mark.usefixtures("no_world")


def _run(root: Path) -> None:
    """A run, all of whose names and values are hostile."""
    folders.make(
        root,
        recipe=HOSTILE,
        model={"name": HOSTILE, "parameters": HOSTILE},
        config={HOSTILE: HOSTILE, "model": HOSTILE, "train": {HOSTILE: root.name}},
        sessions=[folders.session(status=HOSTILE, world_size=HOSTILE, mesh={HOSTILE: 1})],
    )
    with (root / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 201, f"{HOSTILE}_per_s": 1.0, HOSTILE: 2.0}) + "\n")
    (root / "plan.json").write_text(HOSTILE)


@pytest.fixture
def hostile(no_world: Path) -> Path:
    """A folder with what strangers may send."""
    name = HOSTILE.replace("/", "")
    _run(no_world / f"one{name}")
    _run(no_world / f"two{name}")
    for at, file in enumerate((f"a{name}.safetensors", f"b{name}.safetensors")):
        tensors = {f"{HOSTILE}.{layer}.w": torch.full((2,), float(at)) for layer in range(2)}
        save_file(tensors, no_world / file, metadata={HOSTILE: HOSTILE})
        torch.save(
            {HOSTILE: torch.ones(1), "b": HOSTILE}, no_world / file.replace("safetensors", "pt")
        )
    checkpoint = no_world / "checkpoints" / f"step-00000001{name}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"format": HOSTILE, HOSTILE: 1}))
    for folder in ("step-00000002", "adapters"):
        other = no_world / "checkpoints" / folder
        other.mkdir()
        (other / "manifest.json").write_text(json.dumps({"format": HOSTILE}))
    model = no_world / f"model{name}"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": HOSTILE, HOSTILE: HOSTILE}))
    adapter = {"base_model_name_or_path": HOSTILE, "peft_type": "LORA", "target_modules": [HOSTILE]}
    (model / "adapter_config.json").write_text(json.dumps(adapter))
    (no_world / f"{name}.yaml").write_text(json.dumps({HOSTILE: HOSTILE}))
    (no_world / "value.yaml").write_text(json.dumps({"steps": HOSTILE}))
    return no_world


@pytest.mark.parametrize(
    "command",
    [
        "compare one* two*",
        "compare one* two* --json",
        "compare one* two* --html page*.html",
        "watch one* two*",
        "inspect one*",
        "inspect --model model*",
        "inspect --model model*/config.json --json",
        "plan model*",
        "plan model* --json",
        "plan llama-tiny --device-file value.yaml",
        "generate one*",
        "generate model*",
        "merge-lora model* merged*",
        "checkpoint ls .",
        "checkpoint ls checkpoints",
        "checkpoint ls checkpoints --json",
        "checkpoint ls one*",
        "checkpoint show checkpoints/step-00000001*",
        "checkpoint show a*.safetensors --values",
        "checkpoint show a*.safetensors --layers",
        "checkpoint show a*.safetensors --json",
        "checkpoint show a*.pt --values",
        "checkpoint show model*",
        "checkpoint diff a*.safetensors b*.safetensors",
        "checkpoint diff a*.safetensors a*.safetensors",
        "checkpoint diff a*.safetensors b*.safetensors --json",
        "checkpoint verify checkpoints/step-00000002",
        "checkpoint consolidate a*.safetensors out*.safetensors",
        "checkpoint convert a*.safetensors out* --to hf",
        "train lm --config *.yaml",
        "train lm --config value.yaml",
        "train lm --save-config saved*",
        "train lm --from model*",
        "train lm --model model* --dry-run",
        "train lm --out one* --resume",
        "train vit --model model* --dry-run",
    ],
)
def test_nothing_that_a_file_says_controls_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    hostile: Path,
    command: str,
) -> None:
    """Names of files stand for themselves where there is one, else end as the hostile name."""
    words = [
        str(next((path for path in sorted(Path().glob(word))), word.replace("*", HOSTILE)))
        if "*" in word
        else word
        for word in command.split()
    ]

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", stopped)
    assert call(*words) in (0, 1, 2, 130)
    shown = "".join(capfd.readouterr())
    assert shown
    control = {each for each in shown if each != "\n" and not each.isprintable()}
    assert not control, shown

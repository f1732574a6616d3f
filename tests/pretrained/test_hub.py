"""A name of the Hugging Face Hub instead of a folder.

The packages that talk to the hub read its address when they are imported: hence other programs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretrained.small import save_llama
from tests.programs import shell_environment, start_program
from tests.recipes.hub import Hub

pytest.importorskip("transformers")

PROGRAM = """
import sys
from shardwise.base.errors import CheckpointError
from shardwise.pretrained import build, fill
model = build("local/tiny")
print(fill(model, "local/tiny"), type(model).__name__, model.config.name_or_path)
for name in sys.argv[1:]:
    try:
        build(name)
    except CheckpointError as error:
        print(error)
"""


def test_a_name_is_looked_up_at_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "pushed"
    save_llama(folder)
    (folder / "training_log.bin").write_bytes(b"0" * 100)
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [str(tmp_path / "program.py"), "local/none", "no/repository/name"]
    with Hub() as hub:
        hub.push("models/local/tiny", folder)
        env = {**shell_environment("HF_TOKEN"), **hub.environment(tmp_path / "home")}
        ended = start_program(words, folder=tmp_path, env=env)
        out, err = ended.communicate(timeout=100)
        fetched = [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert ended.returncode == 0, err
    loaded, none, wrong = out.splitlines()
    assert loaded == "LoadReport(missing=(), unexpected=()) LlamaForCausalLM local/tiny"
    assert none.startswith("local/none: found no such folder, and could not get it from the")
    assert wrong == "no/repository/name: found nothing there, expected a folder of a model"
    assert any(path.endswith("model.safetensors") for path in fetched)
    assert not any(path.endswith(".bin") for path in fetched)

"""``shardwise train mnist`` as its user sees it. Each start takes seconds, so there are two."""

from __future__ import annotations

from pathlib import Path

from tests.programs import shell_environment, start_program
from tests.recipes.digits import write_digits


def shardwise(folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    """Run the command in a folder; return its exit code and what it printed."""
    words = ["-m", "shardwise", *arguments]
    command = start_program(words, folder=folder, env=shell_environment())
    out, err = command.communicate(timeout=180)
    return command.returncode, out, err


def test_a_training_on_digits_from_start_to_end(tmp_path: Path) -> None:
    write_digits(tmp_path / "mnist")
    command = "train mnist --data-dir mnist --nproc 2 --batch-size 16 --device cpu --epochs 4"
    code, out, err = shardwise(tmp_path, *command.split())
    assert (code, err) == (0, "")
    lines = out.splitlines()
    told = dict(line.split(maxsplit=1) for line in lines)
    assert told["data"] == "MNIST: 203 images to train on, 45 for validation; 10 classes"
    assert told["step"] == "16 images x 2 ranks = 32 images; 4 epochs, 26 steps"
    steps = [line for line in lines if line.startswith("step=")]
    assert len(steps) == 26
    assert steps[-1].startswith("step=26 epoch=4.099 loss=")
    judged = [line.split()[1] for line in lines if line.startswith("evaluation")]
    assert judged == ["step=7", "step=13", "step=20", "step=26"]
    assert told["reloaded"].startswith("accuracy ")
    for name in ("model.safetensors", "confusion.png", "report.html", "run.json"):
        assert (tmp_path / "runs" / "mnist" / name).is_file(), name
        assert name == "run.json" or f"runs/mnist/{name}" in out

    code, again, err = shardwise(tmp_path, *command.split(), "--resume")
    assert (code, err) == (0, "")
    assert again == (
        "Nothing to do: the run in runs/mnist is at epoch 4.10 of 4 (step 26). "
        "To go on, say --resume with more --epochs.\n"
    )

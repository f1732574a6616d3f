"""The examples run as their first lines say, and show what they promise."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

import shardwise
from shardwise import MixedPrecisionPolicy, fully_shard
from tests.corpus.models import MODELS, make_batch, make_model
from tests.harness import run_ranks
from tests.programs import shell_environment, start_program
from tests.worlds import on_processes

EXAMPLES = Path(__file__).parents[1] / "examples"


def _example(name: str, arguments: Sequence[str], cwd: Path) -> None:
    """Run an example as a rank."""
    os.chdir(cwd)
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let nobody be warned, as torch does about gloo and its own state dicts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _run(name: str, *arguments: str, cwd: Path, ranks: int = 2) -> str:
    """Run an example on simulated ranks; return what the first prints."""
    with _quiet(), mock.patch.object(sys, "argv", []):
        return shardwise.simulate(_example, ranks, name, arguments, cwd)[0].output


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    untested = [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in source]
    assert not untested


def test_every_example_is_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}

    assert lengths.pop("fsdp_from_scratch.py") <= 300
    assert all(length < 100 for length in lengths.values()), lengths


def test_the_runtime_from_scratch_imports_torch_alone() -> None:
    tree = ast.parse((EXAMPLES / "fsdp_from_scratch.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    others = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in others} == {"torch"}


def test_the_runtime_from_scratch_runs_as_its_docstring_says(tmp_path: Path) -> None:
    losses = _losses(_run("fsdp_from_scratch.py", cwd=tmp_path))
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", ["mlp", "conv", "frozen", "llama-tied"])
@on_processes(2)
def test_the_runtime_from_scratch_computes_the_bits_of_the_real_one(
    rank: int, world_size: int, name: str
) -> None:
    for zero, low, transport in ((3, False, "auto"), (2, False, "collectives"), (3, True, "c10d")):
        os.environ["SHARDWISE_TRANSPORT"] = transport
        _train_from_scratch_and_for_real(rank, name, zero, low)


def _train_from_scratch_and_for_real(rank: int, name: str, zero: int, low: bool) -> None:
    """Train a model with the example and with the runtime; every bit of every shard is equal."""
    theirs = runpy.run_path(str(EXAMPLES / "fsdp_from_scratch.py"))["fully_shard"]
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if low else {}
    frees = {"reshard_after_forward": zero == 3}
    policy = MixedPrecisionPolicy(**dtypes)
    scratch, real = make_model(name), make_model(name)
    for block in MODELS[name].blocks(scratch):
        theirs(block, **frees, **dtypes)
    theirs(scratch, **dtypes)
    for block in MODELS[name].blocks(real):
        fully_shard(block, **frees, mp_policy=policy)
    fully_shard(real, mp_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (scratch, real)]
    for step in range(2):
        for model, optimizer in zip((scratch, real), optimizers, strict=True):
            for microbatch in range(2):
                MODELS[name].loss(model, *make_batch(name, rank, step, microbatch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    shards = {key: param.to_local() for key, param in real.named_parameters()}
    assert dict(scratch.named_parameters()).keys() == shards.keys()
    for key, param in scratch.named_parameters():
        assert torch.equal(param, shards[key]), key


@pytest.mark.parametrize(
    ("launcher", "shown"),
    [
        ("torch.distributed.run --standalone --nproc-per-node 2", [0, 1]),
        ("shardwise run --nproc 2", [0]),
    ],
    ids=["torchrun", "shardwise-run"],
)
def test_the_minimal_example_is_short_and_learns(launcher: str, shown: list[int]) -> None:
    example = EXAMPLES / "fully_shard_minimal.py"
    assert len(example.read_text().splitlines()) < 40
    words = ["-W", "ignore", "-m", *launcher.split(), str(example)]

    command = start_program(words, folder=EXAMPLES, env=shell_environment())
    out, err = command.communicate(timeout=120)

    assert command.returncode == 0, err
    for rank in shown:
        assert f"rank {rank} of 2 holds 8,352 of 16,704 parameters" in out
    losses = _losses(out)
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]


def test_the_stages_of_zero_differ_in_memory_and_agree_in_loss(tmp_path: Path) -> None:
    _, _, _, *rows = _run("zero_1_2_3.py", cwd=tmp_path).splitlines()

    stages = {row.split()[0]: row.split()[1:] for row in rows}
    assert list(stages) == ["none", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert [stage[0] for stage in stages.values()] == ["100%", "50%", "50%", "50%"]
    assert [stage[1] for stage in stages.values()] == ["100%", "100%", "100%", "0%"]
    assert len({stage[-1] for stage in stages.values()}) == 1, "the losses differ"


def test_a_script_for_one_device_made_distributed_trains_alike(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()

    losses = _losses(_run("single_gpu.py", cwd=alone, ranks=1))
    assert losses[-1] < 0.5 * losses[0]
    assert _losses(_run("distributed.py", cwd=together)) == pytest.approx(losses, abs=1e-3)
    one, other = (torch.load(folder / "model.pt") for folder in (alone, together))
    assert {name: value.shape for name, value in one.items()} == {
        name: value.shape for name, value in other.items()
    }


def test_the_changed_lines_of_the_distributed_script_are_marked() -> None:
    before = (EXAMPLES / "single_gpu.py").read_text().split('"""\n', 1)[1].splitlines()
    after = (EXAMPLES / "distributed.py").read_text().split('"""\n', 1)[1].splitlines()

    kept = [line.strip() for line in before if line.strip()]
    new = [line for line in after if line.strip() and line.strip() not in kept]
    save = 'torch.save(state, "model.pt")'
    assert [line for line in new if "# <--" not in line and line.strip() != save] == []
    assert len(new) < 20


def test_a_script_for_fsdp1_runs_with_another_import(tmp_path: Path) -> None:
    output = _run("fsdp1_no_sync.py", cwd=tmp_path)

    losses = _losses(output)
    assert losses[-1] < 0.7 * losses[0]
    assert "gathered 27 parameters and the optimizer state of 27" in output


@pytest.mark.parametrize("nested", [True, False], ids=["by-hand", "by-policy"])
def test_nested_fsdp_as_pytorch_xla_has_it(tmp_path: Path, nested: bool) -> None:
    arguments = ["--nested-fsdp", "--activation-checkpointing"] if nested else []
    output = _run("xla_nested_fsdp.py", *arguments, cwd=tmp_path)

    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", output)]
    assert accuracies[-1] > 0.95
    assert "5 wrapped modules; rank 0 holds 7,106 parameters" in output


def test_the_training_function_for_ray_runs_under_torchrun_and_goes_on(tmp_path: Path) -> None:
    first = _run("ray_train.py", "--steps", "40", cwd=tmp_path)
    then = _run("ray_train.py", "--steps", "60", cwd=tmp_path)
    whole = _run("ray_train.py", "--steps", "60", "--out", "whole", cwd=tmp_path, ranks=1)

    assert first.startswith("2 ranks, starting after step 0\n")
    assert then.startswith("2 ranks, starting after step 40\n")
    assert len(losses := [*_losses(first), *_losses(then)]) == 6
    assert losses[-1] < 0.5 * losses[0]
    assert losses == pytest.approx(_losses(whole), abs=2e-3)


def _elastic(rank: int, world_size: int, arguments: Sequence[str], cwd: Path) -> str:
    """Run the example that handles signals, which only processes can; return what it prints."""
    printed = io.StringIO()
    with _quiet(), contextlib.redirect_stdout(printed):
        _example("elastic.py", arguments, cwd)
    return printed.getvalue()


def _stopped(rank: int, world_size: int, cwd: Path) -> str:
    """Run the elastic example, and ask one of its ranks to stop once it has saved something."""

    def ask() -> None:
        while not list(cwd.glob("run/step-*")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if rank == 1:
        threading.Thread(target=ask, daemon=True).start()
    errors = io.StringIO()
    with _quiet(), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        _example("elastic.py", ["--steps", "100000"], cwd)
    assert ended.value.code == 128 + signal.SIGTERM
    return errors.getvalue()


def test_the_elastic_example_saves_when_asked_and_continues_without_a_step_lost(
    tmp_path: Path,
) -> None:
    said, _ = run_ranks(_stopped, 2, tmp_path, backend=None)
    found = re.fullmatch(r"Stopped after step (\d+), which is saved\.\n", said)
    assert found, said
    steps = int(found[1])
    more = ["--steps", str(steps + 20), "--every", str(steps + 20)]

    then, _ = run_ranks(_elastic, 2, more, tmp_path, backend=None)
    [whole] = run_ranks(_elastic, 1, [*more, "--out", "whole"], tmp_path, backend=None)

    assert then.startswith(f"2 ranks, starting after step {steps}\n")
    assert _losses(then) == pytest.approx(_losses(whole), abs=2e-3)


def test_a_recipe_on_ray_is_given_the_options_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/cli/test_worker.py`` runs the worker, and ``tests/ecosystem/test_ray.py`` Ray."""
    fit = mock.MagicMock()
    for name in ("ray", "ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, fit)
    monkeypatch.setattr(sys, "argv", ["ray_recipe.py", "--workers", "3", "lm", "--steps", "9"])
    jobs = set()
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / "ray_recipe.py"), run_name="__main__")
        config = fit.TorchTrainer.call_args.kwargs["train_loop_config"]
        assert config["arguments"] == ["lm", "--steps", "9"]
        jobs.add(config["job"])
    assert fit.ScalingConfig.call_args.kwargs["num_workers"] == 3
    assert len(jobs) == 2, "another start is another job"

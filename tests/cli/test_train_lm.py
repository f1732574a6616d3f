"""``shardwise train lm`` as its user sees it: processes, output, files, signals.

A real start of the command imports torch and transformers in each process, which takes seconds: so
there is one, at which most tests look. The others are forked; see :mod:`tests.programs`.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise.app.recipes.core.checkpointing import Checkpoints
from shardwise.base.units import printable
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.runs.metrics_file import read_metrics
from tests.cli.shell import call, refused
from tests.programs import Program, ranks_of, shell_environment, start_program
from tests.recipes.small import write_model, write_text

WAIT = 180.0  # seconds that anything may take on a busy machine

OPTIONS = (  # noqa: SIM905 (as one types it)
    "--model config.json --data words.txt --seq-length 16 --steps 8 --batch-size 2 --accumulate 2 "
    "--lr 0.01 --warmup 2 --checkpoint-every 2 --eval-every 4 --device cpu --sample-tokens 20 "
    "--prompt gather"
).split()


def start(folder: Path, *more: str, launcher: tuple[str, ...] = ()) -> Program:
    """Start the command in a folder with a model and a text."""
    words = [*launcher, "-m", "shardwise", "train", "lm", *OPTIONS, *more]
    return start_program(words, folder=folder, env=shell_environment())


@dataclass
class Ended:
    """A command that has ended."""

    folder: Path
    code: int
    out: str
    err: str

    @classmethod
    def of(cls, folder: Path, process: Program) -> Ended:
        out, err = process.communicate(timeout=WAIT)
        return cls(folder, process.wait(), out, err)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that nothing disturbed, in processes that start as a user's do."""
    folder = tmp_path_factory.mktemp("whole")
    write_model(folder)
    write_text(folder)
    more = ("--nproc", "2", "--out", "run", "--log", "tensorboard")
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", "lm", *OPTIONS, *more],
        cwd=folder,
        env=shell_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    return Ended(folder, done.returncode, done.stdout, done.stderr)


def metrics(folder: Path) -> list[dict[str, float]]:
    """What every step is known by, without what depends on the machine's mood."""
    timed = {"tokens_per_s", "memory_mib", "eta_s"}
    records = read_metrics(folder / "run" / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in timed} for record in records]


def test_a_run_ends_well_and_warns_of_nothing(whole: Ended) -> None:
    assert (whole.code, whole.err) == (0, "")


def test_inspect_shows_what_the_ranks_of_the_run_hold(
    whole: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the checkpoint has it: names, shapes, and how they are cut."""
    run = whole.folder / "run"
    assert call("inspect", str(run), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    newest = max((run / "checkpoints").iterdir())
    saved = {entry.path[1]: entry for entry in read_manifest(newest).section("model")}
    assert [each["name"] for each in report["parameters"]] == list(saved)
    for each in report["parameters"]:
        assert tuple(each["shape"]) == saved[each["name"]].shape
        blocks = report["tilings"][each["tiling"]]["blocks"]
        pieces = saved[each["name"]].pieces
        assert [block["spans"][0][0][0] for block in blocks] == [p.box.offsets[0] for p in pieces]


def test_the_first_lines_say_what_is_trained(whole: Ended) -> None:
    lines = dict(line.split(maxsplit=1) for line in whole.out.splitlines()[:7])
    assert lines["starting"] == "2 processes, 1 thread each; importing torch takes a moment"
    assert re.fullmatch(r"config.json, [\d,]+ parameters, cpu", lines["model"])
    assert re.match(r"full over dp_shard=2, transport \w+; 0.\d of 0.\d MiB", lines["sharding"])
    assert lines["precision"] == "fp32 compute, fp32 reduction, fp32 shards"
    assert re.match(r"words.txt: [\d,]+ tokens to train on, [\d,]+ for validation", lines["data"])
    assert lines["compute"].endswith("MFU needs --peak-flops on CPUs")
    assert lines["step"] == (
        "2 sequences x 16 tokens x 2 microbatches x 2 ranks = 128 tokens; 8 steps"
    )


def test_every_step_is_a_greppable_line(whole: Ended) -> None:
    pattern = re.compile(
        r"step=(\d+) loss=(\d\.\d{4}) grad_norm=\d+\.\d{3} lr=\d\.\d\de-\d\d tokens_per_s=\d+ "
        r"memory_mib=\d+ eta=\d\d:\d\d"
    )
    found = [pattern.fullmatch(line) for line in whole.out.splitlines() if line[:5] == "step="]
    assert [int(match[1]) for match in found if match] == list(range(1, 9))
    losses = [record["loss"] for record in metrics(whole.folder) if "loss" in record]
    assert [f"{loss:.4f}" for loss in losses] == [match[2] for match in found if match]


def test_run_json_tells_what_ran(whole: Ended) -> None:
    record = json.loads((whole.folder / "run" / "run.json").read_text())
    assert record["config"]["train"]["steps"] == 8
    assert record["model"]["parameters"] > 0
    assert record["data"]["files"] == 1
    [session] = record["sessions"]
    assert session["status"] == "finished"
    assert session["world_size"] == 2
    assert session["mesh"] == {"dp_shard": 2}
    assert session["command"].startswith("shardwise train lm --model config.json")
    assert set(session["versions"]) == {"python", "shardwise", "torch", "transformers", "numpy"}
    last = [r["validation_loss"] for r in metrics(whole.folder) if "validation_loss" in r][-1]
    assert session["validation_loss"] == last


def test_what_was_trained_becomes_a_model_of_transformers(whole: Ended, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from shardwise.checkpoint.formats.detect import Format
    from shardwise.checkpoint.tools.convert import convert

    convert(whole.folder / "run", tmp_path / "hf", Format.HF)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values()), told
    record = json.loads((whole.folder / "run" / "run.json").read_text())
    assert sum(p.numel() for p in model.parameters()) == record["model"]["parameters"]
    assert json.loads((whole.folder / "run" / "config.json").read_text())["architectures"] == [
        type(model).__name__
    ]


def test_report_sample_and_event_files_are_there(whole: Ended) -> None:
    run = whole.folder / "run"
    assert not list(run.glob("*.png"))
    assert "run/report.html" in whole.out
    assert '"state":"finished"' in (run / "report.html").read_text()
    sample = (run / "sample.txt").read_text()
    assert sample.startswith("gather")
    assert len(sample) > len("gather")
    assert f"    {printable(sample.split(chr(10))[0])}".rstrip() in whole.out.split("\n")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
    assert [event.step for event in events.Scalars("validation_loss")] == [4, 8]


def test_the_options_of_the_run_are_kept_in_a_file(whole: Ended) -> None:
    lines = (whole.folder / "run" / "config.yaml").read_text().splitlines()
    asked = {"data: [words.txt]", "accumulate: 2", "prompt: gather", "nproc: 2"}
    assert asked <= set(lines)


def test_checkpoints_are_those_of_the_last_steps(whole: Ended) -> None:
    assert Checkpoints(whole.folder / "run" / "checkpoints").steps() == [6, 8]


@pytest.mark.usefixtures("no_world")
def test_a_complete_run_is_neither_overwritten_nor_trained_again(
    whole: Ended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = metrics(whole.folder)
    monkeypatch.chdir(whole.folder)
    command = ("train", "lm", *OPTIONS, "--nproc", "2", "--out", "run")
    said = refused(capsys, *command)
    assert said.startswith("error: --out: found a run in run already, expected another folder")
    assert call(*command, "--resume") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Nothing to do: the run in run is at step 8 of 8.")
    assert shown.err == ""
    assert metrics(whole.folder) == before


# -- disturbed -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path)
    write_text(tmp_path)
    return tmp_path


def wait_for_step(process: Program, step: int) -> Iterator[str]:
    """Read lines until a step has been shown."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if line.startswith(f"step={step} "):
            return
    raise AssertionError(f"the command ended before step {step}: {process.communicate()[1]}")


def test_killed_then_stopped_then_resumed_a_run_ends_as_if_undisturbed(
    folder: Path, whole: Ended
) -> None:
    command = ("--nproc", "2", "--out", "run")

    # A rank is killed: the run ends at once, with that rank's name, and nothing is left running.
    process = start(folder, *command)
    list(wait_for_step(process, 3))
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    ranks[1].kill()
    killed = Ended.of(folder, process)
    assert killed.code == 128 + signal.SIGKILL
    assert "error: rank 1 of 2 was killed by SIGKILL" in killed.err
    assert not any(rank.is_running() for rank in ranks)

    # Resumed, and asked to stop: it saves and says how to go on.
    process = start(folder, *command, "--resume")
    lines = list(wait_for_step(process, 5))
    assert any(re.match(r"resume     after step [24] of 8", line) for line in lines)
    process.send_signal(signal.SIGTERM)
    stopped = Ended.of(folder, process)
    if stopped.code == 0:  # on a slow machine it was done before it heard
        assert "step=8 " in stopped.out
    else:
        assert stopped.code == 128 + signal.SIGTERM
        match = re.match(r"Stopped by SIGTERM after step (\d) of 8, which is saved", stopped.err)
        assert match, stopped.err
        assert int(match[1]) in Checkpoints(folder / "run" / "checkpoints").steps()
        assert stopped.err.rstrip().endswith("--nproc 2 --out run --resume")

        # Started again as a job that is started by itself, to the end.
        finished = Ended.of(folder, start(folder, *command, "--auto-resume"))
        assert (finished.code, finished.err) == (0, "")

    assert metrics(folder) == metrics(whole.folder), "bit for bit"
    sample = (folder / "run" / "sample.txt").read_text()
    assert sample == (whole.folder / "run" / "sample.txt").read_text()


# The command, but its second rank is killed, once, before step 6.
DIES_ONCE = """
import os, signal
from pathlib import Path
from shardwise.app.cli.main import app
from shardwise.app.recipes.core.loop import Loop

step, died = Loop._step, Path("died")

def dies(self, position):
    if position.step == 5 and os.environ["RANK"] == "1" and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, position)

Loop._step = dies
app()
"""


def test_under_torchrun_a_killed_rank_is_named_and_the_run_continues(
    folder: Path, whole: Ended
) -> None:
    """Ranks of both attempts join the world that is there, and never mistake one for the other."""
    (folder / "dies_once.py").write_text(DIES_ONCE)
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"
    words = [*torchrun.split(), "dies_once.py", "train", "lm", *OPTIONS, "--out", "run"]
    ended = Ended.of(folder, start_program(words, folder=folder, env=shell_environment()))
    assert ended.code == 0, ended.err
    assert "starting" not in ended.out
    assert "failed (exitcode: -9) local_rank: 1" in ended.err
    assert "[rank 0] shardwise.base.errors.PeerLostError: rank 0 lost rank 1" in ended.err
    assert "Traceback" not in ended.err, "the rank that lost its peer is not the cause"
    record = json.loads((folder / "run" / "run.json").read_text())
    assert [session["from_step"] for session in record["sessions"]] == [0, 4]
    assert metrics(folder) == metrics(whole.folder)

"""The command line answers at once, and every mistake is one line and exit code 2."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.cli import main
from shardwise.app.cli import run as cli_run
from shardwise.app.cli import train as cli_train
from shardwise.app.cli.run import LaunchConfig
from shardwise.app.recipes.core.installed import install_line
from shardwise.app.recipes.core.job import TrainingJob
from shardwise.app.recipes.core.rundir import RunDir, locked
from shardwise.elastic.hosts import UNNUMBERED, Nodes, OnJoin
from shardwise.insight.schema.option import OptionError
from tests.cli import shell
from tests.cli.shell import call

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("no_world")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "--steps: found 0, expected 1 or more"),
        ("--steps many", "--steps: found 'many', expected a whole number"),
        ("--steps 1e30", "--steps: found '1e30', expected a whole number of at most 25 digits"),
        ("--lr=fast", "--lr: found 'fast', expected a number"),
        ("--lr -1", "--lr: found -1.0, expected a number above 0"),
        ("--beta1 1", "--beta1: found 1.0, expected 0 to 1, without 1"),
        ("--momentum 0.5", "--momentum: found 0.5, expected none: only muon and sgd have one"),
        ("--optimizer lion --momentum 0.5", "--momentum: found 0.5, expected none: only muon and"),
        ("--param-group embed*", "--param-group: found 'embed*', expected PATTERN:SETTING=VALUE"),
        ("--param-group :lr=1", "--param-group: found ':lr=1', expected PATTERN:SETTING=VALUE"),
        ("--param-group a:eps=1", "--param-group: found 'eps=1' in 'a:eps=1', expected lr=VALUE"),
        ("--param-group a:lr=nan", "--param-group: found 'nan' in 'a:lr=nan', expected a number"),
        ("--param-group a:lr=1,lr=2", "--param-group: found a setting twice in 'a:lr=1,lr=2'"),
        (
            "--param-group a:lr=1 --param-group a:lr=2",
            "--param-group: found 'a' twice, expected all its settings together",
        ),
        ("--optimizer sgd --momentum 1", "--momentum: found 1.0, expected 0 to 1, without 1"),
        ("--seq-length 0", "--seq-length: found 0, expected 1 or more"),
        ("--seq-length 9999", "--seq-length: found 9999, expected at most 1024"),
        ("--streams 0", "--streams: found 0, expected 1 or more"),
        ("--streams 4", "--streams: found 4, expected none given where tokens are the bytes"),
        ("--shuffle-buffer -1", "--shuffle-buffer: found -1, expected 0 or more"),
        ("--shuffle-buffer 9", "--shuffle-buffer: found 9, expected none given where tokens are"),
        ("--peak-flops 0", "--peak-flops: found 0.0, expected a number above 0"),
        ("--nproc 2 --batch-tokens 900", "--batch-tokens: found 900, expected a multiple of 256"),
        ("--batch-tokens 0", "--batch-tokens: found 0, expected 1 or more"),
        ("--batch-tokens 128 --accumulate 2", "--accumulate: found 2, expected none given"),
        ("--nnodes 2 --node-rank 2 --rdzv a:1", "--node-rank: found 2, expected 0 to 1"),
        ("--nnodes 2 --rdzv a:1", "--node-rank: found nothing, expected 0 to 1"),
        ("--node-rank 0", "--node-rank: found without --nnodes, expected --nnodes N as well"),
        ("--nnodes 2:1 --rdzv a:1", "--nnodes: found 2:1, expected 1 or more, or MIN:MAX"),
        ("--nnodes 1:2 --node-rank 2 --rdzv a:1", "--node-rank: found 2, expected 0 to 1"),
        ("--nnodes 3:3 --batch-tokens 512 --rdzv a:1", "--batch-tokens: found 512, expected a mul"),
        ("--max-restarts -1", "--max-restarts: found -1, expected 0 or more"),
        ("--peer-timeout 0", "--peer-timeout: found 0.0, expected a number above 0"),
        ("--eval-every -1", "--eval-every: found -1, expected 0 or more"),
        ("--sample-tokens -1", "--sample-tokens: found -1"),
        ("--temperature nan", "--temperature: found nan"),
        ("--strategy zero4", "--strategy: found 'zero4', expected one of full, grad-op"),
        ("--param-dtype fp8", "--param-dtype: found 'fp8', expected one of fp32, bf16"),
        ("--transport pigeon", "--transport: found 'pigeon', expected one of auto"),
        ("--wire int9", "--wire: found 'int9', expected fp32, bf16, fp8, int8, or gather="),
        ("--nproc 2 --wire hosts:int8", "--wire: found the dimension hosts, expected one of dp_s"),
        ("--nproc 0", "--nproc: found 0, expected 1 or more"),
        ("--nproc 100000", "--nproc: found 100000, expected at most "),
        ("--nproc 4 --mesh dp_shard=2", "--mesh: found dp_shard=2, a mesh of 2 ranks, expected"),
        ("--nproc 4 --strategy hybrid", "--strategy: found hybrid on one host without"),
        ("--nproc 4 --strategy hybrid --replicas 3", "--replicas: found 3, expected a number"),
        ("--nproc 4 --replicas 2", "--replicas: found 2 with strategy full"),
        ("--local-steps 9", "--local-steps: found strategy full, expected --strategy diloco with"),
        ("--diloco-overlap 0", "--diloco-overlap: found strategy full, expected --strategy diloco"),
        ("--strategy diloco", "--strategy: found diloco on one host without a number of replicas"),
        ("--offload tape", "--offload: found tape, expected host, or disk:FOLDER"),
        ("--strategy diloco --offload-parameters host", "--offload-parameters: found --strategy"),
        ("--offload-parameters disk:", "--offload-parameters: found disk:, expected host, or disk"),
        ("--offload-activations host", "--offload-activations: found host, expected --activation"),
        ("--master-dtype fp32", "--master-dtype: found fp32, expected --offload too"),
        ("--offload host --master-dtype fp32", "--master-dtype: found fp32 with shards in fp32"),
        (
            "--recompute-every 2",
            "--recompute-every: found 2, expected --activation-checkpointing too",
        ),
        ("--strategy diloco --local-steps 0", "--local-steps: found 0, expected 1 or more"),
        ("--strategy diloco --outer-lr nan", "--outer-lr: found nan, expected a number above 0"),
        ("--strategy diloco --outer-momentum 1", "--outer-momentum: found 1.0, expected 0 to 1"),
        ("--strategy diloco --outer-warmup -1", "--outer-warmup: found -1, expected 0 or more"),
        ("--strategy diloco --diloco-wire int2", "--diloco-wire: found 'int2', expected fp32, "),
        (
            "--strategy diloco --diloco-wire topk:0.02",
            "--diloco-wire: found 'topk:0.02', expected one of fp32, fp16, bf16, fp8, int8, int4, "
            "ternary: top-k was removed, ternary loses less",
        ),
        (
            "--strategy diloco --local-steps 9 --diloco-overlap 9",
            "--diloco-overlap: found 9, expected at most 8, or a whole round with steps that",
        ),
        ("--model llama-150", "did you mean llama-150m?"),
        ("--data nowhere.txt", "--data: found nothing at nowhere.txt"),
        ("--data empty.txt", "--data: found an empty file: empty.txt"),
        ("--data short.txt", "--data: found 5 bytes in 1 file"),
        ("--resume", "--resume: found no run in runs/lm"),
        ("--resume --auto-resume", "--resume: found --auto-resume too, expected one of the two"),
        ("--resume --overwrite", "--resume: found --overwrite too"),
        (
            "--out taken",
            "--out: found other files in taken, such as 'thesis.tex', expected an empty",
        ),
        ("notes.txt", "--data: found nothing at notes.txt, expected a file, a folder or a pat"),
        ("--stepps 3", "No such option: --stepps"),
    ],
)
def test_bad_options(capsys: Capture, arguments: str, message: str) -> None:
    Path("empty.txt").touch()
    Path("short.txt").write_text("short")
    Path("taken").mkdir()
    Path("taken", "thesis.tex").touch()
    refused(capsys, f"lm {arguments}", message)


def refused(capsys: Capture, arguments: str, message: str) -> None:
    """Check that a training is refused in one line, before anything happens."""
    assert message in shell.refused(capsys, "train", *arguments.split())
    assert not Path("runs").exists(), "nothing was written"


def test_a_folder_that_another_run_trains_into_is_refused(capsys: Capture) -> None:
    with locked(RunDir(Path("runs/lm"))):
        for options in (("--out", "runs/lm"), ("--auto-resume",)):
            assert call("train", "lm", *options) == 2
            shown = capsys.readouterr()
            assert shown.out == "", "nothing was started"
            assert re.fullmatch(r"error: --out: found a run that is under way in .*\n", shown.err)


@pytest.mark.parametrize("option", [(), ("--overwrite",), ("--auto-resume",)])
def test_ranks_are_asked_for_the_same_in_every_attempt(
    monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    """Whether the attempt before had begun the run is known from its folder alone."""
    asked: list[Any] = []

    def launch(command: Callable[[int], list[str]], *_: object) -> int:
        jobs = [pickle.loads(Path(command(attempt)[-1]).read_bytes()) for attempt in (0, 1)]
        asked.extend(job.config for job, _ in jobs)
        return 0

    monkeypatch.setattr(cli_run, "run_job", launch)
    options = ("--device", "cpu", "--max-restarts", "1", *option)
    assert call("train", "lm", *options) == 0
    assert asked[0].train.output.existing.value == (option or ("--refuse",))[0][2:]
    assert asked[1] == asked[0]


def test_a_job_holds_its_folder_while_its_ranks_run_and_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launch(*_: object) -> int:
        with pytest.raises(OptionError, match=f"process {os.getpid()} on"):
            locked(RunDir(Path("runs/lm"))).__enter__()
        return 7

    monkeypatch.setattr(cli_run, "run_job", launch)
    assert call("train", "lm", "--device", "cpu") == 7
    with locked(RunDir(Path("runs/lm"))):
        pass  # it has let go


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("mnist", "--data-dir: found none, expected a folder with MNIST's four files"),
        ("mnist --data-dir nowhere", "--data-dir: found no folder nowhere, expected one with"),
        ("mnist --data-dir mnist", "that begins with 3c 21 64 6f, expected 00 00 08 03"),
        ("mnist --data-dir mnist --epochs 0", "--epochs: found 0, expected 1 or more"),
        ("mnist --data-dir mnist --eval-interval -1", "--eval-every: found -1, expected 0"),
        (
            "mnist --data-dir mnist --strategy diloco",
            "expected another one: only train lm has them",
        ),
        ("vit --dry-run --strategy diloco", "--strategy: found diloco without settings of DiLoCo"),
        ("imagenet", "--data-dir: found none, expected a folder with train and val, or --fake-"),
        ("imagenet --data-dir x --fake-data", "--fake-data: found --data-dir too, expected one"),
        ("imagenet --data-dir mnist", "--data-dir: found no folder train in mnist, expected"),
        ("imagenet --fake-data --model resnet51", "did you mean resnet"),
        ("imagenet --fake-data --warmup-epochs nan", "--warmup-epochs: found nan"),
        ("imagenet --fake-data --eval-batch-size 0", "--eval-batch-size: found 0"),
        ("imagenet --fake-data --lr-drop-factor 0", "--lr-drop-factor: found 0.0"),
        ("imagenet --fake-data --lr-drop-epochs -1", "--lr-drop-epochs: found -1"),
        ("imagenet --fake-data --image-size 8", "--image-size: found 8, expected 32 or more"),
        ("imagenet --fake-data --workers 0", "--workers: found 0, expected 1 to 1,024"),
        ("vit", "--data-dir: found none, expected a folder with train and val, or --fake-data"),
        ("vit --fake-data --model vit-10", "did you mean vit-10b?"),
        ("vit --fake-data --image-size 100", "--image-size: found 100, expected a multiple of 16"),
        ("vit --fake-data --image-size 0", "--image-size: found 0, expected a multiple of 16"),
        ("vit --fake-data --layers 0", "--layers: found 0, expected 1 to 10,000"),
        ("vit --dry-run --model vit.json", "--layers: found many, expected 1 or more"),
        ("vit --fake-data --world-size 4", "--world-size: found 4 without --dry-run, expected"),
        (
            "vit --dry-run --nnodes 2 --node-rank 0 --rdzv a:1",
            "--nnodes: found 2, expected none with --dry-run: say --world-size",
        ),
        ("mnist --out odd\udcff", r"--out: found 'odd\udcff', expected a path in UTF-8"),
        ("vit --dry-run --world-size 0", "--world-size: found 0, expected 1 to 100,000"),
        ("vit --dry-run --nproc 0", "--nproc: found 0, expected 1 or more"),
        ("vit --dry-run --nproc 6 --strategy hybrid", "one that divides the 6 ranks; say"),
    ],
)
def test_bad_options_of_trainings_on_images(capsys: Capture, arguments: str, message: str) -> None:
    Path("mnist").mkdir()
    Path("mnist", "train-images-idx3-ubyte").write_text("<!doctype html>")
    Path("mnist", "train-labels-idx1-ubyte").touch()
    Path("vit.json").write_text('{"model_type": "vit", "num_hidden_layers": "many"}')
    refused(capsys, arguments, message)


def test_a_bad_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("SHARDWISE_TRANSPORT", "pigeon")
    assert call("train", "lm") == 2
    assert capsys.readouterr().err.startswith("error: --transport: found 'pigeon', expected one of")


def test_a_world_and_another_nproc_contradict(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert call("train", "lm", "--nproc", "3") == 2
    assert capsys.readouterr().err.startswith("error: --nproc: found 3, expected 2 or none given")
    hosts = ["--nnodes", "2", "--node-rank", "0", "--rdzv", "a:1"]
    for more, message in (
        (hosts, "--nnodes: found 2"),
        (["--max-restarts", "1"], "--max-restarts"),
    ):
        assert call("train", "lm", *more) == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("arguments", "why_not_three"),
    [
        ("lm --batch-tokens 512", "--batch-tokens: found 512, expected a multiple of 384"),
        (
            "imagenet --fake-data --strategy hybrid --replicas 2",
            "--replicas: found 2, expected a number",
        ),
        ("vit --fake-data --mesh dp_shard=2", "--mesh: found dp_shard=2, a mesh of 2 ranks"),
    ],
)
def test_hosts_that_come_later_are_held_to_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, arguments: str, why_not_three: str
) -> None:
    jobs: list[Nodes] = []

    def start(command: object, nproc: int, restarts: int, nodes: Nodes) -> int:
        assert nodes.on_join is OnJoin.STAY
        jobs.append(nodes)
        return 0

    monkeypatch.setattr(cli_run, "run_job", start)
    hosts = "--lr 0.25 --nnodes 1:4 --rdzv a:1 --node-rank"
    for rank in ("0", "3"):
        assert call("train", *arguments.split(), *hosts.split(), rank) == 0
    assert call("train", *arguments.split(), *hosts.split()[:-1]) == 0
    assert [nodes.rank for nodes in jobs] == [0, 3, UNNUMBERED]
    nodes = jobs[0]
    assert (nodes.least, nodes.count) == (1, 4)
    assert nodes.why_not(2) is None
    assert str(nodes.why_not(3)).startswith(why_not_three)
    assert nodes.options["--lr"] == 0.25
    assert nodes.options["train"] == arguments.split()[0]
    assert all(other.options == nodes.options for other in jobs)


@pytest.mark.parametrize("missing", ["transformers"])
def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, missing: str
) -> None:
    from importlib import util

    find_spec = util.find_spec
    monkeypatch.setattr(
        util, "find_spec", lambda name, *a: None if name == missing else find_spec(name, *a)
    )
    assert call("train", "lm") == 2
    assert capsys.readouterr().err == (
        f"error: training needs {missing}, not installed here: {install_line([missing])}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--optimizer lion", (5e-4, 0.4, (0.9, 0.99))),
        ("--optimizer lion --beta1 0.5 --weight-decay 1", (5e-4, 1.0, (0.5, 0.99))),
        ("--optimizer adafactor", (0.05, 0.1, (0.9, 0.95))),
        ("--optimizer adafactor --lr 0.5", (0.5, 0.1, (0.9, 0.95))),
        ("--beta2 0.5", (2e-3, 0.1, (0.9, 0.5))),
    ],
)
def test_optimizers_have_defaults_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    expected: tuple[float, float, tuple[float, float]],
) -> None:
    jobs: list[TrainingJob] = []
    monkeypatch.setattr(cli_train, "run", lambda job, launch: jobs.append(job))
    assert call("train", "lm", *arguments.split()) == 0
    found: Any = jobs[0].config.train.optimizer
    assert (found.lr, found.weight_decay, found.betas) == expected


def test_options_become_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[TrainingJob] = []
    monkeypatch.setattr(cli_train, "run", lambda job, launch: jobs.append(job))
    arguments = (
        "--model llama-34m --data a.txt b.txt --data c.txt --steps 7 --batch-size 3 "
        "--accumulate 2 --step-in-backward --lr 0.5 --beta2 0.5 --weight-decay 0 --warmup 1 "
        "--clip-grad 0 --seed 9 "
        "--schedule warmup-stable-decay --decay-steps 3 --min-lr 0 --device cpu --optimizer muon "
        "--momentum 0.5 --offload disk:/tmp/x --offload-parameters disk:y --master-dtype fp32 "
        "--strategy hybrid --replicas 2 --param-dtype bf16 --shard-dtype bf16 --reduce-dtype bf16 "
        "--activation-checkpointing full --recompute-every 2 --transport collectives --out here "
        "--checkpoint-every 5 --keep-last 9 --async-checkpoint --eval-every 4 --keep-best "
        "--replicate-every 3 "
        "--log wandb,jsonl --overwrite --prompt x --sample-tokens 3 --temperature 0 "
        "--param-group *norm*:lr=1 --param-group embed*:lr=0.1,weight-decay=0 "
        "--tokenizer gpt2 --streams 12 --shuffle-buffer 9 --batch-tokens 256 --peak-flops 1e12 "
        "--logits chunks"
    )
    assert call("train", "lm", *arguments.split()) == 0
    from shardwise.insight.schema.option import as_json, flatten

    assert flatten(as_json(jobs[0].config)) == {
        "model": "llama-34m", "data": ["a.txt", "c.txt", "b.txt"], "seq_length": 512,
        "prompt": "x", "sample_tokens": 3, "temperature": 0.0, "steps": 7, "epochs": None,
        "batch_size": 3,
        "accumulate": 2, "stepping": "in-backward",
        "seed": 9, "device": "cpu", "algorithm": "muon", "momentum": 0.5,
        "lr": 0.5, "beta1": 0.9, "beta2": 0.5,
        "param_groups": ["*norm*:lr=1", "embed*:lr=0.1,weight-decay=0"],
        "weight_decay": 0.0, "warmup": 1, "schedule": "warmup-stable-decay", "decay_steps": 3,
        "min_lr": 0.0, "clip_grad": 0.0, "strategy": "hybrid", "replicas": 2,
        "mesh": None, "param_dtype": "bf16", "shard_dtype": "bf16", "reduce_dtype": "bf16",
        "offload": "disk:/tmp/x", "offload_parameters": "disk:y", "master_dtype": "fp32",
        "offload_activations": None, "transport": "collectives",
        "collective_wire": "gather=fp32,reduce=fp32", "reshard_after_forward": None,
        "recompute_every": 2, "activation_checkpointing": "full", "out": "here",
        "checkpoint_every": 5, "keep_last": 9, "keep_best": True, "compile": False,
        "async_checkpoint": True, "replicate_every": 3, "eval_every": 4, "log": "wandb,jsonl",
        "existing": "overwrite", "log_every": 1,
        "diloco": None, "tokenizer": "gpt2", "streams": 12, "shuffle_buffer": 9,
        "batch_tokens": 256, "peak_flops": 1e12, "peer_timeout": None, "over_hosts": False,
        "logits": "chunks",
        "pretrained": None, "chat": [], "packing": "packed", "eval_data": [],
        "lora": None, "base": None, "frozen": None, "merge": False, "page": False, "timeline": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "more", ["lm", "mnist --data-dir d", "imagenet --fake-data", "vit --fake-data"]
)
def test_options_for_several_hosts_reach_the_launcher(
    monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    calls: list[Any] = []

    def run(job: TrainingJob, launch: LaunchConfig) -> None:
        monkeypatch.setattr(job, "check", lambda world: sys.exit(0))  # and start nothing
        calls.append((job, launch))
        cli_run.run(job, launch)

    monkeypatch.setattr(cli_train, "run", run)
    options = (
        "--nproc 2 --nnodes 3 --node-rank 1 --rdzv here:99 --rdzv-timeout 9 --max-restarts 4 "
        "--peer-timeout 60"
    )
    assert call("train", *more.split(), *options.split()) == 0
    assert call("train", *more.split(), *options.split()[:2]) == 0
    (several, launch), (one, alone) = calls
    assert (launch.nproc, launch.max_restarts) == (2, 4)
    assert launch.nodes() == Nodes(3, 1, "here", 99, 9.0)
    assert several.config.train.peer_timeout == 60
    assert several.config.train.sharding.over_hosts
    assert alone == LaunchConfig(nproc=2)
    assert one.config.train.peer_timeout is None
    assert not one.config.train.sharding.over_hosts


def test_options_for_images_become_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.insight.schema.option import as_json, flatten

    jobs: list[TrainingJob] = []
    monkeypatch.setattr(cli_train, "run", lambda job, launch: jobs.append(job))
    common = (
        "--epochs 3 --steps 9 --batch-size 5 --activation-checkpointing full --eval-interval 7 "
    )
    mnist = "--data-dir d --use-nested-fsdp --lr 0.5 --warmup 4 --weight-decay 0"
    imagenet = (
        "--data-dir d --model tiny --image-size 64 --workers 3 --warmup-epochs 2.5 "
        "--lr-drop-epochs 8 --lr-drop-factor 2 --momentum 0.5 --eval-batch-size 11"
    )
    assert call("train", "mnist", *common.split(), *mnist.split()) == 0
    assert call("train", "imagenet", *common.split(), *imagenet.split()) == 0
    assert call("train", "imagenet", "--fake-data") == 0
    vit = (
        "--data-dir d --model vit-huge --layers 3 --image-size 28 --patch-size 7 --workers 3 "
        "--no-nested-fsdp --lr 0.5 --warmup 4 --weight-decay 0"
    )
    assert call("train", "vit", *common.split(), *vit.split()) == 0
    assert call("train", "vit", "--fake-data", "--model", "vit-10b") == 0
    first, second, default, third, huge = (flatten(as_json(job.config)) for job in jobs)
    asked = {
        "data_dir": "d", "epochs": 3, "steps": 9, "batch_size": 5, "eval_every": 7,
        "activation_checkpointing": "full",
    }  # fmt: skip
    assert first.items() >= asked.items()
    own: dict[str, object] = {"nested": True, "lr": 0.5, "warmup": 4, "weight_decay": 0.0}
    assert first.items() >= own.items()
    assert second.items() >= asked.items()
    own = {
        "model": "tiny", "image_size": 64, "threads": 3, "warmup_epochs": 2.5, "drop_epochs": 8,
        "drop_factor": 2.0, "momentum": 0.5, "eval_batch_size": 11,
    }  # fmt: skip
    assert second.items() >= own.items()
    published = {
        "model": "resnet50", "lr": 0.4, "warmup_epochs": 5.0, "drop_epochs": 30,
        "drop_factor": 10.0, "epochs": 100, "momentum": 0.9, "weight_decay": 1e-4, "steps": None,
    }  # fmt: skip
    assert default.items() >= published.items()
    assert third.items() >= asked.items()
    own = {
        "model": "vit-huge", "layers": 3, "image_size": 28, "patch_size": 7, "threads": 3,
        "nested": False, "lr": 0.5, "warmup": 4, "weight_decay": 0.0,
    }  # fmt: skip
    assert third.items() >= own.items()
    published = {
        "layers": None, "image_size": 224, "nested": True, "epochs": 300, "lr": 1e-3,
        "weight_decay": 0.1, "clip_grad": 1.0, "warmup": 10_000, "batch_size": 8,
    }  # fmt: skip
    assert huge.items() >= published.items()


def test_help_begins_with_what_a_newcomer_needs(capsys: Capture) -> None:
    assert call("--help") == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    names = [line.split()[1] for line in shown.splitlines() if line.startswith("│ ")]
    assert [name for name in names if name in ("train", "run", "plan")] == ["train", "run", "plan"]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["train"], ["train", "lm", "--help"]])
def test_help_is_shown(capsys: Capture, arguments: list[str]) -> None:
    assert call(*arguments) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "Usage: " in shown
    if "lm" in arguments:
        assert "shardwise train lm --nproc 2" in shown, "an example"


@pytest.mark.parametrize("recipe", ["lm", "mnist", "imagenet", "vit"])
def test_every_option_is_explained_and_legible_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, recipe: str
) -> None:
    import typer

    command = typer.main.get_command(main.commands([])).commands["train"].commands[recipe]  # type: ignore[attr-defined]
    options = [p for p in command.params if not p.hidden]
    assert [p.name for p in options if not p.help] == []
    monkeypatch.setenv("COLUMNS", "80")
    assert call("train", recipe, "--help") == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    names = [p.opts[0] for p in options if p.opts[0].startswith("-")]
    assert [name for name in names if name not in shown] == []
    assert "…" not in shown


def test_no_line_of_help_is_broken_in_two_in_80_columns() -> None:
    """Typer keeps the line breaks of paragraphs and examples, so lines have to fit."""
    import inspect

    import typer

    def commands(of: Any, name: str) -> Iterator[tuple[str, Any]]:
        yield name, of
        for inner, command in getattr(of, "commands", {}).items():
            yield from commands(command, f"{name} {inner}")

    broken = []
    for name, command in commands(typer.main.get_command(main.commands([])), "shardwise"):
        _, *paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
        examples = re.sub(r"\[/?(bold|cyan)\]", "", command.epilog or "")
        lines = [line for text in (*paragraphs, examples) for line in text.splitlines()]
        broken += [(name, line) for line in lines if len(line) > 78]
    assert not broken


def test_the_version_is_shown(capsys: Capture) -> None:
    assert call("--version") == 0
    assert re.fullmatch(r"shardwise \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize("arguments", ["train lm --help", "launch-lines --hosts a,b -- train lm"])
def test_a_reader_that_has_gone_is_no_mistake(arguments: str) -> None:
    """As behind ``| head``: the exit code is what shells make of SIGPIPE, and nothing is said."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "shardwise", *arguments.split()],
            stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "closed"),
    [
        *[("--version", how) for how in ("1</dev/null", ">&- 2>&-", ">&- <&-")],
        *[
            (arguments, ">&-")
            for arguments in ("train lm --steps 1", "watch .", "--version")
        ],
        *[
            pytest.param(arguments, ">&-", marks=pytest.mark.long)
            for arguments in (
                "checkpoint ls .", "plan llama-tiny", "inspect", "doctor",
                "calibrate", "compare . .", "generate .", "merge-lora . merged",
                "launch-lines --hosts a,b -- train lm",
            )
        ],
    ],
)  # fmt: skip
def test_without_a_standard_output_every_command_ends(arguments: str, closed: str) -> None:
    """And before anything happens: a file could get the number of a stream, and its output."""
    line = f"exec {sys.executable} -m shardwise {arguments} {closed}"
    ended = subprocess.run(
        ["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    said = "error: cannot write: standard output is closed; >/dev/null discards what is printed\n"
    assert (ended.returncode, ended.stderr) == (1, "" if "2>&-" in closed else said)
    assert not list(Path().iterdir())


def test_closed_streams_are_given_away_and_a_mistake_is_still_one() -> None:
    line = f"exec {sys.executable} -m shardwise train lm --steps 0 2>&- <&-"
    ended = subprocess.run(["sh", "-c", line], capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, b"", b"")

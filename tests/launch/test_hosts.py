"""The command lines that start a job over several hosts, as a shell reads them."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from shardwise.cli.main import app
from shardwise.launch.errors import UserError
from shardwise.launch.hosts import Nodes

COMMAND = ["train", "lm", "--data", "my notes/*.md", "--strategy", "hybrid"]


def output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["shardwise", "launch-lines", *options])
    with pytest.raises(SystemExit) as ended:
        app()
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err


def test_every_host_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--hosts", "a,b", "--nproc", "4", "--rdzv-port", "29500", "--", *COMMAND]
    code, out, _ = output(monkeypatch, capsys, *options)
    assert code == 0
    heads, lines = out.splitlines()[::2], out.splitlines()[1::2]
    assert heads == ["# on a", "# on b"]
    for rank, line in enumerate(lines):
        words = ["shardwise", *COMMAND, "--nproc", "4", "--nnodes", "2"]
        assert shlex.split(line) == [*words, "--node-rank", str(rank), "--rdzv", "a:29500"]
    code, again, _ = output(monkeypatch, capsys, "--hosts", "a, b", *options[2:])
    assert (code, again) == (0, out)
    for spelled in ("2001:db8::1,b", "[2001:db8::1],b"):
        code, again, _ = output(monkeypatch, capsys, "--hosts", spelled, "--", "train", "lm")
        assert code == 0
        assert shlex.split(again.splitlines()[1])[-1] == "[2001:db8::1]:29400"
    code, out, _ = output(monkeypatch, capsys, "--nnodes", "1:3", *options)
    heads, lines = out.splitlines()[::2], out.splitlines()[1::2]
    assert heads == ["# on a", "# on b", "# on every host that joins later"]
    for own, line in zip((["--node-rank", "0"], ["--node-rank", "1"], []), lines, strict=True):
        words = ["shardwise", *COMMAND, "--nproc", "4", "--nnodes", "1:3"]
        assert shlex.split(line) == [*words, *own, "--rdzv", "a:29500"]
    code, out, _ = output(monkeypatch, capsys, "--torchrun", *options)
    line = out.splitlines()[3]
    assert line.startswith("torchrun --nnodes=2 --node-rank=1 --nproc-per-node=4 --master-addr a ")
    assert shlex.split(line)[-len(COMMAND) :] == COMMAND


def test_the_script_for_slurm_is_one_that_bash_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = output(monkeypatch, capsys, "--slurm", "4", "--nproc", "8", "--", *COMMAND)
    assert code == 0
    checked = subprocess.run(["bash", "-n"], input=out, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "#SBATCH --nodes=4" in out
    # With commands of Slurm that do what they would on the second node of two.
    fakes = """
        scontrol() { printf 'n1\\nn2\\n'; }
        srun() { while [[ $1 == -* ]]; do shift; done; "$@"; }
        exec() { :; }
        export SLURM_NNODES=2 SLURM_NODEID=1 SLURM_JOB_NODELIST='n[1-2]'
        shardwise() { printf '%s|' "$@"; echo; }
        export -f shardwise
    """
    script = fakes + out.replace("exec shardwise", "shardwise")
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    doctor, train = ran.stdout.splitlines()
    where = "--nnodes|2|--node-rank|1|--rdzv|n1:29400|"
    assert doctor == f"doctor|--nproc|8|{where}"
    assert train == f"{'|'.join(COMMAND)}|--nproc|8|{where}"


def test_a_line_in_bash_is_the_command_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = ["it's", 'a "word"', "$HOME `pwd` *.md", "two\nlines", "", "back\\slash", "-x", "ü"]
    command = ["train", "lm", "--strategy", "diloco", "--local-steps", "50", "--data", *odd]
    shown = 'shardwise() { printf \'%s\\0\' "$@"; }; torchrun() { shardwise "$@"; }\n'
    for more in ([], ["--torchrun"]):
        code, out, _ = output(monkeypatch, capsys, "--hosts", "::1", *more, "--", *command)
        assert code == 0
        ran = subprocess.run(
            ["bash", "-c", shown + out], capture_output=True, text=True, check=True
        )
        words = ran.stdout.split("\0")
        start = words.index("train")
        assert words[start : start + len(command)] == command
    _, out, _ = output(monkeypatch, capsys, "--hosts", "::1,::2", "--", "train", "lm")
    assert Nodes.of(2, 0, shlex.split(out.splitlines()[1])[-1], 1.0) == Nodes(2, 0, "::1", 29400, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hosts a,b", "found no command, expected one after --"),
        ("-- train lm", "--hosts: found none, expected --hosts A,B or --slurm NODES"),
        ("--hosts a,a -- train lm", "--hosts: found a,a, expected names, each once"),
        ("--hosts a:29400,b -- train lm", "--hosts: found a:29400, expected names without ports"),
        (
            "--hosts a -- train --lr 1",
            "found train, expected a recipe to train as well: -- train lm",
        ),
        ("--hosts a --nproc 0 -- train lm", "--nproc: found 0"),
        (
            "--hosts a -- train lm --nproc 2",
            "found --nproc after --, expected none: launch-lines adds it",
        ),
        ("--hosts a --slurm 2 -- train lm", "expected 1 or more, and neither --hosts nor --torchr"),
        ("--hosts a --nprocs 3 -- train lm", "found --nprocs, expected options of its own, then"),
        ("--hosts a -- inspect llama-tiny", "found inspect, expected options of its own, then --"),
        ("--hosts a;b -- train lm", "--hosts: found a;b, expected names, each once"),
        ("--hosts a,b --nnodes 1:1 -- train lm", "--nnodes: found 1:1, expected MIN:MAX, with MAX"),
        ("--hosts a --nnodes 2 -- train lm", "--nnodes: found 2, expected MIN:MAX, with MAX 1"),
        ("--slurm 2 --nnodes 1:2 -- train lm", "--nnodes: found 1:2, expected none with --slurm"),
        ("--hosts a --torchrun -- train lm --max-restarts 1", "--torchrun: found --max-restarts"),
    ],
)
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    code, out, err = output(monkeypatch, capsys, *options.split())
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("count", "rank", "rdzv", "message"),
    [
        (2, None, "a:1", "--node-rank: found None, expected 0 to 1"),
        (2, 2, "a:1", "--node-rank: found 2, expected 0 to 1"),
        (2, 0, None, "--rdzv: found None, expected HOST:PORT"),
        (2, 0, "a", "--rdzv: found a, expected HOST:PORT"),
        (2, 0, "a:99999", "--rdzv: found a:99999"),
        (2, 0, "fd77::1:29400", "--rdzv: found fd77::1:29400, .* IPv6 address in brackets"),
        (2, 0, "[fd77::1:29400", r"--rdzv: found \[fd77::1:29400"),
        (0, 0, "a:1", "--nnodes: found 0"),
        (None, 1, None, "--node-rank: found without --nnodes"),
    ],
)
def test_half_a_description_of_the_hosts_is_refused(
    count: int | None, rank: int | None, rdzv: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Nodes.of(count, rank, rdzv, 1.0)


@pytest.mark.parametrize(
    ("rdzv", "address", "where"),
    [
        ("host-a:29400", "host-a", "host-a:29400"),
        ("[2001:DB8:0::1]:29400", "2001:db8::1", "[2001:db8::1]:29400"),
        ("[fe80::1%eth0]:29400", "fe80::1%eth0", "[fe80::1%eth0]:29400"),
    ],
)
def test_where_hosts_meet_is_a_name_or_a_number(rdzv: str, address: str, where: str) -> None:
    nodes = Nodes.of(2, 0, rdzv, 1.0)
    assert nodes is not None
    assert (nodes.address, nodes.port, nodes.where) == (address, 29400, where)

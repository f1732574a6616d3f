"""The command lines that start a job over several hosts, as a shell reads them."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from shardwise.app.cli.run import LaunchConfig
from shardwise.base.errors import UserError
from shardwise.elastic.hosts import Nodes, read_token
from tests.cli.shell import call

COMMAND = ["train", "lm", "--data", "my notes/*.md", "--strategy", "hybrid"]


def output(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    return call("launch-lines", *options), *capsys.readouterr()


def test_every_host_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hosts", "a,b", "--nproc", "4", "--rdzv-port", "29500", "--", *COMMAND]
    code, out, err = output(capsys, *options)
    assert code == 0
    assert "--rdzv-token-file" in err and "SHARDWISE_RDZV_TOKEN" in err
    heads, lines = out.splitlines()[::2], out.splitlines()[1::2]
    assert heads == ["# on a", "# on b"]
    for rank, line in enumerate(lines):
        words = ["shardwise", *COMMAND, "--nproc", "4", "--nnodes", "2"]
        assert shlex.split(line) == [*words, "--node-rank", str(rank), "--rdzv", "a:29500"]
    code, again, _ = output(capsys, "--hosts", "a, b", *options[2:])
    assert (code, again) == (0, out)
    for spelled in ("2001:db8::1,b", "[2001:db8::1],b"):
        code, again, _ = output(capsys, "--hosts", spelled, "--", "train", "lm")
        assert code == 0
        assert shlex.split(again.splitlines()[1])[-1] == "[2001:db8::1]:29400"
    code, out, _ = output(capsys, "--nnodes", "1:3", *options)
    heads, lines = out.splitlines()[::2], out.splitlines()[1::2]
    assert heads == ["# on a", "# on b", "# on every host that joins later"]
    for own, line in zip((["--node-rank", "0"], ["--node-rank", "1"], []), lines, strict=True):
        words = ["shardwise", *COMMAND, "--nproc", "4", "--nnodes", "1:3"]
        assert shlex.split(line) == [*words, *own, "--rdzv", "a:29500"]
    code, out, _ = output(capsys, "--torchrun", *options)
    line = out.splitlines()[3]
    assert line.startswith("torchrun --nnodes=2 --node-rank=1 --nproc-per-node=4 --master-addr a ")
    assert shlex.split(line)[-len(COMMAND) :] == COMMAND


def test_the_script_for_slurm_is_one_that_bash_takes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "--slurm", "4", "--nproc", "8", "--", *COMMAND)
    assert code == 0
    checked = subprocess.run(["bash", "-n"], input=out, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "#SBATCH --nodes=4" in out
    # With commands of Slurm that do what they would on the second node of two.
    fakes = """
        scontrol() { echo n1; sleep 0.1; echo n2; }  # it must not be cut off in between
        srun() { while [[ $1 == -* ]]; do shift; done; "$@"; }
        exec() { :; }
        export SLURM_NNODES=2 SLURM_NODEID=1 SLURM_JOB_NODELIST='n[1-2]'
        shardwise() { printf '%s|' "$@"; echo; }
        export -f shardwise
    """
    tasks_see = "\nbash -c 'echo $SHARDWISE_RDZV_TOKEN'\n"
    script = fakes + out.replace("exec shardwise", "shardwise") + tasks_see
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    doctor, train, token = ran.stdout.splitlines()
    assert re.fullmatch("[0-9a-f]{64}", token)
    where = "--nnodes|2|--node-rank|1|--rdzv|n1:29400|"
    assert doctor == f"doctor|--nproc|8|{where}"
    assert train == f"{'|'.join(COMMAND)}|--nproc|8|{where}"


def test_slurm_leaves_it_to_the_job_who_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """srun would end the hosts that are left, or those that still save."""
    for more, keeps in ((["--max-restarts=1"], True), ([], False)):
        _, out, _ = output(capsys, "--slurm", "4", "--", *COMMAND, *more)
        *_, train = out.splitlines()
        assert train.startswith("srun --kill-on-bad-exit=0 --wait=0 ")
        assert ("--no-kill" in train.split(), "#SBATCH --no-kill" in out) == (keeps, keeps)


def test_options_for_hosts_come_before_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "--max-restarts", "3", "my script.py", "--nproc", "9", "--rdzv", "x"]
    code, out, _ = output(capsys, "--hosts", "a,b", "--", *command)
    assert code == 0
    where = ["--nproc", "1", "--nnodes", "2", "--node-rank", "1", "--rdzv", "a:29400"]
    assert shlex.split(out.splitlines()[3]) == ["shardwise", "run", *where, *command[1:]]
    code, out, _ = output(capsys, "--slurm", "2", "--", *command)
    assert code == 0
    *_, quoted = shlex.split(out.splitlines()[-1])
    words = shlex.split(quoted.replace("$", ""))
    where = ["SLURM_NNODES", "--node-rank", "SLURM_NODEID", "--rdzv", "MEET"]
    assert words == ["exec", "shardwise", "run", "--nproc", "1", "--nnodes", *where, *command[1:]]
    for module in (["--module", "package.train"], ["-m", "package.train"], ["train.py"]):
        command = ["run", *module, "--max-restarts", "3"]
        code, out, _ = output(capsys, "--hosts", "a", "--torchrun", "--", *command)
        assert code == 0
        words = shlex.split(out.splitlines()[1])
        assert words[-len(command) :] == ["29400", *command[1:]]


def test_a_line_in_bash_is_the_command_that_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = ["it's", 'a "word"', "$HOME `pwd` *.md", "two\nlines", "", "back\\slash", "-x", "ü"]
    command = ["train", "lm", "--strategy", "diloco", "--local-steps", "50", "--data", *odd]
    shown = 'shardwise() { printf \'%s\\0\' "$@"; }; torchrun() { shardwise "$@"; }\n'
    for more in ([], ["--torchrun"]):
        code, out, _ = output(capsys, "--hosts", "::1", *more, "--", *command)
        assert code == 0
        ran = subprocess.run(
            ["bash", "-c", shown + out], capture_output=True, text=True, check=True
        )
        words = ran.stdout.split("\0")
        start = words.index("train")
        assert words[start : start + len(command)] == command
    _, out, _ = output(capsys, "--hosts", "::1,::2", "--", "train", "lm")
    assert Nodes.of(2, 0, shlex.split(out.splitlines()[1])[-1], 1.0) == Nodes(2, 0, "::1", 29400, 1)


def test_lines_that_name_a_token_need_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--rdzv-token-file", "t"], ["--rdzv-token-file=t"]):
        _, out, err = output(capsys, "--hosts", "a,b", "--", "train", "lm", *given)
        assert err == ""
        assert shlex.join(given) in out.splitlines()[1]
    for alone in (["--hosts", "a"], ["--hosts", "a,b", "--torchrun"]):
        assert output(capsys, *alone, "--", "train", "lm")[2] == ""


SECRET = "0123456789abcdef"


@pytest.mark.parametrize("text", [SECRET, f"{SECRET}\n", f"{SECRET} \r\n\n", f" {SECRET}\t"])
def test_a_token_is_read_without_the_white_space_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.delenv("SHARDWISE_RDZV_TOKEN", raising=False)
    file = tmp_path / "token"
    file.write_bytes(text.encode())
    file.chmod(0o600)
    assert read_token(file) == text.rstrip().encode()
    assert read_token(None) == b""
    monkeypatch.setenv("SHARDWISE_RDZV_TOKEN", text)
    assert read_token(None) == text.rstrip().encode()
    monkeypatch.setenv("SHARDWISE_RDZV_TOKEN", "of the environment, long enough")
    assert read_token(file) == text.rstrip().encode()


@pytest.mark.parametrize(
    ("text", "length"), [("", 0), (" \n", 0), (SECRET[1:] + "\n", 15), (SECRET * 257, 4112)]
)
def test_a_token_of_another_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, length: int
) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    message = f"found a token of {length} bytes, expected 16 to 4096"
    with pytest.raises(UserError, match=f"^--rdzv-token-file: {message}") as of_file:
        read_token(file)
    monkeypatch.setenv("SHARDWISE_RDZV_TOKEN", text)
    with pytest.raises(UserError, match=f"^SHARDWISE_RDZV_TOKEN: {message}"):
        read_token(None)
    assert not text.strip() or text.strip() not in str(of_file.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602, 0o601])
def test_a_token_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "a token"
    file.write_text(SECRET)
    file.chmod(mode)
    with pytest.raises(UserError, match=rf"\(mode {mode:04o}\), expected mode 0600; chmod 600 '"):
        read_token(file)


def test_a_token_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing, which cannot be read \(No such file"):
        read_token(tmp_path / "missing")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory"):
        read_token(tmp_path)


def test_the_options_carry_a_token_to_the_job_and_it_is_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDWISE_RDZV_TOKEN", raising=False)
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(0o600)
    hosts = LaunchConfig(nnodes="2", node_rank=0, rdzv="a:1", rdzv_token_file=file)
    nodes = hosts.nodes()
    assert nodes is not None and nodes.token == SECRET.encode()
    assert SECRET not in repr(nodes)
    monkeypatch.setenv("SHARDWISE_RDZV_TOKEN", "of the environment")
    nodes = dataclasses.replace(hosts, rdzv_token_file=None).nodes()
    assert nodes is not None and nodes.token == b"of the environment"
    with pytest.raises(UserError, match="--rdzv-token-file: found without --nnodes"):
        LaunchConfig(rdzv_token_file=file).nodes()
    assert LaunchConfig().nodes() is None
    monkeypatch.setattr("shardwise.elastic.hosts.launched_here", lambda: True)
    file.unlink()  # long before a restart, perhaps
    nodes = hosts.nodes()
    assert nodes is not None and nodes.token == b""


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
        ("--hosts a -- run", "found run, expected a script as well: -- run my_script.py"),
        ("--hosts a -- run --max-restarts 3", "found run, expected a script as well"),
        ("--hosts a -- run --nproc=2 x.py", "found --nproc=2 after --, expected none: launch-li"),
        ("--hosts a --torchrun -- run --max-restarts 3 x.py", "--torchrun: found --max-restarts"),
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
    capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    code, out, err = output(capsys, *options.split())
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("count", "rank", "rdzv", "message"),
    [
        (2, None, "a:1", "--node-rank: found nothing, expected 0 to 1"),
        (2, 2, "a:1", "--node-rank: found 2, expected 0 to 1"),
        (2, 0, None, "--rdzv: found nothing, expected HOST:PORT"),
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

"""``shardwise doctor`` and ``shardwise launch-lines``: before a job over several hosts."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from shardwise.app.cli.options import Options, keyword_only, with_options
from shardwise.app.cli.run import HostsConfig
from shardwise.base.units import show
from shardwise.elastic.hosts import TOKEN, TOKEN_FILE, Nodes, numbers_of_hosts
from shardwise.elastic.network import format_endpoint, is_address
from shardwise.insight.schema.option import (
    Bounds,
    Config,
    Count,
    NotNegative,
    OptionError,
    Seconds,
    check_number,
    naming,
    require,
    setting,
)
from shardwise.insight.schema.training import nproc_of_any_host, read_nproc

_DOCTOR = """
[bold]Examples[/bold]

This host alone:
  [cyan]shardwise doctor[/cyan]

Two hosts, before a job; on the second, --node-rank 1:
  [cyan]shardwise doctor --nnodes 2 --node-rank 0 --rdzv host-a:29400 --nproc 8[/cyan]
"""

_LAUNCH_LINES = """
[bold]Examples[/bold]

  [cyan]shardwise launch-lines --hosts a,b --nproc 8 -- train lm --strategy hybrid[/cyan]

  [cyan]shardwise launch-lines --slurm 4 --nproc 8 \\
    -- train lm --auto-resume > job.sh[/cyan]
"""


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the commands."""
    doctor_options, line_options = Options(default=DoctorConfig()), Options(default=LaunchLines())

    def doctor(given: Mapping[str, Any]) -> None:
        doctor_options.read(given).run()

    def launch_lines(given: Mapping[str, Any]) -> None:
        lines = line_options.read(given)
        dataclasses.replace(lines, arguments=tuple(given["arguments"] or ())).show()

    text = """Check what could go wrong with a job over several hosts. Run it on each of them.

    One line per finding, and what to do about it. Exits with code 1 if a job
    would not run.
    """
    cli.command("doctor", epilog=_DOCTOR)(with_options(doctor, [doctor_options], text))
    text = "Print the line that starts a job, for each host, or a script for Slurm."
    cli.command(
        "launch-lines",
        epilog=_LAUNCH_LINES,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )(with_options(launch_lines, [line_options], text, [_COMMAND]))


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(HostsConfig):
    """What ``shardwise doctor`` is asked for."""

    nproc: Count = setting(
        1, "Processes of the job on every host.", metavar="N", shown="1", reads=read_nproc
    )
    timeout: Seconds = setting(60.0, "Seconds to wait for all hosts.")
    least_gbit: NotNegative = setting(
        1.0, "Warn of links between hosts that are slower than this, in Gbit/s."
    )

    def run(self) -> None:
        """Check the hosts, print the findings, and exit.

        Raises:
            UserError: an option is wrong.
            SystemExit: with code 1 if a job would not run.
        """
        # Here, and not before: other commands start without it.
        from shardwise.app.doctor import diagnose, facts, probe

        nodes = self.nodes_within(self.timeout)
        nodes = nodes or Nodes(1, 0, "127.0.0.1", 0, self.timeout)
        expected = "the number of hosts that run the doctor now"
        require(nodes.least is None, "--nnodes", self.nnodes, expected)
        own = facts.collect_facts(nodes, self.nproc, probe.probe_ranks())
        sys.exit(0 if diagnose.diagnose(nodes, own, self.least_gbit, show) else 1)


_COMMAND = keyword_only(
    "arguments",
    Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="What to start: train lm, with its options."),
    ],
    None,
)
_NAME = re.compile(r"[\w.:-]+", re.ASCII)  # of a host, or its address
_MODULE = ("-m", "--module")  # options of run without a value
_OVER_HOSTS = ("train", "run", "doctor")  # commands that take the options for several hosts


@dataclass(frozen=True, kw_only=True)
class LaunchLines(Config):
    """What ``shardwise launch-lines`` is asked for."""

    hosts: str | None = setting(
        None, "Names of the hosts, separated by commas; they meet at the first one."
    )
    slurm: Annotated[int, Bounds(most=1 << 20)] | None = setting(
        None, "Print a script for sbatch, for this many nodes.", metavar="NODES"
    )
    nproc: str = setting("1", "Processes on each host: a number, gpu, cpu or auto.", metavar="N")
    rdzv_port: int = setting(29400, "Port where the hosts meet.")
    nnodes: str | None = setting(
        None, "Start with MIN hosts or more; others may join later.", metavar="MIN:MAX"
    )
    torchrun: bool = setting(False, "Print lines for torchrun.")
    #: Of ``shardwise``: ``train lm --model llama-150m``, ``run my_script.py``.
    arguments: tuple[str, ...] = ()

    def show(self) -> None:
        """Print the lines, or the script.

        Raises:
            UserError: an option is wrong, or what is to be started.
        """
        self._check_command()
        self._check_hosts()
        if self.slurm is not None:
            if self.names or self.torchrun or self.slurm < 1:
                expected = "1 or more, and neither --hosts nor --torchrun"
                raise OptionError("--slurm", self.slurm, expected)
            typer.echo(self._slurm_script(), nl=False)
            return
        require(bool(self.names), "--hosts", "none", "--hosts A,B or --slurm NODES")
        for host, line in self._torchrun_lines() if self.torchrun else self._own_lines():
            typer.echo(f"# on {host}\n{line}")
        has_token = any(word.partition("=")[0] == TOKEN_FILE for word in self.arguments)
        if len(self.names) > 1 and not self.torchrun and not has_token:
            typer.echo(
                f"note: any host may join at the port; {TOKEN_FILE} FILE after --, or {TOKEN} in "
                "the environment of all hosts, keeps others out",
                err=True,
            )

    @property
    def names(self) -> list[str]:
        """The hosts of ``--hosts``; an IPv6 address may stand in its brackets, as with --rdzv."""
        names = self.hosts.split(",") if self.hosts else []
        return [re.sub(r"^\[(.*:.*)\]$", r"\1", name.strip()) for name in names]

    @property
    def _options(self) -> tuple[str, ...]:
        """The arguments of the command itself, without a script of the user's and what follows."""
        words = self.arguments[1:]
        if self.arguments[0] != "run":
            return words
        script = 0
        while script < len(words) and words[script].startswith("-"):
            has_value = "=" not in words[script] and words[script] not in _MODULE
            script += 2 if has_value else 1
        return words[:script]

    def _check_command(self) -> None:
        name, words = "launch-lines", self.arguments
        expected = "one after --: -- train lm"
        require(bool(words), name, "no command", expected)
        expected = "options of its own, then --, then train, run or doctor: -- train lm"
        require(words[0] in _OVER_HOSTS, name, words[0], expected)
        has_recipe = words[0] != "train" or (*words, "")[1][:1] not in ("", "-")
        require(has_recipe, name, "train", "a recipe to train as well: -- train lm")
        has_script = words[0] != "run" or self._options != words[1:]
        require(has_script, name, "run", "a script as well: -- run my_script.py")
        for word in self._options:
            ours = word.partition("=")[0] in ("--nnodes", "--node-rank", "--rdzv", "--nproc")
            require(not ours, name, f"{word} after --", "none: launch-lines adds it")

    def _check_hosts(self) -> None:
        with naming("--nproc"):
            count = nproc_of_any_host(self.nproc)
        check_number("--nproc", 1 if count is None else count, Bounds(least=1))
        are_names = len({*self.names}) == len(self.names) and all(map(_NAME.fullmatch, self.names))
        require(are_names, "--hosts", ",".join(self.names), "names, each once")
        for host in self.names:
            expected = "names without ports; the port goes into --rdzv-port"
            require(":" not in host or is_address(host), "--hosts", host, expected)
        require(0 < self.rdzv_port < 65536, "--rdzv-port", self.rdzv_port, "1 to 65535")
        if self.nnodes is None:
            return
        least, most = numbers_of_hosts(self.nnodes)
        count = max(1, len(self.names))
        expected = f"MIN:MAX, with MAX {count}, the hosts of --hosts, or more"
        require(least is not None and most >= count, "--nnodes", self.nnodes, expected)
        expected = "none with --slurm and --torchrun, whose hosts are known"
        require(self.slurm is None and not self.torchrun, "--nnodes", self.nnodes, expected)

    def _words(self) -> tuple[list[str], list[str]]:
        """Return the words of the command line before and behind the options for several hosts."""
        nproc = ["--nproc", self.nproc]
        if self.arguments[0] == "run":  # what follows a script belongs to it
            return ["shardwise", "run", *nproc], list(self.arguments[1:])
        return ["shardwise", *self.arguments, *nproc], []

    def _own_lines(self) -> Iterator[tuple[str, str]]:
        """The line of each host for our own launcher, and one for hosts that join later."""
        places = [(host, ["--node-rank", str(rank)]) for rank, host in enumerate(self.names)]
        if self.nnodes is not None:
            places.append(("every host that joins later", []))
        for host, own in places:
            words, rest = self._words()
            if len(places) > 1:
                words += ["--nnodes", self.nnodes or str(len(self.names)), *own]
                words += ["--rdzv", format_endpoint(self.names[0], self.rdzv_port)]
            yield host, shlex.join([*words, *rest])

    def _torchrun_lines(self) -> Iterator[tuple[str, str]]:
        """The line of each host for torchrun, which does restarts itself."""
        command = self.arguments[0]
        if command == "run":  # torchrun runs the script itself
            start, ours = self.arguments[1:], [o for o in self._options if o not in _MODULE]
        else:
            start = ("-m", "shardwise", *self.arguments)
            ours = [o for o in self._options if o.partition("=")[0] == "--max-restarts"]
        found = f"{ours[0] if ours else command} after --"
        possible = not ours and command != "doctor"
        require(possible, "--torchrun", found, "train or run without it")
        for rank, host in enumerate(self.names):
            words = ["torchrun", f"--nnodes={len(self.names)}", f"--node-rank={rank}"]
            words += [f"--nproc-per-node={self.nproc}", "--master-addr", self.names[0]]
            words += ["--master-port", str(self.rdzv_port), *start]
            yield host, shlex.join(words)

    def _slurm_script(self) -> str:
        """Return a script for ``sbatch``, on whichever nodes Slurm assigns."""
        command, rest = map(shlex.join, self._words())
        doctor = f"shardwise doctor --nproc {self.nproc}"
        where = '--nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rdzv "$MEET"'
        # With restarts, the nodes that are left continue. Otherwise Slurm may start the job again.
        goes_on = any(word.partition("=")[0] == "--max-restarts" for word in self.arguments)
        keep = "--no-kill" if goes_on else ""
        directive = f"#SBATCH {keep}\n" if keep else ""
        train = " ".join(filter(None, ["srun --kill-on-bad-exit=0 --wait=0", keep]))
        return f"""#!/bin/bash
#SBATCH --job-name=shardwise
#SBATCH --nodes={self.slurm}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Slurm asks ranks to save and stop, five minutes before the time is over; --auto-resume continues.
#SBATCH --signal=TERM@300
{directive}set -euo pipefail

# The rendezvous is on the first host of the job.
MEET="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export MEET="${{MEET%%$'\\n'*}}:{self.rdzv_port}"

# Only tasks of this job may take part in it. srun hands the token to all of them.
{TOKEN}="$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')"
export {TOKEN}

# Find problems between the hosts before training starts.
srun bash -c {shlex.quote(f"exec {doctor} {where}")}

# The hosts stop each other, in order; Slurm would kill those that still save or continue.
{train} bash -c {shlex.quote(f"exec {command} {where} {rest}".rstrip(" "))}
"""

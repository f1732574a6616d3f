"""The lines that start a job over several hosts: one for each host, or a script for Slurm."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from shardwise.launch.addresses import is_ipv6, join
from shardwise.launch.errors import UserError
from shardwise.launch.hosts import numbers_of_hosts

_NAME = re.compile(r"[\w.:-]+", re.ASCII)  # of a host, or its address
_OVER_HOSTS = ("train", "doctor")  # the commands that take the options for several hosts


@dataclass(frozen=True)
class Layout:
    """Where a job runs.

    Attributes:
        hosts: their names; the first is where they meet.
        nproc: ranks of each.
        port: where they meet.
        arguments: of ``shardwise``: ``train lm --model llama-150m``.
        nnodes: ``MIN:MAX``, where more hosts may come later, and some go; None: none.
    """

    hosts: tuple[str, ...]
    nproc: int
    port: int
    arguments: tuple[str, ...]
    nnodes: str | None = None

    def check(self) -> None:
        """Check that it can be started.

        Raises:
            UserError: naming what cannot.
        """
        if not self.arguments:
            raise UserError("launch-lines: found no command, expected one behind --: -- train lm")
        if self.arguments[0] not in _OVER_HOSTS:
            expected = "options of its own, then --, then train or doctor: -- train lm"
            raise UserError(f"launch-lines: found {self.arguments[0]}, expected {expected}")
        if self.arguments[0] == "train" and (*self.arguments, "")[1][:1] in ("", "-"):
            raise UserError("launch-lines: found train, expected what to train too: -- train lm")
        if len(set(self.hosts)) < len(self.hosts) or not all(map(_NAME.fullmatch, self.hosts)):
            raise UserError(f"--hosts: found {','.join(self.hosts)}, expected names, each once")
        for host in self.hosts:
            if ":" in host and not is_ipv6(host):
                expected = "names without ports; --rdzv-port has where the hosts meet"
                raise UserError(f"--hosts: found {host}, expected {expected}")
        if self.nproc < 1:
            raise UserError(f"--nproc: found {self.nproc}, expected 1 or more")
        if not 0 < self.port < 65536:
            raise UserError(f"--rdzv-port: found {self.port}, expected 1 to 65535")
        if self.nnodes is not None:
            least, most = numbers_of_hosts(self.nnodes)
            if least is None or most < len(self.hosts):
                expected = f"MIN:MAX, with MAX {len(self.hosts)}, the hosts of --hosts, or more"
                raise UserError(f"--nnodes: found {self.nnodes}, expected {expected}")
        ours = {"--nnodes", "--node-rank", "--rdzv", "--nproc"}
        for argument in self.arguments:
            if argument.partition("=")[0] in ours:
                raise UserError(f"launch-lines: found {argument} behind --, which it adds itself")


def own_lines(layout: Layout) -> list[tuple[str, str]]:
    """Host and line, with our own launcher; for hosts that come later, one without a number."""
    lines = []
    places = [(host, ["--node-rank", str(rank)]) for rank, host in enumerate(layout.hosts)]
    if layout.nnodes is not None:
        places.append(("every host that comes later", []))
    for host, own in places:
        words = ["shardwise", *layout.arguments, "--nproc", str(layout.nproc)]
        if len(places) > 1:
            words += ["--nnodes", layout.nnodes or str(len(layout.hosts)), *own]
            words += ["--rdzv", join(layout.hosts[0], layout.port)]
        lines.append((host, shlex.join(words)))
    return lines


def torchrun_lines(layout: Layout) -> list[tuple[str, str]]:
    """Host and line, with torchrun.

    Raises:
        UserError: the command has restarts of our own launcher, or is none that torchrun starts.
    """
    command, *options = layout.arguments
    ours = [o for o in options if o.partition("=")[0] == "--max-restarts"]
    if ours or command == "doctor":
        found = ours[0] if ours else command
        raise UserError(f"--torchrun: found {found} behind --, expected train without it")
    lines = []
    for rank, host in enumerate(layout.hosts):
        words = ["torchrun", f"--nnodes={len(layout.hosts)}", f"--node-rank={rank}"]
        words += [f"--nproc-per-node={layout.nproc}", "--master-addr", layout.hosts[0]]
        words += ["--master-port", str(layout.port), "-m", "shardwise", *layout.arguments]
        lines.append((host, shlex.join(words)))
    return lines


def slurm_script(layout: Layout, nodes: int) -> str:
    """A script for ``sbatch``, over as many nodes, whichever Slurm gives."""
    command = shlex.join(["shardwise", *layout.arguments, "--nproc", str(layout.nproc)])
    doctor = f"shardwise doctor --nproc {layout.nproc}"
    where = '--nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rdzv "$MEET"'
    return f"""#!/bin/bash
#SBATCH --job-name=shardwise
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Slurm tells ranks to save and stop, five minutes before the time is over; --auto-resume goes on.
#SBATCH --signal=TERM@300
set -euo pipefail

# The first host of the job is where the others meet.
MEET="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{layout.port}"
export MEET

# What would go wrong, before anything is trained.
srun bash -c {shlex.quote(f"exec {doctor} {where}")}

srun --kill-on-bad-exit=1 bash -c {shlex.quote(f"exec {command} {where}")}
"""

"""A job over several hosts as its user describes it, and the command lines that start it."""

from __future__ import annotations

import enum
import os
import re
import shlex
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.elastic.errors import UserError
from shardwise.elastic.network import format_endpoint, is_ipv6, parse_endpoint
from shardwise.elastic.world import launched_here

TOKEN = "SHARDWISE_RDZV_TOKEN"  # environment variable
TOKEN_FILE = "--rdzv-token-file"
_TOKEN_SIZES = 16, 4096  # bytes; a shorter one can be guessed from a handshake

#: Gives the program and arguments of the ranks of a generation, 0 for the first.
Command = Callable[[int], Sequence[str]]

UNNUMBERED = -1  # rank of a host to which host 0 assigns one
_NAME = re.compile(r"[\w.:-]+", re.ASCII)  # of a host, or its address
_MODULE = ("-m", "--module")  # options of run without a value
_OVER_HOSTS = ("train", "run", "doctor")  # commands that take the options for several hosts


class JobBackend(enum.Enum):
    """What names the host that serves what all hosts of a job share."""

    OURS = "shardwise"  # the address that users give: host 0
    C10D = "c10d"  # torch's store, at any host
    ETCD = "etcd-v2"  # an etcd server


@dataclass(frozen=True)
class Nodes:
    """A job over several hosts, as its user describes it on each of them.

    Attributes:
        count: number of hosts; the largest number if ``least`` is given.
        rank: of this host, 0 .. count - 1; host 0 is the one at ``address``. :data:`UNNUMBERED`
            lets host 0 choose, if ``least`` is given.
        address: of host 0, a name or a number.
        port: of the rendezvous on host 0.
        timeout: seconds to wait for all hosts, or for ``least`` of them.
        least: the smallest number of hosts that the job runs on, in an elastic job, which hosts may
            join and leave. None if exactly ``count`` hosts take part from start to end.
        token: what all hosts must hold to take part. Empty if any that reaches the port may.
        backend: what names the host that serves.
        job: tells the job from others in the same backend.
    """

    count: int
    rank: int
    address: str
    port: int
    timeout: float = 300.0
    least: int | None = None
    token: bytes = field(default=b"", repr=False)
    backend: JobBackend = JobBackend.OURS
    job: str = "shardwise"

    @classmethod
    def of(
        cls,
        nnodes: int | str | None,
        rank: int | None,
        rdzv: str | None,
        timeout: float,
        token_file: Path | None = None,
        backend: JobBackend = JobBackend.OURS,
        job: str | None = None,
    ) -> Nodes | None:
        """Read the options for several hosts.

        These are ``--nnodes``, ``--node-rank`` and all that begin with ``--rdzv``. Ranks that our
        launcher started have no use for the token, and do not read it.

        Returns:
            The job, or None if none of them asks for several hosts.

        Raises:
            UserError: one of them is missing or out of range.
        """
        if nnodes is None:
            options = (
                ("--node-rank", rank),
                ("--rdzv", rdzv),
                (TOKEN_FILE, token_file),
                ("--rdzv-id", job),
            )
            for option, found in options:
                if found is not None:
                    raise UserError(
                        f"{option}: found without --nnodes, expected --nnodes N as well"
                    )
            return None
        least, count = numbers_of_hosts(str(nnodes))
        if rank is None and least is not None:
            rank = UNNUMBERED
        elif rank is None or not 0 <= rank < count:
            raise UserError(f"--node-rank: found {rank}, expected 0 to {count - 1}")
        where = parse_endpoint(rdzv or "")
        if where is None:
            raise UserError(
                f"--rdzv: found {rdzv}, expected HOST:PORT of the host with --node-rank 0; an "
                "IPv6 address in brackets, as [2001:db8::1]:29400"
            )
        if not timeout > 0:
            raise UserError(f"--rdzv-timeout: found {timeout}, expected a number above 0")
        token = b"" if launched_here() else read_token(token_file)
        return cls(count, rank, *where, timeout, least, token, backend, job or "shardwise")

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may join and leave while the job runs."""
        return self.least is not None

    @property
    def where(self) -> str:
        """The rendezvous as ``HOST:PORT``."""
        return format_endpoint(self.address, self.port)

    @property
    def nnodes(self) -> str:
        """The number of hosts as users write it: ``2``, or ``1:4``."""
        return str(self.count) if self.least is None else f"{self.least}:{self.count}"


HERE = Nodes(1, 0, "127.0.0.1", 0)  # a job on this host alone


def read_token(file: Path | None, environ: Mapping[str, str] | None = None) -> bytes:
    """Return the token of a job, from a file or the environment variable ``SHARDWISE_RDZV_TOKEN``.

    White space at its end does not count.

    Args:
        file: readable and writable for its owner alone. It comes before the variable.
        environ: the environment; that of this process by default.

    Returns:
        The token; nothing if neither is given.

    Raises:
        UserError: the file cannot be read, or not only by its owner; or the token is too short or
            too long.
    """
    shortest, longest = _TOKEN_SIZES
    environ = os.environ if environ is None else environ
    if file is None:
        if TOKEN not in environ:
            return b""
        source, token = TOKEN, os.fsencode(environ[TOKEN])
    else:
        source = TOKEN_FILE
        try:
            with file.open("rb") as opened:
                mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
                token = opened.read(2 * longest)
        except OSError as error:
            raise UserError(
                f"{source}: found {file}, which cannot be read ({error.strerror}), expected a file "
                "with the token of the job"
            ) from None
        if mode & 0o077:
            raise UserError(
                f"{source}: found {file}, which other users may use (mode {mode:04o}), expected "
                f"mode 0600; chmod 600 {shlex.quote(str(file))}, and make a new token"
            )
    token = token.rstrip()
    if not shortest <= len(token) <= longest:
        raise UserError(
            f"{source}: found a token of {len(token)} bytes, expected {shortest} to {longest}; "
            "openssl rand -hex 32 makes one"
        )
    return token


def numbers_of_hosts(nnodes: str) -> tuple[int | None, int]:
    """Read ``N`` or ``MIN:MAX``: the smallest number of hosts, None for ``N``, and the largest.

    Raises:
        UserError: it is neither.
    """
    least, colon, most = nnodes.rpartition(":")
    numbers = [int(n) for n in ([least, most] if colon else [most]) if n.isdecimal() and len(n) < 7]
    if len(numbers) != 1 + len(colon) or not 1 <= numbers[0] <= numbers[-1]:
        expected = "1 or more, or MIN:MAX with 1 <= MIN <= MAX"
        raise UserError(f"--nnodes: found {nnodes}, expected {expected}")
    return (numbers[0] if colon else None), numbers[-1]


@dataclass(frozen=True)
class Terms:
    """What hosts that join later have to agree on.

    Attributes:
        options: the options that must be the same on all hosts, by name.
        why_not: given a number of hosts, returns why the job cannot run over them, or None if it
            can.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    why_not: Callable[[int], str | None] = lambda hosts: None


def spans_hosts(nodes: Nodes | None) -> bool:
    """Whether the user asked for a job over several hosts."""
    return nodes is not None and nodes.count > 1


@dataclass(frozen=True)
class HostLayout:
    """Where a job runs.

    Attributes:
        hosts: their names; the rendezvous is on the first.
        nproc: ranks of each.
        port: of the rendezvous.
        arguments: of ``shardwise``: ``train lm --model llama-150m``, ``run my_script.py``.
        nnodes: ``MIN:MAX`` for an elastic job, which hosts may join and leave.
    """

    hosts: tuple[str, ...]
    nproc: int
    port: int
    arguments: tuple[str, ...]
    nnodes: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The arguments of the command itself, without a script of the user's and what follows."""
        words = self.arguments[1:]
        if self.arguments[0] != "run":
            return words
        script = 0
        while script < len(words) and words[script].startswith("-"):
            has_value = "=" not in words[script] and words[script] not in _MODULE
            script += 2 if has_value else 1
        return words[:script]

    def command(self) -> tuple[list[str], list[str]]:
        """Return the words of the command line before and behind the options for several hosts."""
        nproc = ["--nproc", str(self.nproc)]
        if self.arguments[0] == "run":  # what follows a script belongs to it
            return ["shardwise", "run", *nproc], list(self.arguments[1:])
        return ["shardwise", *self.arguments, *nproc], []

    def check(self) -> None:
        """Check that the job can be started.

        Raises:
            UserError: names what is wrong.
        """
        if not self.arguments:
            raise UserError("launch-lines: found no command, expected one after --: -- train lm")
        if self.arguments[0] not in _OVER_HOSTS:
            expected = "options of its own, then --, then train, run or doctor: -- train lm"
            raise UserError(f"launch-lines: found {self.arguments[0]}, expected {expected}")
        if self.arguments[0] == "train" and (*self.arguments, "")[1][:1] in ("", "-"):
            raise UserError(
                "launch-lines: found train, expected a recipe to train as well: -- train lm"
            )
        if len(set(self.hosts)) < len(self.hosts) or not all(map(_NAME.fullmatch, self.hosts)):
            raise UserError(f"--hosts: found {','.join(self.hosts)}, expected names, each once")
        for host in self.hosts:
            if ":" in host and not is_ipv6(host):
                expected = "names without ports; the port goes into --rdzv-port"
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
        if self.arguments[0] == "run" and self.options == self.arguments[1:]:
            raise UserError(
                "launch-lines: found run, expected a script as well: -- run my_script.py"
            )
        ours = {"--nnodes", "--node-rank", "--rdzv", "--nproc"}
        for argument in self.options:
            if argument.partition("=")[0] in ours:
                raise UserError(
                    f"launch-lines: found {argument} after --, expected none: launch-lines adds it"
                )


def own_lines(layout: HostLayout) -> list[tuple[str, str]]:
    """Return each host with its command line for our own launcher, and one for hosts that join."""
    lines = []
    places = [(host, ["--node-rank", str(rank)]) for rank, host in enumerate(layout.hosts)]
    if layout.nnodes is not None:
        places.append(("every host that joins later", []))
    for host, own in places:
        words, rest = layout.command()
        if len(places) > 1:
            words += ["--nnodes", layout.nnodes or str(len(layout.hosts)), *own]
            words += ["--rdzv", format_endpoint(layout.hosts[0], layout.port)]
        lines.append((host, shlex.join([*words, *rest])))
    return lines


def torchrun_lines(layout: HostLayout) -> list[tuple[str, str]]:
    """Return each host with its command line for torchrun.

    Raises:
        UserError: the command asks for restarts of our own launcher, or torchrun cannot start it.
    """
    command = layout.arguments[0]
    if command == "run":  # torchrun runs the script itself
        start, ours = layout.arguments[1:], [o for o in layout.options if o not in _MODULE]
    else:
        start = ("-m", "shardwise", *layout.arguments)
        ours = [o for o in layout.options if o.partition("=")[0] == "--max-restarts"]
    if ours or command == "doctor":
        found = ours[0] if ours else command
        raise UserError(f"--torchrun: found {found} after --, expected train or run without it")
    lines = []
    for rank, host in enumerate(layout.hosts):
        words = ["torchrun", f"--nnodes={len(layout.hosts)}", f"--node-rank={rank}"]
        words += [f"--nproc-per-node={layout.nproc}", "--master-addr", layout.hosts[0]]
        words += ["--master-port", str(layout.port), *start]
        lines.append((host, shlex.join(words)))
    return lines


def slurm_script(layout: HostLayout, nodes: int) -> str:
    """Return a script for ``sbatch`` over ``nodes`` nodes, whichever Slurm assigns."""
    command, rest = map(shlex.join, layout.command())
    doctor = f"shardwise doctor --nproc {layout.nproc}"
    where = '--nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rdzv "$MEET"'
    # With restarts, the nodes that are left continue. Otherwise Slurm may start the job again.
    goes_on = any(word.partition("=")[0] == "--max-restarts" for word in layout.arguments)
    keep = "--no-kill" if goes_on else ""
    directive = f"#SBATCH {keep}\n" if keep else ""
    train = " ".join(filter(None, ["srun --kill-on-bad-exit=0 --wait=0", keep]))
    return f"""#!/bin/bash
#SBATCH --job-name=shardwise
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Slurm asks ranks to save and stop, five minutes before the time is over; --auto-resume continues.
#SBATCH --signal=TERM@300
{directive}set -euo pipefail

# The rendezvous is on the first host of the job.
MEET="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export MEET="${{MEET%%$'\\n'*}}:{layout.port}"

# Only tasks of this job may take part in it. srun hands the token to all of them.
{TOKEN}="$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')"
export {TOKEN}

# Find problems between the hosts before training starts.
srun bash -c {shlex.quote(f"exec {doctor} {where}")}

# The hosts stop each other, in order; Slurm would kill those that still save or continue.
{train} bash -c {shlex.quote(f"exec {command} {where} {rest}".rstrip(" "))}
"""

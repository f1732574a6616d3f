"""A job over several hosts as its user describes it on each of them."""

from __future__ import annotations

import enum
import os
import shlex
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.base.errors import UserError
from shardwise.base.units import counted
from shardwise.elastic.network import format_endpoint, parse_endpoint
from shardwise.elastic.world import launched_here

TOKEN = "SHARDWISE_RDZV_TOKEN"  # environment variable
TOKEN_FILE = "--rdzv-token-file"
_TOKEN_SIZES = 16, 4096  # bytes; a shorter one can be guessed from a handshake

#: Gives the program and arguments of the ranks of a generation, 0 for the first.
Command = Callable[[int], Sequence[str]]

UNNUMBERED = -1  # rank of a host to which host 0 assigns one


class OnJoin(enum.Enum):
    """What the ranks of an elastic job do when more hosts join."""

    RESTART = "restart"  # they save, and end; others begin with what was saved
    STAY = "stay"  # they wait for the next world, with what they have in memory


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
        options: the options that must be the same on hosts that join later, too, by name.
        why_not: given a number of hosts, returns why the job cannot run over them, or None if it
            can.
        on_join: what ranks do when more hosts join.
    """

    count: int
    rank: int
    address: str
    port: int
    timeout: float = 300.0
    least: int | None = None
    token: bytes = field(default=b"", repr=False)
    options: Mapping[str, object] = field(default_factory=dict)
    why_not: Callable[[int], str | None] = lambda hosts: None
    on_join: OnJoin = OnJoin.RESTART

    @classmethod
    def of(
        cls,
        nnodes: int | str | None,
        rank: int | None,
        rdzv: str | None,
        timeout: float,
        token_file: Path | None = None,
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
            options = (("--node-rank", rank), ("--rdzv", rdzv), (TOKEN_FILE, token_file))
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
            found = "nothing" if rank is None else rank
            raise UserError(f"--node-rank: found {found}, expected 0 to {count - 1}")
        where = parse_endpoint(rdzv or "")
        if where is None:
            raise UserError(
                f"--rdzv: found {rdzv or 'nothing'}, expected HOST:PORT of the host with "
                "--node-rank 0; an IPv6 address in brackets, as [2001:db8::1]:29400"
            )
        token = b"" if launched_here() else read_token(token_file)
        return cls(count, rank, *where, timeout, least, token)

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

    def most(self, hosts: int) -> tuple[int, str]:
        """Return how many of ``hosts`` hosts can take part together, 0 if too few.

        Returns:
            The number, and why it is not larger.
        """
        if self.least is None:
            return hosts, ""
        why = ""
        for count in range(min(hosts, self.count), self.least - 1, -1):
            problem = self.why_not(count)
            if problem is None:
                return count, why
            why = why or f"the job cannot run over {counted(count, 'host')}: {problem}"
        return 0, why


HERE = Nodes(1, 0, "127.0.0.1", 0)  # a job on this host alone


def read_token(file: Path | None) -> bytes:
    """Return the token of a job, from a file or the environment variable ``SHARDWISE_RDZV_TOKEN``.

    White space at its end does not count.

    Args:
        file: readable and writable for its owner alone. It comes before the variable.

    Returns:
        The token; nothing if neither is given.

    Raises:
        UserError: the file cannot be read, or not only by its owner; or the token is too short or
            too long.
    """
    shortest, longest = _TOKEN_SIZES
    if file is None:
        if TOKEN not in os.environ:
            return b""
        source, token = TOKEN, os.fsencode(os.environ[TOKEN])
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

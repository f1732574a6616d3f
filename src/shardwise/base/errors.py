"""The errors that Shardwise raises by itself.

    ShardwiseError (RuntimeError)
    ├── PeerLostError       a peer died, left or stalled: a collective could not finish
    ├── RanksDivergedError  ranks disagree about what they are about to do
    ├── RankFailedError     a rank that this process launched was killed, or raised an error
    ├── StepInterruptedError  an exception left only some groups stepped in backward
    ├── OffloadError        what is kept on a disk could not be read or written
    └── CheckpointError     a checkpoint is damaged, belongs to another model, or was not written
        └── StoreError      an object store did not do what it was asked

Wrong use of the library raises a plain ``ValueError``, ``TypeError`` or ``NotImplementedError``,
as it does in torch; the classes above are for what goes wrong while a correct program runs. Where
torch raises ``AssertionError`` for wrong use, a :class:`MisuseError` is both. A command shows a
:class:`UserError` to its user.
"""

from __future__ import annotations

from typing import Any


class NotPossibleError(ValueError):
    """Something that cannot be used for what it was given.

    Attributes:
        name: what it was given for; ``""`` if the caller says that.
        found: what was given.
        expected: what is possible.
    """

    def __init__(self, name: str, found: object, expected: str) -> None:
        super().__init__(f"{name and f'{name}: '}found {found}, expected {expected}")
        self.name, self.found, self.expected = name, found, expected


class ShardwiseError(RuntimeError):
    """Base class of the errors that do not come from wrong use."""


class PeerLostError(ShardwiseError):
    """A collective could not finish because a peer died, left or stalled.

    The message names this rank, the group whose collective failed and, where the backend reports
    it, the peer.
    """


def lost_peer_behind(error: BaseException) -> PeerLostError | None:
    """Find the lost peer that an error reports, or that it was raised from.

    The cause of an error decides, not its text: errors of the user's own code may well mention
    peers and connections.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, PeerLostError):
            return cause
        seen.add(id(cause))
        cause = cause.__cause__
    return None


class RanksDivergedError(ShardwiseError):
    """Ranks disagree: on the order of groups, on shapes or dtypes, or on the configuration."""


class RankFailedError(ShardwiseError):
    """A rank that :func:`shardwise.launch` started was killed, ended by itself, or raised an error.

    An exception of the rank that can be pickled is raised itself, in place of this one. The message
    names the rank, and shows its traceback or the last lines that it wrote.
    """


class StepInterruptedError(ShardwiseError):
    """An exception ended a backward in which some groups had stepped already, and others had not.

    Forward, backward, and the state dicts of model and optimizer raise it, until a state is loaded
    into the optimizer or the parameters are accepted as they are. The message names the rank and
    the groups that have stepped. See :func:`shardwise.optim.in_backward`.
    """


class OffloadError(ShardwiseError):
    """States or parameters that are kept on a disk could not be read or written.

    It is full, or fails. They are lost then, and a step may be made in part: go on from the last
    checkpoint. The message names the folder and the rank. See :func:`shardwise.optim.offload` and
    :class:`shardwise.DiskOffloadPolicy`.
    """


class CheckpointError(ShardwiseError):
    """A checkpoint is damaged, hostile, belongs to another model, or could not be written.

    The message names the file, the entry in it, what was found and what was expected.
    """


class StoreError(CheckpointError):
    """An object store did not do what it was asked. The message has its own words."""


class MisuseError(ValueError, AssertionError):
    """Wrong use for which torch's ``fully_shard`` raises ``AssertionError``."""


class UserError(Exception):
    """An error that the user can fix, shown as one line without a traceback.

    Attributes:
        exit_code: the exit status of the command.
        passing: whether the same command may succeed later, so that ``--max-restarts`` applies.
    """

    exit_code = 2
    passing = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray hands it to the program that started the job. Classes of errors take what they
        # describe; only the text is in ``args``.
        return BaseException.__new__, (type(self), *self.args), self.__dict__

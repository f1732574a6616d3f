"""What a rank owes to torch's agent when it fails, so that ``torchrun`` names the first failure."""

from __future__ import annotations

import contextlib
import json
import os
import time

from shardwise.elastic.errors import Stopped
from shardwise.elastic.world import launched_here

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the agent reads it when this process has failed
_RUN_ID = "TORCHELASTIC_RUN_ID"

# Seconds. The agent looks ten times per second; one of another host has to meet this one's anew,
# which then restarts its ranks without counting it.
PATIENCE = 5.0


def started_this() -> bool:
    """Whether torch's agent started this process, and not our own launcher."""
    return _RUN_ID in os.environ and not launched_here()


def let_the_first_failure_be_named() -> None:
    """Wait for torch's agent to end this rank, which has lost a peer and is not to blame.

    The agent takes the rank that it finds ended for the cause. It ends the others by SIGTERM. If
    it does not, the peer was on another host, and this rank must end by itself.
    """
    if started_this():
        with contextlib.suppress(Stopped):
            time.sleep(PATIENCE)


def record_failure(line: str, text: str, exit_code: int) -> bool:
    """Write why this rank ends where torch's agent looks, in the format of its ``record``.

    The format is that of ``torch.distributed.elastic.multiprocessing.errors``, which takes seconds
    to import.

    Args:
        line: what ``torchrun`` shows.
        text: all that is known, for who opens the file.
        exit_code: of this process.

    Returns:
        Whether there is such an agent, and the file was written.
    """
    path = os.environ.get(_ERROR_FILE)
    if path is None:
        return False
    when = str(int(time.time()))
    message = {
        "message": text,
        "errorCode": exit_code,
        "extraInfo": {"py_callstack": line, "timestamp": when},
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
    except OSError:
        return False
    return True

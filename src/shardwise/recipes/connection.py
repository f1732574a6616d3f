"""The rows of a dataset, whatever happens to the connection that they come over.

``datasets`` reads on where a connection broke, by reading the same open file again. Of a compressed
file that has lost what was decompressed already: rows are missing, or a line begins in its middle.
So here it is told not to, and the dataset is opened again behind the last row that came.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.launch.errors import UserError

PATIENCE = 600.0  # seconds without a row, each attempt of the hub's own retries included
PAUSE = 1.0  # seconds between attempts, which take some 25 by themselves


class ConnectionLostError(UserError):
    """The hub cannot be reached: no mistake of the user's, and worth another start."""

    exit_code = 1
    passing = True


def leave_retries_to_us() -> None:
    """Have ``datasets`` of this process tell of a lost connection at once.

    Requests that ``huggingface_hub`` makes again, whole, stay: they lose nothing.
    """
    from datasets import config

    config.STREAMING_READ_MAX_RETRIES = 1
    config.STREAMING_OPEN_MAX_RETRIES = 1


def rows(dataset: Any, where: Mapping[str, Any] | None) -> Iterator[Any]:
    """The rows of a streaming dataset, each once.

    Args:
        dataset: an ``IterableDataset`` of ``datasets``.
        where: one of its states, to go on from; None: the beginning.

    Raises:
        Exception: the dataset cannot be read; or the connection is lost, and was so for
            ``PATIENCE`` seconds.
    """
    alive = time.monotonic()
    while True:
        came = False
        if where is not None:
            dataset.load_state_dict(where)
        try:
            for row in dataset:
                came = True
                yield row
                alive = time.monotonic()
            return
        except Exception as error:
            if came:
                where = dataset.state_dict()
            if not connection_lost(error) or time.monotonic() - alive > PATIENCE:
                raise
        time.sleep(PAUSE)


def connection_lost(error: Exception) -> bool:
    """Whether a server could not be reached, or could not serve."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", 0)
        return status == 429 or status >= 500
    # What the hub's client raises itself, whichever generation of httpx it is built upon.
    raw = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    return raw or isinstance(error, ConnectionError | TimeoutError)

"""One or several runs as one HTML page that loads nothing from elsewhere.

What runs say comes as a block of JSON, which the script of the page turns into elements by their
text alone; so whatever a run says stays text. The page's own policy (CSP) lets no other script run.
Charts are drawn by uPlot (https://github.com/leeoniya/uPlot), whose file is in this package.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.base.html import data_element, document
from shardwise.base.lazy import resource
from shardwise.runs.metrics import without_nan

#: The pages with a page.js that a run may have in its folder.
_FRAMED = ("shardwise.insight.inspect.page",)


class Updates(enum.Enum):
    """How a page that is open gets to know what has happened since."""

    RELOAD = "reload"  # of the file, while a run is under way
    FETCH = "fetch"  # from the server that it came from
    NEVER = "never"


def page(
    title: str, runs: Sequence[Mapping[str, Any]], updates: Updates, every: float = 0.0
) -> str:
    """Return the page.

    Args:
        title: of the page.
        runs: what each says; see :meth:`.snapshot.RunReader.read`.
        updates: how an open page is kept up to date.
        every: seconds after which the file is written again, if it is to be reloaded. Long after
            that, a page of a run that was under way says that the run has stopped without an end.
    """
    scripts = (resource(__name__, "uplot/uPlot.iife.min.js"), resource(__name__, "page.js"))
    # Pages inside of the page are under its policy, too: their scripts are ours, or do not run.
    known = (*scripts, *(resource(module, "page.js") for module in _FRAMED))
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in known)
    data: dict[str, Any] = {"runs": runs}
    if updates is Updates.RELOAD:  # who never writes it again cannot say so
        data |= {"written": time.time(), "every": every}
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    body = (
        f'<main id="page" data-updates="{updates.value}">'
        "<noscript>This page draws its charts with a script.</noscript></main>",
        data_element(without_nan(data)),
        *(f"<script>{script}</script>" for script in scripts),
    )
    style = f"{resource(__name__, 'uplot/uPlot.min.css')}{resource(__name__, 'page.css')}"
    return document(title, body, style, policy)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")

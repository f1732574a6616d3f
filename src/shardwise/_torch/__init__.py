"""Every private torch name that Shardwise uses, each behind one small function.

One file for each part of torch: ``dtensor``, ``autograd``, ``c10d``, ``fsdp`` and ``fake``. When a
new torch release moves a private name, these are the only files to change.
"""

from __future__ import annotations

import os
import warnings

import torch

#: The minor versions of torch on which tests have run; pyproject.toml allows no others.
TRIED = ("2.11", "2.12", "2.13", "2.14", "2.15")


def warn_if_untried(version: str) -> None:
    """Warn on the first rank if ``version`` of torch is newer than those that were tried."""
    found, newest = ([int(n) for n in each.split(".")[:2]] for each in (version, TRIED[-1]))
    if found > newest and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"Shardwise was tried with torch {', '.join(TRIED)}; found torch {version}, in which "
            "private names that it uses may have changed. If something fails, install "
            f"torch=={TRIED[-1]}.*",
            stacklevel=2,
        )


warn_if_untried(torch.__version__)

"""Check whether the packages are installed that a command needs. Nothing is imported for it."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Collection, Sequence

from shardwise.base.errors import UserError
from shardwise.insight.schema.training import LogName

# Modules whose package has another name.
_PACKAGES = {"PIL": "pillow", "yaml": "pyyaml"}


def check_extras(names: Sequence[str], logs: Collection[LogName] = ()) -> None:
    """Check that the packages that a recipe needs are installed.

    Args:
        names: the modules that it imports.
        logs: where its metrics go.

    Raises:
        UserError: naming those that are not.
    """
    require_installed("training", names)
    for log in sorted(each.value for each in logs if each is not LogName.JSONL):
        require_installed(f"--log {log}", [log])


def require_installed(purpose: str, modules: Sequence[str]) -> None:
    """Check that optional packages are installed.

    Args:
        purpose: what needs them, for the message.
        modules: the names that they are imported by.

    Raises:
        UserError: naming those that are not, and how to install them.
    """
    missing = [
        _PACKAGES.get(name, name) for name in modules if importlib.util.find_spec(name) is None
    ]
    if missing:
        names = " and ".join(missing)
        raise UserError(f"{purpose} needs {names}, not installed here: {install_line(missing)}")


def install_line(packages: Sequence[str]) -> str:
    """Return the command that installs packages into the environment of this process.

    It names packages, and no extra of this one, which pip would install anew in place of a clone.
    """
    python = shlex.quote(sys.executable)
    has_pip = importlib.util.find_spec("pip") is not None
    command = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    return f"{command} {shlex.join(packages)}"

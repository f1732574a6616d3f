"""Check whether the packages are installed that a command needs. Nothing is imported for it."""

from __future__ import annotations

import importlib.util
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
    events = ["tensorboard"] if LogName.TENSORBOARD in logs else []
    require_installed("training", [*names, *events], "train")
    if LogName.WANDB in logs:
        require_installed("--log wandb", ["wandb"], "wandb")


def require_installed(purpose: str, modules: Sequence[str], extra: str) -> None:
    """Check that optional packages are installed.

    Args:
        purpose: what needs them, for the message.
        modules: the names that they are imported by.
        extra: the extra of this package that installs them.

    Raises:
        UserError: naming those that are not, and how to install them.
    """
    missing = [
        _PACKAGES.get(name, name) for name in modules if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UserError(
            f"{purpose} needs {' and '.join(missing)}, which the extra {extra!r} installs: "
            f"pip install '.[{extra}]' in a clone of Shardwise, or pip install "
            f"{' '.join(missing)} anywhere"
        )

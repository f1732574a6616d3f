"""Settings of runs that other versions began."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.insight.schema.option import as_json, flatten, option_name
from shardwise.insight.schema.training import DilocoConfig, LogName


def as_now(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that an earlier version wrote by the names of today."""
    now: dict[str, Any] = {}
    for name, value in settings.items():
        match name, value:
            case _, dict():
                now[name] = as_now(value)
            case "betas", [beta1, beta2]:
                now |= {"beta1": beta1, "beta2": beta2}
            case "tensorboard", bool():
                log = settings.get("log") or LogName.JSONL.value
                now["log"] = f"{log},{LogName.TENSORBOARD.value}" if value else log
            case _:
                now.setdefault(name, value)
    return now


def not_known(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, None]]:
    """Return the settings that this version does not have, as changes to None.

    Args:
        was: what a run began with, by innermost names.
        now: what it goes on with.
    """
    gone = was.keys() - now.keys() - flatten(as_json(DilocoConfig())).keys()
    return {option_name(name): (was[name], None) for name in sorted(gone) if was[name]}

"""The versions of torch that were tried, and the warning beyond them."""

from __future__ import annotations

import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from shardwise import _torch

ROOT = Path(__file__).parents[2]


def test_the_package_allows_the_versions_that_were_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor = _torch.TRIED[-1].split(".")
    assert f"torch>={_torch.TRIED[0]},<{major}.{int(minor) + 1}" in project["dependencies"]
    assert ".".join(torch.__version__.split(".")[:2]) in _torch.TRIED


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20270101+cpu", "3.0.0a0+git1234"])
def test_a_newer_torch_is_warned_of_once_by_name(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("RANK", "1")
    _torch.warn_if_untried(version)
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="may have changed") as warned:
        _torch.warn_if_untried(version)
    (said,) = [str(each.message) for each in warned]
    assert f"found torch {version}" in said
    assert all(each in said for each in _torch.TRIED)


def test_importing_the_package_asks_about_the_torch_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Path(_torch.__file__).read_text()
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.16.0"))
    with pytest.warns(UserWarning, match=r"found torch 2\.16\.0"):
        exec(compile(source, _torch.__file__, "exec"), {"__name__": "again"})


@pytest.mark.parametrize("version", [*(f"{each}.1+cpu" for each in _torch.TRIED), "2.9.0"])
def test_nothing_is_said_of_others(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _torch.warn_if_untried(version)

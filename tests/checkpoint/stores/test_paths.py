"""URLs: which there are, and what of them may be shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardwise import checkpoint
from shardwise.base.errors import CheckpointError, StoreError
from shardwise.checkpoint.disk.place import absolute, place_of
from shardwise.checkpoint.disk.store_path import StorePath, words_of
from tests.checkpoint.small import make

SECRET = "not-to-be-shown"


@pytest.mark.parametrize("path", ["runs/a", "/runs/a", "C:/a", "a:b", "s3:/bucket/a", "", "://a"])
def test_what_is_no_url_is_a_folder(path: str) -> None:
    assert place_of(path) == Path(path)
    assert isinstance(absolute(path), Path)


def test_a_url_behaves_as_a_path() -> None:
    run = place_of("s3://bucket/team/run/")
    step = checkpoint.step_folder("s3://bucket/team/run", 40)
    assert str(run) == "s3://bucket/team/run"
    assert str(step) == "s3://bucket/team/run/step-00000040"
    assert (step.parent, step.name) == (run, "step-00000040")
    assert place_of(step) == absolute(step) == step
    assert str(place_of("s3://bucket") / "a") == "s3://bucket/a"
    assert str((place_of("s3://bucket") / "a").parent) == "s3://bucket/"
    assert place_of("file:///tmp/a").parent == place_of("file:///tmp")


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{SECRET}@bucket/run",
        f"s3://{SECRET}@bucket/run",
        f"abfss://container:{SECRET}@account.dfs.core.windows.net/run",
        f"s3://bucket/run?token={SECRET}",
        f"s3://bucket/run#{SECRET}",
    ],
)
def test_a_url_with_a_secret_is_refused_without_showing_it(url: str) -> None:
    model, optimizer = make()
    for use in (
        lambda: checkpoint.save(url, model, optimizer),
        lambda: checkpoint.async_save(url, model, optimizer),
        lambda: checkpoint.load(url, model, optimizer),
        lambda: checkpoint.load_weights(url, model),
        lambda: checkpoint.latest(url),
        lambda: checkpoint.steps(url),
        lambda: checkpoint.is_complete(url),
        lambda: checkpoint.step_folder(url, 1),
        lambda: checkpoint.keep_last(url, 1),
    ):
        with pytest.raises(ValueError, match="a user name, a password or a query") as caught:
            use()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/a",
        "https://host/a",
        "s3:///a",
        "s3://b/../a",
        "s3://b/a//c",
        "s3://b/a\nb",
        "s3://b/..",
    ],
)
def test_what_no_store_has_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        place_of(url)


def test_names_of_keys_and_what_was_signed_are_not_shown() -> None:
    found = words_of(
        Exception(
            "Error performing PUT http://host/b/k?sig=abc in 1 ms - Server returned non-2xx status "
            "code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code><Message>The request "
            f"signature does not match.</Message><AWSAccessKeyId>{SECRET}</AWSAccessKeyId>"
            f"<StringToSign>{SECRET}</StringToSign></Error>\n\nDebug source:\n{SECRET}"
        )
    )
    assert found == "403 Forbidden: SignatureDoesNotMatch: The request signature does not match."
    found = words_of(
        Exception(f"error sending request for url (http://me:{SECRET}@host/a?sig={SECRET})")
    )
    assert found == "error sending request for url (http://host/a)"


def test_a_missing_library_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(StoreError, match=r"pip install 'shardwise\[store\]'"):
        checkpoint.latest("memory:///a")
    assert repr(StorePath("s3://bucket/a")) == "StorePath('s3://bucket/a')"


def test_what_knows_no_store_makes_no_folder_of_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = make()
    for name, write in {
        "ckpt_prefix": lambda: checkpoint.save_rank_checkpoint("s3://bucket/a", model, optimizer),
    }.items():
        with pytest.raises((ValueError, CheckpointError), match=f"{name}: found a URL, expected"):
            write()
    assert not any(tmp_path.iterdir())

"""A name in an object store, and what is asked of the store.

    s3://bucket/run/step-00000040/manifest.json
    ^ root      ^ key

The requests go through ``obstore``, which retries what is worth retrying: answers of 5xx, lost
connections, and timeouts of reads, a bounded number of times. It takes credentials from where
other programs find them. What an error says of them is left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from shardwise.base.errors import CheckpointError, NotPossibleError, StoreError
from shardwise.base.strict import refuse

_ON_A_NETWORK = ("s3", "s3a", "gs", "abfss")
_HERE = ("file", "memory")
_PART = 8 << 20  # bytes of a request that writes
_REQUESTS = 3  # that write at a time
_MOST_PARTS = 10_000  # of an object of S3
_RETRIES = 6
_SECONDS = 60  # for one request, and for all attempts at it
# What an answer of a store says in XML or JSON; the rest may name keys, and what was signed.
_WORDS = re.compile(r"<Code>([^<]{1,100})</Code>|<Message>([^<]{1,300})</Message>")
_STATUS = re.compile(r"status code: (\d{3} [A-Za-z ]+)")
_QUERY = re.compile(r"(https?://)(?:[^\s/@]*@)?([^\s?)]*)(\?[^\s)]*)?")

_refusing: set[str] = set()  # stores that are known to refuse an object where there is one


class StoredObject(NamedTuple):
    """An object that a store has."""

    size: int
    modified: datetime
    tag: str | None  # another one once it is replaced


def _object(found: Any) -> StoredObject:
    return StoredObject(found["size"], found["last_modified"], found["e_tag"])


def _bare(tag: str) -> str:
    """An entity tag without what a list leaves out of it, in Azure for instance."""
    return tag.removeprefix("W/").strip('"')


class _MissingError(StoreError):
    """There is no such object, or no such bucket."""


class _ReplacedError(StoreError):
    """There is another object of that name."""


class StorePath(os.PathLike[str]):
    """A name in an object store, for what a checkpoint does with a ``Path``.

    Args:
        url: such as ``s3://bucket/run``.

    Attributes:
        name: the part of it after the last slash.

    Raises:
        ValueError: the URL is of no store, or has a user name, a password or a query.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        host, _, key = rest.partition("/")
        user = host.rpartition("@")[0]
        if {"?", "#"} & {*url} or ":" in user or (user and scheme != "abfss"):
            raise NotPossibleError(
                "path",
                f"a URL {scheme}://... with a user name, a password or a query",
                "one without; give credentials as the store's own programs take them, in "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for instance",
            )
        if scheme not in _ON_A_NETWORK + _HERE or (scheme in _ON_A_NETWORK and not host):
            known = ", ".join(f"{each}://..." for each in _ON_A_NETWORK + _HERE)
            raise NotPossibleError("path", url, f"a folder, or a URL of an object store: {known}")
        self._key = key.strip("/")
        self.name = self._key.rpartition("/")[2]
        segments = self._key.split("/") if self._key else []
        if not key.isprintable() or {"", ".", ".."} & {*segments}:
            expected = "a URL of printable characters, without empty parts, '.' and '..'"
            raise NotPossibleError("path", repr(url), expected)
        self._root = f"{scheme}://{host}/"

    def __str__(self) -> str:
        return self._root + self._key

    __fspath__ = __str__

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self}/{name}" if self._key else f"{self._root}{name}")

    @property
    def parent(self) -> StorePath:
        """The name without its last part."""
        return StorePath(self._root + self._key.rpartition("/")[0])

    def is_symlink(self) -> bool:
        """``False``: there are none in a store."""
        return False

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self.find() is not None

    def iterdir(self) -> Iterator[StorePath]:
        """Yield what is directly below, as if it were a folder."""
        folders, files = self.listed()
        yield from sorted({*folders, *(self / name for name in files)}, key=str)

    def listed(self) -> tuple[list[StorePath], dict[str, StoredObject]]:
        """What is directly below: what looks like folders, and the objects by their names."""
        obstore = _obstore()
        with self._asking("be listed"):
            found = obstore.list_with_delimiter(self._store(), self._key or None)
        folders, files = [], {}
        for prefix in sorted(found["common_prefixes"]):
            with contextlib.suppress(ValueError):  # a key that no checkpoint has
                folders.append(StorePath(self._root + prefix))
        for each in found["objects"]:
            if each["path"] == self._key:
                continue  # an empty object of this name and a slash, with which S3 shows a folder
            with contextlib.suppress(ValueError):
                files[StorePath(self._root + each["path"]).name] = _object(each)
        return folders, files

    def below(self) -> dict[str, StoredObject]:
        """The objects whose names begin with this one, by the rest of their names."""
        obstore = _obstore()
        with self._asking("be listed"):
            batches = list(obstore.list(self._store(), self._key or None))
        return {
            each["path"].removeprefix(self._key).lstrip("/"): _object(each)
            for batch in batches
            for each in batch
        }

    def find(self) -> StoredObject | None:
        """The object, or ``None`` if there is none."""
        obstore = _obstore()
        try:
            with self._asking("be found"):
                found = obstore.head(self._store(), self._key)
        except _MissingError:
            return None
        return _object(found)

    def lost(self, files: Mapping[str, int]) -> dict[str, str]:
        """The files below that are missing or have other sizes, with the reason.

        A list may be older than what it lists, so what it lacks is asked for by name.
        """
        listed, lost = self.below(), {}
        for name, size in files.items():
            path, found = self / name, listed.get(name)
            if found is None or found.size != size:
                found = path.find()
            if found is None:
                lost[name] = f"{path}: is missing"
            elif found.size != size:
                lost[name] = f"{path}: found {found.size:,} bytes, expected {size:,}"
        return lost

    def read(self, start: int, end: int, tag: str | None = None) -> tuple[memoryview, int]:
        """Read a range of the object, and its size.

        Args:
            start: the first byte.
            end: one past the last byte.
            tag: of the object that is meant; ``None`` for whatever is there.

        Raises:
            CheckpointError: it is missing, has been replaced, or ends before.
            StoreError: it cannot be read.
        """
        match = {} if tag is None else {"if_match": tag}
        data, size = self._get(end - start, range=(start, end), **match)
        if data.nbytes != end - start:
            raise CheckpointError(
                f"{self}: found {data.nbytes:,} bytes from byte {start} on, expected "
                f"{end - start:,}"
            )
        return data, size

    def read_small(self, most: int) -> bytes:
        """Read the object, of at most ``most`` bytes.

        Raises:
            CheckpointError: it is missing, or larger.
            StoreError: it cannot be read.
        """
        data, size = self._get(most)
        if size > most:
            refuse(str(self), f"{size:,} bytes", f"at most {most:,}")
        return bytes(data)

    def _get(self, most: int, **options: Any) -> tuple[memoryview, int]:
        """What is asked for, unless that has more than ``most`` bytes; and the object's size."""
        obstore = _obstore()
        try:
            with self._asking("be read"):
                found = obstore.get(self._store(), self._key, options=options)
                tag = options.get("if_match")
                if tag is not None and _bare(tag) != _bare(found.meta["e_tag"] or ""):
                    raise _ReplacedError("of which a store that ignores the tag says nothing")
                start, end = found.range
                data = found.bytes() if end - start <= most else b""
                return memoryview(data), found.meta["size"]
        except _MissingError as error:
            raise CheckpointError(str(error).replace("cannot be read", "is missing")) from None
        except _ReplacedError:
            raise CheckpointError(f"{self}: was replaced while it was read") from None

    def write(self, chunks: Iterable[bytes | memoryview], size: int) -> None:
        """Write an object in parts, while they are made. If that raises, there is no object.

        Args:
            chunks: its bytes, each in memory that does not change until all are written.
            size: how many bytes these are.

        Raises:
            StoreError: it cannot be written.
        """
        obstore = _obstore()
        part = max(_PART, -(-size // _MOST_PARTS))
        with self._asking("be written"):
            if size <= part:
                obstore.put(self._store(), self._key, b"".join(chunks), use_multipart=False)
            else:
                obstore.put(
                    *(self._store(), self._key, iter(chunks)),
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=_REQUESTS,
                )

    def create(self, data: bytes) -> bool:
        """Write an object, unless there is one. Returns whether it was written.

        Raises:
            StoreError: it cannot be written, or that is not known; see also :meth:`prove_refusal`.
        """
        made = self._put_new(data)
        if made:
            self.prove_refusal(data)
        return made

    def prove_refusal(self, data: bytes) -> None:
        """Send this object once more, to see that the store refuses it, since there is one.

        A store that ignores the condition would tell each of two processes that its object is the
        one. This costs a request for each store in each process.

        Raises:
            StoreError: it has taken the object, which is deleted then; or it does not answer.
        """
        if self._root not in _refusing and self._put_new(data):
            with contextlib.suppress(StoreError):
                self.remove()
            raise StoreError(
                f"{self}: was written a second time, although on condition that there is none "
                "(If-None-Match); expected a store that refuses this, as S3, Google Cloud Storage "
                "and Azure do: in this one, two processes could save under one name, and both be "
                "told that they have"
            )
        _refusing.add(self._root)

    def _put_new(self, data: bytes) -> bool:
        obstore = _obstore()
        try:
            with self._asking("be written"):
                obstore.put(self._store(), self._key, data, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    def remove(self, names: Collection[str] = ("",)) -> None:
        """Delete objects below, or this one; those that do not exist are deleted already."""
        obstore = _obstore()
        keys = [f"{self._key}/{name}".strip("/") for name in names]
        try:
            if keys:
                with self._asking("be deleted"):
                    obstore.delete(self._store(), keys)
        except _MissingError:  # as a disk says
            for key in keys:
                with contextlib.suppress(_MissingError), self._asking("be deleted"):
                    obstore.delete(self._store(), key)

    def _store(self) -> Any:
        if not self._root.startswith(_HERE) and _first_process() != os.getpid():
            raise StoreError(
                f"{self}: this process was forked from one that had used an object store, whose "
                "threads it lacks; start it with the method 'spawn'"
            )
        return _store_of(self._root)

    @contextlib.contextmanager
    def _asking(self, to: str) -> Iterator[None]:
        """Report what a store answers, in its own words but for what may hold credentials."""
        errors = _obstore().exceptions
        try:
            yield
        except errors.AlreadyExistsError:
            raise FileExistsError(str(self)) from None
        except errors.PreconditionError as error:
            raise _ReplacedError(f"{self}: cannot {to} ({words_of(error)})") from None
        except FileNotFoundError as error:
            if error.errno is not None:  # of what is written, not of the store
                raise
            raise _MissingError(f"{self}: cannot {to} ({words_of(error)})") from None
        except errors.BaseError as error:
            raise StoreError(f"{self}: cannot {to} ({words_of(error)})") from None


def _obstore() -> Any:
    try:
        import obstore.exceptions
    except ModuleNotFoundError:
        raise StoreError(
            "URLs of object stores need obstore: pip install 'shardwise[store]'"
        ) from None
    return obstore


@functools.cache
def _first_process() -> int:
    return os.getpid()


@functools.cache
def _store_of(root: str) -> Any:
    """The store of a bucket, whose connections all requests share."""
    from obstore.store import from_url

    if root.startswith(_HERE):
        return from_url(root)
    options: dict[str, Any] = {}
    if root.startswith("s3"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            options["endpoint"] = endpoint
            options["client_options"] = {"allow_http": endpoint.startswith("http://")}
        # Of files and single sign-on boto3 knows, of everything else obstore.
        if "AWS_ACCESS_KEY_ID" not in os.environ and importlib.util.find_spec("boto3"):
            from obstore.auth.boto3 import Boto3CredentialProvider

            with contextlib.suppress(ValueError):  # it has none
                options["credential_provider"] = Boto3CredentialProvider()
    if root.startswith("gs") and os.environ.get("GOOGLE_BASE_URL", "").startswith("http://"):
        options["client_options"] = {"allow_http": True}
    client = {"timeout": f"{_SECONDS}s", "connect_timeout": "10s"}
    options["client_options"] = options.get("client_options", {}) | client
    import datetime

    seconds = datetime.timedelta(seconds=_SECONDS)
    return from_url(
        root, retry_config={"max_retries": _RETRIES, "retry_timeout": seconds}, **options
    )


def words_of(error: Exception) -> str:
    """What an error says in one line, without URLs' queries, names of keys and what was signed."""
    text = str(error).partition("\n\nDebug source")[0]
    said = [*_STATUS.findall(text), *(a or b for a, b in _WORDS.findall(text))]
    if said:
        return ": ".join(dict.fromkeys(each.strip() for each in said))
    return _QUERY.sub(r"\1\2", " ".join(text.partition("<")[0].split()))[:500]

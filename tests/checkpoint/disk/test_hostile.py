"""Checkpoints of strangers, and damaged ones: one clear error, no memory, no other file touched."""

from __future__ import annotations

import base64
import copy
import json
import os
import resource
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from shardwise.base.boxes import full_box
from shardwise.base.strict import FREE
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk.entries import MANIFEST, torch_dtype
from shardwise.checkpoint.disk.manifest import MAX_BYTES, read_manifest
from shardwise.checkpoint.disk.pieces import PieceReader, read_box
from tests.checkpoint.small import SHARD, make, read_json, save_small, write_json
from tests.fuzz.mutations import archive_of

Json = dict[str, Any]
MORE = 512 * 2**20  # bytes of address space, beyond what the tests have: a lie would ask for more


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "original"
    save_small(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A checkpoint to be damaged."""
    return copied(original, tmp_path / "damaged")


def copied(source: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        (target / path.name).unlink(missing_ok=True)
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Let an allocation of what a lie asks for fail, instead of the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def load_all(folder: Path) -> None:
    """Do everything that is done with a checkpoint."""
    manifest = read_manifest(folder)
    with PieceReader(folder, manifest, buffer=4096) as reader:
        for entry in manifest.tensors:
            for piece in entry.pieces:
                assert all(chunk.nbytes for chunk in reader.stream(entry, piece))
            whole = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
            read_box(reader, entry, full_box(entry.shape), whole)
    checkpoint.load(folder, *make(seed=1))


def edited(change: Callable[[Json], Any]) -> Callable[[Path], Any]:
    """A damage of the manifest."""

    def apply(folder: Path) -> None:
        content = read_json(folder)
        change(content)
        write_json(folder, content)

    return apply


def first(content: Json) -> Json:
    """The first tensor: layers.0.weight, 5 x 7."""
    found: Json = content["tensors"][0]
    return found


def put(where: str, value: Any) -> Callable[[Path], Any]:
    """Set a field of the manifest, of its first tensor or of that one's piece."""
    *path, last = where.split(".")

    def change(content: Json) -> None:
        places = {"tensor": first(content), "piece": first(content)["pieces"][0]}
        node: Any = places[path[0]] if path and path[0] in places else content
        for key in path[1:] if path and path[0] in places else path:
            node = node[key]
        node[last] = value

    return edited(change)


def rename_file(name: str) -> Callable[[Path], Any]:
    def change(content: Json) -> None:
        content["files"] = {name: content["files"][SHARD]}
        for entry in content["tensors"]:
            for piece in entry["pieces"]:
                piece["file"] = name

    return edited(change)


def text(replace: Callable[[str], str]) -> Callable[[Path], Any]:
    def apply(folder: Path) -> None:
        (folder / MANIFEST).write_text(replace((folder / MANIFEST).read_text()))

    return apply


def shard(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    """A damage of the file, whose size the manifest then tells."""

    def apply(folder: Path) -> None:
        data = change((folder / SHARD).read_bytes())
        (folder / SHARD).write_bytes(data)
        put("files", {SHARD: len(data)})(folder)

    return apply


def header(change: Callable[[Json], Any]) -> Callable[[Path], Any]:
    """A damage of the file's header, which keeps its length."""

    def replace(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        content = json.loads(data[8 : 8 + length])
        change(content)
        made = json.dumps(content, separators=(",", ":")).encode().ljust(length)
        return data[:8] + made[:length] + data[8 + length :]

    return shard(replace)


def link(folder: Path, name: str) -> None:
    outside = folder.parent / f"outside {name}"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)


def grow(folder: Path) -> None:
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate(MAX_BYTES + 1)  # sparse


def pipe(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


def overlap(content: Json) -> None:
    one, other = content["tensors"][0], content["tensors"][3]
    other["pieces"][0]["offset"] = one["pieces"][0]["offset"]


def twice(content: Json) -> None:
    content["tensors"].append(copy.deepcopy(first(content)))


def two_pieces(content: Json) -> None:
    piece = first(content)["pieces"][0]
    first(content)["pieces"] = [piece | {"sizes": [3, 7]}, piece | {"sizes": [2, 7]}]


def through_a_value(content: Json) -> None:
    content["values"].append({"path": ["extra", "step", "deeper"], "value": 1})


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = {"x": [found]} if depth % 2 else [found, {}]
    return {"x": [[[[[[[[[[[found]]]]]]]]]]]}


def colliding() -> Json:
    """Numbers of which Python makes the same hash."""
    return {"$items": [[number * (2**61 - 1), 0] for number in range(1, 40)]}


def other_digit(text: str) -> str:
    return ("1" if text[0] == "0" else "0") + text[1:]


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    # the manifest as a file
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "cannot be opened"),
    "empty manifest": (text(lambda _: ""), "is not valid JSON"),
    "manifest is a link": (lambda folder: link(folder, MANIFEST), "cannot be opened"),
    "manifest is huge": (grow, "at most"),
    "not UTF-8": (
        lambda folder: (folder / MANIFEST).write_bytes(b'{"\xff": 1}'),
        "is not valid JSON",
    ),
    "deeply nested": (text(lambda _: "[" * 10**5), "nested too deeply"),
    "a list": (text(lambda _: "[1]"), "expected an object"),
    "a value as deep as JSON is read": (
        text(lambda t: t.replace('"value": 1', '"value": ' + "[" * 70 + "]" * 70, 1)),
        "checksum|nested more than 64 deep",
    ),
    "a config that is nested deeply": (
        edited(lambda c: c.update(config={"x": nested(190)})),
        "nested too deeply: found more than 200",
    ),
    "keys of one hash": (
        edited(lambda c: c["values"].append({"path": ["extra", "x"], "value": colliding()})),
        "17 keys with the same hash",
    ),
    "lists that take more memory than the file": (
        text(lambda t: t.replace("{", '{"x": [' + "[]," * 3_000_000 + "[]],", 1)),
        "takes up to .* bytes in memory",
    ),
    "a field that nobody knows": (put("tensros", []), "the field 'tensros'"),
    "a damaged last line": (
        text(lambda t: t.replace('"of_all_above": "', '"of_all_above": " ')),
        "delete that line",
    ),
    "a last line of another name": (
        text(lambda t: t.replace('"of_all_above"', '"of_all_abovf"')),
        "the field 'of_all_abovf'",
    ),
    "the same key twice": (
        text(lambda t: t.replace("{", '{"version": 1, "version": 1,', 1)),
        "'version' twice",
    ),
    # its fields
    "another format": (put("format", "other"), "'format'"),
    "a version to come": (put("version", 3), "expected 1 or 2, which this release reads"),
    "another algorithm": (put("checksum.algorithm", "md5"), "'algorithm'"),
    "blocks of nothing": (put("checksum.block", 0), "'block'"),
    "odd blocks": (put("checksum.block", 17), "multiple of 16"),
    "a field is missing": (edited(lambda c: c.pop("values")), "has no 'values'"),
    "world size is true": (put("world_size", True), "'world_size'"),
    "tied to nothing": (put("tied", {"layers.0.weight": "x"}), "'tied'"),
    "nothing is tied": (put("tied", {"x": "layers.0.weight"}), "'tied'"),
    "tied to itself": (put("tied", {"layers.0.weight": "layers.0.weight"}), "'tied'"),
    "tied to a list": (put("tied", {"layers.0.weight": []}), "'tied'"),
    "tied to another shape": (put("tied", {"layers.0.weight": "layers.0.bias"}), "'tied'"),
    "escape sequences": (put("strategy", "\x1b[2J"), "printable"),
    "a config that is none": (put("config", ["model_type"]), "'config'"),
    "tensors are no list": (put("tensors", {}), "expected a list"),
    "a path through a value": (edited(through_a_value), "is a value, and contains other values"),
    "the same tensor twice": (edited(twice), "twice"),
    "a path to elsewhere": (put("tensor.path", ["__class__", "x"]), "'path'"),
    "a path of nothing": (put("tensor.path", []), "'path'"),
    "an unknown tag": (
        edited(lambda c: c["values"].append({"path": ["extra", "x"], "value": {"$eval": "1"}})),
        r"\$eval",
    ),
    # files
    "a path upward": (rename_file("../outside.safetensors"), "expected shard-"),
    "an absolute path": (rename_file("/etc/passwd"), "expected shard-"),
    "a file of another name": (rename_file("model.safetensors"), "expected shard-"),
    "a file that is not listed": (put("piece.file", SHARD[:-1]), "one of 'files'"),
    "a file that is missing": (lambda folder: (folder / SHARD).unlink(), "cannot be opened"),
    "a file that is a link": (lambda folder: link(folder, SHARD), "cannot be opened"),
    "a file that is a pipe": (pipe, "expected a file|expected"),
    "a shorter file": (
        lambda folder: os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 1),
        "as the manifest says",
    ),
    "a file of no bytes": (put("files", {SHARD: 0}), "offset"),
    # tensors
    "an unknown dtype": (put("tensor.dtype", "F31"), "'dtype'"),
    "another dtype": (put("tensor.dtype", "I32"), "in its header"),
    "a larger dtype": (put("tensor.dtype", "F64"), "header|overlap|checksums|is damaged"),
    "an absurd shape": (put("tensor.shape", [2**61, 7]), "bytes of shape"),
    "a large shape": (put("tensor.shape", [10**9, 7]), "gaps or overlaps"),
    "a negative shape": (put("tensor.shape", [-5, -7]), "'shape'"),
    "a shape of many dimensions": (put("tensor.shape", [1] * 65), "at most"),
    "a large shape, a large piece": (
        edited(
            lambda c: (
                first(c).update(shape=[10**9, 7]),
                first(c)["pieces"][0].update(sizes=[10**9, 7]),
            )
        ),
        "inside the .* of shard",
    ),
    "a piece beyond the file": (put("piece.offset", 2**40), "'offset'"),
    "a piece at a negative offset": (put("piece.offset", -8), "'offset'"),
    "a piece elsewhere": (put("piece.offset", 0), "in its header|overlap"),
    "a piece outside the tensor": (put("piece.offsets", [1, 0]), "part of"),
    "a piece of another rank": (put("piece.offsets", [0]), "part of"),
    "a piece that is empty": (put("piece.sizes", [0, 7]), "non-empty"),
    "pieces that overlap": (edited(two_pieces), "gaps|overlap|checksums"),
    "tensors that overlap": (edited(overlap), "overlap in shard-"),
    "no pieces": (put("tensor.pieces", []), "gaps or overlaps"),
    "checksums are missing": (put("piece.checksums", ""), "'checksums'"),
    "checksums are no digits": (put("piece.checksums", "x" * 16), "'checksums'"),
    "another checksum": (
        edited(
            lambda c: first(c)["pieces"][0].update(
                checksums=other_digit(first(c)["pieces"][0]["checksums"])
            )
        ),
        r"model\.layers\.0\.weight: is damaged",
    ),
    # the file
    "a flipped bit": (shard(lambda d: d[:-1] + bytes([d[-1] ^ 1])), "is damaged"),
    "a header of no bytes": (shard(lambda d: bytes(8) + d[8:]), "header, length"),
    "a header without end": (shard(lambda d: b"\xff" * 8 + d[8:]), "header, length"),
    "a header beyond the file": (
        shard(lambda d: struct.pack("<Q", len(d) - 7) + d[8:]),
        "header, length",
    ),
    "a header that is not valid JSON": (shard(lambda d: d[:8] + b"!" + d[9:]), "is not valid JSON"),
    "another key": (
        header(lambda h: h.update(x=h.pop("model.layers.0.weight"))),
        "null in its header",
    ),
    "another shape": (
        header(lambda h: h["model.layers.0.weight"].update(shape=[7, 5])),
        "in its header",
    ),
    "other offsets": (
        header(lambda h: h["model.layers.0.weight"].update(data_offsets=[0, 1])),
        "in its header",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_clear_error(folder: Path, damage: str) -> None:
    load_all(folder)  # until it is damaged
    apply, complaint = DAMAGES[damage]
    apply(folder)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load_all(folder)
    assert str(folder) in str(caught.value), "the message names the file"
    assert len(str(caught.value)) < 1000, "the message is short"


# -- memory ----------------------------------------------------------------------------------------


def _torch_file(steps: bytes, records: int = 0) -> bytes:
    data = b"\x80\x02" + steps + b"."
    return archive_of([(b"x/data.pkl", data), *((b"x/%d" % i, b"") for i in range(records))])


def _header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def _many(item: bytes, count: int) -> bytes:
    numbered = map(item.replace(b"#", b"%d").__mod__, range(count))
    return b",".join(numbered if b"#" in item else [item] * count)


def _columns(pieces: int, dims: int, tensors: int) -> bytes:
    """A manifest in which a short text stands for many numbers."""
    packed = base64.b64encode(zlib.compress(bytes(8 * pieces))).decode()
    columns = {"count": pieces, "file": 0, "offset": packed, "sizes": [1] * dims}
    columns |= {
        "offsets": [packed] * dims,
        "checksums": base64.b64encode(bytes(8 * pieces)).decode(),
    }
    entry = {"dtype": "U8", "shape": [1] * dims, "placements": "", "mesh": "", "pieces": columns}
    content = {
        "format": "shardwise.checkpoint",
        "version": 2,
        "versions": {},
        "world_size": 1,
        "mesh": "",
        "strategy": "",
        "checksum": {"algorithm": "xxh3_64", "block": 16},
        "files": {SHARD: 1},
        "values": [],
        "tensors": [{"path": ["model", str(at)], **entry} for at in range(tensors)],
    }
    return json.dumps(content).encode()


_EMPTY = b'"#":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
#: What a reader could make hundreds of megabytes of: the name of the file, and what is in it.
SWOLLEN: dict[str, tuple[str, Callable[[], bytes]]] = {
    "nested dicts": ("a.pt", lambda: _torch_file(b"](" + b"}}K\x01NsK\x02Ns" * 700_000 + b"e")),
    "dicts": ("a.pt", lambda: _torch_file(b"](" + b"}X\x01\0\0\0aNs" * 900_000 + b"e")),
    "tuples": ("a.pt", lambda: _torch_file(b"(" + b"NN\x86" * 2_000_000 + b"t")),
    "lists of lists": ("a.pt", lambda: _torch_file(b"](](" + b")" * 10**6 + b"eq\0" + b"h\0" * 60)),
    "numbers": ("a.pt", lambda: _torch_file(b"(" + b"G12345678" * 3_000_000 + b"t")),
    "a wide text": (
        "a.pt",
        lambda: _torch_file(
            b"X" + struct.pack("<I", 30_000_004) + b"a" * 30_000_000 + b"\xf0\x9f\x98\x80"
        ),
    ),
    "records": ("a.pt", lambda: _torch_file(b"}", 60_000)),
    "names that are not known": (
        "a.pt",
        lambda: _torch_file(b"]" + b"".join(b"cm\n%x\na" % i for i in range(600_000))),
    ),
    "metadata": (".metadata", lambda: b"\x80\x02](" + b"}K\x01Ns" * 900_000 + b"e."),
    "entries": ("a.safetensors", lambda: _header(b"{%s}" % _many(b'"#":1', 1_500_000))),
    "tensors": ("a.safetensors", lambda: _header(b"{%s}" % _many(_EMPTY, 300_000))),
    "as many tensors as may be": (
        "a.safetensors",
        lambda: _header(b"{%s}" % _many(_EMPTY, 36_000)),
    ),
    "lists": ("a.safetensors", lambda: _header(b'{"a":[%s]}' % _many(b"[]", 3_000_000))),
    "texts": ("a.safetensors", lambda: _header(b'{"a":[%s]}' % _many(b'"#"', 2_000_000))),
    "an index": (
        "model.safetensors.index.json",
        lambda: b'{"weight_map":{%s}}' % _many(b'"#":"b.safetensors"', 900_000),
    ),
    "a manifest of columns": (MANIFEST, lambda: _columns(pieces=1 << 17, dims=64, tensors=4)),
    "a manifest": (MANIFEST, lambda: b'{"a":[%s]}' % _many(b'{"a":#}', 900_000)),
}

# Peak memory of the process that reads, measured by the kernel.
MEASURE = """
import sys
from pathlib import Path
from shardwise.checkpoint.formats import archive, dcp, hf, native, torchfile
from shardwise.checkpoint.formats.detect import open_source
from shardwise.base.errors import CheckpointError

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

for path in map(Path, sys.argv[1:]):
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far
    before = status("VmRSS")
    try:
        open_source(path).close()
        said = "read"
    except CheckpointError as error:
        said = str(error)
    print(status("VmHWM") - before, said)
"""


def test_reading_takes_at_most_64_mib_beyond_the_file(tmp_path: Path) -> None:
    paths, sizes = [], []
    for number, (file, data) in enumerate(SWOLLEN.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / file).write_bytes(data())
        paths.append(folder / file if file.endswith((".pt", ".safetensors")) else folder)
        sizes.append((folder / file).stat().st_size)
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = ended.stdout.splitlines()
    assert len(lines) == len(SWOLLEN), ended.stderr
    for name, size, line in zip(SWOLLEN, sizes, lines, strict=True):
        taken, _, said = line.partition(" ")
        assert int(taken) <= FREE + size, f"{name}: {int(taken) >> 20} MiB of {size >> 20}: {said}"
        assert "memory" in said or name in ("records", "as many tensors as may be"), said

"""Ways to damage a file: blindly, and where its format says what lies where."""

from __future__ import annotations

import functools
import json
import pickletools
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

#: Damages the bytes of a file.
Mutation = Callable[[random.Random, bytes], bytes]

_NUMBERS = (0, 1, 2, 7, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


# ---- any bytes ----


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if made:
            made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    return bytes(made)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def splice(rng: random.Random, data: bytes) -> bytes:
    """Copy, move, repeat or delete a span."""
    first, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    end = min(end, first + rng.choice((1, 4, 30, 500)))
    at = rng.randrange(len(data) + 1)
    match rng.randrange(4):
        case 0:
            return data[:first] + data[end:]
        case 1:
            return data[:at] + data[first:end] + data[at:]
        case 2:
            return data[:at] + data[first:end] + data[at + end - first :]
        case _:
            return data[:first] + data[first:end] * rng.randrange(2, 50) + data[end:]


def set_number(rng: random.Random, data: bytes) -> bytes:
    """Put a number, of the size of a length field, somewhere."""
    size = rng.choice((1, 2, 4, 8))
    at = rng.randrange(len(data) + 1)
    number = rng.choice((*_NUMBERS, len(data), at, rng.randrange(2**16)))
    if rng.random() < 0.5:  # near what is there
        number = int.from_bytes(data[at : at + size], "little") + rng.choice((-8, -1, 1, 8, 64))
    return data[:at] + (number % 256**size).to_bytes(size, "little") + data[at + size :]


BLIND: tuple[Mutation, ...] = (flip_bits, truncate, splice, set_number)


# ---- JSON ----

_JSON_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**61 - 1, 2**62, 2**64, 10**30, 0.5, 1e308, "", "x"),
    *("F32", "BOOL", "../x", "/etc/passwd", "\x1b[2J", "\ud800", "$tuple", [], {}, [[]], [0], [-1]),
    *({"$items": [[1, 2]]}, {"$bytes": "AA=="}, {"$float": "nan"}, {"$dtype": "F32"}),
)


def edit_json(rng: random.Random, content: Any) -> Any:
    """Put other values at up to three places of what JSON says."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        node: Any = content
        if not isinstance(node, dict | list) or not node:
            return content
        while True:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            inner = node[key]
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
                break
            node = inner
        _edit_item(rng, node, key)
    return content


def _edit_item(rng: random.Random, node: Any, key: Any) -> None:
    value = node[key]
    match rng.randrange(7):
        case 0:
            del node[key]
        case 1 if type(value) is int:
            node[key] = value + rng.choice((-8, -1, 1, 7, 2**31, 2**62))
        case 2 if isinstance(node, list):
            node.insert(rng.randrange(len(node) + 1), _copied(value))
        case 3:
            node[key] = _copied(rng.choice(_values_of(node)))
        case 4 if isinstance(value, str) and value:
            node[key] = value[: rng.randrange(len(value))] + rng.choice(("", "0", "\x00", "é"))
        case 5:
            nested = value
            for _ in range(rng.choice((1, 5, 70, 190, 210))):
                nested = rng.choice(([nested], {"x": nested}, {"$tuple": [nested]}))
            node[key] = nested
        case _:
            node[key] = _copied(rng.choice(_JSON_VALUES))


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _values_of(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


def json_file(rng: random.Random, data: bytes) -> bytes:
    """Edit a file that is JSON."""
    return json.dumps(edit_json(rng, json.loads(data))).encode()


def safetensors_header(rng: random.Random, data: bytes) -> bytes:
    """Edit the header of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    text = json.dumps(edit_json(rng, json.loads(data[8 : 8 + length]))).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


# ---- pickles ----

_OPCODES = (
    *(bytes([code]) for code in b"}])(N\x88Rb\x81suaet\x85\x86\x87\x94Q0\x93dl2"),
    b"K\x05",
    b"J\xff\xff\xff\x7f",
    b"\x8a\x09" + b"\xff" * 9,
    b"h\x00",
    b"h\x03",
    b"q\x00",
    b"j\xff\xff\xff\xff",
    b"r\xff\xff\xff\x7f",
    b"X\x01\x00\x00\x00a",
    b"cos\nsystem\n",
    b"cbuiltins\nbytearray\n",
    b"ctorch\nSize\n",
    b"ccollections\nOrderedDict\n",
    b"cpathlib\nPosixPath\n",
    b"ctorch\nfloat32\n",
    b"c__builtin__\nset\n",
    b"\x8c\x01a",
    b"G\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"ctorch.distributed.tensor\nDTensor\n",
)


def edit_pickle(rng: random.Random, data: bytes) -> bytes:
    """Leave out, repeat, exchange and put in steps of a pickle; make their numbers others."""
    steps = list(_steps_of(data))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, other = rng.randrange(len(steps)), rng.randrange(len(steps))
        match rng.randrange(7):
            case 0:
                del steps[at]
            case 1:
                steps.insert(at, steps[other])
            case 2:
                steps[at], steps[other] = steps[other], steps[at]
            case 3:
                steps.insert(at, rng.choice(_OPCODES))
            case 4 if len(steps[at]) > 1:
                steps[at] = steps[at][:1] + set_number(rng, steps[at][1:])
            case 5:
                steps[at:at] = _laughs(rng)
            case _:
                steps[at] = rng.choice(_OPCODES)
        if not steps:
            break
    return b"".join(steps)


@functools.lru_cache
def _steps_of(data: bytes) -> tuple[bytes, ...]:
    """The steps of a pickle that is whole."""
    starts = [at for _, _, at in pickletools.genops(data)]
    return tuple(data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True))


def _laughs(rng: random.Random) -> list[bytes]:
    """In place of a value, a tuple that holds it several times, and so on."""
    times, slot = rng.choice((1, 2)), rng.randrange(40)
    get = b"h" + bytes([slot])
    once = [b"q" + bytes([slot]), *[get] * times, b"\x86" if times == 1 else b"\x87"]
    return once * rng.choice((3, 30, 150))


# ---- zip archives ----


def archive_of(records: list[tuple[bytes, bytes]]) -> bytes:
    """A zip archive of names and contents, nothing compressed."""
    body, directory = bytearray(), bytearray()
    for name, data in records:
        fields = struct.pack(
            "<5H3L2H", 20, 0, 0, 0, 0, zlib.crc32(data), *[len(data)] * 2, len(name), 0
        )
        directory += b"PK\1\2" + struct.pack("<H", 20) + fields
        directory += struct.pack("<3H2L", 0, 0, 0, 0, len(body)) + name
        body += b"PK\3\4" + fields + name + data
    end = struct.pack("<4H2LH", 0, 0, *[len(records)] * 2, len(directory), len(body), 0)
    return bytes(body + directory + b"PK\5\6" + end)


@functools.lru_cache
def _records_of(data: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Names and contents of an archive that is whole."""
    (count,), (at,) = struct.unpack("<H", data[-12:-10]), struct.unpack("<L", data[-6:-2])
    found = []
    for _ in range(count):
        crc_and_sizes = struct.unpack("<3L3H", data[at + 16 : at + 34])
        _, size, _, named, extra, comment = crc_and_sizes
        (header,) = struct.unpack("<L", data[at + 42 : at + 46])
        inner_name, inner_extra = struct.unpack("<2H", data[header + 26 : header + 30])
        first = header + 30 + inner_name + inner_extra
        found.append((data[at + 46 : at + 46 + named], data[first : first + size]))
        at += 46 + named + extra + comment
    return tuple(found)


def zip_pickle(rng: random.Random, data: bytes) -> bytes:
    """Edit the pickle of an archive, whose checksum is then that of what it says."""
    return archive_of(
        [
            (name, edit_pickle(rng, content) if name.endswith(b"/data.pkl") else content)
            for name, content in _records_of(data)
        ]
    )


def zip_records(rng: random.Random, data: bytes) -> bytes:
    """Leave out, repeat, exchange and rename records."""
    records = list(_records_of(data))
    for _ in range(rng.choice((1, 1, 3))):
        at, other = rng.randrange(len(records)), rng.randrange(len(records))
        match rng.randrange(5):
            case 0 if len(records) > 1:
                del records[at]
            case 1:
                records.insert(at, records[other])
            case 2:
                (a, x), (b, y) = records[at], records[other]
                records[at], records[other] = (a, y), (b, x)
            case 3:
                name, content = records[at]
                records[at] = (splice(rng, name), content)
            case _:
                name, content = records[at]
                records[at] = (name, rng.choice(BLIND)(rng, content))
    return archive_of(records)


def zip_directory(rng: random.Random, data: bytes) -> bytes:
    """Edit the numbers of the directory, and of its end."""
    (at,) = struct.unpack("<L", data[-6:-2])
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place, size = rng.randrange(at, len(data)), rng.choice((1, 2, 4))
        number = rng.choice((*_NUMBERS, len(data), at, rng.randrange(len(data))))
        made[place : place + size] = (number % 256**size).to_bytes(size, "little")
    return bytes(made)


ARCHIVE: tuple[Mutation, ...] = (zip_pickle, zip_pickle, zip_records, zip_directory)

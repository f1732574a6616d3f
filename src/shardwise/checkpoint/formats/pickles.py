"""Reading hostile pickles without running anything, and within bounds.

Python's unpickler calls what a pickle names. Even if all names are checked, a few hundred bytes can
make it hash a tuple that contains itself a billion times over, or change a class for the whole
process. This one makes plain values, and objects of its own. Every step takes at least one byte of
the pickle, so the number of steps bounds time and memory.
"""

from __future__ import annotations

import itertools
import pickle
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from shardwise.base.strict import FREE, MAX_DEPTH, Collisions
from shardwise.base.units import one_line

_BYTES_EACH = 3  # bytes that the pickle must have for each container
_FEW = 4096  # containers that it may have in addition
_NODE = 48  # bytes that a value may take beside its own: on the stack, in the memo, in a container
_CONTAINER = 256  # and of what contains others, when it is filled and walked
_MOST_KEY = 64  # values that a key may contain, if it is a tuple
_CONTAINERS = (dict, list, tuple)
_ATOMS = (str, bytes, bool, int, float, type(None))


@dataclass(frozen=True)
class Constructor:
    """Stands for a class or function that a pickle names.

    Attributes:
        name: its name, for error messages.
        make: called with the arguments in the pickle, returns the object. Whatever it raises means
            that the pickle cannot be read.
    """

    name: str
    make: Callable[[tuple[Any, ...]], Any]


class PickledObject:
    """An object in a pickle, as the values that it was made from; nothing of its class is run.

    Attributes:
        kind: the class that it is an object of.
        args: the arguments that it was made with.
        state: the state that it was given then, mostly a dict of its attributes.
    """

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: Any, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None

    def get(self, name: str) -> Any:
        """An attribute; ``None`` if there is none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class AttributedDict(dict[Any, Any]):
    """An ``OrderedDict``, which may have attributes.

    Attributes:
        attributes: these, by name, if they were pickled as that.
    """

    attributes: Any = None


@dataclass(frozen=True)
class Unknown:
    """The kind of an object whose class or function is not known. Such an object holds nothing.

    Attributes:
        name: what the pickle names.
    """

    name: str


def opaque(name: str) -> Constructor:
    """A constructor for what is not known: nothing that it was made from, or given, is kept."""
    return Constructor(name, lambda args: PickledObject(Unknown(name), ()))


def object_constructor(name: str, kind: Any) -> Constructor:
    """A constructor that makes a :class:`PickledObject` from any arguments."""
    return Constructor(name, lambda args: PickledObject(kind, args))


class PickleError(Exception):
    """The pickle is damaged, or needs something that is not known."""


def load(
    data: bytes,
    find_class: Callable[[str, str], Any],
    most_steps: int,
    persistent_load: Callable[[Any], Any] | None = None,
    size: int = 0,
) -> Any:
    """Read the value in a pickle. No container in it contains itself, or is nested too deeply.

    Args:
        data: the pickle.
        find_class: called with a module and a name, returns what they stand for: a
            :class:`Constructor` or a plain value; ``None`` if they stand for nothing.
        most_steps: largest number of steps; each makes at most one value.
        persistent_load: called with the pickle's description of something outside of it, returns
            that.
        size: bytes of the files that the pickle describes, if that is more than its own: so much
            memory the value may take, and 64 MiB.

    Raises:
        PickleError: it is damaged, names something else, or is too large.
        CheckpointError: the keys of a dict in it were chosen to make the dict slow.
    """
    try:
        most = FREE + max(size, len(data)) - len(data)
        found = _StackMachine(data, find_class, persistent_load, most).run(most_steps)
    except (IndexError, struct.error, UnicodeDecodeError):
        raise PickleError("it is damaged or truncated") from None
    check_tree(found, len(data))
    return found


def check_tree(value: Any, size: int) -> None:
    """Check that a value can be walked, counting what it contains several times as often.

    Args:
        value: nested lists, tuples and dicts.
        size: size in bytes of the pickle that it comes from.

    Raises:
        PickleError: it is nested too deeply, or far larger than the pickle.
    """
    left = 16 * _FEW + size
    level = {id(value): (value, 1)}  # each container once, and how often it is there
    for _ in range(MAX_DEPTH // 2):
        inner: dict[int, tuple[Any, int]] = {}
        for node, times in level.values():
            left -= times * (len(node) if isinstance(node, _CONTAINERS) else 1)
            if left < 0:
                raise PickleError("it contains the same lists so often that it grows too large")
            parts = (node, node.values()) if isinstance(node, dict) else (node,)
            for item in itertools.chain(*parts) if isinstance(node, _CONTAINERS) else ():
                if isinstance(item, _CONTAINERS):
                    inner[id(item)] = item, times + inner.get(id(item), (None, 0))[1]
        level = inner
        if not level:
            return
    raise PickleError(f"it has more than {MAX_DEPTH // 2} levels of nesting")


class _StackMachine:
    """The stack machine that a pickle is a program of; one method for each kind of step."""

    def __init__(
        self,
        data: bytes,
        find_class: Callable[[str, str], Any],
        persistent_load: Callable[[Any], Any] | None,
        memory: int,
    ) -> None:
        self.data = data
        self.find_class = find_class
        self.persistent_load = persistent_load
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under the marks that are set
        self.memo: list[Any] = []
        self.memory = memory  # bytes that are left
        self.containers = _FEW + len(data) // _BYTES_EACH
        self.collisions: dict[int, Collisions] = {}
        self.held: list[Any] = []  # dicts in ``collisions``, kept alive so that ids stay unique

    def run(self, most_steps: int) -> Any:
        """Run the program to its end, and return the one value that is left on the stack."""
        data, steps = self.data, _STEPS
        for _ in range(most_steps):
            opcode = data[self.at]
            self.at += 1
            if opcode == _STOP:
                if self.below or len(self.stack) != 1 or self.at != len(data):
                    raise PickleError("it does not end where it should")
                return self.stack[0]
            step = steps.get(opcode)
            if step is None:
                raise PickleError(f"step {opcode:#04x} at byte {self.at - 1}")
            step(self)
        raise PickleError(f"it takes more than {most_steps:,} steps")

    # ---- bytes ----

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise PickleError("it is truncated")
        self.at += count
        return found

    def byte(self) -> int:
        found = self.data[self.at]
        self.at += 1
        return found

    def number(self, format_: str) -> Any:
        (found,) = struct.unpack(format_, self.take(struct.calcsize(format_)))
        return found

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 512)
        if end < 0:
            raise PickleError("a name in it does not end")
        return self.take(end + 1 - self.at)[:-1].decode("utf-8")

    # ---- values ----

    def push(self, value: Any) -> None:
        self.take_memory(sys.getsizeof(value) + _NODE)
        self.stack.append(value)

    def take_memory(self, nbytes: int) -> None:
        self.memory -= nbytes
        if self.memory < 0:
            raise PickleError("it takes more than 64 MiB of memory beyond the size of its file")

    def push_text(self, format_: str) -> None:
        text = self.take(self.number(format_))
        self.take_memory(0 if text.isascii() else 4 * len(text))
        self.push(text.decode("utf-8", "surrogatepass"))

    def push_bytes(self, format_: str) -> None:
        self.push(self.take(self.number(format_)))

    def push_container(self, value: Any) -> None:
        self.count_container()
        self.take_memory(_CONTAINER)
        self.push(value)

    def count_container(self) -> None:
        self.containers -= 1
        if self.containers < 0:
            raise PickleError("it has more lists than its size explains")

    def push_tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise PickleError("it is damaged")
        at = len(self.stack) - count
        items = tuple(self.stack[at:])
        del self.stack[at:]
        self.push_container(items)

    def push_long(self) -> None:
        self.push(int.from_bytes(self.take(self.byte()), "little", signed=True))

    # ---- marks and memo ----

    def mark(self) -> None:
        self.count_container()
        self.take_memory(_CONTAINER)
        self.below.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        self.memory += _CONTAINER
        return items

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def put(self, index: int) -> None:
        if index == len(self.memo):
            self.memoize()
        elif index < len(self.memo):
            self.memo[index] = self.stack[-1]
        else:
            raise PickleError("it skips places in its memo")

    def get(self, index: int) -> None:
        self.push(self.memo[index])

    # ---- containers ----

    def append(self, items: list[Any]) -> None:
        into = self.stack[-1]
        if _is_opaque(into):
            return
        if type(into) is not list:
            self.refuse("adds items to", into)
        into.extend(items)

    def set_items(self, items: list[Any]) -> None:
        into = self.stack[-1]
        if _is_opaque(into):
            return
        if type(into) not in (dict, AttributedDict):
            self.refuse("sets items of", into)
        if len(items) % 2:
            raise PickleError("a key in it has no value")
        self.take_memory(_NODE * len(items))
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str and type(key) is not PickledObject:
                self.check_key(into, key)
            into[key] = items[i + 1]

    def check_key(self, into: Any, key: Any) -> None:
        """Check that a key can be hashed quickly, and does not collide with many others."""
        left, nodes = _MOST_KEY, [key]
        while nodes:
            node = nodes.pop()
            left -= 1
            if isinstance(node, tuple) and len(node) <= left:
                nodes += node
            elif left < 0 or not isinstance(node, _ATOMS):
                self.refuse("has a key that is", key)
        collisions = self.collisions.get(id(into))
        if collisions is None:
            self.take_memory(2 * _CONTAINER)
            collisions = self.collisions[id(into)] = Collisions("a dict in it")
            self.held.append(into)
        collisions.check(key)

    # ---- names and objects ----

    def find(self, module: str, name: str) -> None:
        found = self.find_class(module, name)
        if found is None:
            names = f"{module}.{name}"
            shown = names if names.isprintable() else repr(names)
            raise PickleError(f"it names {shown[:120]}, which is not needed for plain values")
        self.take_memory(2 * _CONTAINER)  # what stands for it may have been made for it
        self.push(found)

    def find_on_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise PickleError("a name in it is not text")
        self.find(module, name)

    def make(self) -> None:
        """Call a constructor with the arguments on top of the stack.

        Constructors refuse arguments by raising; what they raise becomes a :class:`PickleError`.
        """
        args, maker = self.stack.pop(), self.stack.pop()
        if _is_opaque(maker):  # an object of a class that has __call__
            maker = opaque(maker.kind.name)
        if not isinstance(maker, Constructor) or not isinstance(args, tuple):
            self.refuse("calls", maker)
        self.count_container()
        self.take_memory(_CONTAINER)
        try:
            self.push(maker.make(args))
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            RuntimeError,
            OverflowError,
        ) as error:
            reason = one_line(error, 160)
            raise PickleError(f"it calls {maker.name} with wrong arguments ({reason})") from None

    def build(self) -> None:
        """Give an object its state. Of dicts, only :class:`AttributedDict` takes it."""
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, AttributedDict):
            made.attributes = state
        if isinstance(made, dict) or _is_opaque(made):
            return
        if type(made) is not PickledObject or made.state is not None:
            self.refuse("changes", made)
        made.state = state

    def push_persistent(self) -> None:
        if self.persistent_load is None:
            raise PickleError("it refers to something outside of it")
        self.push(self.persistent_load(self.stack.pop()))

    def refuse(self, what: str, value: Any) -> NoReturn:
        name = value.name if isinstance(value, Constructor) else f"a {type(value).__name__}"
        raise PickleError(f"it {what} {name}, which no plain value needs")


def _is_opaque(value: Any) -> bool:
    return type(value) is PickledObject and isinstance(value.kind, Unknown)


_STOP = pickle.STOP[0]
_STEPS: Mapping[int, Callable[[_StackMachine], Any]] = {
    opcode[0]: step
    for opcode, step in {
        pickle.PROTO: lambda m: m.take(1),
        pickle.FRAME: lambda m: m.take(8),
        pickle.MARK: _StackMachine.mark,
        pickle.MEMOIZE: _StackMachine.memoize,
        pickle.BINPUT: lambda m: m.put(m.byte()),
        pickle.LONG_BINPUT: lambda m: m.put(m.number("<I")),
        pickle.BINGET: lambda m: m.get(m.byte()),
        pickle.LONG_BINGET: lambda m: m.get(m.number("<I")),
        pickle.GLOBAL: lambda m: m.find(m.line(), m.line()),
        pickle.STACK_GLOBAL: _StackMachine.find_on_stack,
        pickle.REDUCE: _StackMachine.make,
        pickle.NEWOBJ: _StackMachine.make,
        pickle.BUILD: _StackMachine.build,
        pickle.BINPERSID: _StackMachine.push_persistent,
        pickle.EMPTY_DICT: lambda m: m.push_container({}),
        pickle.EMPTY_LIST: lambda m: m.push_container([]),
        pickle.EMPTY_TUPLE: lambda m: m.push(()),
        pickle.LIST: lambda m: m.push_container(m.to_mark()),
        pickle.TUPLE: lambda m: m.push_container(tuple(m.to_mark())),
        pickle.TUPLE1: lambda m: m.push_tuple(1),
        pickle.TUPLE2: lambda m: m.push_tuple(2),
        pickle.TUPLE3: lambda m: m.push_tuple(3),
        pickle.APPEND: lambda m: m.append([m.stack.pop()]),
        pickle.APPENDS: lambda m: m.append(m.to_mark()),
        pickle.SETITEM: lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
        pickle.SETITEMS: lambda m: m.set_items(m.to_mark()),
        pickle.NONE: lambda m: m.push(None),
        pickle.NEWTRUE: lambda m: m.push(True),
        pickle.NEWFALSE: lambda m: m.push(False),
        pickle.BININT: lambda m: m.push(m.number("<i")),
        pickle.BININT1: lambda m: m.push(m.byte()),
        pickle.BININT2: lambda m: m.push(m.number("<H")),
        pickle.LONG1: _StackMachine.push_long,
        pickle.BINFLOAT: lambda m: m.push(m.number(">d")),
        pickle.SHORT_BINUNICODE: lambda m: m.push_text("<B"),
        pickle.BINUNICODE: lambda m: m.push_text("<I"),
        pickle.SHORT_BINBYTES: lambda m: m.push_bytes("<B"),
        pickle.BINBYTES: lambda m: m.push_bytes("<I"),
        pickle.SHORT_BINSTRING: lambda m: m.push_bytes("<B"),
    }.items()
}

"""A program as a value: a model, how it is sharded, and what is done with it.

A program prints as the expression that makes it, so a find is a line to paste. Every field has the
simplest value as its default, and every program means something: an action that finds nothing to
work on does nothing. So whatever is left of a program when parts of it are taken away is a program
too, which is all that shrinking needs.

Blocks are counted from 0; ``ROOT`` stands for the parameters that the model has beside them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

ROOT = -1


class _Printed:
    """Prints the fields that are not at their defaults."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        said = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Block(_Printed):
    """One block of a model.

    Attributes:
        kind: ``linear``, ``mlp``, ``norm``, ``scalar``, ``position``, ``view`` or ``conv``.
        shard: ``own`` group, left to the ``root``'s, in one call ``with_previous``, or ``nested``:
            a group of its own in which the block's first layer is another.
        returns: what the output is wrapped in; see ``models.py``.
        beside: nothing, or what is returned beside the output and used after the next block: a
            view of the ``input`` or of a ``parameter``.
        tied_to: the block whose weight this one uses too, ``ROOT`` for the model's first layer.
        traits: any of ``TRAITS``.
    """

    kind: str = "linear"
    shard: str = "own"
    returns: str = "tensor"
    beside: str = ""
    tied_to: int | None = None
    traits: tuple[str, ...] = ()

    KINDS = ("linear", "mlp", "norm", "scalar", "position", "view", "conv")
    SHARDS = ("own", "root", "with_previous", "nested")
    RETURNS = ("tensor", "tuple", "list", "dict", "dataclass", "namedtuple", "object", "with_none")
    BESIDE = ("", "input", "parameter")
    TRAITS = ("twice", "checkpoint", "keyword", "in_place", "frozen", "no_bias")


# What is done. Between steps, or inside a forward at a moment.


@dataclass(frozen=True, repr=False)
class Write(_Printed):
    """Scale the parameters of a block, in a form; with a rank, only that rank its own rows.

    Those are of shards, so there is no ``live`` write of them.
    """

    block: int = 0
    form: str = "no_grad"
    factor: float = 1.5
    rank: int | None = None

    FORMS = ("no_grad", "data", "detach", "local", "assign_data", "copy", "foreach", "live", "grad")


@dataclass(frozen=True, repr=False)
class Ema(_Printed):
    """Move the parameters of one block half way to those of another, as a momentum encoder does."""

    source: int = 0
    target: int = 1
    form: str = "no_grad"

    FORMS = ("no_grad", "assign_data")


@dataclass(frozen=True, repr=False)
class Read(_Printed):
    """Look at the parameters: ``rows`` of this rank, ``full`` tensors, or a ``state_dict``.

    With a rank, only that one looks.
    """

    block: int = 0
    form: str = "rows"
    rank: int | None = None

    FORMS = ("rows", "full", "state_dict")


@dataclass(frozen=True, repr=False)
class Sleep(_Printed):
    """Be late on one rank."""

    rank: int = 0
    ms: int = 2


@dataclass(frozen=True, repr=False)
class Raise(_Printed):
    """Raise, on one rank or on all, what the program catches around the forward or backward."""

    rank: int | None = None


@dataclass(frozen=True, repr=False)
class Keep(_Printed):
    """Hold on to the tensors of the state dict, or to the gradients, until the program ends."""

    what: str = "state"

    WHAT = ("state", "grads")


@dataclass(frozen=True, repr=False)
class Load(_Printed):
    """Load a state dict: a new one of scaled values, or the one that was kept first."""

    source: str = "scaled"
    how: str = "copy"
    factor: float = 0.5

    SOURCES = ("scaled", "kept")
    HOWS = ("copy", "assign")


@dataclass(frozen=True, repr=False)
class Swap(_Printed):
    """Swap the parameters of a block for new ones with ``torch.utils.swap_tensors``."""

    block: int = 0


@dataclass(frozen=True, repr=False)
class Grads(_Printed):
    """Switch ``requires_grad`` of a block's parameters."""

    block: int = 0
    to: str = "off"

    TOS = ("off", "on")


@dataclass(frozen=True, repr=False)
class Gather(_Printed):
    """Call ``unshard()`` or ``reshard()`` of a block or of the root."""

    block: int = 0
    call: str = "unshard"

    CALLS = ("unshard", "reshard")


@dataclass(frozen=True, repr=False)
class At(_Printed):
    """An action, and the moment of a forward or of its backward in which it is done.

    ``body`` is in the root's forward before the block is called, ``pre`` and ``post`` are hooks of
    the block, ``inside`` is the beginning of its forward, ``backward`` a hook on its output.
    """

    when: str = "post"
    block: int = 0
    do: Any = Sleep()

    WHENS = ("body", "pre", "inside", "post", "backward")


@dataclass(frozen=True, repr=False)
class Forward(_Printed):
    """Call the model: to ``train``, in an evaluation under ``no_grad``, or with gradients for
    nothing (``unused``). ``model`` counts the copies that were made."""

    how: str = "train"
    at: tuple[At, ...] = ()
    model: int = 0

    HOWS = ("train", "no_grad", "unused")


@dataclass(frozen=True, repr=False)
class Backward(_Printed):
    """Go back from the losses of the forwards since: of ``all``, the ``first`` or the ``last``."""

    which: str = "all"
    graph: str = "free"

    WHICH = ("all", "first", "last")
    GRAPHS = ("free", "retain")


@dataclass(frozen=True, repr=False)
class Step(_Printed):
    """Let the optimizer step."""


@dataclass(frozen=True, repr=False)
class ZeroGrad(_Printed):
    """Clear gradients: to ``none`` or to ``zero``."""

    to: str = "none"

    TOS = ("none", "zero")


@dataclass(frozen=True, repr=False)
class Clip(_Printed):
    """Clip the norm of the gradients."""


@dataclass(frozen=True, repr=False)
class Sync(_Printed):
    """Switch the reduction of gradients."""

    to: str = "off"

    TOS = ("off", "on")


@dataclass(frozen=True, repr=False)
class Copy(_Printed):
    """Make a deep copy of the first model."""


@dataclass(frozen=True, repr=False)
class ChannelsLast(_Printed):
    """Call ``model.to(memory_format=torch.channels_last)``."""


@dataclass(frozen=True, repr=False)
class Program(_Printed):
    """A whole program.

    Attributes:
        world: the number of ranks.
        width: features; at 130 a weight has more than 64 KiB.
        dtype: of the parameters.
        precision: nothing, or ``bf16`` to compute in, or ``bf16`` with ``fp32`` reductions.
        blocks: of the model.
        root: what the root has of its own: any of ``ROOTS``.
        returns: what the model's output is wrapped in.
        reshard: ``reshard_after_forward`` of the blocks' groups; an ``int`` is half of the ranks.
        root_reshard: the same of the root's.
        mesh: ``1d``, or ``hybrid`` over two replicas.
        optimizer: ``sgd``, ``momentum``, ``adamw``, or ``in_backward``; ``-foreach`` or ``-fused``
            says how it computes.
        traits: any of ``TRAITS``.
        steps: what is done.
    """

    world: int = 2
    width: int = 4
    dtype: str = "float32"
    precision: str = ""
    blocks: tuple[Block, ...] = ()
    root: tuple[str, ...] = ()
    returns: str = "tensor"
    reshard: str = "none"
    root_reshard: str = "none"
    mesh: str = "1d"
    optimizer: str = "sgd"
    traits: tuple[str, ...] = ()
    steps: tuple[Any, ...] = ()

    WIDTHS = (4, 5, 7, 130)
    DTYPES = ("float32", "float64", "bfloat16")
    PRECISIONS = ("", "bf16", "bf16-fp32")
    ROOTS = ("first", "scale", "last", "last_tied")
    RESHARDS = ("none", "true", "false", "int")
    MESHES = ("1d", "hybrid")
    OPTIMIZERS = (
        *("sgd", "momentum", "momentum-foreach", "in_backward"),
        *("adamw", "adamw-foreach", "adamw-fused"),
    )
    TRAITS = (
        "keep_after_backward",
        "forward_prefetch",
        "backward_prefetch",
        "columns",
        "hooks_first",
    )

    @property
    def shards(self) -> int:
        """Over how many ranks a parameter is cut."""
        return self.world // 2 if self.mesh == "hybrid" else self.world

    @property
    def parts_ranks(self) -> bool:
        """Whether one rank of several leaves a forward early."""
        return self.world > 1 and any(
            isinstance(each, Raise) and each.rank is not None for each in walk(self)
        )


ACTIONS = (Write, Ema, Read, Sleep, Raise, Keep, Load, Swap, Grads, Gather)
STEPS = (Forward, Backward, Step, ZeroGrad, Clip, Sync, Copy, ChannelsLast)
_NAMES = {"ROOT": ROOT} | {each.__name__: each for each in (Program, Block, At, *ACTIONS, *STEPS)}


def parse(text: str) -> Program:
    """Make the program that ``text``, a printed one, says.

    Raises:
        ValueError: ``text`` is something else.
    """
    try:
        program = eval(text, {"__builtins__": {}}, _NAMES)
    except Exception as error:
        raise ValueError(
            f"expected a printed Program(...), found {text[:80]!r}: {error}"
        ) from error
    if not isinstance(program, Program):
        raise ValueError(f"expected a printed Program(...), found {text[:80]!r}")
    return program


def walk(value: Any) -> list[Any]:
    """All blocks, steps, moments and actions in ``value``, itself included."""
    if isinstance(value, tuple):
        return [each for part in value for each in walk(part)]
    if not dataclasses.is_dataclass(value):
        return []
    parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [value, *(each for part in parts for each in walk(part))]


def loosens_ties(program: Program) -> bool:
    """Whether a tied parameter becomes two by ``load_state_dict(assign=True)``."""
    ties = {"first", "last_tied"} <= set(program.root)
    ties = ties or any(block.tied_to is not None for block in program.blocks)
    return ties and any(isinstance(each, Load) and each.how == "assign" for each in walk(program))


def freezes_ahead(program: Program) -> bool:
    """Whether a forward freezes parameters before they are used in it, and others are written to.

    A sharded module has been gathered by then, and computes as before: backward needs its inputs.
    Autograd sees writes of hooks that step, those to full parameters, and on one rank all.
    """
    writes = program.optimizer == "in_backward" or program.shards == 1
    writes = writes or any(
        isinstance(each, Write) and each.form == "live" for each in walk(program)
    )
    return writes and any(
        isinstance(each, At) and isinstance(each.do, Grads) and each.when != "backward"
        for each in walk(program.steps)
    )


def writes_before_a_use_on_one_rank(program: Program) -> bool:
    """Whether a forward on one rank writes to shards that it may have yet to use.

    Autograd learns of such writes where forwards and backwards of groups begin. It refuses what
    was saved since the last of these, though that may have been saved after the write.
    """
    return program.shards == 1 and any(
        isinstance(each, At) and isinstance(each.do, (Write, Ema)) and each.when != "backward"
        for each in walk(program.steps)
    )


def returns_views_in_objects(program: Program) -> bool:
    """Whether a block returns a view of its parameter in an object of a class of its own."""
    return any(
        block.returns == "object" and block.beside == "parameter" for block in program.blocks
    )


def returns_views_twice(program: Program) -> bool:
    """Whether a block that runs twice in a forward returns a view of its parameter each time."""
    return any(block.beside == "parameter" and "twice" in block.traits for block in program.blocks)


def runs_copies_on_parted_ranks(program: Program) -> bool:
    """Whether ranks that part may run different models whose groups have the same names."""
    return program.parts_ranks and any(isinstance(step, Copy) for step in program.steps)


def taken_by_torch(program: Program) -> Program:
    """Make a program as much like this one as there is that torch's FSDP2 does not refuse.

    Without scalars, parameters tied across groups, tensors in objects that no tree knows, views of
    freed parameters, uneven columns and deep copies.
    """
    blocks = []
    for block in program.blocks:
        kind = "view" if block.kind == "scalar" else block.kind
        opaque = block.returns in ("object", "dataclass")
        beside = "" if block.beside == "parameter" else block.beside
        returns = "tuple" if opaque else block.returns
        blocks.append(
            dataclasses.replace(block, kind=kind, tied_to=None, returns=returns, beside=beside)
        )
    steps = tuple(step for step in program.steps if not isinstance(step, Copy))
    return dataclasses.replace(
        program,
        blocks=tuple(blocks),
        steps=steps,
        returns="tuple" if program.returns in ("object", "dataclass") else program.returns,
        traits=tuple(each for each in program.traits if each != "columns"),
    )


def features(program: Program) -> set[str]:
    """What is in a program, in words to count by."""
    found = {f"world {program.world}", f"width {program.width}", f"mesh {program.mesh}"}
    found |= {program.dtype, f"optimizer {program.optimizer}", f"reshard {program.reshard}"}
    found |= {f"precision {program.precision or 'as stored'}", *program.traits}
    found |= {f"root {each}" for each in program.root}
    found.add(f"model returns {program.returns}")
    for each in walk(program.blocks):
        found |= {f"block {each.kind}", f"shard {each.shard}", f"returns {each.returns}"}
        found |= {f"block {trait}" for trait in each.traits}
        if each.beside:
            found.add(f"view of {each.beside} beside")
        if each.tied_to is not None:
            found.add("tied")
    for each in walk(program.steps):
        if isinstance(each, At):
            found |= {f"at {each.when}", f"{type(each.do).__name__} in a forward"}
            continue
        found.add(type(each).__name__)
        for field in dataclasses.fields(each):
            value = getattr(each, field.name)
            if isinstance(value, str):
                found.add(f"{type(each).__name__} {value}")
            elif field.name == "rank" and value is not None and not isinstance(each, Sleep):
                found.add(f"{type(each).__name__} on one rank")
    return found


def essentials(program: Program) -> set[str]:
    """What is not as simple as it could be in a program."""
    found = set()
    for each in walk(program):
        name = type(each).__name__
        found.add(name)
        for field in dataclasses.fields(each):
            value = getattr(each, field.name)
            if value == field.default or isinstance(value, int | float):
                continue
            words = value if isinstance(value, tuple) else (value,)
            found |= {f"{name} {field.name} {word}" for word in words if isinstance(word, str)}
    return found

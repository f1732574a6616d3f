"""The models of the tests: small, and awkward on purpose.

Each entry of :data:`MODELS` says how to build the model, what a rank feeds it at a step, and which
modules become groups. Weights and batches come from fixed seeds, so that every process makes the
same ones. :mod:`tests.corpus.oracle` trains them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import linear_cross_entropy

#: The width of the models that are made of :class:`Block`.
WIDTH = 6

Batch = tuple[Tensor, ...]
Blocks = list[nn.Module | list[nn.Module]]


@dataclasses.dataclass(frozen=True)
class Model:
    """One entry.

    Attributes:
        build: the model on the current default device, in float32.
        batch: ``batch(generator)``: what one rank sees in one microbatch.
        loss: ``loss(model, *batch)``: a mean over the batch.
        blocks: what is sharded before the root, bottom-up; an inner list is one group.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[..., Tensor]
    blocks: Callable[[Any], Blocks]


class Block(nn.Module):
    """A residual block with 7 hidden units, which no even number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Blocks, a head and a scalar."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain


class Stack(nn.ModuleList):
    """A container with a forward of its own."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class Mlp(nn.Module):
    """Rows that no world size divides: 5, 3 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class ConvNet(nn.Module):
    """Weights of four dimensions, one without a bias, and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.GELU())
        self.body = nn.Sequential(nn.Conv2d(6, 5, 3, bias=False), nn.GroupNorm(1, 5), nn.GELU())
        self.head = nn.Linear(5 * 4 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).flatten(1))


class Frozen(nn.Module):
    """A group that is frozen whole, one that is frozen in part, one that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 6)
        self.norm = nn.LayerNorm(6)
        self.middle = nn.Linear(6, 5)
        self.head = nn.Linear(5, 1)
        self.embed.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.middle.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.norm(self.embed(x)))))


class Unused(nn.Module):
    """A group that no forward calls, and a parameter without use in a group that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.never = nn.Linear(7, 5)
        self.second = nn.Linear(5, 1)
        self.second.register_parameter("idle", nn.Parameter(torch.ones(3, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Scale(nn.Module):
    """Parameters with no dimension, with one element and with no element."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.tensor([0.25]))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset + self.nothing.sum()


class Scalars(nn.Module):
    """:class:`Scale` in a group of its own and in the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 1)
        self.inner = Scale()
        self.outer = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(torch.tanh(self.linear(x))))


class Pair(nn.Module):
    """Two layers with one weight and two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.right(torch.tanh(self.left(x))))


class Shared(nn.Module):
    """Parameters under two names: inside a nested group, and within the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.pair = Pair()
        self.head = nn.Linear(5, 1)
        self.alias = self.head
        self.again = nn.Linear(7, 5)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(self.pair(torch.tanh(self.first(x) + self.again(x))))


class Recurrent(nn.Module):
    """One group that computes four times in a forward: three in a row, and one beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 5)
        self.cell = nn.Linear(5, 5)
        self.leave = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.enter(x)
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.leave(x + self.cell(2 * first))


def _again(reentrant: bool, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute what is computed again in backward, if there will be one."""
    if not torch.is_grad_enabled():
        return function(x)
    return checkpoint(function, x, use_reentrant=reentrant)


class Inside(nn.Module):
    """A block that computes its own inside again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))

    def forward(self, x: Tensor) -> Tensor:
        return _again(self.reentrant, self.inner, x)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward.

    Args:
        where: each block by itself, all of them together, inside of each, or the whole model.
        reentrant: by another backward inside of the first.
    """

    def __init__(self, where: str, *, reentrant: bool) -> None:
        super().__init__()
        self.where = where
        self.again = partial(_again, reentrant)
        self.enter = nn.Linear(7, 5)
        self.blocks = nn.ModuleList(
            Inside(reentrant)
            if where == "inside"
            else nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))
            for _ in range(3)
        )
        self.leave = nn.Linear(5, 1)

    def _run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (self.again(block, x) if self.where == "each" else block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(self.again(self._run, x) if self.where == "all" else self._run(x))


class LowRank(nn.Module):
    """A frozen layer, and two thin ones that train beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    """Adapters between frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.Sequential(LowRank(), LowRank())
        self.head = nn.Linear(WIDTH, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


class Tied(nn.Module):
    """The last layer is the first, and a middle one shares its bias with another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.other.bias = self.middle.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.other(self.middle(self.first(x)).relu()))


class LinearLoss(nn.Module):
    """A model that returns its loss, which it computes without its logits.

    Args:
        tied: whether the head has the weight of the embedding.
        frozen: whether the head is.
        recomputed: whether activation checkpointing computes block and loss again.
    """

    def __init__(
        self, *, tied: bool = False, frozen: bool = False, recomputed: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 61, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.head.requires_grad_(not frozen)
        self.recomputed = recomputed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        if self.recomputed:
            return _again(False, lambda x: self.loss(x, tokens), x)
        return self.loss(x, tokens)

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        targets = tokens[:, 1:].masked_fill(tokens[:, :-1] < 5, -100)
        return linear_cross_entropy(self.head, self.block(x), targets)


class Odd(nn.Module):
    """A weight in two groups, a block that runs twice, a frozen parameter and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.embed.weight
        self.blocks[1].up.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.out(x)


class EvenBlock(nn.Module):
    """A residual block that two ranks of tensor parallelism cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Buffered(nn.Module):
    """A residual block of uneven sizes, with a buffer and a scalar."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.empty(()))
        self.register_buffer("shift", torch.empty(5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.5)
        self.shift.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x)).tanh()
        return x + self.gain * self.down(hidden) + self.shift.to(x.dtype)


# ---- what goes in and comes out ----


@dataclasses.dataclass
class Both:
    left: Tensor
    more: dict[str, Any]


class Nested(nn.Module):
    """Takes and returns tensors in dictionaries, lists and dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: dict[str, Any], *, pair: Both) -> dict[str, Any]:
        x = inputs["list"][0] + pair.left * self.scale
        left = self.block(x)
        return {"pair": Both(left, {"right": [x * self.scale, None]}), "name": "nested"}


class NestedNet(nn.Module):
    """Calls modules with containers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Nested(), Nested()

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.first, self.second):
            output = module({"list": [x, 3]}, pair=Both(x, {}))
            assert output["name"] == "nested"
            assert isinstance(output["pair"], Both)
            x = output["pair"].left + output["pair"].more["right"][0]
        return x


class Box:
    """A class of a user's."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Slotted:
    """Another, without a dictionary."""

    __slots__ = ("inside",)

    def __init__(self, inside: Any) -> None:
        self.inside = Box(inside)


def _in_a_pair(x: Tensor) -> Both:
    return Both(x, {"box": Box(x)})


def _as_it_is(x: Tensor) -> Tensor:
    return x


class Boxing(nn.Module):
    """Hands on its output in an object that says nothing of itself."""

    def __init__(self, box: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.box = box

    def forward(self, x: Any) -> Any:
        while not isinstance(x, Tensor):
            x = x.more["box"] if isinstance(x, Both) else x.inside
        return self.box(self.block(x))


class Learned(nn.Module):
    """Returns a part of its parameter, as learned positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, count: int) -> Tensor:
        return self.table[:count]


class WithPositions(nn.Module):
    """Uses a view of a parameter after other modules have run."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Learned()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(len(x))
        for block in self.blocks:
            x = block(x)
        return x + positions


class Viewing(nn.Module):
    """Returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(-1, 2, 4)


class Writing(nn.Module):
    """Writes in place to the views that its blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Viewing(), Viewing()

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        out += 1.0
        out = self.second(out.flatten(1)[:, :WIDTH])
        out[:, 0].mul_(2.0)
        return out


class Gate(nn.Module):
    """Returns a view, which its caller writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain).view_as(x)


class GatedTwice(nn.Module):
    """Writes to the views of a module that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.gate(x)
            x.mul_(0.75)
        return x


class Around(nn.Module):
    """A block that does something to its inputs, between two that give it and take from it."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), kind(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.blocks
        x = first(x)
        return last(middle(x, x * 0.5))


class Writes(Block):
    """Writes to its inputs in place, before and after their use."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        x.mul_(2)
        out = self.up(x.clone())
        other.add_(self.down(out.relu()))
        x[:, 0] += 1
        return x * other


class Returns(Block):
    """Returns an input itself, a view of one, and something new. Its caller writes to the first."""

    def forward(self, x: Tensor, other: Tensor) -> Any:  # type: ignore[override]
        return x, other.view(-1), self.down(self.up(x + other))

    def __call__(self, *args: Any) -> Tensor:
        out, view, new = super().__call__(*args)
        out += 1
        view *= 2
        return out * new + view.view_as(new)


class TwoEnds(Block):
    """The gradients of its two inputs are known at different times."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        late = self.up(x).relu()
        for _ in range(5):
            other = other.sin()
        return self.down(late) + self.down(self.up(other))


class OnlyWrites(nn.Module):
    """Returns nothing: it writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH) * 3)

    def forward(self, x: Tensor) -> None:
        x.add_(self.shift)
        x[0] *= self.scale


class Calls(nn.Module):
    """Goes on with what a module wrote to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), OnlyWrites(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.blocks
        x = first(x)
        middle(x)
        return last(x)


def _llama(*, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=22,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def _vectors(generator: torch.Generator) -> Batch:
    return torch.randn(4, 7, generator=generator), torch.randn(4, 1, generator=generator)


def _rows(generator: torch.Generator, width: int = WIDTH) -> Batch:
    return (torch.randn(3, width, generator=generator),)


def _images(generator: torch.Generator) -> Batch:
    return (
        torch.randn(3, 3, 8, 8, generator=generator),
        torch.randint(4, (3,), generator=generator),
    )


def _tokens(generator: torch.Generator) -> Batch:
    return (torch.randint(61, (2, 9), generator=generator),)


def _squared_error(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(x).to(target.dtype), target)


def _recomputed_error(model: nn.Module, x: Tensor, target: Tensor, *, reentrant: bool) -> Tensor:
    """Compute all of the model again."""
    found = _again(reentrant, model, x.requires_grad_())
    return F.mse_loss(found.to(target.dtype), target)


def _square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _cross_entropy(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(x), target)


def _own_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)


def _next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def _children(model: nn.Module) -> Blocks:
    return list(model.children())


def _blocks(model: Any) -> Blocks:
    return list(model.blocks)


def _layers(model: Any) -> Blocks:
    return list(model.model.layers)


def _adapters(model: Any, *, bases: bool) -> Blocks:
    """The adapters and what is around them; maybe their frozen layers as groups of their own."""
    inner = [layer.base for layer in model.layers] if bases else []
    return [*inner, *model.layers, model.embed, model.head]


def _of_checkpoints(where: str, reentrant: bool) -> Model:
    loss = partial(_recomputed_error, reentrant=reentrant) if where == "whole" else _squared_error
    return Model(partial(Checkpointed, where, reentrant=reentrant), _vectors, loss, _blocks)


MODELS = {
    "net": Model(Net, _rows, _square, _blocks),
    "stack": Model(Stack, _rows, _square, lambda _: []),
    "mlp": Model(Mlp, _vectors, _squared_error, lambda model: list(model.layers)),
    "mlp-in-one-group": Model(Mlp, _vectors, _squared_error, lambda _: []),
    "mlp-two-layers-in-one-group": Model(
        Mlp, _vectors, _squared_error, lambda model: [list(model.layers[:2]), model.layers[2]]
    ),
    "conv": Model(ConvNet, _images, _cross_entropy, _children),
    "frozen": Model(Frozen, _vectors, _squared_error, _children),
    "adapters": Model(Adapted, _rows, _square, partial(_adapters, bases=False)),
    "adapters-apart": Model(Adapted, _rows, _square, partial(_adapters, bases=True)),
    "unused": Model(Unused, _vectors, _squared_error, _children),
    "scalars": Model(Scalars, _vectors, _squared_error, lambda model: [model.inner]),
    "buffered": Model(
        lambda: nn.Sequential(Buffered(), Buffered(), nn.Linear(5, 3, bias=False)),
        partial(_rows, width=5),
        _square,
        lambda model: list(model[:2]),
    ),
    "shared": Model(Shared, _vectors, _squared_error, lambda model: [model.pair]),
    "tied": Model(Tied, _rows, _square, _children),
    **{
        f"linear-loss{name}": Model(partial(LinearLoss, **how), _tokens, _own_loss, blocks)
        for name, blocks, how in (
            ("", lambda model: [model.block], {}),
            ("-tied", lambda model: [model.block], {"tied": True}),
            ("-head-apart", lambda model: [model.embed, model.block, model.head], {}),
            ("-tied-apart", lambda model: [model.embed, model.block, model.head], {"tied": True}),
            ("-frozen", lambda model: [model.block, model.head], {"frozen": True}),
            ("-recomputed", lambda model: [model.block, model.head], {"recomputed": True}),
        )
    },
    "odd": Model(Odd, _rows, _square, lambda model: [model.embed, model.out, *model.blocks]),
    "recurrent": Model(Recurrent, _vectors, _squared_error, _children),
    **{
        f"checkpointed-{where}" + "-reentrant" * reentrant: _of_checkpoints(where, reentrant)
        for where in ("each", "all", "inside", "whole")
        for reentrant in (False, True)
    },
    "nested": Model(NestedNet, _rows, _square, _children),
    **{
        f"boxed-{number}": Model(
            lambda box=box: nn.Sequential(Boxing(box), Boxing(box), Boxing(_as_it_is)),
            _rows,
            _square,
            _children,
        )
        for number, box in enumerate((Box, Slotted, _in_a_pair))
    },
    "positions": Model(
        WithPositions, _rows, _square, lambda model: [model.positions, *model.blocks]
    ),
    "positions-in-one-group": Model(
        WithPositions,
        _rows,
        _square,
        lambda model: [[model.positions, model.blocks[0]], model.blocks[1]],
    ),
    "views": Model(Writing, _rows, _square, _children),
    "gated": Model(GatedTwice, _rows, _square, _children),
    **{
        name: Model(partial(Around, kind), _rows, _square, _blocks)
        for name, kind in (
            ("inputs-written", Writes),
            ("inputs-returned", Returns),
            ("inputs-late", TwoEnds),
        )
    },
    "inputs-only-written": Model(Calls, _rows, _square, _blocks),
    "llama": Model(partial(_llama, tied=False), _tokens, _next_token, _layers),
    "llama-tied": Model(partial(_llama, tied=True), _tokens, _next_token, _layers),
}


def one_by_one(blocks: Blocks) -> list[nn.Module]:
    """The blocks, each in a group of its own."""
    return [each for block in blocks for each in (block if isinstance(block, list) else [block])]


def make_model(name: str, *, seed: int = 0) -> nn.Module:
    """Build a model with the weights that the seed gives."""
    torch.manual_seed(seed)
    return MODELS[name].build()


def make_batch(name: str, rank: int, step: int, microbatch: int) -> Batch:
    """Draw what one rank sees in one microbatch of one step."""
    generator = torch.Generator().manual_seed(1 + rank + 101 * (microbatch + 101 * step))
    return MODELS[name].batch(generator)

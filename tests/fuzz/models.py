"""Models out of a program: blocks that do what blocks of real models do to a sharding runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.program import ROOT, Block, Program

BATCH = 3

#: Called with a moment of a forward: its kind, the block, and its output where there is one.
Moment = Callable[[str, int, torch.Tensor | None], None]


@dataclasses.dataclass
class AsDataclass:
    """An output in a dataclass."""

    main: torch.Tensor
    beside: torch.Tensor | None


class AsNamedTuple(NamedTuple):
    """An output in a named tuple."""

    main: torch.Tensor
    beside: torch.Tensor | None


class AsObject:
    """An output in an object of a class that no library knows."""

    def __init__(self, main: torch.Tensor, beside: torch.Tensor | None) -> None:
        self.main = main
        self.beside = beside


def wrap(kind: str, main: torch.Tensor, beside: torch.Tensor | None) -> Any:
    """Put an output, and what is returned beside it, into a container."""
    if kind == "tensor":
        return main if beside is None else (main, beside)
    if kind == "with_none":
        return (None, main, beside)
    if kind == "list":
        return [main, beside]
    if kind == "dict":
        return {"main": main, "beside": beside}
    classes = {"dataclass": AsDataclass, "namedtuple": AsNamedTuple, "object": AsObject}
    return classes[kind](main, beside) if kind in classes else (main, beside)


def unwrap(value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Take an output, and what is beside it, out of its container."""
    if isinstance(value, torch.Tensor):
        return value, None
    if isinstance(value, dict):
        return value["main"], value["beside"]
    if isinstance(value, AsDataclass | AsNamedTuple | AsObject):
        return value.main, value.beside
    main, beside = value[-2:]
    return main, beside


class FuzzBlock(nn.Module):
    """A block as its description says."""

    def __init__(self, spec: Block, width: int) -> None:
        super().__init__()
        self.spec = spec
        bias = "no_bias" not in spec.traits
        if spec.kind in ("linear", "mlp"):
            out = width + 3 if spec.kind == "mlp" and spec.tied_to is None else width
            self.inner = nn.Linear(width, out, bias=bias)
            if spec.kind == "mlp":
                self.outer = nn.Linear(out, width, bias=bias)
        elif spec.kind == "norm":
            self.inner = nn.LayerNorm(width, bias=bias)
        elif spec.kind == "conv":
            self.inner = nn.Conv2d(width, width, 2, padding=1, bias=bias)
        elif spec.kind == "scalar":
            self.gain = nn.Parameter(torch.ones(()))
        elif spec.kind == "view":
            self.gain = nn.Parameter(torch.ones(width))
        if spec.kind == "position" or spec.beside == "parameter":
            self.positions = nn.Parameter(torch.ones(BATCH + 2, width))
        self.moment: Callable[[str], None] = lambda when: None

    def forward(self, x: torch.Tensor) -> Any:
        self.moment("inside")
        beside = None
        if self.spec.beside == "input":
            beside = x.view_as(x)
        elif self.spec.beside == "parameter":
            beside = self.positions[: len(x)]
        return wrap(self.spec.returns, self.main(x), beside)

    def main(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the next block gets. Bounded, and near to the input."""
        kind = self.spec.kind
        if kind == "linear":
            return 0.5 * x + torch.tanh(self.inner(x))
        if kind == "mlp":
            return 0.5 * x + self.outer(torch.tanh(self.inner(x)))
        if kind == "conv":
            pixels = self.inner(x.view(*x.shape, 1, 1))
            return 0.5 * x + torch.tanh(pixels.mean((2, 3)))
        if kind == "norm":
            return self.inner(x)
        if kind == "scalar":
            return x * self.gain
        if kind == "position":
            return x + self.positions[: len(x)]
        return (x * self.gain).view_as(x)


class FuzzModel(nn.Module):
    """The root: its own layers around the blocks."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        width = program.width
        self.returns = program.returns
        self.specs = program.blocks
        if "first" in program.root:
            self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(FuzzBlock(spec, width) for spec in program.blocks)
        if "scale" in program.root or not (program.root or program.blocks):
            self.scale = nn.Parameter(torch.ones(width))
        if "last" in program.root or "last_tied" in program.root:
            self.last = nn.Linear(width, width, bias=False)
        if "last_tied" in program.root and "first" in program.root:
            self.last.weight = self.first.weight
        self._tie()
        self.moment: Moment = lambda when, block, output: None

    def _tie(self) -> None:
        for block, spec in zip(self.blocks, self.specs, strict=True):
            if spec.tied_to is None or not hasattr(block, "inner"):
                continue
            if spec.tied_to == ROOT:
                source = getattr(self, "first", None)
            else:
                source = getattr(self.blocks[spec.tied_to % len(self.blocks)], "inner", None)
            if source is not None and source.weight.shape == block.inner.weight.shape:
                block.inner.weight = source.weight

    def forward(self, x: torch.Tensor) -> Any:
        if hasattr(self, "first"):
            x = torch.tanh(self.first(x))
        carried: torch.Tensor | None = None
        for index, block in enumerate(self.blocks):
            self.moment("body", index, None)
            traits = self.specs[index].traits
            for _ in range(2 if "twice" in traits else 1):
                x, beside = self._call(block, traits, x)
                if x.requires_grad:
                    self.moment("backward", index, x)
                if "in_place" in traits:
                    x.mul_(0.75)
                if carried is not None:
                    x = x + carried
                carried = beside
        if carried is not None:
            x = x + carried
        if hasattr(self, "scale"):
            x = x * self.scale
        if hasattr(self, "last"):
            x = 0.5 * x + self.last(x)
        return wrap(self.returns, x, None)

    def _call(
        self, block: nn.Module, traits: tuple[str, ...], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if "checkpoint" in traits:
            return unwrap(checkpoint(block, x, use_reentrant=False))
        return unwrap(block(x=x) if "keyword" in traits else block(x))


def device() -> torch.device:
    """The device that a program runs on: the GPU of this process, if it sees one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(program: Program) -> FuzzModel:
    """Build the model, with the same values in every process."""
    model = FuzzModel(program).to(device(), getattr(torch, program.dtype))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            values = torch.randn(param.shape, generator=generator)
            scale = program.width**-0.5 if param.ndim > 1 else 0.2
            center = 0.0 if param.ndim > 1 else 0.8
            param.copy_((center + scale * values).to(device()))
    for block, spec in zip(model.blocks, program.blocks, strict=True):
        if "frozen" in spec.traits:
            block.requires_grad_(False)
    return model

"""Parameters that are exchanged together, and the outer state of this rank's shards of them.

Outer parameters and momentum are fp32, one flat vector each, sharded exactly as the inner
parameters are: views of them have the shapes of the local shards.

    outer      | scalars | 0 .. 0 | embedding's rows | layer 0's rows | layer 4's rows |
    momentum   | the same                                                             |
    error      | the same, with error feedback                                        |

Parameters with the same placements are next to each other, in a section that is averaged by itself.
What several ranks of a replica hold in common thus shares no block of the wire format with what
each of them holds alone, and is rounded in the same way on all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.diloco.average import Average
from shardwise.diloco.settings import OuterSGD
from shardwise.transport.codecs import BLOCK

_INNER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Pending:
    """An exchange whose result has not been applied.

    Attributes:
        begun: number of inner steps before it started.
        average: of the pseudo-gradients, fp32, flat.
        start: the inner parameters when it started, fp32, flat, if later steps are kept.
    """

    begun: int
    average: Average
    start: Tensor | None = None


class Fragment:
    """Some of the parameters, with their outer state.

    Args:
        name: for messages.
        parameters: by fully qualified name, in an order that is the same on all replicas.
        error_feedback: whether to keep what encoding loses.

    Attributes:
        sections: elements of the sections of flat vectors, in their order. The parameters of a
            section have the same placements.
        outer: outer parameters, fp32, flat.
        momentum: of the outer optimizer, fp32, flat.
        error: what encoding has lost, fp32, flat; ``None`` without error feedback.
        rounds: number of outer steps.
        even_at: number of inner steps when the inner parameters last equaled the outer ones.
        pending: the exchange in progress.

    Raises:
        ValueError: a parameter is on the meta device, or they are on several devices.
        TypeError: a parameter is not fp32, bf16 or fp16.
    """

    def __init__(
        self, name: str, parameters: Mapping[str, nn.Parameter], *, error_feedback: bool
    ) -> None:
        self.name = name
        self.parameters = dict(parameters)
        locals_ = {fqn: dtensor.plain(each).detach() for fqn, each in self.parameters.items()}
        for fqn, local in locals_.items():
            if local.device.type == "meta":
                raise ValueError(f"{fqn}: is on the meta device; materialize it first")
            if local.dtype not in _INNER_DTYPES:
                raise TypeError(f"{fqn}: found {local.dtype}, expected fp32, bf16 or fp16")
        devices = {local.device for local in locals_.values()}
        if len(devices) != 1:
            names = sorted(map(str, devices))
            raise ValueError(f"{name}: found parameters on {names}, expected one device")
        [self.device] = devices
        self._shapes = {fqn: local.shape for fqn, local in locals_.items()}
        self._starts, self.sections = _places(self.parameters, self._shapes)
        numel = sum(self.sections)
        self.outer = torch.zeros(numel, dtype=torch.float32, device=self.device)
        self.momentum = torch.zeros_like(self.outer)
        self.error = torch.zeros_like(self.outer) if error_feedback else None
        self.rounds = 0
        self.even_at = 0
        self.pending: Pending | None = None
        self.begin_at_inner()

    @property
    def layout(self) -> list[str]:
        """What must be equal on all replicas: names, shapes of the local shards and dtypes."""
        return [
            f"{fqn}: {tuple(self._shapes[fqn])} {str(each.dtype).removeprefix('torch.')}"
            for fqn, each in self.parameters.items()
        ]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of a flat vector, by parameter, in the shapes of the local shards."""
        return {
            fqn: flat[start : start + self._shapes[fqn].numel()].view(self._shapes[fqn])
            for fqn, start in self._starts.items()
        }

    def check(self) -> None:
        """Check that the local shards have the shapes that they had at construction.

        Raises:
            ValueError: a parameter has another shape.
        """
        for fqn, parameter in self.parameters.items():
            found, expected = tuple(dtensor.plain(parameter).shape), tuple(self._shapes[fqn])
            if found != expected:
                raise ValueError(
                    f"{fqn}: this rank's shard has shape {found}, but had {expected} when DiLoCo "
                    "was created; create the optimizer and DiLoCo again after changing the model"
                )

    @torch.no_grad()
    def begin_at_inner(self) -> None:
        """Set the outer parameters to the inner ones, and momentum and error to 0."""
        self.outer.copy_(self.inner_parameters())
        self.momentum.zero_()
        if self.error is not None:
            self.error.zero_()

    @torch.no_grad()
    def pseudo_gradient(self) -> Tensor:
        """Return the outer parameters minus the inner ones, fp32, flat.

        The outer ones are rounded to the dtype of the inner ones first: that is what the inner
        steps started from.
        """
        gradient = torch.zeros_like(self.outer)
        for local, result, outer in self._with_parts(gradient, self.outer):
            result.copy_(outer.to(local.dtype)).sub_(local)
        return gradient

    @torch.no_grad()
    def outer_step(self, gradient: Tensor, settings: OuterSGD) -> None:
        """Apply the averaged pseudo-gradient to the outer parameters; overwrites ``gradient``."""
        momentum = settings.momentum_of(self.rounds + 1)
        self.momentum.mul_(momentum).add_(gradient)
        if settings.nesterov:
            gradient.add_(self.momentum, alpha=momentum)
        else:
            gradient.copy_(self.momentum)
        self.outer.add_(gradient, alpha=-settings.lr)
        self.rounds += 1

    @torch.no_grad()
    def mix_in(self, alpha: float) -> None:
        """Set the inner parameters to ``alpha`` * inner + (1 - ``alpha``) * outer."""
        for local, outer in self._with_parts(self.outer):
            if alpha:
                local.lerp_(outer.to(local.dtype), 1 - alpha)
            else:
                local.copy_(outer)

    @torch.no_grad()
    def inner_parameters(self) -> Tensor:
        """Return a copy of the inner parameters, fp32, flat."""
        copied = torch.zeros_like(self.outer)
        for local, part in self._with_parts(copied):
            part.copy_(local)
        return copied

    @torch.no_grad()
    def move_from(self, start: Tensor) -> None:
        """Add to the inner parameters what the outer ones are beside ``start``.

        Where the inner parameters were ``start``, they are the outer ones afterwards; and what has
        changed them since is added to that.
        """
        for local, outer, before in self._with_parts(self.outer, start):
            local.copy_(outer + (local - before))

    @torch.no_grad()
    def move_inner_by(self, gradient: Tensor) -> None:
        """Set the inner parameters to the outer ones minus a pseudo-gradient."""
        for local, outer, part in self._with_parts(self.outer, gradient):
            local.copy_(outer - part)

    def _with_parts(self, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield each local shard, where its memory is now, with its parts of flat vectors."""
        parts = zip(*(self.views(flat).values() for flat in flats), strict=True)
        for fqn, found in zip(self._starts, parts, strict=True):
            yield dtensor.plain(self.parameters[fqn]).detach(), *found


def _places(
    parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, torch.Size]
) -> tuple[dict[str, int], list[int]]:
    """Return where in a flat vector each parameter begins, and the sizes of its sections."""
    alike: dict[object, list[str]] = {}
    for fqn, each in parameters.items():
        key = (each.device_mesh, each.placements) if isinstance(each, DTensor) else None
        alike.setdefault(key, []).append(fqn)
    starts: dict[str, int] = {}
    begins: list[int] = []
    end = 0
    for names in alike.values():
        end = -(-end // BLOCK) * BLOCK
        begins.append(end)
        for fqn in names:
            starts[fqn] = end
            end += shapes[fqn].numel()
    return starts, [last - first for first, last in pairwise([*begins, end])]


def assign_to_fragments(
    parameters: Mapping[str, nn.Parameter], blocks: list[set[nn.Parameter]], count: int
) -> list[dict[str, nn.Parameter]]:
    """Assign parameters to fragments, block by block in turn ("strided").

    Args:
        parameters: by fully qualified name.
        blocks: parameters of each block, in the order of the model. Parameters outside of blocks go
            to the fragment with the fewest elements.
        count: number of fragments.

    Raises:
        ValueError: there are fewer blocks than fragments.
    """
    if count > 1 and len(blocks) < count:
        raise ValueError(
            f"fragments: found {count}, expected at most {len(blocks)}, the number of repeated "
            "blocks of the model"
        )
    home = {each: i % count for i, block in enumerate(blocks) for each in block}
    sizes = [0] * count
    for each in parameters.values():
        if each in home:
            sizes[home[each]] += each.numel()
    smallest = sizes.index(min(sizes))
    fragments: list[dict[str, nn.Parameter]] = [{} for _ in range(count)]
    for fqn, each in parameters.items():
        fragments[home.get(each, smallest)][fqn] = each
    return fragments

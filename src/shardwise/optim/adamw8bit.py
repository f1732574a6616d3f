"""``AdamW8bit``: AdamW whose moments take eight bits for each element, whatever the mesh.

    step               fp32    a scalar
    exp_avg_codes      uint8   shape and placements of the parameter
    exp_avg_scale      fp32    a number for each block; see ``blocks.py``
    exp_avg_sq_codes   uint8
    exp_avg_sq_scale   fp32

A moment is decoded, advanced by the gradient, used, and encoded again, some thousand elements at a
time. Every operation rounds once and works on single elements, or takes a maximum. So the result
does not depend on who has which blocks, or on how many are computed at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardwise._torch import dtensor, fake
from shardwise.optim.blocks import Blocks
from shardwise.optim.codes import NEAREST, CodeBook, Range, share_of
from shardwise.optim.moments import CODES, MOMENTS, SCALES, Rates, Scratch, Update, agree_on_scales
from shardwise.optim_names import keys_in_order, parameters_in_order

#: Tensors with fewer elements keep moments in fp32.
SMALLEST = 4096
#: Parameters that miss gradients are at other steps than others, and need other codes.
_BOOKS = 8

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STEP = "step"


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with moments of eight bits.

    Moments are quantized block by block, to the codes of 8-bit optimizers (Dettmers et al., arXiv
    2110.02861). A block is up to 256 consecutive elements of a row, wherever the tensor is cut, so
    the update is the same, bit for bit, on any mesh. Tensors of one dimension, or of fewer than
    4096 elements in all, keep moments in fp32.

    Where ranks share blocks, because a tensor is cut inside its rows, each step all-reduces the
    largest moments of these blocks. All ranks have to call :meth:`step` then.

    Parameters of bf16 and fp16 are updated in fp32, and rounded.

    Args:
        params: parameters, or groups of them; sharded or not. Their dtype is fp32, bf16 or fp16.
        lr: learning rate.
        betas: the shares that the moments keep in each step.
        eps: added to the root of the second moment.
        weight_decay: share of a parameter that is taken off, times ``lr``.

    Raises:
        TypeError: a parameter has another dtype.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._plans: dict[Tensor, _Plan] = {}
        self._books: dict[tuple[Range, torch.device, float], CodeBook] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plans, self._books = {}, {}  # which copies do not have
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options of its own.

        Args:
            param_group: ``params``, and options.

        Raises:
            TypeError: a parameter has an unsupported dtype.
            ValueError: an option is out of range.
        """
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for i, param in enumerate(self.param_groups[-1]["params"]):
            if param.dtype not in _DTYPES:
                at = len(self.param_groups) - 1
                self.param_groups.pop()
                raise TypeError(
                    f"AdamW8bit: parameter {i} of group {at}, of shape {list(param.shape)}: found "
                    f"dtype {param.dtype}, expected float32, bfloat16 or float16; give it to "
                    "torch.optim.AdamW"
                )

    def new_state(self, param: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step.

        Args:
            param: a parameter of this optimizer.

        Returns:
            Tensors by name. Where the parameter is a ``DTensor``, all but ``step`` are.
        """
        device = dtensor.plain(param).device
        made = {name: form.zeros(device) for name, form in self._plan(param).forms.items()}
        return {_STEP: torch.tensor(0.0), **made}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients again.

        Returns:
            What ``closure`` returned, if there is one.

        Raises:
            TypeError: a gradient is sparse. No parameter has been changed.
            PeerLostError: a rank that shares blocks is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, for parameters that are sharded alike.

        Onto another mesh, load with ``shardwise.checkpoint`` or ``torch.distributed.checkpoint``.

        Args:
            state_dict: the state.

        Raises:
            ValueError: it is of another optimizer, or of parameters that are sharded in another
                way. Nothing has been changed.
        """
        found: dict[Tensor, dict[str, Tensor]] = {}

        # The base class would convert codes and scales to the dtype of the parameter.
        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            states = dict(given["state"])
            pairs = zip(keys_in_order(given), parameters_in_order(self), strict=False)
            for number, (key, param) in enumerate(pairs):
                if key in states:
                    found[param] = self._checked(number, param, states.pop(key))
            return {**given, "state": states}

        def give(_: torch.optim.Optimizer) -> None:
            self.state.update(found)

        hooks = (
            self.register_load_state_dict_pre_hook(take),  # after those of the user
            self.register_load_state_dict_post_hook(give, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _checked(self, number: int, param: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """A state that was loaded, on the device of its parameter."""
        if not state:  # of a parameter that never had a gradient
            return {}
        forms = self._plan(param).forms
        where = f"state of parameter {number}, of shape {list(param.shape)}"
        if dist.is_initialized():
            where += f", on rank {dist.get_rank()}"
        if state.keys() != {_STEP, *forms}:
            raise ValueError(
                f"{where}: found {sorted(state)}, expected {sorted([_STEP, *forms])}; the state of "
                "another optimizer cannot be loaded into AdamW8bit"
            )
        made = {_STEP: torch.as_tensor(state[_STEP], dtype=torch.float32, device="cpu")}
        device = dtensor.plain(param).device
        for name, form in forms.items():
            form.check(state[name], f"{where}: {name}")
            made[name] = state[name].to(device)
        return made

    def _plan(self, param: Tensor) -> _Plan:
        if param not in self._plans:
            self._plans[param] = _Plan.of(param)
        return self._plans[param]

    def _step(self) -> None:
        todo = [
            (group, param)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for _, param in todo:
            if param.grad.layout != torch.strided:
                raise TypeError(
                    f"AdamW8bit: found a gradient of layout {param.grad.layout} of a parameter of "
                    f"shape {list(param.shape)}, expected a dense one; make the embedding with "
                    "sparse=False"
                )
        scratch: dict[torch.device, Scratch] = {}
        together: list[Update] = []
        for group, param in todo:
            state, plan = self.state[param], self._plan(param)
            if not state:
                state.update(self.new_state(param))
            state[_STEP] += 1
            device = dtensor.plain(param).device
            if device not in scratch:
                scratch[device] = Scratch(device)
            rates = Rates.of(group, state[_STEP])
            books = self._books_of(state[_STEP], device)
            update = Update(param, state, plan.blocks, rates, books, scratch[device])
            if plan.blocks is not None and plan.blocks.shared_over:
                together.append(update)
            else:
                update.apply()
        agree_on_scales(together)
        for update in together:
            update.apply()

    def _books_of(self, step: Tensor, device: torch.device) -> tuple[CodeBook, CodeBook]:
        share = share_of(step.item()) if fake.has_values(step) else NEAREST
        return self._book(Range.SIGNED, device, NEAREST), self._book(Range.UNSIGNED, device, share)

    def _book(self, numbers: Range, device: torch.device, share: float) -> CodeBook:
        key = (numbers, device, share)
        if key not in self._books:
            if len(self._books) == _BOOKS:
                del self._books[next(iter(self._books))]  # the oldest
            self._books[key] = CodeBook(numbers, device, share)
        return self._books[key]


def _check_options(options: Mapping[str, Any]) -> None:
    beta1, beta2 = options["betas"]
    for name, value, is_right, expected in (
        ("lr", options["lr"], options["lr"] >= 0.0, "0 or more"),
        ("betas", options["betas"], 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0, "two from 0 to 1"),
        ("eps", options["eps"], options["eps"] >= 0.0, "0 or more"),
        ("weight_decay", options["weight_decay"], options["weight_decay"] >= 0.0, "0 or more"),
    ):
        if not is_right:
            raise ValueError(f"AdamW8bit: {name}: found {value}, expected {expected}")


@dataclass(frozen=True)
class _Form:
    """What a tensor of a state looks like.

    Attributes:
        shape: of the whole tensor.
        local: of this rank's part.
        dtype: of both.
        mesh: of a ``DTensor``.
        placements: of a ``DTensor``.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    dtype: torch.dtype
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]

    def zeros(self, device: torch.device) -> Tensor:
        local = torch.zeros(self.local, dtype=self.dtype, device=device)
        if self.mesh is None:
            return local
        shape = torch.Size(self.shape)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        spec = dtensor.make_spec(self.mesh, self.placements, shape, strides, self.dtype)
        return dtensor.wrap_local(local, spec)

    def check(self, value: object, what: str) -> None:
        """Raise an error if a tensor is not of this form."""
        if not isinstance(value, Tensor):
            raise ValueError(f"{what}: found a {type(value).__name__}, expected a tensor")
        local = dtensor.plain(value)
        if value.dtype != self.dtype or tuple(value.shape) != self.shape:
            raise ValueError(
                f"{what}: found {value.dtype} of shape {list(value.shape)}, expected {self.dtype} "
                f"of shape {list(self.shape)}; the state is of another optimizer or model"
            )
        if isinstance(value, DTensor) != (self.mesh is not None) or (
            tuple(local.shape) != self.local
        ):
            found = "a DTensor" if isinstance(value, DTensor) else "a plain tensor"
            raise ValueError(
                f"{what}: found {found} with {list(local.shape)} on this rank, expected "
                f"{'a plain tensor' if self.mesh is None else 'a DTensor'} with "
                f"{list(self.local)}; load onto another mesh with shardwise.checkpoint or "
                "torch.distributed.checkpoint"
            )


@dataclass(frozen=True)
class _Plan:
    """How the state of a parameter is laid out.

    Attributes:
        forms: what its tensors look like, by name, ``step`` left out.
        blocks: blocks of the moments; ``None`` if they are in fp32.
    """

    forms: Mapping[str, _Form]
    blocks: Blocks | None

    @classmethod
    def of(cls, param: Tensor) -> _Plan:
        shape, local = tuple(param.shape), tuple(dtensor.plain(param).shape)
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        placements = param.placements if isinstance(param, DTensor) else ()
        if param.ndim < 2 or param.numel() < SMALLEST:
            moment = _Form(shape, local, torch.float32, mesh, placements)
            return cls(dict.fromkeys(MOMENTS, moment), None)
        blocks = Blocks.of(param)
        codes = _Form(shape, local, torch.uint8, mesh, placements)
        scales = _Form(
            blocks.scales_shape, blocks.scales_local, torch.float32, mesh, blocks.scales_placements
        )
        return cls(dict.fromkeys(CODES, codes) | dict.fromkeys(SCALES, scales), blocks)

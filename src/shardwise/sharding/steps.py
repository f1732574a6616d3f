"""Steps of optimizers on sharded parameters: counted, and checked before they begin."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise._torch import dtensor
from shardwise.base.offload import Offload
from shardwise.sharding.attributes import TAKEN
from shardwise.sharding.local_step import stepping_locally


class SteppedForm(Protocol):
    """What steps of optimizers are counted on."""

    fqn: str
    parameter: nn.Parameter
    offload: Offload
    groups: list[Any]
    has_moved: bool
    steps: int

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""

    def check_not_lost(self) -> None:
        """Check that there are values to step from."""


Form = TypeVar("Form", bound=SteppedForm)


class _FormRef(weakref.ref[Form]):
    """A reference that does not keep a model alive for a parameter that it had before."""

    def __reduce__(self) -> Any:
        return type(None), ()  # pickles leave it out


class Steps(Generic[Form]):
    """Counts optimizer steps on sharded parameters, and checks the states that they begin with.

    Autograd counts writes to a tensor, but not those of optimizers that update many tensors by one
    fused operation.
    """

    def __init__(self) -> None:
        self._forms: weakref.WeakValueDictionary[int, Form] = weakref.WeakValueDictionary()
        # Whether an optimizer was checked since states were last loaded or parameters made.
        self._are_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._is_registered = False

    def watch(self, form: Form) -> None:
        """Count the steps of optimizers that hold the parameter of ``form``, in ``form.steps``."""
        self._forms[id(form.parameter)] = form
        self._are_checked.update(dict.fromkeys(self._are_checked, False))
        if not self._is_registered:
            self._is_registered = True
            register_optimizer_step_pre_hook(self._check_states)
            register_optimizer_step_pre_hook(self._begin_step)
            register_optimizer_step_post_hook(self._end_step)

    def forms_of(self, params: Iterable[torch.Tensor]) -> list[Form]:
        """Return the sharded forms of those of ``params`` that are sharded."""
        params, form_of = list(params), self._forms.get
        forms = [form_of(id(param)) for param in params]
        return [
            form
            for param, form in zip(params, forms, strict=True)
            if form is not None and form.parameter is param
        ]

    def note_replaced(self, param: torch.Tensor, form: Form) -> None:
        """Note that modules hold the parameter of ``form`` in place of another one."""
        setattr(param, TAKEN, _FormRef(form))

    def form_of(self, param: torch.Tensor) -> Form | None:
        """Return the form that has taken the place of a parameter, if any."""
        ref = getattr(param, TAKEN, None)
        return None if ref is None else ref()

    def _check_states(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Check parameters and states: at the first step, and after what may change them.

        Raises:
            ValueError: the model has another parameter in place of one, or a state is not the part
                of this rank.
        """
        if self._are_checked.get(optimizer):
            return
        if optimizer not in self._are_checked:
            optimizer.register_load_state_dict_post_hook(self._expect_loaded)
        self._are_checked[optimizer] = False
        for form in self._held_by(optimizer):
            form.check_not_lost()
        is_settled = self._check_parameters(optimizer)
        for param, state in optimizer.state.items():
            for form in self.forms_of([param]):
                for key, value in state.items():
                    what = f"optimizer state {key!r} of {form.fqn}"
                    if form.has_moved:
                        _check_moved(what, value, param)
                    check_origin(what, value, param)
        self._are_checked[optimizer] = is_settled

    def _check_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        """Check that an optimizer does not hold what the model had before, and trains nothing.

        Returns:
            Whether it holds nothing of that kind. A program may still be about to use it.

        Raises:
            ValueError: the model has a gradient for another parameter in place of one.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        forms = [(param, form) for param in params if (form := self.form_of(param)) is not None]
        replaced = [(param, form) for param, form in forms if form.parameter is not param]
        held = set(map(id, params))
        for param, form in replaced:
            now = form.parameter
            if param.grad is None and now.grad is not None and id(now) not in held:
                was_sharded = isinstance(param, DTensor)
                by = "load_state_dict(assign=True) or materialize" if was_sharded else "fully_shard"
                raise ValueError(
                    f"step of {type(optimizer).__name__} on rank {dist.get_rank()}: found "
                    f"{form.fqn} as it was before {by}, expected the parameter that the model has "
                    "now. This step would not change the model; make the optimizer after "
                    f"{by}, from model.parameters()"
                )
        return not replaced

    def note_moves(self) -> None:
        """Note that parameters have moved, so states have to have moved, too."""
        self._are_checked.update(dict.fromkeys(self._are_checked, False))

    def _expect_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._are_checked[optimizer] = False

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        forms, has_grads = list(self._held_by(optimizer)), False
        if not forms:
            return None
        for form in forms:
            if dtensor.placed_grad(form.parameter) is not None:  # programs set some, too
                has_grads = True
                form.steps += 1
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if not has_grads and not has_closure:
            _warn_of_no_gradients([form for form in forms if form.parameter.requires_grad])
        return stepping_locally(optimizer, args, kwargs)

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A closure makes gradients, and a step may drop them at its end: both ends count.
        for form in self._held_by(optimizer):
            form.steps += form.parameter.grad is not None
            if form.offload.disk is not None:
                form.offload.let_go(form.local)

    def _held_by(self, optimizer: torch.optim.Optimizer) -> Iterator[Form]:
        for group in optimizer.param_groups:
            yield from self.forms_of(group["params"])


def _warn_of_no_gradients(forms: Sequence[SteppedForm]) -> None:
    """Warn if a step without any gradient of sharded parameters follows a forward of them."""
    awaiting = [
        (form, group) for form in forms for group in form.groups if group.passes.await_backward
    ]
    for _, group in awaiting:
        group.passes.await_backward = False  # it was said
    if awaiting:
        warnings.warn(
            f"{awaiting[0][0].fqn} on rank {dist.get_rank()}: an optimizer steps, and none of the "
            f"{len(forms)} sharded parameters that it has got a gradient from the last forward. "
            "backward(inputs=parameters) and torch.autograd.grad(loss, parameters) leave sharded "
            "parameters out, since forward computes with full ones. Call loss.backward() and read "
            "parameter.grad; freeze what is to get no gradient with requires_grad_(False)",
            stacklevel=4,
        )


def check_origin(what: str, value: Any, like: torch.Tensor) -> None:
    """Check that a loaded value is not the part that another rank has of a tensor.

    A pickled ``DTensor`` keeps its mesh, with the coordinates of the rank that saved it. Torch does
    not compare them, so ranks that all load rank 0's file would go on with rank 0's rows.

    Args:
        what: the value, for messages.
        value: what was loaded. Anything but a ``DTensor`` passes.
        like: the sharded parameter that the value belongs to.

    Raises:
        ValueError: a rank with another part saved it, or a job with another number of ranks.
    """
    if not (isinstance(value, DTensor) and isinstance(like, DTensor)):
        return
    saved, own = value.device_mesh, like.device_mesh
    if saved is own or saved.ndim != own.ndim:
        return
    sharded = [dim for dim, each in enumerate(value.placements) if not each.is_replicate()]
    found, expected = (
        [(mesh.size(dim), (mesh.get_coordinate() or ())[dim:][:1]) for dim in sharded]
        for mesh in (saved, own)
    )
    if found != expected:
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise ValueError(
            f"{what} on rank {rank}: found a shard saved at {saved.get_coordinate()} "
            f"of a mesh of shape {tuple(saved.shape)}, expected the one of {own.get_coordinate()} "
            f"of {tuple(own.shape)}. torch.save writes the shards of one rank; save one file per "
            "rank, or full tensors, or use shardwise.checkpoint, which also loads on other meshes"
        )


def _check_moved(what: str, value: Any, like: torch.Tensor) -> None:
    """Check that a state has moved with its parameter.

    Raises:
        ValueError: it is on another mesh.
    """
    if not (isinstance(value, DTensor) and isinstance(like, DTensor)):
        return
    if value.device_mesh != like.device_mesh:
        raise ValueError(
            f"{what} on rank {dist.get_rank()}: found it on {value.device_mesh}, expected it on "
            f"{like.device_mesh}, where relayout has moved the parameter; pass the optimizer to "
            "relayout, or load a checkpoint into both"
        )

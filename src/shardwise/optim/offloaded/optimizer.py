"""``offload``: an optimizer whose states are on the host or on a disk, except during its step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base import devices
from shardwise.base.arguments import check_arguments
from shardwise.base.errors import OffloadError
from shardwise.base.optim_names import parameters_in_order
from shardwise.base.places import folder_of_place
from shardwise.base.portions import portions
from shardwise.base.states_keeper import StatesKeeper, check_goes_on, keeper_of
from shardwise.optim.around import AroundOptimizer, PartialSteps, needs_closure
from shardwise.optim.forms import OwnStates, taking_states
from shardwise.optim.offloaded.masters import MASTER, Masters
from shardwise.optim.offloaded.states import OffloadedStates, kept_form
from shardwise.optim.offloaded.stores import DiskStore, HostStore, Store
from shardwise.optim.on_shards import OptimizerOnShards
from shardwise.sharding.param import forms_of
from shardwise.sharding.steps import check_origin

#: Elements of this rank's parameters that step together. AdamW has 32 MiB of states for them.
_TOGETHER = 4 * 1024 * 1024
#: Bytes of memory that states pass through.
STAGING = 256 * 1024 * 1024


def offload(
    optimizer: torch.optim.Optimizer,
    to: str,
    *,
    masters: torch.dtype | None = None,
    staging: int = STAGING,
) -> OffloadedOptimizer:
    """Keep the states of an optimizer on the host or on a disk, except during its step.

    The optimizer steps with some parameters at a time. Their states are read ahead into memory, and
    written behind. Parameters and states are bit for bit those of the optimizer alone.

    Pass the result to :func:`~shardwise.optim.in_backward`, to read and write beside the backward:
    ``in_backward(model, lambda params: offload(AdamW(params), "disk:/scratch"))``.

    Args:
        optimizer: any optimizer that can step with some of its parameters at a time, sharded or
            not. It may have states already.
        to: ``"disk:FOLDER"``: a file without a name in a folder of a local disk, which vanishes
            with this process, however it ends. ``"host"``: pinned memory of the host, for
            parameters on an accelerator; states of parameters on the CPU stay where they are.
        masters: a dtype such as ``torch.float32``, for parameters in a narrower one: the optimizer
            updates copies of them in this dtype, which are kept as states are, and parameters are
            these copies, rounded. ``None``: it updates the parameters themselves.
        staging: bytes of memory for states on their way. One parameter may need more.

    Returns:
        The optimizer. Pass it to schedulers, ``shardwise.checkpoint`` and torch's helpers for state
        dicts in place of ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is no optimizer, or one around another.
        ValueError: ``to`` is neither, ``masters`` is no floating-point dtype, there are no
            parameters, or the step of ``optimizer`` needs a closure.
        OffloadError: no file can be made in the folder.

    Sources: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857.
    """
    check_arguments(offload, locals())
    others = AroundOptimizer | OptimizerOnShards
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, others):
        raise TypeError(
            f"offload: found {type(optimizer).__name__}, expected an optimizer with states of its "
            "own; pass what offload returns to in_backward or DiLoCo"
        )
    if not parameters_in_order(optimizer):
        raise ValueError("offload: found an optimizer without parameters")
    if needs_closure(optimizer):
        raise ValueError(
            f"offload: the step of {type(optimizer).__name__} needs a closure, so it cannot be "
            "made with some parameters after others; expected an optimizer whose step does not"
        )
    if masters is not None and not masters.is_floating_point:
        raise ValueError(
            f"offload: found masters={masters!r}, expected a floating-point dtype such as "
            "torch.float32, or None"
        )
    make_store = functools.partial(_store_for, folder_of_place(to))
    return OffloadedOptimizer(optimizer, Masters(masters), make_store, staging)


class OffloadedOptimizer(AroundOptimizer):
    """An optimizer whose states are kept elsewhere, except during its step; see :func:`offload`.

    Between steps, its states are tensors as ever. Those on a disk are mapped: reading one reads the
    file.

    Args:
        inner: the optimizer.
        masters: what it updates in place of parameters.
        make_store: makes what keeps states, for parameters like a given one; ``None`` if they stay
            where they are.
        staging: bytes of memory for states on their way.

    Attributes:
        inner: the optimizer.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        masters: Masters,
        make_store: Callable[[torch.Tensor], Store | None],
        staging: int = STAGING,
    ) -> None:
        self._masters = masters
        self._make_store = make_store
        self._staging = staging
        self._kept: OffloadedStates | None = None
        # What steps after the parameters that begin with this one, as in the step before.
        self._next: dict[torch.Tensor, list[torch.Tensor]] = {}
        self._last: torch.Tensor | None = None
        self._failed: OffloadError | None = None
        super().__init__(inner)
        self._open()

    @property
    def nbytes_kept(self) -> int:
        """Bytes of states of this rank that are kept elsewhere."""
        return 0 if self._kept is None else self._kept.nbytes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step as the inner optimizer does, and bring all states to where they are kept.

        Args:
            closure: computes the loss and its gradients again.

        Returns:
            What ``closure`` returned, or ``None``.

        Raises:
            OffloadError: states could not be read or written, now or in an earlier step.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.step_part()
        self.settle()
        return loss

    @torch.no_grad()
    def step_part(self) -> None:
        """Step with the parameters that :attr:`param_groups` has now. Others may follow.

        States may still be on their way afterwards: :meth:`settle` waits for them.

        Raises:
            OffloadError: states could not be read or written, now or in an earlier step.
        """
        self._check()
        self._open()
        parts = PartialSteps(self.inner, self.inner.step)
        with self._failing():
            # The same on all ranks.
            for params in portions(parameters_in_order(self), _elements, _TOGETHER):
                self._step_chunk(parts, params)
        parts.finish()

    def settle(self) -> None:
        """Wait until all states are where they are kept.

        Raises:
            OffloadError: states could not be written, now or in an earlier step.
        """
        self._check()
        self._last = None
        if self._kept is not None:
            with self._failing():
                self._kept.settle()

    def replace_state(self, value: Any) -> NoReturn:
        """Refused: the states are kept elsewhere.

        Args:
            value: what was assigned to :attr:`state`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: found an assignment of a {type(value).__name__} to its state, "
            "which is kept elsewhere; load it with load_state_dict"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, with masters among the states.

        Returns:
            A dict of tensors, sharded as the parameters are, and plain values. Tensors on a disk
            are mapped, and change when the optimizer steps.

        Raises:
            OffloadError: states could not be written, now or in an earlier step.
        """
        self.settle()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one that the inner optimizer alone has saved.

        Tensors keep the dtypes that they have in ``state_dict``, unless it has masters where this
        optimizer has none, or none where this one has: then tensors that are like parameters get
        the dtype of what this one updates, and masters begin as the parameters are.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: it is of other parameters, or of another optimizer. Nothing has been
                changed.
            OffloadError: it cannot be written.
        """
        self._check()

        def fit(number: int, param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
            fitted = self._fit(param, dict(state))
            for key, value in fitted.items():
                check_goes_on(self.inner, key)
                check_origin(f"optimizer state {key!r} of parameter {number}", value, param)
            if isinstance(self.inner, OwnStates) and not self._masters.has(param):
                self.inner.check_state(number, param, fitted)
            return fitted

        before = self.inner.state
        with taking_states(self.inner, fit) as states:
            self.inner.load_state_dict(state_dict)
        rest, self.inner.state = self.inner.state, before
        for group in self.param_groups:
            for param in group["params"]:
                if param in states:
                    states[param] = {
                        key: _on_device(key, value, param, group)
                        for key, value in states[param].items()
                    }
        self._open()
        if self._kept is None:
            before.clear()
            before.update(states)
        else:
            with self._failing():
                self._kept.replace(states)
                self._kept.settle()
        before.update(rest)

    def states_keeper(self) -> StatesKeeper:
        """Describe its states to checkpoints.

        Returns:
            A keeper like that of the inner optimizer, which knows where states are.
        """
        return replace(
            keeper_of(self.inner),
            nbytes_kept=self.nbytes_kept,
            home_like=self.home_like,
            drop_states=self.drop_states,
        )

    def home_like(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor to read a state into, which :meth:`load_state_dict` is given then.

        So a state that does not fit in memory comes from a checkpoint straight to where it is kept.

        Args:
            value: a tensor of the same shape, dtype and placements. It has no values yet.

        Returns:
            ``value`` itself if such states stay in memory.

        Raises:
            OffloadError: there is no room for it.
        """
        self._check()
        self._open()
        form = kept_form(value)
        if self._kept is None or form is None:
            return value
        with self._failing():
            return self._kept.lend_home(form)

    def drop_states(self) -> None:
        """Drop all states, and free where they are kept."""
        if self._kept is not None:
            self._kept.replace({})
        self.inner.state.clear()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: a copy would need a store of its own.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an optimizer with offloaded states cannot be copied or pickled: make another with "
            "offload(), and load_state_dict() what state_dict() returns"
        )

    def _open(self) -> None:
        """Make what keeps the states, once parameters have memory."""
        param = dtensor.plain(parameters_in_order(self)[0])
        if self._kept is not None or param.is_meta:
            return
        for each in parameters_in_order(self):
            if self.inner.state.get(each):
                self.inner.state[each] = self._fit(each, self.inner.state[each])
        store = self._make_store(param)
        if store is not None:
            self._kept = OffloadedStates(self.inner, store, self._staging)
            self._kept.keep(parameters_in_order(self))
            self._kept.settle()

    def _step_chunk(self, parts: PartialSteps, params: list[torch.Tensor]) -> None:
        stepping = [param for param in params if param.grad is not None]
        if self._last is not None:
            self._next[self._last] = stepping
        self._last = params[0]
        kept, states = self._kept, self.inner.state
        following = self._next.get(params[0], ())
        forms = forms_of(stepping)  # whose parameters may be on a disk, too
        loan = None if kept is None else kept.borrow(stepping)
        try:
            for form in forms:
                form.offload.load(form.local)
            for form in forms_of(following):
                form.offload.read_ahead(form.local)
            if kept is not None:
                kept.read_ahead(following)
            with self._unbroken():
                lent = self._masters.lend(stepping, states)
            try:
                parts.run(params, {param: stand_in for param, (stand_in, _) in lent.items()})
            finally:
                with self._unbroken():
                    self._masters.take_back(lent, states)
        finally:
            if kept is not None:
                with self._unbroken():
                    if loan is not None:
                        kept.give_back(loan)
                    kept.keep(stepping)
            for form in forms:
                form.offload.let_go(form.local)

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Note it if states are left half moved, as by Ctrl-C, so that training does not go on."""
        try:
            yield
        except OffloadError:
            raise
        except BaseException as error:
            with contextlib.suppress(OffloadError):
                self._fail(OffloadError(f"offload: {type(error).__name__} while states moved"))
            raise

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Raise the error of a store as that of this optimizer, now and from now on."""
        try:
            yield
        except OffloadError as error:
            self._fail(error)

    def _check(self) -> None:
        if self._failed is not None:
            raise OffloadError(str(self._failed)) from self._failed

    def _fail(self, error: OffloadError) -> NoReturn:
        rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
        self._failed = OffloadError(
            f"{rank}{error}. Optimizer states are lost, and parameters may have stepped in part: "
            "make room or take another folder, and go on from the last checkpoint with a new "
            "optimizer"
        )
        raise self._failed from error

    def _fit(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of other masters, or of none, as it is with those of this optimizer."""
        if not isinstance(self.inner, OwnStates):
            return self._masters.fit(param, state)
        # Its states have dtypes of their own, whatever that of parameters is.
        if MASTER in state and not self._masters.has(param):
            return {key: value for key, value in state.items() if key != MASTER}
        return state


def _store_for(folder: Path | None, param: torch.Tensor) -> Store | None:
    if folder is not None:
        return DiskStore(folder, param.device)
    return None if param.device.type == devices.CPU.type else HostStore(param.device)


def _on_device(key: str, value: Any, param: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Move what stays in memory to the device where torch's optimizers expect it."""
    if not isinstance(value, torch.Tensor) or kept_form(value) is not None:
        return value
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value
    return value.to(dtensor.plain(param).device)


def _elements(param: torch.Tensor) -> int:
    """Elements of a parameter on a rank, rounded up, so that all ranks count alike."""
    if not isinstance(param, DTensor):
        return param.numel()
    pieces = math.prod(
        size
        for size, placement in zip(param.device_mesh.shape, param.placements, strict=True)
        if dtensor.sharded_dim(placement) is not None
    )
    return -(-param.numel() // pieces)

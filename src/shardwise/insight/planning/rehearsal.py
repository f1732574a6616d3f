"""A rehearsal: the runtime runs one step of one rank on tensors without values.

Nothing here computes what a step needs. The model is sharded as in a training and runs forward,
backward and optimizer, on fake tensors and in a fake world. What it allocates, computes and sends
is written down, so that a plan cannot differ from what the runtime does.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import traceback
from collections import deque
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from shardwise._torch import c10d, dtensor, fake
from shardwise.base import devices
from shardwise.base.errors import UserError
from shardwise.base.observe import Activity, Memory, observing
from shardwise.base.places import folder_of_place
from shardwise.base.scratch import file
from shardwise.diloco.average import sent_nbytes
from shardwise.diloco.fragment import Fragment
from shardwise.frontends.strategies import TENSOR, Runtime
from shardwise.frontends.torch_groups import observed
from shardwise.insight.blueprint import Blueprint, apply_tensor_parallelism
from shardwise.insight.planning.activations import Activations
from shardwise.insight.planning.events import Log, StepPhase
from shardwise.insight.planning.recorder import RehearsalRecorder
from shardwise.insight.planning.settings import (
    RehearsalError,
    Settings,
    SettingsError,
    UntraceableError,
)
from shardwise.insight.planning.wires import TorchCollectives, simulated
from shardwise.insight.program import Program, TrainingStep
from shardwise.insight.schema.sharding import Stepping
from shardwise.insight.schema.training import Logits
from shardwise.insight.token_loss import TokenLoss
from shardwise.optim.lion import Lion
from shardwise.optim.offloaded.masters import Masters
from shardwise.optim.offloaded.optimizer import OffloadedOptimizer
from shardwise.optim.offloaded.stores import PlannedStore
from shardwise.sharding.allocate import allocate
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.state import groups_of
from shardwise.sharding.tree import every_tensor_in, map_tensors
from shardwise.transport.peers import Peers
from shardwise.transport.shm.transport import ShmTransport

USUAL_IMAGE = 224  # pixels of an image's height and width, unless they are given


def rehearse(blueprint: Blueprint, settings: Settings, rank: int = 0) -> Log:
    """Run one step of one rank in its steady state, without values, and return what happened.

    Args:
        blueprint: the model, on any device. It is only read.
        settings: mesh, strategy, batch, dtypes, optimizer.
        rank: which rank of ``settings.world``.

    Raises:
        RuntimeError: this process is part of a world.
        RehearsalError: the model cannot be copied or sharded, or it or the user's code raises.
        SettingsError: no way to make a batch is given, or what is made is no loss.
        UntraceableError: a module computes with values.
        UserError: a pattern of ``--param-group`` does not fit the model.
    """
    world = settings.world
    with contextlib.ExitStack() as stack:
        # Whatever the caller has switched off or on, a training does not run in it.
        stack.callback(random.setstate, random.getstate())  # torch numbers collectives with it
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(c10d.fake_world(world.size, rank))
        mesh = init_device_mesh("cpu", world.shape, mesh_dim_names=world.names)
        dimensions: dict[str, tuple[str, int]] = {}
        for name, size in zip(world.names, world.shape, strict=True):
            group = mesh.get_group(name)
            Peers(group).name_dimension(name)  # the data mesh names only its own
            dimensions[group.group_name] = name, size
        with _explaining("copying the model"):
            program = program_of(blueprint.copied(), settings)
            model = program.model
            activations = Activations(settings)
            program.prepare(activations.policy)
            model.train()
        kind = settings.device_type
        named = settings.backend or dist.get_default_backend_for_device(kind)
        backend = devices.backend_of(named, torch.device(kind))
        stack.enter_context(simulated(backend, ranks_per_host=settings.on_host))
        if "transformers" in sys.modules:  # else the model is none of its
            from shardwise.pretrained import hf

            stack.enter_context(hf.fake_as_real())
        mode = stack.enter_context(fake.FakeTensorMode(allow_non_fake_inputs=True))
        with _explaining("sharding the model"):
            _shard(program, settings, mesh)
        with _explaining("making the optimizer"):
            optimizer = _Optimizer(settings, program)
        name = type(blueprint.model).__name__  # sharding gives the copy a class of its own
        with _explaining("making a batch"):
            count = settings.accumulate
            adopted = functools.partial(fake.adopt, mode)
            batches = [
                map_tensors(adopted, make_batch(settings, model, name)) for _ in range(count)
            ]
        recorder = activations.recorder = RehearsalRecorder(mode, dimensions)
        with recorder, recorder.watching(model, _ends(model)), observing(recorder):
            stack.enter_context(observed(model, TorchCollectives(backend)))
            around = functools.partial(_around, recorder, settings, model)
            step = TrainingStep(program=program, optimizer=optimizer, around=around)
            elsewhere = _offloaded_parameters(settings, model)
            for number in range(_most_steps(model)):
                _label(recorder, model, optimizer, batches, elsewhere)
                before = recorder.record()
                _take(recorder, step, batches)
                if number > 0 and recorder.nbytes == before:
                    break
            events = recorder.finish()
    return Log(
        rank=rank,
        before=recorder.before,
        events=events,
        tokens=settings.batch_size * settings.accumulate * (settings.seq_length or 1),
        flops=recorder.model_flops,
        formulas=recorder.formulas,
        exchanged=optimizer.exchanged,
        offloaded=optimizer.offloaded
        + sum(dtensor.plain(each).nbytes for each in elsewhere)
        + activations.most,
    )


@contextlib.contextmanager
def _explaining(what: str, model: nn.Module | None = None) -> Iterator[None]:
    """Say what was being done, and in which module, when an error is raised."""
    try:
        yield
    except (RehearsalError, SettingsError, UntraceableError, UserError):
        raise
    except Exception as error:
        where = "" if model is None else _raised_in(error, model)
        raise RehearsalError(f"{what} of module {where}" if where else what, error) from error


def _raised_in(error: Exception, model: nn.Module) -> str:
    """The name of the innermost module in whose code an error was raised."""
    names, found = {module: name for name, module in model.named_modules()}, ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            found = names.get(module, found)
    return found


def program_of(blueprint: Blueprint, settings: Settings) -> Program:
    """Return what a training with these settings computes."""
    return Program(
        blueprint=blueprint,
        config=settings,
        plan=settings.sharding,
        loss=functools.partial(compute_loss, settings),
        optimizer=settings.optimizer,
        stepping=settings.stepping,
        max_norm=settings.max_norm,
        gathers=settings.gathers,
        after_step=settings.after_step,
        runtime=settings.runtime,
    )


def _shard(program: Program, settings: Settings, mesh: DeviceMesh) -> None:
    """Shard a model as a training does; what is on the meta device gets memory on the host."""
    model = program.model
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    names = [name for name, _ in tensors]
    if TENSOR not in settings.world.names:
        allocate(model, names)
        program.shard(mesh)
        return
    # Meshes of several dimensions read their ranks from tensors, which fake ones do not have. So
    # all is done on the meta device, except that transports get fake memory from the start.
    with dtensor.real_tensors():
        data = mesh[settings.sharding.names]
        apply_tensor_parallelism(model, mesh[TENSOR], program.blueprint.tensor_parallel)
    transports = None
    if settings.runtime is Runtime.SHARDWISE:
        among, asked = program.plan.sharding_mesh(data), settings.transport_argument
        transports = DataMesh.of(among, asked, wires=settings.collective_wire)
    with dtensor.real_tensors():
        program.shard(data)
    del transports  # the groups hold them now
    allocate(model, names)


def _ends(model: nn.Module) -> frozenset[str]:
    """The names of the modules that compute logits or the loss: the model itself, and its head."""
    find = getattr(model, "get_output_embeddings", None)
    ends = (model, find() if callable(find) else None)
    return frozenset(name for name, module in model.named_modules() if module in ends)


class _Optimizer:
    """The optimizer of a rehearsal: that of a training, and what DiLoCo keeps beside it.

    Torch's and Lion work on the local shards as such: the same operations as on ``DTensor``s,
    without the seconds that these take to find out placements. A function of the user gets the
    parameters as they are, and so do our other optimizers: their states depend on placements, and
    ranks may share their work. What steps in backward keeps them as well: :func:`.in_backward`
    looks for them in the model.
    """

    def __init__(self, settings: Settings, program: Program) -> None:
        self._settings = settings
        self._model = model = program.model
        self._shards: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._kept: OffloadedOptimizer | None = None
        self._made = program.make_optimizer(self._offload)
        if self._made is None and settings.stepping is Stepping.IN_BACKWARD:
            expected = "after-backward, or an optimizer and trained parameters"
            raise SettingsError("stepping", "in-backward without an optimizer", expected)
        if self._made is not None and self._kept is None:
            self._take_shards(self._made)
        self.exchanged = 0
        self._outer: list[torch.Tensor] = []
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if (diloco := settings.diloco) is not None and trained:
            kept = Fragment("all", trained, error_feedback=diloco.keeps_errors)
            tensors = (kept.outer, kept.momentum, kept.error)
            self._outer = [each for each in tensors if each is not None]
            replicas = settings.sharding.shape[0]
            self.exchanged = sent_nbytes(diloco.wire, kept.sections, replicas)

    def _offload(
        self, optimizer: torch.optim.Optimizer, to: str, masters: torch.dtype | None
    ) -> OffloadedOptimizer:
        """Keep states elsewhere, as :func:`shardwise.optim.offload` does, but nowhere."""
        self._take_shards(optimizer)
        stays = folder_of_place(to) is None and self._settings.device_type == devices.CPU.type
        store = None if stays else PlannedStore()
        self._kept = OffloadedOptimizer(optimizer, Masters(masters), lambda _: store)
        return self._kept

    def _take_shards(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer step with the local shards, if that is the same."""
        early, given = self._settings.stepping, self._settings.optimizer
        ours = not isinstance(optimizer, _BY_ELEMENT)
        if early is Stepping.IN_BACKWARD or callable(given) or ours:
            return
        for group in optimizer.param_groups:
            shards = [nn.Parameter(dtensor.plain(p.detach())) for p in group["params"]]
            for parameter, shard in zip(group["params"], shards, strict=True):
                self._shards.append((parameter, shard))
                if parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    optimizer.state[shard] = map_tensors(dtensor.plain, state)
            group["params"] = shards

    def step(self) -> None:
        """Update the shards."""
        for parameter, shard in self._shards:
            grad = parameter.grad
            shard.grad = None if grad is None else dtensor.plain(grad)
        if self._made is not None:
            self._made.step()
        for _, shard in self._shards:
            shard.grad = None

    def zero_grad(self) -> None:
        """Drop the gradients of the model."""
        if self._made is not None:
            self._made.zero_grad()
        self._model.zero_grad()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm that backward has computed, if groups step there."""
        return getattr(self._made, "grad_norm", None)

    def states(self) -> list[torch.Tensor]:
        """The local tensors of all states, those of DiLoCo among them."""
        every = [] if self._made is None else self._made.state.values()
        found = [dtensor.plain(each) for each in every_tensor_in(list(every))]
        # Homes of states that are kept elsewhere are on the meta device.
        return [*self._outer, *(each for each in found if not each.is_meta)]

    @property
    def offloaded(self) -> int:
        """Bytes of states that are kept elsewhere."""
        return 0 if self._kept is None else self._kept.nbytes_kept


#: Optimizers that do the same on local shards as on ``DTensor``s.
_BY_ELEMENT = (
    *(torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad),
    Lion,
)


def make_batch(settings: Settings, model: nn.Module, name: str) -> Any:
    """Make one microbatch for a model whose class has this name, of random tokens or pixels."""
    size = settings.batch_size
    if callable(settings.batch):
        return settings.batch(size)
    config: Any = getattr(model, "config", None)
    takes = getattr(model, "main_input_name", None)
    if takes == "pixel_values":
        side: Any = settings.image_size or getattr(config, "image_size", USUAL_IMAGE)
        height, width = (side, side) if isinstance(side, int) else side
        pixels = torch.randn(size, getattr(config, "num_channels", 3), height, width)
        return {
            "pixel_values": pixels,
            "labels": torch.randint(getattr(config, "num_labels", 1), (size,)),
        }
    if takes != "input_ids":
        found = f"none, for a {name}, which takes neither tokens nor images"
        raise SettingsError("batch", found, "a function from a number of samples to a batch")
    words = getattr(config, "vocab_size", 1)  # what has several models in it may not say
    tokens = torch.randint(words, (size, settings.seq_length or 1))
    return {"input_ids": tokens, "labels": tokens}


def compute_loss(settings: Settings, model: nn.Module, batch: Any) -> torch.Tensor:
    """Compute the loss of a model on a batch, as settings or the model say.

    Raises:
        SettingsError: it is no loss.
    """
    if callable(settings.step):
        return _checked(settings.step(model, batch))
    if settings.logits is not Logits.WHOLE and _is_of_tokens(model, batch):
        inputs = dict(batch)
        targets = F.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
        return TokenLoss(settings.logits)(model, targets, **inputs)
    if isinstance(batch, dict):
        out = model(**batch)
    elif isinstance(batch, list | tuple):
        out = model(*batch)
    else:
        out = model(batch)
    loss = getattr(out, "loss", None)
    if loss is None:
        made = every_tensor_in(getattr(out, "logits", out))
        loss = next((each.float().mean() for each in made if each.requires_grad), None)
    return _checked(loss)


def _is_of_tokens(model: nn.Module, batch: Any) -> bool:
    """Whether a batch has targets for the logits of a language model."""
    return isinstance(batch, dict) and "labels" in batch and len(_ends(model)) > 1


def _checked(loss: object) -> torch.Tensor:
    expected = "a loss: a tensor of one element, computed from trained parameters"
    if not isinstance(loss, torch.Tensor):
        raise SettingsError("step", "no tensor" if loss is None else type(loss).__name__, expected)
    if loss.numel() != 1 or not loss.requires_grad:
        kind = "trained" if loss.requires_grad else "that nothing trained went into"
        raise SettingsError("step", f"a tensor {tuple(loss.shape)} {kind}", expected)
    return loss


@contextlib.contextmanager
def _around(
    recorder: RehearsalRecorder, settings: Settings, model: nn.Module, activity: Activity
) -> Iterator[None]:
    """Tell the recorder where a step is."""
    parallel = TENSOR in settings.world.names
    with loss_parallel() if parallel else contextlib.nullcontext():
        recorder.enter(_PHASES[activity])
        with _explaining(activity.value, model):
            yield


_PHASES = {Activity.FORWARD: StepPhase.FORWARD, Activity.BACKWARD: StepPhase.BACKWARD}


def _take(recorder: RehearsalRecorder, step: TrainingStep, batches: Sequence[Any]) -> None:
    """Take one optimizer step."""
    count = len(batches)
    deque(step.backward(batches, count, count), maxlen=0)  # which keeps no loss
    for name, parameter in step.program.model.named_parameters():
        if parameter.grad is not None:
            recorder.label(dtensor.plain(parameter.grad), Memory.GRADIENTS, name)
    recorder.enter(StepPhase.OPTIMIZER)
    step.norm()
    with _explaining("a step of the optimizer"):
        step.update()


def _most_steps(model: nn.Module) -> int:
    """The steps after which transports keep as much memory as they will, at the latest.

    The first makes the states, of parameters that get gradients. Messages have scratch memory from
    then on. Groups take turns in shared memory, and which one gets which piece may settle only
    after some steps. What tensor parallelism gathers for the first time on the meta device is not
    noted.
    """
    meshes = [group.mesh for group in groups_of(model)]
    names = {
        transport.name
        for mesh in meshes
        for transport in (mesh.shard, mesh.scatter, mesh.replicate)
        if transport is not None
    }
    return 5 if ShmTransport.name in names else 2


def _label(
    recorder: RehearsalRecorder,
    model: nn.Module,
    optimizer: _Optimizer,
    batches: Sequence[Any],
    elsewhere: Container[nn.Parameter],
) -> None:
    """Say what the memory is for that is there before the step; parameters elsewhere have none."""
    for name, parameter in model.named_parameters():
        if parameter not in elsewhere:
            recorder.label(dtensor.plain(parameter), Memory.PARAMETERS, name)
    for name, buffer in model.named_buffers():
        recorder.label(dtensor.plain(buffer), Memory.OTHER, name)
    for state in optimizer.states():
        recorder.label(state, Memory.OPTIMIZER, "")
    for tensor in every_tensor_in(batches):
        recorder.label(tensor, Memory.OTHER, "batch")


def _offloaded_parameters(settings: Settings, model: nn.Module) -> frozenset[nn.Parameter]:
    """The parameters whose shards are kept elsewhere.

    Raises:
        SettingsError: gradients and states would be, too, which no plan counts.
    """
    if settings.offload_parameters is None:
        return frozenset()
    if settings.device_type != devices.CPU.type:
        expected = "None for an accelerator: plans do not count the memory of its host"
        raise SettingsError("offload_parameters", settings.offload_parameters, expected)
    if folder_of_place(settings.offload_parameters) is None:
        return frozenset()
    every = {p for p in model.parameters() if dtensor.plain(p).nbytes >= file.SMALLEST}
    return frozenset(every)

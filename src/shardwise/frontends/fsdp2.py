"""``fully_shard``, a drop-in for torch's FSDP2: the parameters it takes, and what they become."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedParameter

from shardwise._torch import dtensor, fsdp
from shardwise._torch.fsdp import DataParallelMeshDims, ParamOwner, ShardPlacementResult
from shardwise.base.arguments import check_arguments
from shardwise.base.errors import MisuseError
from shardwise.base.offload import Offload
from shardwise.frontends import device_mesh
from shardwise.frontends.module import FSDPModule, fsdp_class_of
from shardwise.sharding import hooks, user_calls
from shardwise.sharding.additions import note_parameters
from shardwise.sharding.full_params import PostForwardShards
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.mesh import DataMesh, mark_separate
from shardwise.sharding.param import ShardedParam, form_of
from shardwise.sharding.placement import Place, can_shard
from shardwise.sharding.policy import Precision
from shardwise.sharding.state import FSDPState, state_of
from shardwise.sharding.states import GroupOrder
from shardwise.sharding.steps import check_origin
from shardwise.transport.wire import Wire, Wires

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]
_Modules = TypeVar("_Modules", bound=Sequence[nn.Module])

_NO_MIXED_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


class ShardOptions(TypedDict, total=False):
    """The arguments of :func:`fully_shard`."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: ShardPlacementFn | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    transport: str | None
    wire: Wire | Mapping[str, Wire] | None
    separate_dims: Collection[str]
    order: Literal["same", "own"]


@overload
def fully_shard(module: nn.Module, **options: Unpack[ShardOptions]) -> FSDPModule: ...
@overload
def fully_shard(module: _Modules, **options: Unpack[ShardOptions]) -> _Modules: ...
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _NO_MIXED_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    transport: str | None = None,
    wire: Wire | Mapping[str, Wire] | None = None,
    separate_dims: Collection[str] = (),
    order: Literal["same", "own"] = "same",
) -> Any:
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place.

    Same API as ``torch.distributed.fsdp.fully_shard``. The parameters that no earlier call on a
    submodule has taken become one *group*. They are gathered together before the module's forward
    and backward and freed after each, and their gradients are reduced together. So call it
    bottom-up: on every block, then on the model. Between steps, every parameter is a ``DTensor``
    under its old name, and this rank holds its rows. Make the optimizer after the last call.

    Args:
        module: the module, or several modules that form one group.
        mesh: a 1-D mesh to shard over, or a 2-D mesh to replicate over the first dimension and
            shard over the second. The default is a 1-D mesh over all ranks.
        reshard_after_forward: free the parameters between forward and backward (``True``, ZeRO-3),
            keep them (``False``, ZeRO-2), or keep them sharded over every ``k`` consecutive ranks
            (an ``int``, a factor of the number of sharding ranks). The default is ``True``, except
            for the root, whose parameters backward needs first.
        shard_placement_fn: called with every parameter. It may return ``Shard(dim)`` to cut it
            along another dimension than 0 (sizes may be uneven), or torch's
            ``ShardPlacementResult`` to shard it over another mesh. The parameters of one mesh form
            a group.
        mp_policy: the dtypes to compute in, to reduce in, and of outputs. Its
            ``param_dtype_override_fn``, which torch has from 2.15 on, chooses for one parameter.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and thus the optimizer state
            on the host. On a CPU mesh, they are there anyway. ``DiskOffloadPolicy("FOLDER")`` keeps
            shards in a file on a local disk.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: the data parallel dimensions of ``mesh``, if it has other dimensions, too
            (tensor parallel ones, say). All parameters have to be ``DTensor``s on ``mesh``.
        transport: what moves the bytes: ``"auto"``, ``"shm"``, ``"c10d"`` or ``"collectives"``. The
            default is the environment variable ``SHARDWISE_TRANSPORT``, else ``"auto"``.
        wire: the formats in which parameters and gradients are sent where a dimension of the mesh
            leaves the host: one :class:`~shardwise.Wire` for all dimensions, or a mapping from
            their names. By default, nothing is encoded.
        separate_dims: the names of dimensions that ``mesh`` was sliced without on purpose: each
            rank along them trains a model of its own, or you average it yourself.
        order: on the root, whether all ranks run the same modules in each step (``"same"``), or
            each may run its own (``"own"``); see :meth:`FSDPModule.skip_step`.

    Returns:
        ``module``, now an :class:`~shardwise.FSDPModule`.

    Raises:
        ValueError: a module has no forward of its own or is sharded already; the mesh does not fit
            the ranks, the devices or the tensor parallelism of a parameter; or an argument is out
            of range.
        TypeError: an argument has the wrong type.
        NotImplementedError: an integer ``reshard_after_forward`` with ``DTensor`` parameters, or a
            wire that would encode what a tensor subclass sends.
        OffloadError: the disk of a ``DiskOffloadPolicy`` is full, or has no such folder.

    If the call raises, no module was changed.
    """
    # Check everything first, then make the new objects, then change the modules.
    check_arguments(fully_shard, locals())
    several = isinstance(module, Iterable) and not isinstance(module, nn.Module)
    tops = _check_modules(tuple(module) if several else (module,))
    if order not in ("same", "own"):
        raise ValueError(f"order: expected 'same' or 'own', found {order!r}")
    classes = ", ".join(type(top).__name__ for top in tops)
    what = f"fully_shard({classes})"
    mesh = device_mesh.default_mesh() if mesh is None else mesh
    device_mesh.check(mesh, dp_mesh_dims, what)
    data_mesh = DataMesh.of(mesh, transport, dp_mesh_dims, what, Wires.of(wire))
    mark_separate(data_mesh.mesh, separate_dims)
    sizes = {data_mesh: _check_reshard_after_forward(reshard_after_forward, data_mesh)}
    managed = managed_modules(tops)
    found = parameters_of(managed, ignored_params or set())
    places = _find_places(found, shard_placement_fn, data_mesh)
    for param, (fqn, _) in found.items():
        its_mesh = places[param].mesh
        if its_mesh not in sizes:
            sizes[its_mesh] = _check_reshard_after_forward(reshard_after_forward, its_mesh, fqn)
        if not isinstance(sizes[its_mesh], bool):
            _check_can_shard_post_forward(param, fqn)
    precision = Precision.of(mp_policy)
    precisions = {
        param: precision.for_parameter(mp_policy, param, fqn) for param, (fqn, _) in found.items()
    }
    used = {places[param].mesh: None for param in found}
    smaller = {
        its_mesh: its_mesh.of_groups_of(sizes[its_mesh])
        for its_mesh in used
        if not isinstance(sizes[its_mesh], bool)
    }

    move_to_device(found, managed, data_mesh.device)
    offload = Offload.of(offload_policy, data_mesh.device)
    forms = {
        param: form_of(param) or ShardedParam(param, fqn, places[param], offload)
        for param, (fqn, _) in found.items()
    }

    def group_over(its_mesh: DataMesh) -> ParamGroup:
        params = [
            GroupParam(forms[param], owners, precisions[param])
            for param, (_, owners) in found.items()
            if places[param].mesh == its_mesh
        ]
        return ParamGroup(
            params,
            tops,
            its_mesh,
            precision,
            offload,
            bool(sizes[its_mesh]),
            PostForwardShards(params, smaller[its_mesh]) if its_mesh in smaller else None,
        )

    groups = [group_over(its_mesh) for its_mesh in used]
    for param, (fqn, owners) in found.items():
        forms[param].take_place_of(param)  # which other modules may still hold
        note_group(owners, fqn, classes)
    for group in groups:
        group.install()
    device = data_mesh.device
    state = FSDPState(tops, groups, device, mp_policy, reshard_after_forward, GroupOrder(order))
    hooks.install(state)
    _keep_state_dicts_sharded(groups)
    for top in tops:
        top.register_load_state_dict_post_hook(_warn_of_untied)  # type: ignore[no-untyped-call]
    _become_managed(tops, managed)
    note_parameters(managed)
    return module


def _check_modules(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Check that ``modules`` can be sharded, and return the outermost ones."""
    if not modules:
        raise ValueError("fully_shard: expected a module or a list of modules, found an empty list")
    if wrong := [each for each in modules if not isinstance(each, nn.Module)]:
        raise TypeError(f"fully_shard: expected an nn.Module, found {wrong[0]!r:.80}")
    tops = outermost(modules)
    # A container beside other modules is fine: its parameters are gathered when those run.
    if all(
        isinstance(top, nn.ModuleList | nn.ModuleDict) and type(top).forward is nn.Module.forward
        for top in tops
    ):
        raise ValueError(
            f"fully_shard: a {type(tops[0]).__name__} has no forward of its own that could gather "
            "its parameters; apply fully_shard to the modules in it, or to the module that "
            "contains it"
        )
    for top in tops:
        if state_of(top) is not None:
            raise MisuseError(
                f"fully_shard has already been applied to this {type(top).__name__}; apply it once"
            )
        if isinstance(top, torch.jit.ScriptModule):
            raise _scripted(top, "")
        fsdp.check_composable(top, "fully_shard")
        fsdp_class_of(type(top))
    return tops


def _check_reshard_after_forward(
    value: bool | int | None, mesh: DataMesh, fqn: str = ""
) -> bool | int:
    """Check ``reshard_after_forward`` for ``mesh``, and simplify it.

    Args:
        value: what the user passed.
        mesh: the ranks to shard over.
        fqn: the parameter that has ``mesh`` to itself, if it is not the mesh of the call.
    """
    if value is None or isinstance(value, bool):
        return value is not False
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward: expected a bool, an int or None, found "
            f"{type(value).__name__} {value!r}"
        )
    shard_size = mesh.shard.world_size
    if value < 1 or shard_size % value != 0:
        what = f"{fqn}, which shard_placement_fn gave another mesh, is" if fqn else "parameters are"
        raise ValueError(
            f"reshard_after_forward: expected a factor of the {shard_size} ranks that {what} "
            f"sharded over, found {value}"
        )
    if value == shard_size:
        return True
    if value == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps full parameters between forward and backward, as False "
            "does; pass True to free them",
            stacklevel=3,
        )
        return False
    return value


def _find_places(
    found: dict[nn.Parameter, tuple[str, list[ParamOwner]]],
    fn: ShardPlacementFn | None,
    mesh: DataMesh,
) -> dict[nn.Parameter, Place]:
    """Choose the place of every parameter, by ``fn`` if there is one, and check it."""
    places: dict[nn.Parameter, Place] = {}
    meshes: dict[int, DataMesh] = {}
    for param, (fqn, owners) in found.items():
        _check_parameter(param, fqn, owners)
        wanted = fn(param) if fn is not None else None
        its_mesh = mesh
        if isinstance(wanted, ShardPlacementResult):
            info, wanted = wanted.mesh_info, wanted.placement
            # One for every object: the parameters of one mesh form a group.
            if id(info) not in meshes:
                device_mesh.check(info.mesh, None, "fully_shard")
                meshes[id(info)] = DataMesh.of(info.mesh, mesh.requested, wires=mesh.wires)
            its_mesh = meshes[id(info)]
        if its_mesh.outer is None:
            device_mesh.check_beside(param, fqn, its_mesh.mesh)
        if wanted is not None:
            _check_wanted(wanted, param, fqn, its_mesh)
        form = form_of(param)
        if form is not None and form.mesh.mesh != its_mesh.mesh:
            raise ValueError(
                f"{fqn} is tied to {form.fqn}, which is sharded over {form.mesh.mesh}, found "
                f"{its_mesh.mesh}; shard both over the same mesh"
            )
        places[param] = Place.of(param, fqn, its_mesh, wanted)
        _check_wire(param, fqn, its_mesh)
    return places


def _check_wire(param: nn.Parameter, fqn: str, mesh: DataMesh) -> None:
    """Check that no wire encodes what a tensor subclass has chosen to send."""
    gathers = mesh.shard.wire.gather != "fp32"
    local = dtensor.plain(param)
    if gathers and fsdp.has_extension(local):
        raise NotImplementedError(
            f"{fqn} on rank {dist.get_rank()}: found a {type(local).__name__}, whose "
            "fsdp_pre_all_gather decides what is sent, beside a wire that encodes parameters; "
            "shard its module with wire=Wire(gather='fp32', ...)"
        )


def _scripted(module: nn.Module, where: str) -> MisuseError:
    return MisuseError(
        f"{where}fully_shard: found a {type(module).__name__}, compiled by torch.jit, which allows "
        "no hooks; expected a Python module. Shard the module that it was made from, or use "
        "torch.compile"
    )


def _check_parameter(param: nn.Parameter, fqn: str, owners: list[ParamOwner]) -> None:
    for owner in owners:
        if fsdp.is_scripted(owner.module):
            raise _scripted(owner.module, f"{fqn} on rank {dist.get_rank()}: ")
    if isinstance(param, UninitializedParameter):
        raise MisuseError(
            f"{fqn} on rank {dist.get_rank()}: found a parameter of a lazy module, which has no "
            "shape yet; run one forward of the model before fully_shard"
        )
    if param.grad_dtype != param.dtype:
        raise NotImplementedError(
            f"{fqn} on rank {dist.get_rank()}: found a parameter of {param.dtype} with grad_dtype "
            f"{param.grad_dtype}; expected gradients in its own dtype. Use "
            "MixedPrecisionPolicy(reduce_dtype=...) for the dtype to accumulate and reduce in"
        )
    local = dtensor.plain(param)
    if hasattr(local, "fsdp_pre_all_gather") != hasattr(local, "fsdp_post_all_gather"):
        raise MisuseError(
            f"{fqn}: {type(local).__name__} has only one of fsdp_pre_all_gather and "
            "fsdp_post_all_gather; define both"
        )


def _check_can_shard_post_forward(param: nn.Parameter, fqn: str) -> None:
    """Check that an integer ``reshard_after_forward`` is possible for a parameter.

    Raises:
        NotImplementedError: it is a ``DTensor`` made by tensor parallelism, or a tensor subclass
            with an all-gather of its own.
    """
    if isinstance(param, DTensor):
        found = f"a DTensor with placements {param.placements}"
    elif fsdp.has_extension(param):
        found = f"a {type(param).__name__} with fsdp_pre_all_gather"
    else:
        return
    raise NotImplementedError(
        f"{fqn} on rank {dist.get_rank()}: an integer reshard_after_forward is not available for "
        f"DTensor parameters and for tensor subclasses with fsdp_pre_all_gather, found {found}; "
        "pass True or False"
    )


def _check_wanted(wanted: Shard, param: nn.Parameter, fqn: str, mesh: DataMesh) -> None:
    """Check what ``shard_placement_fn`` returned for a parameter."""
    if not isinstance(wanted, Shard):
        raise ValueError(
            f"shard_placement_fn returned {wanted!r} for {fqn}; expected Shard(dim), a "
            "ShardPlacementResult or None"
        )
    if not -param.ndim <= wanted.dim < max(param.ndim, 1):
        raise MisuseError(
            f"shard_placement_fn returned {wanted} for {fqn} of shape {tuple(param.shape)}; "
            f"expected a dimension from {-param.ndim} to {param.ndim - 1}"
        )
    if param.ndim and not can_shard(param, mesh, wanted.dim % param.ndim):
        raise MisuseError(
            f"shard_placement_fn returned {wanted!r} for {fqn} on rank {dist.get_rank()}: "
            f"tensor parallelism cut it unevenly, shape {tuple(param.shape)} with placements "
            f"{dtensor.spec_of(param).placements}, so no placement can say which of the "
            f"{mesh.shard.world_size} ranks holds which rows; expected another dimension, "
            "or None to let fully_shard choose one"
        )


def _keep_state_dicts_sharded(groups: list[ParamGroup]) -> None:
    """Register hooks so that state dicts are made from, and loaded into, the sharded form."""
    for group in groups:
        before_save = functools.partial(user_calls.before_state_dict, group)
        before_load = functools.partial(user_calls.before_load, group)
        after_load = functools.partial(user_calls.after_load, group)
        for module in {owner.module for param in group.params for owner in param.owners}:
            module.register_state_dict_pre_hook(before_save)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(before_load)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_keep_out_other_parts)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(after_load)  # type: ignore[no-untyped-call]


def _warn_of_untied(module: nn.Module, result: object) -> None:
    from shardwise.frontends.untied import warn_of_untied

    warn_of_untied(module, result)


def _keep_out_other_parts(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Refuse to load the parts of other ranks; a hook. Parameters stay as they are."""
    for name, param in module.named_parameters(recurse=False):
        key = prefix + name
        try:
            check_origin(key, state_dict.get(key), param)
        except ValueError as error:
            errors.append(str(error))
            state_dict[key] = param.detach()


def _become_managed(tops: tuple[nn.Module, ...], managed: Iterable[nn.Module]) -> None:
    """Mark the modules as sharded, by their class and by attributes that torch looks for."""
    for each in managed:
        fsdp.mark_managed(each)
    for top in tops:
        fsdp.mark_composable(top, "fully_shard")
        top.__class__ = fsdp_class_of(type(top))


fully_shard.state = state_of  # type: ignore[attr-defined]


_GROUPS = "_shardwise_groups"


def outermost(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """``modules`` without those inside another of them, in order, each once."""
    unique = list(dict.fromkeys(modules))
    inside = {child for module in unique for child in module.modules() if child is not module}
    return tuple(module for module in unique if module not in inside)


def managed_modules(tops: tuple[nn.Module, ...]) -> dict[nn.Module, str]:
    """The modules in ``tops`` that no nested call has taken, and their names relative to a top."""
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, name: str) -> None:
        nested = module not in tops and state_of(module) is not None
        if module in found or nested or fsdp.is_replicated(module):
            return
        found[module] = name
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    for top in tops:
        visit(top, "")
    return found


def parameters_of(
    managed: dict[nn.Module, str], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, tuple[str, list[ParamOwner]]]:
    """Every parameter to shard, with its name and all its owners, in module order.

    Raises:
        MisuseError: one is in the group of an earlier call on a module around this one.
    """
    found: dict[nn.Parameter, tuple[str, list[ParamOwner]]] = {}
    for module, prefix in managed.items():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param in ignored:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            group = module.__dict__.get(_GROUPS, {}).get(name)
            if group is not None and isinstance(param, DTensor):
                raise MisuseError(
                    f"{fqn} of {type(module).__name__} on rank {dist.get_rank()} is in the group "
                    f"of {group} already, which fully_shard was applied to earlier; expected each "
                    "parameter in one group. Apply fully_shard from the inside out: first to this "
                    "module, then to the one around it. If the module is shared, shard it first, "
                    "or all that use it in one call: fully_shard([first, second])"
                )
            if param not in found:
                found[param] = (fqn, [])
            found[param][1].append(ParamOwner(module, name))
    return found


def note_group(owners: Iterable[ParamOwner], fqn: str, group: str) -> None:
    """Mark on the modules of a sharded parameter that it belongs to a group.

    Other calls then refuse it, and so does torch's tensor parallelism, which has to come first.

    Args:
        owners: the modules that hold the parameter.
        fqn: its fully qualified name.
        group: the classes of the modules that were sharded together.
    """
    for owner in owners:
        groups = owner.module.__dict__.setdefault(_GROUPS, {})
        groups[owner.name] = group
        if len(groups) > 1:
            continue  # the error names one parameter of a module
        fsdp.refuse_to_distribute(
            owner.module,
            MisuseError(
                f"{fqn} of {type(owner.module).__name__} on rank {dist.get_rank()}: found tensor "
                f"parallelism applied after sharding, to the group of {group}; expected it before. "
                'Call parallelize_module(model, mesh["tp"], plan) first, then fully_shard(..., '
                'mesh=mesh["dp"])'
            ),
        )


def move_to_device(
    params: Iterable[nn.Parameter], managed: Iterable[nn.Module], device: torch.device
) -> None:
    """Move parameters and buffers to ``device``, except for those on the meta device."""
    buffers = [buffer for module in managed for buffer in module.buffers(recurse=False)]
    for tensor in [*params, *buffers]:
        if tensor.device == device or tensor.is_meta or isinstance(tensor, DTensor):
            continue
        fsdp.move(tensor, device)

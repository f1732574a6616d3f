"""What a step with values allocates on the host, as torch's own profiler reports it."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise._torch import c10d
from shardwise.frontends.blocks import shard_blocks, store_in
from shardwise.frontends.strategies import TENSOR
from shardwise.insight.blueprint import Blueprint, apply_tensor_parallelism
from shardwise.insight.planning.settings import Settings
from shardwise.insight.schema.sharding import Stepping
from shardwise.optim import in_backward


@dataclass(frozen=True)
class Allocated:
    """Bytes above what was there before the step.

    Attributes:
        after_forward: when the first forward is over.
        peak: the most.
    """

    after_forward: int
    peak: int


def allocated(
    blueprint: Blueprint,
    settings: Settings,
    prepare: Callable[[nn.Module], object],
    folder: Path,
) -> Allocated:
    """Run two steps with values on rank 0 of a world without others; profile the second.

    The runtime is the one of a training. Only what others would have sent is missing.

    Args:
        blueprint: the model.
        settings: ``batch`` and ``step`` are given.
        prepare: changes the model before it is sharded.
        folder: where to write the profile.
    """
    assert settings.batch is not None
    assert settings.step is not None
    world, plan = settings.world, settings.sharding
    with ExitStack() as stack:
        stack.enter_context(c10d.fake_world(world.size))
        mesh = init_device_mesh("cpu", world.shape, mesh_dim_names=world.names)
        model = blueprint.model.to_empty(device="cpu")
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.detach().zero_()
        if settings.shard_dtype == "bf16":
            store_in(model, torch.bfloat16)
        prepare(model)
        data = plan.sharding_mesh(mesh[plan.names])
        if TENSOR in world.names:
            apply_tensor_parallelism(model, mesh[TENSOR], blueprint.tensor_parallel)
            stack.enter_context(loss_parallel())
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if settings.param_dtype == "bf16" else None,
            reduce_dtype=torch.float32,
        )
        shard_blocks(
            model,
            blueprint.blocks,
            mesh=data,
            reshard_after_forward=plan.reshard_after_forward,
            precision=policy,
            transport=settings.transport,
            runtime=settings.runtime,
        )
        optimizer: torch.optim.Optimizer
        if settings.stepping is Stepping.IN_BACKWARD:
            optimizer = in_backward(model, functools.partial(torch.optim.AdamW, fused=True))
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batches = [settings.batch(settings.batch_size) for _ in range(settings.accumulate)]

        def step() -> None:
            for micro, batch in enumerate(batches):
                model.set_requires_gradient_sync(micro == len(batches) - 1)
                loss = settings.step(model, batch)
                with record_function("after forward"):
                    pass
                (loss / len(batches)).backward()
                del loss
            optimizer.step()
            model.zero_grad()

        step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    return _read(profiled, folder / "trace.json")


def _read(profiled: profile, path: Path) -> Allocated:
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    now = peak = 0
    after_forward: int | None = None
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event["name"] == "[memory]":
            now += event["args"]["Bytes"]
            peak = max(peak, now)
        elif event["name"] == "after forward" and after_forward is None:
            after_forward = now
    assert after_forward
    return Allocated(after_forward, peak)

"""What can be taken out of the runtime, and which scenario reports that it is gone.

:data:`SEEN` and :data:`UNSEEN` list every wait, event, kept reference and allocation in the files
that handle tensors of a device. :data:`HOST_ONLY` says which files do not.
"""

from __future__ import annotations

#: Files and folders without tensors of a device, or without any that two streams use.
HOST_ONLY = {
    "sharding/part.py": "says which elements a rank holds; only reports of the inspector take them",
    "sharding/drawing.py": "works on the stream of the program, where its broadcasts run too",
    "sharding/own_order.py": "numbers of the host that ranks announce",
    "transport/gloo.py": "messages between tensors of the host",
    "transport/waiter.py": "a thread that waits for gloo",
    "transport/peers.py": "ranks that meet in the store",
    "transport/shm": "memory that ranks of a host share",
    "checkpoint/disk": "files",
    "checkpoint/formats": "files",
    "checkpoint/tools": "files",
    "checkpoint/ranks/hf.py": "copies one shard after the other, and waits for each",
    "checkpoint/ranks/optimizer_loading.py": "reads files into the memory of the host",
    "checkpoint/ranks/loading.py": "copies one shard after the other, and waits for each",
    "checkpoint/ranks/moving.py": "copies rows to the host and back, and waits for each",
    "checkpoint/ranks/xla.py": "reads files into the memory of the host",
    "checkpoint/ranks/subclasses.py": "puts together what was read into the memory of the host",
    "optim/adamw8bit.py": "works on the stream of the step, where its all-reduces run too",
    "optim/codes.py": "works on the stream of the step alone",
    "optim/adafactor.py": "works on the stream of the step, where its all-reduces run too",
    "optim/forms.py": "makes states on the stream of the step, or on the host",
    "optim/lion.py": "works on the stream of the step alone",
    "optim/offloaded/masters.py": "works on the stream of the step alone",
    "optim/torch_steps.py": "torch's own FSDP2 calls it on the stream of its reductions",
    "optim/reductions.py": "works on the stream of the step, where its all-reduces run too",
}

_QUEUED = ("custom", "wires", "wires_over_hosts")

#: By place: the scenarios of which each reports a race, or an error, without it.
SEEN: dict[str, str | tuple[str, ...]] = {
    # The all-gather of a tensor subclass.
    "sharding/extension.py Extension.gathered: torch.empty(world_size * sent.numel(), "
    "dtype=sent.dtype, device=sent.device)": "subclass",
    "sharding/extension.py _allocate: storage.resize_(nbytes)": "subclass",
    # Full parameters.
    "sharding/full_params.py FullParams.start: each.allocate()": "zero3",
    "sharding/full_params.py FullParams.finish: self._works.pop().wait()": "large",
    "sharding/full_params.py PostForwardShards.keep: "
    "rows.clone(memory_format=torch.contiguous_format)": "integer_reshard",
    "sharding/full_params.py PostForwardShards.keep: "
    "param.full_data.clone()": "integer_reshard_of_scalars",
    "sharding/hooks.py outlive_parameters: tensor.clone()": "returns_parameter",
    "frontends/module.py FSDPModule.unshard: handle.wait()": "unshard_and_read",
    "sharding/placement.py full_tensor: full.clone()": "one_rank_summon",
    # Shards.
    "sharding/allocate.py replace_plain: torch.empty_like(old, device=device)": "materialize",
    "sharding/param.py ShardedParam.empty_full: "
    "torch.empty(self.layout.shape, dtype=dtype, device=device)": "materialize",
    "sharding/param.py ShardedParam.copy_parameter: local.clone()": "copied",
    "base/offload.py Offload.copy: shard.clone(memory_format=torch.contiguous_format)": "zero3",
    "sharding/hooks.py _enter_root: event.wait()": "post_optimizer_event",
    # Gradients.
    "sharding/group_param.py GroupParam.zeros_for_grad: torch.zeros(self.layout.shape, "
    "dtype=self.full.dtype, device=self.full.device)": "unused_params",
    "sharding/layout.py Layout.to_chunks: full.new_empty(self.padded_numel)": "staged",
    "sharding/delivery.py Delivery.advance: work.wait()": "large",
    "sharding/delivery.py Flight.scatter: self.alive.append(full)": "custom",
    "sharding/delivery.py _add_all: "
    "torch.empty(layout.chunk_numel, dtype=dtype, device=value.device)": "large",
    "sharding/delivery.py _count: "
    "torch.empty(len(grads), dtype=dtypes[1], device=like.device)": "large",
    "sharding/delivery.py _places_for_shards: "
    "torch.zeros(sum(numels), dtype=dtype, device=device)": "all_reduce_hook",
    "sharding/delivery.py _run_hook_on: "
    "devices.current_stream(device).record_event()": "all_reduce_hook_with_stream",
    "sharding/delivery.py _run_hook_on: beside.wait_event(reduced)": "all_reduce_hook_with_stream",
    "sharding/delivery.py _run_hook_on: beside.record_event()": "all_reduce_hook_with_stream",
    "sharding/delivery.py _run_hook_on: "
    "devices.current_stream(device).wait_event(hooked)": "all_reduce_hook_with_stream",
    # Gradients on their way to the host.
    "sharding/group.py ParamGroup.wait_for_offload: offload.wait()": "offload_pinned",
    "base/offload.py Offload.grad_to_host: stream.record_event()": "offload_pinned",
    "base/offload.py Offload.wait: self._copied.popitem()[1].synchronize()": "offload_pinned",
    # Collectives.
    "transport/base.py wait_for_all: work.wait()": "wires_of_scalars",
    "transport/all_to_all.py AllToAll._collect: work.wait()": "diloco",
    "transport/buckets.py pack: torch.cat(list(pieces))": "hybrid",
    "transport/buckets.py flat_rows: like.new_empty(world_size, sum(chunks))": "zero3",
    "transport/buckets.py contributions: "
    "flat_rows(shard, world_size, [each.numel() for each in shards])": "zero3",
    "transport/collectives.py CollectivesTransport._all_gather: "
    "flat_rows(first, self.world_size, sizes)": "zero3",
    "transport/collectives.py CollectivesTransport._reduce_scatter: "
    "torch.empty_like(flat[0])": "zero3",
    "transport/collectives.py CollectivesTransport._start: each.wait()": "zero3",
    "transport/memory.py HeapBuffers.allocate: storage.resize_(nbytes)": "zero3",
    # Custom collectives.
    "transport/custom.py CustomTransport._all_gather: gather.allocate( "
    "(self.world_size * sum(sizes),), dtype=fulls[0].dtype, device=device )": "custom",
    "transport/custom.py CustomTransport._reduce_one: comm.allocate("
    "(self.world_size * sum(sizes),), dtype=dtype, device=device)": "custom",
    "transport/custom.py CustomTransport._reduce_one: "
    "comm.allocate((sum(sizes),), dtype=dtype, device=device)": "custom",
    "transport/custom.py CustomTransport._beside: queued.wait()": "custom",
    # Collectives of several steps.
    "transport/runner.py SteppedWork.reach: self._under_way.wait()": "wires",
    "transport/runner.py Runner.queue: devices.current_stream(device).record_event()": _QUEUED,
    "transport/runner.py Runner.queue: devices.current_stream(device).wait_event(done)": _QUEUED,
    "transport/runner.py Runner.queue: "
    "self._stream.wait_stream(devices.current_stream(device))": _QUEUED,
    "transport/runner.py Runner.queue: step.wait()": (
        "custom_asynchronous",
        "wires",
        "wires_over_hosts",
    ),
    # Collectives of encoded values.
    "sharding/group_param.py GroupParam._as_gathered: "
    "gathered.to(shard.device)": "wires_written_offloaded",
    "transport/codecs.py Fp8Codec._to_float: "
    "numbers.view(torch.int8).to(torch.int16)": "wires_of_scalars",
    "transport/codecs.py Noise.__init__: torch.cat([table, table])": "wires_offload",
    "transport/encoded.py EncodedTransport._errors_of: "
    "torch.zeros(tensor.numel(), dtype=torch.float32, device=tensor.device)": "wires",
    "transport/memory.py _block: torch.empty(nbytes, dtype=torch.uint8, device=device)": "wires",
    # Works that are kept until they are waited for, and waits for them.
    "sharding/full_params.py FullParams.start: "
    "self._works.append(transport.all_gather(shards, buffers, label))": "zero3",
    "sharding/full_params.py FullParams.finish: way.finish()": "subclass",
    "sharding/group.py ParamGroup.wait_for_unshard: self.fulls.finish()": "zero3",
    "sharding/group.py ParamGroup._put_shards_back: self.wait_for_unshard()": "unshard_and_reshard",
    "sharding/group.py ParamGroup.use_now: self.wait_for_unshard()": "zero3",
    "frontends/module.py UnshardHandle.wait: self._groups[0].wait_for_unshard()": (
        "unshard_and_read"
    ),
    "frontends/module.py FSDPModule.keep_unsharded: group.wait_for_unshard()": "keep_unsharded",
    "sharding/delivery.py Flight.start: self.works.append(transport.start(call))": "zero3",
    "sharding/delivery.py _run_hook_on: flight.works.append(PendingWork(lambda: "
    "devices.current_stream(device).wait_event(hooked)))": "all_reduce_hook_with_stream",
    "sharding/ledger.py Ledger.start: self._in_flight.append(started)": "zero3",
    "sharding/ledger.py Ledger.settle: self._in_flight.pop(0).finish()": "offload_hybrid",
    "sharding/state.py Root._deliver: group.wait_for_offload()": "offload_pinned",
    "sharding/group.py ParamGroup.step_in_backward: self.wait_for_offload()": (
        "step_in_backward_offloaded"
    ),
    "transport/base.py UnderWay.add: finish()": "zero3",
    "transport/collectives.py CollectivesTransport._start: finish()": "zero3",
    "transport/collectives.py CollectivesTransport._start: "
    "launched.append(carrier().launch(each, self._coalescing))": "zero3",
    # Copies between host and device.
    "optim/norms.py scale_grads: scale.to(device)": "clip_offload",
    "optim/norms.py _local_norm: norm.to(device, dtype)": "clip_offload",
    "sharding/group_param.py GroupParam.take_over_writes: "
    "self.layout.cut(self.full_data, self.form.mesh.shard.rank).to(shard.device)": (
        "written_in_forward_offloaded"
    ),
    "sharding/hooks.py _to_device: tensor.to(state.device)": "inputs_on_host",
    "sharding/param.py ShardedParam.add_grad: local.to(into.device)": "offload_accumulate",
    "base/offload.py Offload.place: shard.to(self.home)": "offload_and_read",
    "frontends/summon.py _full_for_user: full.cpu()": "summon_offloaded",
    "frontends/summon.py _write_back: _rows(param, full.grad).flatten().to(param.local.device)": (
        "summon_offloaded"
    ),
    # What is converted, or made contiguous.
    "optim/norms.py clip_grad_norm_: norm.to(dtype)": "clip_bfloat16",
    "optim/norms.py _local_norm: torch.stack( [norm.to(device, dtype) "
    "for norm in autograd.foreach_norm(grads, norm_type)] )": "clip",
    "sharding/group_param.py GroupParam.take_over_writes: "
    "torch.where(written, rows.to(shard.dtype), shard)": "written_in_forward",
    "sharding/group_param.py GroupParam.take_over_writes: "
    "rows.to(shard.dtype)": "written_in_forward_mixed",
    "sharding/group_param.py GroupParam.accumulate_grad: "
    "self._plain(full.grad).to(dtype)": "accumulate",
    "sharding/param.py ShardedParam.take_over: local.contiguous()": "channels_last",
    "sharding/policy.py cast_floating: tensor.to(dtype)": "mixed",
    "sharding/delivery.py _scaled: value.to(dtype)": "scalars",
    "sharding/delivery.py _add_to_shard: shard.to(dtype)": "half_reduced",
    "transport/collectives.py CollectivesTransport._all_gather: "
    "shard.to(full.dtype)": "integers_plain_collectives",
    "transport/custom.py CustomTransport._all_gather: shards[i].to(dtypes[i])": "integers_custom",
    # The step of Muon.
    "optim/muon.py _adamw_step: torch.zeros((), dtype=torch.float32, device=device)": "muon",
    "optim/checked.py shard_of_state: "
    "torch.zeros_like(param, memory_format=torch.preserve_format)": "muon",
    "optim/matrices.py Orthogonalization.run: update.to(DTYPE, copy=True)": "muon_alone",
    "optim/shared_work.py SharedWork._send: sent.new_empty(sum(sizes[1]))": "muon",
    "optim/shared_work.py SharedWork._steps: work.wait()": "muon",
    "optim/shared_work.py SharedWork._steps: work.wait() (2)": "muon_in_backward",
    "optim/shared_work.py _joined: received.new_empty(unit.shape)": "muon",
    "optim/shared_work.py SharedWork._prepared: "
    "self._like.new_empty(sum(_sizes(each.sent_to_owners, self._layers)))": "muon",
    "optim/shared_work.py SharedWork._cut: "
    "self._like.new_empty(sum(_sizes(each.sent_to_holders, 1)))": "muon",
    "transport/all_to_all.py AllToAll.exchange_numbers: "
    "self.start(sent, received, label).wait()": "muon",
    # States on the host.
    "optim/offloaded/stores.py HostStore._start: computing.record_event()": "offload_states",
    "optim/offloaded/stores.py HostStore._start: "
    "self._stream.wait_event(computing.record_event())": "offload_states",
    "optim/offloaded/stores.py HostStore._start: self._stream.record_event()": "offload_states",
    "optim/offloaded/stores.py HostStore.fetch: "
    "devices.current_stream(self._device).wait_event(copied)": "offload_states",
    "optim/offloaded/stores.py HostStore.put: copied.synchronize()": "offload_states",
    # Checkpoints.
    "checkpoint/ranks/saving.py copies: devices.synchronize(device)": "async_save",
    "base/devices.py synchronize: torch.accelerator.synchronize(device)": "async_save",
}

_HOST = "memory of the host belongs to no stream"
_FREED = "it is freed before anything uses it, only to make a storage of its size"
_HELD = "NCCL's work holds its tensors itself until it is waited for; gloo's does not"
_SELF = "a result of a functional collective waits itself when an operation reads it"
_ORDERED = (
    "the host writes to its shards when gradients have arrived there, which is after the copy"
)
_META = "it has no memory: it is on the meta device"
_ASKS = "it asks whether the device can do this, and nothing follows it"
_LOADED = "it is filled from the host, which waits for each copy"
_MESSAGES = "messages are between tensors of the host"
_OWN = "its owner keeps it, and uses it on one stream"
_PASSING = "it is freed on the stream that wrote it, and no other one sees it"
_NO_STREAMS = "it is for devices without streams"
_STEPPED = "it adds up a norm and keeps hyperparameters, which only values show"
_ONE_STREAM = "the stream of the step makes it, uses it and frees it"
_PART = "a part of a gradient is missing, which only values show"

#: By place: why no scenario can report that it is gone.
UNSEEN = {
    # Ranks in orders of their own read what others announce, and tensors have no values here.
    "sharding/full_params.py FullParams.supply: each.allocate()": "in orders of their own",
    "sharding/full_params.py FullParams.supply: "
    "self._transport.all_gather(shards, buffers, label).wait()": "in orders of their own",
    "transport/buckets.py add_in_order: column[i].to(out.dtype)": _HOST,
    "transport/buckets.py add_in_order: first[0][i].to(out.dtype)": _HOST,
    "transport/all_to_all.py AllToAll._send: wait(messages.land)": _MESSAGES,
    "transport/all_to_all.py AllToAll._send: wait(messages.wait)": _MESSAGES,
    "transport/all_to_all.py AllToAll.wait_for: job.wait()": _MESSAGES,
    "transport/all_to_all.py AllToAll.wait_for: self._waiter.wait([(job, None)], doing)": _MESSAGES,
    "transport/codecs.py Noise.__init__: "
    "(order.float() + 0.5).div_(self._size).to(device)": _LOADED,
    "transport/codecs.py Room.take: "
    "torch.empty(size, dtype=torch.float32, device=self._device)": _OWN,
    "transport/encoded.py EncodedTransport.as_gathered: shard.to(self._device)": _ORDERED,
    "transport/encoded.py EncodedTransport.as_gathered: "
    "torch.empty(codec.nbytes(shard.numel()), dtype=torch.uint8, device=self._device)": _PASSING,
    "transport/encoded.py EncodedTransport.as_gathered: "
    "torch.empty(shard.numel(), dtype=dtype, device=self._device)": _PASSING,
    "transport/encoded.py EncodedTransport.as_gathered: shard.to(dtype)": _PASSING,
    "transport/base.py Transport.as_gathered: shard.to(dtype)": _PASSING,
    "sharding/group_param.py GroupParam._as_gathered: shard.to(dtype)": _PASSING,
    "optim/step_in_backward.py GroupSteps._step_zeroed: torch.zeros_like(form.parameter)": _OWN,
    "sharding/param.py ShardedParam._has_same_values: theirs.to(mine.device)": _LOADED,
    "transport/runner.py Runner.start_watched: run.wait()": _NO_STREAMS,
    "transport/encoded.py EncodedTransport._encode_shard: "
    "shard.to(self._device, non_blocking=True)": _ORDERED,
    "sharding/extension.py Extension.gathered: local.to(self._mesh.device)": _ORDERED,
    "sharding/placement.py full_tensor: local.to(kind)": _ORDERED,
    "sharding/allocate.py allocate: form.allocate(device)": _LOADED,
    "sharding/allocate.py MetaMemory.give: form.allocate(self._device)": _LOADED,
    "sharding/param.py ShardedParam.fill_place: "
    "self.offload.empty_like(self.local, self.mesh.device, self.fqn)": _LOADED,
    "sharding/param.py ShardedParam.leave: "
    'torch.empty(self.local.shape, dtype=self.local.dtype, device="meta")': _LOADED,
    "sharding/param.py ShardedParam.allocate: "
    "self.offload.empty_like(self.local, device, self.fqn)": _LOADED,
    "base/offload.py Offload.empty_like: torch.empty_like(shard, device=device)": _LOADED,
    "base/offload.py Offload.copy: self.empty_like(shard, self.home, fqn)": (
        "memory of a file, which copies block the host for"
    ),
    "sharding/group_param.py GroupParam._plain: dtensor.wait_tensor(dtensor.local_of(grad))": _SELF,
    "sharding/param.py ShardedParam._through_hooks: "
    "dtensor.wait_tensor(dtensor.local_of(grad))": _SELF,
    "sharding/placement.py full_tensor: "
    "dtensor.wait_tensor(value.redistribute(placements=wanted).to_local())": _SELF,
    "sharding/hooks.py pre_forward: wait_for_inputs(args, kwargs)": _SELF,
    "sharding/hooks.py pre_forward: wait_for_inputs(args, kwargs) (2)": _SELF,
    "sharding/hooks.py mark_inputs: autograd.wait_in_graph(tensor)": _SELF,
    "sharding/delivery.py GroupGrads.complete: "
    "_scaled(grad.value, dtype, scaling, name).contiguous()": (
        "autograd gives gradients the strides of their parameter, so nothing is copied"
    ),
    "frontends/summon.py _rows: "
    "param.layout.cut(full.detach(), param.form.mesh.shard.rank).contiguous()": (
        "the wrapper cuts along the first dimension, so nothing is copied"
    ),
    "optim/norms.py NormParts.total: torch.zeros(())": _HOST,
    "optim/norms.py NormParts.total: found.count_nonzero().to(found.dtype)": _ONE_STREAM,
    "optim/norms.py NormParts._sum: torch.cat([one, other])": _ONE_STREAM,
    "optim/norms.py _local_norm: grad.count_nonzero().to(device, dtype)": _ONE_STREAM,
    "optim/norms.py _local_norm: torch.stack(counts)": _ONE_STREAM,
    "sharding/param.py ShardedParam._has_same_values: each.detach().contiguous()": _LOADED,
    "sharding/param.py ShardedParam.place_grad: self.offload.wait()": (
        "the gradient of a penalty on the shards is added on the stream of the model's backward"
    ),
    "sharding/full_params.py _hand_on_grad: "
    "rows.to(param.dtype, memory_format=torch.contiguous_format)": _ONE_STREAM,
    "sharding/state.py Root._end_step: stepper.finish()": _STEPPED,
    "base/devices.py host_memory: "
    "torch.empty(nbytes, dtype=torch.uint8, device=CPU, pin_memory=pins(device))": _HOST,
    "optim/offloaded/states.py OffloadedStates.make_entry: "
    "self._store.allocate(form.nbytes)": _HOST,
    "optim/offloaded/optimizer.py OffloadedOptimizer.step_part: parts.finish()": _STEPPED,
    "optim/offloaded/optimizer.py _on_device: value.to(dtensor.plain(param).device)": _LOADED,
    "optim/offloaded/stores.py HostStore.make_block: "
    "torch.empty(nbytes, dtype=torch.uint8, device=self._device)": (
        "the host has waited for all copies out of a block before it is freed"
    ),
    "optim/offloaded/stores.py DiskStore.make_block: "
    "torch.empty(nbytes, dtype=torch.uint8, device=self._device)": "the model has no disk",
    "optim/offloaded/stores.py PlannedStore.allocate: "
    'torch.empty(nbytes, dtype=torch.uint8, device="meta")': _META,
    "optim/offloaded/stores.py PlannedStore.make_block: "
    "torch.empty(nbytes, dtype=torch.uint8)": "it has no memory: it is for plans",
    "optim/step_in_backward.py GroupSteps.finish: self._parts.finish()": _STEPPED,
    "optim/step_in_backward.py GroupSteps.step_rest: self.finish()": _STEPPED,
    "optim/step_in_backward.py OptimizerInBackward._end_step: self._clipping.finish()": _STEPPED,
    "optim/matrices.py Orthogonalization.run: "
    "update.to(DTYPE, copy=True).contiguous()": "a copy is contiguous already",
    "optim/cells.py _on_device: dtensor.plain(value).to(to)": _LOADED,
    "optim/on_shards.py _WholeWork._compute: slope.to(each.grad.dtype)": _ONE_STREAM,
    "optim/on_shards.py _WholeWork._compute: value.to(each.value.dtype)": _ONE_STREAM,
    "optim/trials.py _outcomes: tensors[0].clone()": _ONE_STREAM,
    "optim/trials.py _outcomes: tensors[1 + step].clone()": _ONE_STREAM,
    "optim/trials.py _random: "
    'values.to("cpu" if param.is_meta else param.device, param.dtype)': _LOADED,
    "sharding/ledger.py Ledger.hold: delivery.finish()": _PART,
    "sharding/ledger.py Ledger._move_on: left[0].finish()": _PART,
    "base/devices.py has_streams: "
    "torch.accelerator.current_stream(current(device.type)).record_event()": _ASKS,
    "base/devices.py times_events: last.synchronize()": _ASKS,
    "base/devices.py pins: torch.empty(1, pin_memory=True)": _ASKS,
    "base/devices.py copy_to_host: torch.empty_like( tensor, device=CPU, "
    "pin_memory=how is not Copy.PAGEABLE, memory_format=torch.contiguous_format, )": _HOST,
    "sharding/param.py ShardedParam.add_grad: self.offload.wait()": (
        "the copy that follows blocks the host on the stream of the earlier one, or on a stream "
        "that autograd has made wait for it"
    ),
    "frontends/module.py FSDPModule.finalize_backward: handle.wait()": (
        "the next forward refuses to begin before it"
    ),
    "sharding/group_param.py GroupParam.make_full: "
    "storage.resize_((offset + memory.numel()) * memory.itemsize)": _FREED,
    'sharding/layout.py Layout.strides: torch.empty(self.shape, device="meta")': _META,
    'sharding/placement.py sharded_spec: torch.empty(param.shape, device="meta")': _META,
    "sharding/placement.py full_tensor: "
    'torch.empty(value.shape, dtype=value.dtype, device="meta")': _META,
    'sharding/placement.py _in_bytes: torch.empty(shape, device="meta")': _META,
    "sharding/placement.py _in_bytes: dtensor.local_of(value).detach().contiguous()": _HELD,
    "sharding/placement.py full_tensor: dtensor.wait_tensor(sent.to_local())": _SELF,
    "sharding/placement.py full_tensor: "
    "dtensor.wait_tensor(sent.to_local()).contiguous()": _PASSING,
    "transport/all_to_all.py AllToAll._collect: rows=rows": _HELD,
    "transport/all_to_all.py AllToAll.exchange_numbers: torch.empty_like(sent)": (
        "the host has read it before it is freed"
    ),
    "transport/collectives.py CollectivesTransport._all_gather: mine.clone()": (
        "for backends that cannot gather in place; the one that is modeled can"
    ),
    "transport/collectives.py CollectivesTransport._start: calls=calls": _HELD,
    "transport/collectives.py CollectivesTransport._start: "
    "self._waiter.wait([(each, None) for each in launched], doing)": "gloo, on the host",
    "transport/memory.py HeapBuffers.__init__: "
    "torch.empty(numel, dtype=dtype, device=device)": _FREED,
    "transport/memory.py Loan.take: torch.empty(numel, dtype=dtype)": _HOST,
    "checkpoint/ranks/saving.py _copy: local.clone(memory_format=torch.contiguous_format)": _HOST,
}

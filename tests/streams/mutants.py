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
    "checkpoint/ranks/contents.py": "copies one shard after the other, and waits for each",
    "checkpoint/ranks/hf.py": "copies one shard after the other, and waits for each",
    "checkpoint/ranks/optimizer_loading.py": "reads files into the memory of the host",
    "checkpoint/ranks/loading.py": "copies one shard after the other, and waits for each",
    "checkpoint/ranks/rows.py": "copies rows to the host and back, and waits for each",
    "checkpoint/ranks/streams.py": "rows that have come to the host",
    "checkpoint/ranks/moving.py": "copies rows to the host and back, and waits for each",
    "checkpoint/ranks/neighbor.py": "copies shards into files of the host, and waits for each",
    "checkpoint/ranks/outline.py": "numbers of the host that ranks plan with",
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
    "Extension.gathered: empty": "subclass",
    "_allocate: resize_": "subclass",
    # Full parameters.
    "FullParams.start: allocate": "zero3",
    "FullParams.finish: wait": "large",
    "PostForwardShards.keep: clone (2)": "integer_reshard",
    "PostForwardShards.keep: clone": "integer_reshard_of_scalars",
    "outlive_parameters: clone": "returns_parameter",
    "FSDPModule.unshard: wait": "unshard_and_read",
    "full_tensor: clone": "one_rank_summon",
    # Shards.
    "replace_plain: empty_like": "materialize",
    "ShardedParam.empty_full: empty": "materialize",
    "ShardedParam.copy_parameter: clone": "copied",
    "Offload.copy: clone": "zero3",
    "_enter_root: wait": "post_optimizer_event",
    # Gradients.
    "GroupParam.zeros_for_grad: zeros": "unused_params",
    "Layout.to_chunks: new_empty": "staged",
    "Delivery.advance: wait": "large",
    "Flight.scatter: append": "custom",
    "_add_all: empty": "large",
    "_count: empty": "large",
    "_places_for_shards: zeros": "all_reduce_hook",
    "_run_hook_on: record_event": "all_reduce_hook_with_stream",
    "_run_hook_on: wait_event": "all_reduce_hook_with_stream",
    "_run_hook_on: record_event (2)": "all_reduce_hook_with_stream",
    "_run_hook_on: wait_event (2)": "all_reduce_hook_with_stream",
    # Gradients on their way to the host.
    "ParamGroup.wait_for_offload: wait": "offload_pinned",
    "Offload.grad_to_host: record_event": "offload_pinned",
    "Offload.wait: synchronize": "offload_pinned",
    # Activations on their way to the host, and back.
    "_SideCopy.__init__: record_event": "inputs_on_the_host",
    "_SideCopy.__init__: wait_event": "inputs_on_the_host",
    "_SideCopy.__init__: record_event (2)": "inputs_on_the_host",
    "_SideCopy.wait: wait_event": "inputs_on_the_host",
    "_SideCopy.__del__: wait_event": "activations_of_a_dropped_graph",
    "_InPinnedMemory._start: empty_like": "activations_on_the_host",
    "_InPinnedMemory._load: wait": "activations_on_the_host",
    # Collectives.
    "wait_for_all: wait": "wires_of_scalars",
    "AllToAll._collect: wait": "diloco",
    "pack: cat": "hybrid",
    "flat_rows: new_empty": "zero3",
    "contributions: flat_rows": "zero3",
    "CollectivesTransport._all_gather: flat_rows": "zero3",
    "CollectivesTransport._reduce_scatter: empty_like": "zero3",
    "CollectivesTransport._start: wait (2)": "zero3",
    "HeapBuffers.allocate: resize_": "zero3",
    # Custom collectives.
    "CustomTransport._all_gather: allocate": "custom",
    "CustomTransport._reduce_one: allocate": "custom",
    "CustomTransport._reduce_one: allocate (2)": "custom",
    "CustomTransport._beside: wait": "custom",
    # Collectives of several steps.
    "SteppedWork.reach: wait": "wires",
    "Runner.queue: record_event": _QUEUED,
    "Runner.queue: wait_event": _QUEUED,
    "Runner.queue: wait_stream": _QUEUED,
    "Runner.queue: wait": (
        "custom_asynchronous",
        "wires",
        "wires_over_hosts",
    ),
    # Collectives of encoded values.
    "GroupParam._as_gathered: to (2)": "wires_written_offloaded",
    "Fp8Codec._to_float: to": "wires_of_scalars",
    "Noise.__init__: cat": "wires_offload",
    "EncodedTransport._errors_of: zeros": "wires",
    "_block: empty": "wires",
    # Works that are kept until they are waited for, and waits for them.
    "FullParams.start: append": "zero3",
    "FullParams.finish: finish": "subclass",
    "ParamGroup.wait_for_unshard: finish": "zero3",
    "ParamGroup._put_shards_back: wait_for_unshard": "unshard_and_reshard",
    "ParamGroup.use_now: wait_for_unshard": "zero3",
    "UnshardHandle.wait: wait_for_unshard": "unshard_and_read",
    "FSDPModule.keep_unsharded: wait_for_unshard": "keep_unsharded",
    "Flight.start: append": "zero3",
    "_run_hook_on: append": "all_reduce_hook_with_stream",
    "Ledger.start: append": "zero3",
    "Ledger.settle: finish": "offload_hybrid",
    "Root._deliver: wait_for_offload": "offload_pinned",
    "ParamGroup.step_in_backward: wait_for_offload": "step_in_backward_offloaded",
    "UnderWay.add: finish": "zero3",
    "CollectivesTransport._start: finish": "zero3",
    "CollectivesTransport._start: append": "zero3",
    # Copies between host and device.
    "scale_grads: to": "clip_offload",
    "_local_norm: to (2)": "clip_offload",
    "GroupParam.take_over_writes: to": "written_in_forward_offloaded",
    "_to_device: to": "inputs_on_host",
    "ShardedParam.add_grad: to": "offload_accumulate",
    "Offload.place: to": "offload_and_read",
    "_full_for_user: cpu": "summon_offloaded",
    "_write_back: to": "summon_offloaded",
    # What is converted, or made contiguous.
    "clip_grad_norm_: to": "clip_bfloat16",
    "_local_norm: stack (2)": "clip",
    "GroupParam.take_over_writes: where": "written_in_forward",
    "GroupParam.take_over_writes: to (2)": "written_in_forward_mixed",
    "GroupParam.accumulate_grad: to": "accumulate",
    "ShardedParam.take_over: contiguous": "channels_last",
    "cast_floating: to": "mixed",
    "_scaled: to": "scalars",
    "_add_to_shard: to": "half_reduced",
    "CollectivesTransport._all_gather: to": "integers_plain_collectives",
    "CustomTransport._all_gather: to": "integers_custom",
    # The step of Muon.
    "_adamw_step: zeros": "muon",
    "shard_of_state: zeros_like": "muon",
    "Orthogonalization.run: to": "muon_alone",
    "SharedWork._send: new_empty": "muon",
    "SharedWork._steps: wait": "muon",
    "SharedWork._steps: wait (2)": "muon_in_backward",
    "_joined: new_empty": "muon",
    "SharedWork._prepared: new_empty": "muon",
    "SharedWork._cut: new_empty": "muon",
    "AllToAll.exchange_numbers: wait": "muon",
    # States on the host.
    "HostStore._start: record_event": "offload_states",
    "HostStore._start: wait_event": "offload_states",
    "HostStore._start: record_event (2)": "offload_states",
    "HostStore.fetch: wait_event": "offload_states",
    "HostStore.put: synchronize": "offload_states",
    # Checkpoints.
    "copies: synchronize": "async_save",
    "synchronize: synchronize": "async_save",
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
    "FullParams.supply: allocate": "in orders of their own",
    "FullParams.supply: wait": "in orders of their own",
    "add_in_order: to (2)": _HOST,
    "add_in_order: to": _HOST,
    "AllToAll._send: wait (2)": _MESSAGES,
    "AllToAll._send: wait": _MESSAGES,
    "AllToAll.wait_for: wait (2)": _MESSAGES,
    "AllToAll.wait_for: wait": _MESSAGES,
    "Noise.__init__: to": _LOADED,
    "Room.take: empty": _OWN,
    "EncodedTransport.as_gathered: to (2)": _ORDERED,
    "EncodedTransport.as_gathered: empty": _PASSING,
    "EncodedTransport.as_gathered: empty (2)": _PASSING,
    "EncodedTransport.as_gathered: to": _PASSING,
    "Transport.as_gathered: to": _PASSING,
    "GroupParam._as_gathered: to": _PASSING,
    "GroupSteps._step_zeroed: zeros_like": _OWN,
    "ShardedParam._has_same_values: to": _LOADED,
    "Runner.start_watched: wait": _NO_STREAMS,
    "EncodedTransport._encode_shard: to": _ORDERED,
    "Extension.gathered: to": _ORDERED,
    "full_tensor: to": _ORDERED,
    "allocate: allocate": _LOADED,
    "MetaMemory.give: allocate": _LOADED,
    "ShardedParam.fill_place: empty_like": _LOADED,
    "ShardedParam.leave: empty": _LOADED,
    "ShardedParam.allocate: empty_like": _LOADED,
    "Offload.empty_like: empty_like": _LOADED,
    "Offload.copy: empty_like": "memory of a file, which copies block the host for",
    "GroupParam._plain: wait_tensor": _SELF,
    "ShardedParam._through_hooks: wait_tensor": _SELF,
    "full_tensor: wait_tensor": _SELF,
    "pre_forward: wait_for_inputs (2)": _SELF,
    "pre_forward: wait_for_inputs": _SELF,
    "mark_inputs: wait_in_graph": _SELF,
    "GroupGrads.complete: contiguous": (
        "autograd gives gradients the strides of their parameter, so nothing is copied"
    ),
    "_rows: contiguous": "the wrapper cuts along the first dimension, so nothing is copied",
    "NormParts.total: zeros": _HOST,
    "NormParts.total: to": _ONE_STREAM,
    "NormParts._sum: cat": _ONE_STREAM,
    "_local_norm: to": _ONE_STREAM,
    "_local_norm: stack": _ONE_STREAM,
    "ShardedParam._has_same_values: contiguous": _LOADED,
    "ShardedParam.place_grad: wait": (
        "the gradient of a penalty on the shards is added on the stream of the model's backward"
    ),
    "_hand_on_grad: to": _ONE_STREAM,
    "Root._end_step: finish": _STEPPED,
    "host_memory: empty": _HOST,
    "OffloadedStates.make_entry: allocate": _HOST,
    "OffloadedOptimizer.step_part: finish": _STEPPED,
    "optim/offloaded/optimizer.py _on_device: to": _LOADED,
    "HostStore.make_block: empty": (
        "the host has waited for all copies out of a block before it is freed"
    ),
    "DiskStore.make_block: empty": "the model has no disk",
    "_OnDisk._load: to": "the model has no disk",
    "_InPageableMemory._load: to": "copies from pageable memory always block the host",
    "PlannedStore.allocate: empty": _META,
    "PlannedStore.make_block: empty": "it has no memory: it is for plans",
    "GroupSteps.finish: finish": _STEPPED,
    "GroupSteps.step_rest: finish": _STEPPED,
    "OptimizerInBackward._end_step: finish": _STEPPED,
    "Orthogonalization.run: contiguous": "a copy is contiguous already",
    "optim/cells.py _on_device: to": _LOADED,
    "_WholeWork._compute: to": _ONE_STREAM,
    "_WholeWork._compute: to (2)": _ONE_STREAM,
    "_outcomes: clone": _ONE_STREAM,
    "_outcomes: clone (2)": _ONE_STREAM,
    "_random: to": _LOADED,
    "Ledger.hold: finish": _PART,
    "Ledger._move_on: finish": _PART,
    "has_streams: record_event": _ASKS,
    "times_events: synchronize": _ASKS,
    "pins: empty": _ASKS,
    "copy_to_host: empty_like": _HOST,
    "ShardedParam.add_grad: wait": (
        "the copy that follows blocks the host on the stream of the earlier one, or on a stream "
        "that autograd has made wait for it"
    ),
    "FSDPModule.finalize_backward: wait": "the next forward refuses to begin before it",
    "GroupParam.make_full: resize_": _FREED,
    "Layout.strides: empty": _META,
    "sharded_spec: empty": _META,
    "full_tensor: empty": _META,
    "_in_bytes: empty": _META,
    "_in_bytes: contiguous": _HELD,
    "full_tensor: wait_tensor (2)": _SELF,
    "full_tensor: contiguous": _PASSING,
    "AllToAll._collect: rows": _HELD,
    "AllToAll.exchange_numbers: empty_like": "the host has read it before it is freed",
    "CollectivesTransport._all_gather: clone": (
        "for backends that cannot gather in place; the one that is modeled can"
    ),
    "CollectivesTransport._start: calls": _HELD,
    "CollectivesTransport._start: wait": "gloo, on the host",
    "HeapBuffers.__init__: empty": _FREED,
    "Loan.take: empty": _HOST,
    "_copy: clone": _HOST,
}

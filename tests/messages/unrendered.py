"""Sites whose message no scenario shows, by reason. A site is `file: function`."""

from __future__ import annotations

UNRENDERED: dict[str, frozenset[str]] = {
    "A GPU, or several": frozenset(
        {
            "call/one_device.py: (module)",
            "call/transparent.py: Transparent.modules",
            "engines/processes/controller/nccl_manager.py: NcclManager._disable",
            "engines/processes/controller/nccl_manager.py: _warn_existing_groups",
            "engines/processes/controller/rendezvous.py: ControllerRendezvous.check_device_rows",
            "engines/processes/controller/requests.py: RetryingRequest.receive",
            "engines/processes/engine.py: ProcessesEngine._raise_lost_broadcast",
            "engines/processes/transport/cuda_driver.py: _raise_driver_error",
            "engines/processes/transport/cuda_driver.py: _primary_context",
            "engines/processes/transport/cuda_driver.py: DeviceMemory.tensor",
            "engines/processes/worker/ambient.py: use_device",
            "engines/processes/worker/ambient.py: check_device_memory",
            "parallel.py: DataParallel._fall_back",
        }
    ),
    "Several ranks, which torchrun or `instep run` starts": frozenset(
        {
            "call/runner.py: ParallelRunner._check_own_output",
            "call/local_batches.py: join_batches",
            "cli/launch.py: _number_of_gpus",
            "cli/launch.py: run",
            "engines/torchrun/backward.py: RankBackward._check_begins",
            "engines/torchrun/backward.py: RankBackward._end",
            "engines/torchrun/backward.py: RankBackward.run",
            "engines/torchrun/backward.py: _check_same_reduction",
            "engines/torchrun/channel.py: RankChannel._all_gather",
            "engines/torchrun/channel.py: RankChannel._gather_slots",
            "engines/torchrun/channel.py: RankChannel.check",
            "engines/torchrun/channel.py: RankChannel.check_operations",
            "engines/torchrun/channel.py: RankChannel.wait",
            "engines/torchrun/checks.py: check_digests",
            "engines/torchrun/checks.py: check_modules",
            "engines/torchrun/checks.py: check_seeds",
            "engines/torchrun/checks.py: out_of_step",
            "engines/torchrun/codec.py: encode_error",
            "engines/torchrun/codec.py: encode_value",
            "engines/torchrun/engine.py: TorchrunEngine._finish_forward",
            "engines/torchrun/engine.py: TorchrunEngine._raise_broken",
            "engines/torchrun/engine.py: TorchrunEngine._agree",
            "engines/torchrun/group.py: RankGroup._leave_order",
            "engines/torchrun/launch.py: _connect_to_store",
            "engines/torchrun/launch.py: _device_backend",
            "engines/torchrun/launch.py: _sleep_before",
            "engines/torchrun/launch.py: rank_device",
            "engines/torchrun/local_slots.py: LocalSlots._check_given_up",
            "engines/torchrun/local_slots.py: LocalSlots.wait",
            "engines/torchrun/monitor.py: RankMonitor.describe_failure",
        }
    ),
    "Too little shared memory, and workers that do not start": frozenset(
        {
            "engines/processes/controller/shared_parameters.py: HostStagingCopy.__init__",
            "engines/processes/lifecycle/bootstrap.py: _import_package",
            "engines/processes/lifecycle/pool.py: WorkerPool._wait_ready",
            "engines/processes/lifecycle/process.py: WorkerProcess.__init__",
            "engines/processes/lifecycle/process.py: WorkerProcess._spawn",
            "engines/processes/lifecycle/process.py: WorkerProcess.wait_ready",
            "engines/processes/lifecycle/process.py: _start_error",
            "engines/processes/transport/shared_memory.py: SharedMemory.share",
            "engines/processes/transport/shared_memory.py: check_available",
        }
    ),
    "Workers that end at a certain moment, interruptions and forks": frozenset(
        {
            "engines/processes/controller/backward.py: ReplicaBackward.send",
            "engines/processes/controller/client.py: WorkerClient._receive",
            "engines/processes/controller/client.py: WorkerClient.raise_lost_results",
            "engines/processes/controller/overlap.py: _finish_sum",
            "engines/processes/controller/replay.py: ReplayableCall._replay",
            "engines/processes/controller/rendezvous.py: CollectiveLog.exchange",
            "engines/processes/engine.py: ProcessesEngine._backward_in_caller",
            "engines/processes/lifecycle/process.py: WorkerProcess._check_owner",
            "engines/processes/lifecycle/watchdog.py: ReplyWatchdog.check",
            "engines/processes/transport/connection.py: Connection._check_process",
            "engines/rendezvous.py: Rendezvous.abort",
            "engines/thread_pool.py: ReplicaThreads.wait_idle",
            "engines/thread_pool.py: Task.cancel",
        }
    ),
    "Files of a project: modules that are replaced, wrappers that a file creates when it is imported": frozenset(
        {
            "engines/processes/lifecycle/pool.py: WorkerPool.__init__",
            "engines/processes/serialization/module_globals.py: _assign",
            "engines/processes/serialization/module_globals.py: ModuleGlobals._new_values",
            "engines/processes/serialization/module_globals.py: _replaced_error",
            "engines/processes/serialization/module_globals.py: apply_updates",
        }
    ),
    "Other classes of the same packages": frozenset(
        {
            "engines/processes/controller/forward.py: _argument_indices",
            "structure/types_distributions.py: _merge_values",
            "structure/types_distributions.py: _reconcile_attributes",
            "structure/types_hf.py: _check_not_quantized",
            "structure/types_hf.py: _merge_cache_leaves",
            "structure/types_pyg.py: _cat_dim",
            "structure/types_pyg.py: _check_adjacency",
            "structure/types_pyg.py: _narrow_block",
            "structure/types_pyg.py: _raise_merge_graph",
            "structure/types_pyg.py: _raise_split_graph",
            "structure/types_pyg_tensors.py: _shift_block",
        }
    ),
    "Batches that contradict an earlier call": frozenset(
        {
            "call/loss.py: Loss.mean_parts",
            "replicas/state/merge.py: StateMerger._merge_output",
            "structure/plan.py: Planner._infer_batch_size",
        }
    ),
    "The command line": frozenset({"cli/demo/corpus.py: load", "cli/main.py: positive"}),
}
"""Messages that users may see. The page lists them with the text of the source."""

INTERNAL: dict[str, frozenset[str]] = {
    "caught inside instep": frozenset(
        {
            "engines/processes/controller/client.py: WorkerClient._receive_reply",
            "engines/processes/controller/nccl_manager.py: NcclManager._send_join",
            "engines/processes/controller/nccl_reduction.py: GradientReduction._reduce_from",
            "engines/processes/controller/prepared.py: PreparedProcessRun._run_first",
            "engines/processes/controller/prepared.py: PreparedProcessRun._send_forward",
            "engines/processes/controller/prepared.py: _NoGroup.all_gather",
            "engines/processes/controller/prepared.py: _NoGroup.exchange",
            "engines/processes/controller/replies.py: wrap_stop_iteration",
            "engines/processes/controller/requests.py: RetryingRequest._send",
            "engines/processes/nccl/bucket_reducer.py: BucketReducer.finish",
            "engines/processes/nccl/group.py: NcclGroup._run",
            "engines/processes/nccl/group.py: NcclGroup.start_reduce.wait_for_sum",
            "engines/processes/nccl/group.py: NcclGroup.raise_if_aborted",
            "engines/processes/serialization/exceptions.py: _add_worker_traceback",
            "collectives/batch_norm.py: SharedResult.get",
            "collectives/batch_norm.py: normalize_differentiably",
            "collectives/batch_norm_kernels.py: CpuKernels.combine",
            "collectives/batch_norm_kernels.py: CudaKernels.combine",
            "engines/processes/controller/forward.py: ReplicaForward.send",
            "engines/processes/transport/cuda_ipc.py: CudaIpcChannel.read",
            "engines/processes/transport/cuda_ipc.py: open_shared",
            "engines/processes/worker/module.py: WorkerModule.prepare_replica",
            "engines/processes/worker/nccl_member.py: NcclMember._receive_broadcast",
            "engines/processes/worker/nccl_member.py: NcclMember._get_group",
            "engines/processes/worker/rendezvous.py: Inbox.receive_collective_result",
            "engines/processes/worker/rendezvous.py: WorkerRendezvous._exchange",
            "engines/rendezvous.py: Rendezvous.leave",
            "engines/thread_pool.py: TaskResults.collect",
            "probe/snapshot.py: Snapshot.__init__",
            "probe/sandbox.py: call_user_code",
            "replicas/caller_only.py: CallerOnly.__getattr__",
            "replicas/caller_only.py: CallerOnly._raise",
            "replicas/clone.py: Cloner._clone_object",
            "replicas/state/max_norm.py: merge_renormed_rows",
            "runtime/torch_private.py: replace_default_generator",
        }
    ),
    "repeats a message that a scenario shows": frozenset(
        {
            "engines/processes/controller/prepared.py: PreparedProcessRun._backward",
            "collectives/exchange.py: start_backward",
            "engines/base.py: add_replica_note",
            "engines/processes/worker/deferred_errors.py: DeferredErrors.record",
            "probe/probe.py: Probe._check_additive",
            "probe/probe.py: Probe._run_trial",
            "probe/probe.py: Probe.prepare",
            "probe/lines.py: _LineTrials._merge_state",
            "probe/readings.py: merge_message",
            "replicas/replica_set.py: ReplicaSet.renormed_values",
            "replicas/tensors.py: check_no_stray_gradients",
            "structure/split.py: unsplit",
        }
    ),
    "a reason in 'cannot merge', which a new trial of the batch usually replaces": frozenset(
        {
            "structure/verdicts.py: Verdict._reduce",
            "structure/verdicts.py: Verdict.merge",
            "structure/verdicts.py: _cat_shards",
            "structure/verdicts.py: _merge_constants",
        }
    ),
    "shows a defect of instep or of another program, not of the user's code": frozenset(
        {
            "call/transparent.py: Transparent.__getattr__",
            "engines/processes/controller/rendezvous.py: ControllerRendezvous.all_gather",
            "engines/processes/lifecycle/pool.py: WorkerPool._acquire",
            "engines/processes/serialization/pickler.py: UnpicklerMethod.__call__",
            "engines/processes/serialization/registry.py: CodeRegistry.get_object",
            "engines/processes/transport/connection.py: Connection._closed_error",
            "engines/processes/transport/connection.py: Connection._decode",
            "engines/processes/transport/connection.py: Connection._send_frame",
            "engines/processes/transport/connection.py: Connection.receive",
            "engines/processes/transport/connection.py: Connection.send",
            "engines/processes/transport/connection.py: _Header.unpack",
            "engines/processes/transport/connection.py: _encode_kind",
            "engines/processes/transport/shared_memory.py: RingReader.block",
            "engines/processes/transport/tensor_codec.py: decode_metadata",
            "engines/processes/transport/tensor_codec.py: encode_metadata",
            "engines/processes/transport/tensor_codec.py: read_tensor",
            "engines/processes/worker/rendezvous.py: WorkerRendezvous.all_gather",
            "engines/processes/worker/server.py: WorkerServer._forward_prepared",
            "engines/processes/worker/server.py: WorkerServer._group",
            "engines/select.py: choose_engine",
            "engines/thread_pool.py: ReplicaThreads.run",
            "structure/graph_arguments.py: _raise_merge",
            "structure/spec.py: argument_specs",
        }
    ),
}
"""Errors that users do not see, or see only as a part of another message."""

"""What a training step needs. Knows no engine, no device set, no strategy.

Modules, in reading order:

    footprint            what one step needs, as data; results that are kept by footprint
    tape                 the allocations of a traced step, in order
    step_parts           what each part of a step takes by itself
    fullest_moments      the fullest moments of a step for a share of the batch
    device_bytes         bytes on a device and on the host, by category
    cuda_overhead        CUDA context, cuBLAS, NCCL
    batch_scaling        the footprint at another batch size
    length_spread        how the sizes of a run's batches vary, and bytes with them
    allocation_recorder  allocations of this process while it is open
    storages             storages of tensors and their bytes
    allocator/           torch's caching allocator, and a step played on it
    fakes/               fake tensors, as CUDA would treat them
    kernels/             what an operation takes inside
    learned/             what earlier runs took
    trace/               the user's step under fake tensors
    work/                FLOPs and bytes of operations
"""

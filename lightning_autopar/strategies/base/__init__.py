"""What every engine shares. Knows no engine.

Modules, in reading order:

    engine_mixin        EngineMixin: what every engine adds to Lightning's strategy
    split_mixin         SplitMixin: ranks with parts of a batch, or with a shared network
    run_plan            RunPlan: all that a worker is told; how a run came from plan to plan
    strategy_protocol   what those that run a plan need of AutoParallelStrategy
    rank_measurement    seconds and bytes that a rank really used
    out_of_memory/      how much a rank may take, and what becomes of a batch for which it isn't enough
    resume              goes on exactly where a checkpoint was saved
    saved_modules       networks among the hyperparameters, whole in a checkpoint
    worker_exception    a worker's exception on its way to the parent; the user's part of a traceback
    host_optimizers     the user's optimizer on host memory
    trainer_loaders     the trainer's loaders under a plan; predictions in order
    process_group       joins the process group; waits for all ranks outside of a step
    refused_parameters  refuses sparse gradients, and parameters that come when the run has begun
    batch_rule          what the user's batch is to several devices
"""

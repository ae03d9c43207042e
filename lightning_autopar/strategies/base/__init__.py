"""What every engine shares. Knows no engine.

Modules, in reading order:

    mixin             EngineMixin: what every engine adds to Lightning's strategy
    run_plan          RunPlan: all that a worker is told
    run_host          what those that run a plan need of the user's strategy
    measure           seconds and bytes that a rank really used
    longer_batches    says where a batch is longer than planned for
    rerun             a batch that ran out of memory, run again in more parts
    running_step      where a rank is in a batch, and its step undone
    resume            goes on exactly where a checkpoint was saved
    plan_log          what loggers hear of plans and their changes
    worker_exception  a worker's exception on its way to the parent
    users_traceback   the user's part of a traceback
    gpu_limit         how much of a GPU a process may take
    host_optimizers   the user's optimizer on host memory
    loaders           the trainer's loaders under a plan; predictions in order
    process_group     joins the process group; waits for all ranks outside of a step
    new_parameters    refuses parameters that come when the run has begun
    batch_rule        what the user's batch is to several devices
"""

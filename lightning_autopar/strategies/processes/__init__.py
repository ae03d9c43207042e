"""Workers, and what passes between processes.

Modules, in reading order:

    worker              a forked worker; under Jupyter its output
    worker_supervisor   the workers of one plan, from fork to end
    agent_protocol      the protocol between agent and workers: counters, stops, files
    between_batches     a rank between two batches: snapshots, leaving, taking up
    failed_together     whether all ranks have failed at one place
    out_of_memory_exit  all ranks leave a step in which one runs out of memory
    idle_strategy       a strategy of the process that a run is started from
    external_launcher   processes that torchrun or Slurm started
    users_script        runs a user's script in this process
    stalled_workers     workers that will never come along again
    peer_watch          ends this process where a peer on this host is stopped or gone
    stack_dumps         where a worker is in its code, on request
    jupyter             a worker under a Jupyter kernel
    handover/           what one process hands to the next
"""

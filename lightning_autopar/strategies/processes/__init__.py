"""Workers, and what passes between processes.

Modules, in reading order:

    worker             a forked worker; under Jupyter its output
    worker_generation  the workers of one plan, from fork to end
    protocol           the protocol between agent and workers: counters, stops, files
    boundary           a rank between two batches: snapshots, leaving, taking up
    shortage           all ranks leave a step in which one runs out of memory
    idle_strategy      a strategy of the process that a run is started from
    external_launcher  processes that torchrun or Slurm started
    script             runs a user's script in this process
    stalls             workers that will never come along again
    peer_watch         ends this process where a peer on this host is stopped or gone
    whereabouts        where a worker is in its code, on request
    jupyter            a worker under a Jupyter kernel
    handover/          what one process hands to the next
"""

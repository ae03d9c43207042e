"""A device's memory: how much of it a rank may take, and what becomes of a batch for which it isn't enough.

Modules, in reading order:

    gpu_limit       how much of a GPU a process may take
    rerun           a training batch that ran out of memory, run again in more parts
    optimizer_step  the only device's optimizer's step, done again
    evaluations     the same for a batch of a validation or a test
    predictions     the same for a batch of a prediction
    running_step    where a rank is in a batch, and its step undone
"""

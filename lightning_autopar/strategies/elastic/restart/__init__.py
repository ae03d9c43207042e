"""Under torchrun and Slurm.

Modules, in reading order:

    restartable_run   an elastic run under torchrun and Slurm
    launcher_signals  SIGTERM and Slurm's signal, acted on between batches
    store_rendezvous  ranks meet by a key-value store
"""

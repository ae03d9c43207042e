"""Under torchrun and Slurm.

Modules, in reading order:

    restartable_run   an elastic run under torchrun and Slurm, and signals to it
    store_rendezvous  ranks meet by a key-value store
"""

"""Runs as others see them.

Modules, in reading order:

    folders     folders of runs that all users share
    status      a run's status and requests, as files
    requests    other runs listed, asked, cancelled
    own_status  what this run shows of itself
    progress    how far a run has come, in shared memory
"""

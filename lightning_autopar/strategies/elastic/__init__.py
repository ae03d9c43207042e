"""The agent and its snapshots.

Modules, in reading order:

    start_elastic_fit    an elastic `fit`, put together
    agent                keeps one generation at work; moves, parks, recovers
    run_state            how the run is, for those who watch it; devices that it avoids
    generation_progress  the generation at work
    snapshot_schedule    when a snapshot is made
    snapshot_store       where snapshots lie
    yielding             makes room for more important runs
    kept_leases          memory promised from plan to plan; a parked run's place
    restart/             under torchrun and Slurm
"""

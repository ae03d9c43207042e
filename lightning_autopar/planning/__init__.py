"""Which plan. Imports neither torch nor Lightning.

Modules, in reading order:

    make_report          from footprint, devices and constraints to the report; why the best is the best
    search               tries every configuration
    plan_cost            bytes and seconds of a plan, whether it fits, how plans are ordered
    enumerate_plans      which plans there are on which devices
    refusals             the sentences: why a plan, an engine or a feature is left out, and what memory it lacks
    fit_to_memory        fewer samples, micro-batches, recomputation where memory is short
    replayed_candidates  replays the best candidates' allocations
    advice               which one change would help
    plan_bytes           bytes by device and on the host: asks the engine for each rank
    plan_seconds         seconds of a step: asks the engine; seconds of single parts
    device_sets          sets of devices worth a look
    block_units          which blocks can be sharded or recomputed
    move_verdict         whether a running job stays, moves or parks
    what_if              the step as it would be with one thing changed
"""

"""Trials before the run: of the first batch in parts, and of engines.

Modules, in reading order:

    split_probe           does the loss survive a split batch
    shared_network_probe  which submodules ranks can share by rows, where it doesn't
    fewer_blocks          a module with few of its repeated blocks, for steps that are too long
    first_batch_parts     the first batch and its parts, made anew each time
    part_weights          what the parts of a batch weigh, where it isn't their samples
    nudged_weights        weights and counters away from where they start, while a step is tried
    own_functions         the user's autograd functions, whose gradients may not add up
    draw_probe            how random draws relate to samples
    kept_runs             how what runs of a step keep combines
    undo                  runs a step and undoes what it did
    engine_rehearsal      runs an engine on two forked ranks and compares
    recorded_backward     the losses of a step that is tried
    metric_trial          a module's metrics while the parts of a batch are tried
    optimizer_trial       an optimizer that has shards, or some parameters only, on small ones
"""

"""One stage of a step, recorded and cut.

Modules, in reading order:

    record          runs a step once and finds where it can be cut
    step_recorder   what is seen while it runs
    recording       what crosses each cut, as data
    outputs         what a block returns, in terms of its arguments
    taint           which tensors outside of blocks depend on parameters or draws
    skipped_blocks  blocks that a stage leaves out
    module_state    parameters, buffers and generators of a step; which are a stage's own
    block_router    hands blocks and hooks to the stage that runs
    stage_module    one stage of the user's own hook
"""

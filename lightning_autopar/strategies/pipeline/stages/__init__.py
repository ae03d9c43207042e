"""One stage of a step, recorded and cut.

Modules, in reading order:

    possible_cuts    runs a step once and finds where it can be cut
    step_recorder    what is seen while it runs
    cut_tensors      what crosses each cut, as data
    block_outputs    what a block returns, in terms of its arguments
    tainted_tensors  which tensors outside of blocks depend on parameters or draws
    module_state     parameters, buffers and generators of a step; which are a stage's own
    block_router     hands blocks and hooks to the stage that runs; blocks that a stage leaves out
    stage_module     one stage of the user's own hook
"""

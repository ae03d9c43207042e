"""The user's step under fake tensors.

Modules, in reading order:

    trace              a module's step under fake tensors gives its footprint
    tape_recorder      counts live storages operation by operation; where gradients are added in place
    block_figures      what was tracked, by block
    attribution        a tape gives bytes of each part
    find_blocks        finds a module's repeated blocks
    guessed_footprint  a coarse footprint where tracing fails
    first_batch        the first batch, drawn without worker processes
    bare_step          one step called without Lightning's loops; the trainer as the module sees it there
    step_number        notes which other steps would do something else
    no_writes          a trial's steps and hooks change no file
    parameter_use      what a step does with parameters besides calling the modules that hold them
    extra_tensors      tensors held by callbacks, attributes and optimizers
"""

"""Engine: FSDP2.

Modules, in reading order:

    engine              the contract for FSDP2
    memory              shards and gathered units at each moment
    timing              seconds of the units
    replay              a rank of FSDP2 plays the tape
    refusals            what of a Trainer's options shards don't survive
    rehearsal           can FSDP2 run this module
    strategy            FSDPEngine; optimizer kernels on shards
    whole_parameters    when parameters are gathered
    written_parameters  what somebody writes to a gathered parameter goes into its shards
"""

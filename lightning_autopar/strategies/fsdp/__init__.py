"""Engine: FSDP2.

Modules, in reading order:

    engine            the contract for FSDP2
    memory            shards and gathered units at each moment
    timing            seconds of the units
    tape_player       a rank of FSDP2 plays the tape
    refusals          what of a Trainer's options shards don't survive
    rehearsal         can FSDP2 run this module
    shard             fully_shard on the module's units, and back
    strategy          FSDPEngine; optimizer kernels on shards
    module_copies     copies that callbacks make of a sharded module
    same_collectives  all ranks gather the same units, and reduce the same gradients
    whole_parameters  when parameters are gathered; what somebody writes to one then goes into its shards
    whole_results     what hooks read, save and draw of a shard is the whole tensor's; what they compute with both at once
"""

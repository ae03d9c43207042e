"""Engine: DeepSpeed's ZeRO.

Modules, in reading order:

    engine              the contract for ZeRO
    refusals            what of a trainer or module DeepSpeed can't keep
    settings            DeepSpeed's settings, as data and as its configuration
    gather_groups       which parameters are gathered together
    memory              bytes on the device and the host
    timing              gathers and reductions on the lanes; Python calls
    rehearsal           can DeepSpeed run this module
    strategy            ZeroEngine; its precision plugins
    deepspeed_compat    the only imports of DeepSpeed's private names
    gradient_reduction  when gradients are reduced, and clipping
    partitions/         weights that DeepSpeed has partitioned
"""

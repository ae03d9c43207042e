"""Engine: stages.

Modules, in reading order:

    engine       the contract for pipelines
    refusals     what of a Trainer's options and of a module can't be run in stages
    plans        pipelines worth a prediction, and why there is none
    partition    bytes and seconds of every possible stage; where to cut
    schedules    the order of a rank's micro-batches
    memory       what each rank holds
    tape_player  a rank plays its stages' parts of the tape
    timing       a schedule played over uneven stages
    strategy     PipelineEngine
    rehearsal/   do stages compute the same
    run/         stages on several ranks
    stages/      one stage of a step, recorded and cut
    weights/     weights that lie on several ranks
"""

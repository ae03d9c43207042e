"""Stages on several ranks.

Modules, in reading order:

    torch_schedules  torch's pipelining schedules with our stages
    staged_step      one user's step through the stages
    stage_shapes     how a stage learns the shapes that it receives; all stages have the same batch and agree on overflow
    replicas         pipelines side by side
    stage_draws      random draws of a staged batch
"""

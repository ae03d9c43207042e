"""Weights that DeepSpeed has partitioned.

Modules, in reading order:

    optimizer_pieces  parts of parameters that the user's optimizer steps
    module            what DeepSpeed makes of a module; what it holds
    parameter_views   what the user sees of a partitioned parameter
    checkpoint_files  what Lightning asks about files; weights and states gathered
"""

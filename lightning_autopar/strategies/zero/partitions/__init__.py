"""Weights that DeepSpeed has partitioned.

Modules, in reading order:

    optimizer_pieces  parts of parameters that the user's optimizer steps
    module            what DeepSpeed makes of a module; what it holds
    parameter_views   what the user sees of a partitioned parameter
    gathered_state    weights and optimizer states gathered, loaded
    checkpoint_files  what Lightning asks about files
"""

"""Weights that DeepSpeed has partitioned.

Modules, in reading order:

    pieces            parts of parameters that the user's optimizer steps
    module            what DeepSpeed makes of a module; what it holds
    views             what the user sees of a partitioned parameter
    state             weights and optimizer states gathered, loaded
    checkpoint_files  what Lightning asks about files
"""

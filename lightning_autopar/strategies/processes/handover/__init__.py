"""What one process hands to the next.

Modules, in reading order:

    results        what a run leaves, for the parent
    carry          what a generation changed, for the next one; its loggers first
    carried_files  as two files
    run_objects    what a process of a run has besides weights
"""

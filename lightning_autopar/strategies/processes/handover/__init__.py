"""What one process hands to the next.

Modules, in reading order:

    back_to_script      what a run leaves, for the parent
    to_next_generation  what a generation changed, for the next one; its loggers first
    run_objects         what a process of a run has besides weights
"""

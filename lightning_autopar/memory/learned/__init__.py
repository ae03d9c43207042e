"""What earlier runs took.

Modules, in reading order:

    corrections     what earlier runs took corrects the next prediction
    memory_records  the file of these records; a module's hash
    step_times      step times of earlier runs and their file
    cache_files     small JSON files in the user's cache folder
"""

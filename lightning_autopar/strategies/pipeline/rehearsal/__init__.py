"""Do stages compute the same.

Modules, in reading order:

    stage_probe     can the steps run in stages, and where
    side_by_side    staged steps beside the whole module
    in_one_process  all stages in one process
    difference      what differs, in a sentence
"""

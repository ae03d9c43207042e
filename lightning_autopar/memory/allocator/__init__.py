"""Torch's caching allocator, and a step played on it.

Modules, in reading order:

    caching_allocator  torch's caching allocator, modelled, with any settings
    plain_allocator    the same for torch's own settings, in one fast loop
    options            `PYTORCH_CUDA_ALLOC_CONF`
    played_device      one device while a step is played on it
    tape_parts         the tape taken apart for a replay
    tape_player        a rank plays the tape
    replay             a rank's first steps on the modelled allocator; the engine gives the player
"""

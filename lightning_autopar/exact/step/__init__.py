"""Micro-batches, batch norm, recomputation.

Modules, in reading order:

    micro_batches      a batch in parts, gradients added up
    batch_norm         batch norm over the whole batch
    recompute          activation checkpointing of blocks
    initial_weights    initial weights drawn on the device, as plain Lightning draws them
    attribute_rules    how what a step keeps on its module grows with the samples
    kept_attributes    what steps keep on their module, held to what one device would keep
    step_rollback      what a step changes, put back where it fails half-way
    users_backward     backward passes that the user's code begins itself
    gradient_scaler    the scale of half precision's gradients in a part of a batch
    gradient_hooks     the user's hooks on parameters, called with the whole batch's gradient
    shared_network     a step whose network ranks share by rows, and whose rest each runs whole
"""

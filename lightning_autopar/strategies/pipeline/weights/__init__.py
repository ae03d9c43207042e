"""Weights that lie on several ranks.

Modules, in reading order:

    clipping_norms    gradient norms over stages; gradients of shared parameters
    gathered_weights  weights gathered whole, loaded in parts
    checkpoint_files  what Lightning asks about files; a module built once for all
    tensor_transfers  tensors between ranks of a pipeline
    module_building   a module that one rank has built for all, and one that is made whole again on every rank. Knows ranks, absent tensors
                      and tensors
"""

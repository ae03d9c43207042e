"""Weights that lie on several ranks.

Modules, in reading order:

    clipping_norms    gradient norms over stages; gradients of shared parameters
    gathered_weights  tensors between ranks of a pipeline; weights gathered whole
    checkpoint_files  what Lightning asks about files; a module that one rank has built for all, and one that is made whole again on
                      every rank
"""

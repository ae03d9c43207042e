"""Tensors whose values another rank has.

Modules, in reading order:

    absent_tensor  a tensor whose values another rank has
    rules          what may be done with one; its operators and words
"""

"""FLOPs and bytes of operations.

Modules, in reading order:

    work         FLOPs and bytes of operations
    operations   what is known of each operator, its kind among it
    calls        one call gives its kernels
    tally        the operations of a step, added up
    batch_sized  whether a tensor's size depends on the batch
"""

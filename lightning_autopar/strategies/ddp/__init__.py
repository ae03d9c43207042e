"""Engine: DDP and single.

Modules, in reading order:

    engine    the contract for one device, and for DDP
    memory    bytes of a whole copy and of DDP's buckets
    timing    buckets behind backward
    strategy  DDPEngine, SingleEngine
"""

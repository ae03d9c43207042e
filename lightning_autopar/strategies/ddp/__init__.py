"""Engine: DDP and single.

Modules, in reading order:

    engine    the contract for one device, and for DDP
    strategy  DDPEngine, SingleEngine
"""

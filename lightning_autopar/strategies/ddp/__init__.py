"""Engine: DDP and single.

Modules, in reading order:

    strategy  DDPEngine, SingleEngine
"""

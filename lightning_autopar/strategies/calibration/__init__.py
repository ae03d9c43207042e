"""Measuring this machine.

Modules, in reading order:

    calibration      which measurements are missing; makes them
    device_curves    operations of one device
    between_ranks    several ranks at once, and the host
    engine_overhead  what an engine adds to a step
    idle_devices     which devices may be measured now
"""

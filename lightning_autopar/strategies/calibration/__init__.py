"""Measuring this machine.

Modules, in reading order:

    calibration    which measurements are missing; makes them
    device_curves  operations of one device
    ranks          several ranks at once, and the host
    steps          what an engine adds to a step
    devices        which devices may be measured now
"""

"""How long a step takes. Knows no engine.

Modules, in reading order:

    rates            the contract of whoever knows how fast devices are; rates of devices that are slowed
    data_sheet       rates from the catalogue; seconds of one GPU kernel
    collectives      seconds of collectives by size and topology
    measured_curves  measured seconds by size, and their file
    measured_rates   rates from measurements, from the data sheet where there are none
    rank_compute     what a rank does by itself in a step
    overlap          computing and communication side by side: what is hidden
    step_seconds     seconds of a step by part; the base class of each engine's step
"""

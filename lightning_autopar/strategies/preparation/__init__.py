"""From a call of the trainer to a plan.

Modules, in reading order:

    module_findings    footprint, probe and each engine's finding; engines look at the first step
    split_findings     what a split batch changes, what evaluations log of it, and how its parts are made
    callback_copies    copies of the network that callbacks make, found out on fakes
    longest_footprint  the first batch's footprint becomes the longest one's
    trainer_options    which engines the Trainer's options rule out, and hooks that bring parameters late
    planning_inputs    the entrance: settings and findings become what a plan is searched by
    decision           Decision: the report and the run plan
    confirmed_plan     the best plan for any devices, confirmed by a rehearsal
    batch_size_finder  the size that BatchSizeFinder looks for
    more_parts         the same plan in more micro-batches, after memory ran out
    finished_run       figures are said and kept
    plain_run          does the user's own step fail by itself
"""

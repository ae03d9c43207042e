"""What makes a split batch one batch. Knows no plan search.

Modules, in reading order:

    reached_variables  what the user's functions reach: closures, globals, lists on classes
    absent/            tensors whose values another rank has
    data/              the exact loader
    logs/              logged values and metrics
    random/            states of all generators; draws of the whole batch, own rows kept
    step/              micro-batches, batch norm, recomputation
"""

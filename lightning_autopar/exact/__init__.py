"""What makes a split batch one batch. Knows no plan search.

Modules, in reading order:

    random_state       states of all random generators: captured, restored
    reached_variables  what the user's functions reach: closures, globals, lists on classes
    absent/            tensors whose values another rank has
    data/              the exact loader
    logs/              logged values and metrics
    step/              draws, micro-batches, batch norm, recomputation
"""

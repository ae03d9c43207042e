"""The exact loader.

Modules, in reading order:

    loader           the exact loader: the user's batches cut for one rank, resumable
    loader_pass      one pass over it; the user's data code as one device would run it
    batch_order      the order of the batches
    rank_share       a rank's rows of a batch, and who gets which
    counted_entries  what a loss may be a mean over, other than samples: entries that a batch counts
    pass_record      the record of a pass, for checkpoints; the random states of workers
    collate          what a rank's loader collates: its own samples, or the whole batch; tried on some
    batch_structure  the rows of a collated batch
    fingerprint      a number that tells batches apart, equal in every process
    loader_calls     what of the module a loader calls to make a batch
    longest_batch    the longest batch of a loader, as samples picked at random show it
    unlike_samples   samples with a mask, a gap or a label that the first batch has not
"""

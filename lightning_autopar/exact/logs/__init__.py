"""Logged values and metrics.

Modules, in reading order:

    self_log            `self.log` of the whole batch, the same on every rank
    combined_values     logged values and how parts make a whole; Lightning's result collections
    log_rules           found by comparison: how parts make a whole
    logging_hooks       hooks around steps in which something may read a logged value
    rank_exchange       one small collective for all logged values
    metrics_over_ranks  torchmetrics over ranks, parts and stages
    metrics_over_parts  torchmetrics over the parts of a batch and over stages
    metrics_of_values   torchmetrics that count batches: of a loss, not of samples
    kept_by_hooks       hooks that may keep what they get of a batch
"""

"""Callbacks that a user adds to a Trainer: what a run under autopar can tell, and be asked."""

"""What must survive a change of plan: the order of the data, the random draws, the training state."""

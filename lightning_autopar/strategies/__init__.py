"""How a plan is executed: engines, their launcher, and what keeps a split batch the batch of one device."""

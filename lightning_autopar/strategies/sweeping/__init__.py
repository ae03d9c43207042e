"""A sweep: several runs of scripts, each its own process, placed on the devices so that the last is over soonest. Imports no torch."""

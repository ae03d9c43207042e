"""Whether the planner chooses well: scenarios, runs of every plan, and what a fixed rule would have got."""

"""A referee for the planner's search: random cases, and every plan that can be written down for them."""

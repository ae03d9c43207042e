"""The user's own step in stages: how it is recorded, cut, replayed and checked. Knows no schedule and no process group."""

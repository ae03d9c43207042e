"""What is there (inventory) and what is needed (footprint). Knows nothing of planning, strategies or callbacks."""

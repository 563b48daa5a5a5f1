"""The planner of swapping and recomputing: knows no torch."""

"""The planner of swapping and recomputing; imports no torch."""

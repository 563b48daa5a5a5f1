"""What to keep, swap and recompute: solved without torch."""

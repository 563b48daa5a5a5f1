"""One forward of a region, and its recompute pass."""

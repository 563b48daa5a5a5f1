"""Tests of one forward of a region and its recompute pass."""
